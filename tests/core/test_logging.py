"""The log, results.csv, and meters that stay on the device."""

import csv
import logging
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from tqdm import tqdm

from tests.common import PROJECT
from utils.core.logging import CsvLog, DeviceMeter, get_logger

COLUMNS = ("epoch", "train/box_loss", "metrics/mAP_0.5:0.95")


def row(epoch: int, value: float = 0.5) -> dict[str, float]:
    return {"epoch": epoch, "train/box_loss": value, "metrics/mAP_0.5:0.95": value / 2}


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path)


# ---- log ----


def test_main_process_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger(0)
    log.info("plain %s", "line")
    log.warning("look out")
    log.debug("too much")
    assert capsys.readouterr().out == "plain line\nWARNING: look out\n"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\u732b caf\\udce9"), ("ascii", "\\u732b caf\\udce9")])
def test_what_stdout_cannot_write_is_escaped(encoding: str, shown: str) -> None:
    """Names of files that are no UTF-8, and letters that a terminal lacks."""
    code = "from utils.core.logging import get_logger; get_logger().info('\u732b caf\\udce9')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True
    )
    assert (done.stdout.decode(encoding), done.stderr) == (f"{shown}\n", b"")


def test_other_ranks_say_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger(3)
    log.info("plain")
    log.warning("look out")
    log.error("only I know")
    assert capsys.readouterr().out == "ERROR: only I know\n"
    get_logger(0)


