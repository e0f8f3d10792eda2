"""Batches, samples and loaders; what must never depend on ranks and workers is in test_order."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.common import PROJECT, SHARED, golden, needs_shared
from utils.config.recipe import Hyp
from utils.core.errors import Problems, UserError
from utils.core.image_files import read_image
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.image_cache import ImageCache
from utils.data.index import LabelIndex, build_index
from utils.data.loaders import choose_num_workers, collate, resize_batch, share_workers, train_loader, val_loader
from utils.data.resizing import GREY, letterbox, resize_longest, resized_shape, resized_shapes
from utils.data.sampler import SampleRequest, TrainBatches, batch_imgsz, rect_batches, val_batches
from utils.data.scan import in_processes
from utils.dist.place import DistEnv
from utils.run.inputs import check_loading

OFF = ImageCache()


def make_jpegs(root: Path, shapes: Sequence[tuple[int, int]]) -> LabelIndex:
    """A labelled split of small soft images, no two alike, the third without labels."""
    for folder in ("images", "labels"):
        (root / folder).mkdir()
    for i, (height, width) in enumerate(shapes):
        rng = np.random.default_rng(i)
        image = cv2.GaussianBlur(rng.integers(0, 256, (height, width, 3), np.uint8), (0, 0), 2)
        image[:, :, i % 3] = 255
        cv2.imwrite(str(root / "images" / f"{i:03d}.jpg"), image)
        rows = [f"{i % 4} {x:.4f} {y:.4f} 0.3 0.2" for x, y in rng.uniform(0.2, 0.8, (0 if i == 2 else 1 + i % 3, 2))]
        (root / "labels" / f"{i:03d}.txt").write_text("\n".join(rows))
    return build_index([root / "images"], 4, cache=False)


def mixed_shapes(n: int) -> list[tuple[int, int]]:
    return [((48, 64), (64, 40), (80, 80), (30, 64), (100, 90))[i % 5] for i in range(n)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> LabelIndex:
    return make_jpegs(tmp_path_factory.mktemp("set"), mixed_shapes(20))


# --- Validation ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], LabelIndex]:
    """The recorded images, and an index of them in recorded order.

    Many have the same aspect ratio, and which comes first was then settled by the sorting code of one kind of CPU. With
    the files renamed by rank, index order settles it alike everywhere.
    """
    rows = json.loads((SHARED / "golden/val_batches.json").read_text())["images"]
    root = tmp_path_factory.mktemp("golden")
    for folder, suffix in (("images", ".jpg"), ("labels", ".txt")):
        (root / folder).mkdir()
        for i, row in enumerate(rows):
            source = (SHARED / "datasets/coco128" / folder / "train2017" / row["file"]).with_suffix(suffix)
            if source.exists():
                (root / folder / f"{i:03d}{suffix}").symlink_to(source)
    return rows, build_index([root / "images"], 80, cache=False)


@needs_shared
def test_validation_reproduces_the_recorded_batches(recorded: tuple[list[dict], LabelIndex]) -> None:
    rows, index = recorded
    arrays = np.load(SHARED / "golden/val_batches.npz")
    seen = 0
    with closing(val_loader(DetectionDataset(index, OFF, None, 640), 16, DistEnv(), 2)) as loader:
        for k, batch in enumerate(loader):
            assert (batch.epoch, batch.k) == (0, k)
            assert batch.indices.tolist() == list(range(seen, seen + 16))
            for image, geometry, i in zip(batch.images, batch.geometry.tolist(), batch.indices.tolist(), strict=True):
                row = rows[i]
                assert list(image.shape[1:]) == row["batch_hw"]
                assert geometry[:2] == row["original_hw"]
                assert geometry[2] == pytest.approx(min(row["ratio_hw"]), rel=1e-6)  # of the longer side
                assert geometry[3:] == row["pad_wh"]
                height, width = row["original_hw"]
                shape = resized_shape(height, width, 640)
                assert np.divide(shape, (height, width)) == pytest.approx(row["ratio_hw"], rel=1e-12)
                pixels = image.numpy().transpose(1, 2, 0)
                thumbnail = cv2.resize(pixels, (16, 16), interpolation=cv2.INTER_AREA).astype(int)
                assert np.abs(thumbnail - arrays["thumbnails"][i]).max() <= 2
                assert pixels.mean(axis=(0, 1)) == pytest.approx(row["mean_rgb"], abs=0.5)
            targets = batch.targets.numpy().copy()
            targets[:, 0] += seen
            expected = arrays["labels"]
            expected = expected[(expected[:, 0] >= seen) & (expected[:, 0] < seen + 16)]
            np.testing.assert_allclose(targets, expected, atol=1e-6)
            seen += 16
    assert seen == len(rows)


def test_recorded_shapes_in_folder_order() -> None:
    """Without the recorded order of ties: the shapes are the same, and ties are in index order."""
    recorded = golden("val_shapes.npz")
    shuffle = np.random.default_rng(0).permutation(128)
    shapes = recorded["original_hw"][shuffle]
    rect = rect_batches(shapes, 16, 640, 32, 0.5)
    assert [list(shape) for shape in rect.shapes] == recorded["batch_hw"][::16].tolist()
    ratios = shapes[rect.order, 0] / shapes[rect.order, 1]
    keys = list(zip(ratios, rect.order, strict=True))
    assert keys == sorted(keys)


def test_recorded_sizes_and_padding() -> None:
    recorded = golden("val_shapes.npz")
    sizes = resized_shapes(recorded["original_hw"], 640)
    np.testing.assert_allclose(sizes / recorded["original_hw"], recorded["ratio_hw"], rtol=1e-12)
    for (height, width), shape, pad in zip(sizes, recorded["batch_hw"], recorded["pad_wh"], strict=True):
        padded, *offsets = letterbox(np.zeros((height, width, 3), np.uint8), tuple(shape))
        assert padded.shape[:2] == tuple(shape)
        assert offsets == [round(side - 0.1) for side in pad.tolist()]


def test_rectangular_shapes() -> None:
    def shapes(sizes: list[tuple[int, int]], pad: float = 0.0) -> list[tuple[int, int]]:
        return rect_batches(np.array(sizes), 2, 320, 32, pad).shapes

    assert shapes([(240, 320), (160, 320)]) == [(256, 320)]  # all lie: as high as the highest needs
    assert shapes([(320, 240), (320, 160)]) == [(320, 256)]  # all stand
    assert shapes([(240, 320), (320, 160)]) == [(320, 320)]
    assert shapes([(240, 320)], pad=0.5) == [(256, 352)]
    assert shapes([(192, 320), (500, 400), (64, 320)]) == [(192, 320), (320, 256)]
    # 10/21 of 672 are exactly 320; as floats 672 x (1 / 2.1) and the like round up to one stride more for some sizes.
    for stand in range(1, 60):
        assert rect_batches(np.array([(stand, 60)]), 1, 1920, 32, 0.0).shapes == [(stand * 32, 1920)]
        assert rect_batches(np.array([(60, stand)]), 1, 1920, 32, 0.0).shapes == [(1920, stand * 32)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_validation_batches_are_dealt_whole(index: LabelIndex, world_size: int) -> None:
    """Seven ranks for five batches: some have nothing to do."""
    whole = val_batches(index, 64, 4, 32)
    dataset = DetectionDataset(index, OFF, None, 64)
    got = {}
    for rank in range(world_size):
        loader = val_loader(dataset, 4, DistEnv(rank=rank, world_size=world_size), 0)
        batches = list(loader)
        assert len(batches) == len(loader)
        got.update({batch.k: batch for batch in batches})
    assert sorted(got) == list(range(5))
    for k, requests in enumerate(whole):
        expected = collate([dataset[request] for request in requests], 4)
        assert torch.equal(got[k].images, expected.images)
        assert torch.equal(got[k].targets, expected.targets)
    assert sorted(i for batch in got.values() for i in batch.indices.tolist()) == list(range(20))


def test_validation_pass_repeats_with_the_same_workers(index: LabelIndex) -> None:
    dataset = DetectionDataset(index, OFF, None, 64)
    random = torch.get_rng_state()
    with closing(val_loader(dataset, 8, DistEnv(), 2)) as loader:
        first = list(loader)
        workers = {child.pid for child in multiprocessing.active_children()}
        second = list(loader)
        assert {child.pid for child in multiprocessing.active_children()} == workers
    assert [batch.k for batch in first] == [0, 1, 2]
    assert len(first[2].images) == 4
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.images, b.images)
    assert torch.equal(torch.get_rng_state(), random)  # a pass must not move the state that a checkpoint holds


def test_validation_image_is_area_shrunk_and_padded(index: LabelIndex) -> None:
    sample = DetectionDataset(index, OFF, None, 64)[SampleRequest(0, 0, 4, 96, 64)]
    original = read_image(index.path(4))
    small = resize_longest(original, 64, cv2.INTER_AREA)
    assert small.shape == (64, 58, 3)
    np.testing.assert_array_equal(sample.image, letterbox(small, (96, 64))[0])
    assert sample.geometry == (100, 90, 0.64, 3.0, 16.0)
    expected = index.labels(4) * (1, 58 / 64, 64 / 96, 58 / 64, 64 / 96) + (0, 3 / 64, 16 / 96, 0, 0)
    np.testing.assert_allclose(sample.labels, expected, atol=1e-6)


# --- Training --------------------------------------------------------------------------------------------------------


def test_single_training_image_without_augmentation(index: LabelIndex) -> None:
    """Linear interpolation also when shrinking; labels move with the padding."""
    still = Hyp(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, mosaic=0)
    sample = DetectionDataset(index, OFF, still, 64)[SampleRequest(0, 0, 4, 64, 64)]
    small = resize_longest(read_image(index.path(4)), 64)
    np.testing.assert_array_equal(sample.image, letterbox(small, (64, 64))[0])
    expected = index.labels(4) * (1, 58 / 64, 1, 58 / 64, 1) + (0, 3 / 64, 0, 0, 0)
    np.testing.assert_allclose(sample.labels, expected, atol=1e-6)


def test_mosaic_partners_come_from_the_whole_set(index: LabelIndex) -> None:
    loaded: list[list[int]] = []

    class Recording(DetectionDataset):
        def load(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            loaded[-1].append(i)
            return super().load(i)

    dataset = Recording(index, OFF, Hyp(mixup=0.5), 64)
    for position in range(300):
        loaded.append([])
        dataset[SampleRequest(0, position, 7, 64, 64)]
    assert {len(images) for images in loaded} == {4, 8}
    assert all(7 in images[:4] for images in loaded)
    assert {i for images in loaded for i in images} == set(range(20))
    places = np.bincount([images.index(7) for images in loaded], minlength=4)
    assert places.min() > 40  # the image itself takes any of the four places
    assert np.mean([len(images) == 8 for images in loaded]) == pytest.approx(0.5, abs=0.1)


def test_mosaic_probability(index: LabelIndex) -> None:
    dataset = DetectionDataset(index, OFF, replace(Hyp(), mosaic=0.3, scale=0, translate=0, hsv_v=0), 64)
    images = [dataset[SampleRequest(0, position, 3, 64, 64)].image for position in range(200)]
    letterboxed = [(image[:10] == GREY).all() for image in images]  # 30 rows of 64 in the middle of grey
    assert np.mean(letterboxed) == pytest.approx(0.7, abs=0.1)


def test_collate_makes_planes_and_numbers_images(index: LabelIndex) -> None:
    dataset = DetectionDataset(index, OFF, None, 64)
    requests = [SampleRequest(3, 12 + j, i, 64, 96) for j, i in enumerate((2, 5, 1, 2))]
    batch = collate([dataset[request] for request in requests], 5)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (4, 3, 64, 96))
    for image, request in zip(batch.images, requests, strict=True):
        np.testing.assert_array_equal(image.numpy(), dataset[request].image[:, :, ::-1].transpose(2, 0, 1))
    assert batch.targets[:, 0].tolist() == [1] * len(index.labels(5)) + [2] * len(index.labels(1))
    assert batch.targets.dtype == torch.float32
    assert (batch.indices.tolist(), batch.indices.dtype) == ([2, 5, 1, 2], torch.int64)
    assert (batch.epoch, batch.k) == (3, 2)
    empty = collate([dataset[requests[0]]], 5)
    assert empty.targets.shape == (0, 6)


def test_rectangular_training_keeps_shapes_and_has_no_mosaic(index: LabelIndex) -> None:
    still = Hyp(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0)
    dataset = DetectionDataset(index, OFF, still, 64, rect=True)
    with closing(train_loader(dataset, 4, DistEnv(), 0, stride=16)) as loader:
        assert loader.batches_per_epoch == 5
        shapes = set()
        for _ in range(5):
            batch = next(loader)
            shapes.add(tuple(batch.images.shape[2:]))
            for image, i in zip(batch.images, batch.indices.tolist(), strict=True):
                padded, _, _ = letterbox(dataset.load(i)[0], (image.shape[1], image.shape[2]))
                np.testing.assert_array_equal(image.numpy(), padded[:, :, ::-1].transpose(2, 0, 1))
    assert shapes == {(32, 64), (48, 64), (64, 64), (64, 48)}


def test_cached_pixels_are_the_uncached_ones(index: LabelIndex) -> None:
    for train in (True, False):
        cache = create_cache(index, 64, "ram", train=train)
        dataset = DetectionDataset(index, cache, Hyp() if train else None, 64)
        plain = DetectionDataset(index, OFF, Hyp() if train else None, 64)
        shapes = resized_shapes(index.shapes, 64)
        for i in range(20):
            expected, labels = plain.load(i)
            for _ in range(2):  # decoded, then from the cache
                image, same = dataset.load(i)
                np.testing.assert_array_equal(image, expected)
                np.testing.assert_array_equal(same, labels)
            assert cache.get(i) is not None
            assert image.shape[:2] == tuple(shapes[i])
        cache.close()


def test_training_images_are_decoded_as_small_as_they_may_be(tmp_path: Path) -> None:
    """JPEG files only, and not below the training size; proportions are those of the file, also in the cache."""
    shapes = [(101, 257), (127, 90), (513, 300), (300, 1300), (64, 64), (128, 63), (20, 159)]
    reductions = [4, 1, 8, 8, 1, 2, 2]  # the last one has other proportions then, by a pixel
    index = make_jpegs(tmp_path, shapes)
    names = {1: cv2.IMREAD_COLOR, **{k: getattr(cv2, f"IMREAD_REDUCED_COLOR_{k}") for k in (2, 4, 8)}}
    with closing(create_cache(index, 64, "ram", train=True)) as cache:
        for i, (shape, reduction) in enumerate(zip(shapes, reductions, strict=True)):
            small = cv2.imread(index.path(i), names[reduction])
            assert small is not None
            height, width = resized_shape(*shape, 64)
            expected = cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)
            for source in (OFF, cache, cache):
                image, labels = DetectionDataset(index, source, Hyp(), 64).load(i)
                np.testing.assert_array_equal(image, expected)
                np.testing.assert_allclose(
                    labels[:, 3], (index.labels(i)[:, 1] + index.labels(i)[:, 3] / 2) * width, 1e-5
                )
            whole = resize_longest(read_image(index.path(i)), 64, cv2.INTER_AREA)
            np.testing.assert_array_equal(DetectionDataset(index, OFF, None, 64).load(i)[0], whole)


def test_multi_scale_sizes() -> None:
    sizes = [batch_imgsz(0, epoch, k, 320, 32, True) for epoch in range(20) for k in range(50)]
    assert set(sizes) == set(range(160, 481, 32))
    assert np.bincount(np.array(sizes) // 32)[5:].min() > 50
    assert batch_imgsz(0, 3, 4, 320, 32, True) == sizes[3 * 50 + 4]
    assert [batch_imgsz(1, 0, k, 320, 32, True) for k in range(50)] != sizes[:50]
    assert batch_imgsz(0, 3, 4, 320, 32, False) == 320
    assert min(batch_imgsz(0, 0, k, 96, 32, True) for k in range(50)) == 64  # 48 is no multiple, 32 too small


def test_resize_batch() -> None:
    images = torch.linspace(0, 1, 64).expand(2, 3, 64, 64)
    assert resize_batch(images, 64, 32) is images
    half = resize_batch(images, 32, 32)
    assert torch.allclose(half, images[..., ::2, :].unflatten(3, (32, 2)).mean(4), atol=1e-6)
    assert resize_batch(torch.zeros(1, 3, 64, 96), 160, 32).shape == (1, 3, 128, 160)  # 106.7 rounded up


# --- Processes -------------------------------------------------------------------------------------------------------


def test_close_ends_the_workers(index: LabelIndex) -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    loader = train_loader(DetectionDataset(index, OFF, Hyp(), 64), 4, DistEnv(), 2)
    next(loader)
    workers = {child.pid for child in multiprocessing.active_children()} - before
    assert len(workers) == 2
    start = time.monotonic()
    loader.close()
    assert not workers & {child.pid for child in multiprocessing.active_children()}
    assert time.monotonic() - start < 5
    loader.close()


@pytest.mark.parametrize("loader_of", [train_loader, val_loader])
def test_close_ends_the_workers_of_a_failure_too(tmp_path: Path, loader_of: Callable[..., Any]) -> None:
    """Also while somebody, as notebooks do, still has the exception, and with it all that it passed through."""
    index = make_jpegs(tmp_path, mixed_shapes(6))
    Path(index.path(4)).write_bytes(b"no image")
    hyp = Hyp() if loader_of is train_loader else None
    before = {child.pid for child in multiprocessing.active_children()}
    start = time.monotonic()
    with (
        pytest.raises(UserError) as kept,
        closing(loader_of(DetectionDataset(index, OFF, hyp, 64, strict=True), 6, DistEnv(), 2)) as loader,
    ):
        for _ in loader:
            pass
    assert kept.tb is not None
    assert {child.pid for child in multiprocessing.active_children()} == before
    assert time.monotonic() - start < 8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_ends_the_run_with_its_path(tmp_path: Path, workers: int) -> None:
    """With --strict: one sentence, without the traceback of a worker; without it see test_data_at_run_time."""
    index = make_jpegs(tmp_path, mixed_shapes(6))
    Path(index.path(4)).write_bytes(b"no image")
    want = rf"^{re.escape(index.path(4))}: cannot be decoded: it is no image, .*, although it could be read .* "
    want += r"\(--strict\); replace .*it$"
    with (
        closing(train_loader(DetectionDataset(index, OFF, Hyp(), 64, strict=True), 6, DistEnv(), workers)) as batches,
        pytest.raises(UserError, match=want),
    ):
        next(batches)
    with (
        closing(val_loader(DetectionDataset(index, OFF, None, 64, strict=True), 6, DistEnv(), workers)) as loader,
        pytest.raises(UserError, match=want),
    ):
        list(loader)


def test_dataset_travels_to_spawned_workers(index: LabelIndex) -> None:
    cache = create_cache(index, 64, "ram", train=True)
    dataset = DetectionDataset(index, cache, Hyp(), 64, seed=3)
    request = next(iter(TrainBatches(20, 4, 3, imgsz=64)))[1]
    sample = dataset[request]
    again = pickle.loads(pickle.dumps(dataset))[pickle.loads(pickle.dumps(request))]
    np.testing.assert_array_equal(again.image, sample.image)
    np.testing.assert_array_equal(again.labels, sample.labels)
    cache.close()


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert choose_num_workers(8, 1, 64) == 8
    assert choose_num_workers(8, 4, 64) == 4  # cores are shared by the ranks of a machine
    assert choose_num_workers(8, 1, 2) == 2
    assert choose_num_workers(8, 32, 64) == 1
    assert choose_num_workers(0, 1, 64) == 0


def test_loaders_of_a_run_share_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and validation had N processes each (ultralytics/ultralytics#18802)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    assert share_workers(8, 1, 64, 32) == (6, 2)
    assert share_workers(32, 1, 64, 32) == (16, 16)  # as many as cores each: there are enough
    assert share_workers(8, 4, 64, 32) == (4, 4)
    assert share_workers(8, 1, 5, 32) == (5, 3)  # a batch of five images has no use for more
    for limit in range(20):
        train, val = share_workers(limit, 1, 64, 32)
        assert 0 <= val <= train <= limit and train + val <= limit and (train > 0) == (limit > 0)


def in_a_daemon(index: LabelIndex, answer: multiprocessing.Queue[object]) -> None:
    problems = Problems()
    check_loading(4, choose_num_workers(4, 1, 16), problems)
    dataset = DetectionDataset(index, OFF, Hyp(), 64)
    with closing(train_loader(dataset, 4, DistEnv(), choose_num_workers(4, 1, 4))) as loader:
        seen = len(next(loader).images)
    scanned = sorted(in_processes(lambda start: start, [0, 1, 2], 2))  # type: ignore[arg-type, return-value]
    answer.put((seen, scanned, problems.messages))


@pytest.mark.skipif(sys.platform != "linux", reason="starts the daemonic process by fork")
def test_a_daemonic_process_loads_by_itself(index: LabelIndex, capfd: pytest.CaptureFixture[str]) -> None:
    """Such a one may start no others: a traceback of the DataLoader (ultralytics/ultralytics#4915)."""
    answer: multiprocessing.Queue[object] = multiprocessing.get_context("fork").Queue()
    process = multiprocessing.get_context("fork").Process(target=in_a_daemon, args=(index, answer), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answer.get(timeout=10) == (4, [(0, 0), (1, 1), (2, 2)], [])
    assert capfd.readouterr().out.count("this process is daemonic") == 1


OPEN_FILES = """
import os, resource, sys
from utils.run.preflight import check_open_files
from utils.core.errors import UserError
check_open_files(4)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))
try:
    check_open_files(4)
except UserError as error:
    print(error)
check_open_files(0)
from utils.data.loaders import _starting
try:
    with _starting():
        kept = [os.pipe() for _ in range(32)]
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_too_few_open_files_are_one_line() -> None:
    """A traceback of the DataLoader (ultralytics/ultralytics#4413); said before the run, or where it begins."""
    before, started = subprocess.check_output([sys.executable, "-c", OPEN_FILES], text=True, cwd=PROJECT).splitlines()
    assert re.match(r"this run needs about \d+ open files, 32 are allowed; .* ulimit -n 1024, or use fewer", before)
    assert "too many open files (ulimit -n)" in started and "--workers" in started


def test_labels_fit_their_images_in_every_sample(index: LabelIndex) -> None:
    dataset = DetectionDataset(index, OFF, Hyp(degrees=20, shear=5, mixup=0.3, flipud=0.5), 64)
    counts = 0
    for position in range(100):
        labels = dataset[SampleRequest(0, position, position % 20, 64, 64)].labels
        counts += len(labels)
        corners = np.concatenate([labels[:, 1:3] - labels[:, 3:] / 2, labels[:, 1:3] + labels[:, 3:] / 2])
        assert corners.size == 0 or (corners.min() > -1e-6 and corners.max() < 1 + 1e-6)
        assert (labels[:, 3:] > 2 / 64 - 1e-6).all()
    assert counts > 100
