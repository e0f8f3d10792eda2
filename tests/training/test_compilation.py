"""torch.compile: what it does to a run, and what is said about it."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, flags, make_data, train_here
from tests.test_train import mistake
from utils.config.flags import TrainConfig
from utils.core.errors import USER_ERROR
from utils.dist.place import DistEnv
from utils.training.compilation import Compiled, can_compile, check_compiler, compile_network
from utils.training.steps import Precision

CPU = torch.device("cpu")


class Small(nn.Module):
    """A network with the outputs of two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())

    def forward(self, images: Tensor) -> list[Tensor]:
        found = self.layers(images)
        return [found, found[..., ::2]]


@pytest.mark.parametrize(
    ("config", "device", "sync_bn", "why"),
    [
        ({}, CPU, True, None),
        ({"compile": True}, CPU, False, ""),
        ({"compile": True}, torch.device("cuda"), False, ""),
        ({"compile": True}, CPU, True, "ranks exchange statistics in the middle of it (SyncBN); --no-sync-bn goes"),
        ({"compile": True}, torch.device("mps"), False, "torch.compile is not used on mps"),
        ({"compile": True, "dp": True}, CPU, False, "--dp makes new copies of the network for each batch"),
        ({"compile": True, "cuda_graph": True}, CPU, False, "--cuda-graph captures the network as it is"),
        ({"compile": True, "multi_scale": True}, CPU, False, "--multi-scale changes the size of the images"),
        ({"compile": True, "rect": True}, CPU, False, "--rect changes the size of the images"),
    ],
)
def test_when(
    config: dict[str, Any], device: torch.device, sync_bn: bool, why: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert can_compile(TrainConfig(**config), DistEnv(device=device), sync_bn) == (why == "")
    said = capsys.readouterr().out
    assert said.startswith(f"compile     off: {why}") if why else not said
    assert said.count("\n") == bool(why)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Known before anything is trained or made."""
    data = make_data(tmp_path / "data", count=4)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    message = mistake("--data", data, "--project", tmp_path / "runs", "--device", "cpu", "--compile")
    assert "torch.compile needs a C++ compiler" in message
    assert not (tmp_path / "runs").exists()
    check_compiler(torch.device("cuda"))  # brings its own


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ((90.0, 0.08, 0.05), "in 1:30; a pass takes 50 ms, before 80 ms: made up for after 3000 batches, 30.0 epochs"),
        ((90.0, 0.05, 0.08), "in 1:30; a pass takes 80 ms, before 50 ms: it does not pay on this machine, leave"),
    ],
)
def test_what_is_said(figures: tuple[float, float, float], said: str) -> None:
    """90 s are 3000 times 30 ms."""
    assert Compiled(*figures).describe(100).startswith(said)


@pytest.mark.slow
def test_a_compiled_network_is_the_same_network() -> None:
    torch.manual_seed(0)
    model = Small().train()
    images = torch.rand(4, 3, 9, 9)
    other = copy.deepcopy(model)
    figures = compile_network(model, images, Precision("off"))
    assert figures.warm_up > figures.after > 0
    assert list(model.state_dict()) == list(other.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name  # the timed passes leave nothing behind
    assert all(parameter.grad is None for parameter in model.parameters())
    found, expected = model(images), other(images)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
    sum(one.square().mean() for one in found).backward()
    sum(one.square().mean() for one in expected).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """The run ends before it trains, in one sentence with what to do."""
    words = flags(make_data(tmp_path / "data", count=4), tmp_path / "runs", "--epochs 1 --compile")
    environment = CHILD_ENVIRONMENT | {"CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, PROJECT / "train.py", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == USER_ERROR, done.stderr
    assert "error: --compile: torch.compile failed here: " in done.stderr
    assert done.stderr.strip().endswith("leave --compile out")
    assert "Traceback" not in done.stderr


def test_a_run_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(*flags(make_data(tmp_path / "data", count=4), tmp_path / "runs", "--epochs 1 --compile --rect"))
    assert capsys.readouterr().out.count("compile     off: --rect changes the size of the images") == 1
