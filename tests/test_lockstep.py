"""Training from Python: L5, L8, L9, L13, L14 of the contract, in scripts as users write them."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from lockstep import START, YOLO
from models import families
from tests.callback_runs import Failing
from tests.common import PROJECT
from tests.dist.conftest import marked, marked_processes, nothing_left  # noqa: F401 - fixtures
from tests.dist.launch import free_port, torchrun
from tests.runs import make_data
from tests.test_detect import checkpoint
from utils.config.command_line import given_keywords
from utils.config.flags import TrainConfig, ValConfig
from utils.core.errors import UserError
from utils.core.seeds import choices_kept
from utils.dist.job_files import JOB, job_folder, read_job, write_job
from utils.run.callbacks import Callback
from utils.torch_utils import load_checkpoint, save_checkpoint

SLOW = pytest.mark.slow
LIMIT = 600.0  # seconds; a healthy script takes 30 at most
SOON = 15.0  # seconds to the end of all processes after one has failed; it takes 3 on an idle machine
CALL = 'imgsz=64, batch=4, workers=0, noplots=True, project="runs", name="run"'

# A module beside the user's script.
BESIDE = """
import os, signal, time
from lockstep import Callback

class Notes(Callback):
    def __init__(self, path, extra=None):
        self.path, self.extra, self.pid = path, extra, os.getpid()

    def on_train_end(self, event):
        with open(self.path, "a") as file:
            print(os.getpid() != self.pid, os.environ.get("RANK"), event.run_dir, self.extra, file=file)

class Failing(Callback):
    def on_epoch_end(self, event):
        raise LookupError("broken on purpose")

class Ending(Callback):  # of whichever process; the run would go on for a long time
    def __init__(self, whom, number, note):
        self.whom, self.number, self.note, self.script = whom, number, note, os.getpid()

    def on_epoch_end(self, event):
        if not os.path.exists(self.note):
            print("last words")
            with open(self.note, "w") as file:
                file.write(str(time.time()))
            if self.number is None:
                os._exit(0)
            os.kill({"script": self.script, "launcher": os.getppid(), "worker": os.getpid()}[self.whom], self.number)
"""

# What a call must leave as it was.
STATE = """
import os, random, signal, sys, threading
import numpy as np, torch

def state():
    keys = np.random.get_state()
    return {
        "environment": dict(os.environ), "folder": os.getcwd(), "path": list(sys.path), "argv": list(sys.argv),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "random": (random.getstate(), keys[1].tolist(), keys[2:], torch.get_rng_state().tolist()),
        "kernels": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark, torch.get_num_threads(), torch.get_default_dtype(),
        ),
        "group": torch.distributed.is_initialized(),
        "children": open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read() if sys.platform == "linux" else "",
    }
