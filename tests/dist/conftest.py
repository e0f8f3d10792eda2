"""Nothing that a test starts outlives it."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.dist.launch import kill

PATIENCE = 10.0  # seconds for what is on its way out
MARK = f"LOCKSTEP_TESTS={uuid.uuid4().hex}"


@pytest.fixture(scope="session", autouse=True)
def marked() -> Iterator[None]:
    """Every process that is started from here on inherits the mark, whoever its parent is by then."""
    name, value = MARK.split("=")
    os.environ[name] = value
    yield
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def nothing_left(marked: None) -> Iterator[None]:
    yield
    end = time.monotonic() + PATIENCE
    while (left := marked_processes()) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        kill(pid)
    assert not left, f"still running at the end of the test: {left}"


def marked_processes() -> dict[int, str]:
    """Command lines by process id; empty where the system does not show them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if MARK.encode() in (folder / "environ").read_bytes().split(b"\0") and not is_dead(folder):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def is_dead(folder: Path) -> bool:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
