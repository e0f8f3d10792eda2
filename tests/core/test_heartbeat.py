"""Signs of life, and what the watchdog makes of them."""

import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common import PROJECT, wait_until
from utils.core import heartbeat
from utils.core.heartbeat import SLOT, Beat, Phase, alive, beat, beating, begun, collective, read_beats, waiting
from utils.dist.place import ALONE
from utils.dist.stalls import find_slowest, watched
from utils.dist.watchdog import (
    STACK_SIGNAL,
    Process,
    Rank,
    Watch,
    descendants,
    describe,
    find_blame,
    read_process,
    stack_of,
)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the watchdog needs /proc")


@pytest.fixture
def slots() -> Iterator[mmap.mmap]:
    """Memory for two ranks, of which this process is the second."""
    with mmap.mmap(-1, 2 * SLOT.size) as memory:
        heartbeat.attach(memory, 1, 5)
        yield memory
        heartbeat.own.detach()  # a map in use can't be closed


def test_what_is_written(slots: mmap.mmap) -> None:
    [start] = read_beats(slots[:])
    assert start[:2] == (5, os.getpid())
    assert start[3:] == (Phase.START, 0, 0, -1, -1)
    beat(Phase.FORWARD, 2, 7)
    begun()
    with waiting:
        [inside] = read_beats(slots[:])
    assert inside[3:] == (Phase.FORWARD, 1, 1, 2, 7)
    with collective:
        pass
    [after] = read_beats(slots[:])
    assert after[3:] == (Phase.FORWARD, 0, 2, 2, 7)
    assert start.time < inside.time < after.time


def test_every_item_is_a_sign_of_life(slots: mmap.mmap) -> None:
    times = [read_beats(slots[:])[0].time for _ in beating(range(3))]
    assert len(set(times)) == 3


def test_signs_of_life_in_one_long_call(slots: mmap.mmap) -> None:
    """While it lasts, not after."""
    [start] = read_beats(slots[:])
    with alive():
        wait_until(lambda: read_beats(slots[:])[0].time > start.time)
    [later] = read_beats(slots[:])
    time.sleep(1.2)
    [end] = read_beats(slots[:])
    assert later.time == end.time


def test_whoever_leaves_is_not_watched(slots: mmap.mmap) -> None:
    heartbeat.release()
    beat()
    assert read_beats(slots[:]) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forked processes")
def test_a_forked_process_is_silent(slots: mmap.mmap) -> None:
    """A loader process that goes on must not hide that its rank is stuck."""
    before = slots[:]
    pid = os.fork()
    if pid == 0:
        beat(Phase.END)
        with collective:
            os._exit(0)
    os.waitpid(pid, 0)
    assert slots[:] == before


def test_time_in_collectives() -> None:
    before, began = heartbeat.blocked_seconds(), time.perf_counter()
    with collective:
        time.sleep(0.05)
    with waiting:
        time.sleep(0.05)
    blocked = time.perf_counter() - began
    time.sleep(0.05)
    waiting.leave()  # nothing was entered
    assert 0.1 <= heartbeat.blocked_seconds() - before <= blocked


def test_costs_next_to_nothing() -> None:
    """A step with SyncBN has about 250 of them and takes a tenth of a second at least; measured 0.4 microseconds."""
    began = time.process_time()
    for _ in range(10_000):
        beat(Phase.FORWARD, 0, 1)
    assert time.process_time() - began < 0.1


# Whom to blame --------------------------------------------------------------------------------------------------------


def rank(
    number: int,
    phase: Phase,
    collectives: int = 10,
    inside: bool = False,
    state: str = "S",
    batch: int = 3,
    children: tuple[Process, ...] = (),
) -> Rank:
    return Rank(Beat(number, 100 + number, 0, phase, int(inside), collectives, 0, batch), state, list(children))


WAITING = rank(0, Phase.FORWARD, 11, inside=True)


