"""The process beside the ranks of a machine that says which one is stuck, and ends a run that stays so.

    python -I -S utils/dist/watchdog.py BEATS STACKS STARTER WARNING TIMEOUT RANKS QUEUED

`utils.dist.stalls` starts it. BEATS and STACKS are descriptors: the ranks' heartbeats, and the file that they write
their Python stacks to when they get STACK_SIGNAL. STARTER is the process to end with. WARNING and TIMEOUT are seconds,
0 is never. RANKS is how many there are on all machines. QUEUED is 1 where collectives are queued on a device.

Imports the standard library only, which keeps it small: about 10 MB.
"""

import contextlib
import os
import signal
import sys
import time
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # -I leaves it out

from utils.core.heartbeat import STALLED, Beat, Phase, read_beats

# A launcher passes SIGUSR2 on to its workers to end them, so that one is taken. This one is up to programs, see
# signal(7); glibc's own end below SIGRTMIN.
STACK_SIGNAL = int(getattr(signal, "SIGRTMIN", 0)) + 6
ANSWER = 1.0  # seconds that a rank gets to write its stack
SLOWEST_POLL, FASTEST_POLL, POLLS = 1.0, 0.05, 10  # seconds between looks, and looks within the smaller limit
LISTED = 8  # ranks that are named in a line
QUEUED_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.VALIDATION)
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")  # schedulers send them to all processes


class Process(NamedTuple):
    """A line of the system's table of processes.

    Attributes:
        pid: its id.
        name: at most 15 characters.
        state: R runs, S sleeps, D waits for hardware, T is stopped, t is stopped by a debugger, Z is dead.
        parent: process id.
    """

    pid: int
    name: str
    state: str
    parent: int


class Rank(NamedTuple):
    """A rank as it is seen from outside.

    Attributes:
        beat: its last sign of life.
        state: of its process; Z also where that is gone.
        children: its processes and theirs.
    """

    beat: Beat
    state: str
    children: list[Process]


class Blame(NamedTuple):
    """Whom the others wait for.

    Attributes:
        ranks: one, or several that are as likely.
        sure: whether it must be one of these, on this machine: they are not known to wait for anything else.
    """

    ranks: list[Rank]
    sure: bool


def find_blame(ranks: list[Rank], queued: bool = False) -> Blame:
    """Tell which ranks of a machine the others wait for, when none of them gives a sign of life any more.

    Args:
        ranks: all of the machine.
        queued: whether collectives are queued on a device, so that a rank may wait for others wherever it uses that.
    """
    for states in ("Z", "T", "D"):  # a dead one, a stopped one, one that waits for hardware
        found = [rank for rank in ranks if rank.state in states and not (states == "D" and rank.beat.inside)]
        if found:
            return Blame(found, sure=True)
    outside = [rank for rank in ranks if not rank.beat.inside]
    if outside:
        first = min(_progress(rank) for rank in outside)
        found = [rank for rank in outside if _progress(rank) == first]
        return Blame(found, sure=not (queued and all(rank.beat.phase in QUEUED_PHASES for rank in found)))
    behind = min(rank.beat.collectives for rank in ranks)  # one has left out a collective, or all wait for a machine
    return Blame([rank for rank in ranks if rank.beat.collectives == behind], sure=False)


def _progress(rank: Rank) -> tuple[int, int, int, int]:
    return rank.beat.collectives, rank.beat.epoch, rank.beat.batch, rank.beat.phase


def describe(blame: Blame, ranks: list[Rank], seconds: float, world_size: int) -> str:
    """Say in a line who is stuck, where, and for how long.

    Args:
        blame: of `find_blame`.
        ranks: all of the machine.
        seconds: without a sign of life.
        world_size: ranks of all machines.
    """
    first = blame.ranks[0]
    if len(blame.ranks) == 1 and (first.state in "ZTD" or not first.beat.inside):
        text = _one(first, seconds) + ("; the others wait for it" if world_size > 1 else "")
    else:
        text = f"nothing moves for {seconds:.0f} s: {_list(blame.ranks)}"
        rest = [rank for rank in ranks if rank not in blame.ranks]
        if rest:
            text += f"; {_list(rest)}, " + ("which entered more collectives" if first.beat.inside else "behind it")
    if not blame.sure and world_size > len(ranks):
        text += "; they may wait for another machine"
    return text


