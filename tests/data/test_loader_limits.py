"""A run says when its loader is what limits it."""

import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.config.recipe import Hyp
from utils.data.dataset import DetectionDataset, Sample
from utils.data.image_cache import ImageCache
from utils.data.index import build_index
from utils.data.loaders import train_loader
from utils.data.sampler import SampleRequest
from utils.dist import stalls
from utils.dist.place import DistEnv
from utils.dist.stalls import Pace


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(stalls, "SHORTEST_EPOCH", 0.0)
    return lambda: capsys.readouterr().out.splitlines()


class Clock:
    """Seconds that a training process has waited, as an epoch goes on."""

    def __init__(self) -> None:
        self.waited = 100.0  # of an earlier epoch

    def epoch(self, pace: Pace, share: float) -> None:
        """Let an epoch pass of which this share is waiting."""
        with pace.epoch():
            began = time.perf_counter()
            time.sleep(0.1)
            self.waited += share * (time.perf_counter() - began)


def test_is_said_once_and_only_where_it_is_so(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    pace = Pace(DistEnv(), lambda: clock.waited, "what helps: more --workers", filling=False)
    clock.epoch(pace, 0.7)  # with the start of the processes in it
    assert said() == []
    clock.epoch(pace, 0.07)
    assert said() == []
    with monkeypatch.context() as patch:
        patch.setattr(stalls, "SHORTEST_EPOCH", 600.0)
        clock.epoch(pace, 0.9)  # too short to tell
    assert said() == []
    for _ in range(3):
        clock.epoch(pace, 0.5)
    (line,) = said()
    found = re.fullmatch(
        r"the loader is what limits: (\d+)% of the epoch was spent waiting for images; what helps: more --workers", line
    )
    assert found and 40 <= int(found[1]) <= 50  # a busy machine may stop between two looks at the clock


def test_an_epoch_that_fills_a_cache_tells_nothing(said: Callable[[], list[str]]) -> None:
    clock = Clock()
    pace = Pace(DistEnv(), lambda: clock.waited, "", filling=True)
    for _ in range(2):
        clock.epoch(pace, 0.7)
        assert said() == []
    clock.epoch(pace, 0.7)
    assert len(said()) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_is_measured(tmp_path: Path, workers: int) -> None:
    """Batches of 0.2 s: the training process waits for each, but not where it takes longer itself."""
    (tmp_path / "images").mkdir()
    cv2.imwrite(str(tmp_path / "images/0.png"), np.zeros((32, 32, 3), np.uint8))

    class Slow(DetectionDataset):
        def __getitem__(self, request: SampleRequest) -> Sample:
            time.sleep(0.2)
            return super().__getitem__(request)

    dataset = Slow(build_index([tmp_path / "images"], 1, split="train"), ImageCache(), Hyp(), 32)
    with closing(train_loader(dataset, 1, DistEnv(), workers)) as batches:
        next(batches)
        time.sleep(1.5)
        begun, spent = batches.waited(), 0.0
        for _ in range(2):
            start = time.perf_counter()
            next(batches)
            spent += time.perf_counter() - start
            time.sleep(0.5)
        waited = batches.waited() - begun
        assert waited < 0.3 if workers else 0.4 <= waited <= spent
        begun, start = batches.waited(), time.perf_counter()
        for _ in range(6):
            next(batches)
        spent = time.perf_counter() - start
        assert 0.7 * spent < batches.waited() - begun <= spent
        assert spent > 0.6
