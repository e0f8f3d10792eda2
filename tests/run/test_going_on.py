"""Runs that go on somewhere else: from a file by itself, in another project, with data that moved."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import YOLO
from tests.common import PROJECT, as_nobody, needs_root
from tests.runs import assert_same_run, flags, make_data, train_here
from utils.checkpoints.files import load_checkpoint
from utils.config import data_yaml as data_config
from utils.config.command_line import given_flags
from utils.config.flags import TrainConfig
from utils.core.errors import UserError
from utils.data import shapes
from utils.run.folder import RESUME, claims_released, forget_end, is_finished, resume_command, say_finished, script
from utils.run.preflight import check_resumed_folder, check_run_folder
from utils.run.restarts import RECORD, open_run_dir, was_stopped
from utils.run.resume import resume
from utils.torch_utils import save_checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_data(tmp_path_factory.mktemp("data") / "set")
    narrow = re.sub(r"width_multiple: \S+", "width_multiple: 0.03", (PROJECT / "models/yolov5n.yaml").read_text())
    (path.parents[1] / "tiny.yaml").write_text(narrow)
    return path


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of three epochs, each saved."""
    project = tmp_path_factory.mktemp("whole")
    train_here(*flags(data, project, f"--cfg {data.parents[1] / 'tiny.yaml'} --save-period 1"))
    return project / "run"


def found(*arguments: object) -> tuple[TrainConfig, dict[str, Any]]:
    """What a command line with --resume means."""
    return resume(given_flags(TrainConfig, [str(argument) for argument in arguments]))


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# In another folder ----------------------------------------------------------------------------------------------------


