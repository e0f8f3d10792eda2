"""Switches of training and validation: anchors, one class, label smoothing, when to validate, what is best."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

import train
import val
from models.yolo import DetectionModel
from tests.common import PROJECT, SHARED, needs_shared
from tests.runs import back_to, differences, flags, make_data, results, torch_settings_kept, train_here
from utils.config.build import parse
from utils.config.command_line import given_flags
from utils.config.data_yaml import as_one_class, build_train_config, load_data
from utils.config.flags import METRICS, TrainConfig, ValConfig
from utils.config.recipe import Hyp
from utils.core.errors import UserError
from utils.data.index import build_index
from utils.metrics.evaluation import summarize
from utils.torch_utils import load_checkpoint, process_group, save_checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def measure_here(*arguments: object) -> None:
    """Run val.py in this process."""
    val.main([str(argument) for argument in arguments])


# --- What is best ----------------------------------------------------------------------------------------------------


def test_every_metric_has_a_value() -> None:
    """Hand-made: two classes, one found with two false alarms, the other missed half of the time."""
    tp = np.array([[True] * 10, [False] * 10, [False] * 10, [True] * 5 + [False] * 5])
    conf, pred, target = np.array([0.9, 0.8, 0.75, 0.7]), np.array([0, 0, 0, 1]), [np.array([0, 1, 1])]
    metrics = summarize(tp, conf, pred, target, ["a", "b"])
    values = {name: metrics.value(name) for name in METRICS}
    assert values == {
        "fitness": metrics.fitness,
        "mAP50": metrics.map50,
        "mAP50-95": metrics.map,
        "precision": metrics.p,
        "recall": metrics.r,
        "F1": pytest.approx(float(np.mean(metrics.per_class.f1))),
    }
    assert values["fitness"] == pytest.approx(0.1 * values["mAP50"] + 0.9 * values["mAP50-95"])
    assert len(set(values.values())) == len(METRICS)
    with pytest.raises(KeyError):
        metrics.value("mAP")


def test_wrong_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(TrainConfig, ["--metric", "map50", "--val-period", "0", "--label-smoothing", "1.5"])
    said = capsys.readouterr().err
    assert "did you mean mAP50" in said and "--val-period must be at least 1" in said
    assert "--label-smoothing must be between 0 and 1" in said
    assert parse(ValConfig, ["--weights", "a.pt", "--augment", "--single-cls"]).augment


# --- One class -------------------------------------------------------------------------------------------------------


def test_classes_become_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, merged = load_data(data), load_data(data, single_cls=True)
    assert (merged.names, merged.num_classes, merged.label_classes) == (["item"], 1, 2)
    assert as_one_class(dataclasses.replace(plain, names=["cell"])).names == ["cell"]
    first, one, again = (
        build_index(plain.train, 2, single_cls=single_cls) for single_cls in (False, True, False)
    )  # from scans, then from the cache: neither takes the other's
    assert set(first.rows[:, 0]) == set(again.rows[:, 0]) == {0.0, 1.0} and set(one.rows[:, 0]) == {0.0}
    assert (first.rows[:, 1:] == one.rows[:, 1:]).all()
    assert one.images_digest == first.images_digest and one.name == first.name  # one cache of the pixels
    label = tmp_path / "labels/a.txt"
    (tmp_path / "images").mkdir()
    label.parent.mkdir()
    cv2.imwrite(str(tmp_path / "images/a.png"), np.zeros((20, 20, 3), np.uint8))
    label.write_text("2 0.5 0.5 0.2 0.2\n")
    with pytest.raises(UserError, match="whole numbers from 0 to 1"):  # an id that the YAML does not know is a mistake
        build_index([tmp_path / "images"], 2, single_cls=True, cache=False)


@pytest.mark.slow
def test_single_cls_from_training_to_validation(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One class in network, checkpoint and table; the command that the end names measures the same."""
    train_here(*flags(data, tmp_path, "--epochs 1 --single-cls --label-smoothing 0.1"))
    said = capsys.readouterr().out
    best = tmp_path / "run/weights/best.pt"
    saved = load_checkpoint(best)
    assert saved["names"] == ["item"] and saved["spec"]["nc"] == 1
    assert (saved["config"]["single_cls"], saved["config"]["label_smoothing"]) == (True, 0.1)
    assert " objects of 1 classes" in said
    again = shlex.split(said.split("val.py ")[1].splitlines()[0])
    assert "--single-cls" in again
    here = ["--workers", 0, "--project", tmp_path / "val"]
    measure_here(*again, *here)
    table = [re.search(r"^ +item .*$", text, re.M) for text in (said, capsys.readouterr().out)]
    assert table[0] and table[1] and table[0][0] == table[1][0]
    measure_here(*again, *here, "--augment")
    assert re.search(r"^ +item ", capsys.readouterr().out, re.M)
    with pytest.raises(UserError, match="1 classes"):
        measure_here("--weights", best, "--data", data, *here)