@pytest.mark.parametrize(
    ("ranks", "to_blame", "sure"),
    [
        ([WAITING, rank(1, Phase.LOADING)], [1], True),
        ([WAITING, rank(1, Phase.FORWARD, 11)], [1], True),  # has begun the collective, which does not help
        ([WAITING, rank(1, Phase.STEP, 10), rank(2, Phase.FORWARD, 11)], [1], True),
        ([rank(0, Phase.BACKWARD), rank(1, Phase.FORWARD)], [1], True),  # equally many collectives: the earlier phase
        ([rank(0, Phase.LOADING, batch=4), rank(1, Phase.STEP, batch=3)], [1], True),  # ... of the earlier batch
        ([rank(0, Phase.LOADING), rank(1, Phase.LOADING)], [0, 1], True),
        ([rank(0, Phase.LOADING), rank(1, Phase.FORWARD, 11, inside=True, state="T")], [1], True),
        ([WAITING, rank(1, Phase.FORWARD, 11, state="D"), rank(2, Phase.LOADING, 9)], [1], True),
        ([rank(0, Phase.FORWARD, 11, inside=True, state="D"), rank(1, Phase.LOADING)], [1], True),
        ([WAITING, rank(1, Phase.FILES, 12, inside=True)], [0], False),  # one has left out a collective
        ([WAITING, rank(1, Phase.FORWARD, 11, inside=True)], [0, 1], False),
    ],
)
def test_blame(ranks: list[Rank], to_blame: list[int], sure: bool) -> None:
    blame = find_blame(ranks)
    assert [its.beat.rank for its in blame.ranks] == to_blame
    assert blame.sure is sure


def test_blame_where_collectives_are_queued() -> None:
    """A host may wait for another machine wherever it uses its device, but not while it loads."""
    assert not find_blame([rank(0, Phase.FORWARD), rank(1, Phase.FORWARD)], queued=True).sure
    assert find_blame([rank(0, Phase.FORWARD), rank(1, Phase.LOADING, 9)], queued=True).sure
    assert find_blame([rank(0, Phase.FORWARD), rank(1, Phase.FORWARD, state="T")], queued=True).sure


@pytest.mark.parametrize(
    ("ranks", "world_size", "text"),
    [
        (
            [WAITING, rank(1, Phase.LOADING)],
            2,
            "rank 1 has been in loading for 60 s (batch 4 of epoch 1); the others wait for it",
        ),
        ([rank(0, Phase.FILES)], 1, "rank 0 has been in files and callbacks for 60 s (batch 4 of epoch 1)"),
        (
            [WAITING, rank(1, Phase.LOADING, children=(Process(7, "loader 0", "T", 101), Process(8, "a", "S", 101)))],
            2,
            "rank 1 has been in loading for 60 s (batch 4 of epoch 1); its process 7 (loader 0) is stopped; the others "
            "wait for it",
        ),
        (
            [WAITING, rank(1, Phase.STEP, state="T")],
            2,
            "rank 1 is stopped (process 101, kill -CONT 101 lets it go on); it has been in step for 60 s (batch 4 of "
            "epoch 1); the others wait for it",
        ),
        (
            [WAITING, rank(1, Phase.FILES, 12, inside=True)],
            2,
            "nothing moves for 60 s: rank 0 in forward (batch 4 of epoch 1), waiting for others; rank 1 in files and "
            "callbacks (batch 4 of epoch 1), waiting for others, which entered more collectives",
        ),
        (
            [WAITING],
            2,
            "nothing moves for 60 s: rank 0 in forward (batch 4 of epoch 1), waiting for others; they may wait for "
            "another machine",
        ),
    ],
)
def test_words(ranks: list[Rank], world_size: int, text: str) -> None:
    assert describe(find_blame(ranks), ranks, 60.0, world_size) == text


# The watch ------------------------------------------------------------------------------------------------------------


class Watched:
    """A process that stands for a rank, its heartbeat, and a watch over it."""

    def __init__(self, warning: float, timeout: float, world_size: int = 2) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        self.beats, self.stacks = os.memfd_create("beats"), os.memfd_create("stacks")
        self.beat(1)
        self.watch = Watch(self.beats, self.stacks, warning, timeout, world_size)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.beats)
        os.close(self.stacks)

    def beat(self, time_of_beat: int) -> None:
        values = (0, self.process.pid, time_of_beat, Phase.LOADING, 0, 0, 0, 0)
        os.pwrite(self.beats, SLOT.pack(*values), 0)

    def looks(self, count: int) -> list[bool]:
        found = []
        for _ in range(count):
            time.sleep(self.watch.poll)
            found.append(self.watch.look())
        return found


@needs_linux
def test_one_line_for_a_stall_and_one_for_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    with Watched(0.7, 0) as one:
        one.looks(16)
        one.beat(2)
        one.looks(2)
        one.process.kill()
        wait_until(lambda: not one.watch.look())  # nobody is left
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert re.fullmatch(r"WARNING: rank 0 has been in loading for 1 s \(batch 1 of epoch 1\); the others .*", said[0])
    assert re.fullmatch(r"WARNING: rank 0 goes on after \d+ s", said[1])


