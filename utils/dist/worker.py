"""A process that a launcher started: how it ends, what it leaves for the launcher, and that it ends with that one."""

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from utils.core.errors import (
    ENDS,
    LostPeerError,
    NotWrittenError,
    Stopped,
    check_output,
    ended_by,
    leave,
    say_on_stderr,
)
from utils.core.heartbeat import STALLED
from utils.core.signals import OURS

PR_SET_PDEATHSIG = 1
STOPPED = "stopped"  # left beside a worker's error file when it stopped as it was asked to: the status it ends with
RUN = "run"  # beside it as well: the folder of the worker's run, so that the launcher can tell how to go on
SAME_MOMENT = 0.5  # seconds in which ranks that meet the same error meet it


def as_worker(main: Callable[[], int | None]) -> Callable[[], int | None]:
    """Make a script's main function fit to be run by a launcher.

    The process ends with the launcher, also if that is killed; an exception is handed to the launcher, and one of ours
    prints it when all workers are gone, so that only how to go on is read after it. A worker leaves by `leave`: if the
    interpreter were taken down, threads of Gloo that a group left behind would abort it, now and again.
    """
    launcher = "TORCHELASTIC_RUN_ID" in os.environ or OURS in os.environ
    if not launcher:
        return main
    end_with_parent()
    faulthandler.enable()  # a crash in C leaves the Python stack
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the launcher runs in the background

    def ended() -> int | None:  # inside of the record: what needs no traceback leaves none
        try:
            status = main()
            check_output()
            return status
        except ENDS as stop:
            if isinstance(stop, Stopped) and not stop.args and OURS in os.environ:
                return stop.status  # the launcher tells why it ended its workers
            status = ended_by(stop)
            can_go_on = isinstance(stop, Stopped) and stop.args
            if "TORCHELASTIC_ERROR_FILE" in os.environ and (can_go_on or isinstance(stop, NotWrittenError)):
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(STOPPED).write_text(str(status))
            return status

    recorded: Callable[[], int | None] = record(ended)

    def run_and_leave() -> NoReturn:
        try:
            status = recorded() or 0
        except Exception as error:
            status = 1
            if OURS not in os.environ:  # else the launcher says it, when all are gone
                _say_once(error)
        leave(status)

    return run_and_leave


def tell_launcher(run_dir: Path | None) -> None:
    """Leave the folder of this worker's run where our launcher finds it; None: nothing of the run is left to do."""
    if OURS not in os.environ or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    note = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(RUN)
    with contextlib.suppress(OSError):  # of a full disk; it is only for a line
        if run_dir is None:
            note.unlink(missing_ok=True)
        else:
            note.write_bytes(os.fsencode(run_dir))


def _say_once(error: Exception) -> None:
    """Print what ends a worker of a launcher that is not ours: one line for a lost peer, else the traceback.

    What the first worker of the machine meets as well, at about the same time, is left to that one.
    """
    if isinstance(error, LostPeerError):
        say_on_stderr(f"error: {error}")
        return
    own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    text = last_line("".join(traceback.format_exception_only(error)))
    end = time.monotonic() + SAME_MOMENT
    while own.parent.name not in ("", "0") and time.monotonic() < end:
        if last_line(read_traceback(own.parent.with_name("0") / own.name)) == text:
            return
        time.sleep(0.05)
    sys.excepthook(type(error), error, error.__traceback__)


def last_words() -> list[str]:
    """Return how the workers of the life before this one failed: the last line of each traceback of this machine."""
    own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/LOCAL_RANK/error.json
    attempt = re.fullmatch(r"attempt_(\d+)", own.parent.parent.name)
    if attempt is None:
        return []
    lines = []
    before = own.parent.parent.with_name(f"attempt_{int(attempt.group(1)) - 1}")
    for path in sorted(before.glob("*/error.json")):
        if callstack := read_traceback(path):
            lines.append(f"local rank {path.parent.name} failed: {last_line(callstack)}")
    with contextlib.suppress(OSError):
        lines += [path.read_text() for path in before.glob(f"*/{STALLED}")]
    return lines


def read_traceback(path: Path) -> str:
    """Return what a worker has left of an exception in its error file; "" if that is not there."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"])
    return ""


def last_line(text: str) -> str:
    """Return the last line of a traceback: the exception itself."""
    return text.rstrip().rsplit("\n", 1)[-1]


def end_with_parent(by: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """End this process when its parent ends: by the kernel on Linux, elsewhere by looking once a second.

    Args:
        by: the signal; one that can be handled leaves time to end what this process has started.
        parent: process id, for it may have ended already; None is the parent of the moment.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
        if orphaned(parent):  # it has ended before it could be watched
            signal.raise_signal(by)
        return

    def watch() -> None:
        while not orphaned(parent):
            time.sleep(1)
        signal.raise_signal(by)

    threading.Thread(target=watch, daemon=True).start()


def orphaned(parent: int) -> bool:
    """Whether the process that started this one is gone; never so on Windows, which does not tell."""
    return sys.platform != "win32" and os.getppid() != parent
