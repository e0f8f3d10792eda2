"""What is measured over ranks is what it says: steps, bytes on a cable, and epochs on several devices."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import devices, ranks
from benchmarks.devices import DeviceSettings, Epoch, device_flag, table
from benchmarks.measuring import Options
from benchmarks.ranks_worker import Counted, in_every_batch
from benchmarks.scaling_rank import cores
from tests.common import PROJECT
from tests.runs import CHILD_ENVIRONMENT, make_data
from utils.core.errors import UserError
from utils.training import data_parallel

TINY = ranks.Size("yolov5n.yaml", 64, 1)
two_cores = pytest.mark.skipif(len(cores()) < 2, reason="two ranks need a core each")

# Steps and windows ----------------------------------------------------------------------------------------------------


def test_rows_of_steps() -> None:
    """Each ratio is one of its round; the limit is the slower one of computing and exchange, or their sum."""
    taken = {"alone": [4.0, 8.0, 4.0], "ours": [5.0, 10.0, 32.0], "exchange": [0.5, 0.5, 6.0]}
    taken |= {"alone, window": [3.5, 7.5, 4.0], "window": [5.0, 10.0, 10.0], "every batch": [10.0, 10.0, 25.0]}
    step, window, saved = ranks.step_rows(taken, ranks.USUAL)
    assert step.ratios == (0.8, 0.8, 0.75)  # the last one's exchange takes longer than its batch
    assert window.ratios == (0.8, 0.8, 1.0)
    assert saved.ratios == (2.0, 1.0, 2.5)
    assert [row.met for row in (step, window, saved)] == [False, False, None]


def test_every_batch_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is asked for, and not afterwards, also if it fails."""
    asked: list[bool] = []
    monkeypatch.setattr(data_parallel, "accumulating", lambda model, step_now: asked.append(step_now))

    def work() -> None:
        data_parallel.accumulating(torch.nn.Identity(), False)

    def failing() -> None:
        work()
        raise UserError("no")

    in_every_batch(work)
    with pytest.raises(UserError):
        in_every_batch(failing)
    work()
    assert asked == [True, True, False]


@pytest.mark.slow
@two_cores
def test_steps_of_ranks(tmp_path: Path) -> None:
    taken = ranks.measure_steps(Options(rounds=2), TINY, tmp_path / "job")
    assert set(taken) == {"alone", "ours", "exchange", "alone, window", "window", "every batch"}
    assert all(len(seconds) == 2 and 0 < min(seconds) <= max(seconds) < 60 for seconds in taken.values())


@pytest.mark.slow
def test_what_a_rank_dies_of_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the ranks said:\n(?s:.*)nowhere\.yaml"):
        ranks.measure_steps(Options(rounds=1), ranks.Size("nowhere.yaml", 64, 1), tmp_path / "job")


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_rows_of_bytes() -> None:
    """Least are, of two ranks each, the gradients of every step and the statistics once."""
    said = [Counted(4600, 10, 100, 200, 10), Counted(4200, 10, 100, 200, 10)]
    full = ranks.byte_row("C13", "off", said)
    assert full.ratios == (4400 / 4200,)
    assert full.met
    assert "headers 15.00%" in full.note
    half = ranks.byte_row("C13a", "bf16", said)
    assert half.ratios == (4400 / 2200,)
    assert not half.met


@pytest.mark.slow
def test_bytes_on_a_cable(tmp_path: Path) -> None:
    """Gradients once a step, half of them in bf16; rank 0 sends the averaged weights besides, for the validation."""
    steps = 6
    data = ranks.prepare(Options(), TINY, steps, tmp_path / "data")[-1]
    with ExitStack() as stack:
        try:
            inside = stack.enter_context(ranks.cable())
        except OSError as error:
            pytest.skip(str(error))
        counted = {how: ranks.count_bytes(data, how, tmp_path / how, inside) for how in ("off", "bf16")}
    numbers = counted["off"][0].parameters
    assert numbers > 1_700_000  # of yolov5n
    for how, width in (("off", 4), ("bf16", 2)):
        first, second = counted[how]
        assert first.steps == second.steps == steps
        weights = 4 * numbers + first.buffer_bytes
        assert second.sent == pytest.approx(width * numbers * steps, rel=0.03)
        assert first.sent == pytest.approx(width * numbers * steps + weights, rel=0.03)