"""


class Done(NamedTuple):
    """A script that has come to its end.

    Attributes:
        status: of the script.
        stdout: of all processes.
        stderr: of all processes.
        noted: seconds from the start to the sabotage, if there is one.
        seconds: from the start to the end of the last process.
    """

    status: int
    stdout: str
    stderr: str
    noted: float
    seconds: float


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def write_script(folder: Path, code: str) -> Path:
    """Write script.py and what is beside it; in its lines CALL stands for flags of a short run."""
    (folder / "beside.py").write_text(BESIDE)
    (folder / "state.py").write_text(STATE)
    (folder / "tmp").mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(textwrap.dedent(code).replace("CALL", CALL))
    return path


def environment(folder: Path, data: Path) -> dict[str, str]:
    own = {"PYTHONPATH": str(PROJECT), "TMPDIR": str(folder / "tmp"), "DATA": str(data), "OMP_NUM_THREADS": "1"}
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **own}


def run(folder: Path, data: Path, code: str, *command: str, typed: str = "") -> Done:
    """Run a script as a user would, to the end of all processes, and see that it leaves none of our files behind.

    Args:
        folder: where it is and runs.
        data: data YAML, in its environment as DATA.
        code: of the script.
        command: behind ``python``; by default the script.
        typed: on stdin.
    """
    path, start = write_script(folder, code), time.time()
    done = subprocess.run(
        [sys.executable, *(command or [path.name])],
        cwd=folder, env=environment(folder, data), input=typed, capture_output=True, text=True, timeout=LIMIT,
        check=False, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while marked_processes() and time.time() - start < LIMIT:
        time.sleep(0.05)
    assert left_in(folder) == [], done.stderr
    end, note = time.time(), folder / "note"
    noted = float(note.read_text()) - start if note.exists() else 0.0
    return Done(done.returncode, done.stdout, done.stderr, noted, end - start)


def left_in(folder: Path) -> list[str]:
    """Temporary files of ours; PyTorch has a cache of its own there."""
    return sorted(path.name for path in (folder / "tmp").iterdir() if path.name.startswith("lockstep"))


# --- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.lowest
@pytest.mark.slow
@pytest.mark.gate
def test_script_without_guard(data: Path, tmp_path: Path) -> None:
    """L5, L8: three runs in one process, one of which fails; what they leave behind is weights and nothing else."""
    (tmp_path / "fast.yaml").write_text("warmup_epochs: 0\n")
    done = run(tmp_path, data, """
        import contextlib, io, os, pathlib
        import numpy as np, torch
        import lockstep
        from beside import Failing
        from lockstep import YOLO
        from state import state

        def boxes(model):
            return np.concatenate([found.boxes for found in model.predict(images, conf_thres=0.001, imgsz=64)])

        print("imported by", os.getpid())
        data = pathlib.Path(os.environ["DATA"])
        images = data.parent / "images/val"
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        before = state()

        model = YOLO("yolov5n.yaml")
        first = model.train(data=data, epochs=1, device="cpu", CALL)
        assert state() == before, "a run in this process"
        own = boxes(model)
        assert len(own) and np.array_equal(own, boxes(YOLO(first.best)))

        try:
            model.train(data=str(data), epochs=3, device="cpu,cpu", callbacks=[Failing()], CALL)
        except lockstep.TrainingError as error:
            print("caught", error)
        assert state() == before, "a run that failed"
        assert np.array_equal(own, boxes(model)), "the weights are still those of before"

        with contextlib.redirect_stdout(io.StringIO()) as said:
            second = model.train(data=data, epochs=2, device=["cpu", "cpu"], hyp=pathlib.Path("fast.yaml"), CALL)
        assert state() == before, "a run in workers"
        print("said", "ranks       2 on this machine" in said.getvalue(), "349 tensors taken" in said.getvalue())
        flags = pathlib.Path(second.run_dir, "opt.yaml").read_text()
        assert f"weights: {first.best}\\n" in flags, "its own file, not that of the job"
        got = boxes(model)
        assert len(got) and not np.array_equal(got, own), "it has learned something"
        assert np.array_equal(got, boxes(YOLO(second.best)))

        again = model.val(data=data, imgsz=64, batch=4, project="runs", workers=0)
        assert again.rows == second.rows and again.map == second.map and state() == before
        model.save("own.pt")
        assert np.array_equal(got, boxes(YOLO("own.pt")))
        print([run.run_dir.name for run in (first, second)], second.rows[0]["name"], model.names)
    """)  # fmt: skip
    assert done.status == 0, done.stderr
    assert done.stdout.count("imported by") == 1, "the script runs once"
    caught = done.stdout.split("caught ")[1]
    assert caught.startswith("Traceback (most recent call last):\n")
    assert "\nLookupError: broken on purpose\nrank 0 failed with status 1; all other ranks were ended\n" in caught
    assert done.stderr.count("Traceback") == 0
    lines = done.stdout.splitlines()
    assert "said True True" in lines
    assert lines[-1] == "['run', 'run3'] all ['blue', 'red']"


@SLOW
@pytest.mark.gate
def test_script_with_guard(data: Path, tmp_path: Path) -> None:
    """L5, L8: callbacks of classes in the script and beside it, what they hold included; arguments of the script."""
    done = run(tmp_path, data, """
        import argparse, dataclasses, os
        from beside import Notes
        from lockstep import YOLO, Callback

        parser = argparse.ArgumentParser()
        parser.add_argument("--mine", required=True)
        mine = parser.parse_args().mine
        print("imported for", mine)

        @dataclasses.dataclass
        class Extra:
            word: str

        class Own(Notes):
            pass

        if __name__ == "__main__":
            callbacks = [Notes("notes.txt", Extra("beside")), Own("notes.txt", "own")]
            results = YOLO("yolov5n.yaml").train(
                data=os.environ["DATA"], epochs=1, device="cpu,cpu", callbacks=callbacks, CALL
            )
            print("done", results.run_dir.name, [callback.extra for callback in callbacks])
    """, "script.py", "--mine", "yes")  # fmt: skip
    assert done.status == 0, done.stderr
    assert (tmp_path / "notes.txt").read_text().splitlines() == [
        "True 0 runs/run Extra(word='beside')",
        "True 0 runs/run own",
    ]
    assert done.stdout.count("imported for yes") == 3, "here and in both workers"
    assert done.stdout.endswith("done run [Extra(word='beside'), 'own']\n")


@pytest.mark.slow
def test_class_in_a_script_without_guard(data: Path, tmp_path: Path) -> None:
    """L8: it stops once, in the caller's own terminal, and is told how to write it."""
    done = run(tmp_path, data, """
        import os
        from lockstep import YOLO, Callback

        class Own(Callback):
            pass

        print("imported", __name__)
        YOLO("yolov5n.yaml").train(data=os.environ["DATA"], epochs=1, device="cpu,cpu", callbacks=[Own()], CALL)
        print("unreached")
    """)  # fmt: skip
    assert done.status == 1
    first, *others = done.stdout.splitlines()
    assert first == "imported __main__"
    assert others in (["imported __mp_main__"], ["imported __mp_main__"] * 2), "the first worker's word ends the second"
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith(
        "utils.core.errors.UserError: a callback is defined in the script that trains, so every worker imports that "
        "script, and the training in it must not start again: put it behind a guard\n\n"
        '    if __name__ == "__main__":\n'
        '        YOLO(...).train(..., device="0,1")\n\n'
        "or move the callback's class to a module of its own\n"
    )
    assert not (tmp_path / "runs").exists()


