"""The benchmarks measure what they say."""

import filecmp
import json
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import checkpoint, scaling
from benchmarks.scaling import SIDE_BY_SIDE, SYNC_BN, TWO_RANKS, Bench, Settings, report, summarize
from benchmarks.scaling_rank import cores
from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, make_data, torch_settings_kept
from utils.core.errors import UserError


def settings(data: Path, **changes: Any) -> Settings:
    """Return settings of a measurement of a few seconds: 2 images a batch, 3 batches of which 2 count."""
    small: dict[str, Any] = {"cfg": "yolov5n.yaml", "imgsz": 64, "local_batch": 2, "amp": "off", "steps": 3, "skip": 1}
    return Settings(**{"data": str(data), **small, "rounds": 1, "starts": 1, "labels": 700} | changes)


def files_below(folder: Path) -> dict[str, float]:
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in folder.rglob("*")}


def test_data_are_copied(tmp_path: Path) -> None:
    """Each rank has as many images as it needs for a round, and the originals are left alone."""
    source = make_data(tmp_path / "data", count=10)  # 12 are needed: two of them twice
    before = files_below(tmp_path / "data")
    (tmp_path / "copy").mkdir()
    first, second, both = Bench(settings(source), tmp_path / "copy").data
    images = {name: [*(tmp_path / "copy/images" / name).iterdir()] for name in ("train0", "train1", "val")}
    assert {name: len(paths) for name, paths in images.items()} == {"train0": 6, "train1": 6, "val": 24}
    used = []
    for name, paths in images.items():
        originals = [*(tmp_path / "data/images" / name.rstrip("01")).iterdir()]
        for path in paths:
            (original,) = [one for one in originals if filecmp.cmp(one, path, shallow=False)]
            used.append(original)
            labels = [Path(str(one).replace("/images/", "/labels/")).with_suffix(".txt") for one in (original, path)]
            assert labels[0].read_bytes() == labels[1].read_bytes()
    assert len(set(used)) == 10 + 4  # nothing twice while there is more
    found = [yaml.safe_load(path.read_text()) for path in (first, second, both)]
    assert [one["train"] for one in found] == [["images/train0"], ["images/train1"], ["images/train0", "images/train1"]]
    assert {json.dumps([one["val"], one["names"]]) for one in found} == {'["images/val", ["blue", "red"]]'}
    assert files_below(tmp_path / "data") == before


@pytest.mark.slow
def test_a_rank_does_what_it_is_told(tmp_path: Path) -> None:
    bench = Bench(settings(make_data(tmp_path / "data")), tmp_path)
    with closing(bench.group(1)) as group:
        assert group.ready == [{"precision": "off"}]
        assert 0.5 < group.start_seconds < 120
        figures = {}
        for command in ("train", "train", "scan", "validate"):
            group.ask(command)
            (figures[command],) = group.answers()
    assert group._process.returncode == 0
    assert figures["train"]["images"] == 4
    assert 0 <= figures["train"]["waiting"] < 0.2 * figures["train"]["computing"]  # there is nobody to wait for
    assert figures["scan"]["images"] == 700
    assert figures["validate"]["images"] == 24
    for said in figures.values():
        assert 0 < said["seconds"] < 120


@pytest.mark.slow
def test_what_a_process_dies_of_is_said(tmp_path: Path) -> None:
    bench = Bench(settings(make_data(tmp_path / "data"), cfg="nowhere.yaml"), tmp_path)
    with pytest.raises(UserError, match=r"it said:\nerror: .*nowhere\.yaml"):
        bench.group(1)


