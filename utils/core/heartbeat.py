"""Signs of life: what this process does at the moment, written where `utils.dist.watchdog` reads it from outside.

The code of each phase writes them itself. A thread would go on to write while the main thread is stuck (`alive` is for
the one call that can't do otherwise). Until a run has a watchdog they go to memory that nobody reads.

Imports the standard library only: the watchdog is a small process.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from threading import Event, Thread
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Memory = mmap.mmap | bytearray

STALLED = "stalled"  # left by a watchdog beside a worker's error file: why it ended the run


class Phase(IntEnum):
    """What a rank does; within a micro-batch in this order."""

    START = 0
    LABELS = 1
    SET_UP = 2
    LOADING = 3
    FORWARD = 4
    BACKWARD = 5
    STEP = 6
    VALIDATION = 7
    FILES = 8
    SAVING = 9
    END = 10

    @property
    def words(self) -> str:
        """How it is called in a message: "has been in ..."."""
        return "files and callbacks" if self is Phase.FILES else self.name.lower().replace("_", "-")


class Beat(NamedTuple):
    """What a rank has written last.

    Attributes:
        rank: of all ranks; -1 if nobody has the slot yet.
        pid: its process.
        time: nanoseconds; another one is a sign of life.
        phase: what it does.
        inside: 1 while it waits for other ranks.
        collectives: that it has entered so far.
        epoch: 0-based; -1 before the first.
        batch: number of the micro-batch in its epoch, 0-based.
    """

    rank: int
    pid: int
    time: int
    phase: int
    inside: int
    collectives: int
    epoch: int
    batch: int


OWNER = struct.Struct("=qq")
STATE = struct.Struct("=qqqqqq")
SLOT = struct.Struct("=8q")


class _Heartbeat:
    """The heartbeat of this process.

    Attributes:
        blocked: nanoseconds so far in which it waited for other ranks.
    """

    def __init__(self) -> None:
        self.blocked = 0
        self.phase, self.inside, self.collectives, self.epoch, self.batch = Phase.START, 0, 0, -1, -1
        self.detach()

    def detach(self) -> None:
        """Write where nobody reads."""
        self.memory: Memory = bytearray(SLOT.size)
        self.place = OWNER.size
        self.write()

    def attach(self, memory: Memory, slot: int, rank: int) -> None:
        """Write into a slot of memory that others read."""
        OWNER.pack_into(memory, slot * SLOT.size, rank, os.getpid())
        self.memory, self.place = memory, slot * SLOT.size + OWNER.size
        self.phase, self.inside, self.collectives, self.epoch, self.batch = Phase.START, 0, 0, -1, -1
        self.write()

    def release(self) -> None:
        """Give a slot back."""
        OWNER.pack_into(self.memory, self.place - OWNER.size, 0, 0)
        self.detach()

    def write(self) -> None:
        self.time = time.monotonic_ns()
        STATE.pack_into(
            self.memory,
            self.place,
            self.time,
            self.phase,
            self.inside,
            self.collectives,
            self.epoch,
            self.batch,
        )


own = _Heartbeat()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=own.detach)  # a loader process is no rank


def beat(phase: Phase | None = None, epoch: int | None = None, batch: int | None = None) -> None:
    """Give a sign of life; costs about a microsecond.

    Args:
        phase: what begins now; None if the phase just goes on.
        epoch: that begins now, 0-based.
        batch: micro-batch of the epoch that begins now, 0-based.
    """
    if phase is not None:
        own.phase = phase
    if epoch is not None:
        own.epoch = epoch
    if batch is not None:
        own.batch = batch
    own.write()


def beating(items: Iterable[T]) -> Iterator[T]:
    """Yield items with a sign of life before each: for loops that may take long."""
    for item in items:
        own.write()
        yield item


@contextmanager
def alive() -> Iterator[None]:
    """Context of one call that takes long and gives no sign of life itself: a thread gives one every second.

    A call that never returns is not noticed then.
    """
    done = Event()

    def write() -> None:
        while not done.wait(1.0):
            own.write()

    thread = Thread(target=write, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Inside:
    """Context in which this process waits for other ranks."""

    def __init__(self, collectives: int) -> None:
        self.collectives = collectives

    def __enter__(self) -> None:
        self.enter()

    def enter(self) -> None:
        """Begin to wait."""
        own.collectives += self.collectives
        own.inside = 1
        own.write()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """End the wait, if there is one."""
        entered, was_inside, own.inside = own.time, own.inside, 0
        own.write()
        own.blocked += (own.time - entered) * was_inside


collective = _Inside(1)  # context of a collective
waiting = _Inside(0)  # context of a wait for the end of a collective that was begun before, or for a device that waits


def begun() -> None:
    """Count a collective that was begun and that nobody waits for yet."""
    own.collectives += 1
    own.write()


def blocked_seconds() -> float:
    """Return for how many seconds this process has waited for other ranks so far."""
    return own.blocked * 1e-9


def attach(memory: Memory, slot: int, rank: int) -> None:
    """Write signs of life into a slot of a memory map from now on.

    Args:
        memory: writable, of SLOT.size bytes for each rank of the machine.
        slot: local rank.
        rank: of all ranks.
    """
    own.attach(memory, slot, rank)


def release() -> None:
    """Give the slot back: what this process does from now on is nobody's business."""
    own.release()


def read_beats(memory: bytes) -> list[Beat]:
    """Read all slots that a rank has; bytes behind the last whole one are left out."""
    whole = memory[: len(memory) // SLOT.size * SLOT.size]
    return [beat for values in SLOT.iter_unpack(whole) if (beat := Beat(*values)).pid]
