"""The benchmark of the loader compares what it says."""

import os
from pathlib import Path

import cv2
import numpy as np
import torch

from benchmarks import loader
from benchmarks.measuring import Options
from tests.runs import torch_settings_kept
from utils.data import resizing
from utils.data.image_cache import ImageCache


def test_photos_are_like_photos(tmp_path: Path) -> None:
    folder = loader.make_photos(tmp_path, 3)
    sizes = [os.path.getsize(path) for path in sorted(folder.iterdir())]
    assert len(sizes) == 3
    assert all(100_000 < size < 170_000 for size in sizes)
    first, second = (cv2.imread(str(path)) for path in sorted(folder.iterdir())[:2])
    assert first is not None and second is not None
    assert first.shape == (480, 640, 3) and (first != second).mean() > 0.9
    assert 30 < first.std() < 60


def test_both_ways_make_the_same_kind_of_samples() -> None:
    """As many images in each, and mosaics of the same brightness and contrast: the same work."""
    loaded: dict[str, list[int]] = {"ours": [], "plain": []}
    with torch_settings_kept(), loader.opened("", 6) as index:
        ours, plain = loader.OurWay(index, ImageCache()), loader.PlainWay(index, None)
        load, labels = ours.dataset.load, plain.labels

        def ours_loaded(i: int) -> tuple[np.ndarray, np.ndarray]:
            loaded["ours"].append(i)
            return load(i)

        def plain_loaded(i: int, image: np.ndarray) -> np.ndarray:
            loaded["plain"].append(i)
            return labels(i, image)

        ours.dataset.load, plain.labels = ours_loaded, plain_loaded  # type: ignore[method-assign]
        batches = {"ours": ours.batch(0), "plain": plain.batch(0)}
        size = resizing.resized_shape(*loader.MADE_SIZE, loader.IMGSZ)
        assert plain.load(0).shape == load(0)[0].shape == (*size, 3)
    for name, batch in batches.items():
        assert (batch.shape, batch.dtype) == ((loader.BATCH, 3, loader.IMGSZ, loader.IMGSZ), torch.uint8)
        assert len(loaded[name]) == loader.BATCH * loader.MOSAIC
        assert set(loaded[name]) == set(range(6))
    grey = {name: (batch == resizing.GREY).all(1).float().mean().item() for name, batch in batches.items()}
    means = {name: batch.float().mean().item() for name, batch in batches.items()}
    spreads = {name: batch.float().std().item() for name, batch in batches.items()}
    # Each of 16 samples is brighter or darker by up to 40 %, and cut out at random.
    assert abs(means["ours"] - means["plain"]) < 40, means
    assert abs(spreads["ours"] - spreads["plain"]) < 20, spreads
    assert abs(grey["ours"] - grey["plain"]) < 0.2, grey


def test_rows() -> None:
    with torch_settings_kept():
        rows = loader.measure(Options(rounds=1), images=4, batches=1)
    assert [(row.key, row.aim) for row in rows] == [("C3", 1.35), ("C3", 0.5), ("C4", 1.5), ("C4", 0.85), ("C5", 0.5)]
    assert all(len(row.ratios) == 1 and 0 < row.median < 100 for row in rows)
