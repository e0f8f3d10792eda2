"""What the benchmark of scaling takes for waiting is waiting."""

import json
from pathlib import Path

import pytest

from tests.dist.launch import free_port, torchrun
from tests.runs import flags, make_data

DELAY = 1.0  # seconds


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["--sync-bn", "--no-sync-bn"])
def test_waiting_is_the_time_that_another_rank_is_late(tmp_path: Path, switch: str) -> None:
    """Wherever the second rank is late, the first one waits for it, and its own delay is not waiting."""
    command = flags(make_data(tmp_path / "data"), tmp_path, "--nbs 4 --epochs 2000", switch)
    done = torchrun(["-m", "tests.dist.slow_rank", DELAY, tmp_path, *command], 2, port=free_port(), timeout=240)
    assert done.returncode == 0, done.stderr
    punctual, late = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    usual = punctual["nowhere"]
    for place in ("loader", "forward", "backward", "step"):
        seen = punctual[place]
        # Of an epoch's three batches two count; the late rank's clock starts after its delay in the first one's step.
        assert seen["seconds"] > 2 * DELAY, place
        # Measured by what is not waiting: on a busy machine ranks wait for each other all the time.
        own, usually = seen["seconds"] - seen["waiting"], usual["seconds"] - usual["waiting"]
        assert own < usually + 0.5 * DELAY, place
        assert late[place]["waiting"] < late[place]["seconds"] - 2 * DELAY, place
    for said in (usual, late["nowhere"]):
        assert 0 < said["waiting"] < said["seconds"]
