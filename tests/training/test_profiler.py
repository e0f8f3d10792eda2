"""The profiler of training steps: R6 of the contract."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest
import torch

from tests.runs import differences, flags, make_data, train_here
from utils.dist.place import ALONE, DistEnv
from utils.torch_utils import load_checkpoint
from utils.training import profiler
from utils.training.profiler import HEAVIEST, operator_table, profiling


@pytest.fixture(autouse=True)
def variables_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler is told to be quiet by a variable."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL", "99"))


def marks(trace: Path) -> list[str]:
    """Marks of the steps that were looked at."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    found = {event["name"] for event in json.loads(text)["traceEvents"]}
    return sorted(name for name in found if name.startswith("ProfilerStep"))


@pytest.mark.slow
@pytest.mark.gate
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R6: a trace and a table of the first epoch; the run goes on, and is the same as without."""
    data = make_data(tmp_path / "data", count=36)  # 9 batches
    train_here(*flags(data, tmp_path / "runs", "--epochs 2"))
    capsys.readouterr()
    train_here(*flags(data, tmp_path / "runs", "--epochs 2 --profile"))
    said = capsys.readouterr().out
    plain, run_dir = tmp_path / "runs/run", tmp_path / "runs/run2"
    a, b = (load_checkpoint(folder / "weights/last.pt") for folder in (plain, run_dir))
    assert [differences(a[key], b[key]) for key in ("model", "ema", "optimizer", "state")] == [[]] * 4

    assert marks(run_dir / "profile/trace.json") == [f"ProfilerStep#{step}" for step in (4, 5, 6, 7)]
    assert said.count("profile     batches 5 to 8 of this run, in ") == 1
    table = (run_dir / "profile/operators.txt").read_text()
    assert table in said
    heading, *rows = table.splitlines()
    assert heading.split() == ["operator", "CPU", "time,", "ms", "share", "calls"]
    assert len(rows) == HEAVIEST == 10
    times = [float(row.split()[-3]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert re.search(r"aten::\S*conv\S*_backward", table)  # which one is the CPU's choice
    assert not (plain / "profile").exists()


@pytest.mark.parametrize(("batches", "looked_at"), [(1, [0]), (3, [1, 2]), (5, [1, 2, 3, 4]), (20, [4, 5, 6, 7])])
@pytest.mark.filterwarnings("error")
def test_short_epochs(batches: int, looked_at: list[int], tmp_path: Path) -> None:
    """A small data set is looked at as well, without a warning of PyTorch's; steps of later epochs are not."""
    with profiling(True, ALONE, tmp_path, batches) as step_done:
        for _ in range(3 * batches):
            torch.ones(3) + 1
            step_done()
    assert marks(tmp_path / "profile/trace.json") == [f"ProfilerStep#{step}" for step in looked_at]


def test_a_resumed_run_keeps_its_first_look(tmp_path: Path) -> None:
    """What lives of the run before have left stays as it is."""
    for folder in ("profile", "profile2", "profile3"):
        with profiling(True, ALONE, tmp_path, 2) as step_done:
            step_done()
            step_done()
        (tmp_path / folder / "trace.json").write_text(folder)
    assert [(tmp_path / f / "trace.json").read_text() for f in ("profile", "profile2")] == ["profile", "profile2"]
    assert (tmp_path / "profile3/operators.txt").exists()


def test_large_traces_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "LARGE", 10)
    with profiling(True, ALONE, tmp_path, 5) as step_done:
        for _ in range(5):
            step_done()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["operators.txt", "trace.json.gz"]
    assert len(marks(tmp_path / "profile/trace.json.gz")) == 4


def test_shares() -> None:
    """Of the operators' own time: what an operator calls is not counted twice, marks are not counted at all."""
    with torch.profiler.profile() as profile:
        for _ in range(3):
            with torch.profiler.record_function("a mark"):
                torch.nn.functional.linear(torch.ones(300, 300), torch.ones(300, 300))
    rows = [line.split() for line in operator_table(profile.key_averages(), False, 1000).splitlines()[1:]]
    assert abs(sum(float(row[-2].rstrip("%")) for row in rows) - 100) < 0.1 * len(rows)
    by_name = {row[0]: row for row in rows}
    assert by_name["aten::mm"][-1] == by_name["aten::linear"][-1] == "3"
    assert "a" not in by_name
    assert float(by_name["aten::mm"][-3]) > float(by_name["aten::linear"][-3])


@pytest.mark.parametrize(("wanted", "ranks"), [(False, 1), (False, 2), (True, 2)])
def test_off(wanted: bool, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R6: several ranks are not looked at, and told so."""
    with profiling(wanted, DistEnv(world_size=ranks, local_world_size=ranks, launched=ranks > 1), tmp_path, 8) as done:
        for _ in range(8):
            done()
    assert list(tmp_path.iterdir()) == []
    warning = "WARNING: --profile is ignored: it looks at one process, and 2 train together\n"
    assert capsys.readouterr().out == (warning if wanted else "")
