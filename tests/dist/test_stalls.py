"""F7: ranks that are stuck or slow are named from outside, and end the run within a limit; nothing of that is left.

pytest -m slow tests/dist/test_stalls.py
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.dist.launch import HEADER, descendants, free_port, kill, ranks_of, start, torchrun, wait_for, wait_for_end
from tests.runs import flags, make_data
from utils.torch_utils import load_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells stopped processes from others")

LIMIT = 240
WARNING, TIMEOUT = 2, 6
LIMITS = f"--stall-warning {WARNING} --stall-timeout {TIMEOUT}"
LINE = "--patience 0 --epochs 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), 24, 4)


def stuck(kind: str, rank: int, data: Path, folder: Path, *more: str, ranks: int = 2) -> tuple[int, str, float]:
    """Train with a rank that gets stuck or is slow; see `tests.dist.stuck`.

    Returns:
        Status, what was said, seconds from the header on to the end.
    """
    command = [sys.executable, "-m", "tests.dist.stuck", kind, str(rank), str(ranks)]
    said = folder / "said"
    with said.open("wb") as output:
        run = subprocess.Popen(
            [*command, *flags(data, folder, LINE, *more)],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        began = wait_for(HEADER, run, said)
        status = run.wait(LIMIT)
    finally:
        for pid in [*descendants(run.pid), run.pid]:
            kill(pid)
        run.wait()
    return status, said.read_text(), time.monotonic() - began


def watchdogs(pid: int) -> list[int]:
    """Watchdogs among the descendants of a process."""
    return [child for child in descendants(pid) if b"watchdog.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def loaders(pid: int) -> list[int]:
    """Loader processes among the descendants of a process."""
    return [child for child in descendants(pid) if Path(f"/proc/{child}/comm").read_text().startswith("loader ")]


def assert_ended(status: int, said: str, named: str) -> None:
    """The run was ended, its rank named before it and last of all."""
    assert status == 1, said
    assert re.search(rf"WARNING: {named}", said), said
    last = said.strip().splitlines()[-1]
    assert re.fullmatch(rf"the run was stuck: {named}.* \(--stall-timeout {TIMEOUT}\)", last), said
    assert "ran out of memory" not in said


@pytest.mark.gate
@pytest.mark.slow
def test_stopped_rank(data: Path, tmp_path: Path) -> None:
    """Row 21; SIGTERM would stay pending on it."""
    run = start([*flags(data, tmp_path, "--epochs 50", LIMITS), "--device", "cpu,cpu"], tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    everyone = descendants(run.pid)
    os.kill(everyone[1], signal.SIGSTOP)
    stopped = time.monotonic()
    status = run.wait(LIMIT)
    assert time.monotonic() - stopped < TIMEOUT + 60
    wait_for_end(everyone)
    said = (tmp_path / "said").read_text()
    assert_ended(status, said, rf"rank 1 is stopped \(process {everyone[1]}.*it has been in [a-z-]+ for \d s")
    assert re.search(rf"rank 1 in .*, process {everyone[1]}: does not answer: it is stopped", said)
    assert re.search(rf"rank 0 in .*waiting for others, process {everyone[0]}:\n.*most recent call first", said)


@pytest.mark.slow
def test_who_is_lost_among_three(data: Path, tmp_path: Path) -> None:
    """The first rank whose patience is over takes the others along: none of them counts as lost."""
    limits = "--epochs 500 --batch 6 --stall-warning 0 --stall-timeout 0 --dist-timeout 6"
    run = start([*flags(data, tmp_path, limits), "--device", "cpu,cpu,cpu"], tmp_path, tmp_path / "said")
    wait_for("1/500 100%", run, tmp_path / "said")
    everyone = descendants(run.pid)
    os.kill(ranks_of(run.pid)[2], signal.SIGSTOP)
    try:
        assert run.wait(LIMIT) == 1
    finally:
        for pid in everyone:
            kill(pid)
    said = (tmp_path / "said").read_text()
    lost = re.findall(r"rank [01] lost (.*?)[;,:]", said)
    assert lost and set(lost) <= {"rank 2", "another rank"}, said
    assert "rank 2" in lost, said


@pytest.mark.parametrize(
    ("kind", "rank", "named", "frame"),
    [
        pytest.param(
            "gil",
            1,
            r"rank 1 has been in forward for \d+ s \(batch 3 of epoch 1\); the others wait",
            "in <lambda>",
            marks=pytest.mark.slow,
        ),
        pytest.param("asleep", 0, "rank 0 has been in forward for", "in <lambda>", marks=pytest.mark.slow),
        pytest.param(
            "in_backward", 1, "rank 1 has been in backward for", "in hook", marks=(pytest.mark.slow, pytest.mark.gate)
        ),
        pytest.param("absent", 1, "rank 1 has been in step for", "in wait", marks=pytest.mark.slow),
        pytest.param(
            "callback", 0, "rank 0 has been in files and callbacks", "in on_epoch_end", marks=pytest.mark.slow
        ),
    ],
)
def test_stuck_in_code(data: Path, tmp_path: Path, kind: str, rank: int, named: str, frame: str) -> None:
    """Rows 22, 23, 24: the stacks of all ranks are shown, that of a rank which keeps Python's lock as well."""
    alone = "--no-sync-bn --nbs 4" if kind == "in_backward" else ""  # ranks meet at the end of backward passes only
    status, said, seconds = stuck(kind, rank, data, tmp_path, LIMITS, alone)
    assert_ended(status, said, named)
    assert seconds < 60
    stack = said.split(f"\nWARNING: rank {rank} in ")[1].split("\nWARNING: ")[0]
    assert re.search(rf"line \d+ {frame}", stack), said
    assert f"rank {1 - rank} in" in said and "waiting for others, process" in said


