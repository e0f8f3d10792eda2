"""Trains one epoch on every rank and counts what passes between the ranks, and how often the host waits.

    torchrun ... -m tests.dist.counted_epoch JOB.json

The counter is torch's profiler: it sees every collective that Gloo is given, whether Python or DDP asks for it, and
every read of a tensor as a number, also inside of torch. Beside the job every rank writes RANK.json.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import train
from tests.dist.launch import free_port, torchrun
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.data.loaders import Batch
from utils.dist.place import DistEnv
from utils.dist.worker import as_worker
from utils.run.events import train_start
from utils.run.loading import open_loaders
from utils.run.progress import RunClock
from utils.run.state import Run
from utils.torch_utils import process_group
from utils.training.sync_bn import SyncBatchNorm

NEXT = "a batch is asked for"
COLLECTIVES = "gloo:"
READ = "aten::_local_scalar_dense"
SIZES = {"double": 8, "long int": 8, "long long": 8, "float": 4, "c10::BFloat16": 2}  # bytes of a number, by C++ type


@dataclass
class MicroBatch:
    """What happened until the next batch was asked for.

    Attributes:
        step: optimizer steps before it.
        calls: collectives in the order of their start: kind, and numbers that this rank gave.
        sent: bytes of these numbers, for each collective.
        reads: numbers that the host took out of tensors.
    """

    step: int
    calls: list[tuple[str, int]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    reads: int = 0


@dataclass
class Counted:
    """One epoch of one rank.

    Attributes:
        batches: in order.
        buckets: numbers in each bucket of gradients, as DDP has it.
        parameters: numbers that are trained.
        sync_layers: SyncBatchNorm layers.
        weights: digest of the averaged weights before the epoch, after it, and after its validation.
        buffers: of their buffers, likewise.
        raw_buffers: of the buffers that are trained with, likewise.
        steps: optimizer steps.
    """

    batches: list[MicroBatch]
    buckets: list[int]
    parameters: int
    sync_layers: int
    weights: list[str]
    buffers: list[str]
    raw_buffers: list[str]
    steps: int


def run_counted(lines: list[list[str]], nproc: int, epoch: int, folder: Path, timeout: float) -> list[list[Counted]]:
    """Train one epoch for each command line; returns what was counted, by line and rank."""
    file = folder / "job.json"
    file.write_text(json.dumps({"lines": lines, "epoch": epoch}))
    done = torchrun(["-m", "tests.dist.counted_epoch", file], nproc, port=free_port(), timeout=timeout)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]
    return [[_counted(one) for one in of_line] for of_line in zip(*ranks, strict=True)]


def _counted(fields: dict[str, Any]) -> Counted:
    batches = [MicroBatch(**{**b, "calls": [(kind, size) for kind, size in b["calls"]]}) for b in fields["batches"]]
    return Counted(**{**fields, "batches": batches})


class Marked(Iterator[Batch]):
    """Batches of a loader; each time one is asked for is marked in the profile.

    Args:
        batches: of the loader.
        run: whose steps are noted.
    """

    def __init__(self, batches: Iterator[Batch], run: Run) -> None:
        self.batches, self.run = batches, run
        self.steps: list[int] = []

    def __next__(self) -> Batch:
        self.steps.append(self.run.state.step)
        with record_function(NEXT):
            return next(self.batches)


def count(line: list[str], epoch: int, env: DistEnv) -> Counted:
    """Train one epoch as train.py does."""
    run = train.set_up(build_train_config(given_flags(TrainConfig, line)), env)
    run.state.epoch = epoch
    with contextlib.ExitStack() as stack:
        train_batches, val_batches = open_loaders(run, stack)
        marked, clock = Marked(train_batches, run), RunClock(run.config.epochs, epoch)
        moments = [digests(run)]
        run.callbacks.train_start(train_start(run, False))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            losses = train.train_epoch(run, marked, clock)
        moments.append(digests(run))
        train.end_epoch(run, losses, val_batches, clock)
        moments.append(digests(run))
    weights, buffers, raw_buffers = (list(values) for values in zip(*moments, strict=True))
    assert isinstance(run.model, DistributedDataParallel)
    sizes = str(run.model._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    return Counted(
        batches=micro_batches(profiler, marked.steps),
        buckets=[int(size) // 4 for size in sizes.split(",")],
        parameters=sum(parameter.numel() for parameter in run.raw_model.parameters() if parameter.requires_grad),
        sync_layers=sum(isinstance(module, SyncBatchNorm) for module in run.raw_model.modules()),
        weights=weights,
        buffers=buffers,
        raw_buffers=raw_buffers,
        steps=run.state.step,
    )


def micro_batches(profiler: profile, steps: list[int]) -> list[MicroBatch]:
    """Sort the events of an epoch by the batch that they belong to."""
    found: list[MicroBatch] = []
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    # The events as they were recorded: to make profiler.events() of them takes longer than the epoch.
    events = profiler.profiler.kineto_results.events()
    wanted = [event for event in events if event.name() in (NEXT, READ) or event.name().startswith(COLLECTIVES)]
    for event in sorted(wanted, key=lambda event: event.start_ns()):
        name = event.name()
        if name == NEXT:
            found.append(MicroBatch(steps[len(found)]))
        elif name == READ:
            found[-1].reads += 1
        else:
            size = prod(event.shapes()[0])
            found[-1].calls.append((name.removeprefix(COLLECTIVES), size))
            found[-1].sent.append(size * SIZES[event.dtypes()[0]])
    return found


def digests(run: Run) -> tuple[str, str, str]:
    """Of averaged weights, of their buffers, and of the buffers that are trained with."""
    averaged = run.ema.module
    return digest(averaged.parameters()), digest(averaged.buffers()), digest(run.raw_model.buffers())


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    file = Path(sys.argv[1])
    job = json.loads(file.read_text())
    with process_group("cpu") as env:
        counted = [dataclasses.asdict(count(line, job["epoch"], env)) for line in job["lines"]]
    file.with_name(f"{os.environ['RANK']}.json").write_text(json.dumps(counted))


if __name__ == "__main__":
    as_worker(main)()