@needs_linux
def test_the_rank_is_killed(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a stopped one; the launcher finds out why."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with Watched(0, 0.5) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        assert one.looks(20).count(False) >= 1
        assert one.process.wait(60) == -signal.SIGKILL
    assert "the run is ended" in capfd.readouterr().err
    note = (tmp_path / "stalled").read_text()
    assert note.startswith(f"the run was stuck: rank 0 is stopped (process {one.process.pid}")


@needs_linux
def test_time_of_a_suspended_watchdog_does_not_count(capfd: pytest.CaptureFixture[str]) -> None:
    """All of a job may be suspended, for hours; then nobody is late."""
    with Watched(0.5, 1) as one:
        one.looks(2)
        time.sleep(1.5)
        assert one.looks(1) == [True]
        one.process.kill()
    assert capfd.readouterr().err == ""


@needs_linux
def test_ctrl_z_of_a_single_process(capfd: pytest.CaptureFixture[str]) -> None:
    with Watched(0.5, 1, world_size=1) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        assert all(one.looks(30))
        one.process.kill()
    assert capfd.readouterr().err == ""


@needs_linux
def test_stacks(tmp_path: Path) -> None:
    """Of a process that keeps Python's lock; nothing of one that is stopped."""
    script = (
        "import ctypes, faulthandler, sys\n"
        "faulthandler.register(int(sys.argv[2]), int(sys.argv[1]))\n"
        "def stuck():\n    ctypes.PyDLL(None).sleep(1000)\n"
        "print('ready', flush=True)\nstuck()\n"
    )
    stacks = os.open(tmp_path / "stacks", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    command = [sys.executable, "-c", script, str(stacks), str(STACK_SIGNAL)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(stacks,)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda: "in stuck" in stack_of(process.pid, stacks))
        os.kill(process.pid, signal.SIGSTOP)
        assert stack_of(process.pid, stacks) == ""
        process.kill()


@needs_linux
def test_processes() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        wait_until(lambda: descendants(process.pid))
        [child] = descendants(process.pid)
        assert child.parent == process.pid
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: (found := read_process(child.pid)) is not None and found.state == "T")
        os.kill(child.pid, signal.SIGKILL)
        process.kill()
    assert read_process(process.pid) is None


def watchdogs() -> list[int]:
    """Watchdogs that this process has started."""
    pids = [child.pid for child in descendants(os.getpid())]
    return [pid for pid in pids if b"watchdog.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@needs_linux
def test_a_watchdog_of_its_own() -> None:
    with watched(ALONE, 60.0, 0.0):
        [watchdog] = watchdogs()
        time.sleep(0.5)
        status = Path(f"/proc/{watchdog}/status").read_text()
        resident = int(status.split("VmRSS:")[1].split()[0])
        assert resident < 20_000  # kB; measured 11,000
    assert not watchdogs()


@needs_linux
def test_no_watchdog_where_nobody_wants_one() -> None:
    with watched(ALONE, 0.0, 0.0):
        assert not watchdogs()


@needs_linux
def test_a_watchdog_ends_with_its_starter() -> None:
    script = (
        f"import os, sys, time\nsys.path.insert(0, {str(PROJECT)!r})\n"
        "from utils.dist.stalls import watched\nfrom utils.dist.place import ALONE\n"
        "with watched(ALONE, 60, 0):\n    print('ready', flush=True)\n    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        [watchdog] = [child for child in descendants(process.pid) if child.state != "Z"]
        process.kill()
    wait_until(lambda: read_process(watchdog.pid) is None)


# Slow ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocked", "seconds", "expected"),
    [
        ([40.0, 6.0], 100.0, (1, 0.34)),
        ([6.0, 40.0, 50.0, 48.0], 100.0, (0, 0.4)),
        ([40.0, 25.0], 100.0, None),  # 15 %
        ([90.0, 89.0], 100.0, None),  # the network is slow, not a rank
        ([3.0, 0.0], 4.0, None),  # too short to tell
    ],
)
def test_slowest(blocked: list[float], seconds: float, expected: tuple[int, float] | None) -> None:
    found = find_slowest(blocked, seconds)
    assert found == (expected and (expected[0], pytest.approx(expected[1])))
