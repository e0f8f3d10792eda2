"""What a checkpoint costs the loop that trains, and how long it takes until a resumed run trains.

python -m benchmarks.checkpoint                     yolov5n and yolov5s on the built-in data, under a minute
python -m benchmarks.checkpoint --cfg yolov5m.yaml --starts 0

A thread writes checkpoints; training waits until the state is copied. Three things take turns, round after round, each
after an optimizer step and an update of the averaged weights, as in a run:
  memcpy  all tensors of the state as one block, copied to another block
  write   the state, handed to the writer
  save    the state, collected from the run and handed to the writer
The answers are the medians over the rounds of the ratios to memcpy, with their range; smaller is better.

Then runs are started, in turns a new one and one that goes on from a checkpoint, as commands of their own; what counts
is the time from the command to the first batch.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import train
from benchmarks.measuring import Row, format_rows, milliseconds, ratios, write_rows
from utils.checkpoints.writer import Outcome
from utils.config.data_yaml import build_train_config
from utils.config.yaml_files import ROOT
from utils.core.errors import UserError, run_cli
from utils.run.folder import release
from utils.run.state import Run, run_state
from utils.torch_utils import process_group, save_checkpoint

COPY_LIMIT, START_LIMIT = 3.0, 1.5
FRESH, RESUMED = "new run", "resumed run"
# A run that ends, without a word, when it has its first batch.
STARTED = """
import os, sys
import train
from utils.core.errors import run_cli
def first(run, batches, *others):
    next(batches)
    os._exit(0)
train.train_epoch = first
run_cli(lambda: train.main(sys.argv[1:]))
"""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def flags(data: str, cfg: str, folder: Path) -> dict[str, Any]:
    """Return flags of a run that writes into a folder and starts as fast as it can."""
    small = {"imgsz": 64, "batch_size": 2, "optimizer": "SGD", "workers": 0, "cache": "off", "noplots": True}
    return {"data": data, "cfg": cfg, "weights": "", "project": str(folder), "device": "cpu", **small}


def trained(run: Run) -> Callable[[], None]:
    """Return a function that does what a loop does last before it saves; gradients are zeros."""
    for parameter in run.raw_model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        run.optimizer.step()
        run.ema.update(run.raw_model)

    return step


def measure_copies(data: str, cfg: str, rounds: int) -> dict[str, Any]:
    """Return seconds of each contestant, one figure a round, and the size of the state; one round does not count."""
    with tempfile.TemporaryDirectory() as folder, process_group("cpu") as env, contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(io.StringIO()):
            run = train.set_up(build_train_config(flags(data, cfg, Path(folder))), env)
        stack.enter_context(contextlib.closing(run.writer))
        step = trained(run)
        step()
        tensors = list(tensors_of(run_state(run)))
        size = sum(tensor.nbytes for tensor in tensors)
        source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        goal, best = Outcome(run.weights_dir / "last.pt", (), 0, 0.0, False), run.weights_dir / "best.pt"
        state = run_state(run)
        kept: dict[str, Any] = {}  # the state of the last save: to let go of it is not part of the next one

        def save() -> None:
            kept["state"] = run_state(run)
            run.writer.write(kept["state"], goal, best)

        contestants: dict[str, Callable[[], object]] = {
            "memcpy": lambda: target.copy_(source),
            "write": lambda: run.writer.write(state, goal, best),
            "save": save,
        }
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for number in tqdm(range(rounds + 1), cfg, leave=False, disable=None):
            for name, work in contestants.items():
                run.writer.wait()
                kept.clear()
                source.add_(1)  # as warm in the caches as the weights are
                step()
                start = time.perf_counter()
                work()
                spent = time.perf_counter() - start
                if number:
                    taken[name].append(spent)
    return {"bytes": size, "tensors": len(tensors), "seconds": taken}


def measure_starts(data: str, cfg: str, starts: int) -> dict[str, list[float]]:
    """Return seconds from the command to the first batch of new and of resumed runs; one of each does not count."""
    taken: dict[str, list[float]] = {FRESH: [], RESUMED: []}
    if not starts:
        return taken
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        options = flags(data, cfg, folder)
        with process_group("cpu") as env, contextlib.redirect_stdout(io.StringIO()):
            run = train.set_up(build_train_config(options), env)
            trained(run)()
            save_checkpoint(run_state(run), run.weights_dir / "last.pt")
            run.writer.close()
            release(run.run_dir)
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "noplots"]
        commands = {FRESH: [*words, "--noplots"], RESUMED: ["--resume", str(run.run_dir)]}
        for number in tqdm(range(starts + 1), "starts", leave=False, disable=None):
            for name, command in commands.items():
                spent = started(command)
                if number:
                    taken[name].append(spent)
    return taken


def started(command: list[str]) -> float:
    """Start a run and return the seconds to its first batch.

    Raises:
        UserError: it ended instead; with what it said.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"a run of the benchmark ended; it said:\n{done.stderr.strip()}")
    return time.perf_counter() - start


def summarize(copies: Mapping[str, Any], starts: Mapping[str, list[float]]) -> list[Row]:
    """Return the ratios, each of the same round."""
    rows = []
    for cfg, figures in copies.items():
        taken = figures["seconds"]
        note = f"{figures['tensors']} tensors, {figures['bytes'] / 1e6:.0f} MB: {milliseconds(taken)}"
        for name in ("write", "save"):
            found = ratios(taken[name], taken["memcpy"])
            rows.append(Row("C15", f"{cfg}: {name} / memcpy", found, COPY_LIMIT, at_least=False, note=note))
            note = ""
    if starts[FRESH]:
        found = ratios(starts[RESUMED], starts[FRESH])
        note = milliseconds(starts)
        rows.append(Row("C15", "start of a resumed run / of a new one", found, START_LIMIT, at_least=False, note=note))
    return rows


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="data set YAML; default: the built-in one")
    parser.add_argument("--cfg", nargs="+", default=["yolov5n.yaml", "yolov5s.yaml"], help="network YAMLs")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind that count, of the first network")
    parser.add_argument("--rows", type=Path, help="also write the lines here, as JSON")
    options = parser.parse_args()
    options.data = options.data or "shapes.yaml"
    if options.rounds < 1 or options.starts < 0:
        raise UserError("--rounds must be at least 1, --starts at least 0")
    copies = {cfg: measure_copies(options.data, cfg, options.rounds) for cfg in options.cfg}
    starts = measure_starts(options.data, options.cfg[0], options.starts)
    rows = summarize(copies, starts)
    print(format_rows(rows))
    if options.rows:
        write_rows(rows, options.rows)


if __name__ == "__main__":
    run_cli(main)
