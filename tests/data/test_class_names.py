"""Weights meet a data set: whose classes are in another order, have other names, or are not named at all."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import val
from lockstep import YOLO
from tests.runs import flags, make_data, train_here
from tests.test_val import saved, yolov5n
from utils.config.data_yaml import load_data
from utils.config.flags import TrainConfig
from utils.config.recipe import Hyp
from utils.core.errors import Problems, UserError
from utils.data.class_names import match_names
from utils.dist.place import ALONE
from utils.run.inputs import read_network
from utils.run.settings import of_all_ranks, settings
from utils.torch_utils import load_checkpoint, save_checkpoint


class Made(NamedTuple):
    """Weights of the classes blue and red, and data sets with them: as they are, and with their ids swapped."""

    weights: Path
    data: Path
    swapped: Path

    def named(self, folder: Path, names: str) -> Path:
        """Return the first data set with other names."""
        path = folder / "named.yaml"
        path.write_text(self.data.read_text().replace("[blue, red]", names) + f"path: {self.data.parent}\n")
        return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("names")
    data, swapped = make_data(folder / "data", count=4), make_data(folder / "swapped", count=4)
    for path in (folder / "swapped/labels").rglob("*.txt"):
        path.write_text("".join(f"{1 - int(row[0])}{row[1:]}\n" for row in path.read_text().splitlines()))
    swapped.write_text(swapped.read_text().replace("[blue, red]", "[Red, 'blue ']"))
    model = yolov5n(2, ["blue", "red"])
    for level in model.detect.m:
        torch.nn.init.normal_(level.get_parameter("bias"))  # untrained, all classes are alike
    parts = {"spec": model.yaml, "names": model.names, "model": model.state_dict()}
    save_checkpoint({**parts, "config": {"imgsz": 64, "data": str(data)}}, folder / "two.pt")
    return Made(folder / "two.pt", data, swapped)


def measure(weights: Path, project: Path, *more: object) -> dict[str, Any]:
    """Run val.py in this process; returns metrics.json."""
    own = ["--weights", weights, "--project", project, "--name", "val", "--exist-ok", "--device", "cpu", "--noplots"]
    val.main([str(word) for word in [*own, "--workers", 0, *more]])
    return dict(json.loads((project / "val/metrics.json").read_text()))


def report(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "data_report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("weights", "data", "order", "by_name"),
    [
        ("a b c", "a b c", [0, 1, 2], True),
        ("a b c", "c a b", [2, 0, 1], True),
        ("a traffic_light", "Traffic_Light A", [1, 0], True),
        ("a b c", "a x c", [0, 1, 2], False),
        ("a b c", "x a c", [1, 0, 2], False),
        ("a b c", "x y z", [0, 1, 2], False),
        ("a a b", "b a a", [2, 0, 1], True),
        ("a b c", "b b b", [1, 0, 2], False),
    ],
)
def test_names_are_matched(weights: str, data: str, order: list[int], by_name: bool) -> None:
    names = [name.replace("_", " ") for name in data.split()]
    assert match_names(weights.split(), names) == (order, by_name)


def test_another_order_is_measured_by_name(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """mAP50 was 0.17 in place of 0.96, and nothing told (ultralytics/ultralytics#20248, YOLOX#1818)."""
    more = ["--conf", 0, "--save-txt", "--save-conf"]
    plain = measure(made.weights, tmp_path / "plain", "--data", made.data, *more)
    assert "class 0" not in capsys.readouterr().out
    other = measure(made.weights, tmp_path / "other", "--data", made.swapped, *more)
    said = f"{made.swapped}: class 0 is 'Red', in two.pt 'blue'; class 1 is 'blue ', in two.pt 'red'"
    rule = "the same classes in another order, taken by name"
    assert f"WARNING: {said}: {rule}\n" in capsys.readouterr().out
    rows = {row.pop("name"): row for row in other["rows"]}
    assert {row.pop("name"): row for row in plain["rows"]} == {
        "all": rows["all"], "blue": rows["blue "], "red": rows["Red"],
    }  # fmt: skip
    for path in (tmp_path / "plain/val/labels").iterdir():
        lines = (tmp_path / "other/val/labels" / path.name).read_text().splitlines()
        assert sorted(path.read_text().splitlines()) == sorted(f"{1 - int(line[0])}{line[1:]}" for line in lines)
    (row,) = report(tmp_path / "other/val")
    assert (row["file"], row["rule"]) == (str(made.swapped), rule)

    with pytest.raises(UserError, match=rf"^--strict: {made.swapped}: class 0 is 'Red'"):
        measure(made.weights, tmp_path / "strict", "--data", made.swapped, "--strict")
    assert not (tmp_path / "strict").exists()


def test_another_order_is_trained_by_name(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's outputs of a class go to where the data set has it (ultralytics/ultralytics#20248)."""
    line = flags(made.swapped, tmp_path, f"--weights {made.weights} --epochs 1")
    train_here(*line)
    assert "'red': the same classes in another order, taken by name\n" in capsys.readouterr().out
    assert [row["file"] for row in report(tmp_path / "run")] == [str(made.swapped)]
    assert load_checkpoint(tmp_path / "run/weights/last.pt")["names"] == ["Red", "blue "]

    config, problems = TrainConfig(weights=str(made.weights), cfg=""), Problems()
    raw_model = read_network(config, ALONE, Hyp(), load_data(made.swapped), None, problems, [])
    assert raw_model is not None and not problems
    images = torch.rand(1, 3, 64, 64)
    own = YOLO(made.weights).model
    assert own is not None
    with torch.no_grad():
        expected, found = own.decode(own(images)), raw_model.eval().decode(raw_model(images))
    np.testing.assert_allclose(found[..., [0, 1, 2, 3, 4, 6, 5]], expected, rtol=1e-5)

    with pytest.raises(UserError, match=r"^--strict: .*: the same classes in another order"):
        train_here(*line, "--strict", "--name", "strict")
    assert not (tmp_path / "strict").exists()


def test_other_names(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are said; where they can't be the weights' classes, nothing is measured (YOLOX#1818)."""
    renamed = made.named(tmp_path, "[blau, rot]")
    figures = measure(made.weights, tmp_path, "--data", renamed)["rows"]
    assert "'red': other class names, taken for the same classes\n" in capsys.readouterr().out
    assert [row["name"] for row in figures] == ["all", "blau", "rot"]
    measure(made.weights, tmp_path, "--data", renamed, "--single-cls")
    measure(saved(tmp_path / "bare.pt", yolov5n(2, ["0", "1"]), imgsz=64), tmp_path, "--data", renamed)
    assert "class 0" not in capsys.readouterr().out
    mixed = made.named(tmp_path, "[red, green]")
    with pytest.raises(UserError, match=r"class 0 is 'red', .*'red': these are not the classes of the weights$"):
        measure(made.weights, tmp_path, "--data", mixed)
    train_here(*flags(mixed, tmp_path, f"--weights {made.weights} --epochs 1 --noval"))
    assert "those are taken by name, the others as they are left\n" in capsys.readouterr().out


def test_another_count_is_found_before_ranks_start(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(val, "launch", lambda *_: pytest.fail("ranks were started"))
    three = made.named(tmp_path, "[blue, red, green]")
    message = rf"^--weights {made.weights} knows 2 classes, --data {three} has 3; use the data set that"
    with pytest.raises(UserError, match=message):
        measure(made.weights, tmp_path, "--data", three, "--device", "cpu,cpu")
    with pytest.raises(
        UserError, match=rf"^--weights {made.weights} knows 2 classes"
    ):  # not the name of a temporary file
        YOLO(made.weights).val(data=three, device="cpu,cpu", project=tmp_path)
    one = saved(tmp_path / "one.pt", yolov5n(1, ["item"]), imgsz=64)
    with pytest.raises(UserError, match=r"has 2; the weights are those of a training with --single-cls: give that"):
        measure(one, tmp_path, "--data", made.data)


def test_data_of_the_weights(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --data the figures were those of the built-in shapes (ultralytics/ultralytics#20806)."""
    assert measure(made.weights, tmp_path)["settings"]["data"] == str(made.data)
    assert f"data        {made.data}, what the weights were trained on (--data)\n" in capsys.readouterr().out
    written = YOLO(made.weights).val(device="cpu", noplots=True, workers=0, project=tmp_path).run_dir
    shown = json.loads((written / "metrics.json").read_text())["settings"]
    assert (shown["data"], shown["weights"]) == (str(made.data), str(made.weights))
    copy = tmp_path / "copy.pt"
    YOLO(made.weights).save(copy)
    config, _ = settings({"weights": str(copy)}, ALONE)
    assert config is not None and config.data == str(made.data)
    launched = replace(ALONE, launched=True, world_size=2)
    assert settings({"weights": "gone.pt"}, launched) == (None, None)  # rank 0 reads it, for all, when they have met
    config, _ = of_all_ranks({"weights": str(copy)}, None, None, ALONE)
    assert config.data == str(made.data)
    config, _ = settings({"weights": "", "epochs": 1}, ALONE)
    assert config is not None and Path(config.data).name == "shapes.yaml"


def test_weights_that_name_no_data(made: Made, tmp_path: Path) -> None:
    """Such as those of YOLOv5, or those of a data set that is gone (ultralytics/ultralytics#20806)."""
    bare = saved(tmp_path / "bare.pt", yolov5n(2, ["blue", "red"]), imgsz=64)
    gone = load_checkpoint(made.weights)
    gone["config"]["data"] = "/gone/my.yaml"
    save_checkpoint(gone, tmp_path / "gone.pt")
    for weights, why in (
        (bare, "don't say what they were trained on"),
        ("gone.pt", "were trained on /gone/my.yaml, which"),
    ):
        path = tmp_path / weights
        wanted = rf"^--data is missing: name the data set; the weights {path} {why}"
        with pytest.raises(UserError, match=wanted):
            measure(path, tmp_path)
        with pytest.raises(UserError, match=wanted):
            settings({"weights": str(path)}, ALONE)
        for call in (YOLO(path).val, YOLO(path).train):
            with pytest.raises(UserError, match=rf"^--data is missing: name the data set; the weights {path} "):
                call(device="cpu", project=tmp_path)
    assert not (tmp_path / "val").exists()
