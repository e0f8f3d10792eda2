"""A1: with everything in its place a run opens no connection and starts no installer: the system calls tell."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, make_data

TRACE = "-f -qq --seccomp-bpf -e trace=connect,sendto,execve -e signal=none -o"
TINY = """nc: 2
depth_multiple: 0.33
width_multiple: 0.0625
anchors: 3
backbone:
  - [-1, 1, Conv, [64, 6, 8, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, Conv, [256, 3, 2]]
head:
  - [[1, 2], 1, Detect, [nc, anchors]]
"""
NAME = "$(touch marker);touch marker"  # a shell would make a file of it


def can_trace() -> bool:
    strace = shutil.which("strace")
    if strace is None:
        return False
    command = [strace, *TRACE.split(), "/dev/null", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_trace(), reason="strace is not here, or may not trace")


def traced(script: str, *arguments: object, cwd: Path) -> str:
    """Run a script and return what its processes did: programs they started, connections they opened."""
    log = cwd / f"{script}.strace"
    environment = {name: value for name, value in CHILD_ENVIRONMENT.items() if name != "LOCKSTEP_OFFLINE"}
    done = subprocess.run(
        ["strace", *TRACE.split(), str(log), sys.executable, str(PROJECT / script), *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (cwd / "marker").exists()
    return log.read_text(errors="replace")


def assert_alone(calls: str) -> None:
    """No connection to another host, no program but Python itself and what asks the machine for its properties."""
    assert "AF_INET" not in calls, re.findall(r".*AF_INET.*", calls)[:5]
    programs = set(re.findall(r'execve\("([^"]+)", \[(.*)\], .* = 0$', calls, re.MULTILINE))
    assert programs, "strace saw nothing"
    for program, words in programs:
        assert "python" in Path(program).name or Path(program).name in ("lscpu", "uname", "ldconfig", "gcc"), words
        assert not re.search(r"\bpip\b|\binstall\b|ensurepip|\bcurl\b|\bwget\b", words), words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run of one epoch: its folder, its data, and what its processes did."""
    folder = tmp_path_factory.mktemp("alone")
    data = make_data(folder / "set", 4, 2)
    (folder / "tiny.yaml").write_text(TINY)
    flags = f"--cfg {folder}/tiny.yaml --epochs 1 --batch 4 --img 64 --device cpu --workers 0 --noplots".split()
    calls = traced("train.py", "--data", data, *flags, "--project", "runs;touch marker", "--name", NAME, cwd=folder)
    return folder / "runs;touch marker" / NAME, data, calls


def test_training_opens_no_connection(trained: tuple[Path, Path, str]) -> None:
    """Ultralytics/ultralytics#1375, #7645: a start that waits for a download nobody asked for."""
    assert (trained[0] / "weights" / "best.pt").exists()
    assert_alone(trained[2])


@pytest.mark.slow
def test_validation_opens_no_connection(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    flags = f"--img 64 --device cpu --workers 0 --noplots --project {tmp_path}/v".split()
    best = trained[0] / "weights" / "best.pt"  # a path that a shell would take apart
    assert_alone(traced("val.py", "--data", trained[1], "--weights", best, *flags, cwd=tmp_path))


@pytest.mark.slow
def test_detection_opens_no_connection(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    source = trained[1].parent / "images" / "val"
    best = trained[0] / "weights" / "best.pt"
    calls = traced("detect.py", "--weights", best, "--source", source, "--device", "cpu", "--name", NAME, cwd=tmp_path)
    assert_alone(calls)