def test_a_file_of_no_run_gets_a_folder_of_its_own(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files lay in the folder above the one of the copy, and nothing was saved (ultralytics/yolov3#1817)."""
    (tmp_path / "x/weights").mkdir(parents=True)
    for copy in (tmp_path / "last.pt", tmp_path / "x/weights/last.pt"):  # no run is described there
        shutil.copy(whole / "weights/epoch2.pt", copy)
        monkeypatch.chdir(tmp_path)
        config, saved = found("--resume", copy)
        assert (saved["run_dir"], config.project, config.name) == ("", "runs/train", "run")
        config, saved = found("--resume", copy, "--project", tmp_path / "runs", "--name", "mine")
        with claims_released():
            made = open_run_dir(config, saved)
        assert made.parent == tmp_path / "runs" and made.name.startswith("mine")
        assert (made / "weights/last.pt").read_bytes() == copy.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "x", "runs"}


def test_best_weights_go_along_only_if_they_are_of_that_state(whole: Path, tmp_path: Path) -> None:
    """A later best.pt of the same run would else be measured as what the new folder has trained."""
    path = whole / "weights/epoch2.pt"
    state = load_checkpoint(path)["state"]
    later = load_checkpoint(whole / "weights/best.pt")["state"]["epoch"] > 2
    _, saved = found("--resume", path, "--project", tmp_path)
    if state["best_epoch"] == 1:
        assert saved["best"] == str(path)
    elif not later:
        assert saved["best"] == str(whole / "weights/best.pt")
    copy = tmp_path / "copy.pt"
    other = load_checkpoint(path)
    other["state"] |= {"best_epoch": 0, "best_fitness": 0.5}
    save_checkpoint(other, copy)
    _, saved = found("--resume", copy)
    assert (saved["best"], saved["state"]["best_fitness"]) == ("", -1.0)
    assert "the best weights up to there, of epoch 1, are not at hand" in saved["said"][-1]


@pytest.mark.parametrize("best_of", [1, 3])
def test_best_weights_of_another_epoch_stay_behind(best_of: int, whole: Path, tmp_path: Path) -> None:
    """Of a run whose best epoch is the first, seen from its second: best.pt has been replaced since, or has not."""
    run_dir = shutil.copytree(whole, tmp_path / "run")
    path, best = run_dir / "weights/epoch2.pt", run_dir / "weights/best.pt"
    saved = load_checkpoint(path)
    saved["state"] |= {"best_epoch": 0, "best_fitness": 0.5}
    save_checkpoint(saved, path)
    best.unlink()
    shutil.copyfile(run_dir / f"weights/{'epoch1' if best_of == 1 else 'last'}.pt", best)
    _, saved = found("--resume", path, "--project", tmp_path / "other")
    assert saved["best"] == (str(best) if best_of == 1 else "")
    assert saved["state"]["best_fitness"] == (0.5 if best_of == 1 else -1.0)


def test_on_in_another_project_with_data_that_moved(data: Path, whole: Path, tmp_path: Path) -> None:
    """All of it at once: another folder, another place of the data, and the same run in the end.

    ultralytics/ultralytics PR 26148, roboflow/rf-detr#215
    """
    run_dir = shutil.copytree(whole, tmp_path / "stopped")
    (run_dir / "weights/epoch2.pt").replace(run_dir / "weights/last.pt")
    moved = shutil.copytree(data.parent, tmp_path / "moved") / data.name
    before = files_of(run_dir)
    train_here("--resume", run_dir, "--project", tmp_path / "other", "--data", moved)
    went_on = tmp_path / "other/run"
    assert_same_run_elsewhere(whole, went_on)
    assert files_of(run_dir) == before
    assert f"data: {moved}" in (went_on / "opt.yaml").read_text()
    assert is_finished(went_on)
    config, saved = found("--resume", whole, "--epochs", 9, "--project", whole.parent)
    assert saved["run_dir"] == str(whole) and config.epochs == 9, "the project that it is in"


def assert_same_run_elsewhere(whole: Path, went_on: Path) -> None:
    """The files of the images are other ones by their places, their labels are the same."""
    one, other = (load_checkpoint(run_dir / "weights/last.pt") for run_dir in (whole, went_on))
    for facts in (*one["data"].values(), *other["data"].values()):
        facts["digest"] = ""
    assert one["data"] == other["data"]
    shutil.copytree(whole, went_on.parent / "expected")
    for run_dir, state in ((went_on.parent / "expected", one), (went_on, other)):
        save_checkpoint(state, run_dir / "weights/last.pt", keep_previous=False)
    assert_same_run(went_on.parent / "expected", went_on)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("fewer", r"9 images in train \(the run has 10\), .* instances in train"),
        ("other labels", "other names, sizes or labels in train"),
        ("other names", "the class names in .* are no longer those of the run"),
        ("nowhere", "E.yaml"),
    ],
)
def test_other_data_is_refused(change: str, words: str, data: Path, whole: Path, tmp_path: Path) -> None:
    """Said with what differs, before anything is changed (ultralytics/ultralytics PR 26148)."""
    run_dir = shutil.copytree(whole, tmp_path / "stopped")
    (run_dir / "weights/epoch2.pt").replace(run_dir / "weights/last.pt")
    moved = shutil.copytree(data.parent, tmp_path / "moved") / data.name
    label = moved.parent / "labels/train/1.txt"
    if change == "fewer":
        (moved.parent / "images/train/1.png").unlink()
    elif change == "other labels":
        label.write_text(label.read_text().replace("1 ", "0 ", 1))
    elif change == "other names":
        moved.write_text(moved.read_text().replace("blue", "green"))
    named = tmp_path / "E.yaml" if change == "nowhere" else moved
    before = files_of(run_dir)
    with pytest.raises(UserError, match=words):
        train_here("--resume", run_dir, "--data", named)
    assert files_of(run_dir) == before


def test_data_that_is_gone_names_the_way_out(data: Path, whole: Path, tmp_path: Path) -> None:
    """It could be edited into the old YAML, and nobody said so (ultralytics/ultralytics PR 26148)."""
    run_dir = shutil.copytree(whole, tmp_path / "stopped")
    (run_dir / "weights/epoch2.pt").replace(run_dir / "weights/last.pt")
    for gone in (data, data.parent / "images"):
        gone.rename(tmp_path / "away")
        try:
            with pytest.raises(UserError, match=r"if the data set of the run has moved, name its YAML .* with --data"):
                train_here("--resume", run_dir)
        finally:
            (tmp_path / "away").rename(gone)


