"""A machine stands still and goes on later: the others end in time, and what it wakes up to write harms nobody.

pytest -m slow tests/dist/test_frozen.py
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.common import PROJECT
from tests.dist.launch import descendants, free_port
from tests.dist.machines import Machine, all_ended, started, torchrun_line
from tests.models.test_build import SPEC
from tests.runs import flags, make_data
from utils.checkpoints.files import load_checkpoint

GROUPS = Path("/sys/fs/cgroup")
DIST_TIMEOUT = 8
EPOCHS = 6
SOON = 120  # seconds from the freeze to the end of the other machine; measured 12 to 30, on busy cores
LIMIT = 400


class Freezer:
    """Processes that can be made to stand still, all at one moment, by the kernel; of version 1 or 2."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.old = folder, (folder / "freezer.state").exists()

    def add(self, pids: list[int]) -> None:
        """Take processes in; what they start later is in as well."""
        for pid in pids:
            with suppress(ProcessLookupError):
                (self.folder / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        """Stop all, and wait until they are."""
        self._set("FROZEN", "1")

    def thaw(self) -> None:
        """Let all go on."""
        self._set("THAWED", "0")

    def _set(self, state: str, number: str) -> None:
        (self.folder / ("freezer.state" if self.old else "cgroup.freeze")).write_text(state if self.old else number)
        end = time.monotonic() + 30
        while state not in self._state(number) and time.monotonic() < end:
            time.sleep(0.02)

    def _state(self, number: str) -> str:
        if self.old:
            return (self.folder / "freezer.state").read_text()
        frozen = f"frozen {number}" in (self.folder / "cgroup.events").read_text()
        return ("THAWED", "FROZEN")[int(number)] if frozen else ""


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    parent = GROUPS / "freezer" if (GROUPS / "freezer").is_dir() else GROUPS
    folder = parent / f"lockstep-tests-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no group of processes to freeze can be made here: {error}")
    try:
        if not any((folder / name).exists() for name in ("freezer.state", "cgroup.freeze")):
            pytest.skip(f"{parent} has no freezer")
        yield Freezer(folder)
    finally:
        end = time.monotonic() + 30
        while folder.exists() and time.monotonic() < end:  # until the last process is gone
            with suppress(OSError):
                folder.rmdir()
            time.sleep(0.05)


def digests(weights: Path) -> dict[str, str]:
    """What is in a folder of checkpoints, but for what is being written."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights.glob("[!.]*")}


@pytest.mark.slow
@pytest.mark.gate
def test_frozen_machine(freezer: Freezer, tmp_path: Path) -> None:
    """Row 27: frozen in the middle of a save.

    Nobody gets its folder as long as it holds that; who takes it away goes on in peace, also when it wakes up and
    finishes what it was at.
    """
    data = make_data(tmp_path / "data", 12)
    (data.parent / "net.yaml").write_text(yaml.safe_dump(SPEC))
    more = f"--cfg {data.parent}/net.yaml --weights '' --patience 0 --epochs {EPOCHS} --dist-timeout {DIST_TIMEOUT}"
    line, port, run_dir = flags(data, tmp_path, more), free_port(), tmp_path / "run"
    script = ["-m", "tests.dist.stuck", "lazy_disk", 0, 1, *line]
    weights, resume = run_dir / "weights", [PROJECT / "train.py", "--resume", run_dir, "--device", "cpu"]

    def machine(rank: int) -> list[object]:
        return [*torchrun_line(Machine(rank), port, "127.0.0.1"), *script]

    with (
        started(Machine(0), machine(0), tmp_path / "0") as first,
        started(Machine(1), machine(1), tmp_path / "1") as other,
    ):

        def saving() -> bool:
            return (weights / "last.pt").exists() and any(weights.glob(".last.pt.*.tmp"))

        while True:
            while not saving():
                assert first.process.poll() is None, first.said
                time.sleep(0.01)
            freezer.add([first.process.pid, *descendants(first.process.pid)])
            freezer.freeze()
            if saving():
                break
            freezer.thaw()  # too late; there is a next save
        try:
            all_ended([other], SOON)
            assert other.process.returncode == 1
            assert "error: rank 1 lost rank 0" in other.said, other.said
            assert f"it waited {DIST_TIMEOUT} s (--dist-timeout)" in other.said

            with started(Machine(0), resume, tmp_path / "refused") as refused:
                all_ended([refused], LIMIT)
            assert refused.process.returncode == 2
            assert f"error: {run_dir} is in use by another run (process " in refused.said

            (run_dir / ".lock").unlink()  # a file server does so by itself, when it has not heard of a machine for long
            with started(Machine(0), resume, tmp_path / "resumed") as resumed:
                all_ended([resumed], LIMIT)
            assert resumed.process.returncode == 0, resumed.said
            after = digests(weights)
        finally:
            freezer.thaw()
        all_ended([first], SOON)
        assert first.process.returncode == 1
        assert f"WARNING: {run_dir} was taken over by another run (process " in first.said, first.said
    assert digests(weights) == after
    assert load_checkpoint(weights / "last.pt")["state"]["epoch"] == EPOCHS
    assert not list(weights.glob(".*"))
