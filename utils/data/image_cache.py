"""Decoded images at training size, in one packed file that all processes of a machine map.

Nothing is filled in advance: whoever decodes an image first puts it there, so each image is decoded once per machine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import mmap
import os
import shutil
import struct
import sys
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from utils.core.caches import content_digest
from utils.core.whole_files import replacing
from utils.data.index import LabelIndex, cache_folders

MAGIC = b"LSIMAGE1"
PIXELS_VERSION = 3  # raise it whenever images are decoded or resized otherwise: older cache files are not used
HEADER_BYTES = 4096  # magic, crc32 and length of the JSON text, the text; then shapes, flags, checksums, pixels
ALIGN = 64
RAM_SHARE = 0.4  # of the free memory: the rest is for workers, batches and the framework
DISK_SHARE = 0.8  # of the free disk: checkpoints and logs need some too
SHARED_MEMORY = Path("/dev/shm")


class ImageCache:
    """Images by index, shared by all processes that were forked from, or got a pickle of, the one that created it.

    ``ImageCache()`` holds nothing: ``get`` gives None and ``put`` does nothing.

    Attributes:
        count: images it has room for, the first ones by index.
    """

    def __init__(self, file: _PackedFile | None = None, verify: bool = False) -> None:
        self._file, self._verify = file, verify
        self.count = 0 if file is None else file.count
        self._verified = np.zeros(self.count, bool)

    @classmethod
    def create(
        cls,
        index: LabelIndex,
        imgsz: int,
        mode: str,
        *,
        shapes: np.ndarray,
        interpolation: str = "linear",
        spare: int = 0,
        logger: logging.Logger | None = None,
    ) -> ImageCache:
        """Reserve room for a split, or take over what an earlier run left on disk.

        Args:
            index: label index of the split.
            imgsz: longer side of the images in pixels; for the file name.
            mode: ``ram`` (gone with the processes that use it), ``disk`` (kept for later runs) or ``off``.
            shapes: (n, 2) [height, width] of the images that will be put.
            interpolation: how images get to that size; caches of another one are not used.
            spare: bytes of memory that ``ram`` leaves to others at least.
            logger: where the one line about it goes.

        Returns:
            A cache of as many images as fit; one that holds nothing where there is no room.
        """
        if mode not in ("ram", "disk", "off"):
            raise ValueError(f"--cache {mode}: use ram, disk or off")
        if mode == "off" or not index.n:
            return cls()
        logger = logger or logging.getLogger("lockstep")
        # Other decoders give other pixels, so their version is part of what the file holds.
        key = content_digest(
            index.images_digest.encode(), np.ascontiguousarray(shapes, np.int32).tobytes(), interpolation.encode(),
            f"{cv2.__version__} {PIXELS_VERSION}".encode(),
        )  # fmt: skip
        make = functools.partial(_in_memory, spare=spare) if mode == "ram" else _on_disk
        folders = [_memory_folder()] if mode == "ram" else cache_folders(index.path(0))
        reasons = []
        for folder in folders:
            try:
                file = make(folder, f"{index.name}-{imgsz}-{interpolation}.images", key, shapes)
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
            else:
                room = f"the first {file.count} of {index.n} images" if file.count < index.n else f"{index.n} images"
                megabytes = len(file.map) / 1e6
                size = f"{megabytes:.3g} MB" if megabytes < 999.5 else f"{megabytes / 1000:.1f} GB"
                logger.info(f"image cache: {mode}, {room}, {size} in {folder}")
                return cls(file, verify=mode == "disk")
        logger.warning(f"image cache is off, images are decoded every time ({'; '.join(reasons)})")
        return cls()

    def get(self, i: int) -> np.ndarray | None:
        """Image i, (H, W, 3) uint8, a read-only view into the shared file; None if it is not there (yet) or damaged."""
        file = self._file
        if file is None or i >= self.count or not file.flags[i]:
            return None
        image = file.image(i)
        image.flags.writeable = False
        if self._verify and not self._verified[i]:
            if zlib.crc32(image.data) != file.checksums[i]:
                return None
            self._verified[i] = True
        return image

    def put(self, i: int, image: np.ndarray) -> None:
        """Keep image i, (H, W, 3) uint8 of the size given at creation. Several processes may do so at once."""
        file = self._file
        if file is None or i >= self.count or self.get(i) is not None:
            return
        place = file.image(i)
        assert image.dtype == np.uint8
        assert image.shape == place.shape, f"image {i} is {image.shape}, not {place.shape}"
        if file.flags[i]:  # it is damaged; if another process puts it as well, it puts the same, which may be read
            file.flags[i] = 0
        place[:] = image
        file.checksums[i] = zlib.crc32(np.ascontiguousarray(image).data)
        file.flags[i] = 1  # last: a process killed before this leaves the image as absent
        self._verified[i] = True

    def close(self) -> None:
        """Let go of the file, and remove it if it is a temporary one; views in use stay valid. Nothing is held then."""
        if self._file is not None:
            self._file.let_go()
        self._file, self.count = None, 0

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is None:
            return ImageCache, ()
        return _attach_or_off, (self._file.address, self._file.key, self._verify)


# --- The file --------------------------------------------------------------------------------------------------------


class _PackedFile:
    """An open file of images, mapped for reading and writing, which it closes at the end.

    Args:
        descriptor: the open file; still the caller's if this raises.
        address: where other processes find it.
        key: what its header must say.
        remove: file to remove at the end.

    Raises:
        ValueError: the file is damaged, or holds other images.
    """

    def __init__(self, descriptor: int, address: Path, key: str, remove: Path | None = None) -> None:
        self.map = mmap.mmap(descriptor, 0)
        header = _read_header(self.map[:HEADER_BYTES])
        if header["key"] != key:
            raise ValueError("other images")
        self.address, self.key = address, key
        self.count: int = header["count"]
        shapes_at, flags_at, checksums_at, pixels_at = _layout(self.count)
        if len(self.map) < pixels_at or self.count < 0:
            raise ValueError("cut short")
        self.shapes = np.ndarray((self.count, 2), np.int32, self.map, shapes_at)
        self.flags = np.ndarray(self.count, np.uint8, self.map, flags_at)
        self.checksums = np.ndarray(self.count, np.uint32, self.map, checksums_at)
        if not (self.shapes > 0).all():
            raise ValueError("images without pixels")
        sizes = _stored_sizes(self.shapes)
        self.offsets = pixels_at + np.cumsum(sizes) - sizes
        if len(self.map) != pixels_at + sizes.sum():
            raise ValueError("cut short")
        self.let_go = weakref.finalize(self, _let_go, descriptor, remove, os.getpid())

    def image(self, i: int) -> np.ndarray:
        """View of the place of image i, (H, W, 3)."""
        return np.ndarray((*self.shapes[i], 3), np.uint8, self.map, self.offsets[i])


def _stored_sizes(shapes: np.ndarray) -> np.ndarray:
    """(n,) int64 bytes per image of (n, 2) [height, width], with the gap to the next one."""
    sizes = shapes.astype(np.int64).prod(1) * 3
    return sizes + -sizes % ALIGN


def _layout(count: int) -> tuple[int, int, int, int]:
    """Where shapes, flags, checksums and pixels start for ``count`` images."""
    starts = [HEADER_BYTES]
    for width in (8, 1, 4):
        starts.append(starts[-1] + width * count + -(width * count) % ALIGN)
    return starts[0], starts[1], starts[2], starts[3]


def _read_header(data: bytes) -> dict[str, Any]:
    """Fields of a header; ValueError if it is damaged or of something else."""
    if len(data) < HEADER_BYTES:
        raise ValueError("cut short")
    crc, length = struct.unpack_from("<II", data, len(MAGIC))
    text = data[len(MAGIC) + 8 : len(MAGIC) + 8 + length]
    if data[: len(MAGIC)] != MAGIC or zlib.crc32(text) != crc:
        raise ValueError("damaged header")
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("damaged header") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("key"), str) or type(fields.get("count")) is not int:
        raise ValueError("a header of something else")
    return fields


def _write(descriptor: int, key: str, shapes: np.ndarray, budget: int) -> None:
    """Lay out a new file for the first images that fit into ``budget`` bytes; flags are zero.

    Raises:
        OSError: there is no room.
    """
    count = int(np.searchsorted(np.cumsum(_stored_sizes(shapes)) + _layout(len(shapes))[3], budget, "right"))
    if not count:
        raise OSError(errno.ENOSPC, f"{budget / 1e6:.1f} MB free for it are too little")
    shapes = np.ascontiguousarray(shapes[:count], np.int32)
    _reserve(descriptor, _layout(count)[3] + int(_stored_sizes(shapes).sum()))
    text = json.dumps({"key": key, "count": count}).encode()
    header = MAGIC + struct.pack("<II", zlib.crc32(text), len(text)) + text
    with os.fdopen(descriptor, "r+b", closefd=False) as file:
        file.seek(0)
        file.write(header.ljust(HEADER_BYTES, b"\0") + shapes.tobytes())


def _reserve(descriptor: int, size: int) -> None:
    """Give a new file its size with real blocks: storing into a hole on a full disk or tmpfs kills with SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    with os.fdopen(descriptor, "r+b", closefd=False) as file:  # file systems and platforms without it
        zeros = bytes(1 << 20)
        for start in range(0, size, len(zeros)):
            file.write(zeros[: size - start])


