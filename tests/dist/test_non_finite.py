"""A NaN on one rank: all ranks leave out the same window, and nothing of it is left anywhere."""

import itertools
from pathlib import Path

import pytest

from tests.dist.recorded_runs import Case, Record
from tests.dist.test_parity import draw_data, flags, launch
from utils.checkpoints.files import non_finite
from utils.torch_utils import load_checkpoint

SPOILED = 2  # window, the first of the second epoch: micro-batches 4 and 5
CASES = {
    # rank and micro-batch; gradients are exchanged in a window's second one
    "SyncBN, first": ([1, 4], []),
    "own, first": ([1, 4], ["--no-sync-bn"]),
    "own, second": ([0, 5], ["--no-sync-bn"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    """Two epochs of two windows each, on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    data = draw_data(folder / "data", 48, (1, 2, 0), 4)
    own = ["--cfg", "yolov5n.yaml", "--weights", "", "--batch", 12, "--nbs", 24, "--epochs", 52, "--noval"]
    return launch(
        [
            Case(name, flags(folder, name, data, *own, *more), start_epoch=50, poison=poison)
            for name, (poison, more) in CASES.items()
        ],
        2,
        folder / "job",
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
@pytest.mark.gate
def test_all_ranks_leave_out_the_window(runs: dict[str, list[Record]], name: str) -> None:
    """Weights, statistics, momentum and averages are as before it, to the bit, and go on from there.

    ultralytics/ultralytics#24615, ultralytics/ultralytics#24986 (one NaN spoils the averages for good),
    ultralytics/ultralytics#22352 (ranks that decide by themselves), ultralytics/ultralytics#24170.
    """
    for record in runs[name]:
        assert record.windows == [2, 2, 2, 2]
        unchanged = [a == b for a, b in itertools.pairwise(record.digests)]
        assert unchanged == [window == SPOILED for window in range(4)]
        assert record.skipped == 1
        assert record.finite
        assert all(0 < box < 1 and 0 < obj < 1 and 0 < cls < 1 for box, obj, cls in record.losses)
    first, second = runs[name]
    assert first.all_weights == second.all_weights
    assert first.losses == second.losses


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_run_ends_well(runs: dict[str, list[Record]], name: str) -> None:
    weights = Path(runs[name][0].run_dir) / "weights"
    last, best = load_checkpoint(weights / "last.pt"), load_checkpoint(weights / "best.pt")
    assert last["state"]["epoch"] == 52
    assert last["state"]["skipped"] == last["ema"]["skipped"] == 1
    assert not any(
        non_finite(state[key], key) for state in (last, best) for key in ("model", "ema", "optimizer") if key in state
    )
