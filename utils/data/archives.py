"""Archives from strangers: looked through before anything is written, unpacked beside their place, then renamed.

Formats: zip, tar, tar.gz. Nothing of an archive decides where a file goes, what it may do, or how much room it takes
beyond the limits: no path that leads out, no link, no device, no permission bits, no bomb.
"""

import contextlib
import gzip
import os
import re
import shutil
import stat
import struct
import tarfile
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from utils.core.errors import UserError
from utils.core.heartbeat import beat

PIECE = 1 << 18  # bytes copied at a time
LONGEST_HEADER = 1 << 20  # bytes of one name or header of a tar
LONGEST_DIRECTORY = 128 << 20  # bytes of a zip's directory
LONGEST_NAME, LONGEST_PATH = 255, 2048  # bytes, what file systems take
BLOCK = 4096  # bytes that even an empty file takes on a disk
SPARE = 64 << 20  # bytes of a disk that are left free


@dataclass(frozen=True)
class Limits:
    """What an archive may hold.

    Attributes:
        entries: files and folders; COCO's largest archive has 118,287.
        size: bytes of all files.
        ratio: bytes of all files over those of the archive. Images hardly shrink, label files about tenfold; zeros
            shrink a thousandfold.
        small: bytes in all that any ratio is fine for.
    """

    entries: int = 1_000_000
    size: int = 1 << 40
    ratio: float = 200.0
    small: int = 16 << 20


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
    open: Callable[[], IO[bytes]]


class _RefusedError(Exception):
    """The archive is not to be unpacked; the message says why."""


