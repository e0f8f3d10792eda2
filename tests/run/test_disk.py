"""Disks that fail a run: full, read-only, with limits, of other users, moved, shared with another run, or slow."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.callback_runs import draw_squares, train_with
from tests.callback_runs import flags as own_flags
from tests.common import NOBODY, PROJECT, as_nobody, needs_root
from tests.runs import CHILD_ENVIRONMENT, differences, results
from utils.checkpoints.files import load_checkpoint
from utils.checkpoints.writer import CheckpointWriter, Outcome
from utils.core.errors import NotWrittenError, UserError, ended_by
from utils.data.index import build_index
from utils.data.loaders import Batch
from utils.dist.place import DistEnv
from utils.run.callbacks import Callback, CheckpointSaved, EpochEnd, Figures, Stop, TrainEnd, TrainStart
from utils.run.folder import claim, is_finished, release, script
from utils.run.loggers import TENSORBOARD_FILES, loggers_from_names
from utils.run.plots import Plots
from utils.torch_utils import save_checkpoint

EPOCHS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares, and beside them the YAML of a network whose checkpoints have less than a megabyte."""
    path = draw_squares(tmp_path_factory.mktemp("squares") / "data")
    narrow = re.sub(r"width_multiple: \S+", "width_multiple: 0.03", (PROJECT / "models/yolov5n.yaml").read_text())
    path.with_name("tiny.yaml").write_text(narrow)
    return path


def flags(data: Path, project: Path, *more: object) -> list[str]:
    own = ["--cfg", data.with_name("tiny.yaml"), "--epochs", EPOCHS, "--noplots", "--loggers", "jsonl"]
    return own_flags(data, project, *own, *more)


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed, with a checkpoint of every epoch.

    Attributes:
        run_dir: its folder.
        flags: by which others are the same run.
        better: epochs whose weights were the best so far.
        turn: one of them, after which comes one that is not.
    """

    run_dir: Path
    flags: tuple[str, ...]
    better: list[int]
    turn: int

    def best(self, epoch: int) -> int:
        """Whose weights are in best.pt when this epoch is saved."""
        return max(one for one in self.better if one <= epoch)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The first seed on this machine whose epochs turn where there are some before and after."""
    for seed in map(str, range(20)):
        project = tmp_path_factory.mktemp("whole")
        train_with([], *flags(data, project, "--save-period", 1, "--seed", seed))
        rows = [json.loads(line) for line in (project / "run/results.jsonl").read_text().splitlines()[1:]]
        fitness = [0.1 * row["metrics/mAP_0.5"] + 0.9 * row["metrics/mAP_0.5:0.95"] for row in rows]
        better = [i + 1 for i, value in enumerate(fitness) if all(value > other for other in fitness[:i])]
        assert [row["epoch"] for row in rows if row["better"]] == better
        for turn in range(3, EPOCHS - 2):
            if turn in better and turn + 1 not in better:
                return Whole(project / "run", ("--seed", seed), better, turn)
    raise AssertionError("no seed has such an epoch; choose another recipe")


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount something on a folder, which is made; the test is skipped where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", *options, str(folder)]
    if sys.platform != "linux" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def small_disk(folder: Path, size: str) -> contextlib.AbstractContextManager[Path]:
    return mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def fill(disk: Path) -> None:
    """Leave not one block of it free."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for block in (2**16, 2**12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(block))


class Disk(Callback):
    """Does something to the disk when an epoch is trained, before anything of it is written."""

    def __init__(self, at: Mapping[int, Sequence[Callable[[], object]]]) -> None:
        self.at = at  # by epoch
        self.saved: list[CheckpointSaved] = []

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        for step in self.at.get(event.epoch, ()):
            step()
        return None

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self.saved.append(event)


def epochs_of(weights: Path) -> dict[str, int]:
    """The epoch that each checkpoint was saved after; each of them loads."""
    names = ("last.pt", "last.prev.pt", "best.pt")
    return {name: load_checkpoint(weights / name)["state"]["epoch"] for name in names if (weights / name).exists()}


def assert_same_run(whole: Whole, run_dir: Path) -> None:
    """What it leaves is what an undisturbed run leaves."""
    assert results(run_dir)["epoch"].tolist() == list(range(1, EPOCHS + 1))
    assert (run_dir / "results.csv").read_text() == (whole.run_dir / "results.csv").read_text()
    for name in ("last.pt", "best.pt"):
        one, other = (load_checkpoint(place / "weights" / name) for place in (whole.run_dir, run_dir))
        for key in ("model", "ema", "optimizer", "state", "rng"):
            assert not differences(one.get(key), other.get(key)), (name, key)
    assert not [path for path in run_dir.rglob("*") if path.name.endswith(".tmp")]


# A full disk ----------------------------------------------------------------------------------------------------------


def test_full_disk_for_some_epochs(
    data: Path, whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ultralytics/ultralytics#5793. At every moment last.pt is the newest that was written, best.pt the best.

    Two epochs find the disk full; the first is better than all before, the second is not. The next one is better again,
    or the first one's best.pt is made up for.
    """
    turn = whole.turn
    with small_disk(tmp_path / "disk", "8m") as disk:
        weights = disk / "runs/run/weights"
        seen: dict[int, dict[str, int]] = {}

        def look() -> None:
            seen[len(seen) + 1] = epochs_of(weights)

        steps = ([look, lambda: fill(disk)], [look], [look, (disk / "filler").unlink], [look])
        told = Disk({turn + number: step for number, step in enumerate(steps)})
        train_with([told], *flags(data, disk / "runs", *whole.flags))
        before = {"last.pt": turn - 1, "last.prev.pt": turn - 2, "best.pt": whole.best(turn - 1)}
        assert seen[1] == seen[2] == seen[3] == before
        assert seen[4] == {"last.pt": turn + 2, "last.prev.pt": turn - 1, "best.pt": whole.best(turn + 2)}
        made_up = [] if turn + 2 in whole.better else [turn]
        assert [event.epoch for event in told.saved] == [*range(1, turn), *made_up, *range(turn + 2, EPOCHS + 1)]
        assert_same_run(whole, disk / "runs/run")
    said = capsys.readouterr().out
    assert said.count("last.pt was not written: [Errno 28] No space left on device: the checkpoint needs 2 MB") == 2


