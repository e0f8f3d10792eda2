"""One rank of `benchmarks.ranks`: does the job in a file, and writes what it found beside it.

RANK=0 ... python -m benchmarks.ranks_worker JOB.json
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import torch

import train
from benchmarks.scaling import in_turn
from benchmarks.scaling_rank import WARMED_UP, cores, stay_on
from benchmarks.train_step import Repeated
from utils.config.build import build_config
from utils.config.flags import TrainConfig
from utils.core.errors import run_cli
from utils.data.loaders import Batch
from utils.dist.collectives import all_reduce_sum, barrier
from utils.dist.place import DistEnv, dist_env
from utils.run.events import train_start
from utils.run.loading import open_loaders
from utils.run.progress import RunClock
from utils.run.state import Run
from utils.torch_utils import process_group
from utils.training import data_parallel

BATCHES = 4  # that a contestant trains on in a round


@dataclass(frozen=True)
class Counted:
    """What one rank sent in an epoch.

    Attributes:
        sent: bytes, by all interfaces but loopback.
        packets: that they were in.
        parameters: numbers that are trained.
        buffer_bytes: of BatchNorm's running statistics.
        steps: optimizer steps.
    """

    sent: int
    packets: int
    parameters: int
    buffer_bytes: int
    steps: int


def epoch(run: Run, batch: Batch) -> None:
    """Train on a batch as often as an epoch has batches."""
    train.train_epoch(run, Repeated(batch, run), RunClock(run.config.epochs, run.state.epoch))
    run.state.epoch, run.state.batch = run.state.epoch + 1, 0
    run.notes.meter.reset()


def in_every_batch(work: Callable[[], None]) -> None:
    """Do something with an exchange of gradients in every batch of a window."""
    ours = data_parallel.accumulating
    data_parallel.accumulating = lambda model, step_now: ours(model, True)
    try:
        work()
    finally:
        data_parallel.accumulating = ours


def time_steps(job: Mapping[str, Any], env: DistEnv) -> dict[str, list[float]]:
    """Return the seconds of each contestant on this rank, one figure a round; one round does not count."""
    local_batch, own = job["local_batch"], f"{job['folder']}/runs{env.rank}"
    by_itself = DistEnv(device=env.device)
    with contextlib.ExitStack() as stack:

        def ready(place: DistEnv, window: int) -> tuple[Run, Batch]:
            batch, data = local_batch * place.world_size, job["data"][-1 if place is env else env.rank]
            more = {"data": data, "batch_size": batch, "nbs": batch * window, "project": own}
            run = train.set_up(build_config(TrainConfig, job["flags"] | more), place)
            run.state.epoch = WARMED_UP
            return run, next(open_loaders(run, stack)[0])

        alone, ours, alone_window, window = (
            ready(place, batches) for batches in (1, BATCHES) for place in (by_itself, env)
        )
        gradients = torch.zeros(trained_numbers(ours[0]))
        contestants: dict[str, Callable[[], object]] = {
            "alone": lambda: epoch(*alone),
            "ours": lambda: epoch(*ours),
            "exchange": lambda: all_reduce_sum(gradients, env),
            "alone, window": lambda: epoch(*alone_window),
            "window": lambda: epoch(*window),
            "every batch": lambda: in_every_batch(lambda: epoch(*window)),
        }
        stay_on({sorted(cores())[env.local_rank]})
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(job["rounds"] + 1):
            for name in in_turn(contestants, number):
                barrier(env)
                start = time.perf_counter()
                contestants[name]()
                if number:
                    taken[name].append(time.perf_counter() - start)
    return taken


def trained_numbers(run: Run) -> int:
    """Return how many numbers have a gradient."""
    return sum(parameter.numel() for parameter in run.raw_model.parameters() if parameter.requires_grad)


def count_bytes(job: Mapping[str, Any], env: DistEnv) -> dict[str, int]:
    """Train and validate an epoch, and return what this rank sent, as a `Counted`."""
    with contextlib.ExitStack() as stack:
        run = train.set_up(build_config(TrainConfig, job["flags"]), env)
        stack.enter_context(contextlib.closing(run.writer))
        batches, val_batches = open_loaders(run, stack)
        run.callbacks.train_start(train_start(run, False))
        clock = RunClock(run.config.epochs, 0)
        barrier(env)
        before = sent()
        losses = train.train_epoch(run, batches, clock)
        train.end_epoch(run, losses, val_batches, clock)
        barrier(env)
        bytes_sent, packets = (after - earlier for after, earlier in zip(sent(), before, strict=True))
    buffer_bytes = sum(buffer.nbytes for name, buffer in run.raw_model.named_buffers() if "running_" in name)
    return dataclasses.asdict(Counted(bytes_sent, packets, trained_numbers(run), buffer_bytes, run.state.step))


def sent() -> tuple[int, int]:
    """Return bytes and packets that this machine has sent so far, but for loopback; Linux only."""
    rows = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    figures = [values.split() for name, values in rows if name.strip() != "lo"]
    return sum(int(row[8]) for row in figures), sum(int(row[9]) for row in figures)


def main() -> None:
    """Do the job."""
    file = Path(sys.argv[1])
    job = json.loads(file.read_text())
    cv2.setNumThreads(0)  # one thread per rank
    with process_group("cpu", dist_env()) as env:
        found = {"steps": time_steps, "bytes": count_bytes}[job["kind"]](job, env)
        file.with_name(f"{env.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_cli(main)
