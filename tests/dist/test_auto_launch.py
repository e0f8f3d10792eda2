"""Several devices on the command line, without a launcher: L4, L6, L11 to L13, B2 and B4 of the contract."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

import train
from models import families
from models.build import check_launchable
from models.families import YOLOV5
from tests.common import PROJECT
from tests.dist.conftest import marked_processes
from tests.dist.launch import free_port, torchrun
from tests.runs import differences, flags, launch, make_data, results
from utils.config.flags import TrainConfig
from utils.core.errors import UserError
from utils.torch_utils import load_checkpoint, save_checkpoint

LIMIT = 600.0  # seconds; a healthy run takes 10
SOON = 15.0  # seconds to the end of all processes after one has failed; it takes 3 on an idle machine
EPOCHS = 2
TMP = "temporary"
AUTOMATIC = "--batch-size -1 on cpu is not measured: 4 images over all ranks\n"

# In rank RANK, as it opens an image to train on after the first checkpoint was saved. Python imports this as it starts.
SABOTAGE = """
import os, signal, sys, time

def sabotage(kind, arguments):
    global done
    if done or kind != "open" or "/images/train/" not in str(arguments[0]) or not os.path.exists(last):
        return
    done = True
    with open(note, "w") as file:
        file.write(str(time.time()))
    if what == "raise":
        raise RuntimeError("broken on purpose")
    elif what == "leave":
        os._exit(0)
    else:
        whom, number = what.split("-")
        os.kill(os.getppid() if whom == "launcher" else os.getpid(), getattr(signal, number))