@SLOW
def test_script_that_ends_as_it_is_imported(data: Path, tmp_path: Path) -> None:
    """L8: that is said as well."""
    done = run(tmp_path, data, """
        import os, sys
        from lockstep import YOLO, Callback

        class Own(Callback):
            pass

        if __name__ != "__main__":
            sys.exit(2)
        YOLO("yolov5n.yaml").train(data=os.environ["DATA"], epochs=1, device="cpu,cpu", callbacks=[Own()], CALL)
    """)  # fmt: skip
    assert done.status == 1
    assert "and there it ended the process (sys.exit(2)): put it behind a guard\n" in done.stderr


@SLOW
def test_module_as_a_script(data: Path, tmp_path: Path) -> None:
    """L8: ``python -m package.script``."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/own.py").write_text(
        "import os\nfrom lockstep import YOLO\nfrom .names import NAME\nfrom beside import Notes\n"
        "class Own(Notes):\n    pass\n"
        'if __name__ == "__main__":\n    YOLO("yolov5n.yaml").train(data=os.environ["DATA"], epochs=1, '
        f'device="cpu,cpu", callbacks=[Own(NAME)], {CALL})\n'
    )
    (tmp_path / "package/names.py").write_text('NAME = "notes.txt"\n')
    done = run(tmp_path, data, "", "-m", "package.own")
    assert done.status == 0, done.stderr
    assert (tmp_path / "notes.txt").read_text() == "True 0 runs/run None\n"


SESSION = """
import os
from beside import Notes
from lockstep import YOLO, Callback
class Own(Callback): pass

try: YOLO("yolov5n.yaml").train(data="none.yaml", device="cpu,cpu", callbacks=[Own()])
except ValueError as error: print("caught", error)

