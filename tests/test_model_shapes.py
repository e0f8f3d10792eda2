"""Shapes and costs of a pass that is only followed are those of PyTorch's own, on the meta device and in numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from models.memory import saved_bytes
from models.parser import ACTIVATIONS
from models.shapes import Costs, Map, follow
from models.yolo import DetectionModel, count_flops
from tests.common import PROJECT
from utils.config import load_yaml

NETWORKS = sorted(path.name for path in (PROJECT / "models").glob("*.yaml"))


def network(name: str, activation: str = "") -> DetectionModel:
    spec = load_yaml(PROJECT / "models" / name)
    with torch.device("meta"):
        return DetectionModel({**spec, "activation": activation} if activation else spec, 80)


def on_meta(model: DetectionModel, images: int, imgsz: int) -> Any:
    """A pass in training mode on the meta device, by copies of the tensors: BatchNorm counts passes."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    x = torch.empty(images, 3, imgsz, imgsz, device="meta")
    return functional_call(model, {name: tensor.to("meta") for name, tensor in state.items()}, (x,))


def torchs_flops(model: DetectionModel, imgsz: int) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        on_meta(model, 2, imgsz)
    return counter.get_total_flops() // 2


def torchs_saved_bytes(model: DetectionModel, imgsz: int) -> int:
    """Maps that autograd saves, each storage once."""
    seen: dict[int, Tensor] = {}
    own = {id(tensor) for tensor in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and len(tensor) == 2 and id(tensor) not in own:
            seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        on_meta(model, 2, imgsz)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values()) // 2


@pytest.mark.parametrize("name", NETWORKS)
def test_costs_of_every_network(name: str) -> None:
    model = network(name).train()
    assert count_flops(model, 384) == torchs_flops(model, 384)
    assert saved_bytes(model, 384) == torchs_saved_bytes(model, 384)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_costs_of_activations_and_frozen_layers(activation: str) -> None:
    model = network("yolov3-tiny.yaml", activation).train()
    assert saved_bytes(model, 256) == torchs_saved_bytes(model, 256)
    for parameter in model.model[:9].parameters():
        parameter.requires_grad_(False)
    assert saved_bytes(model, 256) == torchs_saved_bytes(model, 256)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2),
        nn.MaxPool2d(2),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(3, 2, 1),
        nn.ZeroPad2d((0, 1, 2, 3)),
        nn.Upsample(None, 2, "nearest"),
        nn.Upsample(None, 1.5, "bilinear"),
        nn.Upsample((5, 7)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Identity()),
    ],
    ids=str,
)
def test_shapes_are_the_computed_ones(module: nn.Module) -> None:
    module.train()
    found = follow(module, Map((2, 4, 17, 23), Costs()))
    assert found.shape == module(torch.zeros(2, 4, 17, 23)).shape
    assert module.training


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(5, 6, 1),
        nn.Conv2d(4, 6, 19),
        nn.MaxPool2d(18),
        nn.MaxPool2d(3, 1, 2),
        nn.Upsample(None, 2, "trilinear"),
        nn.Upsample(None, 0.01),
        nn.Upsample(None, None),
        nn.Upsample(4, 2),
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused(module: nn.Module) -> None:
    refused = (RuntimeError, ValueError)
    with pytest.raises(refused):
        module(torch.zeros(2, 4, 17, 17))
    with pytest.raises(refused):
        follow(module, Map((2, 4, 17, 17), Costs()))


def test_joining_and_adding() -> None:
    costs = Costs()
    a, b, c = maps = [Map((1, 3, *sides), costs) for sides in ((8, 8), (8, 8), (4, 8))]
    cat: Callable[..., Map] = torch.cat  # type: ignore[assignment]
    assert cat([a, b], 1).shape == (1, 6, 8, 8)
    assert cat([a, c], 2).shape == (1, 3, 12, 8)
    assert (a + b).shape == a.shape
    for wrong in (lambda: cat(maps, 1), lambda: cat([a, b], 4), lambda: a + c):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()


def test_nothing_is_followed_by_a_guess() -> None:
    with pytest.raises(TypeError, match="through softmax"):
        follow(nn.Softmax(1), Map((1, 2, 3, 4), Costs()))
