"""Whole training runs: files, resume, switches, steps that are not finite, mistakes."""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import train
from models.yolo import DetectionModel
from tests.common import PROJECT
from tests.runs import (
    CHILD_ENVIRONMENT,
    differences,
    flags,
    kill_in_third_epoch,
    launch,
    make_data,
    results,
    sees_images,
    torch_settings_kept,
    train_here,
)
from utils.checkpoints.files import non_finite
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.core.errors import NO_PROGRESS, DivergedError, NotWrittenError, UserError, ended_by
from utils.run.events import train_start
from utils.run.loading import open_loaders
from utils.run.progress import RunClock
from utils.run.resume import RESUMABLE_FLAGS, STATE_KEYS
from utils.run.saving import tell_written
from utils.torch_utils import load_checkpoint, process_group, save_checkpoint

FIGURES = ["metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


class Finished:
    """A run of three epochs, started as a user would, with what it said."""

    def __init__(self, data: Path, folder: Path) -> None:
        self.command = flags(data, folder / "my runs", "--workers 2 --save-period 1")
        done = launch(*self.command, cwd=folder)
        assert done.returncode == 0, done.stderr
        self.stdout, self.stderr, self.run_dir = done.stdout, done.stderr, folder / "my runs" / "run"
        self.weights = self.run_dir / "weights"
        self.last = load_checkpoint(self.weights / "last.pt")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(data, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def stopped(whole: Finished, tmp_path: Path) -> Path:
    """A copy of the run as it was after its second epoch, in another place."""
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "copy")
    for name in ("last.pt", "last.prev.pt", "epoch3.pt"):
        (run_dir / "weights" / name).unlink()
    shutil.copy(run_dir / "weights" / "epoch2.pt", run_dir / "weights" / "last.pt")
    return run_dir


def mistake(*arguments: object) -> str:
    """Return what a command line is refused with."""
    with pytest.raises(UserError) as info:
        train_here(*arguments)
    return str(info.value)


def assert_same_run(whole: Finished, run_dir: Path) -> None:
    """Everything the last checkpoint holds is the same but for the run's place, and so is results.csv."""
    expected, found = whole.last, load_checkpoint(run_dir / "weights" / "last.pt")
    assert found["run_dir"] == str(run_dir)
    free = RESUMABLE_FLAGS
    expected, found = (
        {**state, "run_dir": "", "config": {key: value for key, value in state["config"].items() if key not in free}}
        for state in (expected, found)
    )
    assert not differences(expected, found)
    assert (run_dir / "results.csv").read_text() == (whole.run_dir / "results.csv").read_text()


# What a run says and leaves -------------------------------------------------------------------------------------------


def test_run_folder(whole: Finished) -> None:
    files = {str(path.relative_to(whole.run_dir)) for path in whole.run_dir.rglob("*") if path.is_file()}
    weights = {f"weights/{name}.pt" for name in ("last", "last.prev", "best", "epoch1", "epoch2", "epoch3")}
    assert weights | {"opt.yaml", "hyp.yaml", "environment.json", "results.csv"} <= files
    table = results(whole.run_dir)
    assert list(table.columns) == [
        *("epoch", "train/box_loss", "train/obj_loss", "train/cls_loss", *FIGURES),
        *("val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2"),
    ]
    assert table["epoch"].tolist() == [1, 2, 3]
    assert np.isfinite(table.to_numpy()).all()
    assert (table.iloc[:, 1:3].to_numpy() > 0).all()
    options = yaml.safe_load((whole.run_dir / "opt.yaml").read_text())
    assert (options["imgsz"], options["batch_size"], options["save_period"]) == (64, 4, 1)


def test_checkpoint_holds_everything_that_moves(whole: Finished) -> None:
    """In full precision (ultralytics/yolov5#13513), two generations apart by one epoch."""
    last = whole.last
    needed = {
        "model",
        "ema",
        "optimizer",
        "scaler",
        "meters",
        "rank_buffers",
        "rng",
        "state",
        "config",
        "hyp",
        "versions",
    }
    assert needed <= last.keys()
    state = last["state"]
    assert (state["epoch"], state["batch"], state["since_step"], state["skipped"]) == (3, 0, 0, 0)
    assert (state["step"], last["ema"]["updates"]) == (4, 4)  # windows of 1 2 | 3 | 3 micro-batches: warm-up
    assert load_checkpoint(whole.weights / "last.prev.pt")["state"]["epoch"] == 2
    for weights in (last["model"], last["ema"]["module"]):
        assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}
    assert len(last["optimizer"]["state"]) == sum(name.endswith(("weight", "bias")) for name in last["model"])


