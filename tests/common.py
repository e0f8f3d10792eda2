"""What several test modules share."""

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[1]
SHARED = Path(__file__).resolve().parents[2] / "shared"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="real images and trained weights are not here")
needs_root = pytest.mark.skipif(not hasattr(os, "setresuid") or os.geteuid() != 0, reason="needs to change its user")
NOBODY = 65534


def golden(name: str) -> Any:
    """Return recorded figures: the arrays of an .npz file by name, or what is in a JSON file. See golden/README.md."""
    path = PROJECT / "tests/golden" / name
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(arrays)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def copy_shared(source: str, target: Path) -> None:
    """Copy a folder of SHARED; unlike what is there, the copy can be written, by whoever runs the tests."""
    for path in (SHARED / source).rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(SHARED / source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something that happens soon, at the latest on a machine that is slow and busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {seconds:g} seconds"
        time.sleep(0.01)


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Do something as a user who owns nothing, in root's group; the folder and those above it can be entered."""
    for place in (folder, *folder.parents):
        if place.stat().st_mode & 0o005 != 0o005:
            place.chmod(place.stat().st_mode | 0o055)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
