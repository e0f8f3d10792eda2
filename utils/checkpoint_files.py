"""Checkpoint files as such: plain values only, one digest of the content, and every file whole or absent."""

import hashlib
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError

CHECKPOINT_FORMAT = 1  # raised when older programs can't read the files any more
FOREIGN = ("models.", "ultralytics.")  # modules that YOLOv5's checkpoints name
TEMPORARY = re.compile(r"\..+\.pt\.([0-9]+)\.tmp")


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
        UserError: the file is missing, damaged (THU-MIG/yolov10#154), from elsewhere, or of a newer program; the
            sentence names it and the reason.
    """
    shown = f"{flag} {path}".lstrip()
    _check_readable(path, shown)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of files by other programs: what is wrong is said below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise nearly anything: zip, pickle, unicode, key and memory errors
        raise UserError(f"{shown} is damaged or not a checkpoint of this program: {_reason(path, error)}") from error
    if not isinstance(content, dict) or "digest" not in content:
        raise UserError(f"{shown} is not a checkpoint of this program: it holds no digest")
    found = content.pop("checkpoint_format", None)
    if isinstance(found, int) and found > CHECKPOINT_FORMAT:
        known = f"this program reads up to {CHECKPOINT_FORMAT}"
        raise UserError(f"{shown} has format {found}, {known}; use a newer version")
    digest = content.pop("digest")
    try:
        intact = digest == digest_of({**plain(content, "state"), "checkpoint_format": found})
    except TypeError:  # a value that was never saved like this
        intact = False
    if not intact:
        raise UserError(f"{shown} is damaged: its content does not have the digest it was saved with")
    return content


def _check_readable(path: Path, shown: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{shown} is not there") from None
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{shown} can't be read: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{shown} is a folder; name a file, such as {path / 'weights' / 'best.pt'} of a run")
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
    """Return the places of all tensors in nested dicts that hold NaN or infinity."""
    if isinstance(value, dict):
        return [name for key, item in value.items() for name in non_finite(item, f"{where}.{key}")]
    spoiled = isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
    return [where] if spoiled else []


def write_synced(content: dict[str, Any], path: Path) -> None:
    """Write a file and wait until the disk has it.

    Raises:
        OSError: it could not be written; the message has the space needed and the space there is.
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's writer hides the system's error behind one of its own
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        needed, free = checkpoint_bytes(content) / 1e6, shutil.disk_usage(path.parent).free / 1e6
        message = f"{cause.strerror}: the checkpoint needs {needed:.0f} MB, {free:.0f} MB are free"
        raise OSError(cause.errno, message, str(path.parent)) from error


def temporary_path(path: Path) -> Path:
    """Name of a file of this process beside its final place."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def place(source: Path, target: Path) -> None:
    """Give a finished file a second name, swapped in whole."""
    temporary = temporary_path(target)
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # still there if both were one file already: then the rename does nothing


def remove_stale(folder: Path) -> None:
    """Remove what runs left that died while they saved."""
    for path in folder.glob(".*.pt.*.tmp"):
        match = TEMPORARY.fullmatch(path.name)
        if match and not _is_running(int(match.group(1))):
            path.unlink(missing_ok=True)


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


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's names, so that a rename outlasts a power cut."""
    if sys.platform == "win32":  # folders can't be synced there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(path: Path, error: Exception) -> str:
    data = path.read_bytes()
    if not data.startswith(b"PK"):  # torch.save writes zip files
        return "it is no file of torch.save" if data else "it is empty"
    if b"PK\x05\x06" not in data[-1024:]:  # the record that ends a zip
        return "it is cut short"
    foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
    if foreign:
        others = foreign.group(1).startswith(FOREIGN)
        own = ", as YOLOv5's own files do, which can't be read so far" if others else ""
        return f"it holds Python objects ({foreign.group(1)}){own}"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
