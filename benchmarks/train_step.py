"""How much the training loop adds to what the network itself costs.

python -m benchmarks.train_step                                    the built-in data
python -m benchmarks.train_step --data bccd.yaml --rounds 9        any other data set

Four things take turns, round after round, so that a slow moment of the machine hits all of them:
  bare   the network's forward pass, the loss, the backward pass and the optimizer step, on one synthetic batch
  plain  the same in fp32, with weights and images in PyTorch's own memory layout
  loop   the batch of bare through the training loop: schedule, guarded step, EMA, meters, progress line
  epoch  the training part of an epoch on real images: loader, augmentation, transfer
"""

import argparse
import contextlib
import copy
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

import train
from benchmarks.measuring import ROUNDS, Row, format_rows, ratios, write_rows
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.core.devices import time_on
from utils.core.errors import run_cli
from utils.data.loaders import Batch
from utils.run.loading import open_loaders
from utils.run.progress import RunClock
from utils.run.state import Run, TrainState
from utils.torch_utils import process_group
from utils.training.optim import build_optimizer
from utils.training.steps import Precision

OVERHEAD_LIMIT, EPOCH_LIMIT, PLAIN_LIMIT = 1.02, 1.12, 1.5
MANY_EPOCHS = 10_000  # so that no round is the last one
EPOCHS_A_ROUND = 3  # of the loader, which works ahead while the others run: over one short epoch that would flatter it
WARMED_UP = 1_000  # an epoch after the warm-up, when windows have their full length


class Repeated(Iterator[Batch]):
    """One batch over and over, numbered as a run wants it."""

    def __init__(self, batch: Batch, run: Run) -> None:
        self.batch, self.run = batch, run

    def __next__(self) -> Batch:
        return self.batch._replace(epoch=self.run.state.epoch, k=self.run.state.batch)


class BareSteps:
    """An epoch of one batch in plain PyTorch.

    Args:
        run: whose network, loss and optimizer settings they are; another network is made of them.
        batch: of its loader.
        precision: of the forward pass.
        layout: of images and weights in memory.
    """

    def __init__(self, run: Run, batch: Batch, precision: Precision, layout: torch.memory_format) -> None:
        self.run, self.batch, self.precision = run, batch, precision
        self.model = copy.deepcopy(run.raw_model).train().to(memory_format=layout)
        self.optimizer = build_optimizer(self.model, run.config.optimizer, run.hyp, run.plan)
        images = run.family.inputs.prepare(batch.images.to(run.env.device))
        self.images = images.contiguous(memory_format=layout)

    def __call__(self) -> None:
        """Compute it."""
        run, device = self.run, self.run.env.device
        for k in range(run.schedule.batches_per_epoch):
            with self.precision.autocast(device.type):
                outputs = self.model(self.images)
            matches = run.criterion.match(self.batch.targets, len(self.images), *self.images.shape[2:])
            sums = run.criterion.sums(outputs, [level.to(device) for level in matches])
            run.criterion.items(sums, run.criterion.counts(matches)).sum().mul(len(self.images)).backward()
            if (k + 1) % run.plan.accumulate == 0 or (k + 1) % run.schedule.batches_per_epoch == 0:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)


def loop_epochs(run: Run, batches: Iterator[Batch], epochs: int = 1) -> None:
    """Do some epochs of the training loop."""
    for _ in range(epochs):
        train.train_epoch(run, batches, RunClock(MANY_EPOCHS, run.state.epoch))
        run.state.epoch, run.state.batch = run.state.epoch + 1, 0
        run.notes.meter.reset()


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return how long something takes, on the device too."""
    start = time.perf_counter()
    work()
    return time_on(device) - start


def measure(config: TrainConfig, rounds: int) -> dict[str, list[float]]:
    """Return seconds per image of each contestant, one figure a round; one round before them does not count."""
    with process_group(config.device) as env, contextlib.ExitStack() as stack:
        run = train.set_up(config, env)
        run.state.epoch = WARMED_UP
        batches, _ = open_loaders(run, stack)
        batch = next(batches)  # its images are as good as noise for timing, its targets are real
        run.state.batch = 1
        looping = copy.copy(run)
        looping.state = TrainState(epoch=WARMED_UP)
        bare = BareSteps(run, batch, run.precision, torch.channels_last)
        contestants: dict[str, Callable[[], None]] = {
            "bare": bare,
            "plain": BareSteps(run, batch, Precision("off"), torch.contiguous_format),
            "loop": lambda: loop_epochs(looping, Repeated(batch, looping)),
            "epoch": lambda: loop_epochs(run, batches, EPOCHS_A_ROUND),
        }
        images = run.schedule.batches_per_epoch * run.plan.global_batch
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for number in tqdm(range(rounds + 1), "rounds", leave=False):
            for name, work in contestants.items():
                with contextlib.redirect_stderr(io.StringIO()):  # the progress lines of the epochs
                    spent = seconds(work, env.device)
                if name == "epoch":
                    bare()  # beside loader processes that fill their queues again; it does not count
                if number:
                    taken[name].append(spent / images / (EPOCHS_A_ROUND if name == "epoch" else 1))
    return taken


def rows_of(taken: dict[str, list[float]]) -> list[Row]:
    """Return the ratios."""
    said = ", ".join(f"{name} {1 / statistics.median(values):.1f}" for name, values in taken.items())
    return [
        Row("C10", "training loop / bare step", ratios(taken["loop"], taken["bare"]), OVERHEAD_LIMIT, at_least=False),
        Row("E", "training part of an epoch / bare step", ratios(taken["epoch"], taken["bare"]), EPOCH_LIMIT,
            at_least=False, note=f"images/s: {said}"),
        Row("E", "images/s of that / those of a plain fp32 step", ratios(taken["plain"], taken["epoch"]), PLAIN_LIMIT),
    ]  # fmt: skip


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="data set YAML; default: the built-in one")
    parser.add_argument("--cfg", default="yolov5n.yaml", help="network YAML")
    parser.add_argument("--imgsz", "--img", type=int, default=320, help="image size, pixels")
    parser.add_argument("--batch-size", "--batch", type=int, default=16, help="global batch")
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    parser.add_argument("--amp", default="auto", help="precision")
    parser.add_argument("--device", default="", help="device")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count")
    parser.add_argument("--rows", type=Path, help="also write the lines here, as JSON")
    options = vars(parser.parse_args())
    rounds, target = options.pop("rounds"), options.pop("rows")
    options["data"] = options["data"] or "shapes.yaml"
    with tempfile.TemporaryDirectory() as folder:
        config = build_train_config(options | {"project": folder, "epochs": MANY_EPOCHS})
        rows = rows_of(measure(config, rounds))
    print(format_rows(rows))
    if target:
        write_rows(rows, target)


if __name__ == "__main__":
    run_cli(main)