@needs_root
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    """Found before the start, with the way out, and not after the training (roboflow/rf-detr#215)."""
    weights = tmp_path / "run/weights"
    weights.mkdir(parents=True)
    weights.parent.chmod(0o777)
    with as_nobody(tmp_path):
        with pytest.raises(UserError, match=r"^--resume \S+run: \S+weights can't be written to; .*--project FOLDER$"):
            check_resumed_folder(weights.parent)
        with pytest.raises(UserError, match="weights can't be written to; choose another name"):
            check_run_folder(weights.parent, exist_ok=True)
        check_run_folder(weights.parent / "new", exist_ok=False)
    weights.parent.chmod(0o755)
    with as_nobody(tmp_path), pytest.raises(UserError, match=r"^--resume \S+run: \S+run can't be written to; "):
        check_resumed_folder(weights.parent)


# Which run is over ----------------------------------------------------------------------------------------------------


def test_resume_from_python_is_of_the_checkpoint_in_hand(whole: Path) -> None:
    """``YOLO("last.pt").train(resume=True)`` looked for the newest run."""
    with pytest.raises(UserError, match=f"^--resume {whole}: nothing is left to resume, all its epochs are done"):
        YOLO(whole / "weights/last.pt").train(resume=True)
    with pytest.raises(UserError, match=f"^--resume {whole}/weights/best.pt: weights for use, not to go on from; name"):
        YOLO(whole / "weights/best.pt").train(resume=True)


def test_finished_runs_are_not_read(whole: Path, tmp_path: Path) -> None:
    """Among many a bare --resume takes no longer than among few: here their checkpoints could not be read at all."""
    assert is_finished(whole)
    for number in range(20):
        run_dir = shutil.copytree(whole, tmp_path / f"exp{number}")
        for path in (run_dir / "weights").iterdir():
            path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no run under .* is unfinished, the newest is "):
        found("--resume", "--project", tmp_path)
    unmarked = shutil.copytree(whole, tmp_path / "older")  # of a version that left no mark
    facts = unmarked / "environment.json"
    facts.write_text(facts.read_text().replace('"finished"', '"other"'))
    assert not is_finished(unmarked)
    (unmarked / "weights/epoch2.pt").replace(unmarked / "weights/last.pt")
    os.utime(unmarked / "weights/last.pt", (1, 1))
    os.utime(unmarked / "weights/last.prev.pt", (1, 1))
    _, saved = found("--resume", "--project", tmp_path)
    assert saved["run_dir"] == str(unmarked)


def test_the_mark_goes_when_a_run_goes_on(whole: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "copy")
    forget_end(run_dir)
    assert not is_finished(run_dir)
    assert "versions" in (run_dir / "environment.json").read_text()
    (run_dir / "environment.json").unlink()
    say_finished(run_dir)
    assert is_finished(run_dir)


# Commands that are printed --------------------------------------------------------------------------------------------