def test_settings_that_measure_nothing_are_refused(tmp_path: Path) -> None:
    for change in ({"skip": 3}, {"skip": -1}, {"rounds": 0}, {"starts": 0}, {"labels": 0}, {"local_batch": 0}):
        with pytest.raises(UserError, match=f"--{next(iter(change)).replace('_', '-')} "):
            settings(tmp_path, **change)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "0,1"], "--device: no effect without --devices"),
        (["--devices", "1,2", "--steps", "5", "--rounds", "2"], "--steps, --rounds: no effect with --devices"),
    ],
)
def test_flags_without_effect_are_refused(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", *words])
    with pytest.raises(UserError, match=said):
        scaling.main()


def made_round(side_by_side: float, two_ranks: float, sync_bn: float) -> dict[str, list[dict[str, float]]]:
    """A round in which each rank did 100 images in so many seconds, a tenth of them waiting."""
    times = {SIDE_BY_SIDE: side_by_side, TWO_RANKS: two_ranks, SYNC_BN: sync_bn}
    return {
        name: [
            {"images": 100, "seconds": seconds, "waiting": 0.1 * seconds, "computing": computing * seconds}
            for computing in (0.8, 0.9)
        ]
        for name, seconds in times.items()
    }


def test_answers(capsys: pytest.CaptureFixture[str]) -> None:
    pair = {"1": [{"seconds": 3.0}], "2": [{"seconds": 1.0}, {"seconds": 2.0}]}
    figures = {
        "train": [made_round(4.0, 5.0, 8.0), made_round(8.0, 8.0, 16.0), made_round(4.0, 8.0, 8.0)],
        "scan": [pair],
        "validate": [pair],
        "start": [{"1": [{"seconds": 1.0}], "2": [{"seconds": 2.0}]}],
    }
    rows = summarize(figures)
    assert rows["side by side, images/s"] == {"median": 50.0, "low": 25.0, "high": 50.0}
    # Ratios are of the same round: those of the medians would be 25 / 50.
    assert rows["two ranks / side by side"] == {"median": 0.8, "low": 0.5, "high": 1.0, "limit": 0.9}
    assert rows["SyncBN / side by side"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    # All images took 0.85 of the seconds: 8, 16, 8 for SyncBN against 4, 8, 4.
    assert rows["SyncBN / side by side, CPU time"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert rows["SyncBN, waiting"]["median"] == pytest.approx(0.1)
    assert rows["side by side, on the core"]["median"] == pytest.approx(0.85)
    assert rows["scan, s, 2 ranks"]["median"] == 2.0  # the slower one
    assert rows["scan, 1 rank / 2 ranks"]["median"] == 1.5
    assert rows["start, 1 rank / 2 ranks"]["median"] == 0.5
    report(rows)
    said = capsys.readouterr().out
    assert "UNDER the limit of 0.9" in said
    assert "WARNING: the runs had 85% of their cores' time" in said
    rows["two ranks / side by side"]["median"] = rows["side by side, on the core"]["median"] = 0.9
    report(rows)
    said = capsys.readouterr().out
    assert "within the limit" in said
    assert "WARNING" not in said


@pytest.mark.slow
@pytest.mark.skipif(len(cores()) < 2, reason="two ranks need a core each")
def test_scaling(tmp_path: Path) -> None:
    """One command measures everything, leaves nothing behind and writes what it prints."""
    data = make_data(tmp_path / "data")
    before = files_below(tmp_path / "data")
    words = shlex.split("--imgsz 64 --local-batch 2 --steps 3 --skip 1 --rounds 2 --starts 1 --labels 700 --amp off")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scaling", "--data", data, *words, "--out", tmp_path / "scaling.json"],
        cwd=PROJECT,
        env=CHILD_ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    rounds, answers = written["rounds"], written["answers"]
    assert [len(rounds[name]) for name in ("train", "scan", "validate", "start")] == [2, 2, 2, 1]
    for said in rounds["train"]:
        assert {name: len(ranks) for name, ranks in said.items()} == {SIDE_BY_SIDE: 2, TWO_RANKS: 2, SYNC_BN: 2}
        assert all(rank["images"] == 4 for ranks in said.values() for rank in ranks)
        waiting = {name: sum(rank["waiting"] for rank in ranks) for name, ranks in said.items()}
        assert waiting[SIDE_BY_SIDE] < waiting[TWO_RANKS] < waiting[SYNC_BN]
    assert all(rank["images"] == 700 for said in rounds["scan"] for ranks in said.values() for rank in ranks)
    assert answers["start, s, 2 ranks"]["median"] == rounds["start"][0]["2"][0]["seconds"]
    assert all(f"{name} " in printed for name in answers)
    assert files_below(tmp_path / "data") == before
    assert {path.name for path in tmp_path.iterdir()} == {"data", "scaling.json"}


# What a checkpoint costs ----------------------------------------------------------------------------------------------


def test_a_checkpoint_is_measured(tmp_path: Path) -> None:
    """What is written meanwhile is a whole state; the folder is gone."""
    data = make_data(tmp_path / "data")
    with torch_settings_kept():
        figures = checkpoint.measure_copies(str(data), "yolov5n.yaml", 2)
    assert {name: len(taken) for name, taken in figures["seconds"].items()} == {"memcpy": 2, "write": 2, "save": 2}
    assert all(0 < spent < 10 for taken in figures["seconds"].values() for spent in taken)
    weights = 4 * 1_766_623  # of yolov5n with two classes, in bytes; three times with averages and momentum
    assert 3 * weights < figures["bytes"] < 3.1 * weights


def test_tensors_of_nested_values() -> None:
    one, two, three = (torch.full((size,), 1.0) for size in (1, 2, 3))
    assert list(checkpoint.tensors_of({"a": one, "b": [1, (two, None)], "c": {0: three, "d": "x"}})) == [
        one,
        two,
        three,
    ]


def test_checkpoint_answers() -> None:
    """Ratios of the same round, and whether they are within the limits of 3 and 1.5."""
    seconds = {"memcpy": [1.0, 2.0, 1.0], "write": [2.0, 5.0, 2.0], "save": [4.0, 7.0, 4.0]}
    copies = {"net.yaml": {"bytes": 10**7, "tensors": 3, "seconds": seconds}}
    starts = {checkpoint.FRESH: [2.0, 4.0, 2.0], checkpoint.RESUMED: [2.0, 4.4, 4.0]}
    rows = {row.what: row for row in checkpoint.summarize(copies, starts)}
    assert rows["net.yaml: write / memcpy"].ratios == (2.0, 2.5, 2.0)
    assert rows["net.yaml: save / memcpy"].ratios == (4.0, 3.5, 4.0)
    assert rows["start of a resumed run / of a new one"].ratios == (1.0, 1.1, 2.0)
    assert [row.met for row in rows.values()] == [True, False, True]


@pytest.mark.slow
def test_checkpoint_benchmark(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    words = ["--data", data, "--cfg", "yolov5n.yaml", "--rounds", 1, "--starts", 1, "--rows", tmp_path / "found.json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", *map(str, words)],
        cwd=PROJECT,
        env=CHILD_ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["key"] for row in found] == ["C15"] * 3
    assert all(len(row["ratios"]) == 1 and row["what"] in done.stdout for row in found)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "found.json"}
    with pytest.raises(UserError, match=r"it said:\n(?s:.*)error: --data nowhere\.yaml: "):
        checkpoint.started(["--data", "nowhere.yaml"])
