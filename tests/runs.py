"""Small data sets and small runs, for tests of whole programs."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pandas as pd
import torch

import train
from models.yolo import DetectionModel
from tests.common import PROJECT
from utils.run.resume import RESUMABLE_FLAGS
from utils.torch_utils import load_checkpoint

CHILD_ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def launch(*arguments: object, cwd: Path, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    """Run a script as a user would."""
    command = [sys.executable, str(PROJECT / script), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=CHILD_ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


def kill_in_third_epoch(started: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    """Kill a run as soon as the state after its second epoch is in its place."""
    last, before = (run_dir / "weights" / name for name in ("last.pt", "last.prev.pt"))
    while started.poll() is None and not (before.exists() and not last.samefile(before)):
        time.sleep(0.005)
    started.kill()


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Put back what a training run sets for its whole process."""
    deterministic, benchmarked = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = benchmarked


def train_here(*arguments: object) -> None:
    """Train in this process, which saves the start of another one: some seconds."""
    with torch_settings_kept():
        train.main([str(argument) for argument in arguments])


def sees_images(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    """For hooks: whether this is a network in a run's loop; before, networks are tried out on blank images."""
    images = inputs[0]
    return isinstance(module, DetectionModel) and images.device.type != "meta" and bool(images.any())


def make_data(folder: Path, count: int = 10, val: int = 4) -> Path:
    """Draw squares on noise, two classes by color, and return the data YAML. Every third image is empty."""
    rng = np.random.default_rng(0)
    for split, images in {"train": count, "val": val}.items():
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(images):
            image = rng.integers(0, 80, (48, 64, 3), dtype=np.uint8)
            rows = []
            for k in range(number % 3):
                category = (number + k) % 2
                x, y, side = (int(rng.integers(*span)) for span in ((0, 40), (0, 24), (12, 24)))
                cv2.rectangle(image, (x, y), (x + side, y + side), ((255, 0, 0), (0, 0, 255))[category], -1)
                box = ((x + side / 2) / 64, (y + side / 2) / 48, side / 64, side / 48)
                rows.append(" ".join(map(str, (category, *box))))
            cv2.imwrite(str(folder / f"images/{split}/{number}.png"), image)
            (folder / f"labels/{split}/{number}.txt").write_text("\n".join(rows))
    path = folder / "data.yaml"
    path.write_text("train: images/train\nval: images/val\nnames: [blue, red]\n")
    return path


def flags(data: Path, project: Path, *more: str) -> list[str]:
    """Return the command line of a run of a few seconds, without pictures; what comes later on it counts."""
    own = f"--data {shlex.quote(str(data))} --project {shlex.quote(str(project))} --name run --device cpu --img 64 "
    return shlex.split(own + "--batch 4 --epochs 3 --workers 0 --noplots " + " ".join(more))


def back_to(run_dir: Path, epoch: int) -> Path:
    """Make a run with ``--save-period 1`` as if it had been stopped after an epoch, 1-based; returns its folder."""
    weights = run_dir / "weights"
    (weights / f"epoch{epoch}.pt").replace(weights / "last.pt")
    (weights / "last.prev.pt").unlink(missing_ok=True)
    return run_dir


def results(run_dir: Path) -> pd.DataFrame:
    """Read results.csv."""
    return pd.read_csv(run_dir / "results.csv")


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the places where two nested states differ, in type, structure or any bit."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where}: keys {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [place for key in a for place in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items"]
        return [place for i, pair in enumerate(zip(a, b, strict=True)) for place in differences(*pair, f"{where}/{i}")]
    return [] if a == b else [f"{where}: {a} and {b}"]


def assert_same_run(expected: Path, found: Path) -> None:
    """Check that two runs ended alike: all that last.pt holds, but for the runs' names, and results.csv."""
    free = RESUMABLE_FLAGS | {"name", "exist_ok"}
    a, b = (load_checkpoint(run_dir / "weights/last.pt") for run_dir in (expected, found))
    for state in (a, b):
        state["run_dir"] = state["digest"] = ""
        state["config"] = {key: value for key, value in state["config"].items() if key not in free}
    assert not differences(a, b)
    assert (found / "results.csv").read_text() == (expected / "results.csv").read_text()
