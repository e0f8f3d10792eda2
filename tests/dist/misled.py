"""Trains on ranks of which the last one does something that the others do not, and writes down how that ended.

    torchrun ... -m tests.dist.misled FOLDER FLAGS...

Beside what the runs leave, the folder then has RANK.json: the error of each of `CASES`.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import train
from tests.runs import torch_settings_kept
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

CASES = ("leaves out a batch", "changes a weight", "nothing")


class Leaving(Iterator[Batch]):
    """Batches without the second one, which counts as done."""

    def __init__(self, batches: Iterator[Batch], run: Run) -> None:
        self.batches, self.run, self.given = batches, run, 0

    def __next__(self) -> Batch:
        self.given += 1
        if self.given == 2:
            next(self.batches)
            self.run.state.batch += 1
        return next(self.batches)


def error_of(case: str, line: list[str], env: DistEnv) -> str:
    run = train.set_up(build_train_config(given_flags(TrainConfig, line)), env)
    misled = env.rank == env.world_size - 1
    with contextlib.ExitStack() as stack:
        batches, val_batches = open_loaders(run, stack)
        if misled and case == "leaves out a batch":
            stack.enter_context(contextlib.closing(batches))
            batches = Leaving(batches, run)  # type: ignore[assignment]
        run.callbacks.train_start(train_start(run, False))
        clock = RunClock(run.config.epochs, 0)
        try:
            losses = train.train_epoch(run, batches, clock)
            if misled and case == "changes a weight":
                with torch.no_grad():
                    next(run.raw_model.parameters()).mul_(1 + 1e-6)
            train.end_epoch(run, losses, val_batches, clock)
        except RuntimeError as error:
            return str(error)
        finally:
            run.writer.close()
    return ""


def main() -> None:
    _, folder, *line = sys.argv
    with torch_settings_kept(), process_group("cpu") as env:
        errors = {case: error_of(case, [*line, "--name", case.replace(" ", "-")], env) for case in CASES}
    Path(folder, f"{env.rank}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    as_worker(main)()