def _one(rank: Rank, seconds: float) -> str:
    named, beat = f"rank {rank.beat.rank}", rank.beat
    where = f"{Phase(beat.phase).words} for {seconds:.0f} s{_place(beat)}"
    text = {
        "Z": f"{named} is gone; it was in {where}",
        "T": f"{named} is stopped (process {beat.pid}, kill -CONT {beat.pid} lets it go on); it has been in {where}",
        "D": f"{named} waits for a disk or a device (process {beat.pid}); it has been in {where}",
    }.get(rank.state, f"{named} has been in {where}")
    for child in rank.children:
        if child.state in "TD":
            how = "is stopped" if child.state == "T" else "waits for a disk or a device"
            text += f"; its process {child.pid} ({child.name}) {how}"
    return text


def _place(beat: Beat) -> str:
    return f" (batch {beat.batch + 1} of epoch {beat.epoch + 1})" if beat.epoch >= 0 else ""


def _list(ranks: list[Rank]) -> str:
    parts = [_short(rank) for rank in ranks[:LISTED]]
    return ", ".join(parts) + (f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else "")


def _short(rank: Rank) -> str:
    inside = ", waiting for others" if rank.beat.inside else ""
    return f"rank {rank.beat.rank} in {Phase(rank.beat.phase).words}{_place(rank.beat)}{inside}"


# Processes ------------------------------------------------------------------------------------------------------------


