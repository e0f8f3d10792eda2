"""F4, F5: runs that are asked to stop: all ranks at the same step, saved, with a status that says so, and resumable.

pytest -m slow tests/dist/test_stops.py
"""

import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.dist.launch import HEADER, descendants, free_port, ranks_of, start, torchrun, wait_for, wait_for_end
from tests.runs import assert_same_run, flags, make_data
from utils.torch_utils import load_checkpoint

LIMIT = 240
LINE = "--batch 4 --epochs 3 --val-batch 4 --workers 1 --patience 0"
RESUMABLE = 143


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validation takes about as long as training."""
    return make_data(tmp_path_factory.mktemp("data"), 24, 60)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that was left alone, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    run = start([*flags(data, folder, LINE), "--device", "cpu,cpu"], folder, folder / "said")
    assert run.wait(LIMIT) == 0, (folder / "said").read_text()
    return folder / "run", time.monotonic() - began


def stop(
    data: Path, folder: Path, moment: float, victim: str, number: signal.Signals, after: str = ""
) -> tuple[int, str, float]:
    """Start a run on two ranks and send it a signal.

    Args:
        data: of the run.
        folder: of the run.
        moment: seconds after its start, or after it has said something.
        victim: "launcher", "first rank", "last rank", or "all" with their loader workers, as schedulers do it.
        number: the signal.
        after: what it has said.

    Returns:
        Its status, what it said, and the seconds from the signal to the end of all its processes.
    """
    run = start([*flags(data, folder, LINE), "--device", "cpu,cpu"], folder, folder.with_suffix(".said"))
    if after:
        wait_for(after, run, folder.with_suffix(".said"))
    time.sleep(moment)
    everyone, ranks = [run.pid, *descendants(run.pid)], ranks_of(run.pid)
    victims = {"launcher": everyone[:1], "first rank": ranks[:1], "last rank": ranks[1:], "all": everyone}
    for pid in victims[victim] or everyone[:1]:  # there may be no ranks yet
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    asked = time.monotonic()
    status = run.wait(LIMIT)
    wait_for_end(everyone)
    return status, folder.with_suffix(".said").read_text(), time.monotonic() - asked


def assert_resumable(run_dir: Path, whole: Path, said: str, cwd: Path) -> None:
    """All ranks stopped at the same step, and going on ends where the run that was left alone did."""
    assert (run_dir / "RESUME").exists(), said
    command = f"python {PROJECT / 'train.py'} --resume {run_dir}"
    assert (run_dir / "RESUME").read_text() == f"{command}\n"
    assert said.splitlines()[-1] == f"go on with: {command}"
    assert "Traceback" not in said
    meters = load_checkpoint(run_dir / "weights/last.pt")["meters"]
    assert meters is None or len(set(meters[:, -1].tolist())) == 1
    run = start(["--resume", str(run_dir)], cwd, cwd / "resumed")
    assert run.wait(LIMIT) == 0, (cwd / "resumed").read_text()
    assert not (run_dir / "RESUME").exists()
    assert_same_run(whole, run_dir)


PHASES = {
    "first batches": (HEADER, 0.1),
    "validation": ("1/3 100%", 0.1),
    "second epoch": ("1/3 100%", 2.0),
}


@pytest.mark.parametrize(
    ("phase", "victim", "number"),
    [
        pytest.param("first batches", "launcher", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("validation", "last rank", signal.SIGUSR1, marks=(pytest.mark.slow, pytest.mark.gate)),
        pytest.param("validation", "launcher", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("second epoch", "all", signal.SIGTERM, marks=(pytest.mark.slow, pytest.mark.gate)),
        pytest.param("second epoch", "first rank", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("first batches", "all", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_stopped(
    data: Path, whole: tuple[Path, float], tmp_path: Path, phase: str, victim: str, number: signal.Signals
) -> None:
    after, moment = PHASES[phase]
    status, said, seconds = stop(data, tmp_path / "of", moment, victim, number, after)
    assert status == RESUMABLE, said
    assert seconds < 20  # measured 1 to 3
    assert_resumable(tmp_path / "of/run", whole[0], said, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_stopped_at_a_random_moment(data: Path, whole: tuple[Path, float], tmp_path: Path, number: int) -> None:
    """While torch is imported, labels are read, batches are trained, weights are validated or saved, or at the end."""
    moment = random.Random(number).random() * whole[1]
    victim = ("launcher", "first rank", "last rank", "all")[number % 4]
    status, said, seconds = stop(data, tmp_path / "of", moment, victim, signal.SIGTERM)
    assert seconds < 30
    run_dir = tmp_path / "of/run"
    if status == 0 or "measured again" in said:  # it was leaving when it was hit
        assert status in (0, RESUMABLE, -signal.SIGTERM)
        assert_same_run(whole[0], run_dir)
    elif (run_dir / "weights/last.pt").exists():
        assert status == RESUMABLE, said
        assert_resumable(run_dir, whole[0], said, tmp_path)
    else:  # nothing was trained yet; before Python has a handler the signal itself ends a process
        assert status in (RESUMABLE, -signal.SIGTERM), said
        assert "Traceback" not in said


@pytest.mark.lowest
@pytest.mark.slow
@pytest.mark.gate
def test_under_torchrun(data: Path, tmp_path: Path) -> None:
    """A launcher by hand ends with 1 whatever its workers end with: the file RESUME tells (docs/faults.md)."""
    line = flags(data, tmp_path, LINE, "--device cpu --epochs 50 --time-limit 1s")
    done = torchrun([PROJECT / "train.py", *line], 2, port=free_port(), cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 1
    assert "stopped by --time-limit" in done.stderr
    again = f"{PROJECT / 'train.py'} --resume {tmp_path / 'run'}"
    assert (tmp_path / "run/RESUME").read_text() == f"torchrun --standalone --nproc_per_node 2 {again}\n"
    assert len(set(load_checkpoint(tmp_path / "run/weights/last.pt")["meters"][:, -1].tolist())) == 1


@pytest.mark.slow
def test_ignored_signals_stay_ignored(data: Path, tmp_path: Path) -> None:
    """Nohup ignores SIGHUP, and a run that was started with it outlives its terminal."""
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    line = flags(data, tmp_path, LINE, "--epochs 1")
    run = start([*line, "--device", "cpu,cpu"], tmp_path, tmp_path / "said", **ignored)
    wait_for(HEADER, run, tmp_path / "said")
    for pid in [run.pid, *descendants(run.pid)]:
        os.kill(pid, signal.SIGHUP)
    assert run.wait(LIMIT) == 0, (tmp_path / "said").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_while_it_waits_for_the_first_rank(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """That wait is in C, where Python's handlers do not run: it lasted until the launcher killed the rank."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": nobody.getsockname()[1], "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        run = start(flags(data, tmp_path, LINE), tmp_path, tmp_path / "said", env=environment)
        nobody.settimeout(LIMIT)
        with nobody.accept()[0]:  # it is there, and never hears anything
            run.send_signal(number)
            assert run.wait(LIMIT) == -number, (tmp_path / "said").read_text()
    assert (tmp_path / "said").read_text() == ""