def test_best_weights_are_the_averaged_ones_of_the_best_epoch(whole: Finished) -> None:
    table = results(whole.run_dir)
    fitness = 0.1 * table[FIGURES[2]] + 0.9 * table[FIGURES[3]]
    best_epoch = int(fitness.argmax())
    best = load_checkpoint(whole.weights / "best.pt")
    assert best["state"]["epoch"] == best_epoch + 1
    assert whole.last["state"]["best_epoch"] == best_epoch
    then = load_checkpoint(whole.weights / f"epoch{best_epoch + 1}.pt")
    assert not differences(best["model"], then["ema"]["module"])
    assert differences(best["model"], then["model"])
    assert not best.keys() & {"ema", "optimizer", "scaler", "meter", "rng", "gradients"}


def test_header_says_what_follows_from_the_flags(whole: Finished) -> None:
    header = dict(re.findall(r"^(\w+) +(.*)$", whole.stdout, re.M))
    assert header["run"] == f"{whole.run_dir}, seed 0, deterministic"
    assert header["data"].startswith("data.yaml: 10 images to train on with 9 objects of 2 classes, 4 to validate on")
    assert header["network"].startswith("yolov5n.yaml: 1,7")
    assert "GFLOPs at 64 px" in header["network"]
    assert header["batch"] == ("4 images = 1 x 4, accumulated over 16: 64 images an optimizer step; 4 in validation")
    assert header["schedule"] == (
        "3 epochs of 3 batches, SGD, learning rate 0.01 to 0.0001 (linear), warm-up 9 batches, 100% of the run"
    )
    assert "WARNING: 9 of the run's 9 batches are warm-up, so it hardly trains at lr0 0.01: give more " in whole.stdout
    assert re.fullmatch(
        r"(1 process|2 processes)(, none for validation)?, cache ram", header["loader"]
    )  # not more than there are cores
    assert header["precision"] in ("fp32", "bf16 autocast, fp32 weights")
    assert header["precision"].startswith({"off": "fp32"}.get(whole.last["precision"], whole.last["precision"]))


def test_progress_line(whole: Finished) -> None:
    """One line an epoch, on stderr, with the means of results.csv; nothing is written over where no terminal is."""
    lines = whole.stderr.splitlines()
    assert len(lines) == 3 and "\r" not in whole.stderr
    pattern = (
        r"(\d)/3 100% 3/3, box (\S+), obj (\S+), cls (\S+), lr (\S+), 64 px, "
        r"(\d+) images/s(?: \(waiting for images: \d+%\))?, \d+\.\d GB, \d+:\d\d left$"
    )
    shown = {match[1]: match for line in lines if (match := re.fullmatch(pattern, line.strip()))}
    assert list(shown) == ["1", "2", "3"], whole.stderr
    for epoch, row in results(whole.run_dir).iterrows():
        losses = [float(text) for text in shown[str(epoch + 1)].groups()[1:4]]  # type: ignore[operator]
        np.testing.assert_allclose(losses, row.iloc[1:4], atol=1e-4)
        assert float(shown[str(epoch + 1)][5]) == pytest.approx(row["x/lr1"], rel=0.05)  # type: ignore[operator]
    assert shown["3"][0].strip().endswith(", 0:00 left")


def tables(text: str) -> list[list[str]]:
    """Return the validation tables in a text, each as its rows without the heading."""
    row = r"^ *\S+(?: +\d+){2}(?: +[\d.]+){4} *$"
    blocks = re.findall(rf"^ *Class +Images.*\n((?:{row}\n)+)", text, re.M)
    return [block.strip("\n").splitlines() for block in blocks]


