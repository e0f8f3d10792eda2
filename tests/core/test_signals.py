"""Ctrl-C at the worst moments: while a process is being forked, where Python drops what a handler raises."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, flags, make_data
from utils.core.signals import PATIENCE, SAME_MOMENT, STOP_SIGNALS, interrupts_held

# A process that presses Ctrl-C itself, in a hook of its fork number FORK.
AT_FORK = """
import itertools, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this is run in the background
numbers = itertools.count(1)
def hook():
    if next(numbers) == int(os.environ["FORK"]):
        os.kill(os.getpid(), signal.SIGINT)
os.register_at_fork(after_in_parent=hook)
"""
TRAIN = "runpy.run_path(sys.argv[0], run_name='__main__')"
SCAN = """
from utils.data.scan import in_processes
from utils.core.errors import run_cli
run_cli(lambda: print(*in_processes(lambda item: item, list(range(8)), 2)))
"""


def interrupted(fork: int, code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = f"{AT_FORK}\nsys.argv = {[str(PROJECT / 'train.py'), *arguments]}\n{code}"
    environment = CHILD_ENVIRONMENT | {"PYTHONPATH": str(PROJECT), "FORK": str(fork)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize(
    "fork", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["training loader", "first validation"]
)
def test_while_a_loader_starts(fork: int, tmp_path: Path) -> None:
    """The run ends, with the status of Ctrl-C; it does not go on as if nothing had happened.

    Before the first batch there is nothing to save; in the validation of the first epoch there is.
    """
    line = flags(make_data(tmp_path / "data"), tmp_path / "runs", "--workers 2 --epochs 2")
    done = interrupted(fork, TRAIN, *line, cwd=tmp_path)
    going_on = [f"go on with: python {PROJECT / 'train.py'} --resume {tmp_path / 'runs/run'}"] * (fork == 2)
    said = done.stderr.splitlines()
    assert done.returncode == {1: 130, 2: 143}[fork]
    assert said[said.index("stopped by Ctrl-C") :] == ["stopped by Ctrl-C", *going_on]
    assert "Exception ignored" not in done.stderr
    assert [path.name for path in (tmp_path / "runs/run/weights").iterdir()] == ["last.pt"] * (fork == 2)
    assert (tmp_path / "runs/run/RESUME").exists() is (fork == 2)


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stopped_run_says_how_to_go_on(epochs: int, tmp_path: Path) -> None:
    """In the second epoch, when something is saved, and in the last validation, whose run is not at its end either.

    A file tells it to schedulers, as for runs that were stopped well.
    """
    code = """
        import signal, sys
        import train
        from utils.core.errors import run_cli
        step = {"1": "finish", "2": "train_epoch"}[sys.argv[1]]
        before = getattr(train, step)
        def interrupted(run, *arguments):
            if run.state.epoch == 1:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.raise_signal(signal.SIGINT)
            return before(run, *arguments)
        setattr(train, step, interrupted)
        run_cli(lambda: train.main(sys.argv[2:]))
    """
    line = flags(make_data(tmp_path / "data"), tmp_path / "my runs", f"--epochs {epochs}")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(epochs), *line],
        cwd=PROJECT,
        env=CHILD_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 130, done
    said = done.stderr.splitlines()[done.stderr.splitlines().index("stopped by Ctrl-C") :]
    command = f"python train.py --resume '{tmp_path}/my runs/run'"  # in the folder of the script
    assert said[1:] == [f"go on with: {command}"]
    assert (tmp_path / "my runs/run/RESUME").read_text() == f"{command}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize("fork", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_while_the_scan_starts(fork: int, tmp_path: Path) -> None:
    done = interrupted(fork, SCAN, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_held_and_let_through() -> None:
    """Once, when the block is over, to the handler that was there."""
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_held():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT] * 2
        with interrupts_held():
            pass
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize(
    ("numbers", "pause", "status"),
    [
        ([signal.SIGINT, signal.SIGUSR1, signal.SIGHUP], 0.0, 7),
        ([signal.SIGTERM], 0.0, 7),
        ([signal.SIGTERM, signal.SIGTERM], 0.0, 7),  # from a scheduler and the launcher
        ([signal.SIGTERM, signal.SIGTERM], SAME_MOMENT + 0.1, -signal.SIGTERM),
    ],
)
def test_a_child_that_has_no_handlers_yet(numbers: list[signal.Signals], pause: float, status: int) -> None:
    """It leaves to its parent what all of a group get, and serves on for a while after SIGTERM; not for ever."""
    befores = {number: signal.signal(number, lambda number, frame: None) for number in STOP_SIGNALS}
    try:
        with interrupts_held():
            child = os.fork()
            if child == 0:
                for number in numbers:
                    signal.raise_signal(number)
                    time.sleep(pause)
                asked = signal.SIGTERM in numbers
                os._exit(7 if (0 < signal.alarm(0) <= PATIENCE) == asked else 1)
    finally:
        for number, before in befores.items():
            signal.signal(number, before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_where_nothing_can_be_held() -> None:
    """In other threads, and where Ctrl-C is ignored."""
    entered = []

    def enter() -> None:
        with interrupts_held():
            entered.append(signal.getsignal(signal.SIGINT))

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        enter()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert entered == [signal.SIG_IGN, signal.default_int_handler]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at what a process has loaded")
def test_while_torch_is_imported(tmp_path: Path) -> None:
    """As other programs end: no traceback of a module that has nothing to do with it."""
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where this is run in the background
    )
    while process.poll() is None and "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGINT, "")


@pytest.mark.slow
def test_a_script_that_is_run_by_something_else(tmp_path: Path) -> None:
    """A notebook's %run, a debugger or a profiler keeps its process, and its Ctrl-C."""
    code = f"""
        import runpy, signal, sys
        sys.argv = ["train.py", "--data", "nowhere.yaml"]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            runpy.run_path({str(PROJECT / "train.py")!r}, run_name="__main__")
        except SystemExit as end:
            print("kept", end.code, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=CHILD_ENVIRONMENT | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "kept 2 True\n", done.stderr


# A process whose main thread goes to where no handler runs, like one that waits for a GPU.
IN_C = """
import ctypes, os, signal, sys, time
from utils.core import signals as interrupts
interrupts.IN_C = 1.0