def test_lines_are_not_doubled(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking again must not add a handler, nor must a script's own root handler repeat each line."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stdout)
    root.addHandler(handler)
    try:
        for _ in range(3):
            get_logger(0)
        get_logger(0).info("once")
    finally:
        root.removeHandler(handler)
    assert capsys.readouterr().out == "once\n"


def test_lines_go_above_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with tqdm(total=3, desc="epoch", file=sys.stdout) as bar:
        bar.update()
        get_logger(0).info("in between")
        bar.update()
    lines = capsys.readouterr().out.replace("\r", "\n").splitlines()
    assert "in between" in [line.strip() for line in lines]  # a line of its own, not glued to the bar


# ---- results.csv ----


def test_results_are_a_plain_table(tmp_path: Path) -> None:
    """The names of the columns are keys as they stand there (ultralytics/ultralytics PR 16808)."""
    log = CsvLog(tmp_path / "results.csv", COLUMNS)
    log.append(row(1, 1 / 3))
    text = (tmp_path / "results.csv").read_text()
    assert text == "epoch,train/box_loss,metrics/mAP_0.5:0.95\n1,0.333333,0.166667\n"
    assert pd.read_csv(tmp_path / "results.csv")["epoch"].tolist() == [1]
    with (tmp_path / "results.csv").open(newline="") as file:
        assert [one["train/box_loss"] for one in csv.DictReader(file)] == ["0.333333"]


def test_a_fresh_run_starts_an_empty_table(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    CsvLog(path, COLUMNS).append(row(1))
    assert len(read(path)) == 1
    CsvLog(path, COLUMNS)
    assert len(read(path)) == 0


def test_an_epoch_done_again_has_one_row(tmp_path: Path) -> None:
    """Killed between row and checkpoint, a run does an epoch twice (ultralytics/ultralytics#22364, rf-detr#1321)."""
    path = tmp_path / "results.csv"
    log = CsvLog(path, COLUMNS)
    for epoch in range(1, 5):
        log.append(row(epoch))
    resumed = CsvLog(path, COLUMNS, keep_epochs=2)
    assert list(read(path)["epoch"]) == [1, 2]
    resumed.append(row(3, 9.0))
    table = read(path)
    assert list(table["epoch"]) == [1, 2, 3]
    assert list(table["train/box_loss"]) == [0.5, 0.5, 9.0]
    resumed.trim(1)
    assert list(read(path)["epoch"]) == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.csv"]


def test_a_torn_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    CsvLog(path, COLUMNS).append(row(1))
    with path.open("a") as file:
        file.write("2,0.5,0.2")  # the run died here
    CsvLog(path, COLUMNS, keep_epochs=5).append(row(2))
    assert list(read(path)["epoch"]) == [1, 2]
    assert list(read(path)["metrics/mAP_0.5:0.95"]) == [0.25, 0.25]


def test_new_columns_stay_empty_in_old_rows(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    CsvLog(path, COLUMNS[:2]).append({"epoch": 1, "train/box_loss": 0.5})
    CsvLog(path, COLUMNS, keep_epochs=1).append(row(2))
    table = read(path)
    assert list(table["train/box_loss"]) == [0.5, 0.5]
    assert table["metrics/mAP_0.5:0.95"].isna().tolist() == [True, False]


def test_a_row_has_all_columns(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "results.csv", COLUMNS)
    with pytest.raises(AssertionError, match="train/box_loss"):
        log.append({"epoch": 1, "metrics/mAP_0.5:0.95": 1.0})


def test_no_file_to_keep_rows_of(tmp_path: Path) -> None:
    CsvLog(tmp_path / "results.csv", COLUMNS, keep_epochs=3)
    assert len(read(tmp_path / "results.csv")) == 0


@pytest.mark.parametrize("left", ["gone", "", "epoch,train/box_loss\n", "epoch,train/box_loss\n2,0.5\n"])
def test_rows_that_are_gone(tmp_path: Path, left: str) -> None:
    """A resumed run's table began in a later epoch (roboflow/rf-detr#1321): spare rows are taken, others are named."""
    path = tmp_path / "results.csv"
    if left != "gone":
        path.write_text(left)
    there = [2] * ("2" in left)
    log = CsvLog(path, COLUMNS, 3, {1: row(1, 0.25), 2: row(2), 4: row(4)})
    assert (log.filled, log.missing) == ([1, 2][: 2 - len(there)], [3])
    log.append(row(4))
    assert read(path)["epoch"].tolist() == [1, 2, 4]
    assert read(path)["train/box_loss"].tolist() == [0.25, 0.5, 0.5]


def test_a_table_from_epoch_0_goes_on_from_1(tmp_path: Path) -> None:
    """So did older runs, and YOLOv5's; an epoch has one number all over a table (ultralytics/ultralytics#22364)."""
    path = tmp_path / "results.csv"
    path.write_text("epoch,train/box_loss\n 0, 3\n 1, 2\n 2, 1\n")
    log = CsvLog(path, COLUMNS, 2)
    log.append(row(3))
    assert (log.filled, log.missing) == ([], [])
    assert read(path)["epoch"].tolist() == [1, 2, 3] and read(path)["train/box_loss"].tolist() == [3, 2, 0.5]


# ---- meter ----


def test_meter_is_a_weighted_mean() -> None:
    meter = DeviceMeter(2, "cpu")
    meter.update(torch.tensor([1.0, 10.0]), weight=3)
    meter.update(torch.tensor([5.0, 30.0], requires_grad=True))
    assert meter.mean() == [2.0, 15.0]
    meter.reset()
    meter.update(torch.tensor([7.0, 8.0]))
    assert meter.mean() == [7.0, 8.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_meter_leaves_out_what_is_not_finite(bad: float) -> None:
    """All values of such an update, its weight too: the batch is skipped as a whole."""
    meter = DeviceMeter(2, "cpu")
    meter.update(torch.tensor([bad, 1.0]))
    assert all(value != value for value in meter.mean())  # nothing was counted yet
    meter.update(torch.tensor([1.0, 10.0]))
    meter.update(torch.tensor([100.0, bad]), weight=5)
    meter.update(torch.tensor([3.0, 20.0]))
    assert meter.mean() == [2.0, 15.0]


def test_meter_without_updates() -> None:
    assert all(value != value for value in DeviceMeter(3, "cpu").mean())


def test_meter_keeps_small_values_beside_large_sums() -> None:
    """In float32 a sum of 2**24 ones stands still."""
    meter = DeviceMeter(1, "cpu")
    meter.update(torch.ones(1), weight=2.0**24)
    for _ in range(8):
        meter.update(torch.full((1,), 2.0))
    assert meter.mean()[0] == (2**24 + 16) / (2**24 + 8)


def test_meter_goes_on_from_its_state() -> None:
    whole, first = DeviceMeter(2, "cpu"), DeviceMeter(2, "cpu")
    values = torch.rand(10, 2, generator=torch.Generator().manual_seed(0))
    for k, value in enumerate(values):
        whole.update(value, weight=k + 1)
        if k < 4:
            first.update(value, weight=k + 1)
    state = first.sums()
    first.update(torch.full((2,), 100.0))  # a state is a copy
    second = DeviceMeter(2, "cpu")
    second.load(state)
    for k in range(4, 10):
        second.update(values[k], weight=k + 1)
    assert second.mean() == whole.mean()
