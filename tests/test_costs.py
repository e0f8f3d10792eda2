"""Costs that are counted without computing are those of a pass that computes."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.costs import count_flops, saved_bytes
from models.parser import ACTIVATIONS
from models.yolo import DetectionModel
from tests.common import PROJECT
from utils.config import load_yaml

SIDE = 64
NETWORKS = sorted(path.name for path in (PROJECT / "models").glob("*.yaml"))


def network(name: str, activation: str = "") -> DetectionModel:
    spec = load_yaml(PROJECT / "models" / name)
    return DetectionModel({**spec, "activation": activation} if activation else spec, 80)


def computed_flops(model: DetectionModel) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, SIDE, SIDE))
    return counter.get_total_flops()


def computed_saved_bytes(model: DetectionModel) -> int:
    """Maps that autograd saves in a pass of two images, each storage once."""
    seen: dict[int, Tensor] = {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and len(tensor) == 2 and tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros(2, 3, SIDE, SIDE))
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values()) // 2


@pytest.mark.parametrize("name", ["yolov5n.yaml", "yolov3-tiny.yaml"])
def test_costs_of_a_network(name: str) -> None:
    model = network(name).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert count_flops(model, SIDE) == computed_flops(model.eval())
    model.train()
    assert saved_bytes(model, SIDE) == pytest.approx(computed_saved_bytes(network(name).train()), rel=0.01)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_memory_of_activations_and_frozen_layers(activation: str) -> None:
    model = network("yolov3-tiny.yaml", activation).train()
    whole = saved_bytes(model, SIDE)
    assert whole == pytest.approx(computed_saved_bytes(model), rel=0.01)
    for parameter in model.model[:9].parameters():
        parameter.requires_grad_(False)
    assert saved_bytes(model, SIDE) == pytest.approx(computed_saved_bytes(model), rel=0.01)
    assert saved_bytes(model, SIDE) < whole
