"""What is done about ranks that are stuck or slow: a watchdog beside them, and a line on what an epoch waited for."""

import faulthandler
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from utils.config.yaml_files import ROOT
from utils.core import heartbeat
from utils.core.logging import get_logger
from utils.dist import watchdog
from utils.dist.collectives import all_gather_rows, gather_on_machine, once_per_machine
from utils.dist.place import DistEnv

SHORTEST_EPOCH = 5.0  # seconds; in less than that a hiccup of the machine is a large share
WORTH_SAYING = 0.2  # of the time, that something waits
MARK = 16  # bytes at the end of the heartbeats' file that tell it from another one


class _Files(NamedTuple):
    """Where the first rank of a machine has the files that its ranks share; they have no names.

    Attributes:
        pid: of that rank.
        beats: descriptor of the heartbeats there.
        stacks: descriptor of the file that Python stacks go to.
        mark: last bytes of the heartbeats' file.
    """

    pid: int
    beats: int
    stacks: int
    mark: bytes


@contextmanager
def watched(env: DistEnv, warning: float, timeout: float) -> Iterator[None]:
    """Have the ranks of this machine watched. Collective: every rank must call it.

    On Linux only: elsewhere a process is not told from a stopped one. Without memory for it, or where the ranks do not
    see each other's processes (containers of their own), the run goes on unwatched.

    Args:
        env: this rank's place.
        warning: ``--stall-warning``, seconds; 0 is never.
        timeout: ``--stall-timeout``, seconds; 0 is never.
    """
    if sys.platform != "linux" or not (warning or timeout):
        yield
        return
    with ExitStack() as stack:
        files = once_per_machine(lambda: _make_files(env, stack), env)
        attached = gather_on_machine(_attach(files, env, stack), env)
        if attached and files is not None and all(attached):
            _start_watchdog(files, env, warning, timeout, stack)
        yield


def _make_files(env: DistEnv, stack: ExitStack) -> _Files | None:
    """Make what the ranks of a machine share: files in memory, which go with the last process that has them open."""
    try:
        beats, stacks = os.memfd_create("heartbeats"), os.memfd_create("stacks")
    except (OSError, AttributeError):  # forbidden, or Python was built for an old system
        return None
    stack.callback(os.close, beats)
    stack.callback(os.close, stacks)
    mark = os.urandom(MARK)
    size = env.local_world_size * heartbeat.SLOT.size
    os.pwrite(beats, mark, size)
    return _Files(os.getpid(), beats, stacks, mark)


def _attach(files: _Files | None, env: DistEnv, stack: ExitStack) -> bool:
    """Join in: write heartbeats where the others do, and answer the watchdog's signal.

    Returns:
        Whether that was possible.
    """
    if files is None:
        return False
    size = env.local_world_size * heartbeat.SLOT.size
    try:
        with open(f"/proc/{files.pid}/fd/{files.beats}", "r+b", buffering=0) as beats:
            memory = mmap.mmap(beats.fileno(), size + MARK)
        if memory[size:] != files.mark:
            return False
        stacks = os.open(f"/proc/{files.pid}/fd/{files.stacks}", os.O_WRONLY | os.O_APPEND)
    except (OSError, ValueError):
        return False
    stack.callback(os.close, stacks)
    faulthandler.register(watchdog.STACK_SIGNAL, stacks, all_threads=True, chain=False)
    stack.callback(faulthandler.unregister, watchdog.STACK_SIGNAL)
    heartbeat.attach(memory, env.local_rank, env.rank)
    stack.callback(heartbeat.release)
    return True


def _start_watchdog(files: _Files, env: DistEnv, warning: float, timeout: float, stack: ExitStack) -> None:
    """Start the watchdog of this machine, to be ended by the stack."""
    # On a device a host may wait for other ranks wherever it looks at a result, or has queued too much.
    queued = env.world_size > 1 and env.device.type != "cpu"
    numbers = (files.beats, files.stacks, os.getpid(), warning, timeout, env.world_size, int(queued))
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(ROOT / "utils" / "dist" / "watchdog.py"), *map(str, numbers)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(files.beats, files.stacks),
            start_new_session=True,  # neither Ctrl-C nor Ctrl-Z of a terminal are meant for it
        )
    except OSError as error:  # no memory, no process
        get_logger().warning(f"nothing watches over ranks that are stuck: {error}")
        return
    stack.callback(process.wait)
    stack.callback(process.kill)


# Slow ranks -----------------------------------------------------------------------------------------------------------


class Pace:
    """Says after an epoch what took time that need not: a rank that was slow, or the loader, and of that once a run.

    Args:
        env: this rank's place.
        waited: gives the seconds for which this rank has waited for images so far.
        remedies: what makes images come faster, for the message.
        filling: whether an epoch also fills a cache. The first one, in which the loader starts, tells nothing of the
            others, and then neither does the second.
    """

    def __init__(self, env: DistEnv, waited: Callable[[], float], remedies: str, *, filling: bool) -> None:
        self._env, self._waited, self._remedies = env, waited, remedies
        self._unjudged, self._said = 1 + int(filling), False

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Context of the training part of an epoch. Collective: every rank must call it."""
        began, blocked, waited = time.perf_counter(), heartbeat.blocked_seconds(), self._waited()
        yield
        seconds = time.perf_counter() - began
        self._judge_loader(self._waited() - waited, seconds)
        self._name_slowest(heartbeat.blocked_seconds() - blocked, seconds)

    def _judge_loader(self, waited: float, seconds: float) -> None:
        if self._unjudged:
            self._unjudged -= 1
        elif not self._said and seconds >= SHORTEST_EPOCH and waited > WORTH_SAYING * seconds:
            self._said = True
            get_logger().info(
                f"the loader is what limits: {waited / seconds:.0%} of the epoch was spent waiting for images; "
                f"{self._remedies}"
            )

    def _name_slowest(self, blocked: float, seconds: float) -> None:
        """Among ranks on the CPU only: on CUDA a host does not wait where its device does."""
        if self._env.world_size == 1 or self._env.device.type != "cpu":
            return
        own = torch.tensor([blocked, seconds], dtype=torch.float64)
        all_blocked, all_seconds = all_gather_rows(own, self._env).unbind(1)
        slowest = find_slowest(all_blocked.tolist(), float(all_seconds.max()))
        if slowest is not None:
            rank, share = slowest
            get_logger().info(f"rank {rank} was the slowest: the others waited {share:.0%} of the epoch for it")


def find_slowest(blocked: list[float], seconds: float) -> tuple[int, float] | None:
    """Return the rank that the others wait for, and the share of the time that they do, on average.

    Args:
        blocked: seconds that each rank was in collectives, two ranks at least. What the slowest one is there is what
            they take.
        seconds: that all took.

    Returns:
        None if it is not worth a line.
    """
    if seconds < SHORTEST_EPOCH:
        return None
    least = min(blocked)
    share = (sum(blocked) - len(blocked) * least) / (len(blocked) - 1) / seconds
    return (blocked.index(least), share) if share > WORTH_SAYING else None