def read_process(pid: int) -> Process | None:
    """Look at a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
    except OSError:
        return None
    state, parent = tail.split()[:2]
    return Process(pid, head.partition("(")[2], state, int(parent))


def descendants(pid: int) -> list[Process]:
    """Return the children of a process and theirs, but for this process."""
    everyone = [read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
    processes = [process for process in everyone if process and process.pid != os.getpid()]
    found = [pid]
    for ancestor in found:  # grows while it is walked through
        found += [process.pid for process in processes if process.parent == ancestor]
    return [process for process in processes if process.pid in found[1:]]


def look(memory: bytes, children: bool) -> list[Rank]:
    """Look at all ranks of the machine.

    Args:
        memory: the heartbeats.
        children: whether to look at their processes as well, which takes some milliseconds.
    """
    ranks = []
    for beat in read_beats(memory):
        process = read_process(beat.pid)
        state = process.state if process else "Z"
        ranks.append(Rank(beat, state, descendants(beat.pid) if children and process else []))
    return ranks


def stack_of(pid: int, stacks: int) -> str:
    """Ask a process for its Python stacks.

    Args:
        pid: of a rank, or of a process that it has forked.
        stacks: descriptor of the file that they come to.

    Returns:
        "" if there was no answer.
    """
    size = os.fstat(stacks).st_size
    os.kill(pid, STACK_SIGNAL)
    end, seen = time.monotonic() + ANSWER, size
    while time.monotonic() < end:
        time.sleep(0.05)
        now = os.fstat(stacks).st_size
        if now == seen > size:
            break
        seen = now
    return os.pread(stacks, seen - size, size).decode("utf-8", "replace").rstrip()


# The watch ------------------------------------------------------------------------------------------------------------


class Watch:
    """What the watchdog knows from one look to the next.

    Time counts only while this process runs: after a machine, or all of a job, was suspended nobody is late.

    Args:
        beats: descriptor of the heartbeats.
        stacks: descriptor of the file for stacks.
        warning: seconds without a sign of life before a line; 0 is never.
        timeout: seconds before the run is ended; 0 is never.
        world_size: ranks of all machines.
        queued: see `find_blame`.
    """

    def __init__(
        self, beats: int, stacks: int, warning: float, timeout: float, world_size: int, queued: bool = False
    ) -> None:
        self.beats, self.stacks = beats, stacks
        self.warning, self.timeout = warning, timeout
        self.world_size, self.queued = world_size, queued
        limits = [limit for limit in (warning, timeout) if limit]
        self.poll = max(min(min(limits, default=SLOWEST_POLL) / POLLS, SLOWEST_POLL), FASTEST_POLL)
        self.idle, self.looked = 0.0, time.monotonic()
        self.times: list[int] = []
        self.named = ""  # whom the last line was about; "" if nothing was said of this stall
        self.given_up = False

    def look(self) -> bool:
        """Look at the ranks once, and do what is due.

        Returns:
            Whether there is anything left to watch.
        """
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 3 * self.poll), now
        ranks = look(self._memory(), children=False)
        if all(rank.state in "ZX" for rank in ranks):
            return False
        times = [rank.beat.time for rank in ranks]
        if times != self.times:
            if self.named:
                say(f"{self.named} goes on after {self.idle:.0f} s")
            self.times, self.idle, self.named, self.given_up = times, 0.0, "", False
            return True
        alone = self.world_size == 1 and ranks[0].state == "T"  # nobody waits: Ctrl-Z, or a user needs the device
        if not alone and not any(rank.state == "t" for rank in ranks):  # nor while somebody looks with a debugger
            self.idle += passed
        if self.warning and self.idle >= self.warning and not self.named:
            self._warn()
        if self.timeout and self.idle >= self.timeout and not self.given_up:
            self.given_up = True
            return not self._end()
        return True

    def _memory(self) -> bytes:
        return os.pread(self.beats, os.fstat(self.beats).st_size, 0)

    def _warn(self) -> None:
        ranks = look(self._memory(), children=True)
        blame = find_blame(ranks, self.queued)
        self.named = f"rank {blame.ranks[0].beat.rank}" if len(blame.ranks) == 1 else "the run"
        say(describe(blame, ranks, self.idle, self.world_size))

    def _end(self) -> bool:
        """End the ranks of this machine; not if they may be waiting for another one, whose watchdog ends its own."""
        ranks = look(self._memory(), children=True)
        blame = find_blame(ranks, self.queued)
        text = describe(blame, ranks, self.idle, self.world_size)
        limit = f"--stall-timeout {self.timeout:g}"
        if self.world_size > len(ranks) and not blame.sure:
            say(f"{text}. {limit} has passed, but the ranks that are stuck must be on another machine")
            return False
        say(f"{text}. {limit} has passed: the run is ended. Where its ranks are:")
        for rank in ranks:
            self._say_stack(rank, deep=rank in blame.ranks)
        leave_note(f"the run was stuck: {text} ({limit})")
        victims = [rank.beat.pid for rank in ranks]
        victims += [child.pid for rank in ranks for child in descendants(rank.beat.pid)]
        for pid in dict.fromkeys(victims):
            kill(pid)
        return True

    def _say_stack(self, rank: Rank, deep: bool) -> None:
        """Say where a rank is, in Python; of one that is to blame also where its loader processes are."""
        people = [(_short(rank), rank.beat.pid, rank.state)]
        if deep:
            loaders = [child for child in rank.children if child.name.startswith("loader ")]
            people += [(f"{child.name} of rank {rank.beat.rank}", child.pid, child.state) for child in loaders]
        for named, pid, state in people:
            stack = ""
            if state not in "ZXTt":
                with contextlib.suppress(ProcessLookupError):
                    stack = stack_of(pid, self.stacks)
            why = {"T": "it is stopped", "t": "a debugger holds it", "Z": "it is gone", "X": "it is gone"}
            silent = f"does not answer: {why.get(state, 'it waits in the kernel')}"
            say(f"{named}, process {pid}:" + (f"\n{stack}" if stack else f" {silent}"))


def kill(pid: int) -> None:
    """End a process at once, also a stopped one; it may be gone already."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def leave_note(text: str) -> None:
    """Tell the launcher, if there is one, why its workers are killed."""
    with contextlib.suppress(KeyError, OSError):  # it is said on stderr anyway
        folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
        with open(os.path.join(folder, STALLED), "w", encoding="utf-8") as file:
            file.write(text)


def say(text: str) -> None:
    """Print a line on stderr, below a progress bar that may have left its own open."""
    with contextlib.suppress(OSError):  # nobody listens
        os.write(2, f"{chr(10) if os.isatty(2) else ''}WARNING: {text}\n".encode())


def main() -> None:
    """Watch until the ranks are gone, or the process that started this one."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    beats, stacks, starter, warning, timeout, world_size, queued = sys.argv[1:]
    watch = Watch(int(beats), int(stacks), float(warning), float(timeout), int(world_size), queued == "1")
    while os.getppid() == int(starter) and watch.look():
        time.sleep(watch.poll)


if __name__ == "__main__":
    main()