rank, what, last, note = os.environ.get("SABOTAGE", "- - - -").split()
done = os.environ.get("RANK") != rank
sys.addaudithook(sabotage)
"""


class Ended(NamedTuple):
    """A run of train.py that has come to an end.

    Attributes:
        status: of the launcher.
        stdout: of all processes.
        stderr: of all processes.
        noted: seconds from the start to the sabotage, if there is one.
        seconds: from the start to the end of the last process.
        left: what is in the folder for temporary files.
    """

    status: int
    stdout: str
    stderr: str
    noted: float
    seconds: float
    left: list[str]

    @property
    def lines(self) -> list[str]:
        return self.stderr.splitlines()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def line(data: Path, folder: Path, more: str = "") -> list[str]:
    own = f"--device cpu,cpu --epochs {EPOCHS} --cache off --batch -1 --nbs 5"  # 5 is no multiple of 2
    return flags(data, folder / "runs", f"{own} {more}")


def run(arguments: list[str], folder: Path, sabotage: str = "", script: str = "train.py") -> Ended:
    """Run a script with a folder of its own for temporary files, to the end of all of its processes.

    Args:
        arguments: its command line.
        folder: has or gets ``runs``, and the temporary files.
        sabotage: rank and what it does: "raise", "leave" (with status 0), or a signal for itself or for its launcher.
        script: of the project.
    """
    note, tmp = folder / "note", folder / TMP
    tmp.mkdir(exist_ok=True)
    own = {"TMPDIR": str(tmp), "XDG_CACHE_HOME": str(folder / "cache")}  # there also for a user without a home
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    if sabotage:
        (folder / "sitecustomize.py").write_text(SABOTAGE)
        environment |= {"PYTHONPATH": str(folder), "SABOTAGE": f"{sabotage} {folder}/runs/run/weights/last.pt {note}"}
    start = time.time()
    done = subprocess.run(
        [sys.executable, str(PROJECT / script), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while sabotage and marked_processes() and time.time() - start < LIMIT:
        time.sleep(0.05)
    end = time.time()
    noted = float(note.read_text()) - start if sabotage else 0.0
    return Ended(done.returncode, done.stdout, done.stderr, noted, end - start, left_in(folder))


def left_in(folder: Path) -> list[str]:
    """Temporary files of ours."""
    return sorted(path.name for path in (folder / TMP).iterdir() if path.name.startswith("lockstep"))


# --- runs that succeed -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """The same command twice at the same time, in the same folder."""
    folder = tmp_path_factory.mktemp("pair")
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: run(line(data, folder), folder), range(2)))
    return folder, [ended._replace(left=left_in(folder)) for ended in both]  # the first saw files of the other


@pytest.mark.lowest
def test_two_runs_at_once(pair: tuple[Path, list[Ended]]) -> None:
    """L4, L11, B4: each takes a free port and a folder of its own, and one of its processes speaks."""
    folder, both = pair
    for ended in both:
        assert ended.status == 0, ended.stderr
        assert ended.stdout.count("ranks       2 on this machine, joined by Gloo") == 1
        assert ended.stdout.count(AUTOMATIC) == 1
        assert ended.stdout.count("batch       4 images = 2 x 2") == 1
        assert len(re.findall(r"^\d/2 100%", ended.stderr, re.MULTILINE)) == EPOCHS, "one line of progress an epoch"
        warnings = re.findall("WARNING: .*", ended.stdout + ended.stderr)
        assert [text[:49] for text in warnings] == ["WARNING: 6 of the run's 6 batches are warm-up, so"]
        assert ended.left == []
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["run", "run2"]
    assert (folder / "runs/run/results.csv").read_bytes() == (folder / "runs/run2/results.csv").read_bytes()


@pytest.mark.slow
def test_as_under_torchrun(data: Path, pair: tuple[Path, list[Ended]], tmp_path: Path) -> None:
    """L4, B4: the workers do what the ranks of a launcher do, bit for bit; the batch is found by rank 0 for all.

    R6: several ranks train without graph and profiler, and say so once.
    """
    own = line(data, tmp_path, "--cuda-graph --profile")
    done = torchrun([PROJECT / "train.py", *own], 2, port=free_port(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(AUTOMATIC) == 1
    assert done.stdout.count("cuda graph  off: 2 ranks ") == done.stdout.count("cuda graph") == 1
    assert done.stdout.count("WARNING: --profile is ignored: ") == done.stdout.count("WARNING") == 1
    assert not (tmp_path / "runs/run/profile").exists()
    launched, theirs = pair[0] / "runs/run", tmp_path / "runs/run"
    assert (launched / "results.csv").read_bytes() == (theirs / "results.csv").read_bytes()
    a, b = (load_checkpoint(folder / "weights/last.pt") for folder in (launched, theirs))
    assert [differences(a[key], b[key]) for key in ("model", "ema", "optimizer", "state")] == [[]] * 4


@pytest.mark.slow
def test_val(data: Path, pair: tuple[Path, list[Ended]], tmp_path: Path) -> None:
    """L4: val.py starts workers as well: the figures are those of the training, and a worker that fails is named."""
    weights = pair[0] / "runs/run/weights/best.pt"
    line = f"--data {data} --weights {weights} --img 64 --batch 4 --workers 0 --device cpu,cpu --project {tmp_path}/val"
    good = run(line.split(), tmp_path, script="val.py")
    assert good.status == 0, good.stderr
    table = re.findall(r"^ +(?:all|blue|red) .+\n", pair[1][0].stdout, re.MULTILINE)[-3:]
    assert "".join(table) in good.stdout
    assert good.stderr == ""

    (tmp_path / "runs/run/weights").mkdir(parents=True)
    (tmp_path / "runs/run/weights/last.pt").touch()
    bad = run([*line.split(), "--task", "train"], tmp_path, "1 raise", script="val.py")
    assert bad.status == 1
    assert bad.lines[-1] == "rank 1 failed with status 1; all other ranks were ended"
    assert good.left == bad.left == []


# --- runs that fail --------------------------------------------------------------------------------------------------


def sabotaged(data: Path, folder: Path, sabotage: str) -> Ended:
    ended = run(line(data, folder), folder, sabotage)
    assert len(results(folder / "runs/run")) == 1, "it happened in the second epoch"
    assert ended.seconds - ended.noted < max(SOON, ended.noted), "or as fast as they started, on a busy machine"
    return ended


def going_on(folder: Path) -> str:
    return f"go on with: python {PROJECT / 'train.py'} --resume {folder / 'runs/run'}"


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=(pytest.mark.slow, pytest.mark.gate))]
)
def test_a_worker_raises(data: Path, tmp_path: Path, rank: int) -> None:
    """L13: its traceback, its rank and how to go on are the last to be read, and nothing else is said of it."""
    ended = sabotaged(data, tmp_path, f"{rank} raise")
    assert ended.status == 1
    assert ended.lines[-3:] == [
        "RuntimeError: broken on purpose",
        f"rank {rank} failed with status 1; all other ranks were ended",
        going_on(tmp_path),
    ]
    assert ended.stderr.count("Traceback") == ended.stderr.count("broken on purpose\n") == 1
    assert re.search(r'train\.py", line \d+, in train_epoch\n', ended.stderr)
    assert ended.left == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_is_killed(data: Path, tmp_path: Path, rank: int) -> None:
    """L13: said with its rank; that others lost their peer is not what the user reads."""
    ended = sabotaged(data, tmp_path, f"{rank} worker-SIGKILL")
    assert ended.status == 128 + signal.SIGKILL
    assert ended.lines[-2:] == [
        f"rank {rank} was killed by SIGKILL; if nobody did that, the machine ran out of memory; all other ranks were "
        "ended",
        going_on(tmp_path),
    ]
    assert "Traceback" not in ended.stderr
    assert ended.left == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_leaves(data: Path, tmp_path: Path, rank: int) -> None:
    """L13: status 0 in the middle of a run is no success."""
    ended = sabotaged(data, tmp_path, f"{rank} leave")
    assert ended.status == 1
    assert ended.lines[-3:] == [
        "another rank left in the middle of the run, without an error of its own",
        f"rank {1 - rank} failed with status 1; all other ranks were ended",
        going_on(tmp_path),
    ]
    assert ended.left == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
)
def test_the_launcher_is_stopped(data: Path, tmp_path: Path, name: str) -> None:
    """L13: Ctrl-C, and what a scheduler or a closed terminal sends, end all processes; the run can go on."""
    ended = sabotaged(data, tmp_path, f"0 launcher-{name}")
    assert ended.status == 143
    by = "Ctrl-C" if name == "SIGINT" else name
    assert ended.lines[-2:] == [f"stopped by {by}", going_on(tmp_path)]
    assert ended.stderr.count("stopped by") == 1
    assert ended.left == []


@pytest.mark.gate
@pytest.mark.slow
def test_the_launcher_is_killed_and_the_run_resumed(data: Path, pair: tuple[Path, list[Ended]], tmp_path: Path) -> None:
    """L13: workers end with a launcher that can't end them. L4: ``--resume`` starts as many again, by itself."""
    ended = sabotaged(data, tmp_path, "1 launcher-SIGKILL")
    assert ended.status == -signal.SIGKILL
    assert re.fullmatch(r"\['lockstep-launch-\d+-\w+'\]", str(ended.left)), "nobody was there to remove it"

    resumed = run(["--resume", str(tmp_path / "runs/run")], tmp_path)
    assert resumed.status == 0, resumed.stderr
    assert resumed.stdout.count("resuming from ") == 1
    assert "ranks       2 on this machine, joined by Gloo" in resumed.stdout
    assert resumed.left == [], "the next launcher has removed it"
    assert (tmp_path / "runs/run/results.csv").read_bytes() == (pair[0] / "runs/run/results.csv").read_bytes()


