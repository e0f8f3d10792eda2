"""I4, F3: a run that was killed anywhere ends as one that was left alone, to the bit; on other ranks it goes on too.

The loops behind ``slow`` are the claim of docs/faults.md:

    pytest -m slow tests/dist/test_resume.py -k killed
"""

import functools
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from tests.dist.launch import HEADER, descendants, free_port, kill, ranks_of, start, torchrun, wait_for
from tests.models.test_build import SPEC
from tests.runs import assert_same_run, flags, make_data, results, train_here
from utils.core.errors import UserError
from utils.torch_utils import load_checkpoint

LIMIT = 240  # seconds for a run of about ten
IMAGES, BATCH, EPOCHS = 68, 12, 3  # six batches in an epoch
# Accumulation grows in the warm-up, with this nominal batch to windows of two batches in the second epoch.
LINE = f"--batch {BATCH} --nbs 48 --epochs {EPOCHS} --save-steps 1 --patience 0"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_data(tmp_path_factory.mktemp("data"), IMAGES, 6)
    (path.parent / "net.yaml").write_text(yaml.safe_dump(SPEC))
    return path


def line(data: Path, folder: Path, ranks: int, network: str, *more: str) -> list[str]:
    cfg = str(data.parent / "net.yaml") if network == "small" else network
    return [*flags(data, folder, LINE), "--device", ",".join(["cpu"] * ranks), "--cfg", cfg, *more]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], tuple[Path, float]]:
    """Runs that were left alone, by ranks and network, and the seconds from the end of the header to their end."""

    @functools.cache
    def run_of(ranks: int, network: str) -> tuple[Path, float]:
        folder = tmp_path_factory.mktemp(f"whole-{ranks}-{network}")
        run = start(line(data, folder, ranks, network), folder, folder / "said")
        began = wait_for(HEADER, run, folder / "said")
        assert run.wait(LIMIT) == 0, (folder / "said").read_text()
        return folder / "run", time.monotonic() - began

    return run_of


def kill_at(moment: float, victim: str, run: "subprocess.Popen[bytes]", said: Path) -> None:
    """Kill a run, or one process of it, so many seconds after its header, and wait for the end of all.

    Args:
        moment: seconds; the run may be over by then.
        victim: "launcher", "first rank", "last rank" or "all".
        run: started.
        said: its output.
    """
    wait_for(HEADER, run, said)
    time.sleep(moment)
    everyone, ranks = [run.pid, *descendants(run.pid)], ranks_of(run.pid)
    victims = {"launcher": everyone[:1], "first rank": ranks[:1], "last rank": ranks[-1:], "all": everyone}
    for pid in victims[victim]:
        kill(pid)
    run.wait(LIMIT)
    while any(
        Path(f"/proc/{pid}").exists() for pid in everyone
    ):  # of a launcher that was killed they end by themselves
        time.sleep(0.02)


VICTIMS = ("launcher", "first rank", "last rank", "all")


@pytest.mark.parametrize(
    ("ranks", "network", "number"),
    [
        pytest.param(2, "small", 3, marks=pytest.mark.slow),
        *(pytest.param(2, "yolov5n", number, marks=pytest.mark.slow) for number in range(20)),
    ]
    + [pytest.param(3, "small", 0, marks=(pytest.mark.slow, pytest.mark.gate))]
    + [pytest.param(3, "small", number, marks=pytest.mark.slow) for number in range(1, 10)],
)
def test_killed_at_a_random_moment(
    data: Path, whole: Callable[[int, str], tuple[Path, float]], tmp_path: Path, ranks: int, network: str, number: int
) -> None:
    """Weights, averages, optimizer, figures: all that last.pt and results.csv hold (ultralytics/ultralytics#24170).

    A third rank adds to who shares the batch, whatever the network is.
    """
    expected, seconds = whole(ranks, network)
    moment = random.Random(f"{ranks} {number}").random() * seconds
    folder = tmp_path / "killed"
    kill_at(
        moment,
        VICTIMS[number % len(VICTIMS)],
        run := start(line(data, folder, ranks, network), folder, tmp_path / "1"),
        tmp_path / "1",
    )
    assert run.returncode != 0 or moment > seconds / 2
    if run.returncode != 0:
        again = ["--resume", str(folder / "run")] if (folder / "run/weights/last.pt").exists() else []
        again = again or line(data, folder, ranks, network, "--exist-ok")  # nothing was saved yet
        run = start(again, folder, tmp_path / "2")
        was_over = (
            run.wait(LIMIT) == 2 and "nothing is left to resume" in (tmp_path / "2").read_text()
        )  # in its last act
        assert run.returncode == 0 or was_over, (tmp_path / "2").read_text()
    assert_same_run(expected, folder / "run")