def test_label_smoothing_reaches_the_loss(data: Path, tmp_path: Path) -> None:
    config = build_train_config(given_flags(TrainConfig, flags(data, tmp_path, "--label-smoothing 0.2")))
    with torch_settings_kept(), process_group("cpu") as env:
        criterion = train.set_up(config, env).criterion
    assert (criterion.positive, criterion.negative) == (pytest.approx(0.9), pytest.approx(0.1))


# --- When to validate, and what counts -------------------------------------------------------------------------------


def test_val_period(data: Path, tmp_path: Path) -> None:
    """Epochs 2, 4 and the last are validated."""
    train_here(*flags(data, tmp_path, "--epochs 5 --val-period 2"))
    assert results(tmp_path / "run")["metrics/recall"].notna().tolist() == [False, True, False, True, True]
    assert load_checkpoint(tmp_path / "run/weights/last.pt")["config"]["val_period"] == 2


@needs_shared
@pytest.mark.parametrize("metric", ["recall", pytest.param("F1", marks=pytest.mark.slow)])
def test_best_is_what_the_metric_says(tmp_path: Path, metric: str) -> None:
    """Trained weights, so that the figures are far from zero and from each other; they learn nothing here."""
    for kind, suffix in (("images", ".jpg"), ("labels", ".txt")):  # copied, so that caches stay out of SHARED
        (tmp_path / kind).mkdir()
        for path in sorted((SHARED / "datasets/bccd" / kind / "val").glob(f"*{suffix}"))[:6]:
            shutil.copy(path, tmp_path / kind)
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [RBC, WBC, Platelets]\n")
    (tmp_path / "still.yaml").write_text("lr0: 0\nwarmup_bias_lr: 0\n")
    spec = yaml.safe_load((PROJECT / "models/yolov5n.yaml").read_text())
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    weights = {name: torch.from_numpy(arrays[name]).float() for name in arrays.files}
    names = ["RBC", "WBC", "Platelets"]
    save_checkpoint({"spec": spec, "names": names, "model": weights, "config": {"imgsz": 320}}, tmp_path / "golden.pt")
    more = f"--img 320 --epochs 2 --weights {tmp_path / 'golden.pt'} --hyp {tmp_path / 'still.yaml'} --metric {metric}"
    train_here(*flags(tmp_path / "data.yaml", tmp_path, more))
    table = results(tmp_path / "run")
    p, r = table["metrics/precision"], table["metrics/recall"]
    state = load_checkpoint(tmp_path / "run/weights/last.pt")["state"]
    if metric == "recall":
        assert state["best_fitness"] == pytest.approx(r.max(), abs=1e-5) and state["best_epoch"] == r.idxmax()
    assert state["best_fitness"] > 0.5
    fitness = (0.1 * table["metrics/mAP_0.5"] + 0.9 * table["metrics/mAP_0.5:0.95"]).max()
    assert min(abs(state["best_fitness"] - other) for other in (fitness, p.max())) > 0.005


