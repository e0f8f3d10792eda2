"""The line that follows an epoch: a bar on a terminal, plain lines elsewhere."""

import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.common import PROJECT
from utils.data.shapes import draw_set
from utils.dist.place import DistEnv
from utils.run import progress as console
from utils.run.progress import EpochProgress, RunClock


def epoch(batches: int, env: DistEnv, done: int = 0) -> None:
    """An epoch as the training loop has it, whose losses are the number of micro-batches done."""
    progress = EpochProgress(4, batches, done, RunClock(10, 4.0), env)
    for batch in range(done, batches):
        if progress.advance(16):
            progress.show({"box": batch + 1.0, "obj": 0.0, "cls": 0.0}, 0.01, 640)
    progress.close()


def test_one_line_an_epoch_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    epoch(35, DistEnv())
    said = capfd.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("5/10 100% 35/35, box 35.0000, obj 0.0000, cls 0.0000, lr 0.01, 640 px, ")
    assert "\r" not in said.err and said.err.endswith(" left\n")
    epoch(35, DistEnv(rank=1, world_size=2))
    assert capfd.readouterr() == ("", "")


def test_waiting_for_images_is_shown_while_it_matters(capfd: pytest.CaptureFixture[str]) -> None:
    """Shares of the time since the figures before, not of the run: a limit that has passed is not shown any more."""
    progress = EpochProgress(0, 20, 0, RunClock(1, 0.0), DistEnv(), waited=100.0)
    progress.plain = False
    said = []
    for waited in (100.0, 104.0, 104.0):
        progress.shown = time.perf_counter() - 10.0
        progress.show({"box": 1.0, "obj": 1.0, "cls": 1.0}, 0.01, 640, waited)
        said.append(str(progress.bar.postfix))
    progress.close()
    found = [re.search(r"images/s \(waiting for images: (\d+)%\), ", one) for one in said]
    assert [bool(one) for one in found] == [False, True, False], said
    assert found[1] is not None and 30 < int(found[1][1]) <= 40
    assert capfd.readouterr().out == ""


def test_a_long_epoch_has_lines_in_between(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_EVERY", 0.0)
    epoch(35, DistEnv(), done=5)
    shares = [line.split(",")[0] for line in capfd.readouterr().err.splitlines()]
    assert shares == ["5/10  29% 10/35", "5/10  57% 20/35", "5/10  86% 30/35", "5/10 100% 35/35"]


FULL = "import sys; from tests.run.test_progress import epoch; from utils.dist.place import DistEnv; "


def on_a_terminal(columns: int, code: str) -> list[str]:
    """Run code whose stderr is a terminal of so many columns; returns what was drawn, one entry for each time."""
    termios = pytest.importorskip("termios")
    leader, follower = os.openpty()
    pytest.importorskip("fcntl").ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with subprocess.Popen([sys.executable, "-c", FULL + code], cwd=PROJECT, stderr=follower) as child:
        os.close(follower)
        said = b""
        while more := read(leader):
            said += more
    os.close(leader)
    assert child.returncode == 0, said
    return said.decode().replace("\r\n", "\n").split("\r")


def test_a_bar_on_a_terminal() -> None:
    last = on_a_terminal(160, "epoch(35, DistEnv())")[-1].rstrip()
    assert last.count("\n") == 0 and last.startswith("5/10 100%|") and "| 35/35, box 35.0000, " in last
    assert last.endswith(" left")


@pytest.mark.parametrize("columns", [80, 0, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (60, 45))])
def test_a_narrow_terminal_shows_what_matters(columns: int) -> None:
    """Speed and time left were cut off at 80 columns; on a terminal of no size (containers) there were no figures."""
    code = """
from utils.run.progress import EpochProgress, RunClock
with EpochProgress(4, 35, 0, RunClock(10, 4.0), DistEnv()) as progress:
    for batch in range(35):
        if progress.advance(16):
            progress.shown -= 1.0  # a second of training
            progress.show({"box": batch + 1.0, "obj": 0.0, "cls": 0.0}, 0.01, 640)
"""
    last = on_a_terminal(columns, code)[-1].rstrip()
    assert last.startswith("5/10 100% 35/35, ")
    assert re.search(r" \d+ images/s, 0:\d\d left$", last), last
    assert len(last) < (columns or 80)
    assert ("box 35.0000, obj 0.0000, cls 0.0000" in last) is (columns in (0, 80))
    assert ("box 35.0000" in last) is (columns != 45)


def test_what_is_said_after_an_interrupt_has_a_line_of_its_own() -> None:
    """Behind the bar nobody reads it."""
    code = """
from utils.run.progress import EpochProgress, RunClock
try:
    with EpochProgress(4, 35, 0, RunClock(10, 4.0), DistEnv()) as progress:
        progress.advance(16)
        progress.show({"box": 1.0, "obj": 0.0, "cls": 0.0}, 0.01, 640)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("stopped by Ctrl-C", file=sys.stderr)
"""
    assert on_a_terminal(80, code)[-1].split("\n")[1:] == ["stopped by Ctrl-C", ""]


def read(descriptor: int) -> bytes:
    """Read from a pseudo-terminal; at its end Linux gives an error."""
    try:
        return os.read(descriptor, 10_000)
    except OSError:
        return b""


def test_the_bar_of_drawn_data_is_for_terminals(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    draw_set(tmp_path / "shapes", {"train": 3}, progress=True)
    assert capfd.readouterr() == ("", "")
