"""Runs a script, with a note of every file that its processes open, make, rename or remove in a folder.

    torchrun ... -m tests.dist.watched LOG FOLDER SCRIPT ARGUMENTS

Python tells of each by an audit event, in forked loader processes as well.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.common import PROJECT

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Event(NamedTuple):
    """What happened to a file.

    Attributes:
        rank: that did it, or that the process belongs to which did.
        kind: audit event.
        writes: whether it changes anything.
        path: absolute.
    """

    rank: int
    kind: str
    writes: bool
    path: str


def watch(log: str, folder: str) -> None:
    """Start to take notes."""
    notes = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    rank = int(os.environ["RANK"])

    def note(kind: str, arguments: tuple[Any, ...]) -> None:
        if kind not in ("open", "os.mkdir", "os.rename", "os.remove") or isinstance(arguments[0], int | None):
            return
        writes = kind != "open" or bool(arguments[2] & WRITING)
        path = os.path.abspath(os.fsdecode(arguments[1 if kind == "os.rename" else 0]))
        if path.startswith(folder):
            os.write(notes, (json.dumps(Event(rank, kind, writes, path)) + "\n").encode())  # whole lines, by O_APPEND

    sys.addaudithook(note)


def events(log: Path, below: Path) -> list[Event]:
    """What happened in a folder."""
    found = [Event(*json.loads(line)) for line in log.read_text().splitlines()]
    return [event for event in found if event.path.startswith(f"{below}/")]


def main() -> None:
    _, log, folder, *sys.argv = sys.argv
    watch(log, folder)
    sys.path.insert(0, str(PROJECT))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