# Several devices ------------------------------------------------------------------------------------------------------


def settings(**changes: Any) -> DeviceSettings:
    usual: dict[str, Any] = {"data": "", "cfg": "yolov5n.yaml", "imgsz": 64, "local_batch": 2, "amp": "off"}
    return DeviceSettings(**usual | {"devices": "1,2", "device": "cpu", "workers": 0} | changes)


def test_numbers_of_devices() -> None:
    assert settings(devices="1, 2,8").counts == [1, 2, 8]
    for wrong in ("", "1,", "0", "two", "-1"):
        with pytest.raises(UserError, match=f"--devices {wrong}: takes numbers"):
            _ = settings(devices=wrong).counts


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones that are named, as many as there are; cores are shared."""
    assert device_flag(3, "cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_flag(count, "") for count in (1, 2, 3)] == ["cuda:0", "cuda:0,cuda:1", None]
    assert [device_flag(count, "1,0") for count in (1, 2, 4)] == ["cuda:1", "cuda:1,cuda:0", None]
    with pytest.raises(UserError, match="cuda:2"):
        device_flag(1, "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_flag(2, "") == "cpu"


def test_table_of_devices() -> None:
    """Speed-ups are those of images a second; what was not measured says so, on both sides."""
    epochs = {1: Epoch(100, 200.0, 3.0, 10, 4.0), 3: Epoch(150, 110.0, 3.5, 10, 2.0)}
    lines = [line.split() for line in table(epochs)]
    assert [line[0] for line in lines] == ["devices", "1", "2", "3", "4", "8"]
    assert lines[1][1:] == ["3:20", "1.00", "0.5", "3.0", "4.0", "s", "20:39", "1.00"]
    assert lines[2][1:] == ["not", "measured", "11:43", "1.76"]
    assert lines[3][1:] == ["110.0", "s", "2.73", "1.4", "3.5", "2.0", "s", "not", "measured"]
    assert lines[5][1:] == ["not", "measured", "3:09", "6.56"]


def test_joined_figures() -> None:
    trained = [{"images": 8, "seconds": 2.0, "memory": 1.0}, {"images": 8, "seconds": 3.0, "memory": 0.5}]
    validated = [{"images": 5, "seconds": 1.0}, {"images": 5, "seconds": 0.5}]
    assert Epoch.of(trained, validated) == Epoch(16, 3.0, 1.0, 5, 1.0)


@pytest.mark.slow
def test_devices_by_the_command(tmp_path: Path) -> None:
    """Ranks of this machine's CPU: the whole epoch, in one process and in two; nothing is left behind."""
    data = make_data(tmp_path / "data")
    words = ["--devices", "1,2", "--device", "cpu", "--data", data, "--imgsz", 64, "--local-batch", 2, "--workers", 0]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", *map(str, words), "--out", str(tmp_path / "found.json")],
        cwd=PROJECT,
        env=CHILD_ENVIRONMENT | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "found.json").read_text())["epochs"]
    found = {int(count): Epoch(**epoch) for count, epoch in written.items()}
    assert {count: (epoch.images, epoch.val_images) for count, epoch in found.items()} == {1: (10, 4), 2: (12, 4)}
    for epoch in found.values():
        assert 0 < epoch.seconds < 300
        assert 0 < epoch.val_seconds < 300
        assert 0.1 < epoch.memory < 10
    assert done.stdout.splitlines()[-1] == "these settings are others: compare speed-ups only"
    assert "\n".join(table(found)) in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"data", "found.json"}
    assert devices.NOT_MEASURED in done.stdout