def test_scripts_as_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is copied has to work in the folder where it was printed."""
    monkeypatch.chdir(PROJECT)
    for typed, expected in {"train.py": "val.py", "./train.py": "./val.py", "": "val.py", "-c": "val.py"}.items():
        monkeypatch.setattr(sys, "argv", [typed])
        assert script("val.py") == expected
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").symlink_to(PROJECT)
    (tmp_path / "train.py").write_text("")
    cases = {"code/train.py": "code/val.py", "train.py": str(PROJECT / "val.py"), "": str(PROJECT / "val.py")}
    for typed, expected in cases.items():
        monkeypatch.setattr(sys, "argv", [typed])
        assert script("val.py") == expected
    monkeypatch.setattr(sys, "argv", ["code/train.py"])
    assert resume_command(Path("my runs/exp")) == "python code/train.py --resume 'my runs/exp'"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun --standalone --nproc_per_node 4 train.py --resume runs/exp"),
        ({}, "python train.py --resume runs/exp  # by the launcher of before, on 4 ranks"),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCKSTEP_LAUNCHER": "7"}, "python train.py --resume runs/exp"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"},
            "torchrun --nnodes 2 --nproc_per_node 2 train.py --resume runs/exp  # on each machine, with the "
            "--node_rank, --master_addr and --master_port of before",
        ),
    ],
)
def test_the_launcher_is_part_of_the_command(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device a run on four would go on four times as slowly, or not at all."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**place, **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert resume_command(Path("runs/exp")) == expected


# Without a home -------------------------------------------------------------------------------------------------------


@needs_root
def test_read_only_code_draws_its_data_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's data could not be drawn, and ``python -m utils.data.shapes`` was a RuntimeError.

    NVIDIA-TAO/tao-skill-bank PR 150
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    yaml = shutil.copytree(PROJECT / "data", tmp_path / "code/data") / "shapes.yaml"
    for module in (data_config, shapes):
        monkeypatch.setattr(module, "ROOT", tmp_path / "code")
    monkeypatch.chdir(tmp_path / "code")
    with as_nobody(tmp_path / "code/data"):
        expected = tmp_path / "tmp" / f"lockstep-{os.getuid()}" / "shapes"
        assert (data_config.load_data(yaml).root, shapes.shapes_root()) == (expected, expected)
    assert not list((tmp_path / "code").rglob("datasets"))


def test_a_stop_of_before_does_not_keep_a_life_from_being_started_again(tmp_path: Path) -> None:
    """The file RESUME stays until a run that goes on has trained something, however often it fails before."""
    (tmp_path / RESUME).write_text("")
    assert not was_stopped(tmp_path)
    (tmp_path / RECORD).write_text("{}")
    os.utime(tmp_path / RESUME, (1, 1))
    assert not was_stopped(tmp_path)
    (tmp_path / RESUME).touch()
    assert was_stopped(tmp_path)


# What is over ---------------------------------------------------------------------------------------------------------


def as_stopped_early(whole: Path, run_dir: Path) -> Path:
    """A copy of a run as if --patience had ended it after its second epoch."""
    shutil.copytree(whole, run_dir)
    saved = load_checkpoint(run_dir / "weights/epoch2.pt")
    saved["state"]["stopped"] = True
    save_checkpoint(saved, run_dir / "weights/last.pt")
    return run_dir


def test_a_run_that_stopped_early_is_started_again(whole: Path, tmp_path: Path) -> None:
    """By its launcher, with the flags of before: it comes to its end, and trains no more."""
    run_dir = as_stopped_early(whole, tmp_path / "run")
    patience = load_checkpoint(run_dir / "weights/last.pt")["config"]["patience"]
    for flags_of_before in ({}, {"patience": patience, "epochs": 3}):
        _, saved = resume({"resume": str(run_dir), **flags_of_before}, again=True)
        assert saved["state"]["stopped"] and saved["run_dir"] == str(run_dir)
    _, saved = resume({"resume": str(run_dir), "patience": patience}, again=False)  # whoever types that wants more
    assert not saved["state"]["stopped"]
    with pytest.raises(UserError, match=f"^--resume {run_dir}: nothing is left to resume, it stopped early"):
        resume({"resume": str(run_dir)})


@pytest.mark.parametrize("stopped", [False, True])
def test_without_final_weights_only_a_finished_run_is_over(stopped: bool, whole: Path, tmp_path: Path) -> None:
    """With --nosave best.pt is made in the end: a run that died before that goes on, and makes it."""
    run_dir = as_stopped_early(whole, tmp_path / "run") if stopped else shutil.copytree(whole, tmp_path / "run")
    (run_dir / "weights/best.pt").unlink()
    why = "it stopped early" if stopped else "all its epochs are done"
    with pytest.raises(UserError, match=f"nothing is left to resume, {why}"):
        found("--resume", run_dir)
    forget_end(run_dir)
    assert found("--resume", run_dir)[1]["run_dir"] == str(run_dir)
