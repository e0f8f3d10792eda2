"""Checkpoint files as such: plain values only, one digest of the content, and every file whole or absent."""

import contextlib
import functools
import hashlib
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from utils.checkpoints.inert_pickle import MOST_STEPS, Global, Record, RefusedError
from utils.checkpoints.torch_files import StoredTensor, TorchFile
from utils.config.published import WEIGHTS
from utils.core.errors import UserError, nearest_file
from utils.core.logging import get_logger
from utils.core.whole_files import copy_whole, replacing, sync_folder, temporary_path

WEIGHT_SUFFIXES = (".pt", ".pth", ".safetensors")
CHECKPOINT_FORMAT = 1  # raised when older programs can't read the files any more
SEAL = ("checkpoint_format", "digest")  # what of a file is not content
MOST_NESTED = 50  # dicts and lists of a checkpoint in one another: a run's have some ten
TEMPORARY = re.compile(r"\..+\.pt\.([0-9]+)(?:\.[0-9a-f]+)?\.tmp")


def checkpoint_bytes(state: Any) -> int:
    """Estimate the size of a checkpoint's file, a little above the true one; tensors that share memory count twice."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size() + 512  # headers of its zip entry, padding, its place in the pickle
    if isinstance(state, Mapping):
        return 4096 + sum(len(str(key)) + checkpoint_bytes(value) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return 16 + sum(checkpoint_bytes(value) for value in state)
    return 16 + len(str(state))


def previous_path(path: Path) -> Path:
    """Name of the generation before: ``last.pt`` has ``last.prev.pt``."""
    return path.with_name(f"{path.stem}.prev{path.suffix}")


def plain(value: Any, where: str) -> Any:
    """Copy nested values into the plain types that torch.load accepts with weights_only; tensors on the CPU."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()  # else a slice takes all it was cut from into the file
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{where} has a key of type {type(key).__name__}")
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # also their subclasses, such as NumPy's float64
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{where} is of type {type(value).__name__}; a checkpoint holds plain values and tensors only")


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file: the state in plain values, the format's number and the digest of both."""
    content = {**plain(state, "state"), "checkpoint_format": CHECKPOINT_FORMAT}
    return {**content, "digest": digest_of(content)}


def load_checkpoint(path: Path, flag: str = "") -> dict[str, Any]:
    """Read a checkpoint on the CPU without running code from it, and check its digest.

    Args:
        path: of the file.
        flag: that named it, for messages.

    Raises:
        UserError: the file is missing, damaged, from elsewhere, or of a newer program; the sentence names it and the
            reason.
    """
    with opened(path, flag) as file:
        return checkpoint_content(file, f"{flag} {path}".lstrip())


@contextlib.contextmanager
def opened(path: Path, flag: str = "") -> Iterator[TorchFile]:
    """Open a file of torch.save; what is found wrong with it inside the block becomes a UserError as well.

    Args:
        path: of the file.
        flag: that named it, for messages.

    Raises:
        UserError: the file is missing, damaged or no file of torch.save; the sentence names it and the reason.
    """
    shown = f"{flag} {path}".lstrip()
    check_readable(path, shown)
    try:
        with TorchFile(path) as file:
            yield file
    except RefusedError as error:
        raise UserError(f"{shown} is damaged or not a checkpoint: {error}") from error
    except OSError as error:
        raise UserError(f"{shown} can't be read: {error.strerror or error}") from error


def is_own(root: Any) -> bool:
    """Whether what a file holds was saved by this program."""
    return isinstance(root, dict) and "digest" in root


def checkpoint_content(file: TorchFile, shown: str) -> dict[str, Any]:
    """Return the content of an open checkpoint after a check of its digest.

    Args:
        file: the open file.
        shown: its name, for messages.

    Raises:
        UserError: it is not of this program, of a newer version, or damaged.
        RefusedError: it is damaged in a way that keeps it from being read.
    """
    root = file.root
    if not is_own(root):
        hint = "weights from elsewhere can start a run (--weights), but not continue one"
        raise UserError(f"{shown} is not a checkpoint of this program: it holds no digest; {hint}")
    found = root.get("checkpoint_format")
    if isinstance(found, int) and found > CHECKPOINT_FORMAT:
        known = f"this program reads up to {CHECKPOINT_FORMAT}"
        raise UserError(f"{shown} has format {found}, {known}; use a newer version")
    content = _with_tensors({key: value for key, value in root.items() if key not in SEAL}, file, [MOST_STEPS], 0)
    try:
        intact = root["digest"] == digest_of({**plain(content, "state"), "checkpoint_format": found})
    except (TypeError, ValueError):  # a value that was never saved like this
        intact = False
    if not intact:
        raise UserError(f"{shown} is damaged: its content does not have the digest it was saved with")
    return content