# --- Anchors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Boxes that the default anchors do not fit."""
    folder = tmp_path_factory.mktemp("slivers")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(6):
            image = rng.integers(0, 80, (96, 96, 3), dtype=np.uint8)
            rows = []
            for _ in range(4):
                x, y = (int(value) for value in rng.integers(0, 40, 2))
                cv2.rectangle(image, (x, y), (x + 48, y + 3), (255, 255, 255), -1)
                rows.append(f"0 {(x + 24) / 96} {(y + 2) / 96} {48 / 96} {4 / 96}")
            cv2.imwrite(str(folder / f"images/{split}/{number}.png"), image)
            (folder / f"labels/{split}/{number}.txt").write_text("\n".join(rows))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [bar, dot]\n")
    return folder / "data.yaml"


@pytest.mark.slow
def test_anchors_that_were_found_stay_with_the_weights(
    slivers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the checkpoint's spec and weights, in val.py and in training from it; VOC's recipe names their number."""
    train_here(*flags(slivers, tmp_path, "--img 96 --epochs 1 --hyp hyp.VOC.yaml"))
    said = capsys.readouterr().out
    assert "best possible recall 0." in said and "replaced by" in said
    best = tmp_path / "run/weights/best.pt"
    saved = load_checkpoint(best)
    assert saved["hyp"]["anchors"] == 3.412
    model = DetectionModel(saved["spec"], 2)
    assert torch.equal(model.detect.anchors, saved["model"]["model.24.anchors"])
    # A label of 48 x 4 fits sides from 12 to 192 by 1 to 16.
    flat = model.anchors.reshape(-1, 2)
    assert ((flat > torch.tensor([12, 1])) & (flat < torch.tensor([192, 16]))).all(1).any()

    measure_here("--weights", best, "--data", slivers, "--workers", 0, "--project", tmp_path / "val")
    train_here(*flags(slivers, tmp_path, f"--img 96 --epochs 1 --weights {best} --name tuned"))
    said = capsys.readouterr().out
    assert "anchors     best possible recall 1.0000" in said and "match a label: kept" in said
    assert load_checkpoint(tmp_path / "tuned/weights/best.pt")["spec"]["anchors"] == saved["spec"]["anchors"]


@pytest.mark.slow
def test_resume_keeps_what_was_found(slivers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run neither looks at the labels again nor builds other anchors."""
    train_here(*flags(slivers, tmp_path, "--img 96 --epochs 2 --save-period 1 --hyp hyp.VOC.yaml"))
    first = load_checkpoint(tmp_path / "run/weights/last.pt")
    capsys.readouterr()
    train_here("--resume", back_to(tmp_path / "run", 1), "--workers", 0)
    assert "best possible recall" not in capsys.readouterr().out
    second = load_checkpoint(tmp_path / "run/weights/last.pt")
    assert second["spec"] == first["spec"] and not differences(second["model"], first["model"])


def test_noautoanchor_and_another_number_of_anchors(
    slivers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's number is built without a search, and nothing speaks of one."""
    (tmp_path / "hyp.yaml").write_text("anchors: 2.4\n")
    train_here(*flags(slivers, tmp_path, f"--img 96 --epochs 1 --hyp {tmp_path / 'hyp.yaml'} --noautoanchor"))
    assert "best possible recall" not in capsys.readouterr().out
    saved = load_checkpoint(tmp_path / "run/weights/best.pt")
    assert saved["spec"]["anchors"] == 2 and saved["model"]["model.24.anchors"].shape == (3, 2, 2)
    assert torch.equal(DetectionModel(saved["spec"], 2).detect.anchors, saved["model"]["model.24.anchors"])


def test_defaults_are_those_of_before() -> None:
    config = TrainConfig()
    assert (config.noautoanchor, config.single_cls, config.label_smoothing) == (False, False, 0.0)
    assert (config.val_period, config.metric) == (1, "fitness") and Hyp().anchors == 0
