"""Trains as train.py does, on CPU ranks of which one gets stuck, or is slow, in a known way.

    python -m tests.dist.stuck KIND RANK RANKS FLAGS...

RANK -1 is all of them.

KIND is a function of this module, or "callback". With RANKS 1, and under a launcher, no workers are started.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import train
from models.yolo import DetectionModel
from utils.config.command_line import given_flags
from utils.config.flags import TrainConfig
from utils.core.errors import run_cli
from utils.core.heartbeat import Phase, own
from utils.core.signals import stops_end_the_process
from utils.dist.launch import launch, say
from utils.dist.place import dist_env
from utils.dist.worker import as_worker
from utils.run import settings as command
from utils.run.callbacks import Callback, EpochEnd, Stop
from utils.torch_utils import process_group

LONG = 10_000  # seconds


class Sleeper(Callback):
    """Rank 0 never comes back from it, and all others wait for the verdict."""

    may_stop = True

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        time.sleep(LONG)
        return None


def in_forward(act: Callable[[], object], batch: int | None = None) -> None:
    """Act in the forward pass of a batch of the first epoch, None is all."""

    def hook(module: nn.Module, *_: Any) -> None:
        in_batch = own.phase == Phase.FORWARD and batch in (own.batch, None)
        if in_batch and isinstance(module, DetectionModel):
            act()

    register_module_forward_hook(hook)


def gil() -> None:
    """A C function sleeps and keeps Python's lock."""
    in_forward(lambda: ctypes.PyDLL(None).sleep(LONG), 2)


def asleep() -> None:
    """A hook of the user's sleeps."""
    in_forward(lambda: time.sleep(LONG), 2)


def in_backward() -> None:
    """It sleeps in the backward pass, before the last of its gradients."""

    def hook(module: nn.Module, *_: Any) -> None:
        if own.phase == Phase.BACKWARD and own.batch == 2 and isinstance(module, nn.Upsample):
            time.sleep(LONG)

    register_module_full_backward_hook(hook)


def absent() -> None:
    """It waits behind an optimizer step for something that never comes, and never enters the next collective."""

    def hook(*_: Any) -> None:
        threading.Event().wait()

    register_optimizer_step_post_hook(hook)


def broken() -> None:
    """It raises an exception."""

    def act() -> None:
        raise RuntimeError("broken on purpose")

    in_forward(act, 2)


def slow() -> None:
    """It takes longer for each batch than for anything else."""
    in_forward(lambda: time.sleep(2))


def slow_disk(seconds: float = 6) -> None:
    """Each file takes 6 seconds to reach the disk."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(seconds)
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def lazy_disk() -> None:
    """Each file takes 2 seconds to reach the disk, less than others wait."""
    slow_disk(2)


def slow_labels() -> None:
    """Each look at an image or label file takes 0.3 seconds."""
    real = os.stat

    def stat(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if str(path).endswith((".png", ".txt")):
            time.sleep(0.3)
        return real(path, *arguments, **named)

    os.stat = stat


KINDS = {
    kind.__name__: kind for kind in (gil, asleep, in_backward, absent, broken, slow, slow_disk, lazy_disk, slow_labels)
}


def main() -> int:
    _, kind, rank, ranks, *line = sys.argv
    given, env = given_flags(TrainConfig, line), dist_env()
    if not env.launched and int(ranks) > 1:
        return say(launch(["-m", "tests.dist.stuck", *sys.argv[1:]], [torch.device("cpu")] * int(ranks)))
    if kind in KINDS and int(rank) in (env.rank, -1):
        KINDS[kind]()
    config, resumed = command.settings(given, env)
    timeout = given.get("dist_timeout", TrainConfig.dist_timeout)
    with stops_end_the_process(), process_group("cpu", env, timeout) as env:
        train.train(given, config, resumed, env, [Sleeper()] if kind == "callback" else [])
    return 0


if __name__ == "__main__":
    run_cli(as_worker(main))
