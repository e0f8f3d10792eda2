"""Memory in which loader processes hand over batches."""

import pickle
import sys
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from utils.config.recipe import Hyp
from utils.data import loaders as dataloaders
from utils.data.batch_slots import BatchSlots, Carried, Placed
from utils.data.dataset import DetectionDataset
from utils.data.image_cache import ImageCache
from utils.data.index import LabelIndex, build_index
from utils.data.loaders import PREFETCH_BATCHES, SLOTS, train_loader, val_loader
from utils.dist.place import DistEnv

needs_forks = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared by forking")
SHAPE = (2, 5, 4, 3)


@pytest.fixture
def index(tmp_path: Path) -> LabelIndex:
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for i in range(12):
        shape = (40 + 2 * i, 64, 3)
        cv2.imwrite(str(tmp_path / f"images/{i:02d}.png"), np.random.default_rng(i).integers(0, 256, shape, np.uint8))
        (tmp_path / f"labels/{i:02d}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    return build_index([tmp_path / "images"], 1, split="train")


def arrived(slots: BatchSlots, worker: int, value: int) -> torch.Tensor | None:
    """What comes out where a process of the loader puts a batch full of one value in; None without a slot."""
    placed = slots.take(worker, SHAPE)
    placed.array[:] = value
    tensor: torch.Tensor = pickle.loads(pickle.dumps(placed))
    assert tensor.shape == (2, 3, 5, 4) and tensor.is_contiguous(memory_format=torch.channels_last)
    assert (tensor == value).all()
    return tensor if isinstance(placed, Placed) else None


def test_a_slot_is_taken_while_anything_of_its_batch_is_there() -> None:
    slots = BatchSlots(2, 2, 120)
    first, second = arrived(slots, 1, 1), arrived(slots, 1, 2)
    assert first is not None and second is not None
    assert arrived(slots, 1, 3) is None
    seen = second[1, 2].flatten()[3:5]
    del second
    assert arrived(slots, 1, 4) is None
    assert arrived(slots, 0, 5) is not None  # has slots of its own
    assert seen.tolist() == [2, 2] and (first == 1).all()
    del seen
    third = arrived(slots, 1, 6)
    assert third is not None and (third == 6).all() and (first == 1).all()
    assert isinstance(slots.take(0, (2, 40, 60, 3)), Carried)  # larger than a slot, which is a page
    del slots
    assert (first == 1).all() and (third == 6).all()  # the memory stays while it is in use


@needs_forks
@pytest.mark.parametrize("keep", [0, 1, 100])
def test_batches_stay_what_they_are(index: LabelIndex, keep: int) -> None:
    """Those that are kept too, when there are no slots left; 100 of a slow reader, and one that drops each at once."""
    dataset = DetectionDataset(index, ImageCache(), Hyp(), 64)
    with closing(train_loader(dataset, 4, DistEnv(), 0)) as loader:
        expected = [next(loader).images for _ in range(20)]
    kept, places = [], []
    with closing(train_loader(dataset, 4, DistEnv(), 2)) as loader:
        for k in range(20):
            batch = next(loader)
            assert torch.equal(batch.images, expected[k])
            places.append(batch.images.data_ptr())
            kept.append(batch.images)
            del batch
            kept = kept[len(kept) - keep :] if keep else []
    for k, images in enumerate(kept, 20 - len(kept)):
        assert torch.equal(images, expected[k])
    if keep < 2:
        assert len(set(places)) <= 2 * SLOTS
        assert len(set(places)) < 20
    else:
        assert len(set(places)) == 20


@needs_forks
def test_batches_of_any_shape(index: LabelIndex) -> None:
    """Rectangular ones: the largest fits."""
    loaders = [val_loader(DetectionDataset(index, ImageCache(), None, 64), 2, DistEnv(), n, stride=8) for n in (0, 1)]
    with closing(loaders[0]), closing(loaders[1]):
        for _ in range(3):
            places = set()
            for alone, handed in zip(*loaders, strict=True):
                assert torch.equal(alone.images, handed.images)
                places.add(handed.images.shape[2:])
            assert len(places) > 1


@needs_forks
def test_the_first_batch_comes_when_all_are_there(index: LabelIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that fill their queues and a first step on the same cores hinder each other."""
    monkeypatch.setattr(dataloaders, "FILLING", 60.0)  # a busy machine may need more than it waits for
    with closing(train_loader(DetectionDataset(index, ImageCache(), Hyp(), 64), 4, DistEnv(), 2)) as loader:
        assert loader._filling is not None
        slots = loader._filling
        batch = next(loader)  # which holds its slot
        assert slots.taken() >= 2 * PREFETCH_BATCHES, batch.k