interrupts.SAME_MOMENT = 0.5

def wait_in_c():
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):  # the second time for good
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

with interrupts.stops_end_the_process(), interrupts.stops_reach_c():
    if "child" in sys.argv and not os.fork():
        with interrupts.StopRequest().heeded():
            os.write(1, b"ready\\n")
            wait_in_c()
    if "twice" in sys.argv:
        with interrupts.StopRequest().heeded():
            signal.raise_signal(signal.SIGTERM)
        time.sleep(1)
    try:
        os.write(1, b"ready\\n")
        time.sleep(3) if "python" in sys.argv else wait_in_c()
    except interrupts.Stopped:
        time.sleep(2)  # what it does is its business
        print("saved")
print("end")
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def in_c() -> Iterator[Start]:
    """Starts such a process."""
    started = []

    def start(*how: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", IN_C, *how],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        )
        started.append(process)
        assert process.stdout is not None
        for _ in range(1 + ("child" in how)):
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)  # until it is in there
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a lock of the C library")
@pytest.mark.parametrize("how", ["once", "twice"])  # also if one was heard before
def test_sigterm_reaches_a_wait_in_c(in_c: Start, how: str) -> None:
    """NVIDIA/nccl#585: a rank whose GPU waits for one that is gone was there until it was killed, a minute later."""
    process = in_c(how)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a lock of the C library")
def test_a_stop_that_was_heard_takes_its_time(in_c: Start) -> None:
    process = in_c("python")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "saved\nend\n"
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a lock of the C library")
def test_signals_of_loader_processes_are_theirs(in_c: Start) -> None:
    process = in_c("child", "python")
    child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    os.kill(child, signal.SIGTERM)
    assert process.wait(20) == 0
