"""Files that are whole or not there: written beside their place, then renamed into it."""

import contextlib
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FORGOTTEN = 3600.0  # seconds after which a file beside its place is one that a killed process left


def temporary_path(path: Path) -> Path:
    """Return a name beside a file that nobody else uses, and that says which process does."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a new file that takes the place of ``path`` if the block succeeds, and is removed if it fails.

    Its name is unique, so several processes and machines may do this at once, and the last one wins.

    A block that closes the file has to have synced it.

    Args:
        path: in a folder that is there.
        durable: wait until the disk has it, so that it outlasts a power cut. To no purpose for what can be made again
            and is checked when it is read, such as caches of gigabytes.

    Raises:
        OSError: the folder can't be written, or the disk is full.
    """
    beside = temporary_path(path)
    file = beside.open("w+b")
    try:
        _remove_forgotten(path, os.fstat(file.fileno()).st_mtime)
        yield file
        if not file.closed:
            file.flush()
            if durable:
                os.fsync(file.fileno())
            file.close()
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):  # what a full disk did not take can't be written now either
            file.close()
        with contextlib.suppress(OSError):
            beside.unlink()
    if durable:
        sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file whole or not at all, text as UTF-8; see `replacing`."""
    with replacing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the content of a file whole or not at all; see `replacing`."""
    with source.open("rb") as original, replacing(target) as file:
        shutil.copyfileobj(original, file, 1 << 20)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's names, so that a rename outlasts a power cut."""
    if sys.platform == "win32":  # folders can't be synced there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_forgotten(path: Path, now: float) -> None:
    """Remove what killed processes left beside a file; by the clock of the file system, maybe another machine's."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if now - old.stat().st_mtime > FORGOTTEN:
                old.unlink()
