"""Signals that ask a process to stop: where they end it at once, where they wait, and where Python would lose them."""

import contextlib
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from utils.core.errors import Stopped

CTRL_C = "Ctrl-C"
OURS = "LOCKSTEP_LAUNCHER"  # in the environment of a worker of our own launcher: that process
STARTED = "LOCKSTEP_STARTED"  # in a script's environment: when it or its launcher began, on the monotonic clock
SAME_MOMENT = 2.0  # seconds in which SIGTERM comes twice where a scheduler and the launcher send it
IN_C = 15.0  # seconds after SIGTERM in which a handler must have run, where a rank may wait in C for good
PATIENCE = 60  # seconds that a loader process serves on after SIGTERM: as long as the launcher waits for a run to save
BEGAN = time.monotonic()  # of this process, about
# SIGINT is that, SIGTERM a scheduler's or the launcher's, SIGUSR1 SLURM's notice of the end, SIGHUP a lost terminal.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)


def in_main_thread() -> bool:
    """Whether this thread may set handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _handled(handler: "signal._HANDLER", signals: Sequence[int]) -> Iterator[None]:
    """Handle signals for a while, but those that are ignored (nohup ignores SIGHUP); main thread only, else nothing."""
    if not in_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}

    def heard(number: int, frame: FrameType | None) -> None:
        _Heard.at = time.monotonic()
        handler(number, frame)  # type: ignore[operator, misc]

    try:
        for number in before:
            signal.signal(number, heard if callable(handler) else handler)
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # see `ignore_from_here`
                signal.signal(number, old)


class _Heard:
    """When a handler has run last, which interrupts whatever runs: where else could it say so?

    Attributes:
        at: on the monotonic clock.
    """

    at = -math.inf


def ignore_from_here() -> None:
    """Ignore signals to stop from here to the end of the process, which is leaving because it was asked to.

    The first rank that is gone makes its launcher end the others, in the middle of their last words.
    """
    if in_main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def stops_end_the_process() -> contextlib.AbstractContextManager[None]:
    """Context in which a signal to stop raises `Stopped`, so that what was begun is cleaned up; for a script's life.

    Ctrl-C does so in Python anyway.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name, 128 + number)

    return _handled(stop, [number for number in STOP_SIGNALS if number != signal.SIGINT])


def stops_need_no_python() -> contextlib.AbstractContextManager[None]:
    """Context in which a signal to stop ends the process as it is; for waits in C, where no handler of Python's runs.

    Nothing that is begun then is cleaned up.
    """
    return _handled(signal.SIG_DFL, STOP_SIGNALS)


@contextlib.contextmanager
def stops_reach_c() -> Iterator[None]:
    """Context in which SIGTERM ends this process, with status 1, if no handler runs although there is one.

    A rank whose GPU waits for a rank that is gone stays in NCCL's C code, where no handler of Python's runs,
    until the launcher kills it. A stop that was heard is left to its handler. Main thread only, else nothing.
    """
    if not in_main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # Python asks for that

    def watch() -> None:
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                since = time.monotonic() - SAME_MOMENT  # of signals that come together a handler may hear but one
                while number[0] == signal.SIGTERM and _Heard.at < since:
                    if time.monotonic() > since + SAME_MOMENT + IN_C:
                        os._exit(1)
                    time.sleep(0.1)

    _not_in_children()
    threading.Thread(target=watch, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


@functools.cache
def _not_in_children() -> None:
    """Keep signals of processes that are forked from here on from being told to this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class StopRequest:
    """What asks a run to stop, so that it stops where that costs nothing; a context manager.

    While the context is open a signal does nothing else but to be remembered. A second Ctrl-C is KeyboardInterrupt,
    and so is the first one after another signal.

    Attributes:
        by: the signal, or the time limit; "" as long as nothing asked.

    Args:
        time_limit: seconds from the start of the script or launcher, called from Python from now; None for none.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.by = ""
        now = time.monotonic()  # the same clock in all processes of a machine
        self._end = None if time_limit is None else float(os.environ.get(STARTED, now)) + time_limit

    def __bool__(self) -> bool:
        if not self.by and self._end is not None and time.monotonic() >= self._end:
            self.by = "--time-limit"
        return bool(self.by)

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Context in which signals are remembered."""
        with _handled(self._remember, STOP_SIGNALS):
            yield

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.by:
            raise KeyboardInterrupt
        if not self.by:
            self.by = CTRL_C if number == signal.SIGINT else signal.Signals(number).name


def end_in_a_while() -> None:
    """End this process after SIGTERM: in a while, for its parent may still need it, or when asked again later.

    A scheduler that signals all processes of a job, and the launcher that hears of it, ask at the same moment.
    """
    asked = time.monotonic()

    def again(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - asked > SAME_MOMENT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, again if hasattr(signal, "alarm") else signal.SIG_DFL)
    if hasattr(signal, "alarm"):
        signal.alarm(PATIENCE)
    else:
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold signals to stop back while processes are forked, and let them through at the end.

    Python calls hooks around each fork (``os.register_at_fork``; logging and random have some) and drops what is raised
    in them, a KeyboardInterrupt included. A mask would not do: the signal then goes to another thread of the process,
    and the main thread, which runs the handlers, raises all the same.

    Outside the main thread, and for signals without a handler, this does nothing. A process that is forked meanwhile
    has none of the handlers. Until it has set its own it leaves Ctrl-C and the like, which whole groups of processes
    get, to its parent, who will end it, and serves on after SIGTERM for as long as loader processes do.
    """
    if not in_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[tuple[int, FrameType | None]] = []
    parent = os.getpid()

    def hold(number: int, frame: FrameType | None) -> None:
        if os.getpid() == parent:
            held.append((number, frame))
        elif number == signal.SIGTERM:
            end_in_a_while()

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in held[-1:]:
            handlers[number](number, frame)  # type: ignore[operator, misc]