def test_best_weights_that_the_disk_did_not_take(data: Path, whole: Whole, tmp_path: Path) -> None:
    """They come as soon as there is room, before a newer last.pt: in the next epoch, which is not better itself."""
    turn = whole.turn
    with small_disk(tmp_path / "disk", "8m") as disk:
        weights = disk / "runs/run/weights"
        seen = []

        def look() -> None:
            seen.append(epochs_of(weights))

        told = Disk({turn: [lambda: fill(disk)], turn + 1: [look, (disk / "filler").unlink], turn + 2: [look]})
        train_with([told], *flags(data, disk / "runs", *whole.flags))
        assert seen == [
            {"last.pt": turn - 1, "last.prev.pt": turn - 2, "best.pt": whole.best(turn - 1)},
            {"last.pt": turn + 1, "last.prev.pt": turn - 1, "best.pt": turn},
        ]
        assert [(event.path.name, event.epoch, event.better) for event in told.saved[turn - 1 : turn + 2]] == [
            ("best.pt", turn, True),
            ("last.pt", turn + 1, False),
            ("last.pt", turn + 2, turn + 2 in whole.better),
        ]
        assert_same_run(whole, disk / "runs/run")


@pytest.mark.slow
def test_disk_that_stays_full(data: Path, whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run trains to its end, which is status 1; what was there goes on once there is room again."""
    turn = whole.turn
    with small_disk(tmp_path / "disk", "8m") as disk:
        run_dir = disk / "runs/run"
        with pytest.raises(NotWrittenError, match=r"run was not written; the warnings above say why") as info:
            train_with([Disk({turn + 1: [lambda: fill(disk)]})], *flags(data, disk / "runs", *whole.flags))
        assert ended_by(info.value) == 1
        assert epochs_of(run_dir / "weights") == {"last.pt": turn, "last.prev.pt": turn - 1, "best.pt": turn}
        said = capsys.readouterr().out
        assert said.count("last.pt was not written: [Errno 28] No space left on device: ") == EPOCHS - turn
        assert "best.pt still holds the state of the run" in said
        (disk / "filler").unlink()
        train_with([], "--resume", run_dir)
        assert_same_run(whole, run_dir)


def test_stopped_on_a_full_disk(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 143 would say that it was saved; what there is goes on, and the end says so (ultralytics/yolov3#1817)."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        run_dir = disk / "runs/run"
        stop = Disk({3: [lambda: fill(disk), lambda: os.kill(os.getpid(), signal.SIGTERM)]})
        with pytest.raises(
            NotWrittenError, match=r"^stopped by SIGTERM, but the state of .*run was not written; "
        ) as info:
            train_with([stop], *flags(data, disk / "runs"))
        assert str(info.value).splitlines()[1:] == [f"go on with: python {script('train.py')} --resume {run_dir}"]
        assert ended_by(info.value) == 1
        assert not (run_dir / "RESUME").exists()
        assert epochs_of(run_dir / "weights")["last.pt"] == 2


def test_files_that_are_missing_in_the_end(data: Path, tmp_path: Path) -> None:
    """Status 0 says that all is there; a checkpoint of an epoch that is not is named."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        told = Disk({2: [lambda: fill(disk)], 3: [lambda: (disk / "filler").unlink()]})
        with pytest.raises(NotWrittenError, match=r"run is finished, but without epoch2\.pt; ") as info:
            train_with([told], *flags(data, disk / "runs", "--epochs", 3, "--save-period", 1))
        assert ended_by(info.value) == 1
        assert is_finished(disk / "runs/run")


class FullInTheEnd(Disk):
    """Fills a disk as soon as the state after the last epoch is on it."""

    def __init__(self, disk: Path, epochs: int) -> None:
        super().__init__({})
        self.disk, self.epochs = disk, epochs

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        if event.epoch == self.epochs:
            fill(self.disk)


def test_only_the_final_weights_are_missing(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message said that the last checkpoint was not written, which lay there; a resume makes what is missing."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        run_dir = disk / "runs/run"
        with pytest.raises(NotWrittenError, match=r"^the final best\.pt of .*run was not written; the warn") as info:
            train_with([FullInTheEnd(disk, 1)], *flags(data, disk / "runs", "--epochs", 1))
        assert str(info.value).splitlines()[1:] == [f"go on with: python {script('train.py')} --resume {run_dir}"]
        assert "best.pt still holds the state of the run besides its weights: " in capsys.readouterr().out
        (disk / "filler").unlink()
        train_with([], "--resume", run_dir)
        assert "optimizer" not in load_checkpoint(run_dir / "weights/best.pt") and is_finished(run_dir)


def test_a_disk_that_never_takes_a_checkpoint(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files (EFBIG); what is smaller is written, and nothing half is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    try:
        with pytest.raises(NotWrittenError):
            train_with([], *flags(data, tmp_path, "--epochs", 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().out
    assert said.count("last.pt was not written: [Errno 27] File too large: the checkpoint needs 2 MB") == 2
    assert "never finite" not in said
    assert os.listdir(tmp_path / "run/weights") == []
    assert results(tmp_path / "run")["epoch"].tolist() == [1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_disk_does(seed: int, tmp_path: Path) -> None:
    """Two hundred saves, of which some find the disk full, hold better weights, or weights that are not finite.

    After each the files are what plain rules say: the newest finite state that found room, and the best one, which is
    made up for at the next save that finds room. What is saved is changed in place all the time.
    """
    rng = random.Random(seed)
    weight, extra = torch.zeros(2_000), torch.zeros(10)
    writer = CheckpointWriter()
    files: dict[str, int] = {}
    owed: int | None = None
    with small_disk(tmp_path / "disk", "256k") as disk:
        last, best = disk / "last.pt", disk / "best.pt"
        for number in range(200):
            full, better, finite = rng.random() < 0.4, rng.random() < 0.4, rng.random() < 0.8
            weight.fill_(float(number) if finite else float("nan"))
            state = {"epoch": number, "model": {"weight": weight}, "extra": extra if number % 3 else None}
            if full:
                fill(disk)
            writer.write(state, Outcome(last, (best,) if better else (), number, 0.1 * number, better), best)
            weight.fill_(-1.0)
            with contextlib.suppress(OSError):
                writer.wait()
            (disk / "filler").unlink(missing_ok=True)

            expected = []
            if better and finite:
                owed = number if full else None
            if not full and owed is not None:
                expected.append((best, owed, True, True))
                files["best.pt"], owed = owed, None
            if not full and finite:
                if "last.pt" in files:
                    files["last.prev.pt"] = files["last.pt"]
                files["last.pt"] = number
                if better:
                    files["best.pt"] = number
            if not finite:
                expected.append((last, number, better, False))
            elif not full:
                expected.append((last, number, better, True))
            assert [(one.path, one.epoch, one.better, one.written) for one in writer.outcomes()] == expected
            assert writer.failed == (full or not finite)
            found = {path.name: load_checkpoint(path) for path in disk.iterdir()}
            assert {name: content["epoch"] for name, content in found.items()} == files
            for content in found.values():
                assert content["model"]["weight"].unique().tolist() == [content["epoch"]]
    writer.close()


@pytest.mark.gate
@pytest.mark.slow
def test_several_ranks_and_a_disk_that_takes_nothing(data: Path, tmp_path: Path) -> None:
    """Rank 0 alone writes, whole files or none; that it could not is the end of all, with a status that is not 0."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(PROJECT / "train.py")]
    done = subprocess.run(
        [sys.executable, *ranks, *flags(data, tmp_path, "--epochs", 2)],
        cwd=tmp_path,
        env=CHILD_ENVIRONMENT,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count(f"error: the last checkpoint of {tmp_path}/run was not written") == 1
    assert "lost rank" not in done.stderr and "lost another rank" not in done.stderr, "the other rank hears of it"
    assert done.stdout.count("last.pt was not written: [Errno 27] File too large: ") == 2
    assert os.listdir(tmp_path / "run/weights") == []
    assert results(tmp_path / "run")["epoch"].tolist() == [1, 2]


# Disks that refuse ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_disk_that_becomes_read_only(
    data: Path, whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For two epochs, of which the second is the best so far."""
    turn = whole.turn
    weights = tmp_path / "run/weights"
    weights.mkdir(parents=True)
    with mounted(weights, "--bind", str(weights)):

        def remount(how: str) -> None:
            subprocess.run(["mount", "-o", f"remount,bind,{how}", str(weights)], check=True)

        told = Disk({turn - 1: [lambda: remount("ro")], turn + 1: [lambda: remount("rw")]})
        train_with([told], *flags(data, tmp_path, "--exist-ok", *whole.flags))
        # The best.pt of the turn is made up for.
        assert [event.epoch for event in told.saved] == [*range(1, turn - 1), turn, *range(turn + 1, EPOCHS + 1)]
        assert_same_run(whole, tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count("weights/last.pt was not written: [Errno 30] Read-only file system: ") == 2


@needs_root
def test_folder_that_may_not_be_written_any_more(
    data: Path, whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "runs/run/weights"
    (tmp_path / "runs").mkdir()
    os.chown(tmp_path / "runs", NOBODY, NOBODY)
    told = Disk({2: [lambda: weights.chmod(0o555)], 4: [lambda: weights.chmod(0o755)]})
    with as_nobody(tmp_path), as_nobody_reads(data.parent):
        train_with([told], *flags(data, tmp_path / "runs", *whole.flags))
    assert_same_run(whole, tmp_path / "runs/run")
    assert capsys.readouterr().out.count("weights/last.pt was not written: [Errno 13] Permission denied: ") == 2


@contextlib.contextmanager
def as_nobody_reads(folder: Path) -> Iterator[None]:
    """Make sure that a folder and those above can be entered by all; this process is another user by now."""
    os.setresuid(0, 0, 0)
    for place in (folder, *folder.parents):
        place.chmod(place.stat().st_mode | 0o055)
    os.setresuid(NOBODY, NOBODY, 0)
    yield


@needs_root
def test_leftovers_of_another_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder where only their owner may remove files: what a dead run left stays, is said once and does no harm.

    The checkpoints of such a run are another matter: a new run would leave them beside its own.
    """
    weights = tmp_path / "weights"
    weights.mkdir()
    weights.chmod(0o1777)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = weights / f".last.pt.{dead.pid}.tmp"
    left.write_text("half")
    with as_nobody(tmp_path):
        for epoch in range(3):
            save_checkpoint({"epoch": epoch}, weights / "last.pt")
    assert load_checkpoint(weights / "last.pt") == {"epoch": 2}
    assert load_checkpoint(weights / "last.prev.pt") == {"epoch": 1}
    assert (
        capsys.readouterr().out
        == f"WARNING: {left}, left by a run that died, can't be removed: Operation not permitted\n"
    )


@needs_root
def test_checkpoints_of_another_user(data: Path, tmp_path: Path) -> None:
    weights = tmp_path / "run/weights"
    weights.mkdir(parents=True)
    (weights / "best.pt").write_text("another run's")
    weights.chmod(0o1777)
    weights.parent.chmod(0o777)
    with as_nobody(tmp_path), as_nobody_reads(data.parent), pytest.raises(UserError) as info:
        train_with([], *flags(data, tmp_path, "--exist-ok"))
    assert str(info.value) == (
        f"--name: {weights}/best.pt of another run can't be removed (Operation not permitted); write elsewhere with "
        "another --name"
    )
    assert [path.name for path in weights.iterdir()] == ["best.pt"]


# Logs, pictures and caches on a full disk -----------------------------------------------------------------------------


def epoch_row(epoch: int) -> EpochEnd:
    figures = Figures(0.1, 0.2, 0.3, 0.4, 0.5, {f"class {number}": 0.1 * epoch for number in range(20)})
    return EpochEnd(epoch, 99, {"box": 1.0 + epoch}, {"box": 2.0}, figures, {"lr0": 0.1}, 0.5, False, 1.0)


def log_on_a_full_disk(name: str, run_dir: Path, disk: Path, last: int = 40) -> int:
    """Let a logger write until the disk, which is full from epoch 1 on, has refused some; then make room.

    Returns:
        Epochs that it was told of.
    """
    logger = loggers_from_names([name])[-1]
    logger.on_train_start(TrainStart(run_dir, 99, 2, ["a"], ["box"], ["lr0"], {"epochs": 99}, {"lr0": 0.1}, None))
    logger.on_epoch_end(epoch_row(0))
    fill(disk)
    for epoch in range(1, last):  # some more find room in the last block of their file
        logger.on_epoch_end(epoch_row(epoch))
    (disk / "filler").unlink()
    logger.on_epoch_end(epoch_row(last))
    logger.on_train_end(TrainEnd(run_dir, None, None))
    return last + 1


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_log_on_a_full_disk(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning, and no row is lost."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        count = log_on_a_full_disk(name, disk, disk, last=300)  # rows of results.csv are short
        if name == "csv":
            assert results(disk)["epoch"].tolist() == list(range(count))
            assert results(disk)["train/box_loss"].tolist() == [1.0 + epoch for epoch in range(count)]
        else:
            rows = [json.loads(line) for line in (disk / "results.jsonl").read_text().splitlines()[1:]]
            assert [row["epoch"] for row in rows] == list(range(count))
    said = capsys.readouterr().out
    assert said == f"WARNING: results.{name} can't be written ([Errno 28] No space left on device); training goes on\n"


TENSORBOARD = """
import sys
from pathlib import Path
from tests.run.test_disk import log_on_a_full_disk
log_on_a_full_disk("tensorboard", Path(sys.argv[1]), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_tensorboard_on_a_full_disk(tmp_path: Path) -> None:
    """In a process of its own: TensorBoard's thread reports its death on stderr."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with small_disk(tmp_path / "disk", "256k") as disk:
        done = subprocess.run(
            [sys.executable, "-c", TENSORBOARD, str(disk)],
            cwd=PROJECT,
            env=CHILD_ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(list(disk.glob(TENSORBOARD_FILES))) > 1
        events = reader.EventAccumulator(str(disk))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("train/box_loss")]
    assert found == [(epoch, 1.0 + epoch) for epoch in range(41)]
    assert done.stdout.count("WARNING: the TensorBoard file can't be written ([Errno 28] No space left on device)") == 1


def test_pictures_on_a_full_disk(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        index = build_index([data.parent / "images"], 2, DistEnv(device=torch.device("cpu")), cache=False)
        fill(disk)
        with Plots(disk, ["blue", "red"]) as plots:
            plots.add_labels(index)
            images = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
            plots.add_train_batch(Batch(images, torch.zeros(0, 6), torch.tensor([0]), 0, 0, torch.zeros(1, 5)), index)
        assert [path.name for path in disk.iterdir()] == ["filler"]
    said = capsys.readouterr().out.splitlines()[-1]
    reasons = r"labels\.jpg \(OSError: .*\), train_batch0\.jpg \(OSError: .*\)"
    assert re.fullmatch(rf"WARNING: pictures of the run are missing: {reasons}", said)


def test_label_cache_on_a_full_disk(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither beside the images nor in the user's cache is room; the index is as good as one with a cache."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        shutil.copytree(data.parent, disk / "data", ignore=shutil.ignore_patterns(".lockstep"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))
        (disk / "cache").mkdir()
        fill(disk)
        index = build_index([disk / "data/images"], 2, DistEnv(device=torch.device("cpu")))
        assert len(index) == 8
        for place in (disk / "data/.lockstep", disk / "cache"):
            assert not [path for path in place.rglob("*") if path.is_file()]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(said) == 1
    assert said[0].startswith("WARNING: the label index is not kept for the next run (")
    assert said[0].count("No space left on device") == 2


# Folders that move, and runs that meet --------------------------------------------------------------------------------


def unfinished(whole: Whole, run_dir: Path) -> Path:
    """A copy of a run as it was before its last two epochs."""
    shutil.copytree(whole.run_dir, run_dir, ignore=shutil.ignore_patterns("*.pt"))
    done = EPOCHS - 2
    for name, epoch in {"last.prev": done - 1, "last": done, "best": whole.best(done)}.items():
        shutil.copy(whole.run_dir / f"weights/epoch{epoch}.pt", run_dir / f"weights/{name}.pt")
    return run_dir


def test_folder_that_moved(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a relative path, behind a link that was broken in between; nothing appears at the old place."""
    unfinished(whole, tmp_path / "old disk/runs/run")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/runs").symlink_to(tmp_path / "old disk/runs")
    (tmp_path / "old disk").rename(tmp_path / "new disk")
    monkeypatch.chdir(tmp_path / "work")
    for arguments in (["--resume", "runs/run"], ["--resume", "--project", "runs"]):
        with pytest.raises(UserError, match=r"^--resume(?!.*\n)"):
            train_with([], *arguments)
    (tmp_path / "work/runs").unlink()
    (tmp_path / "work/runs").symlink_to("../new disk/runs")
    train_with([], "--resume", "runs/run")
    assert_same_run(whole, tmp_path / "new disk/runs/run")
    assert not (tmp_path / "old disk").exists()
    assert [path.name for path in (tmp_path / "new disk/runs").iterdir()] == ["run"]


def start(*arguments: object, cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py"), *map(str, arguments)],
        cwd=cwd,
        env=CHILD_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def contents(folder: Path) -> dict[str, tuple[float, bytes]]:
    return {str(path): (path.stat().st_mtime, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def stands_still(pid: int) -> bool:
    """Whether all threads of a process that was told to stop do: what one asked of the system is done first."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@pytest.mark.slow
@pytest.mark.gate
def test_two_runs_in_one_folder(data: Path, tmp_path: Path) -> None:
    """The second is refused and changes nothing; when the first is dead (kill -9) the folder is free at once."""
    run_dir = tmp_path / "run"
    line = flags(data, tmp_path)
    with start(*line, "--epochs", 10_000, cwd=tmp_path) as first:
        while first.poll() is None and not (run_dir / "weights/last.prev.pt").exists():
            time.sleep(0.01)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            while not stands_still(first.pid):
                time.sleep(0.01)
            before = contents(run_dir)
            (tmp_path / "link").symlink_to(run_dir)
            others = [
                start(*line, "--exist-ok", cwd=tmp_path),
                start("--resume", tmp_path / "link", cwd=tmp_path),
            ]
            for other in others:
                said = other.communicate(timeout=120)[1]
                assert other.returncode == 2
                assert re.fullmatch(
                    rf"error: \S+ is in use by another run \(process {first.pid} on \S+\); wait for its end, or give a "
                    r"new run another --name\n",
                    said,
                ), said
            assert contents(run_dir) == before
        finally:
            first.kill()
    done = load_checkpoint(run_dir / "weights/last.pt")["state"]["epoch"]
    train_with([], "--resume", run_dir, "--epochs", done + 1)
    assert load_checkpoint(run_dir / "weights/last.pt")["state"]["epoch"] == done + 1
    train_with([], *line, "--epochs", 1, "--exist-ok")
    assert results(run_dir)["epoch"].tolist() == [1]


@pytest.mark.slow
def test_lock_on_a_full_disk(tmp_path: Path) -> None:
    """Who holds it can't be noted; it holds all the same, and its end is no error."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        claim(disk)
        code = "import sys; from pathlib import Path; from utils.run.folder import claim; claim(Path(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(disk)]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        assert "is in use by another run" in done.stderr
        release(disk)
        assert subprocess.run(command, cwd=PROJECT, check=False).returncode == 0
