"""One process of `benchmarks.scaling`: a rank that trains, scans and validates whenever it is told to.

It sets up a run as train.py does, fetches the first batch, says so, and then answers one command a line.
"""

import argparse
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import torch
from torch import nn

import train
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.core.devices import memory_usage
from utils.core.errors import run_cli
from utils.data.index import build_index
from utils.data.loaders import Batch, ValLoader
from utils.dist.collectives import barrier
from utils.dist.place import dist_env
from utils.run import state as run_state
from utils.run.loading import open_loaders
from utils.run.progress import RunClock
from utils.run.state import Run
from utils.torch_utils import process_group
from utils.training import sync_bn

WARMED_UP = 1_000  # an epoch after the warm-up, when windows have their full length
# Calls of the training loop in which a rank may wait for others, by the modules that make them.
COLLECTIVES = (
    (train, "start_all_reduce_sum"),  # of the loss's counts
    (run_state, "all_reduce_sum"),  # of the losses that are shown
    (sync_bn, "all_gather_rows"),
    (sync_bn, "small_sum"),
)


class Waits:
    """Adds up the seconds that a rank's main thread spends in the collectives of the training loop, on the CPU.

    Of most that is the time inside the calls. DDP's exchange of gradients runs beside the backward pass; what the rank
    waits for at its end is the time from its last own gradient to the optimizer step.

    Attributes:
        seconds: so far; set it to 0 to begin anew.

    Args:
        raw_model: the network of the run. One watch per process.
    """

    def __init__(self, raw_model: nn.Module) -> None:
        self.seconds = 0.0
        self._last_gradient = 0.0
        for module, name in COLLECTIVES:
            setattr(module, name, self._timed(getattr(module, name)))
        for parameter in raw_model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient)
        name = "guarded_step"  # what follows upon the backward pass that ends with an exchange
        setattr(train, name, self._after_backward(getattr(train, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                result = call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
            return self._timed(result) if callable(result) else result  # one that was only begun is waited for later

        return timed

    def _gradient(self, _parameter: object) -> None:
        self._last_gradient = time.perf_counter()

    def _after_backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def after_backward(*args: Any, **kwargs: Any) -> Any:
            self.seconds += time.perf_counter() - self._last_gradient
            return call(*args, **kwargs)

        return after_backward


class SteadyBatches(Iterator[Batch]):
    """Passes batches on; calls back when the first few of a round are done."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._left = 0
        self._start: Callable[[], None] = lambda: None

    def begin(self, skip: int, start: Callable[[], None]) -> None:
        """Call ``start`` once so many batches have been trained on."""
        self._left, self._start = skip, start

    def __next__(self) -> Batch:
        if self._left == 0:
            self._start()
        self._left -= 1
        return next(self._batches)


class Rank:
    """What this process can do.

    Args:
        run: from `train.set_up`.
        batches: of training, endless.
        val_batches: of validation.
        core: where it trains; None for anywhere.
        labels: folder of images to scan; its labels have class 0 only.
        skip: batches at the start of a round of training that do not count.
    """

    def __init__(
        self,
        run: Run,
        batches: Iterator[Batch],
        val_batches: ValLoader,
        core: int | None,
        labels: Path,
        skip: int,
    ) -> None:
        self.run, self.batches, self.val_batches = run, SteadyBatches(batches), val_batches
        self.core, self.labels, self.skip = core, labels, skip
        self.waits = Waits(run.raw_model)
        self.all_cores = cores()

    def train(self) -> dict[str, float]:
        """Train for an epoch; the clocks start after its first batches."""
        run, start, busy = self.run, 0.0, 0.0

        def steady() -> None:
            nonlocal start, busy
            self.waits.seconds = 0.0
            start, busy = time.perf_counter(), time.process_time()

        self.batches.begin(self.skip, steady)
        if self.core is not None:
            stay_on({self.core})
        train.train_epoch(run, self.batches, RunClock(run.config.epochs, run.state.epoch))
        figures = {
            "images": run.plan.local_batch * (run.schedule.batches_per_epoch - self.skip),
            "seconds": time.perf_counter() - start,
            "waiting": self.waits.seconds,
            "computing": time.process_time() - busy,  # of all threads
            "memory": most_memory(run.env.device),
        }
        stay_on(self.all_cores)
        run.state.epoch, run.state.batch = run.state.epoch + 1, 0
        run.notes.meter.reset()
        return figures

    def scan(self) -> dict[str, float]:
        """Read and check the labels, without a cache file."""
        barrier(self.run.env)
        start = time.perf_counter()
        index = build_index([self.labels], 1, self.run.env, cache=False)
        return {"images": len(index), "seconds": time.perf_counter() - start}

    def validate(self) -> dict[str, float]:
        """Measure the averaged weights on the validation split."""
        barrier(self.run.env)
        start = time.perf_counter()
        train.validate(self.run, self.val_batches)
        return {"images": len(self.run.val_index), "seconds": time.perf_counter() - start}


def cores() -> set[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def most_memory(device: torch.device) -> float:
    """Return the most GB (1e9 bytes) that this process has reserved on its GPU; elsewhere what it holds now."""
    return torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else memory_usage(device)


def stay_on(some: set[int]) -> None:
    """Keep this process on some cores, with the threads that it has (Gloo's among them); Linux only."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), some)


def main() -> None:
    """Set up, report, and answer commands until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True, help="where the benchmark listens on this machine")
    parser.add_argument("--first-core", type=int, help="place among the cores of the first rank's; none: anywhere")
    parser.add_argument("--labels", type=Path, required=True, help="folder of images to scan")
    parser.add_argument("--skip", type=int, required=True, help="batches of a round that do not count")
    own, flags = parser.parse_known_args()
    cv2.setNumThreads(0)  # one thread per rank
    config = build_train_config(given_flags(TrainConfig, flags))
    env = dist_env()
    core = None if own.first_core is None else sorted(cores())[own.first_core + env.local_rank]
    with process_group(config.device, env) as env, contextlib.ExitStack() as stack:
        run = train.set_up(config, env)
        run.state.epoch = WARMED_UP
        batches, val_batches = open_loaders(run, stack)
        first = next(batches)
        rank = Rank(run, chain([first], batches), val_batches, core, own.labels, own.skip)
        link = stack.enter_context(socket.create_connection(("127.0.0.1", own.port)))
        lines = stack.enter_context(link.makefile("rw", encoding="utf-8"))
        answers = {"train": rank.train, "scan": rank.scan, "validate": rank.validate}
        say(lines, {"precision": run.precision.name})
        for command in lines:
            say(lines, answers[command.strip()]())


def say(lines: Any, figures: dict[str, Any]) -> None:
    """Send figures as a line."""
    lines.write(json.dumps(figures) + "\n")
    lines.flush()


if __name__ == "__main__":
    run_cli(main)
