"""Trains on the ranks that a launcher started, with the program's own steps, and writes down what each rank saw.

    torchrun ... -m tests.dist.recorded_runs JOB.json

A job is a list of cases; ``NAME.pt`` beside it then holds the records of a case, one for each rank.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import train
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.data.loaders import Batch
from utils.dist.collectives import barrier, gather_objects, once
from utils.dist.place import DistEnv
from utils.dist.worker import as_worker
from utils.run.events import train_start
from utils.run.loading import open_loaders
from utils.run.progress import RunClock
from utils.run.resume import resume
from utils.run.state import Run
from utils.torch_utils import process_group


@dataclass
class Case:
    """One run, or a part of one.

    Attributes:
        name: of the record.
        flags: command line.
        dtype: torch's default, which the network is built in.
        start_epoch: first epoch; the warm-up is over by a late one.
        stop_epoch: the run is left before this one; without it comes to its end.
        killed: leave it by SIGKILL on all ranks; no later case is run then, and there is no record.
        shuffled: train on each micro-batch in another order of its images.
        poison: rank and micro-batch, counted from 0, whose images are made NaN.
    """

    name: str
    flags: list[str]
    dtype: str = "float32"
    start_epoch: int = 0
    stop_epoch: int | None = None
    killed: bool = False
    shuffled: bool = False
    poison: list[int] | None = None


@dataclass
class Record:
    """What one rank saw.

    Attributes:
        indices: images of each micro-batch.
        targets: their number, for each micro-batch.
        shapes: (height, width) of each micro-batch as the network got it.
        windows: micro-batches of each optimizer step.
        digests: of weights, buffers, averages and optimizer at the start of each window and after the last.
        gradient: (P,) of the first window, as the optimizer gets it before clipping; rank 0's.
        all_gradients: digest of the gradients of all windows.
        losses: means of each epoch.
        own_buffers, own_averages: (F,) running statistics of network and EMA as they were before an epoch's end.
        buffers, averages: (F,) after it.
        weights, ema: (P,) at the end; rank 0's.
        all_weights: digest of the network's state at the end.
        metrics: (M,) all figures of a validation at the end; rank 0's.
        skipped: windows.
        finite: whether weights, buffers and averages are at the end.
        run_dir: of the run.
    """

    indices: list[list[int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    gradient: Tensor | None = None
    all_gradients: str = ""
    losses: list[list[float]] = field(default_factory=list)
    own_buffers: list[Tensor] = field(default_factory=list)
    own_averages: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)
    weights: Tensor | None = None
    ema: Tensor | None = None
    all_weights: str = ""
    metrics: Tensor | None = None
    skipped: int = 0
    finite: bool = False
    run_dir: str = ""


class Watcher(torch.amp.GradScaler):
    """Stands in for the run's scaler, which sees the gradient of each window first; scales nothing."""

    def __init__(self, run: Run, record: Record) -> None:
        super().__init__("cpu", enabled=False)
        self.run, self.record, self.hash = run, record, hashlib.sha256()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Write down the window."""
        gradient = flat(parameter.grad for parameter in self.run.raw_model.parameters() if parameter.grad is not None)
        self.hash.update(gradient.numpy().tobytes())
        self.record.all_gradients = self.hash.hexdigest()
        if not self.record.windows and self.run.env.is_main_process:
            self.record.gradient = gradient
        self.record.windows.append(self.run.state.since_step)


def watched(batches: Iterator[Batch], run: Run, case: Case, record: Record) -> Iterator[Batch]:
    """Pass the batches on, shuffled if the case says so, and write down what is in them."""
    for batch in batches:
        if case.poison is not None and run.state.since_step == 0:
            record.digests.append(digest(everything(run)))
        if case.shuffled:
            batch = shuffle(batch)
        record.indices.append(batch.indices.tolist())
        record.targets.append(len(batch.targets))
        yield batch


def shuffle(batch: Batch) -> Batch:
    """The same images with the same targets in another order."""
    order = np.random.default_rng([batch.epoch, batch.k]).permutation(len(batch.images))
    targets = batch.targets.clone()
    targets[:, 0] = torch.from_numpy(np.argsort(order))[targets[:, 0].long()].float()
    targets = targets[targets[:, 0].argsort(stable=True)]
    images = batch.images[order].contiguous(memory_format=torch.channels_last)
    return batch._replace(images=images, targets=targets, indices=batch.indices[order])


class SeeImages:
    """Forward pre-hook of the network: writes down the shape of the images, and spoils them once."""

    def __init__(self, env: DistEnv, case: Case, record: Record) -> None:
        self.env, self.case, self.record = env, case, record

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        images = inputs[0]
        if self.case.poison == [self.env.rank, len(self.record.shapes)]:
            images = images * float("nan")
        self.record.shapes.append((images.shape[2], images.shape[3]))
        return (images, *inputs[1:])


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def floating_buffers(model: nn.Module) -> Tensor:
    return flat(buffer for buffer in model.buffers() if buffer.is_floating_point())


def everything(run: Run) -> list[Tensor]:
    """Weights, buffers, averages and the optimizer's own."""
    momenta = [value for state in run.optimizer.state.values() for value in state.values()]
    return [*run.raw_model.state_dict().values(), *run.ema.module.state_dict().values(), *momenta]


