"""The network compiled by torch.compile (``--compile``), or captured as a CUDA graph (``--cuda-graph``)."""

import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.config.flags import TrainConfig
from utils.core.devices import time_on
from utils.core.errors import UserError
from utils.core.heartbeat import Phase, alive, beat
from utils.core.logging import get_logger
from utils.core.wording import duration, format_lines
from utils.dist.place import DistEnv
from utils.training.steps import BufferSnapshot, Precision

TIMED_PASSES = 3
DEVICES = ("cpu", "cuda")


def switched_on(asked: bool, word: str, reasons: Mapping[str, bool]) -> bool:
    """Whether something was asked for and works here; if only that it was asked for, a line says why not.

    Args:
        asked: for it.
        word: what the line calls it.
        reasons: why it would not work, and whether that holds; the first that does is said.
    """
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if asked and why:
        get_logger().info(format_lines([(word, f"off: {why}")]))
    return asked and not why


def can_compile(config: TrainConfig, env: DistEnv, sync_bn: bool) -> bool:
    """Whether ``--compile`` was asked for and works here; if only that it was asked for, a line says why not."""
    reasons = {
        f"torch.compile is not used on {env.device}": env.device.type not in DEVICES,
        "ranks exchange statistics in the middle of it (SyncBN); --no-sync-bn goes without": sync_bn,
        "--dp makes new copies of the network for each batch": config.dp,
        "--cuda-graph captures the network as it is": config.cuda_graph,
        "--multi-scale changes the size of the images, each would be compiled anew": config.multi_scale,
        "--rect changes the size of the images, each would be compiled anew": config.rect,
    }
    return switched_on(config.compile, "compile", reasons)


def check_compiler(device: torch.device) -> None:
    """Check that there is what torch.compile calls.

    Raises:
        UserError: says what to install.
    """
    if device.type == "cpu" and sys.platform != "win32":
        named = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ([named] if named else ["g++", "clang++"])):
            raise UserError(
                "--compile: torch.compile needs a C++ compiler on the CPU, and there is none; install one "
                "(apt install g++), or leave --compile out"
            )


@dataclass(frozen=True)
class Compiled:
    """What compiling has cost, and what a pass costs since.

    Attributes:
        warm_up: seconds of the first pass, in which the network was compiled.
        before: seconds of a forward and backward pass as it was.
        after: seconds of one now.
    """

    warm_up: float
    before: float
    after: float

    def describe(self, batches_per_epoch: int) -> str:
        """Say it, with the batches after which the time is made up for."""
        said = f"in {duration(self.warm_up)}; a pass takes {self.after * 1e3:.0f} ms, before {self.before * 1e3:.0f} ms"
        if self.after >= self.before:
            return f"{said}: it does not pay on this machine, leave --compile out"
        batches = math.ceil(self.warm_up / (self.before - self.after))
        return f"{said}: made up for after {batches} batches, {batches / batches_per_epoch:.1f} epochs"


def compile_network(raw_model: nn.Module, images: Tensor, precision: Precision) -> Compiled:
    """Compile a network's passes in training mode, in place; weights, statistics and their names stay as they are.

    Args:
        raw_model: on its device.
        images: (B, 3, H, W) of the shape, dtype and memory format of all that follow.
        precision: of the training.

    Raises:
        UserError: torch can't compile it here; with the first line of what it says.
    """
    beat(Phase.SET_UP)
    raw_model.train()
    buffers = BufferSnapshot(raw_model)
    _seconds_of_a_pass(raw_model, images, precision)
    before = min(_seconds_of_a_pass(raw_model, images, precision) for _ in range(TIMED_PASSES))
    # The compiler has a switch of its own for kernels that repeat, which only this call sets.
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=True)
    raw_model.compile(dynamic=False)
    try:
        with alive():
            warm_up = _seconds_of_a_pass(raw_model, images, precision)
    except Exception as error:  # whatever the compiler meets
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"--compile: torch.compile failed here: {first}; leave --compile out") from error
    after = min(_seconds_of_a_pass(raw_model, images, precision) for _ in range(TIMED_PASSES))
    buffers.restore(torch.ones((), device=images.device))
    return Compiled(warm_up, before, after)


def _seconds_of_a_pass(raw_model: nn.Module, images: Tensor, precision: Precision) -> float:
    """Time a forward and backward pass; its gradients are dropped."""
    start = time_on(images.device)
    with precision.autocast(images.device.type):
        outputs = raw_model(images)
    sum(output.float().mean() for output in outputs).backward()
    raw_model.zero_grad(set_to_none=True)
    return time_on(images.device) - start


# Forward and backward pass as a CUDA graph: the host starts each with one call ---------------------------------------


def can_capture(config: TrainConfig, env: DistEnv) -> bool:
    """Whether ``--cuda-graph`` was asked for and works here; if only that it was asked for, a line says why not."""
    reasons = {
        f"{env.world_size} ranks exchange statistics and gradients in the middle of it": env.world_size > 1,
        f"it needs CUDA, and this run is on {env.device}": env.device.type != "cuda",
        "--dp makes new copies of the network for each batch": config.dp,
        "--multi-scale changes the size of the images": config.multi_scale,
        "--rect changes the size of the images": config.rect,
    }
    return switched_on(config.cuda_graph, "cuda graph", reasons)


def capture(raw_model: nn.Module, images: Tensor, precision: Precision) -> None:
    """Make a network's forward and backward pass in training mode replay a CUDA graph.

    Weights and statistics stay as they are. Afterwards no parameter or buffer may be replaced by another tensor.

    Args:
        raw_model: on its CUDA device.
        images: (B, 3, H, W) of the shape, dtype and memory format of all that follow; the graph's own input.
        precision: of the training.
    """
    raw_model.train()
    buffers = BufferSnapshot(raw_model)
    with precision.autocast(images.device.type, cache=False):  # a cached weight would be the same at every replay
        torch.cuda.make_graphed_callables(raw_model, (images,), allow_unused_input=True)
    buffers.restore(torch.ones((), device=images.device))  # PyTorch warms up with passes of its own
    own_gradients(raw_model)


def own_gradients(raw_model: nn.Module) -> None:
    """Give parameters gradients in memory of their own.

    A graph writes them to the same place at every replay. Autograd would take that place for ``.grad``, so that the
    second batch of a window would overwrite the sum that it is to be added to.
    """
    for parameter in raw_model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: None if gradient is None else gradient.clone())
