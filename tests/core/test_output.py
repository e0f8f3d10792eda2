"""Output that nobody takes: a reader that has left, a full disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import PROJECT

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
LOST = "error: stdout did not take all that was said (No space left on device); all files are written\n"
WORK = """
import sys
from pathlib import Path
from utils.core.errors import UserError, run_cli
from utils.core.logging import get_logger
from utils.dist.worker import as_worker

def main():
    for number in range(3000):
        get_logger().info(f"line {number}")
    if sys.argv[1:] == ["mistaken"]:
        raise UserError("a mistake")
    Path("done").touch()

run_cli(as_worker(main))
"""


def ended(command: list[str], folder: Path, stdout: Path | None, more: dict[str, str] | None = None) -> tuple[int, str]:
    """Run Python with a file as stdout, or a pipe of which one line is read; returns its status and what stderr has."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"} | (more or {})
    pipe = stdout.open("w") if stdout else subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stdout=pipe, stderr=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is not None:
            assert process.stdout.readline()
            process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    return process.returncode, said


@pytest.mark.parametrize("script", ["train.py", "val.py", "detect.py"])
def test_help_pages(script: str, tmp_path: Path) -> None:
    """``--help | head -1`` ended with a message of Python's; into a full disk it went with status 0."""
    assert ended([str(PROJECT / script), "--help"], tmp_path, None) == (0, "")
    if FULL.exists():
        assert ended([str(PROJECT / script), "--help"], tmp_path, FULL) == (1, LOST)


def test_a_reader_may_leave(tmp_path: Path) -> None:
    """``val.py ... | head -1``: the work goes on quietly, and its status is its own."""
    assert ended(["-c", WORK], tmp_path, None) == (0, "")
    assert (tmp_path / "done").exists()


@needs_full
@pytest.mark.parametrize("more", [{}, {"TORCHELASTIC_RUN_ID": "x", "PYTHONUNBUFFERED": "1"}], ids=["alone", "worker"])
def test_a_full_disk_is_said(more: dict[str, str], tmp_path: Path) -> None:
    """At once, for a run may take days, and in the end, by the status as well: all the same the work is done."""
    warning = "WARNING: stdout can't be written ([Errno 28] No space left on device); the work goes on\n"
    assert ended(["-c", WORK], tmp_path, FULL, more) == (1, warning + LOST)
    assert (tmp_path / "done").exists()


def test_stderr_that_nobody_reads(tmp_path: Path) -> None:
    """``2>&1 | head -1``: a message that nobody sees changes no status."""
    code = WORK.replace("import sys\n", "import os, sys\nos.dup2(1, 2)\n", 1)
    assert ended(["-c", code, "mistaken"], tmp_path, None) == (2, "")
