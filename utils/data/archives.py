"""Archives from strangers: looked through before anything is written, unpacked beside their place, then renamed.

Formats: zip, tar, tar.gz. Nothing of an archive decides where a file goes, what it may do, or how much room it takes
beyond the limit: no path that leads out, no link, no device, no permission bits, no bomb.
"""

import gzip
import os
import re
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from utils.core.errors import UserError
from utils.core.heartbeat import beat
from utils.core.whole_files import temporary_path

PIECE = 1 << 18  # bytes copied at a time
LONGEST_HEADER = 1 << 20  # bytes of one name or header of a tar
BLOCK = 4096  # bytes that even an empty file takes on a disk
SPARE = 64 << 20  # bytes of a disk that are left free
# What an archive may become: so many times its own bytes, but any archive so many bytes. Images hardly shrink, label
# files about tenfold; zeros shrink a thousandfold.
RATIO, SMALL = 200, 16 << 20

MOST_ENTRIES = 1_000_000  # names alone take memory, also of empty files


class Entry(NamedTuple):
    """A file or folder of an archive.

    Attributes:
        name: as the archive has it.
        size: bytes when unpacked, as the archive says.
        kind: "file", "folder", or what it is instead.
        open: opens the content of a file.
    """

    name: str
    size: int
    kind: str
    open: Callable[[], IO[bytes] | None]


class _RefusedError(Exception):
    """The archive is not to be unpacked; the message says why."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a new folder, whole or not at all.

    Files get the permissions of new files and the time of now.

    Args:
        archive: zip, tar or tar.gz, told by its content.
        folder: is not there yet; the one above it is.

    Raises:
        UserError: it is damaged, of another kind, or holds what it must not (PEP 706 lists the tricks); nothing is left
            of it then.
    """
    scratch = temporary_path(folder)
    try:
        with archive.open("rb") as file:
            most = max(SMALL, RATIO * archive.stat().st_size)
            entries = _checked(_entries(file, most), most)
            _check_room(entries, folder.parent)
            scratch.mkdir()
            for entry in tqdm(entries, f"unpacking {archive.name}", unit="files", disable=None, leave=False):
                _write(entry, scratch)
        scratch.rename(folder)
    except _RefusedError as error:
        raise UserError(f"the archive {archive} is not unpacked: {error}") from None
    except OSError as error:
        if error.errno is None:  # zipfile and gzip use OSError for damage too
            raise UserError(f"the archive {archive} is damaged: {error}") from None
        raise UserError(f"the archive {archive} can't be unpacked into {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _checked(entries: Iterable[Entry], most: int) -> list[Entry]:
    """Return the entries of an archive, maybe found while they are read, if all of them are harmless."""
    checked, total = [], 0
    for entry in entries:
        if entry.kind not in ("file", "folder") or entry.size < 0:
            raise _RefusedError(f"{_shown(entry.name)} is {entry.kind}, not a file or folder")
        odd = next((letter for letter in entry.name if ord(letter) < 32 or letter in "\\\x7f"), "")
        if not entry.name or odd or re.match(r"/|[A-Za-z]:", entry.name) or ".." in entry.name.split("/"):
            raise _RefusedError(f"the path {_shown(entry.name)} leads out of its folder or is none")
        checked.append(entry)
        if len(checked) > MOST_ENTRIES:
            raise _RefusedError(f"it holds more than {MOST_ENTRIES:,} files")
        total += entry.size
        if total > most:
            raise _RefusedError(f"it would become more than {most} bytes, {RATIO} times its own")
    return checked


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else f"{name[:100]}...")


def _check_room(entries: list[Entry], folder: Path) -> None:
    needed = sum(entry.size + BLOCK for entry in entries) + SPARE
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _RefusedError(f"it needs {needed / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free in {folder}")


def _write(entry: Entry, folder: Path) -> None:
    try:
        path = folder / entry.name
        (path if entry.kind == "folder" else path.parent).mkdir(parents=True, exist_ok=True)
        if entry.kind == "folder":
            return
        with path.open("xb") as target, entry.open() as source:  # type: ignore[union-attr]  # never over another file
            left = entry.size
            while left > 0 and (piece := source.read(min(PIECE, left))):
                beat()
                target.write(piece)
                left -= len(piece)
            if left or source.read(1):
                raise _RefusedError(f"{_shown(entry.name)} does not have the size that it says")
    except (_RefusedError, OSError):
        raise
    except Exception as error:  # damaged bytes raise nearly anything: zlib's, lzma's, zipfile's errors
        raise _RefusedError(f"{_shown(entry.name)} is damaged ({error or type(error).__name__})") from None


# Formats --------------------------------------------------------------------------------------------------------------


def _entries(file: IO[bytes], most: int) -> Iterator[Entry]:
    """Yield the entries of an archive as they are found."""
    start = file.read(512)
    file.seek(0)
    try:
        if start.startswith(b"PK"):
            yield from _zip_entries(zipfile.ZipFile(file))
        elif start.startswith(b"\x1f\x8b"):
            unzipped = gzip.open(file)  # noqa: SIM115  # read on demand
            yield from _tar_entries(_Bounded(unzipped, 2 * most))  # there are headers and padding too
        elif start[257:262] == b"ustar" or (start and not start.strip(b"\0")):
            yield from _tar_entries(_Bounded(file, most))
        else:
            raise _RefusedError(f"it is neither zip nor tar nor tar.gz; it begins with {start[:20]!r}")
    except (_RefusedError, GeneratorExit):
        raise
    except Exception as error:  # damaged bytes raise nearly anything
        raise _RefusedError(f"it is damaged or cut short ({error or type(error).__name__})") from None


def _zip_entries(opened: zipfile.ZipFile) -> Iterator[Entry]:
    for info in opened.infolist():
        mode = info.external_attr >> 16
        kind = "folder" if info.is_dir() else "file"
        if info.create_system == 3 and stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):  # 3: a Unix
            kind = "a link" if stat.S_ISLNK(mode) else "a device"
        if info.flag_bits & 1:
            kind = "encrypted"
        yield Entry(info.orig_filename, info.file_size, kind, lambda info=info: opened.open(info))  # type: ignore[misc]


def _tar_entries(file: "_Bounded") -> Iterator[Entry]:
    opened = tarfile.open(fileobj=file, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115  # read on demand
    while (member := opened.next()) is not None:
        opened.members = []  # it keeps them all, in a list that it looks through
        kind = "folder" if member.isdir() else "file" if member.isreg() else "a link or a device"
        if getattr(member, "sparse", None) is not None or member.type == tarfile.GNUTYPE_SPARSE:
            kind = "a sparse file"
        size = 0 if kind == "folder" else member.size
        yield Entry(member.name, size, kind, lambda member=member: opened.extractfile(member))  # type: ignore[misc]


class _Bounded:
    """A file that is read in small pieces and up to a place, so that no header of a tar can claim memory or time."""

    def __init__(self, file: Any, end: int) -> None:
        self._file, self._end, self.tell = file, end, file.tell

    def read(self, size: int = -1) -> bytes:
        """Read some bytes; refuses more than a header has."""
        if not 0 <= size <= LONGEST_HEADER:
            raise _RefusedError("a header of it is damaged or far too long")
        self._check(self._file.tell() + size)
        return self._file.read(size)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; a compressed file is read up to there."""
        if whence != os.SEEK_SET or place < 0:
            raise _RefusedError("a header of it is damaged")
        self._check(place)
        return self._file.seek(place)

    def _check(self, place: int) -> None:
        if place > self._end + LONGEST_HEADER:
            raise _RefusedError(f"its content would be more than {self._end} bytes")
