"""How much the training loop adds to what the network itself costs.

python -m benchmarks.train_step                                    the built-in data
python -m benchmarks.train_step --data bccd.yaml --rounds 9        any other data set

Three things take turns, round after round, so that a slow moment of the machine hits all of them:
  bare   the network's forward pass, the loss, the backward pass and the optimizer step, on one synthetic batch
  loop   the same batch through the training loop: schedule, guarded step, EMA, meters, progress line
  epoch  the training part of an epoch on real images: loader, augmentation, transfer

The answer is the median over the rounds of each ratio to bare, with its range; smaller is better.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

import train
from utils.config import TrainConfig
from utils.console import RunClock
from utils.data_config import build_train_config
from utils.dataloaders import Batch
from utils.errors import run_cli
from utils.torch_utils import process_group

LIMITS = {"loop / bare": 1.05, "epoch / bare": 1.25}
MANY_EPOCHS = 10_000  # so that no round is the last one
EPOCHS_A_ROUND = 3  # the loader works ahead while the others run: over one short epoch that would flatter it
WARMED_UP = 1_000  # an epoch after the warm-up, when windows have their full length


class Repeated(Iterator[Batch]):
    """One batch over and over, numbered as a run wants it."""

    def __init__(self, batch: Batch, run: train.Run) -> None:
        self.batch, self.run = batch, run

    def __next__(self) -> Batch:
        return self.batch._replace(epoch=self.run.state.epoch, k=self.run.state.batch)


def bare_epochs(run: train.Run, batch: Batch) -> None:
    """Compute a round's epochs of one batch, in plain PyTorch."""
    images = run.family.inputs.prepare(batch.images.to(run.env.device))
    run.model.train()
    for k in range(run.schedule.batches_per_epoch * EPOCHS_A_ROUND):
        with run.precision.autocast(run.env.device.type):
            outputs = run.model(images)
        matches = run.criterion.match(batch.targets, len(images), *images.shape[2:])
        sums = run.criterion.sums(outputs, [level.to(run.env.device) for level in matches])
        run.criterion.items(sums, run.criterion.counts(matches)).sum().mul(len(images)).backward()
        if (k + 1) % run.plan.accumulate == 0 or (k + 1) % run.schedule.batches_per_epoch == 0:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)


def loop_epochs(run: train.Run, batches: Iterator[Batch]) -> None:
    """Do a round's epochs of the training loop."""
    for _ in range(EPOCHS_A_ROUND):
        train.train_epoch(run, batches, RunClock(MANY_EPOCHS, run.state.epoch))
        run.state.epoch, run.state.batch = run.state.epoch + 1, 0
        run.meter.reset()


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return how long something takes, on the device too."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(config: TrainConfig, rounds: int) -> dict[str, list[float]]:
    """Return seconds per image of each contestant, one figure a round; one round before them does not count."""
    with process_group(config.device) as env, contextlib.ExitStack() as stack:
        run = train.set_up(config, env)
        run.state.epoch = WARMED_UP
        batches, _ = train.open_loaders(run, stack)
        batch = next(batches)  # its images are as good as noise for timing, its targets are real
        run.state.batch = 1
        looping = dataclasses.replace(run, state=train.TrainState(epoch=WARMED_UP))
        contestants: dict[str, Callable[[], None]] = {
            "bare": lambda: bare_epochs(run, batch),
            "loop": lambda: loop_epochs(looping, Repeated(batch, looping)),
            "epoch": lambda: loop_epochs(run, batches),
        }
        images = run.schedule.batches_per_epoch * run.plan.global_batch * EPOCHS_A_ROUND
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for number in tqdm(range(rounds + 1), "rounds", leave=False):
            for name, work in contestants.items():
                with contextlib.redirect_stderr(io.StringIO()):  # the progress lines of the epochs
                    spent = seconds(work, env.device)
                if number:
                    taken[name].append(spent / images)
    return taken


def report(taken: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Print a table of ratios and return them."""
    for name, values in taken.items():
        print(f"{name:<14}{1 / statistics.median(values):8.1f} images/s")
    rows = {}
    for name, limit in LIMITS.items():
        above, below = name.split(" / ")
        ratios = [a / b for a, b in zip(taken[above], taken[below], strict=True)]
        rows[name] = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "limit": limit}
        verdict = "within" if rows[name]["median"] <= limit else "OVER"
        print(
            f"{name:<14}{rows[name]['median']:8.3f}  (range {min(ratios):.3f} to {max(ratios):.3f}, "
            f"{verdict} the limit of {limit})"
        )
    return rows


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="shapes.yaml", help="data set YAML")
    parser.add_argument("--cfg", default="yolov5n.yaml", help="network YAML")
    parser.add_argument("--imgsz", "--img", type=int, default=320, help="image size, pixels")
    parser.add_argument("--batch-size", "--batch", type=int, default=16, help="global batch")
    parser.add_argument("--workers", type=int, default=2, help="loader processes")
    parser.add_argument("--amp", default="auto", help="precision")
    parser.add_argument("--device", default="", help="device")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = vars(parser.parse_args())
    rounds, target = options.pop("rounds"), options.pop("json")
    with tempfile.TemporaryDirectory() as folder:
        config = build_train_config(options | {"project": folder, "epochs": MANY_EPOCHS})
        taken = measure(config, rounds)
    rows = report(taken)
    if target:
        target.write_text(json.dumps({"seconds per image": taken, "ratios": rows}, indent=2) + "\n")


if __name__ == "__main__":
    run_cli(main)
