"""The pictures of a run: all there through the command line, drawn by a process that can fail without harm."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

import val
from tests.common import PROJECT
from tests.runs import flags, make_data, torch_settings_kept, train_here
from utils.config.data_yaml import load_data
from utils.data.index import LabelIndex
from utils.data.splits import open_splits
from utils.metrics.evaluation import ImageResult, summarize
from utils.plots.drawing import class_color
from utils.run.plots import Plots

VALIDATION = {
    *(f"val_batch{i}_{what}.jpg" for i in range(3) for what in ("labels", "pred")),
    *(f"{word}_curve.png" for word in ("PR", "P", "R", "F1")),
    "confusion_matrix.png",
}
TRAINING = {"labels.jpg", "results.png", *(f"train_batch{i}.jpg" for i in range(3))}


def with_plots(arguments: list[str]) -> list[str]:
    """Other tests of runs go without pictures."""
    return [argument for argument in arguments if argument != "--noplots"]


def read(path: Path) -> np.ndarray:
    picture = cv2.imread(str(path))
    assert picture is not None, path
    return picture


def pictures(folder: Path) -> set[str]:
    """Names of the pictures in a folder, also of unfinished ones."""
    return {path.name for path in folder.iterdir() if path.suffix in (".jpg", ".png")}


def check_pictures(folder: Path, names: set[str]) -> None:
    """All there, nothing else, each with a size that fits on a screen, more or less, and something on it."""
    assert pictures(folder) == names
    for name in names:
        picture = read(folder / name)
        assert min(picture.shape[:2]) >= 300 and max(picture.shape[:2]) <= 2400, (name, picture.shape)
        assert picture.std() > 5, name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), count=12, val=12)


@pytest.fixture(scope="module")
def run_dir(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three batches an epoch and in validation."""
    project = tmp_path_factory.mktemp("runs")
    train_here(*with_plots(flags(data, project, "--epochs 2")))
    return project / "run"


def test_run_folder_has_its_pictures(run_dir: Path) -> None:
    check_pictures(run_dir, TRAINING | VALIDATION)


def test_train_batches_show_boxes_of_both_classes(run_dir: Path) -> None:
    """Twelve images with boxes of two classes; a JPEG changes colors a little."""
    picture = read(run_dir / "train_batch0.jpg").astype(int)
    for class_id in range(2):
        near = (np.abs(picture - class_color(class_id)) < 30).all(2)
        assert near.sum() > 200


def test_val_has_its_pictures(data: Path, run_dir: Path, tmp_path: Path) -> None:
    arguments = ["--weights", run_dir / "weights/best.pt", "--data", data, "--project", tmp_path, "--img", 64]
    with torch_settings_kept():
        val.main([str(word) for word in [*arguments, "--batch", 4, "--workers", 0, "--device", "cpu"]])
    check_pictures(tmp_path / "exp", VALIDATION)


def test_noplots_leaves_none(data: Path, tmp_path: Path) -> None:
    train_here(*with_plots(flags(data, tmp_path, "--epochs 1")), "--noplots")
    assert not pictures(tmp_path / "run")


