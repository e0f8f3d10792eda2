"""Counted, not timed: how often images are decoded and files opened on their way into samples."""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from utils.config.recipe import Hyp
from utils.core import image_files as images
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.index import LabelIndex, build_index
from utils.data.loaders import train_loader, val_loader
from utils.data.sampler import SampleRequest
from utils.dist.place import DistEnv

N, BATCH, IMGSZ = 24, 4, 64
needs_forks = pytest.mark.skipif(sys.platform != "linux", reason="loader processes must see the counters")


@pytest.fixture
def index(tmp_path: Path) -> LabelIndex:
    """Images of 48 x 64 pixels, each of a brightness that tells its number."""
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for i in range(N):
        cv2.imwrite(str(tmp_path / f"images/{i:02d}.jpg"), np.full((48, 64, 3), 10 * i, np.uint8))
        (tmp_path / f"labels/{i:02d}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    return build_index([tmp_path / "images"], 1, split="train")


@pytest.fixture
def decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Gives how often each image was decoded so far, by all processes, which append a byte to one file."""
    log, real = tmp_path / "decodes", cv2.imdecode
    log.touch()

    def counted(data: np.ndarray, flags: int) -> np.ndarray | None:
        image = real(data, flags)
        assert image is not None
        with open(log, "ab", buffering=0) as file:
            file.write(bytes([round(float(image.mean()) / 10)]))
        return image

    monkeypatch.setattr(images.cv2, "imdecode", counted)
    return lambda: np.bincount(np.frombuffer(log.read_bytes(), np.uint8), minlength=N).tolist()


@needs_forks
def test_an_image_is_decoded_once_in_a_run(index: LabelIndex, decodes: Callable[[], list[int]]) -> None:
    """One pass over single images by two processes, then two epochs of mosaics, in which both ask for each image.

    Loaders of training work ahead, and so do mosaics: there two processes may decode an image at the same moment, when
    neither has it yet.
    """
    with closing(create_cache(index, IMGSZ, "ram", train=True)) as cache:
        filling = DetectionDataset(index, cache, Hyp(mosaic=0), IMGSZ)
        with closing(val_loader(filling, BATCH, DistEnv(), 2)) as one_pass:
            assert sum(len(batch.images) for batch in one_pass) == N
        assert decodes() == [1] * N
        with closing(train_loader(DetectionDataset(index, cache, Hyp(), IMGSZ), BATCH, DistEnv(), 2)) as batches:
            for _ in range(2 * N // BATCH):
                next(batches)
    assert decodes() == [1] * N


class Opened:
    """Counts files that are opened below a folder, by Python's own audit, which can't be taken back."""

    def __init__(self) -> None:
        self.folder, self.names = "", Counter[str]()
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder and event == "open" and str(arguments[0]).startswith(self.folder):
            self.names[Path(str(arguments[0])).name] += 1


OPENED = Opened()


@pytest.mark.parametrize("mode", ["off", "ram"])
def test_files_are_opened_once_for_each_image_of_a_sample(index: LabelIndex, tmp_path: Path, mode: str) -> None:
    """No label files, no second look at an image; none at all once they are cached."""
    loaded: list[int] = []

    class Recording(DetectionDataset):
        def load(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            loaded.append(i)
            return super().load(i)

    with closing(create_cache(index, IMGSZ, mode, train=True)) as cache:
        dataset = Recording(index, cache, Hyp(), IMGSZ)
        for i in range(N if mode == "ram" else 0):
            dataset.load(i)
        loaded.clear()
        OPENED.folder, OPENED.names = str(tmp_path), Counter()
        try:
            for position in range(20):
                dataset[SampleRequest(0, position, position % N, IMGSZ, IMGSZ)]
        finally:
            OPENED.folder = ""
    assert len(loaded) == 4 * 20
    assert Counter(OPENED.names) == ({} if mode == "ram" else Counter(f"{i:02d}.jpg" for i in loaded))
