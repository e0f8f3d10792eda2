"""What a training or validation is given: what it takes, and what is doubtful about it."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from models.families import YOLOV5
from tests.runs import make_data
from utils.config.flags import TrainConfig, ValConfig
from utils.config.recipe import Hyp
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import UserError
from utils.data.loaders import choose_val_batch
from utils.dist.place import DistEnv
from utils.run.inputs import checkpoints_bytes, read_inputs
from utils.run.val_inputs import read_val_inputs
from utils.torch_utils import ModelEMA, save_checkpoint, split_global_batch
from utils.training.optim import build_optimizer


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_estimate_of_checkpoints(optimizer: str, tmp_path: Path) -> None:
    """Against the files of a run: last, the one before, best, and one that is being written."""
    model = YOLOV5.build(load_yaml(find_yaml("yolov5n", "model")), 2, None)
    steps = build_optimizer(model, optimizer, Hyp(), split_global_batch(16, 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps.step()
    state = {"model": model.state_dict(), "ema": ModelEMA(model).state_dict(), "optimizer": steps.state_dict()}
    save_checkpoint(state, tmp_path / "last.pt")
    size = (tmp_path / "last.pt").stat().st_size
    assert size < checkpoints_bytes(model, TrainConfig(optimizer=optimizer)) / 4 < 1.2 * size
    each = checkpoints_bytes(model, TrainConfig(optimizer=optimizer, save_period=10, epochs=100))
    assert size < each / 14 < 1.2 * size


def test_images_of_a_validation_batch() -> None:
    assert [choose_val_batch(wanted, batch) for wanted, batch in [(0, 16), (0, 64), (50, 16)]] == [16, 32, 50]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ch: 1", "model YAML: 'ch' is 1, but images are read with 3 channels, gray ones too; leave the key out"),
        ("ch: 4", "model YAML: 'ch' is 4, but"),
        ("family: yolov33", "model YAML: unknown family 'yolov33'; did you mean yolov3?"),
    ],
)
def test_a_network_that_can_not_be_built_is_named(change: str, words: str, tmp_path: Path) -> None:
    """ultralytics/yolov5#4894, #6288: a traceback of the first convolution, after the run folder was made."""
    data = make_data(tmp_path, count=4, val=3)
    cfg = tmp_path / "gray.yaml"
    cfg.write_text(f"{find_yaml('yolov5n', 'model').read_text()}\n{change}\n")
    config = TrainConfig(data=str(data), cfg=str(cfg), imgsz=64, batch_size=2, workers=0, project=f"{tmp_path}/runs")
    with pytest.raises(UserError) as info:
        read_inputs(config, DistEnv())
    assert str(info.value).startswith(f"--cfg {cfg}: {words}")
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_said_before_the_labels_are_scanned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To scan a large data set takes minutes; that weights are missing is known before. The error has all."""
    data = make_data(tmp_path, count=4, val=3)
    (tmp_path / "labels/val/1.txt").write_text("7 .5 .5 .1 .1")
    project, weights = f"{tmp_path}/runs", f"{tmp_path}/none.pt"
    for read in (
        lambda: read_inputs(TrainConfig(data=str(data), weights=weights, batch_size=2, project=project), DistEnv()),
        lambda: read_val_inputs(ValConfig(data=str(data), weights=weights, project=project), DistEnv()),
    ):
        with pytest.raises(UserError) as info:
            read()
        missing = f"--weights {weights} is not there"
        assert [missing in text for text in info.value.messages] == [True, False]
        assert "class ids in 1 label files" in info.value.messages[1]
        said = capsys.readouterr().out
        assert said.startswith(f"WARNING: found before the labels are looked at: {missing}\n")


# What may be a mistake ------------------------------------------------------------------------------------------------


def warnings_of(data: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a training warns of before it starts."""
    config = TrainConfig(data=str(data), imgsz=64, batch_size=2, workers=0, project=f"{data.parent}/runs", device="cpu")
    read_inputs(config, DistEnv())
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("WARNING: ") for line in lines if line.startswith("WARNING: ")]


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_images_that_are_trained_on_and_measured(
    shared: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In lists and folders; one image, or all as in coco128."""
    data = make_data(tmp_path, count=4, val=3)
    train, val = (sorted((tmp_path / "images" / split).iterdir()) for split in ("train", "val"))
    (tmp_path / "val.txt").write_text("\n".join(map(str, train[1 : 1 + shared] + val[shared:])))
    data.write_text("train: images/train\nval: val.txt\nnames: [blue, red]\n")
    said = warnings_of(data, capsys)
    start = f"{shared} of the 3 images in val are in train too, such as {train[1]}: the figures tell how well "
    assert [line.startswith(start) for line in said] == [True] * bool(shared)
    if shared == 3:
        data.write_text("train: images/train\nval: images/train\nnames: [blue, red]\n")
        assert warnings_of(data, capsys)[0].startswith("4 of the 4 images in val are in train too")


def test_images_of_too_few_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ultralytics/yolov5#11840: 12 bits in files of 16; said of each split, before training."""
    data = make_data(tmp_path, count=4, val=3)
    for path in (tmp_path / "images/val").iterdir():
        cv2.imwrite(str(path), np.full((48, 64, 3), 4095, np.uint16))
    assert [line[:45] for line in warnings_of(data, capsys)] == ["val: images of more than 8 bits look almost b"]


def test_doubts_about_the_data_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said once, before training and before validation."""
    data = make_data(tmp_path, count=4, val=3)
    data.write_text("train: images/train\nval: images/val\nnames: [red, red]\nmosaics: 3\nroboflow: {}\n")
    want = [f"{data}: unknown keys, not used: mosaics", f"{data}: names: the classes 0 and 1 are all called 'red', and"]
    want[1] += " count as different ones"
    assert warnings_of(data, capsys) == want
    model = YOLOV5.build(load_yaml(find_yaml("yolov5n", "model")), 2, ["red", "red"])
    content = {"spec": model.yaml, "names": model.names, "model": model.state_dict(), "config": {"imgsz": 64}}
    save_checkpoint(content, tmp_path / "two.pt")
    config = ValConfig(weights=str(tmp_path / "two.pt"), data=str(data), workers=0, project=f"{tmp_path}/runs")
    read_val_inputs(config, DistEnv())
    said = capsys.readouterr().out
    assert [said.count(f"WARNING: {text}\n") for text in want] == [1, 1]
