"""Processes of our own: whether there may be some, that a forked one surely begins to run, its name and its memory."""

import contextlib
import ctypes
import os
import sys
from multiprocessing import connection, context, current_process
from multiprocessing.process import BaseProcess
from typing import Any

PATIENCE = 5.0  # seconds; to replace a child that was merely slow does no harm
TRIES = 12
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of the GNU C library


def name_process(name: str) -> None:
    """Give this process a name for the system's table of processes, at most 15 characters; on Linux only."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(name)


def keep_freed_memory() -> None:
    """Have this process use freed memory again rather than give it back, up to 64 MiB; with the GNU C library only.

    Else decoded images come from the system each time, which clears their pages as they are written: 730 to 970 page
    faults and 3 of 30 ms for a training sample of 640 px that is not in the image cache.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: no such handle on Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest that is allowed
        mallopt(M_TRIM_THRESHOLD, 64 << 20)


def may_have_children() -> bool:
    """Whether this process may start others by multiprocessing: not if it is daemonic, as Celery's are and a pool's."""
    return not current_process().daemon


def fork_context() -> context.ForkContext:
    """Return a multiprocessing context of processes that surely begin to run; on Linux only.

    A process with several threads, such as Gloo's, may fork at a moment when another of them holds a lock of the Python
    interpreter. Up to Python 3.11 the child then waits for that lock for good, before it runs any code, and who waits
    for the child's work waits as long: seen as a rare hang when ranks start. So each child says that it lives, and one
    that does not is replaced. With Python 3.11 no longer supported (``requires-python``), ``get_context("fork")`` will
    do, and all below can go.
    """
    assert sys.platform == "linux", sys.platform
    return _Context()


if sys.platform == "linux":
    from multiprocessing import popen_fork

    class _Newborn:
        """Stands for a process until it has said that it lives."""

        def __init__(self, process: BaseProcess, writer: int) -> None:
            self._process, self._writer = process, writer

        def _bootstrap(self, parent_sentinel: int) -> int:
            os.write(self._writer, b"1")
            os.close(self._writer)
            return self._process._bootstrap(parent_sentinel=parent_sentinel)  # type: ignore[attr-defined]

    class _Popen(popen_fork.Popen):
        def _launch(self, process_obj: Any) -> None:
            for _ in range(TRIES):
                reader, writer = os.pipe()
                try:
                    super()._launch(_Newborn(process_obj, writer))  # type: ignore[misc]
                    os.close(writer)
                    if connection.wait([reader], PATIENCE):
                        return
                finally:
                    os.close(reader)
                self.kill()
                self.wait()
                self.close()
                self.returncode = None
            raise RuntimeError(f"{TRIES} processes in a row did not begin to run; is the machine overloaded?")

    class _Process(context.ForkProcess):
        @staticmethod
        def _Popen(process_obj: BaseProcess) -> popen_fork.Popen:  # noqa: N802, the base class's name
            return _Popen(process_obj)

    class _Context(context.ForkContext):
        Process = _Process