def _in_memory(folder: Path, name: str, key: str, shapes: np.ndarray, spare: int) -> _PackedFile:
    """New cache in shared memory. On Linux its file has no name from the start, so nothing can be left behind."""
    free = free_memory()
    budget = max(min(int(RAM_SHARE * min(free, shutil.disk_usage(folder).free)), free - spare), 0)
    descriptor, path = tempfile.mkstemp(".tmp", f"lockstep-{name}-", folder)
    nameless = sys.platform == "linux"
    try:
        if nameless:
            os.unlink(path)
        _write(descriptor, key, shapes, budget)
        # Other processes of this user reach a nameless file through the process that made it.
        address = Path(f"/proc/{os.getpid()}/fd/{descriptor}" if nameless else path)
        return _PackedFile(descriptor, address, key, None if nameless else Path(path))
    except BaseException:
        os.close(descriptor)
        if not nameless:
            os.unlink(path)
        raise


def _on_disk(folder: Path, name: str, key: str, shapes: np.ndarray) -> _PackedFile:
    """Cache beside the data; a file for other images, or a damaged one, is replaced."""
    file = folder / name
    try:
        return _attach(file, key)
    except (ValueError, FileNotFoundError):
        folder.mkdir(parents=True, exist_ok=True)
    old = file.stat().st_size if file.exists() else 0
    with replacing(file, durable=False) as new:
        _write(new.fileno(), key, shapes, int(DISK_SHARE * (shutil.disk_usage(folder).free + old)))
    try:
        return _attach(file, key)
    except ValueError as error:  # another run on other data has put its own there meanwhile
        raise OSError(errno.EBUSY, str(error)) from error


