"""Costs that are counted without computing are those of a pass that computes."""

import re

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.costs import check_batch, count_flops, saved_bytes
from models.parser import ACTIVATIONS
from models.yolo import DetectionModel
from tests.common import PROJECT
from utils.config.yaml_files import load_yaml
from utils.core.errors import UserError
from utils.data.image_cache import free_memory
from utils.dist.place import DistEnv
from utils.training.steps import Precision

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


# What a step takes ----------------------------------------------------------------------------------------------------

OFF = Precision("off")


@pytest.mark.parametrize("local_ranks", [1, 2, 3])
def test_ranks_of_a_machine_share_its_memory(local_ranks: int) -> None:
    """A batch that takes three quarters of what is free fits into one rank, and was let pass on each of several.

    What is offered instead is a global batch, of all ranks of all machines.
    """
    model = network("yolov5n.yaml")
    env = DistEnv(0, 0, 6, local_ranks, launched=True)
    fixed, one = (check_batch(model, batch, 64, OFF, DistEnv()) for batch in (0, 1))
    batch = int((0.75 * free_memory() - fixed) / (one - fixed))
    if local_ranks == 1:
        assert check_batch(model, batch, 64, OFF, env, 6) == fixed + batch * (one - fixed)
        return
    with pytest.raises(UserError, match=f" on each of {local_ranks} ranks takes at least .*; use --batch-size") as info:
        check_batch(model, batch, 64, OFF, env, 6)
    found = re.search(r"--batch-size (\d+) or fewer ranks$", str(info.value))
    assert found is not None and batch * 6 / 4 / local_ranks < int(found[1]) < batch * 6
    fits = int(found[1]) // 6
    assert check_batch(model, fits, 64, OFF, env, 6) == local_ranks * (fixed + fits * (one - fixed))


def test_frozen_layers_take_no_memory() -> None:
    """Neither gradient nor momentum, nor what a backward pass through the first of them would need."""
    model = network("yolov5n.yaml")
    everything = [check_batch(model, batch, 64, OFF, DistEnv()) for batch in (0, 1)]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert everything[0] == 3 * weights  # gradient, momentum, average
    model.freeze(range(10))
    frozen = sum(parameter.nbytes for row in range(10) for parameter in model.model[row].parameters())
    some = [check_batch(model, batch, 64, OFF, DistEnv()) for batch in (0, 1)]
    assert some[0] == 3 * weights - 2 * frozen
    assert some[1] - some[0] < 0.6 * (everything[1] - everything[0])
    assert check_batch(model, 1, 64, OFF, DistEnv(device=torch.device("mps"))) == 0  # is not measured