@pytest.mark.slow
@pytest.mark.gate
def test_final_table_and_the_command_that_makes_it_again(whole: Finished, tmp_path: Path) -> None:
    """One overall row after each epoch; at the end classes too, and val.py as printed says the same."""
    shown = tables(whole.stdout)
    assert [[row.split()[0] for row in table] for table in shown] == [["all"]] * 3 + [["all", "blue", "red"]]
    best_row = results(whole.run_dir).iloc[whole.last["state"]["best_epoch"]]
    np.testing.assert_allclose([float(word) for word in shown[-1][0].split()[3:]], best_row[FIGURES], atol=6e-4)

    again = re.search(r"^again +(python \S+val\.py .*)$", whole.stdout, re.M)
    assert again is not None, whole.stdout
    _, script, *arguments = shlex.split(again[1])
    done = launch(*arguments, cwd=tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    assert tables(done.stdout) == [shown[-1]]


# Resume ---------------------------------------------------------------------------------------------------------------


@pytest.mark.lowest
def test_killed_and_resumed_is_the_same_run(data: Path, whole: Finished, tmp_path: Path) -> None:
    """Killed inside the last epoch (ultralytics/yolov5#141, #292); bare --resume finds it and stays in its folder.

    A newer run beside it is finished (ultralytics/ultralytics#21963).
    """
    project = tmp_path / "my runs"
    with subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py"), *whole.command, "--project", str(project)],
        cwd=tmp_path,
        env=CHILD_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as started:
        run_dir = project / "run"
        kill_in_third_epoch(started, run_dir)
    assert load_checkpoint(run_dir / "weights/last.pt")["state"]["epoch"] == 2, "killed too late to test anything"
    assert len(results(run_dir)) in (2, 3)  # the row of an epoch comes before its checkpoint
    moved = shutil.copytree(run_dir, tmp_path / "elsewhere" / "moved")
    newer = shutil.copytree(whole.run_dir, project / "newer")
    for path in newer.rglob("*.pt"):
        path.touch()

    train_here("--resume", "--project", project)
    assert_same_run(whole, run_dir)
    assert sorted(path.name for path in project.iterdir()) == ["newer", "run"]
    assert "is unfinished" in mistake("--resume", "--project", project, "--epochs", 99), "only by its name"

    train_here("--resume", moved, "--workers", 1, "--cache", "off")  # which may differ
    assert_same_run(whole, moved)
    assert not (moved.parent / "moved2").exists()


@pytest.mark.slow
def test_a_run_that_was_cut_short_behind_its_last_epoch(whole: Finished, tmp_path: Path) -> None:
    """It stopped early, and died before its last act: going on trains nothing and brings it to its end."""
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "copy")
    saved = load_checkpoint(run_dir / "weights/last.prev.pt")
    saved["state"]["stopped"] = True
    for name in ("last.pt", "best.pt"):
        save_checkpoint(saved, run_dir / "weights" / name)
    (run_dir / "weights/epoch1.pt").unlink()
    train_here("--resume", run_dir)
    assert load_checkpoint(run_dir / "weights/last.pt")["state"] == saved["state"]
    assert "optimizer" not in load_checkpoint(run_dir / "weights/best.pt")
    assert "nothing is left to resume, it stopped early" in mistake("--resume", run_dir)