def _attach(address: Path, key: str) -> _PackedFile:
    """Map an existing file; OSError: there is none, or it is not ours to write; ValueError: it holds something else."""
    descriptor = os.open(address, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        if hasattr(os, "posix_fallocate"):  # copying a file may have made holes
            with contextlib.suppress(OSError):
                os.posix_fallocate(descriptor, 0, max(os.fstat(descriptor).st_size, 1))
        return _PackedFile(descriptor, address, key)
    except BaseException:
        os.close(descriptor)
        raise


def _attach_or_off(address: Path, key: str, verify: bool) -> ImageCache:
    """How a cache is unpickled. Without it training is slower, not wrong, so a failure is a warning."""
    try:
        return ImageCache(_attach(address, key), verify)
    except (OSError, ValueError) as error:
        logging.getLogger("lockstep").warning(f"image cache is off in process {os.getpid()} ({error})")
        return ImageCache()


def _let_go(descriptor: int, remove: Path | None, owner: int) -> None:
    """Close the file and, in the process that made it, remove it."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
        if remove is not None and os.getpid() == owner:
            remove.unlink()


# --- Free memory -----------------------------------------------------------------------------------------------------


def _memory_folder() -> Path:
    """Folder for files in shared memory; the temporary folder where the platform has none."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the kernel calls available, and what its control groups allow.

    Without Linux's files (found under ``root``) there is no answer and the result is unbounded: the file is then on a
    disk, and held in memory as far as the system likes.
    """
    free = [sys.maxsize]
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                names = ("memory.max", "memory.current", "inactive_file")
                free += _group_rooms(root / "sys/fs/cgroup", group, names)
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                free += _group_rooms(root / "sys/fs/cgroup/memory", group, names)
    return max(min(free), 0)


def _group_rooms(base: Path, group: str, names: tuple[str, str, str]) -> list[int]:
    """Bytes left in a control group and in each above it, version 1 or 2 by the names of the files.

    File pages that were not used lately count as usage there but are given back on demand. Inside a container the
    group's path may not be visible; its limits are then at the top.
    """
    rooms = []
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            limit, usage = (int((folder / name).read_text()) for name in names[:2])
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            rooms.append(limit - usage + int(stat.get(names[2], 0)))
    return rooms
