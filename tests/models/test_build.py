"""How a network gets ready: structure, weights, frozen layers, image size."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from models.build import check_imgsz, fit_imgsz, freeze, network_spec, start_from
from models.yolo import DetectionModel
from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, flags, make_data
from utils.core.errors import UserError
from utils.torch_utils import ModelEMA

SPEC: dict[str, Any] = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30], [116, 90, 156, 198]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[[1, 2], 1, "Detect", ["nc", "anchors"]]],
}
OTHER_ANCHORS = SPEC | {"anchors": [[1, 2, 3, 4], [50, 60, 70, 80]]}


def saved(model: DetectionModel, **more: Any) -> dict[str, Any]:
    return {"spec": model.yaml, "names": model.names, "model": model.state_dict(), **more}


def anchors(model: DetectionModel) -> torch.Tensor:
    return model.detect.anchors


def test_the_network_is_the_yamls_or_the_checkpoints() -> None:
    checkpoint = saved(DetectionModel(SPEC, 3))
    shipped = yaml.safe_load((PROJECT / "models/yolov5n.yaml").read_text())
    assert network_spec("yolov5n.yaml", "", None) == network_spec("yolov5n.yaml", "best.pt", checkpoint) == shipped
    assert network_spec("", "best.pt", checkpoint) == SPEC | {"nc": 3}
    with pytest.raises(UserError, match=r"^--weights bare\.pt does not say which network it is for; add --cfg$"):
        network_spec("", "bare.pt", {"model": {}})


def test_weights_are_the_averaged_ones() -> None:
    source, model = DetectionModel(SPEC, 2), DetectionModel(SPEC, 2)
    ema = ModelEMA(source)
    with torch.no_grad():
        ema.module.get_parameter("model.0.conv.weight").fill_(7)
    start_from(model, "last.pt", saved(source, ema=ema.state_dict()), keep_anchors=False)
    assert (model.get_parameter("model.0.conv.weight") == 7).all()
    assert torch.equal(model.get_parameter("model.1.conv.weight"), source.get_parameter("model.1.conv.weight"))


@pytest.mark.parametrize("keep_anchors", [True, False])
def test_a_yaml_that_was_named_keeps_its_anchors(keep_anchors: bool) -> None:
    source, model = DetectionModel(SPEC, 2), DetectionModel(OTHER_ANCHORS, 2)
    own = anchors(model).clone()
    assert not torch.equal(own, anchors(source))
    start_from(model, "best.pt", saved(source), keep_anchors)
    assert torch.equal(anchors(model), own if keep_anchors else anchors(source))
    assert torch.equal(model.get_parameter("model.3.m.0.weight"), source.get_parameter("model.3.m.0.weight"))


def test_other_classes_take_all_but_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    source, model = DetectionModel(SPEC, 5), DetectionModel(SPEC, 2)
    head = model.get_parameter("model.3.m.0.weight").clone()
    start_from(model, "best.pt", saved(source), keep_anchors=False)
    assert torch.equal(model.get_parameter("model.2.conv.weight"), source.get_parameter("model.2.conv.weight"))
    assert torch.equal(model.get_parameter("model.3.m.0.weight"), head)
    assert "4 keep their initialization (shape (20, 8, 1, 1) in the weights, (14, 8, 1, 1) in the network)" in (
        capsys.readouterr().out
    )


def test_weights_of_another_network() -> None:
    model = DetectionModel(SPEC, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wider = DetectionModel(SPEC | {"width_multiple": 2.0}, 2)
    with pytest.raises(UserError, match=r"^--weights wide\.pt: the weights don't fit the network"):
        start_from(model, "wide.pt", saved(wider), keep_anchors=False)
    with pytest.raises(UserError, match=r"^--weights none\.pt holds no weights$"):
        start_from(model, "none.pt", {"spec": SPEC}, keep_anchors=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("layers", "frozen"), [([0], []), ([2], [0, 1]), ([1, 2], [1, 2]), ([0, 2], [0, 2])])
def test_freeze(layers: list[int], frozen: list[int]) -> None:
    model = DetectionModel(SPEC, 2)
    freeze(model, layers)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (int(name.split(".")[1]) not in frozen), name


@pytest.mark.parametrize("typed", [[2], [0, 1], [1, 3]])
def test_frozen_layers_measure_nothing(typed: list[int]) -> None:
    """Nor do they count batches; others do, whatever is called on the network (ultralytics/ultralytics PR 8753)."""
    model = DetectionModel(SPEC, 2)
    freeze(model, typed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for network in (model, copy.deepcopy(model), model.eval().train()):
        sum(output.square().mean() for output in network(torch.rand(2, 3, 32, 32))).backward()
        state = network.state_dict().items()
        changed = {int(name.split(".")[1]) for name, value in state if not torch.equal(value, before[name])}
        assert changed == {0, 1, 2} - (set(range(typed[0])) if len(typed) == 1 else set(typed))


def test_freeze_too_much() -> None:
    with pytest.raises(UserError, match=r"^--freeze 1 4: there is no layer 4, the network has layers 0 to 3$"):
        freeze(DetectionModel(SPEC, 2), [1, 4])
    with pytest.raises(UserError, match=r"^--freeze 4 leaves nothing to train$"):
        freeze(DetectionModel(SPEC, 2), [4])
    with pytest.raises(UserError, match=r"^--freeze 10: there is no layer 4"):
        freeze(DetectionModel(SPEC, 2), [10])


@pytest.mark.parametrize(("imgsz", "fitted"), [(640, 640), (633, 640), (65, 72), (3, 16), (8, 16), (16, 16)])
def test_image_size(imgsz: int, fitted: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Multiples of the stride 8, two cells at least: BatchNorm has nothing to measure on one."""
    assert fit_imgsz(imgsz, DetectionModel(SPEC, 2)) == fitted
    said = capsys.readouterr().out
    odd, single = "is not a multiple of the network's stride 8", "is a single stride of the network, two are needed"
    why = odd if imgsz % 8 else single
    assert said == ("" if imgsz == fitted else f"WARNING: --imgsz {imgsz} {why}; {fitted} is used\n")


def test_image_size_below_the_stride() -> None:
    check_imgsz(8, DetectionModel(SPEC, 2))
    with pytest.raises(UserError, match=r"^--imgsz 7 is below the network's stride; give at least 8$"):
        check_imgsz(7, DetectionModel(SPEC, 2))
    with pytest.raises(UserError, match=r"^--imgsz: the weights were trained at 99999999 pixels; give 16384 at most$"):
        check_imgsz(99999999, DetectionModel(SPEC, 2))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_loads_nothing_that_it_does_not_need(tmp_path: Path, ranks: int) -> None:
    """The drawing libraries take a second: on every rank."""
    data = make_data(tmp_path, 4, 2)
    script = tmp_path / "script.py"
    unneeded = {"matplotlib", "pandas"}
    script.write_text(
        "import atexit, os, sys\n"
        f"found = lambda: ' '.join(['loaded', *({unneeded | {'torch.optim'}} & set(sys.modules))])\n"
        "atexit.register(lambda: os.write(1, f'{found()}\\n'.encode()))\nimport train\n"  # in one piece: ranks share it
        "from utils.core.errors import run_cli\nrun_cli(lambda: train.main(sys.argv[1:]))\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), *flags(data, tmp_path / "out", "--batch 2 --epochs 1")]
    environment = CHILD_ENVIRONMENT | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("loaded")] == ["loaded torch.optim"] * ranks
