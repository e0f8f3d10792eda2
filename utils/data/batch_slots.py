"""Memory in which loader processes hand over batches, used again once a batch is gone.

PyTorch makes a new shared file for every tensor that a process hands over. The system clears its pages while they are
written, and maps them anew where they are read: for images that costs more than the copying. Nor have containers room
for many of them: Docker's have 64 MB in /dev/shm, a batch of 64 images of 640 px takes 79 MB, and a process that wants
more than there is dies with "Bus error".
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


class BatchSlots:
    """Slots for the images of batches, some for each loader process, all made before the processes are forked.

    A slot is taken by the process that it belongs to, and free again once the tensor that the main process got, and all
    views of it, are gone. So a batch may be kept for as long as one likes.

    Args:
        workers: loader processes.
        slots: of each of them.
        size: bytes of a slot.
    """

    def __init__(self, workers: int, slots: int, size: int) -> None:
        self._slots, self._size = slots, size + -size % PAGE
        flags = workers * slots + -(workers * slots) % PAGE
        self._memory = mmap.mmap(-1, flags + workers * slots * self._size)  # untouched pages take no memory
        self._taken = np.ndarray(workers * slots, np.uint8, self._memory)
        self._start = flags
        self._key, self._owner = next(_KEYS), os.getpid()
        _OPEN[self._key] = self

    def take(self, worker: int, shape: tuple[int, ...]) -> Placed | Carried:
        """Take a free slot of this process, which is the worker of that number; if there is none, memory of its own."""
        free = range(worker * self._slots, (worker + 1) * self._slots) if math.prod(shape) <= self._size else ()
        for slot in free:
            if not self._taken[slot]:
                self._taken[slot] = 1
                return Placed(self._key, slot, shape, self.array(slot, shape))
        return Carried(np.empty(shape, np.uint8))

    def taken(self) -> int:
        """Return the number of slots that are taken: batches that are made, wait, or are used."""
        return int(np.count_nonzero(self._taken))

    def array(self, slot: int, shape: tuple[int, ...]) -> np.ndarray:
        """View of a slot, uint8."""
        return np.ndarray(shape, np.uint8, self._memory, self._start + slot * self._size)

    def release(self, slot: int) -> None:
        """Give a slot back; the business of the process that made the slots, whose children have batches as well."""
        if os.getpid() == self._owner:
            self._taken[slot] = 0


class Placed:
    """Images in a slot: arrives as a tensor in the main process, where it is pickled to.

    Attributes:
        array: (B, H, W, 3) uint8, to be filled.
    """

    def __init__(self, key: int, slot: int, shape: tuple[int, ...], array: np.ndarray) -> None:
        self._address, self.array = (key, slot, shape), array

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, self._address


class Carried:
    """Images that find no slot: as `Placed`, but they go through the pipe that other things go through, byte by byte.

    Attributes:
        array: (B, H, W, 3) uint8, to be filled.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_tensor, (self.array,)


_KEYS = itertools.count()
# Of this process: what arrives is unpickled, where nothing but its address can be handed over.
_OPEN: weakref.WeakValueDictionary[int, BatchSlots] = weakref.WeakValueDictionary()


def _arrived(key: int, slot: int, shape: tuple[int, ...]) -> Tensor:
    """The images of a slot, as of `_as_tensor`; the slot is free again when they are gone."""
    slots = _OPEN[key]
    array = slots.array(slot, shape)
    weakref.finalize(array, slots.release, slot).atexit = False  # the tensor's memory holds the array
    return _as_tensor(array)


def _as_tensor(array: np.ndarray) -> Tensor:
    """(B, 3, H, W), channels last in memory."""
    return torch.from_numpy(array).permute(0, 3, 1, 2)