# On other ranks -------------------------------------------------------------------------------------------------------


MOVING = "--batch 12 --nbs 92 --epochs 2 --save-steps 1 --patience 0 --noval --amp off"
# Young weights at the rates of a recipe make a million times as much of a rounding in these thirty batches.
CALM = "lr0: 0.001\nwarmup_bias_lr: 0.001\n"


@pytest.fixture(scope="module")
def more_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen batches: a run is stopped in the middle of an epoch however long its first checkpoint takes to write."""
    return make_data(tmp_path_factory.mktemp("data"), 192, 6)


def calm(data: Path, folder: Path) -> list[str]:
    recipe = data.with_name("calm.yaml")
    recipe.write_text(CALM)
    return flags(data, folder, MOVING, f"--hyp {recipe}")


def stopped_and_moved(data: Path, folder: Path, ranks: int, others: int, dtype: str) -> tuple[str, Path]:
    """Stop a run in the middle of an epoch, go on with another number of ranks; returns what that said."""
    own = calm(data, folder)
    script = ["-m", "tests.dist.stopping"]
    torchrun([*script, "SIGTERM", 1, dtype, *own], ranks, port=free_port(), timeout=LIMIT)
    assert f"--nproc_per_node {ranks} " in (folder / "run/RESUME").read_text()
    saved = load_checkpoint(folder / "run/weights/last.pt")
    assert saved["state"]["batch"] in range(1, 16), "not in the middle of an epoch"
    assert len(set(saved["meters"][:, -1].tolist())) == 1, "ranks stopped at different steps"
    done = torchrun([*script, "SIGTERM", 0, dtype, "--resume", folder / "run"], others, port=free_port(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "run"


def weights(run_dir: Path) -> Tensor:
    """Of the network and its average, without the statistics of BatchNorm, which are larger and rounder."""
    state = load_checkpoint(run_dir / "weights/last.pt")
    pairs = [*state["model"].items(), *state["ema"]["module"].items()]
    return torch.cat([tensor.double().flatten() for name, tensor in pairs if name.endswith(("weight", "bias"))])


@pytest.fixture(scope="module")
def left_alone(more_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """The folder of a run that was left alone, by number of ranks and precision."""

    @functools.cache
    def run_of(ranks: int, dtype: str) -> Path:
        folder = tmp_path_factory.mktemp(f"alone-{ranks}-{dtype}")
        script = ["-m", "tests.dist.stopping", "SIGTERM", 0, dtype, *calm(more_data, folder)]
        done = torchrun(script, ranks, port=free_port(), timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        return folder / "run"

    return run_of


@pytest.mark.parametrize(
    ("ranks", "others", "dtype"),
    [
        pytest.param(ranks, others, dtype, marks=pytest.mark.slow)
        for ranks, others, dtype in (
            (2, 1, "float64"),
            (1, 2, "float64"),
            (2, 3, "float64"),
            (2, 1, "float32"),
            (1, 2, "float32"),
            (2, 3, "float32"),
        )
    ],
)
def test_on_another_number_of_ranks(
    more_data: Path, left_alone: Callable[[int, str], Path], tmp_path: Path, ranks: int, others: int, dtype: str
) -> None:
    """The same images with the same gradients: weights agree with the run that was left alone."""
    whole = left_alone(ranks, dtype)
    said, moved = stopped_and_moved(more_data, tmp_path / "moved", ranks, others, dtype)
    assert re.search(r"resuming from .*, epoch 1, batch \d+\n", said)
    expected, found = weights(whole), weights(moved)
    far = {"float32": 1e-4, "float64": 1e-10}[dtype]
    assert ((found - expected).norm() / expected.norm()).item() <= far
    tables = [results(run_dir) for run_dir in (whole, moved)]
    losses = [table.filter(like="train/").to_numpy() for table in tables]
    np.testing.assert_allclose(losses[1], losses[0], rtol={"float32": 1e-3, "float64": 2e-5}[dtype])


def test_ranks_that_do_not_divide_the_batch(data: Path, tmp_path: Path) -> None:
    """The nearest numbers of ranks are offered, before anything is started."""
    train_here(*flags(data, tmp_path, "--batch 12 --epochs 2 --save-period 1"))
    shutil.copy(tmp_path / "run/weights/epoch1.pt", tmp_path / "run/weights/last.pt")
    with pytest.raises(UserError, match="batch of 12 images can't be shared out over 5 ranks; go on with 4 or 6"):
        train_here("--resume", tmp_path / "run", "--device", "cpu,cpu,cpu,cpu,cpu")