# --- mistakes --------------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        train.main(list(arguments))
    return str(error.value)


def test_gpus_that_are_not_there(data: Path, tmp_path: Path) -> None:
    """L6: what was asked for, and what there is; as the first thing that is read."""
    count = torch.cuda.device_count()
    wanted = f"{count},{count + 1}"
    done = launch(*flags(data, tmp_path / "runs", f"--device {wanted}"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    here = ", ".join([*(f"cuda:{i}" for i in range(count)), *["mps"] * torch.backends.mps.is_available(), "cpu"])
    assert done.stderr == (
        f"error: --device {wanted!r} asks for cuda:{count + 1}, which this machine does not have; here are: {here}\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_batch_that_cannot_be_shared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """B2: before any data is read and any worker started."""
    data = make_data(tmp_path / "data", count=4)
    arguments = flags(data, tmp_path / "runs", "--batch 6 --device cpu,cpu,cpu,cpu")
    assert refused(*arguments) == (
        "--batch-size 6 is the batch of all processes together and must be a positive multiple of their number, 4; use "
        "4 or 8"
    )
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in data.parent.iterdir()) == ["data.yaml", "images", "labels"]
    assert not (tmp_path / "runs").exists()


ALONE_ONLY = dataclasses.replace(YOLOV5, name="alone_only", launchable=False)


@pytest.mark.parametrize("by", ["cfg", "weights", "resume"])
def test_a_family_that_cannot_be_launched(
    data: Path, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """L12: it is said what to do instead; nothing trains on one device."""
    monkeypatch.setitem(families.FAMILIES, ALONE_ONLY.name, ALONE_ONLY)
    spec = {**yaml.safe_load((PROJECT / "models/yolov5n.yaml").read_text()), "family": ALONE_ONLY.name}
    (tmp_path / "net.yaml").write_text(yaml.safe_dump(spec))
    save_checkpoint({"model": {}, "spec": spec}, tmp_path / "net.pt", keep_previous=False)
    says = "--device cpu,cpu names 2 devices, but no workers can be started for networks of the family alone_only"
    if by == "resume":
        with pytest.raises(UserError, match=says):
            check_launchable(TrainConfig(device="cpu,cpu"), {"spec": spec}, 2)
        return
    message = refused(*line(data, tmp_path, f"--{by} {tmp_path}/net.{'yaml' if by == 'cfg' else 'pt'}"))
    assert re.match(says, message), message
    assert "\n  python -m torch.distributed.run --nproc_per_node 2 train.py ..." in message
    assert "\n  python -m torch.distributed.run --nproc_per_node 2 my_script.py " in message
    assert "YOLO(...).train(...)" in message
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_mistake_that_workers_find(tmp_path: Path) -> None:
    """It is said once, with all others, and by nobody else."""
    ended = run(flags(Path("nowhere.yaml"), tmp_path / "runs", "--device cpu,cpu --weights none.pt --hyp no"), tmp_path)
    assert ended.status == 2
    assert ended.lines[0] == "error: 3 problems"
    assert [text.split()[:2] for text in ended.lines[1:]] == [["-", "--hyp"], ["-", "--data"], ["-", "--weights"]]
    assert ended.left == []
