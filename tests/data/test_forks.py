"""Children that never begin to run: what a fork beside a busy thread does to a Python up to 3.11."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, flags, make_data, results

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

# A process whose forked child number 1 waits in os.fork() for good, before any code of ours runs.
STILLBORN = """
import os, sys, threading
from utils.data import forks as ours
ours.PATIENCE = 1.0
made = []
os.register_at_fork(before=lambda: made.append(0))
os.register_at_fork(after_in_child=lambda: threading.Event().wait() if len(made) == 1 else None)
"""
CHILD = """
reader, writer = ours.fork_context().Pipe(duplex=False)
process = ours.fork_context().Process(target=lambda: writer.send(os.getpid()))
process.start()
assert reader.recv() == process.pid
process.join()
assert (process.exitcode, len(made)) == (0, 2)
"""
TRAIN = """
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(code: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", STILLBORN + code, *map(str, arguments)],
        cwd=cwd,
        env=CHILD_ENVIRONMENT | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_child_that_never_runs_is_replaced(tmp_path: Path) -> None:
    run(CHILD, cwd=tmp_path)


@pytest.mark.slow
def test_training_does_not_wait_for_it(tmp_path: Path) -> None:
    """The first child of a run is a loader worker."""
    line = flags(make_data(tmp_path / "data"), tmp_path / "runs", "--workers 1 --epochs 1")
    run(TRAIN, PROJECT / "train.py", *line, cwd=tmp_path)
    assert len(results(tmp_path / "runs/run")) == 1
