"""Ctrl-C at moments when Python would lose it."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while processes are forked, and let it through at the end.

    Python calls hooks around each fork (``os.register_at_fork``; logging and random have some) and drops what is raised
    in them, a KeyboardInterrupt included. A mask would not do: the signal then goes to another thread of the process,
    and the main thread, which runs the handlers, raises all the same.

    Outside the main thread, and where Ctrl-C has no handler, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[-1])
