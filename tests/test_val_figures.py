"""When figures of a validation are no measure, or none to compare by: what is said, and what stands in their place."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import val
from lockstep import Results
from tests.run.test_loggers import read_scalars
from tests.runs import flags, make_data, train_here
from tests.test_val import saved, yolov5n
from utils.config.data_yaml import load_data
from utils.config.flags import MOST_DET, ValConfig
from utils.data.splits import open_splits
from utils.metrics.evaluation import Evaluation
from utils.run.val_inputs import detection_cap, doubts_about_density
from utils.torch_utils import load_checkpoint

DENSE = 301  # labels of one image


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with a third class that is nowhere, a test split without labels, and a train split with a dense image.

    The labels of that are as good as any others: it is not trained on.
    """
    folder = tmp_path_factory.mktemp("figures")
    path = make_data(folder, count=4, val=3)
    for kind, split in (("images", "test"), ("images", "dense"), ("labels", "dense")):
        (folder / kind / split).mkdir()
    image = np.full((48, 64, 3), 90, np.uint8)
    for name in ("test/0.png", "test/1.png", "dense/0.png"):
        cv2.imwrite(str(folder / "images" / name), image)
    places = [((i % 20 + 0.5) / 20, (i // 20 + 0.5) / 16) for i in range(DENSE)]
    (folder / "labels/dense/0.txt").write_text(
        "".join(f"{i % 2} {x} {y} 0.03 0.04\n" for i, (x, y) in enumerate(places))
    )
    lines = ("train: images/train", "val: images/val", "test: images/test", "names: [blue, red, nowhere]")
    path.write_text("\n".join(lines) + "\n")
    (folder / "dense.yaml").write_text("train: images/train\nval: images/dense\nnames: [blue, red, nowhere]\n")
    saved(folder / "three.pt", yolov5n(3, ["blue", "red", "nowhere"]), imgsz=64)
    return path


def measured(data: Path, project: Path, *more: str) -> tuple[Path, dict[str, Any]]:
    """Run val.py in this process; returns its folder and its metrics.json."""
    own = ["--weights", str(data.with_name("three.pt")), "--workers", "0", "--device", "cpu"]
    val.main([*own, "--data", str(data), "--project", str(project), *more])
    run_dir = max(project.iterdir(), key=lambda path: path.stat().st_mtime)
    return run_dir, json.loads((run_dir / "metrics.json").read_text(), parse_constant=pytest.fail)


def test_a_split_without_labels_is_not_measured(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure of 0.000 was taken for a bad one (ultralytics/yolov5#158); nor is there a picture of what is none."""
    run_dir, written = measured(data, tmp_path, "--task", "test")
    said = capsys.readouterr().out
    assert said.count("WARNING: test has no labels: nothing can be measured") == 1
    table = [line.split() for line in said.splitlines() if " - " in line]
    assert table == [["all", "2", "0", *"----"], *([name, "0", "0", *"----"] for name in ("blue", "red", "nowhere"))]
    for row in written["rows"]:
        assert [row[name] for name in ("p", "r", "map50", "map")] == [None] * 4
    assert not (run_dir / "confusion_matrix.png").exists() and (run_dir / "val_batch0_pred.jpg").exists()
    assert Results(run_dir, [{"map50": 0.5, "map": 0.3}]).fitness == pytest.approx(0.1 * 0.5 + 0.9 * 0.3)
    assert math.isnan(Results(run_dir, [row | {"map50": math.nan, "map": math.nan} for row in written["rows"]]).fitness)


def test_settings_go_with_the_figures(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--conf-thres 0.25 gave other figures, and nothing told (ultralytics/yolov5#7325, PR 5567)."""
    _, plain = measured(data, tmp_path, "--noplots")
    assert "can't be compared" not in capsys.readouterr().out
    settings = plain["settings"]
    assert {name: settings[name] for name in ("conf_thres", "iou_thres", "max_det", "augment", "half", "imgsz")} == {
        "conf_thres": 0.001, "iou_thres": 0.6, "max_det": 300, "augment": False, "half": False, "imgsz": 64,
    }  # fmt: skip
    assert (settings["data"], settings["task"]) == (str(data), "val")
    assert [row["name"] for row in plain["rows"]] == ["all", "blue", "red", "nowhere"]
    assert plain["rows"][-1]["map"] is None and plain["rows"][0]["map"] is not None

    for more, shown in (
        (["--conf", "0.25", "--iou", "0.7"], "--conf-thres 0.25, --iou-thres 0.7"),
        (["--augment"], ""),
    ):
        _, other = measured(data, tmp_path, "--noplots", *more)
        assert f"WARNING: {shown or '--augment'}: these figures can't be compared" in capsys.readouterr().out
        assert other["settings"] != settings
    val.main(["--weights", str(data.with_name("three.pt")), "--data", str(data), "--task", "speed", "--device", "cpu"])
    assert "can't be compared" not in capsys.readouterr().out


def test_many_labels_raise_the_cap(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 400 objects in an image only 300 could be found, which nothing told (ultralytics/yolov5#2479)."""
    dense = data.with_name("dense.yaml")
    run_dir, written = measured(dense, tmp_path, "--noplots", "--imgsz", "128", "--conf", "0", "--save-txt")
    said = capsys.readouterr().out
    assert f"up to {2 * DENSE} detections of an image are kept, not 300: one has {DENSE} labels" in said
    assert written["settings"]["max_det"] == 2 * DENSE
    assert 300 < len((run_dir / "labels/0.txt").read_text().splitlines()) <= 2 * DENSE

    measured(dense, tmp_path, "--noplots", "--max-det", "300")
    assert f"--max-det 300 is less than the {DENSE} labels of one image" in capsys.readouterr().out
    index = open_splits(load_data(dense), ["val"])["val"]
    doubts = [
        val.doubts_about_figures(ValConfig(weights="a.pt", max_det=cap), index) for cap in (0, 300, DENSE, 2 * DENSE)
    ]
    assert [len(some) for some in doubts] == [0, 2, 1, 0]
    assert [detection_cap(asked, index) for asked in (0, 20)] == [2 * DENSE, 20]
    for labels, doubts_of_it in ((MOST_DET - 1, 0), (MOST_DET + 1, 1)):  # of one image, by error
        index.offsets = np.array([0, labels])
        assert detection_cap(0, index) == MOST_DET and len(doubts_about_density(0, index)) == doubts_of_it
    assert detection_cap(labels, index) == labels and doubts_about_density(labels, index) == []


def test_classes_that_count_as_one(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that tell classes apart, measured as if they did not, reach more than they did in their training."""
    measured(data, tmp_path, "--noplots", "--single-cls")
    assert "WARNING: --single-cls: the weights tell 3 classes apart, which count as" in capsys.readouterr().out


def test_trainings_measure_likewise(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no flag for the cap (ultralytics/yolov5#2479); a class without labels is there (#158)."""
    evaluate, kept = val.evaluate, []

    def noted(*args: Any, **more: Any) -> Evaluation | None:
        kept.append(more["max_det"])
        return evaluate(*args, **more)

    monkeypatch.setattr(val, "evaluate", noted)
    more = "--epochs 1 --noautoanchor --loggers jsonl " + "tensorboard" * (find_spec("tensorboard") is not None)
    train_here(*flags(data.with_name("dense.yaml"), tmp_path, more))
    assert kept == [2 * DENSE] * 2
    said = capsys.readouterr().out
    assert f"1 to validate on with up to {2 * DENSE} detections each" in said
    assert ["nowhere", "0", "0", *"----"] in [line.split() for line in said.splitlines()]
    row = json.loads((tmp_path / "run/results.jsonl").read_text().splitlines()[1], parse_constant=pytest.fail)
    assert row["class_maps"]["nowhere"] is None and row["class_maps"]["blue"] is not None
    state = load_checkpoint(tmp_path / "run/weights/last.pt")["state"]
    assert state["class_maps"][2] == row["metrics/mAP_0.5:0.95"]
    if "tensorboard" in more:
        assert "class_mAP/nowhere" not in read_scalars(tmp_path / "run")
