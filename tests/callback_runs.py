"""Callbacks for tests and runs with them; as a script, on every rank that a launcher started.

    python -m tests.callback_runs CALLBACK FOLDER FLAGS...

In the folder, which is there, each rank then writes what its callbacks were told and how often it trained.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np
import torch
from torch import nn

import train
from models.yolo import DetectionModel
from tests.runs import torch_settings_kept
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.core.errors import run_cli
from utils.dist.worker import as_worker
from utils.run.callbacks import (
    STOP,
    Callback,
    CheckpointSaved,
    EpochEnd,
    ExceptionRaised,
    Stop,
    TrainEnd,
    TrainStart,
)
from utils.run.resume import resume
from utils.torch_utils import process_group

IMAGES = 8
SIDE, SQUARE = 64, 28  # pixels


class Recorder(Callback):
    """Keeps what it is told, and what is in the run folder at that moment."""

    def __init__(self, ask_after: int | None = None) -> None:
        self.ask_after = ask_after
        self.events: list[Any] = []
        self.files: list[dict[str, bytes]] = []
        self.run_dir: Path | None = None

    def keep(self, event: Any) -> None:
        self.run_dir = getattr(event, "run_dir", self.run_dir)
        assert self.run_dir is not None
        there = [path for path in self.run_dir.rglob("*") if path.is_file()]
        self.files.append({str(path.relative_to(self.run_dir)): path.read_bytes() for path in there})
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def epochs(self) -> list[EpochEnd]:
        return [event for event in self.events if isinstance(event, EpochEnd)]

    def on_train_start(self, event: TrainStart) -> None:
        self.keep(event)

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        self.keep(event)
        return STOP if event.epoch == self.ask_after else None

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self.keep(event)

    def on_train_end(self, event: TrainEnd) -> None:
        self.keep(event)

    def on_exception(self, event: ExceptionRaised) -> None:
        self.keep(event)


class Watcher(Recorder):
    """Told of an epoch when it is over and done with."""

    may_stop: ClassVar[bool] = False


class Failing(Callback):
    """Fails in its second epoch, and in what comes of that."""

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        print(1 / (2 - event.epoch))
        return None


class Losing(Callback):
    """Takes files away when the first epoch is over."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        for path in self.paths if event.epoch == 1 else ():
            os.unlink(path)
        return None


class FailingLater(Callback):
    """Fails when another one has."""

    def on_exception(self, event: ExceptionRaised) -> None:
        raise LookupError(f"and that after {type(event.error).__name__}")


def draw_squares(folder: Path) -> Path:
    """Draw large squares, blue and red ones, that an untrained network already finds now and then.

    Returns:
        The data YAML; what is trained on is validated on.
    """
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for number in range(IMAGES):
        image = np.full((SIDE, SIDE, 3), 60, np.uint8)
        x, y = (8 + 4 * number) % 24 + 4, 12 * number % 24 + 4
        cv2.rectangle(image, (x, y), (x + SQUARE, y + SQUARE), ((255, 0, 0), (0, 0, 255))[number % 2], -1)
        cv2.imwrite(str(folder / f"images/{number}.png"), image)
        box = [(x + SQUARE / 2) / SIDE, (y + SQUARE / 2) / SIDE, SQUARE / SIDE, SQUARE / SIDE]
        (folder / f"labels/{number}.txt").write_text(" ".join(map(str, [number % 2, *box])))
    path = folder / "data.yaml"
    path.write_text("train: images\nval: images\nnames: [blue, red]\n")
    (folder / "hyp.yaml").write_text("lr0: 0.005\nmomentum: 0.9\nwarmup_epochs: 1\nmosaic: 0\nscale: 0\ntranslate: 0\n")
    return path


def flags(data: Path, project: Path, *more: object) -> list[str]:
    """Return the command line of a run of a few seconds; two micro-batches an epoch."""
    own = ["--data", data, "--hyp", data.with_name("hyp.yaml"), "--project", project, "--name", "run"]
    own += ["--device", "cpu", "--img", SIDE, "--batch", IMAGES // 2, "--nbs", IMAGES // 2, "--optimizer", "AdamW"]
    own += ["--workers", 0, "--amp", "off", "--epochs", 5, *more]
    return [str(word) for word in own]


def train_with(callbacks: Sequence[Callback], *arguments: object) -> train.Results:
    """Train in this process."""
    given = given_flags(TrainConfig, [str(argument) for argument in arguments])
    with torch_settings_kept(), process_group("cpu") as env:
        if "resume" in given:
            config, resumed = resume(given)
            return train.train(given, config, resumed, env, callbacks)
        return train.train(given, build_train_config(given), None, env, callbacks)


def main() -> None:
    kind, folder, *line = sys.argv[1:]
    place = Path(folder, os.environ.get("RANK", "0"))
    trained = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal trained
        trained += isinstance(module, DetectionModel) and module.training and torch.is_grad_enabled()

    nn.modules.module.register_module_forward_pre_hook(count)
    recorder = Recorder()
    lost = Path(folder, "lost")  # what the test has listed
    others: dict[str, list[Callback]] = {
        "stop": [Recorder(ask_after=2)],
        "fail": [Failing(), FailingLater()],
        "lose": [Losing(lost.read_text().splitlines() if lost.exists() else [])],
    }
    try:
        train_with([recorder, *others[kind], Watcher()], *line)
    finally:
        place.with_suffix(".json").write_text(json.dumps({"told": recorder.kinds(), "trained": trained}))


if __name__ == "__main__":
    run_cli(as_worker(main))
