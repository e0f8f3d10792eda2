"""Samples are a function of (seed, epoch, position): ranks, workers, caches and restarts do not enter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice

import numpy as np
import pytest
import torch

from tests.data.test_loaders import OFF, make_jpegs, mixed_shapes
from utils.config.recipe import Hyp
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.image_cache import ImageCache
from utils.data.index import LabelIndex
from utils.data.loaders import Batch, collate, train_loader
from utils.data.sampler import RectBatches, SampleRequest, TrainBatches, epoch_order, rect_batches, sample_rng
from utils.dist.place import DistEnv

N, BATCH, STEPS, SEED = 21, 8, 30, 5  # three batches an epoch, the last filled up with three images
HYP = Hyp(degrees=5, shear=2, mosaic=0.7, mixup=0.4, flipud=0.3)  # every kind of draw


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> LabelIndex:
    return make_jpegs(tmp_path_factory.mktemp("set"), mixed_shapes(N))


@pytest.fixture(scope="module", params=[False, True], ids=["square", "rect"])
def rect(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def expected(index: LabelIndex, rect: bool) -> list[Batch]:
    """The run's global batches without loader or ranks, their samples made last to first."""
    dataset = make_dataset(index, OFF, rect)
    shapes = rect_batches(index.shapes, BATCH, 64, 16, 0.0) if rect else None
    steps = list(islice(TrainBatches(N, BATCH, SEED, imgsz=64, rect=shapes), STEPS))
    answers = {(q.epoch, q.position): dataset[q] for requests in reversed(steps) for q in reversed(requests)}
    return [collate([answers[q.epoch, q.position] for q in requests], BATCH) for requests in steps]


def make_dataset(index: LabelIndex, cache: ImageCache, rect: bool) -> DetectionDataset:
    return DetectionDataset(index, cache, HYP, 64, SEED, rect)


def load(
    dataset: DetectionDataset, workers: int = 0, world_size: int = 1, start: tuple[int, int] = (0, 0)
) -> Iterator[Batch]:
    """Global batches put together from what each rank loads."""
    with ExitStack() as stack:
        ranks = []
        for rank in range(world_size):
            env = DistEnv(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
            loader = train_loader(dataset, BATCH, env, workers, stride=16, start_epoch=start[0], start_batch=start[1])
            ranks.append(stack.enter_context(closing(loader)))
        while True:
            parts = [next(loader) for loader in ranks]
            assert len({(part.epoch, part.k) for part in parts}) == 1
            for rank, part in enumerate(parts):
                assert len(part.images) == BATCH // world_size
                part.targets[:, 0] += rank * BATCH // world_size
            yield Batch(
                torch.cat([part.images for part in parts]),
                torch.cat([part.targets for part in parts]),
                torch.cat([part.indices for part in parts]),
                parts[0].epoch,
                parts[0].k,
                torch.cat([part.geometry for part in parts]),
            )


def assert_same(got: Iterator[Batch], expected: list[Batch]) -> None:
    for step, (a, b) in enumerate(zip(islice(got, len(expected)), expected, strict=True)):
        assert (a.epoch, a.k) == (b.epoch, b.k)
        assert torch.equal(a.indices, b.indices), f"images of step {step}"
        assert torch.equal(a.targets, b.targets), f"boxes of step {step}"
        assert torch.equal(a.images, b.images), f"pixels of step {step}"


# --- The same run everywhere -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than a small machine has cores
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_nothing(index: LabelIndex, expected: list[Batch], rect: bool, workers: int) -> None:
    """They prefetch beyond the end of an epoch; the order of the next one must be there by then.

    ultralytics/yolov5#6741 and its like: epochs 0 and 1 came in the same order.
    """
    assert_same(load(make_dataset(index, OFF, rect), workers), expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_global_batch(index: LabelIndex, expected: list[Batch], rect: bool, world_size: int) -> None:
    """Rectangular batches have one shape on all ranks (ultralytics/yolov5#757, #842, #4181, #8698)."""
    assert_same(load(make_dataset(index, OFF, rect), 0, world_size), expected)


def test_ranks_with_workers(index: LabelIndex, expected: list[Batch], rect: bool) -> None:
    assert_same(load(make_dataset(index, OFF, rect), 2, 2), expected[:12])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_changes_nothing(index: LabelIndex, expected: list[Batch], rect: bool, workers: int) -> None:
    """Filled by whoever comes first, so its state at a step depends on timing."""
    cache = create_cache(index, 64, "ram", train=True)
    assert cache.count == N
    assert_same(load(make_dataset(index, cache, rect), workers), expected)
    assert all(cache.get(i) is not None for i in range(N))
    cache.close()


@pytest.mark.parametrize("step", [1, 3, 14, 29])
def test_start_in_mid_epoch(index: LabelIndex, expected: list[Batch], rect: bool, step: int) -> None:
    assert_same(load(make_dataset(index, OFF, rect), 1, 1, divmod(step, 3)), expected[step:])


@pytest.mark.parametrize("workers", [0, 1])
def test_global_generators_do_not_enter(index: LabelIndex, expected: list[Batch], rect: bool, workers: int) -> None:
    """Neither are they read, nor are they moved."""
    torch.manual_seed(workers)
    np.random.seed(workers)
    assert_same(load(make_dataset(index, OFF, rect), workers), expected[:4])
    assert np.random.random() == np.random.RandomState(workers).random()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(workers)))