results = YOLO("yolov5n.yaml").train(
    data=os.environ["DATA"], epochs=1, device="cpu,cpu", callbacks=[Notes("notes.txt")], CALL)
print("done", results.run_dir.name)
""".replace("CALL", CALL)


def assert_session(text: str, folder: Path) -> None:
    """Both cells have said what they should."""
    assert "caught callbacks[0] is of type Own (__main__) and can't travel to the processes of a run on several" in text
    assert "the class Own, defined in a session (REPL, notebook) and not in a file" in text
    assert text.count("ranks       2 on this machine") == 1
    assert text.rstrip().endswith("done run")
    assert (folder / "notes.txt").read_text() == "True 0 runs/run None\n"


@SLOW
@pytest.mark.parametrize("kind", ["-c", "-i"])
def test_interactive(data: Path, tmp_path: Path, kind: str) -> None:
    """L5, L9: ``python -c`` and what is typed."""
    done = run(tmp_path, data, "", "-c", SESSION) if kind == "-c" else run(tmp_path, data, "", "-i", typed=SESSION)
    assert done.status == 0, done.stderr
    assert_session(done.stdout, tmp_path)


NOTEBOOK = """
import json, sys
import nbclient, nbformat
from nbformat import v4
cells = [v4.new_code_cell(cell) for cell in json.load(open("cells.json"))]
notebook = v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
json.dump([[output.get("text", str(output)) for output in cell.outputs] for cell in cells], open("outputs.json", "w"))
"""


@SLOW
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))), reason="needs a notebook server")
def test_notebook(data: Path, tmp_path: Path) -> None:
    """L5, L9: what workers say stands below the cell."""
    (tmp_path / "cells.json").write_text(json.dumps(SESSION.strip().split("\n\n")))
    done = run(tmp_path, data, NOTEBOOK)
    assert done.status == 0, done.stderr
    first, second, third = json.loads((tmp_path / "outputs.json").read_text())
    assert first == []
    assert_session("".join([*second, *third]), tmp_path)


RANKS = """
    import hashlib, json, os
    import torch
    from lockstep import YOLO
    from state import state

    def digest(model):
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()

    def main():
        model, before = YOLO("yolov5n.yaml"), state()
        runs = []
        for more in ({"batch": -1, "nbs": 5}, {"batch": 4}):  # the second one starts from the weights of the first
            flags = dict(imgsz=64, workers=0, noplots=True, project="runs", name="run", data=os.environ["DATA"])
            results = model.train(epochs=1, **flags, **more)
            best = YOLO(results.best).model
            runs.append([results.rows, results.fitness, str(results.run_dir), digest(model.model), digest(best)])
            assert state() == before
        with open(f"rank {os.environ['RANK']}.json", "w") as file:
            json.dump({"runs": runs, "device": str(next(model.model.parameters()).device)}, file)

    GUARD
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":'])
def test_script_under_torchrun(data: Path, tmp_path: Path, guard: str) -> None:
    """L14, B4: it is a rank and starts nothing; all ranks get the same results and have the best weights loaded."""
    path = write_script(tmp_path, RANKS)
    path.write_text(path.read_text().replace("GUARD\nmain", f"{guard}\n    main" if guard else "main"))
    done = torchrun([path], 2, port=free_port(), cwd=tmp_path, env=environment(tmp_path, data), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank {rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    for rows, fitness, _, own, best in first["runs"]:
        assert [row["name"] for row in rows] == ["all", "blue", "red"]
        assert 0 <= fitness <= 1
        assert own == best
    assert [run[2] for run in first["runs"]] == ["runs/run", "runs/run2"]
    assert first["runs"][0][3] != first["runs"][1][3]
    assert done.stdout.count("ranks       2 on this machine, joined by Gloo") == 2
    assert done.stdout.count("--batch-size -1 on cpu is not measured: 4 images over all ranks") == 1
    assert done.stdout.count("batch       4 images = 2 x 2") == 2
    assert done.stdout.count("349 tensors taken") == 1
    assert left_in(tmp_path) == []


# --- runs that fail --------------------------------------------------------------------------------------------------

ENDED = """
    import os, signal, sys
    from beside import Ending
    from lockstep import YOLO

    callback = Ending(WHOM, "note")
    YOLO("yolov5n.yaml").train(data=os.environ["DATA"], epochs=10_000, device="cpu,cpu", callbacks=[callback], CALL)
"""


@pytest.mark.parametrize(
    ("whom", "name", "status", "last"),
    [
        pytest.param("script", "SIGINT", -signal.SIGINT, r"\.Stopped: go on with: python \S+ --resume \S+", marks=SLOW),
        pytest.param("script", "SIGTERM", -signal.SIGTERM, "", marks=SLOW),
        pytest.param("script", "SIGKILL", -signal.SIGKILL, "", marks=SLOW),
        # Workers that come to the end of their step before they are ended save, and say how to go on.
        pytest.param("launcher", "SIGTERM", 1, "stopped by SIGTERM(; so were the 2 workers)?", marks=SLOW),
        pytest.param("launcher", "SIGKILL", 1, "the launcher of the workers ended with status -9", marks=SLOW),
        pytest.param("worker", "SIGKILL", 1, "all other ranks were ended", marks=SLOW),
        pytest.param("worker", None, 1, "rank 1 failed with status 1; all other ranks were ended", marks=SLOW),
    ],
)
def test_any_process_ends(data: Path, tmp_path: Path, whom: str, name: str | None, status: int, last: str) -> None:
    """L5, L13: Ctrl-C, a kill or a quiet end of the script, the launcher or rank 0; nothing stays behind."""
    number = "None" if name is None else f"signal.{name}"
    done = run(tmp_path, data, ENDED.replace("WHOM", f'"{whom}", {number}'))
    assert 0 < done.seconds - done.noted < max(SOON, done.noted), "or as fast as they started, on a busy machine"
    assert done.status == status, done.stderr
    assert re.search(rf"{last}$", done.stderr, re.MULTILINE), done.stderr
    assert "last words\n" in done.stdout, "what was printed is not lost with its process"
    if whom == "worker":
        assert "lockstep.TrainingError: " in done.stderr
        assert name is None or "rank 0 was killed by SIGKILL; if nobody did that, the machine ran out of" in done.stderr
        assert name or "another rank left in the middle of the run, without an error of its own\n" in done.stderr


def test_interrupted_at_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L13: Ctrl-C in the instant when the launcher has been started."""

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            YOLO("yolov5n.yaml").train(data=data, device="cpu,cpu", project=tmp_path / "runs")
    finally:
        signal.signal(signal.SIGINT, before)
    assert marked_processes() == {}
    assert time.monotonic() - start < LIMIT / 10
    assert not (tmp_path / "runs").exists()


@SLOW
def test_caller_that_is_gone(data: Path, tmp_path: Path) -> None:
    """L5: a launcher whose caller was killed before it could look at it starts nothing, and clears up."""
    folder = tmp_path / "job"
    folder.mkdir()
    variables = write_job(
        folder, "train", {"device": "cpu,cpu", "data": str(data), "project": str(tmp_path / "runs")}, []
    )
    job = dataclasses.replace(pickle.loads((folder / JOB).read_bytes()), caller=os.getppid())
    (folder / JOB).write_bytes(pickle.dumps(job))
    variables = {name: hashlib.sha256((folder / JOB).read_bytes()).hexdigest() for name in variables}
    done = subprocess.run([sys.executable, *START, str(folder)], env=os.environ | variables, timeout=LIMIT, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


# --- mistakes --------------------------------------------------------------------------------------------------------


def refused(**flags: Any) -> str:
    with pytest.raises(UserError) as error:
        YOLO("yolov5n.yaml").train(**flags)
    return str(error.value)


def test_keywords() -> None:
    """L5: every flag of train.py; all that is wrong comes at once."""
    assert refused(bacth=4, imgsz="64", batch_size=8, epochs=0, evolve=3).splitlines() == [
        "4 problems",
        "- bacth is not a keyword; did you mean batch?",
        "- evolve is not available yet: hyperparameters are not searched so far; pick a file with --hyp",
        "- --imgsz takes a whole number, not '64'",
        "- --epochs must be at least 1, not 0",
    ]


def test_a_keyword_of_another_call() -> None:
    """``val(rect=True)`` was sent to ``project``."""
    with pytest.raises(UserError, match=r"^rect is not a keyword$"):
        given_keywords(ValConfig, {"rect": True})


def test_every_flag_is_a_keyword() -> None:
    """L5: under each of its spellings, with underscores for dashes."""
    page = subprocess.run(
        [sys.executable, PROJECT / "train.py", "--help"], capture_output=True, text=True, timeout=LIMIT, check=True
    ).stdout
    spellings = set(re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", page.partition("\noptions:")[2]))
    assert {"batch", "sync-bn", "cuda-graph", "profile", "dp", "device", "img-size"} < spellings
    values = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    values |= {"freeze": [0], "loggers": ["csv"]}
    for spelling in spellings - {"help", "local-rank", "local_rank", "no-sync-bn", "no-deterministic"}:
        keyword = spelling.replace("-", "_")
        name = {"batch": "batch_size", "img": "imgsz", "img_size": "imgsz"}.get(keyword, keyword)
        assert given_keywords(TrainConfig, {keyword: values[name]}) == {name: values[name]}


@pytest.mark.parametrize(
    ("device", "shown"),
    [(["cpu", 0], "cpu,0"), ("0,0", "0,0"), ([97, 98], "97,98"), ("gpu", "gpu")],
)
def test_devices(device: Any, shown: str) -> None:
    """L6: in this process, before anything starts."""
    message = refused(device=device, data="none.yaml")
    assert message.startswith(f"--device {shown!r} ")
    assert re.search(r"; here are: .*cpu$", message)


def test_batch() -> None:
    """B2: before any worker starts."""
    assert "must be a positive multiple of their number, 4; use 4 or 8" in refused(batch=6, device=["cpu"] * 4)


def test_family_that_cannot_be_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12: from Python too; no process is started, and nothing trains on one device."""
    alone_only = dataclasses.replace(families.YOLOV5, name="alone_only", launchable=False)
    monkeypatch.setitem(families.FAMILIES, alone_only.name, alone_only)
    monkeypatch.setattr(subprocess, "Popen", None)
    spec = {**yaml.safe_load((PROJECT / "models/yolov5n.yaml").read_text()), "family": alone_only.name}
    (tmp_path / "net.yaml").write_text(yaml.safe_dump(spec))
    weights = checkpoint(tmp_path / "net.pt", None, ["a", "b"], 64)
    save_checkpoint({**load_checkpoint(weights), "spec": spec}, weights)
    for yolo in (YOLO(tmp_path / "net.yaml"), YOLO(weights)):
        with pytest.raises(UserError) as error:
            yolo.train(data="none.yaml", device="cpu,cpu", project=tmp_path / "runs")
        message = str(error.value)
        assert message.startswith("--device cpu,cpu names 2 devices, but no workers can be started for networks of")
        assert "\n  python -m torch.distributed.run --nproc_per_node 2 my_script.py " in message
        assert "YOLO(...).train(...) without a device" in message
    assert not (tmp_path / "runs").exists()


class Holding(Callback):
    def __init__(self, value: object) -> None:
        self.value = value


def closure() -> Callback:
    class Local(Callback):
        pass

    return Local()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: lambda event: None,
            "callbacks[0] is a lambda (function), not a callback; write a subclass of",
        ),
        (lambda: Holding(lambda: 0), "its attribute value holds a lambda, which has no name to import it by"),
        (closure, "callbacks[0] is of type closure.<locals>.Local (tests.test_lockstep) and can't travel"),
        (lambda: Holding(print), ""),
        (lambda: Holding(threading.Lock()), "callbacks[0] is of type Holding (tests.test_lockstep) and can't travel"),
    ],
    ids=["lambda", "holds a lambda", "closure", "good", "lock"],
)
def test_callbacks_that_cannot_travel(
    make: Callable[[], Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9: the argument, its type, why, and what to do; no process was started for that."""
    started: list[Any] = []

    class Refused(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            started.append(args)
            raise OSError("no process today")

    monkeypatch.setattr(subprocess, "Popen", Refused)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    call = {"data": "none.yaml", "device": "cpu,cpu", "callbacks": [make()]}
    if not says:
        with pytest.raises(OSError, match="no process today"):
            YOLO("yolov5n.yaml").train(**call)
        assert len(started) == 1
    else:
        message = refused(**call)
        assert message.startswith("callbacks[0] is ")
        assert says in message
        assert "at the top level of a module" in message
        assert "built-in loggers by name, loggers=['csv'," in message
        assert started == []
    assert list(tmp_path.iterdir()) == [], "also after an error the job is removed"


def test_single_device_takes_any_callback(data: Path, tmp_path: Path) -> None:
    """L9: what does not travel need not be picklable; its traceback is the caller's own."""
    callback = Failing()
    callback.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        YOLO("yolov5n.yaml").train(
            data=data, epochs=3, imgsz=64, batch=4, workers=0, noplots=True, device="cpu", project=tmp_path,
            callbacks=[callback],
        )  # fmt: skip
    assert len((tmp_path / "exp/results.csv").read_text().splitlines()) == 2


def test_network_of_the_object(data: Path, tmp_path: Path) -> None:
    """L5: the network that the object was made of is trained, also where weights are named to start from."""
    weights = checkpoint(tmp_path / "weights.pt", None, ["a", "b"], 64)
    small = YOLO("yolov3-tiny.yaml")
    with pytest.raises(UserError, match="the weights don't fit the network"):
        small.train(data=data, weights=weights, imgsz=64, epochs=1, device="cpu", project=tmp_path / "runs")


@pytest.mark.slow
def test_val_on_several_devices(data: Path, tmp_path: Path) -> None:
    """L5: in a process for each; the figures are those of one device."""
    yolo = YOLO(checkpoint(tmp_path / "weights.pt", None, ["blue", "red"], 64))
    flags = {"data": data, "imgsz": 64, "batch": 2, "workers": 0, "noplots": True, "project": tmp_path / "runs"}
    alone, several = yolo.val(device="cpu", **flags), yolo.val(device=["cpu", "cpu"], save_txt=True, **flags)
    assert several.rows == alone.rows
    assert several.rows[0]["images"] == 4
    assert several.fitness == pytest.approx(0.1 * several.map50 + 0.9 * several.map)
    assert [run.run_dir for run in (alone, several)] == [tmp_path / "runs/exp", tmp_path / "runs/exp2"]
    assert (several.run_dir / "labels").is_dir()
    assert yolo.val(device="cpu", task="speed", **flags).run_dir == tmp_path / "runs"


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_job_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the caller has written is unpickled, and only this user can read it."""
    with job_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        for name, value in write_job(folder, "train", {"epochs": 3}, []).items():
            monkeypatch.setenv(name, value)
        assert read_job(folder).given == {"epochs": 3}
        (folder / JOB).write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
        with pytest.raises(UserError, match="is not the job that this process was started for"):
            read_job(folder)
    assert not folder.exists()


@pytest.mark.parametrize("used", [True, False], ids=["used before", "not used before"])
def test_gpus_are_as_before(used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: random numbers of GPUs and which of them is current; one that nobody uses is not looked at."""
    gpus: dict[str, Any] = {"used": used, "current": int(used), "numbers": [10, 11]}

    def look(name: str) -> Any:
        assert gpus["used"], "to look at a GPU takes its memory"
        return gpus[name]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpus["used"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: look("current"))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(look("numbers")))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: gpus.update(current=device))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: gpus.update(numbers=states))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: gpus.update(numbers=[seed] * 2))
    seed = torch.initial_seed()
    with choices_kept():
        gpus.update(used=True, current=1 - int(used), numbers=[0, 0])
    assert gpus == {"used": True, "current": int(used), "numbers": [10, 11] if used else [seed] * 2}