def unpack(archive: Path, folder: Path, limits: Limits | None = None) -> None:
    """Unpack an archive into a new folder, whole or not at all.

    Files get the permissions of new files and the time of now.

    Args:
        archive: zip, tar or tar.gz, told by its content.
        folder: is not there yet; the one above it is.
        limits: what the archive may hold; None is the usual.

    Raises:
        UserError: it is damaged, of another kind, or holds what it must not (PEP 706 lists the tricks); nothing was
            written then, or nothing is left.
    """
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        with _entries(archive, limits or Limits()) as entries:
            places = check_entries(entries, archive.stat().st_size, limits or Limits())
            _check_room(places, folder.parent)
            scratch.mkdir()
            _write_all(places, scratch, archive.name)
        scratch.rename(folder)
    except _RefusedError as error:
        raise UserError(f"the archive {archive} is not unpacked: {error}") from None
    except OSError as error:
        if error.errno is None:  # zipfile and gzip use OSError for damage too
            raise UserError(f"the archive {archive} is damaged: {error}") from None
        raise UserError(f"the archive {archive} can't be unpacked into {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_entries(entries: Iterable[Entry], archive_size: int, limits: Limits) -> dict[tuple[str, ...], Entry]:
    """Return entries by the parts of their path, if all of them are harmless.

    Args:
        entries: of the archive, maybe found while they are read.
        archive_size: bytes of the archive itself.
        limits: what it may hold.
    """
    places: dict[tuple[str, ...], Entry] = {}
    total = count = 0
    most = min(limits.size, max(limits.small, int(archive_size * limits.ratio)))
    for entry in entries:
        count, total = count + 1, total + max(entry.size, 0)
        if entry.kind not in ("file", "folder") or entry.size < 0:
            raise _RefusedError(f"{_shown(entry.name)} is {entry.kind}, not a file or folder")
        if count > limits.entries:
            raise _RefusedError(f"it holds more than {limits.entries} files")
        if total > most:
            raise _RefusedError(f"its {archive_size} bytes would become more than {most}")
        parts = _parts(entry.name)
        if parts and not (entry.kind == "folder" and parts in places and places[parts].kind == "folder"):
            if parts in places:
                raise _RefusedError(f"{_shown(entry.name)} is in it twice")
            places[parts] = entry
    for parts in places:
        for above in range(1, len(parts)):
            if parts[:above] in places and places[parts[:above]].kind != "folder":
                raise _RefusedError(f"{_shown('/'.join(parts[:above]))} is a file and a folder in it")
    return places


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a path that stays inside; () for the folder itself."""
    odd = next((letter for letter in name if ord(letter) < 32 or letter in "\\\x7f"), "")
    if not name or odd or name.startswith("/") or re.match(r"[A-Za-z]:", name) or ".." in name.split("/"):
        raise _RefusedError(f"the path {_shown(name)} leads out of its folder or is none")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        raise _RefusedError(f"the name {_shown(name)} can't be a file's") from None
    if max(sizes, default=0) > LONGEST_NAME or sum(sizes) + len(sizes) > LONGEST_PATH:
        raise _RefusedError(f"the path {_shown(name)} is too long")
    return parts


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else f"{name[:100]}...")


def _check_room(places: dict[tuple[str, ...], Entry], folder: Path) -> None:
    needed = sum(entry.size + BLOCK for entry in places.values()) + SPARE
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _RefusedError(f"it needs {needed / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free in {folder}")


def _write_all(places: dict[tuple[str, ...], Entry], folder: Path, name: str) -> None:
    for parts, entry in tqdm(places.items(), f"unpacking {name}", unit="files", disable=None, leave=False):
        path = folder.joinpath(*parts)
        if entry.kind == "folder":
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as target:  # never over another file, which a name in other letters may be
            left = entry.size
            try:
                with entry.open() as source:
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


@contextlib.contextmanager
def _entries(archive: Path, limits: Limits) -> Iterator[Iterable[Entry]]:
    """Open an archive; entries are read while they are asked for."""
    with archive.open("rb") as file:
        start = file.read(512)
        file.seek(0)
        if start.startswith(b"PK"):
            yield _zip_entries(file)
        elif start.startswith(b"\x1f\x8b"):
            most = max(limits.small, int(archive.stat().st_size * limits.ratio))
            with gzip.open(file) as unzipped:
                # Beside the files there are headers and padding: up to 4 blocks of 512 bytes for a file.
                yield _tar_entries(_Bounded(unzipped, min(limits.size, most) + 2048 * limits.entries))
        elif start[257:262] == b"ustar" or (start and not start.strip(b"\0")):
            yield _tar_entries(_Bounded(file, archive.stat().st_size))
        else:
            raise _RefusedError(f"it is neither zip nor tar nor tar.gz; it begins with {start[:20]!r}")


def _zip_entries(file: IO[bytes]) -> Iterator[Entry]:
    _check_directory(file)
    try:
        opened = zipfile.ZipFile(file)
    except Exception as error:  # damaged bytes raise nearly anything
        raise _RefusedError(f"it is damaged or cut short ({error or type(error).__name__})") from None
    for info in opened.infolist():
        mode = info.external_attr >> 16
        kind = "folder" if info.is_dir() else "file"
        if info.create_system == 3 and stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):  # 3: a Unix
            kind = "a link" if stat.S_ISLNK(mode) else "a device"
        if info.flag_bits & 1:
            kind = "encrypted"
        size = 0 if kind == "folder" else info.file_size
        yield Entry(info.orig_filename, size, kind, lambda info=info: opened.open(info))  # type: ignore[misc]


def _check_directory(file: IO[bytes]) -> None:
    """Refuse a zip whose directory alone would fill the memory, before it is read."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - (1 << 16) - 22))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    size = struct.unpack_from("<I", tail, at + 12)[0] if 0 <= at <= len(tail) - 22 else 0
    locator = tail.rfind(b"PK\x06\x07", 0, max(at, 0))
    if locator >= 0 and locator + 16 <= len(tail):  # zip64
        place = struct.unpack_from("<Q", tail, locator + 8)[0]
        if place < end:
            file.seek(place)
            record = file.read(56)
            size = max(size % 0xFFFFFFFF, struct.unpack_from("<Q", record, 40)[0] if len(record) == 56 else 0)
    file.seek(0)
    if size > LONGEST_DIRECTORY:
        raise _RefusedError(f"its directory has {size} bytes, more than {LONGEST_DIRECTORY}")


def _tar_entries(file: "_Bounded") -> Iterator[Entry]:
    try:
        opened = tarfile.open(fileobj=file, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115  # read on demand
        while (member := opened.next()) is not None:
            opened.members = []  # it keeps them all, in a list that it looks through
            kind = "folder" if member.isdir() else "file" if member.isreg() else "a link or a device"
            if getattr(member, "sparse", None) is not None or member.type == tarfile.GNUTYPE_SPARSE:
                kind = "a sparse file"
            size = 0 if kind == "folder" else member.size
            yield Entry(member.name, size, kind, lambda member=member: _extracted(opened, member))  # type: ignore[misc]
    except (_RefusedError, GeneratorExit):
        raise
    except Exception as error:  # damaged bytes raise nearly anything
        raise _RefusedError(f"it is damaged or cut short ({error or type(error).__name__})") from None


def _extracted(opened: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = opened.extractfile(member)
    assert content is not None  # it is a regular file
    return content


class _Bounded:
    """A file that is read in small pieces and up to a place, so that no header of a tar can claim memory or time."""

    def __init__(self, file: Any, end: int) -> None:
        self._file, self._end = file, end

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

    def tell(self) -> int:
        """Return the place."""
        return self._file.tell()

    def _check(self, place: int) -> None:
        if place > self._end + LONGEST_HEADER:
            raise _RefusedError(f"its content would be more than {self._end} bytes")
