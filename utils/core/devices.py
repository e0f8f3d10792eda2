"""Which devices a flag names, how tensors get there, and how much memory of one this process holds."""

import functools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.core.errors import UserError

CUDA_INDEX = re.compile(r"(?:cuda:)?(0|[1-9][0-9]*)")


def parse_device(flag: str | int | Sequence[str | int], cuda_count: int, has_mps: bool) -> list[torch.device]:
    """Read a device flag strictly; touches no device.

    Args:
        flag: "", "auto", "all", "cpu", "mps", "0", "cuda:0", 0, or several of them as a list or joined by commas.
        cuda_count: CUDA devices of this machine; indices count inside ``CUDA_VISIBLE_DEVICES``.
        has_mps: whether Apple's GPU can be used.

    Returns:
        The devices in the order given, at least one. "" and "auto" are one device: the first CUDA device, else MPS,
        else the CPU.

    Raises:
        UserError: nonsense, an index that this machine lacks, a GPU named twice, or different kinds mixed. Ids of two
            digits are ordinary ids: "10" is not devices 1 and 0.
    """
    items = flag.split(",") if isinstance(flag, str) else [flag] if isinstance(flag, int) else list(flag)
    names = [str(item).strip().lower() for item in items]
    shown = as_typed(flag)
    exists = ", ".join([*(f"cuda:{i}" for i in range(cuda_count)), *(["mps"] if has_mps else []), "cpu"])
    if names in ([""], ["auto"]):
        return [torch.device("cuda", 0) if cuda_count else torch.device("mps" if has_mps else "cpu")]
    if names == ["all"] and cuda_count:
        return [torch.device("cuda", i) for i in range(cuda_count)]
    if set(names) == {"cpu"} or (names == ["mps"] and has_mps):
        return [torch.device(name) for name in names]
    if names == ["all"]:
        raise UserError(f"--device all: there is no GPU here that PyTorch can use; here are: {exists}")
    matches = [CUDA_INDEX.fullmatch(name) for name in names]
    indices = [int(match.group(1)) for match in matches if match]
    if not names or len(indices) < len(names):
        problem = "is not a device or a list of CUDA devices"
    elif len(set(indices)) < len(indices):
        problem = "names a device twice"
    elif max(indices) >= cuda_count:
        problem = f"asks for cuda:{max(indices)}, which this machine does not have"
    else:
        return [torch.device("cuda", i) for i in indices]
    hint = " (a GPU is named by its number, as 0 or cuda:0)" if {"cuda", "gpu"} & set(names) else ""
    raise UserError(f"--device {shown or flag!r} {problem}{hint}; here are: {exists}")


def as_typed(flag: str | int | Sequence[str | int]) -> str:
    """Return a device flag as it would be typed."""
    return flag if isinstance(flag, str) else str(flag) if isinstance(flag, int) else ",".join(map(str, flag))


def check_half(half: bool, device: torch.device) -> None:
    """Raise a UserError where half precision is wanted and the device is no CUDA GPU."""
    if half and device.type != "cuda":
        raise UserError(f"--half computes on a CUDA GPU only, not on {device.type}; leave it out")


def memory_usage(device: torch.device) -> float:
    """Return the GB (1e9 bytes) this process holds: reserved on a GPU, resident on the CPU, 0 where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return resident_pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def time_on(device: torch.device) -> float:
    """Return the time at which a device has done what it was told so far; every mark costs a wait for it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; the host does not wait for the copy to a CUDA device.

    To MPS it does: PyTorch before 2.13 may read memory that was freed meanwhile.
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def upload(images: Tensor, device: torch.device) -> Tensor:
    """Return a batch in pinned memory on a device, copied while that still computes what it was given before.

    The host runs ahead of a CUDA device, but in one stream a copy would wait until all work before it is done, and the
    device for the copy. In a stream of its own it begins at once.
    """
    if device.type != "cuda":
        return images.to(device)
    computing, copying = torch.cuda.current_stream(device), _copies(device)
    with torch.cuda.stream(copying):
        moved = images.to(device, non_blocking=True)
    computing.wait_stream(copying)
    moved.record_stream(computing)  # else the next copy could take its memory as soon as nobody here holds it
    return moved