def _with_tensors(value: Any, file: TorchFile, left: list[int], depth: int) -> Any:
    """Copy nested values of a checkpoint, with the tensors that the file only describes.

    `left` counts down the values that may still come: a list can be in many places of the file, and so in others.
    """
    left[0] -= 1 + (len(value) // 32 if isinstance(value, (str, bytes)) else 0)
    if depth > MOST_NESTED or left[0] < 0:
        raise RefusedError("its content is nested too deeply")
    if isinstance(value, StoredTensor):
        return file.tensor(value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, file, left, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, file, left, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (Global, Record)):
        kind = value if isinstance(value, Global) else value.kind
        raise RefusedError(f"it holds Python objects ({kind.path})")
    return value


def check_readable(path: Path, shown: str) -> None:
    """Raise a UserError unless there is a file that may be read; `shown` is its name for the message."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{shown} is not there{nearest_file(path, WEIGHT_SUFFIXES, WEIGHTS)}") from None
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{shown} can't be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{shown} is a folder; name a file, such as {path / 'weights' / 'best.pt'} of a run")
    if not stat.S_ISREG(mode):
        raise UserError(f"{shown} is not a file that can be read from any place; name one on a disk")
    if not os.access(path, os.R_OK):
        raise UserError(f"{shown} can't be read: Permission denied")


def digest_of(value: Any) -> str:
    """SHA-256 of nested plain values; it does not depend on how dicts were filled or how tensors lie in memory."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: "hashlib._Hash", value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        sha.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        sha.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
            _feed(sha, key)
            _feed(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _feed(sha, item)
    else:
        sha.update(f"{type(value).__name__} {value!r};".encode())


def non_finite(value: Any, where: str) -> list[str]:
    """Return the places of all tensors in nested containers that hold NaN or infinity."""
    tensors = dict(_floating(value, where))
    if not tensors:
        return []
    # One pass over the values: a norm is not finite if a value is not, nor, rarely, if values are huge.
    suspects = [not math.isfinite(norm) for norm in torch._foreach_norm(list(tensors.values()))]
    return [
        name
        for (name, tensor), suspect in zip(tensors.items(), suspects, strict=True)
        if suspect and not bool(torch.isfinite(tensor).all())
    ]


def _floating(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield where, value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _floating(item, f"{where}.{key}")


WEIGHT_KEYS = ("model", "ema", "optimizer")  # must be finite; meters and the like may hold the NaN of a skipped window


class NonFiniteError(ValueError):
    """Weights hold NaN or infinity, so they were not saved over finite ones."""


def check_finite(state: Mapping[str, Any], path: Path) -> None:
    """Refuse a state that is not worth to be saved.

    Args:
        state: of a run.
        path: of the file that it is for.

    Raises:
        NonFiniteError: model, EMA or optimizer hold NaN or infinity.
    """
    spoiled = [name for key in WEIGHT_KEYS for name in non_finite(state.get(key), key)]
    if spoiled:
        raise NonFiniteError(
            f"{path} was not written: {spoiled[0]} holds NaN or infinity ({len(spoiled)} such tensors)"
        )


def write_checkpoint(
    state: Mapping[str, Any],
    path: Path,
    also: Sequence[Path],
    keep_previous: bool,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint and swap it in; see `utils.torch_utils.save_checkpoint`, which checks the state before.

    Args:
        state: of a run.
        path: of the file.
        also: further names for the same content.
        keep_previous: whether the file that is replaced stays.
        check: called when the file is whole; what it raises keeps it from taking its place.

    Raises:
        OSError: the disk is full or broken; the files that were there are as they were.
        TypeError: the state holds something else than plain values.
    """
    content = sealed(state)
    folders = sorted({path.parent, *(copy_path.parent for copy_path in also)})
    for folder in folders:
        remove_stale(folder)
    with replacing(path) as file:
        _write_synced(content, file)
        check()
        if keep_previous and path.exists():
            _place(path, previous_path(path))
        for copy_path in also:
            _place(Path(file.name), copy_path)
    for folder in folders:
        if folder != path.parent:
            sync_folder(folder)


def _write_synced(content: dict[str, Any], file: IO[bytes]) -> None:
    """Write a file, wait until the disk has it and close it, before it gets its names.

    Raises:
        OSError: it could not be written; the message has the space needed and the space there is.
    """
    try:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
        file.close()  # Windows lets no name of an open file be replaced
    except (OSError, RuntimeError) as error:  # torch's writer hides the system's error behind one of its own
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        needed, free = checkpoint_bytes(content) / 1e6, shutil.disk_usage(Path(file.name).parent).free / 1e6
        message = f"{cause.strerror}: the checkpoint needs {needed:.0f} MB, {free:.0f} MB are free"
        raise OSError(cause.errno, message, str(Path(file.name).parent)) from error


def _place(source: Path, target: Path) -> None:
    """Give a finished file a second name, swapped in whole."""
    beside = temporary_path(target)
    try:
        os.link(source, beside)
    except OSError:  # a file system without hard links
        copy_whole(source, target)
        return
    try:
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)  # still there if both were one file already: then the rename does nothing


def remove_stale(folder: Path) -> None:
    """Remove what runs left that died while they saved, as far as this user may."""
    for path in folder.glob(".*.pt.*.tmp"):
        match = TEMPORARY.fullmatch(path.name)
        if match and not _is_running(int(match.group(1))):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _warn_once(f"{path}, left by a run that died, can't be removed: {error.strerror}")


@functools.cache
def _warn_once(message: str) -> None:
    get_logger().warning(message)


def _is_running(pid: int) -> bool:
    """Whether the process lives; this one does not count, and Windows keeps open files from being removed anyway."""
    if pid == os.getpid() or sys.platform == "win32":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