@pytest.mark.slow
def test_stuck_alone(data: Path, tmp_path: Path) -> None:
    """A run of one process, without a launcher to say why."""
    status, said, _ = stuck("asleep", 0, data, tmp_path, LIMITS, ranks=1)
    assert status == -signal.SIGKILL
    assert re.search(r"WARNING: rank 0 has been in forward for \d+ s \(batch 3 of epoch 1\)\n", said), said
    assert f"--stall-timeout {TIMEOUT} has passed: the run is ended" in said


@pytest.mark.slow
def test_suspended_alone(data: Path, tmp_path: Path) -> None:
    """Nobody waits for a run of one process: who suspends it wants that."""
    run = start(flags(data, tmp_path, LINE, LIMITS), tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    os.kill(run.pid, signal.SIGSTOP)
    time.sleep(TIMEOUT + 3)
    os.kill(run.pid, signal.SIGCONT)
    assert run.wait(LIMIT) == 0
    assert "is stopped" not in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_stopped_loader(data: Path, tmp_path: Path) -> None:
    """Row 25: the loader's process is named; it is stopped, and is gone in the end all the same."""
    line = flags(data, tmp_path, "--epochs 50 --workers 1", LIMITS)
    run = start([*line, "--device", "cpu,cpu"], tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    rank = descendants(run.pid)[1]
    worker = loaders(rank)[0]
    os.kill(worker, signal.SIGSTOP)
    status = run.wait(LIMIT)
    wait_for_end([worker])
    said = (tmp_path / "said").read_text()
    assert_ended(status, said, rf"rank 1 has been in loading for .*; its process {worker} \(loader 0\) is stopped")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [("slow_disk", 0), ("slow_labels", 0), ("slow_labels", 1)])
def test_slow_is_not_stuck(data: Path, tmp_path: Path, kind: str, rank: int) -> None:
    """Rows 29 and 30: longer than the limits, but not without progress."""
    status, said, seconds = stuck(kind, rank, data, tmp_path, "--stall-warning 4 --stall-timeout 5")
    assert status == 0, said
    assert "WARNING" not in said
    assert load_checkpoint(tmp_path / "run/weights/last.pt")["state"]["epoch"] == 2
    if kind == "slow_disk":
        assert seconds > 2 * 6


@pytest.mark.slow
def test_straggler(data: Path, tmp_path: Path) -> None:
    """Row 28: named with the share of the time that it costs, and the run goes on."""
    status, said, _ = stuck("slow", 1, data, tmp_path, "--stall-warning 10")
    assert status == 0, said
    found = re.findall(r"rank 1 was the slowest: the others waited (\d+)% of the epoch for it", said)
    assert len(found) == 2
    assert all(20 < int(share) < 100 for share in found)
    assert "rank 0 was the slowest" not in said


@pytest.mark.slow
def test_without_watchdog(data: Path, tmp_path: Path) -> None:
    """A watchdog that is killed takes nothing along."""
    run = start([*flags(data, tmp_path, LINE), "--device", "cpu,cpu"], tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    [watchdog] = watchdogs(run.pid)
    kill(watchdog)
    assert run.wait(LIMIT) == 0, (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victims", [slice(0, 1), slice(1, 2), slice(0, 3)])
def test_nothing_is_left(data: Path, tmp_path: Path, victims: slice) -> None:
    """Launcher, first rank or all of them are killed: the watchdog ends by itself, and so does all else."""
    run = start([*flags(data, tmp_path, "--epochs 50"), "--device", "cpu,cpu"], tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    everyone = [run.pid, *descendants(run.pid)]
    [watchdog] = watchdogs(run.pid)
    for pid in everyone[victims]:
        kill(pid)
    run.wait(LIMIT)
    wait_for_end([watchdog, *everyone])


@pytest.mark.slow
def test_two_machines(data: Path, tmp_path: Path) -> None:
    """The watchdog of the machine whose rank is stuck ends it; the other machine's knows that it only waits."""
    port, done = free_port(), {}
    line = flags(data, tmp_path, LINE, LIMITS)

    def machine(number: int) -> None:
        script = ["-m", "tests.dist.stuck", "asleep", "1", "1", *line]
        done[number] = torchrun(script, 1, nnodes=2, node_rank=number, port=port, timeout=LIMIT)

    threads = [threading.Thread(target=machine, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done[0].returncode and done[1].returncode
    assert "rank 1 has been in forward for" in done[1].stderr
    assert f"--stall-timeout {TIMEOUT} has passed: the run is ended" in done[1].stderr
    assert re.search(r"nothing moves for \d+ s: rank 0 in .*; they may wait for another machine", done[0].stderr)
    assert "the run is ended" not in done[0].stderr
