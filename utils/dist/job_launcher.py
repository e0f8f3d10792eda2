"""The process that launches the workers of a call from Python: started, its output passed on, ended."""

import codecs
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from utils.core.signals import interrupts_held
from utils.dist.launch import GRACE

PATIENCE = GRACE + 15  # seconds that an interrupted call waits for its launcher, which waits for the workers


def wait_for_workers(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Start the launcher of a job and return its exit status; it has ended, with its workers, however this returns."""
    shown = _is_real(sys.stdout)
    with contextlib.ExitStack() as stack:
        with interrupts_held():
            child = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | variables,
                stdout=None if shown else subprocess.PIPE,
                stderr=None if shown else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through us: once, also from a notebook
            )
            stack.callback(_end, child)
        if child.stdout is not None:
            _relay(child.stdout)
        return child.wait()


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a launcher and its workers if they still run: as Ctrl-C does, or at once if that is too slow."""
    try:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
    finally:  # a second Ctrl-C comes here without waiting
        if child.poll() is None:
            child.kill()  # its workers end with it
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _is_real(stream: TextIO) -> bool:
    """Whether a stream is the process's own output, which children write to as well; in a notebook it is not."""
    try:
        return stream is sys.__stdout__ and bool(stream.fileno() == 1)
    except (OSError, ValueError, AttributeError):
        return False


def _relay(pipe: IO[bytes]) -> None:
    """Copy a child's output to this process's as it comes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := os.read(pipe.fileno(), 1 << 16):
        sys.stdout.write(decoder.decode(chunk))
        sys.stdout.flush()