def digest(tensors: Iterable[Tensor]) -> str:
    joined = hashlib.sha256()
    for tensor in tensors:
        joined.update(tensor.detach().contiguous().numpy().tobytes())
    return joined.hexdigest()


def record_run(case: Case, env: DistEnv) -> Record:
    """Train a case. Collective: every rank must call it."""
    given = given_flags(TrainConfig, case.flags)
    resumed = None
    if "resume" in given:
        config, resumed = once(lambda: resume(given), env)
    else:
        config = build_train_config(given)
    record = Record()
    with contextlib.ExitStack() as stack:
        run = train.set_up(config, env, resumed)
        stack.enter_context(run.plots)
        run.state.epoch = run.state.epoch or case.start_epoch
        train_batches, val_batches = open_loaders(run, stack)
        batches = watched(train_batches, run, case, record)
        run.scaler = Watcher(run, record)
        run.raw_model.register_forward_pre_hook(SeeImages(env, case, record))
        run.callbacks.train_start(train_start(run, resumed is not None))
        clock = RunClock(config.epochs, run.state.epoch)
        stop_epoch = config.epochs if case.stop_epoch is None else case.stop_epoch
        while run.state.epoch < stop_epoch:
            record.losses.append(train.train_epoch(run, batches, clock))
            record.own_buffers.append(floating_buffers(run.raw_model))
            record.own_averages.append(floating_buffers(run.ema.module))
            train.end_epoch(run, record.losses[-1], val_batches, clock)
            record.buffers.append(floating_buffers(run.raw_model))
            record.averages.append(floating_buffers(run.ema.module))
        if case.killed:
            barrier(env)
            os.kill(os.getpid(), signal.SIGKILL)
        evaluation = train.validate(run, val_batches)
        if evaluation is not None:
            metrics = evaluation.metrics
            scores = [metrics.p, metrics.r, metrics.map50, metrics.map, *metrics.class_maps.tolist()]
            record.metrics = torch.tensor([*scores, *evaluation.losses], dtype=torch.float64)
            record.weights = flat(run.raw_model.parameters())
            record.ema = flat(run.ema.module.parameters())
        if case.poison is not None:
            record.digests.append(digest(everything(run)))
        record.all_weights = digest(run.raw_model.state_dict().values())
        record.skipped, record.run_dir = run.state.skipped, str(run.run_dir)
        record.finite = all(bool(tensor.isfinite().all()) for tensor in everything(run))
        if run.state.epoch == config.epochs:
            train.finish(run, val_batches, clock)
    return record


def main(job: Path) -> None:
    """Train all cases of a job."""
    cv2.setNumThreads(0)
    cases = [Case(**case) for case in json.loads(job.read_text())]
    with process_group("cpu") as env:
        for case in cases:
            torch.set_default_dtype(getattr(torch, case.dtype))
            records = gather_objects(record_run(case, env), env)
            if env.is_main_process:
                torch.save([dataclasses.asdict(record) for record in records], job.with_name(f"{case.name}.pt"))


if __name__ == "__main__":
    as_worker(lambda: main(Path(sys.argv[1])))()