# --- What the order is -----------------------------------------------------------------------------------------------


def positions(batches: TrainBatches, steps: int) -> list[list[SampleRequest]]:
    return list(islice(batches, steps))


def test_each_epoch_shows_every_image_once_and_wraps() -> None:
    steps = positions(TrainBatches(N, BATCH, SEED, imgsz=64), 30)
    for epoch in range(10):
        requests = [q for batch in steps[3 * epoch : 3 * epoch + 3] for q in batch]
        assert [q.epoch for q in requests] == [epoch] * 24
        assert [q.position for q in requests] == list(range(24))
        images = [q.index for q in requests]
        assert sorted(images[:N]) == list(range(N))
        assert images[N:] == images[:3]
        assert {(q.height, q.width) for q in requests} == {(64, 64)}


def test_order_differs_between_epochs_and_seeds() -> None:
    """Every epoch a new order (ultralytics/yolov5#5622), and ``--seed`` reaches it."""
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in range(5) for epoch in range(20)]
    assert len(set(orders)) == 100
    assert all(sorted(order) == list(range(50)) for order in orders)
    firsts = np.bincount([order[0] for order in orders], minlength=50)
    assert firsts.max() < 12


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_set_smaller_than_the_batch(world_size: int) -> None:
    """Also smaller than the number of ranks: an empty share was an index error."""
    ranks = [positions(TrainBatches(3, BATCH, SEED, rank, world_size, imgsz=64), 4) for rank in range(world_size)]
    for epoch in range(4):
        requests = [q for rank in ranks for q in rank[epoch]]
        order = epoch_order(3, SEED, epoch).tolist()
        assert [q.index for q in requests] == (order * 3)[:8]
        assert [q.position for q in requests] == list(range(8))
        assert {q.epoch for q in requests} == {epoch}


def test_rectangular_batches_keep_their_images_and_change_places() -> None:
    shapes = np.array(mixed_shapes(N))
    rect = rect_batches(shapes, BATCH, 64, 16, 0.0)
    batches = TrainBatches(N, BATCH, SEED, imgsz=64, rect=rect)
    steps = positions(batches, 30)
    groups = [set(rect.order[start : start + BATCH].tolist()) for start in range(0, N, BATCH)]
    orders = set()
    for epoch in range(10):
        parts = steps[3 * epoch : 3 * epoch + 3]
        places = [groups.index({q.index for q in part}) for part in parts]
        assert sorted(places) == [0, 1, 2]
        orders.add(tuple(places))
        for part, place in zip(parts, places, strict=True):
            assert {(q.height, q.width) for q in part} == {rect.shapes[place]}
            counts = np.unique([q.index for q in part], return_counts=True)[1]
            assert counts.max() - counts.min() <= 1  # filled up from its own images
        assert [q.position for part in parts for q in part] == list(range(24))
    assert len(orders) > 2


def test_a_rectangular_batch_of_one_image() -> None:
    rect = RectBatches(np.array([1, 0, 2]), [(32, 64), (64, 32)])
    last = {q.index for part in positions(TrainBatches(3, 2, 0, imgsz=64, rect=rect), 2) for q in part}
    assert last == {0, 1, 2}


def test_batches_are_divided_evenly_or_not_at_all() -> None:
    with pytest.raises(AssertionError, match="8 images over 3 ranks"):
        TrainBatches(N, 8, 0, 0, 3, imgsz=64)


# --- Streams of random numbers ---------------------------------------------------------------------------------------


def test_no_two_samples_share_a_stream() -> None:
    """Over epochs, positions, seeds and the images that fill the last batch: all first draws are different."""
    steps = positions(TrainBatches(N, BATCH, SEED, imgsz=64), 300)
    draws = [sample_rng(SEED, q.epoch, q.position).integers(2**63) for batch in steps for q in batch]
    draws += [sample_rng(seed, 0, position).integers(2**63) for seed in (6, 7, 2**40) for position in range(1000)]
    assert len(set(draws)) == len(draws) == 2400 + 3000


def test_neighbouring_streams_do_not_overlap() -> None:
    """With the position in the counter's low word, stream p would be stream 0 from its p-th block on."""
    long = set(sample_rng(0, 0, 0).integers(2**63, size=200_000).tolist())
    for position in (1, 2, 3, 1000):
        assert not long & set(sample_rng(0, 0, position).integers(2**63, size=1000).tolist())
    state = sample_rng(3, 4, 5).bit_generator.state["state"]
    assert state["counter"].tolist() == [0, 0, 0, 5]
    assert state["key"].tolist() == [3, 4]


def test_repeated_images_of_the_last_batch_look_different(index: LabelIndex) -> None:
    dataset = make_dataset(index, OFF, False)
    third = positions(TrainBatches(N, BATCH, SEED, imgsz=64), 3)[2]
    first = SampleRequest(0, third[-1].position - N, third[-1].index, 64, 64)
    assert first in positions(TrainBatches(N, BATCH, SEED, imgsz=64), 1)[0]
    assert not np.array_equal(dataset[first].image, dataset[third[-1]].image)
