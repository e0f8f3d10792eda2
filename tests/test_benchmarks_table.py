"""The table of `python -m benchmarks`: its ratios, its verdicts, its command line."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.measuring import Row, format_rows, ratios, take_turns, write_rows
from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT
from utils.core.errors import USER_ERROR


def benchmarks(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(
        command, cwd=PROJECT, env=CHILD_ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize(
    ("median", "aim", "at_least", "met"),
    [(2.0, None, True, None), (2.0, 2.0, True, True), (1.9, 2.0, True, False), (2.0, 2.0, False, True),
     (2.1, 2.0, False, False)],
)  # fmt: skip
def test_verdict(median: float, aim: float | None, at_least: bool, met: bool | None) -> None:
    row = Row("C0", "this / that", (median - 0.5, median, median + 1.5), aim, at_least)
    assert (row.median, row.met) == (median, met)
    line = format_rows([row]).splitlines()[1]
    assert line.endswith("MISSED") == (met is False)
    assert f"{median - 0.5:.3f} to {median + 1.5:.3f}" in line


def test_things_take_turns() -> None:
    """Each is called so many times in each round, in order; the first round does not count."""
    calls: list[str] = []
    began = time.perf_counter()
    taken = take_turns({"a": lambda: calls.append("a"), "b": lambda: time.sleep(0.01)}, rounds=3, repeat=2)
    passed = time.perf_counter() - began
    assert calls == ["a"] * 2 * 4
    assert [len(seconds) for seconds in taken.values()] == [3, 3]
    assert all(seconds >= 0.01 for seconds in taken["b"])
    assert 2 * sum(taken["b"]) <= passed
    assert ratios([1.0, 6.0], [2.0, 3.0]) == (0.5, 2.0)


def test_rows_survive_a_file(tmp_path: Path) -> None:
    rows = [Row("C1", "a / b", (1.0, 2.0), 3.0, at_least=False, note="c"), Row("C2", "d", (5.0,))]
    write_rows(rows, tmp_path / "rows.json")
    assert [Row(**fields) for fields in json.loads((tmp_path / "rows.json").read_text())] == [
        Row("C1", "a / b", [1.0, 2.0], 3.0, at_least=False, note="c"),  # type: ignore[arg-type]
        Row("C2", "d", [5.0]),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "loader,lables"], "--only 'lables' is no group; take some of start, loader, labels,"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: there is no folder /nowhere/at"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    """Before anything is measured."""
    done = benchmarks(*words)
    assert done.returncode == USER_ERROR
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
@pytest.mark.slow
def test_no_gpu() -> None:
    done = benchmarks("--gpu")
    assert done.returncode == USER_ERROR
    assert "PyTorch finds no CUDA device here" in done.stderr


@pytest.mark.slow
def test_one_group_and_its_files(tmp_path: Path) -> None:
    """The lines of a group that is measured for real, once."""
    done = benchmarks("--only", "optimizer", "--rounds", "1", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "figures.json").read_text())
    assert [line["key"] for line in lines] == ["C8", "C8", "C9", "C9"]
    assert all(line["low"] <= line["median"] <= line["high"] for line in lines)
    assert "averaging: flat tensors / ours" in done.stdout


@pytest.mark.slow
def test_the_gpu_benchmark_on_a_cpu(tmp_path: Path) -> None:
    """All that needs no CUDA runs, in small."""
    words = "--small --device cpu --cfg yolov5n.yaml --img 64 --batch 120 --workers 0 --rounds 1"
    done = benchmarks("--gpu", *words.split(), "--rows", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    keys = {line["key"] for line in json.loads((tmp_path / "rows.json").read_text())}
    assert keys == {"G1", "G2", "G4", "G6", "G7", "G9"}
