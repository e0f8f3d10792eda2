"""F9: ranks that do not do the same are found out, before the first step and on the way."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common import PROJECT
from tests.dist.launch import free_port, torchrun
from tests.runs import CHILD_ENVIRONMENT, flags, make_data

LIMIT = 240


@pytest.mark.slow
@pytest.mark.gate
def test_a_rank_goes_its_own_way(tmp_path: Path) -> None:
    """Torch itself sees neither: gradients of other batches are added up, other weights are trained on."""
    line = flags(make_data(tmp_path / "data", 16), tmp_path, "--epochs 2 --noval --nbs 4")
    done = torchrun(["-m", "tests.dist.misled", tmp_path, *line], 2, port=free_port(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for own, rank, place in ((first, 0, 1), (last, 1, 2)):
        left_out = f"rank {rank} has done {place}, and all 2 together 3; one of them left out a batch"
        assert left_out in own["leaves out a batch"]
        assert own["changes a weight"].startswith("at the end of epoch 1 the weights of rank 1 differ")
        assert own["nothing"] == ""


@pytest.mark.slow
def test_machines_with_other_code(tmp_path: Path) -> None:
    """Refused on both, with both digests."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("models", "utils", "data"):
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*PROJECT.glob("*.py"), PROJECT / "pyproject.toml"]:
        shutil.copy(path, copy)
    (copy / "utils/training/loss.py").write_text(
        (copy / "utils/training/loss.py").read_text() + "# changed on this machine\n"
    )
    line = flags(make_data(tmp_path / "data"), tmp_path, "--epochs 1")
    port = str(free_port())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--nnodes", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", port]
    machines = [
        subprocess.Popen(
            [*command, "--node_rank", str(rank), str(place / "train.py"), *line],
            cwd=tmp_path,
            env=CHILD_ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate((PROJECT, copy))
    ]
    for machine in machines:
        said = machine.communicate(timeout=LIMIT)[1]
        assert machine.returncode == 1
        assert "started with different settings: the code of Lockstep (" in said
        assert " on rank 0, " in said and " on rank 1)" in said
