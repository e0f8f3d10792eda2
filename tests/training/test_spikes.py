"""Row 53 of the faults: a loss that leaps is said once, with its step and images, and nothing else is."""

import math
import random
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from tests.models.test_build import SPEC
from tests.runs import flags, make_data, train_here
from utils.training.bad_batches import FACTOR, LONGEST, SETTLED, Spike, SpikeLog
from utils.training.loss import DetectionLoss

AT = SETTLED + 8  # the micro-batch whose loss leaps in the run below


def noted(totals: list[float], look_every: int = 10) -> list[Spike]:
    """What is found in micro-batches with these losses, two to an optimizer step."""
    log = SpikeLog(torch.device("cpu"))
    for number, total in enumerate(totals):
        log.add(number // 2, [number], total * torch.tensor([0.5, 0.25, 0.25]))
        if (number + 1) % look_every == 0:
            log.read()
    log.read()
    return log.take()


def test_a_leap_is_found_once() -> None:
    calm = [1.0 + number % 2 for number in range(2 * SETTLED)]
    leap = 2 * FACTOR + 1
    found = noted([*calm, leap, *calm, leap, leap])
    assert [(spike.step, spike.images) for spike in found] == [(SETTLED, [2 * SETTLED])]
    assert found[0].loss == pytest.approx(leap)
    assert found[0].before == pytest.approx(2.0, rel=0.01)


def test_what_is_no_leap() -> None:
    """The start of a run, losses that are not finite, and sets where most images are empty."""
    generator = random.Random(0)
    assert noted([10.0**number for number in range(10)] + [1.0] * SETTLED) == []
    assert noted([*[1.0] * SETTLED, math.nan, math.inf, 1.0, 2.0]) == []
    assert noted([generator.choice([0.01, 0.01, 0.01, 1.0]) for _ in range(20 * SETTLED)]) == []


def test_long_pauses_between_looks() -> None:
    """What does not fit is not looked at, and spoils nothing."""
    found = noted([*[1.0] * SETTLED, *[1.0] * LONGEST, 50.0, 1.0, *[1.0] * LONGEST, 900.0], look_every=10_000)
    assert found == []


def test_the_size_of_a_loss_long_ago_is_forgotten() -> None:
    assert noted([100.0, *[1.0] * 1000, 50.0]) == []
    assert [spike.images for spike in noted([100.0, *[1.0] * 10_000, 50.0])] == [[10_001]]


def test_a_run_names_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(tmp_path / "data", 20, 2)
    (tmp_path / "net.yaml").write_text(yaml.safe_dump(SPEC))
    plain, numbers = DetectionLoss.items, iter(range(10_000))

    def items(self: DetectionLoss, sums: Tensor, counts: Tensor) -> Tensor:
        value = plain(self, sums, counts)
        return value * 100 if next(numbers) == AT else value

    monkeypatch.setattr(DetectionLoss, "items", items)
    train_here(*flags(data, tmp_path, f"--cfg {tmp_path}/net.yaml --batch 2 --nbs 2 --epochs 12 --noval --patience 0"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "the loss leapt" in line]
    assert len(lines) == 1
    assert f" in optimizer step {AT}, " in lines[0]
    assert lines[0].count(str(tmp_path / "data/images/train")) == 2
