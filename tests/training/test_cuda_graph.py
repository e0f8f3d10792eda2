"""CUDA graphs: R6 of the contract."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.families import YOLOV5
from tests.runs import flags, make_data, train_here
from tests.test_val import yolov5n
from utils.config.flags import TrainConfig
from utils.dist.place import DistEnv
from utils.training.compilation import can_capture, capture, own_gradients
from utils.training.steps import Precision

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("config", "env", "why"),
    [
        ({}, {}, None),
        ({}, {"world_size": 2, "local_world_size": 2, "launched": True}, None),
        ({"cuda_graph": True}, {}, ""),
        (
            {"cuda_graph": True},
            {"world_size": 2, "local_world_size": 2, "launched": True},
            "2 ranks exchange statistics and gradients in the middle of it",
        ),
        ({"cuda_graph": True}, {"device": torch.device("cpu")}, "it needs CUDA, and this run is on cpu"),
        ({"cuda_graph": True}, {"device": torch.device("mps")}, "it needs CUDA, and this run is on mps"),
        ({"cuda_graph": True, "multi_scale": True}, {}, "--multi-scale changes the size of the images"),
        ({"cuda_graph": True, "rect": True}, {}, "--rect changes the size of the images"),
        ({"cuda_graph": True, "dp": True}, {}, "--dp makes new copies of the network for each batch"),
    ],
)
def test_when(config: dict[str, Any], env: dict[str, Any], why: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """R6: on one CUDA device with images of one size; else it is off, with one line, if it was asked for at all."""
    assert can_capture(TrainConfig(**config), DistEnv(**{"device": CUDA, **env})) == (why == "")
    assert capsys.readouterr().out == (f"cuda graph  off: {why}\n" if why else "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would be captured")
def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R6: it trains, and says why it does so without."""
    train_here(*flags(make_data(tmp_path / "data", count=4), tmp_path / "runs", "--epochs 1 --cuda-graph"))
    assert capsys.readouterr().out.count("cuda graph  off: it needs CUDA, and this run is on cpu\n") == 1
    assert (tmp_path / "runs/run/weights/last.pt").exists()


class Replayed(torch.autograd.Function):
    """Hands out its gradient as a graph does: always the same memory. d/dw of sum(x w) is x."""

    place = torch.zeros(1, 3)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x = x
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        with torch.no_grad():
            Replayed.place.copy_(ctx.x * gradient)
        return None, Replayed.place.detach()


def test_gradients_add_up() -> None:
    """Of the batches of a window, and none is changed by a later replay."""
    layer = nn.Linear(3, 1, bias=False)
    own_gradients(layer)
    batches = [torch.full((3,), value) for value in (1.0, 10.0, 100.0)]
    for batch in batches:
        Replayed.apply(batch, layer.weight).backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((1, 3), 111.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["off", "fp16"])
def test_same_as_eager(precision: str) -> None:
    """R6: outputs, gradients of a window of two batches, and BatchNorm's statistics."""
    plain, graphed = (yolov5n(2, ["a", "b"]).to(CUDA).to(memory_format=torch.channels_last) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    batches = [
        YOLOV5.inputs.prepare(torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8, generator=generator).to(CUDA))
        for _ in range(3)
    ]
    before = {name: value.clone() for name, value in graphed.state_dict().items()}
    capture(graphed, YOLOV5.inputs.blank(graphed, CUDA, 2, 64), Precision(precision))
    assert all(torch.equal(value, before[name]) for name, value in graphed.state_dict().items())
    plain.train()
    for batch in batches[:2]:
        for model in (plain, graphed):
            with Precision(precision).autocast("cuda"):
                outputs = model(batch)
            sum(level.float().square().mean() for level in outputs).backward()
    for (name, one), other in zip(plain.named_parameters(), graphed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-4, msg=name)
    graphed.eval()  # runs as it always did
    assert torch.isfinite(graphed(batches[2][:1])[0]).all()
