"""F6: one process fails, in any way and at any moment; all end within seconds, nothing is left, the run goes on.

pytest -m slow tests/dist/test_processes.py
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.dist.launch import HEADER, descendants, free_port, kill, ranks_of, start, wait_for, wait_for_end
from tests.dist.machines import Machine, all_ended, started, torchrun_line
from tests.runs import assert_same_run, flags, make_data
from utils.torch_utils import load_checkpoint

LIMIT = 240
LINE = "--batch 4 --epochs 3 --val-batch 4 --patience 0 --device cpu,cpu --save-steps 1"
SOON = 45  # seconds to the end of all; measured 1 to 4 on two busy cores; a minute is for saving


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), 24, 60)


def ended(run: "subprocess.Popen[bytes]", everyone: list[int]) -> tuple[int, float]:
    began = time.monotonic()
    status = run.wait(LIMIT)
    wait_for_end(everyone)
    return status, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_before_the_ranks_have_met(data: Path, tmp_path: Path, rank: int) -> None:
    run = start(flags(data, tmp_path, LINE), tmp_path, tmp_path / "said")
    while len(ranks := ranks_of(run.pid)) < 2:
        time.sleep(0.02)
    kill(ranks[rank])
    status, seconds = ended(run, [run.pid, *ranks])
    assert status == 137
    assert seconds < SOON
    assert f"rank {rank} was killed by SIGKILL" in (tmp_path / "said").read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.gate
@pytest.mark.slow
def test_killed_in_validation(data: Path, tmp_path: Path) -> None:
    """The validation is done again, and results.csv has a row for each epoch."""
    for name in ("whole", "killed"):
        line = [*flags(data, tmp_path, LINE), "--name", name]
        run = start(line, tmp_path, tmp_path / f"{name}.said")
        if name == "killed":
            wait_for("1/3 100%", run, tmp_path / f"{name}.said")
            time.sleep(0.2)
            everyone = descendants(run.pid)
            kill(ranks_of(run.pid)[1])
            status, seconds = ended(run, [run.pid, *everyone])
            assert (status, seconds < SOON) == (137, True)
        else:
            assert run.wait(LIMIT) == 0
    run = start(["--resume", str(tmp_path / "killed")], tmp_path, tmp_path / "resumed")
    assert run.wait(LIMIT) == 0, (tmp_path / "resumed").read_text()
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["train.py", "torchrun"])
def test_all_raise_at_once(data: Path, tmp_path: Path, launcher: str) -> None:
    """Row 7: one traceback, however many ranks met the same; the run goes on from its last step."""
    before = torchrun_line(Machine(0), free_port(), "127.0.0.1", nnodes=1, nproc=2) if launcher == "torchrun" else []
    line = [*flags(data, tmp_path, LINE, "--nbs 4"), "--device", "cpu" if before else "cpu,cpu"]
    command = [*before, "-m", "tests.dist.stuck", "broken", -1, 2, *line]
    with started(Machine(0), command, tmp_path / "said") as run:
        all_ended([run], 2 * LIMIT)
    assert run.process.returncode == 1
    by_ranks = run.said.split("torch/distributed/elastic/multiprocessing/api.py")[0]  # torchrun adds a summary
    assert by_ranks.count("Traceback (most recent call last)") == 1, run.said
    assert by_ranks.count("RuntimeError: broken on purpose\n") == 1
    if not before:
        last, going_on = run.said.splitlines()[-2:]
        assert re.fullmatch("2 ranks failed with this error, rank [01] with status 1; all ranks were ended", last)
        assert going_on == f"go on with: python {PROJECT / 'train.py'} --resume {tmp_path / 'run'}"
    state = load_checkpoint(tmp_path / "run/weights/last.pt")["state"]
    assert state["epoch"] == 0 and state["batch"] in (1, 2)
    again = start(["--resume", str(tmp_path / "run"), "--epochs", "1"], tmp_path, tmp_path / "resumed")
    assert again.wait(LIMIT) == 0, (tmp_path / "resumed").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGSEGV, marks=pytest.mark.gate), signal.SIGABRT])
def test_crashed(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The stack of the process that crashed is there to be read."""
    run = start(flags(data, tmp_path, LINE), tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    everyone = descendants(run.pid)
    os.kill(ranks_of(run.pid)[1], number)
    status, seconds = ended(run, [run.pid, *everyone])
    said = (tmp_path / "said").read_text()
    assert status == 128 + number
    assert seconds < SOON
    assert f"rank 1 was killed by {number.name}" in said
    assert "Fatal Python error" in said


@pytest.mark.slow
def test_what_a_dead_run_left(data: Path, tmp_path: Path) -> None:
    """Row 40: nobody waits for its locks, and its files in the way of saves and launches are removed.

    Its image cache in shared memory has no name and went with it.
    """
    temporary, weights, shared = tmp_path / "temporary", tmp_path / "run/weights", Path("/dev/shm")
    temporary.mkdir()
    own = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    before = {path.name for path in shared.glob("*")} if shared.exists() else set()
    line = flags(data, tmp_path, LINE, "--epochs 4 --cache ram --exist-ok")
    run = start(line, tmp_path, tmp_path / "said", env=environment)
    wait_for("1/4 100%", run, tmp_path / "said")
    everyone = [run.pid, *descendants(run.pid)]
    for pid in everyone:
        kill(pid)
    run.wait(LIMIT)
    wait_for_end(everyone)
    if shared.exists():
        assert not {name for name in {path.name for path in shared.glob("*")} - before if "lockstep" in name}
    assert len(list(temporary.glob("lockstep-launch-*"))) == 1
    owner = (tmp_path / "run/.lock").read_text()
    assert int(owner.split()[1]) in everyone
    (weights / f".last.pt.{everyone[1]}.tmp").write_bytes(b"half of it")

    began = time.monotonic()
    run = start(["--resume", str(tmp_path / "run")], tmp_path, tmp_path / "resumed", env=environment)
    assert run.wait(LIMIT) == 0, (tmp_path / "resumed").read_text()
    assert time.monotonic() - began < LIMIT / 2
    assert "WARNING" not in (tmp_path / "resumed").read_text()
    assert load_checkpoint(weights / "last.pt")["state"]["epoch"] == 4
    assert not list(weights.glob(".*"))
    assert not list(temporary.glob("lockstep-*"))
    assert (tmp_path / "run/.lock").read_text() != owner


@pytest.mark.gate
@pytest.mark.slow
def test_ctrl_c_twice(data: Path, tmp_path: Path) -> None:
    """The second one does not wait; what is on the disk is whole."""
    run = start(flags(data, tmp_path, LINE, "--epochs 50"), tmp_path, tmp_path / "said")
    wait_for("2/50 100%", run, tmp_path / "said")
    everyone = descendants(run.pid)
    os.kill(run.pid, signal.SIGINT)
    time.sleep(0.05)
    os.kill(run.pid, signal.SIGINT)
    status, seconds = ended(run, [run.pid, *everyone])
    assert status in (130, 143, -signal.SIGINT)
    assert seconds < SOON
    assert load_checkpoint(tmp_path / "run/weights/last.pt")["state"]["epoch"] >= 1
    assert load_checkpoint(tmp_path / "run/weights/last.prev.pt")


@pytest.mark.slow
def test_a_rank_that_does_not_heed_signals(data: Path, tmp_path: Path) -> None:
    """Stuck in a system call, as it were: it is killed when its time to save is over."""
    run = start(flags(data, tmp_path, LINE, "--epochs 50"), tmp_path, tmp_path / "said")
    wait_for("1/50 100%", run, tmp_path / "said")
    everyone = descendants(run.pid)
    os.kill(ranks_of(run.pid)[1], signal.SIGSTOP)
    os.kill(run.pid, signal.SIGTERM)
    status, seconds = ended(run, [run.pid, *everyone])
    assert status == 143
    assert 50 < seconds < 180  # a minute is left to save
    assert load_checkpoint(tmp_path / "run/weights/last.pt")
