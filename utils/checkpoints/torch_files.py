"""Files of torch.save: a zip file that holds a pickle and the bytes of tensors, which are read when they are asked for.

Nothing in a file is trusted: no code from it runs, and neither sizes nor positions count before they are checked. What
is read takes no more memory than the file is long, besides a limited number of small objects.
"""

import math
import os
import struct
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.checkpoints.inert_pickle import MOST_BYTES, Global, Maker, RefusedError, read_pickle

MOST_DIRECTORY_BYTES = 2 << 20  # of a zip file's table of contents: some 20,000 entries
PIECE = 1 << 24  # bytes that are read at a time
MOST_DIMENSIONS = 64  # as in torch
SHARING = 4  # tensors may add up to so many times the file: some of a checkpoint can be one and the same
END, END64, LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
END_BYTES, END64_BYTES, LOCATOR64_BYTES = 22, 56, 20  # a file of torch.save ends with these, without any comment
OLD_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save before version 1.6
TAR = slice(257, 262)  # where a tar file says what it is

DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The numbers that one or several tensors lie in: the name of a zip entry, their type and how many there are."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in a file, as the file describes it; `TorchFile.tensor` checks that and reads it."""

    storage: StoredBytes
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """An open file of torch.save.

    Args:
        path: of the file.

    Attributes:
        root: the object that was saved, as `utils.checkpoints.inert_pickle.read_pickle` gives it, with a
            `StoredTensor` for each tensor.

    Raises:
        RefusedError: the file is damaged, not of torch.save, in its format from before version 1.6, or asks for a call.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._check_kind()
            self._zip = zipfile.ZipFile(self._file)
            self._entries = self._checked_entries()
            if sys.byteorder != "little" or self._small("byteorder") not in (b"", b"little"):
                raise RefusedError("its numbers are in the byte order of another kind of machine")
            self._storages: dict[StoredBytes, Tensor] = {}
            self._read_keys: set[str] = set()
            self._budget = SHARING * self._size
            makers: dict[str, Maker] = {
                "torch._utils._rebuild_tensor_v2": _stored_tensor,
                "torch._utils._rebuild_parameter": _stored_parameter,
                "torch.Size": _shape,
            }
            self.root: Any = read_pickle(self._small("data.pkl", MOST_BYTES), makers, _stored_bytes)
        except (RefusedError, OSError):
            self._file.close()
            raise
        except Exception as error:  # damaged bytes raise nearly anything
            self._file.close()
            raise RefusedError(_first_line(error)) from error

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Read a tensor; those that share their numbers in the file do so in memory.

        Raises:
            RefusedError: it is described as larger than its numbers, lies outside of them, or these are damaged.
        """
        storage, size = stored.storage, math.prod(stored.shape)
        last = sum((length - 1) * stride for length, stride in zip(stored.shape, stored.strides, strict=True))
        if size > storage.count or (size and stored.offset + last >= storage.count):
            raise RefusedError("it has a tensor that is larger than the numbers it is made of")
        self._budget -= size * storage.dtype.itemsize
        if self._budget < 0:
            raise RefusedError("its tensors add up to far more than the file")
        if not size:
            return torch.empty(stored.shape, dtype=storage.dtype)
        if storage not in self._storages:
            self._storages[storage] = self._read(storage)
        return self._storages[storage].as_strided(stored.shape, stored.strides, stored.offset)

    def _check_kind(self) -> None:
        """Raise a RefusedError unless the file is a whole zip file with a table of contents of a bearable size."""
        start = self._file.read(TAR.stop)
        if not start:
            raise RefusedError("it is empty")
        if start.startswith(OLD_MAGIC) or start[TAR] == b"ustar":
            raise RefusedError("it is in torch's format from before version 1.6; load it with torch and save it again")
        if not start.startswith(b"PK"):
            raise RefusedError("it is no file of torch.save")
        end = self._tail(END_BYTES)
        if not end.startswith(END):
            raise RefusedError("it is cut short")
        directory = struct.unpack("<L", end[12:16])[0]
        end64 = self._tail(END64_BYTES + LOCATOR64_BYTES + END_BYTES)
        if end64[END64_BYTES:].startswith(LOCATOR64) and end64.startswith(END64):
            directory = struct.unpack("<Q", end64[40:48])[0]
        if directory > MOST_DIRECTORY_BYTES:
            raise RefusedError("its table of contents is too large")

    def _tail(self, length: int) -> bytes:
        self._file.seek(max(self._size - length, 0))
        return self._file.read(length)

    def _checked_entries(self) -> dict[str, zipfile.ZipInfo]:
        """Return the entries by their names without the folder that all are in."""
        entries: dict[str, zipfile.ZipInfo] = {}
        folders = set()
        for info in self._zip.infolist():
            folder, _, name = info.filename.partition("/")
            folders.add(folder)
            if name in entries or len(folders) > 1:
                raise RefusedError("its entries are not those of one file of torch.save")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise RefusedError("it is compressed, which torch.save never does")
            entries[name] = info
        if "constants.pkl" in entries:
            raise RefusedError("it is a TorchScript file; name the .pt file that was exported")
        if "data.pkl" not in entries:
            raise RefusedError("it is no file of torch.save")
        return entries

    def _small(self, name: str, limit: int = 64) -> bytes:
        """Return an entry's bytes; none if it is not there."""
        info = self._entries.get(name)
        if info is None:
            return b""
        if info.file_size > limit:
            raise RefusedError(f"its entry {name} is too large")
        with self._zip.open(info) as entry:
            return entry.read()

    def _read(self, storage: StoredBytes) -> Tensor:
        """Read the numbers of tensors, (count,) of their type. Each zip entry is read once, so at most the file."""
        info = self._entries.get(f"data/{storage.key}")
        if info is None or info.file_size != storage.count * storage.dtype.itemsize or storage.key in self._read_keys:
            raise RefusedError("it has a tensor whose numbers are not there")
        self._read_keys.add(storage.key)
        if info.header_offset + info.file_size > self._size:
            raise RefusedError("it is cut short")
        content = torch.empty(info.file_size, dtype=torch.uint8)
        try:
            with self._zip.open(info) as entry:
                position, view = 0, content.numpy()
                while piece := entry.read(PIECE):
                    view[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
                    position += len(piece)
                if position != info.file_size:
                    raise RefusedError("it is cut short")
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
            raise RefusedError(_first_line(error)) from error
        return content.view(storage.dtype)


def _stored_bytes(identity: Any) -> StoredBytes:
    """Return what a persistent id (kind, storage class, key, location, count) stands for."""
    kind, storage, key, _, count = identity
    dtype = DTYPES.get(storage.name) if isinstance(storage, Global) and storage.module == "torch" else None
    if kind != "storage" or dtype is None or not isinstance(key, str):
        what = storage.path if isinstance(storage, Global) else "an unknown kind"
        raise RefusedError(f"it has numbers of a type that is not read: {what}")
    _check_lengths((count,))
    return StoredBytes(key, dtype, count)


def _stored_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    if not isinstance(storage, StoredBytes) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise RefusedError("it has a tensor that is none")
    if len(shape) != len(strides) or len(shape) > MOST_DIMENSIONS:
        raise RefusedError("it has a tensor with an impossible number of dimensions")
    _check_lengths((offset, *shape, *strides))
    return StoredTensor(storage, offset, shape, strides)


def _stored_parameter(data: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise RefusedError("it has a parameter that is none")
    return data


def _shape(lengths: Any) -> tuple[int, ...]:
    if len(lengths) > MOST_DIMENSIONS:
        raise RefusedError("it has a tensor with an impossible number of dimensions")
    _check_lengths(lengths)
    return tuple(lengths)


def _check_lengths(values: Sequence[Any]) -> None:
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise RefusedError("it has a tensor with an impossible size, stride or position")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