@pytest.mark.slow
def test_a_broken_drawing_library_is_one_warning(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on to its end and its pictures are missing."""
    break_matplotlib(tmp_path, monkeypatch, "raise OSError('no such font')")
    train_here(*with_plots(flags(data, tmp_path, "--epochs 1")))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING: pictures")]
    assert warnings and set(warnings) == {"WARNING: pictures of the run are missing: OSError: no such font"}
    assert (tmp_path / "run/weights/best.pt").exists() and not pictures(tmp_path / "run")


# ---- the process ----


def break_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let processes that are started from now on find another matplotlib."""
    (folder / "broken").mkdir()
    (folder / "broken/matplotlib.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "broken"))


def results_of(folder: Path) -> Plots:
    """A run with two epochs in its results.csv."""
    (folder / "results.csv").write_text("epoch,train/box_loss\n1,0.5\n2,0.4\n")
    return Plots(folder, ["a", "b"])


@pytest.mark.slow
def test_results_are_drawn_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    with results_of(tmp_path) as plots:
        plots.end_epoch(4, None, final=False)
        assert plots._process is None and not plots._jobs
        plots.end_epoch(10, 2, final=False)
        assert plots._process is not None
    check_pictures(tmp_path, {"results.png"})
    (tmp_path / "results.png").unlink()
    with results_of(tmp_path) as plots:
        plots.end_epoch(4, None, final=True)
    check_pictures(tmp_path, {"results.png"})


def test_one_bad_picture_does_not_cost_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with results_of(tmp_path) as plots:
        plots._add("broken.png", "results", path=str(tmp_path / "nowhere.csv"), best_epoch=None)
        plots.end_epoch(1, None, final=True)
    check_pictures(tmp_path, {"results.png"})
    out = capsys.readouterr().out
    assert out.count("WARNING") == 1 and "broken.png (FileNotFoundError" in out


def test_a_killed_process_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_matplotlib(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with results_of(tmp_path) as plots:
        plots.end_epoch(1, None, final=True)
    assert capsys.readouterr().out == (
        "WARNING: pictures of the run are missing: the process that draws them ended with status -9\n"
    )


def test_a_process_that_cannot_be_started_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with results_of(tmp_path) as plots:
        plots.end_epoch(1, None, final=True)
    assert capsys.readouterr().out.startswith("WARNING: pictures of the run are missing: ")


def test_never_two_processes_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one draws, slowly, more gathers; a run that fails ends it at once."""
    break_matplotlib(tmp_path, monkeypatch, "import time; time.sleep(600)")
    start = time.monotonic()
    plots = results_of(tmp_path)
    plots.end_epoch(10, None, final=False)
    process = plots._process
    plots.end_epoch(20, None, final=False)
    assert process is not None and plots._process is process and process.poll() is None and len(plots._jobs) == 1
    plots.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert process.returncode == -9
    assert time.monotonic() - start < 60


def test_a_process_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_matplotlib(tmp_path, monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr("utils.run.plots.PATIENCE", 1)
    with results_of(tmp_path) as plots:
        plots.end_epoch(1, None, final=True)
    assert "status -9" in capsys.readouterr().out


def test_the_process_ends_with_its_run(tmp_path: Path) -> None:
    """It draws nothing for a parent that is gone."""
    jobs = [(str(tmp_path / "results.png"), "results", {"path": "x", "best_epoch": None})]
    message = pickle.dumps((os.getpid() + 1, 0, jobs))
    command = [sys.executable, "-m", "utils.plots.worker"]
    done = subprocess.run(command, cwd=PROJECT, input=message, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0 and not done.stdout and not list(tmp_path.iterdir())


# ---- validations ----


@pytest.fixture
def index(data: Path) -> LabelIndex:
    return open_splits(load_data(str(data)), ["val"])["val"]


@pytest.mark.parametrize("found", [0, 3])
def test_evaluation_of_images_without_labels_or_detections(tmp_path: Path, index: LabelIndex, found: int) -> None:
    """Neither labels nor detections, or detections only; one batch, so one pair of pages, and nothing was confused."""
    detections = np.tile(np.array([[5, 5, 30, 30, 0.9, 1]], np.float32), (found, 1))
    images = [ImageResult(0, i, detections, np.zeros((0, 5), np.float32)) for i in range(4)]
    hits = np.zeros((4 * found, 10), bool)
    metrics = summarize(hits, np.full(4 * found, 0.9), np.ones(4 * found), [np.zeros(0)] * 4, ["a", "b"])
    with Plots(tmp_path, ["a", "b"]) as plots:
        plots.add_evaluation(metrics, images, index)
    left_out = ("val_batch1", "val_batch2", "confusion")
    check_pictures(tmp_path, {name for name in VALIDATION if not name.startswith(left_out)})


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
@pytest.mark.slow
def test_images_whose_names_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in Latin-1, as old disks have them, and with a line break."""
    data = make_data(tmp_path / "data", count=1, val=2)
    folder = os.fsencode(tmp_path / "data/images/val")
    for old, new in ((b"0.png", b"caf\xe9.png"), (b"1.png", b"two\nlines.png")):
        os.rename(folder + b"/" + old, folder + b"/" + new)
    index = open_splits(load_data(str(data)), ["val"], labelled=())["val"]
    images = [ImageResult(0, i, np.zeros((0, 6), np.float32), np.zeros((0, 5), np.float32)) for i in range(2)]
    metrics = summarize(np.zeros((0, 10), bool), np.zeros(0), np.zeros(0), [np.zeros(0)] * 2, ["a", "b"])
    with Plots(tmp_path, ["a", "b"]) as plots:
        plots.add_evaluation(metrics, images, index)
    assert "pictures of the run are missing" not in capsys.readouterr().out
    assert {"val_batch0_labels.jpg", "val_batch0_pred.jpg"} <= pictures(tmp_path)


def test_boxes_of_an_evaluation_are_at_their_places(tmp_path: Path, index: LabelIndex) -> None:
    """Detections of 0.25 and below are not shown; the others are drawn where they were found."""
    detections = np.array([[16, 12, 48, 36, 0.9, 0], [0, 0, 64, 48, 0.2, 1]], np.float32)  # of a 64 x 48 image
    images = [ImageResult(0, 0, detections, np.array([[1, 16, 12, 48, 36]], np.float32))]
    metrics = summarize(np.zeros((2, 10), bool), detections[:, 4], detections[:, 5], [np.ones(1)], ["", ""])
    with Plots(tmp_path, ["", ""]) as plots:
        plots.add_evaluation(metrics, images, index)
    for what, class_id in {"labels": 1, "pred": 0}.items():
        picture = read(tmp_path / f"val_batch0_{what}.jpg").astype(int)[52:532, 8:648]  # the image alone
        row, column = (
            np.flatnonzero((np.abs(line - class_color(class_id)) < 60).all(1))
            for line in (picture[240], picture[:, 320])
        )
        assert not (np.abs(picture[240] - class_color(1 - class_id)) < 60).all(1).any()
        assert np.abs([row.min() - 160, row.max() - 479, column.min() - 120, column.max() - 359]).max() <= 3