@pytest.mark.slow
def test_beyond_the_end(whole: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run goes on with more epochs, along their schedule (Megvii-BaseDetection/YOLOX#1145)."""
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "copy")
    epochs = load_checkpoint(run_dir / "weights/last.pt")["config"]["epochs"]
    capsys.readouterr()
    train_here("--resume", run_dir, "--epochs", epochs + 1)
    said = capsys.readouterr().out
    assert f"--epochs {epochs} becomes {epochs + 1}" in said
    assert f"the learning rate goes on along the schedule of {epochs + 1} epochs" in said
    assert results(run_dir)["epoch"].tolist() == list(range(1, epochs + 2))
    assert load_checkpoint(run_dir / "weights/last.pt")["config"]["epochs"] == epochs + 1


@pytest.mark.slow
def test_resume_from_one_of_many_checkpoints(whole: Finished, tmp_path: Path) -> None:
    """From exactly the file that was named, in a folder of its own: what the run did after it stays."""
    before = {path: path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()}
    train_here("--resume", whole.weights / "epoch1.pt", "--project", tmp_path)
    assert_same_run(whole, tmp_path / "run")
    assert load_checkpoint(tmp_path / "run/weights/last.prev.pt")["state"]["epoch"] == 2
    assert {path: path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()} == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    whole: Finished, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(stopped / "weights/epoch1.pt", stopped / "weights/last.prev.pt")
    (stopped / "weights/last.pt").write_bytes((stopped / "weights/last.pt").read_bytes()[:-1000])
    named = mistake("--resume", stopped / "weights/last.pt")  # it is that file that is wanted, and no other
    assert named.startswith(f"--resume {stopped}/weights/last.pt is damaged or not a checkpoint: ")
    train_here("--resume", stopped)
    assert_same_run(whole, stopped)
    assert "WARNING: " in (said := capsys.readouterr().out) and "last.pt is damaged" in said


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    """A change that takes the last key away, from the place that the ones before it lead to."""

    def change(saved: dict[str, Any]) -> None:
        for key in keys[:-1]:
            saved = saved[key]
        del saved[keys[-1]]

    return change


def with_optimizer_of_another_network(saved: dict[str, Any]) -> None:
    saved["optimizer"]["param_groups"][0]["params"].pop()


NOT_OURS = r"last\.pt: its state is not as this program saves it \(\w+: .*\); go on with the version that saved it"
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    **{key: (without(key), f"no state of a run, {key} is missing") for key in sorted(STATE_KEYS - {"optimizer"})},
    "optimizer": (without("optimizer"), "weights for use, not to go on from"),
    "epoch": (without("state", "epoch"), "no state of a run, epoch is missing"),
    "weight": (without("model", "model.0.conv.weight"), r"the weights don't fit the network, 1 tensors differ"),
    "averaged weight": (without("ema", "module", "model.0.conv.weight"), NOT_OURS),
    "generator": (without("rng", "numpy"), NOT_OURS),
    "moments": (with_optimizer_of_another_network, NOT_OURS),
    "newer state": (lambda saved: saved["state"].update(shown=3), NOT_OURS),
    "names": (lambda saved: saved.update(names=["red", "blue"]), "the class names in .*data.yaml are no longer those"),
    "count": (lambda saved: saved.update(names=["blue", "red", "green"]), "the class names in .*data.yaml are no "),
    "spec": (lambda saved: saved["spec"].update(width_multiple=0.5), "the weights don't fit the network"),
    "flag": (lambda saved: saved["config"].update(colour=3), "colour"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_resume_from_what_does_not_fit(stopped: Path, change: str) -> None:
    """One line and status 2, as for all UserErrors; nothing is changed (ultralytics/ultralytics#3439)."""
    path = stopped / "weights/last.pt"
    saved = load_checkpoint(path)
    CHANGES[change][0](saved)
    save_checkpoint(saved, path, keep_previous=False)
    before = {file: file.read_bytes() for file in stopped.rglob("*") if file.is_file() and file.name[0] != "."}
    for named in (stopped, path):
        message = mistake("--resume", named)
        assert re.search(CHANGES[change][1], message), message
        assert "\n" not in message
    assert {file: file.read_bytes() for file in stopped.rglob("*") if file.is_file() and file.name[0] != "."} == before


def test_resume_from_a_newer_program(stopped: Path) -> None:
    path = stopped / "weights/last.pt"
    torch.save({"checkpoint_format": 2, "digest": ""}, path)
    for named in (stopped, path):
        message = mistake("--resume", named)
        assert message.endswith("last.pt has format 2, this program reads up to 1; use a newer version")


def test_what_a_resume_needs_is_what_is_saved(whole: Finished) -> None:
    assert STATE_KEYS | {"run_dir"} == whole.last.keys()


def test_a_finished_run_is_not_resumed(whole: Finished, tmp_path: Path) -> None:
    assert "nothing is left to resume, all its epochs are done" in mistake("--resume", whole.run_dir)
    project = whole.run_dir.parent
    bare = mistake("--resume", "--project", project)
    assert bare.startswith(
        f"--resume: no run under {project} is unfinished, the newest is {whole.run_dir}; start a new"
    )
    assert "weights for use" in mistake("--resume", whole.weights / "best.pt")
    assert "no weights/last.pt there" in mistake("--resume", tmp_path)
    assert "no run with weights/last.pt" in mistake("--resume", "--project", tmp_path)


def test_resume_keeps_its_settings(stopped: Path, data: Path) -> None:
    message = mistake("--resume", stopped, "--batch", 2, "--epochs", 5, "--data", data, "--seed", 1)
    assert "can't change --batch-size 2 (the run has 4), --seed 1 (the run has 0); " in message
    assert "leave them out" in message
    assert "--data" not in message.split("What may change")[0]
    assert "can't change --batch-size 2 (the run has 4); " in mistake("--resume", stopped, "--batch", 2)
    assert "can't change --name other (the run has run); " in mistake("--resume", stopped, "--name", "other")


def test_resume_on_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other class names are refused; other images are said."""
    data = make_data(tmp_path / "data")
    train_here(*flags(data, tmp_path, "--epochs 2 --save-period 1"))
    weights = tmp_path / "run/weights"
    shutil.copy(weights / "epoch1.pt", weights / "last.pt")

    text = data.read_text()
    data.write_text(text.replace("blue, red", "red, blue"))
    assert "the class names in" in mistake("--resume", tmp_path / "run")
    data.write_text(text)
    (tmp_path / "data/labels/train/2.txt").unlink()
    capsys.readouterr()
    train_here("--resume", tmp_path / "run")
    said = capsys.readouterr().out
    assert "WARNING: since this run was saved its data changed: " in said
    assert "train instances 9 became 7" in said
    assert "resumed     after epoch 1 of 2" in said


# Switches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "cache"), [(0, "off"), (1, "disk")])
def test_workers_and_cache_change_nothing(
    data: Path, whole: Finished, tmp_path: Path, workers: int, cache: str
) -> None:
    """The whole run had two workers and the images in memory."""
    train_here(*flags(data, tmp_path, f"--workers {workers} --cache {cache}"))
    last = load_checkpoint(tmp_path / "run/weights/last.pt")
    assert not differences(whole.last["model"], last["model"])
    assert not differences(whole.last["ema"], last["ema"])


@pytest.mark.parametrize(
    "switch",
    ["--noval --nosave", *(pytest.param(switch, marks=pytest.mark.slow) for switch in ("--noval", "--nosave"))],
)
def test_noval_and_nosave(data: Path, tmp_path: Path, switch: str) -> None:
    """Without validations nothing can stop a run early; without saves only the last state is there to be used."""
    (tmp_path / "still.yaml").write_text("lr0: 0\nwarmup_bias_lr: 0\n")  # so that the first fitness is the best
    patience = 2 if "--noval" in switch else 0
    train_here(*flags(data, tmp_path, switch, f"--hyp {tmp_path / 'still.yaml'} --patience {patience} --epochs 4"))
    table, weights = results(tmp_path / "run"), tmp_path / "run/weights"
    last, best = load_checkpoint(weights / "last.pt"), load_checkpoint(weights / "best.pt")
    validated = table[FIGURES].notna().all(axis=1).tolist()
    assert validated == ([False] * 3 + [True] if "--noval" in switch else [True] * 4)
    assert (weights / "last.prev.pt").exists() == ("--nosave" not in switch)
    assert last["state"]["epoch"] == best["state"]["epoch"] == 4
    assert not differences(best["model"], last["ema"]["module"])


def test_early_stop(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Learning nothing, the run ends ``--patience`` epochs after its first; it is then finished."""
    (tmp_path / "still.yaml").write_text("lr0: 0\nwarmup_bias_lr: 0\n")
    (tmp_path / "run").mkdir()
    arguments = flags(data, tmp_path, f"--hyp {tmp_path / 'still.yaml'} --patience 2 --epochs 9 --nosave")
    train_here(*arguments)
    assert "no better fitness for 2 epochs (--patience): stopping early" in capsys.readouterr().out
    assert len(results(tmp_path / "run2")) == 3
    assert load_checkpoint(tmp_path / "run2/weights/last.pt")["state"]["stopped"]
    assert "nothing is left to resume, it stopped early" in mistake("--resume", tmp_path / "run2")


@pytest.mark.slow
def test_exist_ok_leaves_nothing_of_the_run_before(whole: Finished, data: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(whole.run_dir, tmp_path / "run")
    train_here(*flags(data, tmp_path, "--exist-ok --epochs 1 --cfg yolov3-tiny.yaml"))
    assert {path.name for path in (run_dir / "weights").iterdir()} == {"last.pt", "best.pt"}
    for path in (run_dir / "weights").iterdir():
        assert load_checkpoint(path)["spec"]["family"] == "yolov3"
    assert len(results(run_dir)) == 1
    assert not (tmp_path / "run2").exists()


def test_frozen_layers_stay_as_they_are(whole: Finished, data: Path, tmp_path: Path) -> None:
    """Bit for bit, what BatchNorm has measured too (ultralytics/ultralytics#9391), and averaged as they are.

    Started from weights of the same classes, in another network's YAML they would not fit.
    """
    best = whole.weights / "best.pt"
    train_here(*flags(data, tmp_path, f"--weights {shlex.quote(str(best))} --freeze 10 --epochs 1 --optimizer AdamW"))
    last, start = load_checkpoint(tmp_path / "run/weights/last.pt"), load_checkpoint(best)
    anchors = "model.24.anchors"
    for state in (last["model"], last["ema"]["module"]):
        same = [name for name in start["model"] if torch.equal(start["model"][name], state[name])]
        assert same == [name for name in start["model"] if int(name.split(".")[1]) < 10 or name == anchors]
    assert last["config"]["cfg"] == ""
    assert last["spec"] == start["spec"]
    assert last["hyp"]["lr0"] == last["hyp"]["warmup_bias_lr"] == 0.001  # scratch-low's are for SGD
    assert yaml.safe_load((tmp_path / "run/hyp.yaml").read_text())["lr0"] == 0.001


def test_weights_of_other_classes_give_all_but_the_head(
    whole: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data")
    data.write_text(data.read_text().replace("blue, red", "blue, red, green"))
    best = whole.weights / "best.pt"
    train_here(*flags(data, tmp_path, f"--weights {shlex.quote(str(best))} --freeze 24 --epochs 1"))
    last, start = load_checkpoint(tmp_path / "run/weights/last.pt")["model"], load_checkpoint(best)["model"]
    for name in start:
        if name.startswith("model.24.m."):
            assert len(last[name]) == 3 * 8
        elif name.endswith((".weight", ".bias")):
            assert torch.equal(last[name], start[name]), name
    said = capsys.readouterr().out
    assert re.search(r"^weights .*best\.pt: \d+ tensors taken; 6 keep their initialization", said, re.M)


def test_shapes_and_schedules(data: Path, tmp_path: Path) -> None:
    """--rect, --multi-scale and --cos-lr together; the rate is the cosine's, as far as the warm-up lets it."""
    shapes: list[tuple[int, int]] = []
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: (
            shapes.append((inputs[0].shape[2], inputs[0].shape[3]))
            if isinstance(module, DetectionModel) and module.training and len(inputs[0]) == 4
            else None
        )
    )
    with contextlib.ExitStack() as stack:
        stack.callback(handle.remove)
        train_here(*flags(data, tmp_path, "--rect --multi-scale --cos-lr --optimizer AdamW --img 128 --epochs 4"))
    assert len(shapes) == 12
    assert any(height < width for height, width in shapes)
    assert all(64 <= width <= 192 and width % 32 == 0 for _, width in shapes)
    assert len(set(shapes)) > 2
    table = results(tmp_path / "run")
    for epoch in range(4):
        i = 3 * epoch + 2
        base = 0.001 * ((1 - np.cos(np.pi * epoch / 4)) / 2 * (0.01 - 1) + 1)
        warm = min(i / 9, 1)
        assert table["x/lr1"][epoch] == pytest.approx(base * warm, rel=1e-5)
        assert table["x/lr0"][epoch] == pytest.approx(0.001 + (base - 0.001) * warm, rel=1e-5)


# Steps that are not finite --------------------------------------------------------------------------------------------


class Poison(nn.Module):
    """Forward hook that makes one micro-batch's first feature map NaN, as an overflow would."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls += 1
        return output * float("nan") if self.calls == self.call else output


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_window_with_nan_leaves_no_trace(
    data: Path, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, statistics, momentum and EMA are as before the window (ultralytics/ultralytics#24615, #24170).

    With --nbs 6400 the second epoch is one window of three micro-batches; its second one is spoiled.
    """
    given = flags(data, tmp_path, f"--nbs 6400 --optimizer {optimizer} --epochs 4 --patience 0")
    config = build_train_config(given_flags(TrainConfig, given))
    with torch_settings_kept(), process_group("cpu") as env, contextlib.ExitStack() as stack:
        run = train.set_up(config, env)
        batches, val_batches = open_loaders(run, stack)
        clock = RunClock(4, 0)
        run.callbacks.train_start(train_start(run, False))

        def epoch() -> tuple[dict[str, Any], list[float], str]:
            capsys.readouterr()
            losses = train.train_epoch(run, batches, clock)
            train.end_epoch(run, losses, val_batches, clock)
            run.writer.wait()
            tell_written(run)
            return load_checkpoint(run.run_dir / "weights/last.pt"), losses, capsys.readouterr().out

        before, _, _ = epoch()
        handle = run.raw_model.model[0].register_forward_hook(poison := Poison(2))
        after, losses, said = epoch()
        handle.remove()
        assert poison.calls == 3
        assert not differences(before["model"], after["model"])
        assert not differences(before["ema"]["module"], after["ema"]["module"])
        assert not differences(before["optimizer"]["state"], after["optimizer"]["state"])
        assert np.isfinite(losses).all()
        assert after["state"]["skipped"] == after["ema"]["skipped"] == 1
        assert said.count("WARNING: optimizer steps skipped in this epoch: 1, for their gradients were not finite") == 1

        healthy, _, said = epoch()
        assert len(differences(before["model"], healthy["model"])) > 200
        assert "skipped" not in said
        assert healthy["state"]["skipped"] == 1

        with torch.no_grad():
            run.raw_model.get_parameter("model.3.conv.weight")[0, 0] = float("inf")
        run.state.best_fitness, run.proven = -1.0, (-1.0, 0)  # as if nothing had been validated before
        saved, _, said = epoch()
        assert not differences(healthy, saved)
        assert "model.model.3.conv.weight holds NaN or infinity" in said
        assert "the checkpoint before it stays" in said
        assert run.state.best_fitness == -1.0  # else best.pt would wait for better weights than were saved
        assert results(run.run_dir)["epoch"].tolist() == [1, 2, 3, 4]


def spoil_forward(start: int) -> RemovableHandle:
    """Make all outputs of networks that train NaN, from this forward pass of the loop on."""
    count = 0

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        nonlocal count
        if not (sees_images(module, inputs) and module.training):
            return None
        count += 1
        return [output * float("nan") for output in outputs] if count > start else None

    return nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("windows", ["of one micro-batch", pytest.param("of many", marks=pytest.mark.slow)])
def test_a_run_that_gets_nowhere_ends(
    data: Path, tmp_path: Path, windows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After ten windows in a row: saved as before them, images named, with the status that means "not again".

    ultralytics/ultralytics#19357 (NaN for the rest of the run, hidden), ultralytics/ultralytics#24986. Windows of many
    micro-batches are not over when the notes on skipped ones are read.
    """
    if windows == "of many":
        data = make_data(tmp_path / "data", count=60, val=2)
        line = flags(data, tmp_path, "--batch 1 --nbs 16 --epochs 9 --noval")
        good = 25  # micro-batches
    else:
        line, good = flags(data, tmp_path, "--nbs 4 --epochs 9"), 3
    with spoil_forward(good), pytest.raises(DivergedError) as info:
        train_here(*line)
    assert ended_by(info.value) == NO_PROGRESS == 93
    last = tmp_path / "run/weights/last.pt"
    assert str(info.value).startswith("the last 1")
    assert f"The weights of before are in {last}: look at the images that were named" in str(info.value)
    saved = load_checkpoint(last)
    assert saved["state"]["since_step"] == 0
    assert saved["ema"]["skipped"] >= 10
    assert not [name for key in ("model", "ema", "optimizer") for name in non_finite(saved[key], key)]
    if windows != "of many":
        assert saved["state"]["step"] == 3 + 12  # looked at after each epoch
        first = load_checkpoint(last.with_name("best.pt"))
        assert first["state"]["epoch"] == 1
        assert not differences(first["model"], saved["model"])
    said = capsys.readouterr().out
    warned = re.findall(
        r"^WARNING: the loss was not finite in optimizer step ([\d, ]+), with these images: (.*)$", said, re.M
    )
    steps = [int(step) for numbers, _ in warned for step in numbers.split(", ")]
    assert len(steps) - saved["ema"]["skipped"] in (0, -1)  # notes read within a window: it is the last one
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    images = {path for _, paths in warned for path in paths.split(", ") if path != "..."}
    assert images <= {str(path) for path in (data.parent / "images/train").iterdir()}
    assert len(images) >= 8


@pytest.mark.parametrize("part", ["statistics", "averages"])
def test_what_only_the_state_shows(data: Path, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A NaN in running statistics, or in the averaged weights, spoils no loss; it is found when the state is saved.

    ultralytics/ultralytics#24615. What was saved before stays, and the run does not end as if all were well.
    """
    calls = 0

    def spoil(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        if sees_images(module, inputs) and module.training is (part == "statistics"):
            calls += 1
            if calls == {"statistics": 4, "averages": 2}[part]:  # in the second epoch, in training or validation
                module.get_buffer("model.3.bn.running_var")[2] = float("nan")

    line = flags(data, tmp_path, "--epochs 3 --val-batch 4")
    with nn.modules.module.register_module_forward_pre_hook(spoil), pytest.raises(NotWrittenError):
        train_here(*line)
    said = capsys.readouterr().out
    place = "model.model.3.bn.running_var" if part == "statistics" else "ema.module.model.3.bn.running_var"
    assert said.count(f"last.pt was not written: {place} holds NaN or infinity") == 2
    assert said.count("the checkpoint before it stays") == 2
    weights = tmp_path / "run/weights"
    for name in ("last.pt", "best.pt"):
        saved = load_checkpoint(weights / name)
        assert saved["state"]["epoch"] == 1
        assert not non_finite(saved["model"], "")
    assert sorted(path.name for path in weights.iterdir()) == ["best.pt", "last.pt"]
    assert results(tmp_path / "run")["epoch"].tolist() == [1, 2, 3]


# The thread that writes -----------------------------------------------------------------------------------------------


def test_an_error_of_the_writer_ends_the_run(data: Path, tmp_path: Path) -> None:
    """At the next window; it would else save nothing any more, in silence."""
    config = build_train_config(given_flags(TrainConfig, flags(data, tmp_path, "--nbs 4")))
    with torch_settings_kept(), process_group("cpu") as env, contextlib.ExitStack() as stack:
        run = train.set_up(config, env)
        stack.callback(run.writer.close)
        batches, val_batches = open_loaders(run, stack)
        clock = RunClock(3, 0)
        run.callbacks.train_start(train_start(run, False))
        losses = train.train_epoch(run, batches, clock)
        run.raw_model.yaml["made"] = tmp_path  # no plain value
        train.end_epoch(run, losses, val_batches, clock)
        with contextlib.suppress(TypeError):
            run.writer.close()
        with pytest.raises(TypeError, match=r"state\['spec'\]\['made'\] is of type \w*Path"):
            train.train_epoch(run, batches, clock)
        assert run.state.batch == 1


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_mistakes_come_together_and_leave_nothing(tmp_path: Path) -> None:
    done = launch("--data", "nowhere.yaml", "--hyp", "nothing.yaml", "--cfg", "yolov5q.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 3 problems\n")
    assert all(word in done.stderr for word in ("nowhere.yaml", "nothing.yaml", "yolov5q.yaml"))
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_run_folder_for_a_run_that_cannot_start(whole: Finished, data: Path, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no weights")
    start = flags(data, tmp_path / "runs")
    assert "text.pt is damaged or not a checkpoint" in mistake(*start, "--weights", tmp_path / "text.pt")
    assert "none.pt is not there" in mistake(*start, "--weights", tmp_path / "none.pt", "--cfg", "yolov5n.yaml")
    best = whole.weights / "best.pt"
    assert "the weights don't fit the network" in mistake(*start, "--weights", best, "--cfg", "yolov5s.yaml")
    assert "--freeze 0 30: there is no layer 30, the network has layers 0 to 24" in mistake(*start, "--freeze", 0, 30)
    assert "--freeze 25 leaves nothing to train" in mistake(*start, "--freeze", 25)
    assert "--amp fp16 does not work on this cpu device" in mistake(*start, "--amp", "fp16")
    no_images = data.with_name("no_images.yaml")
    no_images.write_text(data.read_text().replace("images/val", "images/vla"))
    assert "did you mean val?" in mistake(*start, "--data", no_images)
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_cannot_be_made(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = mistake(*flags(data, tmp_path / "file"))
    assert message.startswith(f"--project {tmp_path / 'file'}: the run folder") and "can't be made" in message


def test_image_size_is_rounded_up_and_said(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(*flags(data, tmp_path, "--img 65 --epochs 1"))
    said = capsys.readouterr().out
    assert "WARNING: --imgsz 65 is not a multiple of the network's stride 32; 96 is used" in said
    assert "GFLOPs at 96 px" in said and "--img 96 " in said


LIGHT = """
import runpy, sys
before = set(sys.modules)
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    heavy = loaded - set(sys.stdlib_module_names) - {"yaml", "_yaml", "utils", "own_packages"}
    print("HEAVY", sorted(name for name in heavy if "cython" not in name))  # which are parts of _yaml
"""


@pytest.mark.parametrize("script", ["train.py", "val.py"])
@pytest.mark.parametrize("argument", ["--help", "--epohcs"])
def test_help_and_wrong_flags_cost_no_imports(script: str, argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, script, argument], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if argument == "--help" else 2)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stdout + done.stderr
