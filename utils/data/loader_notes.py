"""What the processes of data loaders are doing: each notes the image that it is at where the main process can look.

When such a process dies, or hangs, nobody else knows which file it was reading.
"""

import contextlib
import ctypes
import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import NamedTuple

from utils.core.errors import LostDataError

NO_IMAGE = -1
# PyTorch says it in three ways: "(pid 7) is killed by signal: Killed. ", "(pid 7) exited unexpectedly with exit code 1.
# ..." and "(pid(s) 7, 8) exited unexpectedly", the last one maybe because of one of the others.
DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)(?: is killed by signal: (?P<signal>[^.]+))?")
MEMORY = "if nobody killed it, the machine ran out of memory: use fewer --workers or --cache off"
HINTS = {
    "Killed": MEMORY,
    "Bus error": "shared memory or the disk may be full: use fewer --workers or --cache off",
    "Segmentation fault": "if it does so again, remove the image",
}


class Doing(NamedTuple):
    """What a process of a loader is doing.

    Attributes:
        pid: its process id; the main process's own where a loader has no others; 0 if it has not begun yet.
        path: the image that it is making a sample of, or reading for one; "" between two samples.
    """

    pid: int
    path: str


class LoaderNotes:
    """Notes of the processes of one loader, in memory that they share.

    Args:
        path: gives the file of an image's number.
        num_workers: processes; with 0 the main one takes notes.
    """

    def __init__(self, path: Callable[[int], str], num_workers: int) -> None:
        self._path = path
        self._numbers = RawArray(ctypes.c_int64, [0, NO_IMAGE] * max(num_workers, 1))
        _OPEN.add(self)

    def __getstate__(self) -> dict[str, object]:
        return {"_numbers": self._numbers}  # a worker that is not forked only writes

    def begin(self, worker: int) -> Callable[[int], None]:
        """Enter this process as a worker, and return the function by which it notes an image's number or NO_IMAGE."""
        self._numbers[2 * worker] = os.getpid()
        return partial(self._write, 2 * worker + 1)

    def _write(self, place: int, number: int) -> None:
        self._numbers[place] = number

    def close(self) -> None:
        """Forget the processes, which have ended."""
        _OPEN.discard(self)

    def read(self) -> list[Doing]:
        """Return what each process is doing at the moment."""
        pairs = zip(self._numbers[::2], self._numbers[1::2], strict=True)
        return [Doing(pid, "" if image == NO_IMAGE else self._path(image)) for pid, image in pairs]


_OPEN: "weakref.WeakSet[LoaderNotes]" = weakref.WeakSet()  # of this process


def being_read() -> list[Doing]:
    """Return what each process of the loaders of this process is doing at the moment; may be called by any thread."""
    return [doing for notes in list(_OPEN) for doing in notes.read()]


@contextlib.contextmanager
def deaths_explained() -> Iterator[None]:
    """Say of a loader process that dies which image it was at.

    PyTorch raises its error in the main thread wherever that is at the moment, so this is put around all of a run. If
    it has not noticed yet, there is a lost connection where a batch of that process is fetched.

    Raises:
        LostDataError: a process died.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        dead = _named_in(error)
        if not dead and not isinstance(error, RuntimeError):
            try:
                dead = _dead_soon()
            except RuntimeError as noticed:  # by PyTorch, meanwhile
                dead = _named_in(noticed)
        if not dead:
            raise
        raise LostDataError(_explained(dead)) from None


def _named_in(error: BaseException) -> dict[int, str]:
    """Processes of which PyTorch says that they died, and the signals that killed them, "" where unknown."""
    found = DEATH.match(str(error.__cause__)) or DEATH.match(str(error))
    return {int(pid): found["signal"] or "" for pid in found["pids"].split(",")} if found else {}


def _dead_soon() -> dict[int, str]:
    """Processes that died, as the system says, and the signals that killed them; waits a little for the first."""
    end = time.monotonic() + 1.0
    dead: dict[int, str] = {}
    while not dead and time.monotonic() < end and hasattr(os, "waitid"):
        time.sleep(0.01)
        for pid in {doing.pid for doing in being_read()} - {0, os.getpid()}:
            try:
                state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # PyTorch has asked before
                dead[pid] = ""
            else:
                if state is not None:
                    killed = state.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                    dead[pid] = signal.strsignal(state.si_status) or "" if killed else ""
    return dead


def _explained(dead: Mapping[int, str]) -> str:
    """Say what happened to processes, given the signals that killed them."""
    paths = [doing.path for doing in being_read() if doing.pid in dead and doing.path]
    number = next(filter(None, dead.values()), "")
    who = f"a process that loads images died ({number or 'for a reason unknown'})"
    return f"{who} while it was at {', '.join(paths) or 'no image'}; {HINTS.get(number, MEMORY)}"
