"""SyncBatchNorm against BatchNorm on the joined batch, on real ranks; tests/dist/sync_bn_worker.py is one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.launch import free_port, torchrun
from tests.dist.sync_bn_worker import LAYERS, network
from utils.dist.place import ALONE, DistEnv
from utils.training.sync_bn import average_statistics, convert_sync_bn

# Largest errors of outputs, of their gradients, and of what is in float32 at least: sums and statistics.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12, 1e-12),
    torch.float32: (1e-6, 5e-5, 5e-5),
    torch.bfloat16: (1e-2, 3e-2, 5e-5),
    torch.float16: (1e-3, 5e-3, 5e-5),
}


@pytest.fixture(
    scope="module", params=[1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))], ids="{}-ranks".format
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; one start for all tests."""
    path = tmp_path_factory.mktemp("sync_bn") / "figures.json"
    done = torchrun(["-m", "tests.dist.sync_bn_worker", path], request.param, port=free_port(), timeout=240)
    assert done.returncode == 0, done.stderr[-5000:]
    figures = json.loads(Path(path).read_text())
    assert len(figures) == request.param
    return figures


@pytest.mark.parametrize("name", LAYERS)
def test_equals_batchnorm_on_the_joined_batch(ranks: list[dict[str, Any]], name: str) -> None:
    output, grad_input, statistics = TOLERANCES[LAYERS[name].dtype]
    limits = {"output": output, "evaluation": output, "grad_input": grad_input, "grad_affine": statistics}
    if LAYERS[name].mean:  # its last bit shows in what is normalized, not in the variance
        limits |= {"output": 0.1, "grad_input": 0.3, "grad_affine": 0.3}
    found = {quantity for figures in ranks for quantity in figures[name]["errors"]}
    assert {"output", "grad_input"} <= found
    assert ("grad_affine" in found) == LAYERS[name].affine
    assert ({"running_mean", "running_var"} <= found) == LAYERS[name].track_running_stats
    for rank, figures in enumerate(ranks):
        for quantity, error in figures[name]["errors"].items():
            assert error <= limits.get(quantity, statistics), f"rank {rank}: {quantity}"
        assert figures[name]["counter"], f"rank {rank}: num_batches_tracked"
        assert figures[name]["dtype"], f"rank {rank}: the output has not the input's type"
        assert figures[name]["format"], f"rank {rank}: the memory format changed"


def test_single_value_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as batchnorm:
        nn.BatchNorm2d(3)(torch.zeros(1, 3, 1, 1))
    assert ranks[0]["too_few"]["message"] == str(batchnorm.value)
    for figures in ranks[1:]:
        assert figures["too_few"]["message"] == str(batchnorm.value).replace("[1,", "[0,")


def test_one_collective_in_each_pass(ranks: list[dict[str, Any]]) -> None:
    several = len(ranks) > 1
    for figures in ranks:
        assert figures["messages"] == {
            "forward": {"allgather_": 3} if several else {},
            "backward": {"allgather_": 3} if several else {},
            "without gradient": {"allgather_": 3} if several else {},
            "evaluation": {},
            "first layer": {"allgather_": 2} if several else {},
        }


def test_gradient_is_that_of_the_global_batch(ranks: list[dict[str, Any]]) -> None:
    assert max(figures["wrapped"]["error"] for figures in ranks) <= 1e-12


def test_layers_are_replaced_with_their_tensors(ranks: list[dict[str, Any]]) -> None:
    one = len(ranks) == 1
    for figures in ranks:
        assert figures["converted"] == {
            "same model": True,
            "kinds": ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"] if one else ["SyncBatchNorm"],
            "number": 5,
            "same layers": one,
            "same keys": True,
            "same tensors": True,
            "same parameters": True,
            "frozen": 1,
            "same settings": True,
            "still shared": True,
            "alone": "BatchNorm2d" if one else "SyncBatchNorm",
        }


def test_copies_work(ranks: list[dict[str, Any]]) -> None:
    assert all(figures["copied"] == {"equal": True, "buffers": True} for figures in ranks)


def test_buffers_are_averaged(ranks: list[dict[str, Any]]) -> None:
    for figures in ranks:
        assert figures["averaged"] == {
            "error": pytest.approx(0.0, abs=1e-6),
            "counters": [10, 10, 10],
            "in place": True,
            "collectives": {"allreduce_": 2} if len(ranks) > 1 else {},  # float32 and float64
        }


def test_cuda_has_its_own() -> None:
    model = network()
    state = model.state_dict(keep_vars=True)
    converted = convert_sync_bn(model, DistEnv(world_size=2, local_world_size=2, device=torch.device("cuda:0")))
    norms = [module for module in converted.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert [type(norm) for norm in norms] == [nn.SyncBatchNorm] * 3
    new_state = converted.state_dict(keep_vars=True)
    assert list(new_state) == list(state) and all(new_state[key] is state[key] for key in state)


class NoDouble(TorchDispatchMode):
    """PyTorch on MPS: there is no float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        assert not (isinstance(made, torch.Tensor) and made.dtype == torch.float64), "MPS has no float64"
        return made


def test_one_rank_averages_nothing() -> None:
    """It may be on MPS, where the double precision that several ranks average in is a TypeError."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with NoDouble():
        model(torch.rand(2, 3, 8, 8))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        average_statistics(model, ALONE)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
