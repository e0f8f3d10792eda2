"""F11: a run whose processes die goes on by itself, in its own folder, and ends as one that was left alone.

pytest -m slow tests/dist/test_restarts.py
"""

import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.common import PROJECT
from tests.dist.launch import HEADER, kill, ranks_of, start, wait_for
from tests.models.test_build import SPEC
from tests.runs import CHILD_ENVIRONMENT, assert_same_run, flags, make_data
from utils.core.errors import DivergedError
from utils.run.restarts import Life, begin_life, find_own_run

LIMIT = 300
LINE = "--batch 4 --epochs 3 --patience 0 --save-steps 2 --max-restarts 2"
NO_PROGRESS = 93


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_data(tmp_path_factory.mktemp("data"), 24, 8)
    (path.parent / "net.yaml").write_text(yaml.safe_dump(SPEC))  # what is restarted does not matter here
    return path


def line(data: Path, folder: Path, *more: str) -> list[str]:
    return flags(data, folder, LINE, f"--cfg {shlex.quote(str(data.parent))}/net.yaml", *more)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that was left alone, and the seconds from its header to the end of its last epoch's training."""
    folder = tmp_path_factory.mktemp("whole")
    run = start(line(data, folder, "--device cpu,cpu"), folder, folder / "said")
    began = wait_for(HEADER, run, folder / "said")
    trained = wait_for("3/3 100%", run, folder / "said")
    assert run.wait(LIMIT) == 0, (folder / "said").read_text()
    return folder / "run", trained - began


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.gate), *range(1, 20)])
def test_a_rank_is_killed(data: Path, whole: tuple[Path, float], tmp_path: Path, number: int) -> None:
    """At a random moment; no hang, no second folder, no double row."""
    run = start(line(data, tmp_path, "--device cpu,cpu"), tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    share = random.Random(number).random() if number else 0.4  # the first is surely in its middle
    time.sleep(share * whole[1])
    ranks = ranks_of(run.pid)
    for pid in ranks[number % 2 : number % 2 + 1]:
        kill(pid)
    status, said = run.wait(LIMIT), (tmp_path / "said").read_text()
    assert status == 0, said
    assert "restart 1, in " in said or number > 0  # it may have been over
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["run"]
    assert_same_run(whole[0], tmp_path / "run")


@pytest.mark.slow
def test_one_worker(data: Path, tmp_path: Path) -> None:
    """A run on a single device has a launcher too, if it is to be started again."""
    run = start(line(data, tmp_path), tmp_path, tmp_path / "said")
    wait_for(HEADER, run, tmp_path / "said")
    kill(ranks_of(run.pid)[0])
    assert run.wait(LIMIT) == 0, (tmp_path / "said").read_text()
    assert "restart 1, in " in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_no_progress_under_torchrun(data: Path, tmp_path: Path) -> None:
    """A run that fails at the same step again and again is given up, whoever starts it again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--max-restarts", "5", "-m", "tests.dist.stopping", "SIGKILL", "-1", "float32"]
    done = subprocess.run(
        [*command, *flags(data, tmp_path, "--epochs 1")],
        cwd=PROJECT,
        env=CHILD_ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.count("restart ") == 5
    given_up = "3 restarts did not get beyond optimizer step 0; it would fail again"
    assert given_up in done.stderr
    assert f"exitcode  : {NO_PROGRESS}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_lives_without_a_step(tmp_path: Path) -> None:
    for restarts in range(3):
        begin_life(tmp_path, Life("id", "", restarts), 7)
    assert find_own_run(str(tmp_path.parent), Life("id", "", 3)) == tmp_path
    assert find_own_run(str(tmp_path.parent), Life("other", "", 3)) is None
    begin_life(tmp_path, Life("100", "host 1 2", 0), 7)  # an id as people give it to all of their launches
    assert find_own_run(str(tmp_path.parent), Life("100", "host 77 99", 1)) is None
    assert find_own_run(str(tmp_path.parent), Life("100", "other 77 99", 1)) == tmp_path
    for restarts in range(3):
        begin_life(tmp_path, Life("id", "", restarts), 7)
    with pytest.raises(DivergedError, match="3 restarts did not get beyond optimizer step 7"):
        begin_life(tmp_path, Life("id", "", 3), 7)
    begin_life(tmp_path, Life("id", "", 4), 8)
    begin_life(tmp_path, Life("new", "", 0), 8)  # started by hand
