"""Which image goes to which rank at which step, and what it looks like there.

Order and augmentation are a pure function of (seed, epoch, position in the epoch). Ranks, workers, prefetching, caches
and restarts do not enter: the sampler says everything about a sample in a ``SampleRequest``, the data set answers it
without any state, and a sample's random numbers come from a generator of its own.

Shape letters: B images in a batch of this rank, T targets in the batch, H W network input in pixels, n images of the
split, K batches in an epoch.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from utils import augmentations
from utils.batch_slots import BatchSlots
from utils.config import Hyp
from utils.dataset import LabelIndex, read_image
from utils.errors import LostDataError, UserError
from utils.forks import fork_context, keep_freed_memory, name_process
from utils.image_cache import ImageCache
from utils.images import ImageError
from utils.interrupts import STOP_SIGNALS, end_in_a_while, interrupts_held
from utils.leisure import NICENESS, Leisure
from utils.loader_notes import NO_IMAGE, LoaderNotes
from utils.polygons import Polygons
from utils.torch_utils import ALONE, DistEnv, gather_objects, once_per_machine

# A position is a 64-bit word of a generator's counter. No epoch has this many samples, so the topmost ones serve what
# is drawn once per epoch or batch.
ORDER_POSITION = 2**64 - 1
SHAPE_POSITION = 2**64 - 2

PREFETCH_BATCHES = 2  # per worker
SLOTS = PREFETCH_BATCHES + 2  # per worker: training holds a batch and maybe the one before, which it is about to drop
FILLING = 1.0  # seconds that the first step waits at most for the queues to be full
MULTI_SCALE = (0.5, 1.5)  # of the image size
SUBSTITUTES = 8  # images that are tried in the place of one that can't be read, before that is an error


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample of a run; equal requests give equal samples.

    Attributes:
        epoch: 0-based.
        position: in the epoch, not wrapped: it goes on past n where the epoch's first images fill the last batch.
        index: of the image in the label index.
        height: of the network input, pixels.
        width: of the network input, pixels.
    """

    epoch: int
    position: int
    index: int
    height: int
    width: int


class Unreadable(NamedTuple):
    """An image that could not be read: its place in the label index, and the reason."""

    image: int
    reason: str


class Sample(NamedTuple):
    """The answer to a request.

    Attributes:
        request: what was asked for.
        image: (H, W, 3) uint8 BGR.
        labels: (n, 5) float32 [class, cx, cy, w, h] cxcywhn of the image; (0, 5) without labels.
        geometry: [h0, w0, ratio, pad_left, pad_top]; see ``Batch``.
        unreadable: images that are not in it, for they could not be read.
    """

    request: SampleRequest
    image: np.ndarray
    labels: np.ndarray
    geometry: tuple[float, float, float, float, float]
    unreadable: Sequence[Unreadable] = ()


class Batch(NamedTuple):
    """One rank's share of a batch.

    Attributes:
        images: (B, 3, H, W) uint8 RGB, channels last in memory as images are, and as networks are fastest with.
        targets: (T, 6) float32 [image, class, cx, cy, w, h], cxcywhn of the network input; image indexes this batch.
        indices: (B,) int64, the places in the label index of the images that were asked for.
        epoch: 0-based.
        k: number of the batch in its epoch (training) or in the split (validation).
        geometry: (B, 5) float32 [h0, w0, ratio, pad_left, pad_top]: the original's size in pixels, its enlargement and
            the padding before it in pixels of the network input. Zeros in training.
        unreadable: images that are not in it, for they could not be read: in training others are in their place, in
            validation grey.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    epoch: int
    k: int
    geometry: Tensor
    unreadable: Sequence[Unreadable] = ()


def _generator(seed: int, epoch: int, position: int, number: int = 0) -> np.random.Generator:
    """Philox (Salmon et al. 2011) with (seed, epoch) as key and the position in the counter's highest word.

    A stream counts up from there in the lower words, so it would take 2^128 blocks to run into another one's numbers,
    and 2^64 into those of the same position with another ``number``.
    """
    key = np.array([seed, epoch], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, number, position], np.uint64)))


def sample_rng(seed: int, epoch: int, position: int) -> np.random.Generator:
    """All random numbers of the sample at ``position`` (not wrapped) of ``epoch``; seed and epoch are not negative."""
    assert position < SHAPE_POSITION
    return _generator(seed, epoch, position)


def substitutes_rng(seed: int, epoch: int, position: int, number: int) -> np.random.Generator:
    """Images in the place of the one of a sample that can't be read; ``number``: how many of it could not before."""
    return _generator(seed, epoch, position, 1 + number)


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """(n,) int64 permutation of the image indices."""
    return _generator(seed, epoch, ORDER_POSITION).permutation(n)


def batch_imgsz(seed: int, epoch: int, k: int, imgsz: int, stride: int, multi_scale: bool) -> int:
    """Image size of batch ``k``: with ``multi_scale`` a multiple of ``stride`` in [0.5, 1.5] x imgsz, else imgsz."""
    if not multi_scale:
        return imgsz
    # Not below two strides: a coarsest map of a single cell has no spread for BatchNorm to measure.
    low, high = max(math.ceil(MULTI_SCALE[0] * imgsz / stride), 2), max_imgsz(imgsz, stride, multi_scale) // stride
    return stride * int(_generator(seed, epoch, SHAPE_POSITION, k).integers(low, high, endpoint=True))


def max_imgsz(imgsz: int, stride: int, multi_scale: bool) -> int:
    """Largest image size of any batch."""
    return math.floor(MULTI_SCALE[1] * imgsz / stride) * stride if multi_scale else imgsz


def resize_batch(images: Tensor, imgsz: int, stride: int) -> Tensor:
    """Stretch (B, C, H, W) float images bilinearly so that the longer side is ``imgsz``, sides multiples of ``stride``.

    The shorter side is rounded up. Normalized targets stay valid.
    """
    height, width = images.shape[2:]
    longer = max(height, width)
    shape = [stride * -(-side * imgsz // (longer * stride)) for side in (height, width)]
    if shape == [height, width]:
        return images
    return F.interpolate(images, size=shape, mode="bilinear", align_corners=False)


class RectBatches(NamedTuple):
    """Images batched by aspect ratio.

    Attributes:
        order: (n,) image indices by rising height / width; equal ones stay in index order.
        shapes: K pairs (height, width), one for each run of ``batch`` images of ``order``.
    """

    order: np.ndarray
    shapes: list[tuple[int, int]]


def rect_batches(shapes: np.ndarray, batch: int, imgsz: int, stride: int, pad: float) -> RectBatches:
    """Sort images by aspect ratio and give each batch the smallest shape that holds its images at ``imgsz``.

    Args:
        shapes: (n, 2) int [height, width] of the original images.
        batch: images in a batch; the last one may have fewer.
        imgsz: longer side of the images, pixels.
        stride: the batch's sides are multiples of it.
        pad: added to the sides, in strides, before they are rounded up.
    """
    order = np.argsort(shapes[:, 0] / shapes[:, 1], kind="stable")  # the default breaks ties by the kind of CPU
    return RectBatches(
        order,
        [
            _rect_shape(shapes[order[start]], shapes[order[min(start + batch, len(order)) - 1]], imgsz, stride, pad)
            for start in range(0, len(order), batch)
        ],
    )


def _rect_shape(widest: Sequence[int], tallest: Sequence[int], imgsz: int, stride: int, pad: float) -> tuple[int, int]:
    """Shape of a batch between two originals [height, width]: square unless all its images lie or all stand."""
    height = width = (1, 1)  # fractions of imgsz; kept as fractions, for a rounding error would cost a whole stride
    if tallest[0] < tallest[1]:
        height = (int(tallest[0]), int(tallest[1]))
    elif widest[0] > widest[1]:
        width = (int(widest[1]), int(widest[0]))
    rows, columns = (stride * math.ceil(a * imgsz / (b * stride) + pad) for a, b in (height, width))
    return rows, columns


class TrainBatches:
    """Endless batches of requests for one rank, epoch after epoch, from any batch of any epoch on.

    Batch k of an epoch is its positions k B to k B + B - 1 over all ranks (B the global batch), and a rank's share a
    slice of them. The last batch is filled up: from the epoch's start, or with rectangular batches from its own images.
    Every batch is full on every rank, also when the set is smaller than the batch.

    Args:
        n: images in the set, at least one.
        global_batch: images in a batch over all ranks, a multiple of ``world_size``.
        seed: of the run, not negative.
        rank: this process.
        world_size: processes.
        imgsz: height and width of square batches, pixels.
        start_epoch: first epoch.
        start_batch: first batch of the first epoch.
        rect: shapes of rectangular batches of ``global_batch`` images; their order then changes with the epoch, and who
            is in which does not.
    """

    def __init__(
        self,
        n: int,
        global_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        imgsz: int,
        start_epoch: int = 0,
        start_batch: int = 0,
        rect: RectBatches | None = None,
    ) -> None:
        assert n > 0, "an empty set"
        assert global_batch % world_size == 0, f"{global_batch} images over {world_size} ranks"
        self.n = n
        self.global_batch = global_batch
        self.seed = seed
        self.slots = np.arange(global_batch).reshape(world_size, -1)[rank]
        self.imgsz = imgsz
        self.start_epoch = start_epoch
        self.start_batch = start_batch
        self.rect = rect

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.n // self.global_batch)

    def __iter__(self) -> Iterator[list[SampleRequest]]:
        epoch, first = self.start_epoch, self.start_batch
        while True:
            order = epoch_order(self.n if self.rect is None else len(self), self.seed, epoch)
            for k in range(first, len(self)):
                yield self._requests(epoch, k, order)
            epoch, first = epoch + 1, 0

    def _requests(self, epoch: int, k: int, order: np.ndarray) -> list[SampleRequest]:
        """This rank's share of batch ``k``; ``order`` permutes the epoch's images or rectangular batches."""
        positions = k * self.global_batch + self.slots
        if self.rect is None:
            shape = (self.imgsz, self.imgsz)
            indices = order[positions % self.n]
        else:
            shape = self.rect.shapes[order[k]]
            start = order[k] * self.global_batch
            members = self.rect.order[start : start + self.global_batch]
            indices = members[self.slots % len(members)]
        return [
            SampleRequest(epoch, position, index, *shape)
            for position, index in zip(positions.tolist(), indices.tolist(), strict=True)
        ]


def val_batches(index: LabelIndex, imgsz: int, batch: int, stride: int, pad: float = 0.5) -> list[list[SampleRequest]]:
    """All batches of a validation pass, each image once; fixed by split, image size and batch, never by the ranks."""
    rect = rect_batches(index.shapes, batch, imgsz, stride, pad)
    requests = [
        SampleRequest(0, position, image, *rect.shapes[position // batch])
        for position, image in enumerate(rect.order.tolist())
    ]
    return [requests[start : start + batch] for start in range(0, len(requests), batch)]


def create_cache(
    index: LabelIndex, imgsz: int, mode: str, env: DistEnv = ALONE, *, train: bool, logger: logging.Logger | None = None
) -> ImageCache:
    """A cache for the resized images of a ``DetectionDataset`` on ``index``, which training interpolates otherwise.

    Made by the first rank of each machine and shared by all its ranks. Collective: every rank must call it.

    Args:
        index: of the split.
        imgsz: longer side of the images, pixels.
        mode: ``ram``, ``disk`` or ``off``.
        env: this rank's place.
        train: whether the data set has ``hyp``.
        logger: see ``ImageCache.create``.
    """
    shapes = augmentations.resized_shapes(index.shapes, imgsz)
    interpolation = "linear" if train else "area"
    cache = once_per_machine(
        lambda: ImageCache.create(index, imgsz, mode, shapes=shapes, interpolation=interpolation, logger=logger), env
    )
    counts = gather_objects(cache.count, env)
    if min(counts, default=0) < max(counts, default=0):
        (logger or logging.getLogger("lockstep")).warning(
            f"image cache: ranks hold {', '.join(map(str, counts))} images; those without decode them every time"
        )
    return cache


class DetectionDataset(Dataset[Sample]):
    """Answers requests; without state but for the caches, which never change an answer.

    Args:
        index: images and labels.
        cache: of the resized images; see ``create_cache``.
        hyp: augmentation of training; None for validation.
        imgsz: longer side of the resized images, pixels.
        seed: of the run.
        rect: rectangular training: no mosaic.
        strict: whether an image that can't be read ends the run. Else another one takes its place in training; in
            validation it is grey.

    Attributes:
        leisure: of a loader process that shares its cores with training.
        note: told which image is being read or made a sample of, by its place in the label index, and NO_IMAGE after
            that.
    """

    def __init__(
        self,
        index: LabelIndex,
        cache: ImageCache,
        hyp: Hyp | None,
        imgsz: int,
        seed: int = 0,
        rect: bool = False,
        strict: bool = False,
    ) -> None:
        self.index = index
        self.cache = cache
        self.hyp = hyp
        self.imgsz = imgsz
        self.seed = seed
        self.rect = rect
        self.strict = strict
        self.note: Callable[[int], None] = _nobody_asks
        self.leisure: Leisure[SampleRequest, Sample] | None = None

    def __len__(self) -> int:
        return len(self.index)

    def __getitems__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return the samples of a batch; PyTorch's loaders look for this method."""
        return self.leisure(self.__getitem__, requests) if self.leisure else [self[request] for request in requests]

    def __getitem__(self, request: SampleRequest) -> Sample:
        sample = self._validation_sample(request) if self.hyp is None else self._training_sample(request, self.hyp)
        self.note(NO_IMAGE)
        return sample

    def _training_sample(self, request: SampleRequest, hyp: Hyp) -> Sample:
        rng = sample_rng(self.seed, request.epoch, request.position)
        unreadable: list[Unreadable] = []
        image, labels = self._augmented(request, hyp, rng, unreadable)
        image = augmentations.adjust_hsv(image, hyp, rng)
        image, labels = augmentations.flip(image, labels, hyp, rng)
        labels = augmentations.labels_to_normalized(labels, request.height, request.width)
        return Sample(request, image, labels, (0.0, 0.0, 0.0, 0.0, 0.0), unreadable)

    def load(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Image ``i`` with its longer side at the image size, and its labels.

        The image is (h, w, 3) uint8 BGR and may be the cache's own, not to be written to; the labels are (n, 5)
        [class, x1, y1, x2, y2] pixels, a copy.

        Raises:
            ImageError: it is gone, or not what it was when the index was made.
        """
        self.note(i)
        image = self.cache.get(i)
        if image is None:
            height, width = self.index.shapes[i].tolist()
            if self.hyp is None:  # published figures are measured on images that are decoded whole
                image = read_image(self.index.path(i), (height, width))
                image = augmentations.resize_longest(image, self.imgsz, cv2.INTER_AREA)
            else:
                reduction = augmentations.decoding_reduction(height, width, self.imgsz)
                image = read_image(self.index.path(i), (height, width), reduction)
                image = augmentations.resize_longest(image, self.imgsz, cv2.INTER_LINEAR, (height, width))
            self.cache.put(i, image)
        return image, augmentations.labels_to_pixels(self.index.labels(i), *image.shape[:2])

    def _load_or_replace(
        self, i: int, request: SampleRequest, unreadable: list[Unreadable]
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """Image ``i``, or one in its place that can be read, a function of the request: its number, and as of `load`.

        Args:
            i: place in the label index.
            request: of the sample.
            unreadable: images of the sample that could not be read; grows.

        Raises:
            LostDataError: too many others can't be read either.
        """
        substitutes = None
        for _ in range(1 + SUBSTITUTES):
            try:
                return i, *self.load(i)
            except ImageError as error:
                if self.strict:
                    raise
                if substitutes is None:
                    substitutes = substitutes_rng(self.seed, request.epoch, request.position, len(unreadable))
                unreadable.append(self._unreadable(i, error))
                i = int(substitutes.integers(len(self)))
        last = unreadable[-1]
        raise LostDataError(
            f"{1 + SUBSTITUTES} images in a row, drawn at random, could not be read, the last one was "
            f"{self.index.path(last.image)}: {last.reason}; is the disk with the data still there?"
        )

    def _unreadable(self, i: int, error: ImageError) -> Unreadable:
        return Unreadable(i, " ".join(str(error).removeprefix(f"{self.index.path(i)}: ").split()))

    def _augmented(
        self, request: SampleRequest, hyp: Hyp, rng: np.random.Generator, unreadable: list[Unreadable]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The geometric part of a training sample: mosaic, maybe mixed with a second one, or a single image."""
        if self.rect or rng.random() >= hyp.mosaic:
            i, image, labels = self._load_or_replace(request.index, request, unreadable)
            outlines = self._outlines(i, image)
            return augmentations.letterbox_warp(image, labels, (request.height, request.width), hyp, rng, outlines)
        sample = self._mosaic(request.index, request, hyp, rng, unreadable)
        if rng.random() < hyp.mixup:
            second = self._mosaic(int(rng.integers(len(self))), request, hyp, rng, unreadable)
            sample = augmentations.mixup(sample, second, rng)
        return sample

    def _mosaic(
        self, i: int, request: SampleRequest, hyp: Hyp, rng: np.random.Generator, unreadable: list[Unreadable]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Image ``i`` with three partners from the whole set, in random places."""
        members = rng.permutation([i, *rng.integers(len(self), size=3)]).tolist()
        loaded = [self._load_or_replace(member, request, unreadable) for member in members]
        samples = [(image, labels) for _, image, labels in loaded]
        outlines = [self._outlines(member, image) for member, image, _ in loaded]
        return augmentations.mosaic(samples, request.height, hyp, rng, outlines)

    def _outlines(self, i: int, image: np.ndarray) -> Polygons | None:
        """Outlines of the labels of image ``i``, in pixels of its resized image; None if there are none."""
        outlines = self.index.outlines(i)
        if outlines is None:
            return None
        return outlines._replace(points=outlines.points * np.array(image.shape[1::-1], np.float32))

    def _validation_sample(self, request: SampleRequest) -> Sample:
        """The resized image in the middle of its batch's shape."""
        height, width = self.index.shapes[request.index].tolist()
        unreadable = []
        try:
            image, labels = self.load(request.index)
        except ImageError as error:
            if self.strict:
                raise
            unreadable.append(self._unreadable(request.index, error))
            shape = augmentations.resized_shape(height, width, self.imgsz)
            image = np.full((*shape, 3), augmentations.GREY, np.uint8)
            labels = augmentations.labels_to_pixels(self.index.labels(request.index), *shape)
        # Boxes use the halves of the padding as they are, pixels the rounded ones: where the padding is odd, boxes are
        # half a pixel off. Published figures of YOLOv5 are measured so.
        pad_left, pad_top = (request.width - image.shape[1]) / 2, (request.height - image.shape[0]) / 2
        labels[:, [1, 3]] += pad_left
        labels[:, [2, 4]] += pad_top
        labels = augmentations.labels_to_normalized(labels, request.height, request.width)
        padded, _, _ = augmentations.letterbox(image, (request.height, request.width))
        ratio = self.imgsz / max(height, width)
        return Sample(request, padded, labels, (height, width, ratio, pad_left, pad_top), unreadable)


def _nobody_asks(i: int) -> None:
    """Take no note."""


def collate(samples: Sequence[Sample], batch_size: int, slots: BatchSlots | None = None) -> Batch:
    """Join samples of one shape.

    Args:
        samples: at least one.
        batch_size: images in a batch over all ranks, by which positions are counted.
        slots: for the images of the batches of loader processes.
    """
    first, worker = samples[0].request, get_worker_info()
    shape = (len(samples), first.height, first.width, 3)
    handed = slots.take(worker.id, shape) if slots is not None and worker is not None else None
    array = np.empty(shape, np.uint8) if handed is None else handed.array
    for image, sample in zip(array, samples, strict=True):
        cv2.cvtColor(sample.image, cv2.COLOR_BGR2RGB, dst=image)
    counts = [len(sample.labels) for sample in samples]
    targets = np.empty((sum(counts), 6), np.float32)
    targets[:, 0] = np.repeat(np.arange(len(samples)), counts)
    targets[:, 1:] = np.concatenate([sample.labels for sample in samples])
    images: Any = torch.from_numpy(array).permute(0, 3, 1, 2) if handed is None else handed
    return Batch(
        images,
        torch.from_numpy(targets),
        torch.tensor([sample.request.index for sample in samples], dtype=torch.int64),
        first.epoch,
        first.position // batch_size,
        torch.tensor([sample.geometry for sample in samples], dtype=torch.float32),
        [unreadable for sample in samples for unreadable in sample.unreadable],
    )


def choose_num_workers(limit: int, local_world_size: int, local_batch: int) -> int:
    """Loader processes of one rank: at most ``limit``, its share of the cores and its images in a batch; 0 = none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(limit, max(cores // local_world_size, 1), local_batch)


def choose_val_batch(wanted: int, global_batch: int) -> int:
    """Images of a validation batch: as wanted; for 0 no more than of a training batch, so that it fits as well."""
    return wanted or min(global_batch, 32)


def _init_worker(worker_id: int, notes: LoaderNotes, yield_cores: bool, slots: BatchSlots | None) -> None:
    """One thread per worker; signals to stop are the main process's business, which then ends the workers.

    Schedulers send them to all processes at once, and the main process may still need batches up to where it stops.
    """
    info: Any = get_worker_info()
    if yield_cores and hasattr(os, "nice"):
        os.nice(NICENESS)
        info.dataset.leisure = Leisure(slots.taken) if slots else None
    info.dataset.note = notes.begin(worker_id)
    name_process(f"loader {worker_id}")
    keep_freed_memory()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda number, frame: end_in_a_while())


def _data_loader(
    dataset: DetectionDataset,
    batches: TrainBatches | list[list[SampleRequest]],
    batch_size: int,
    num_workers: int,
    device: torch.device,
) -> tuple[DataLoader, LoaderNotes, BatchSlots | None]:
    """PyTorch's loader over batches of requests, with workers that live as long as it does, their notes and slots."""
    parallel = num_workers > 0
    notes = LoaderNotes(dataset.index.path, num_workers)
    if not parallel:
        dataset.note = notes.begin(0)
    forked = parallel and sys.platform == "linux"
    slots = BatchSlots(num_workers, SLOTS, _largest_batch(batches)) if forked else None
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=partial(collate, batch_size=batch_size, slots=slots),
        pin_memory=device.type == "cuda",
        worker_init_fn=partial(_init_worker, notes=notes, yield_cores=device.type == "cpu", slots=slots),
        multiprocessing_context=fork_context() if forked else "spawn" if parallel else None,
        prefetch_factor=PREFETCH_BATCHES if parallel else None,
        persistent_workers=parallel,
        generator=torch.Generator(),  # of seeds that nobody uses; each pass would else move PyTorch's global generator
    )
    return loader, notes, slots


def _largest_batch(batches: TrainBatches | list[list[SampleRequest]]) -> int:
    """Bytes of the images of this rank's largest batch."""
    if isinstance(batches, TrainBatches):
        shapes = [(batches.imgsz, batches.imgsz)] if batches.rect is None else batches.rect.shapes
        return 3 * len(batches.slots) * max(height * width for height, width in shapes)
    return 3 * max((len(requests) * requests[0].height * requests[0].width for requests in batches), default=0)


def _without_traceback(error: ImageError | LostDataError) -> UserError | LostDataError:
    """Say which image could not be read; PyTorch puts the traceback of the worker into the message."""
    said = str(error).rpartition(f"{type(error).__module__}.{type(error).__name__}: ")[2].strip()
    if isinstance(error, LostDataError):
        return LostDataError(said)
    return UserError(f"{said}, although it could be read when the run began (--strict); replace the image or remove it")


def _end_workers(batches: Iterator[Batch] | None) -> None:
    """End the processes of one of PyTorch's iterators, which does so by itself only when its last reference goes.

    An exception on its way keeps references, a notebook even the last one that was shown. And if it is a cycle that
    goes, the iterator's queues are closed before it can tell its processes to end: it then waits 10 s for each of them.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        batches._shutdown_workers()


class TrainLoader(Iterator[Batch]):
    """An endless iterator of training batches; one pass over all epochs, so nothing is set anew between them.

    Args:
        loader: over ``TrainBatches``.
        notes: of its processes.
        slots: of their batches.
        device: that trains.

    Attributes:
        batches_per_epoch: K.
    """

    def __init__(self, loader: DataLoader, notes: LoaderNotes, slots: BatchSlots | None, device: torch.device) -> None:
        self.batches_per_epoch = len(loader)
        self._notes = notes
        self._filling = slots if device.type == "cpu" else None
        self._full = loader.num_workers * PREFETCH_BATCHES
        self._device, self._waited = device, 0.0
        self._unreadable: dict[int, str] = {}
        with interrupts_held():  # the workers are forked here
            self._batches: Iterator[Batch] | None = iter(loader)

    def __next__(self) -> Batch:
        assert self._batches is not None, "the loader is closed"
        began = time.perf_counter()
        if self._filling:
            self._fill(self._filling)
        try:
            batch = next(self._batches)
        except (ImageError, LostDataError) as error:
            raise _without_traceback(error) from None
        # On CUDA the host runs ahead of its device, which only loses time if it has nothing left to do by now.
        if self._device.type != "cuda" or torch.cuda.current_stream(self._device).query():
            self._waited += time.perf_counter() - began
        if batch.unreadable:
            self._unreadable.update(batch.unreadable)
        return batch

    def _fill(self, slots: BatchSlots) -> None:
        """Wait until the queues are full, before training takes the cores that fill them: both would be slowed down."""
        self._filling = None
        end = time.perf_counter() + FILLING
        while slots.taken() < self._full and time.perf_counter() < end:
            time.sleep(0.005)

    def waited(self) -> float:
        """Return for how many seconds training has waited for batches so far."""
        return self._waited

    def take_unreadable(self) -> dict[int, str]:
        """Return the images that could not be read since the last call: reason by place in the label index."""
        taken, self._unreadable = self._unreadable, {}
        return taken

    def close(self) -> None:
        """End the worker processes."""
        batches, self._batches = self._batches, None
        _end_workers(batches)
        self._notes.close()


class ValLoader:
    """This rank's batches of a validation pass; every ``iter`` is a new pass with the same workers.

    Args:
        loader: over the batches of this rank.
        notes: of its processes.
    """

    def __init__(self, loader: DataLoader, notes: LoaderNotes) -> None:
        self._loader: DataLoader | None = loader
        self._batches: Iterator[Batch] | None = None
        self._notes = notes

    def __len__(self) -> int:
        assert self._loader is not None, "the loader is closed"
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        assert self._loader is not None, "the loader is closed"
        with interrupts_held():  # the first time workers are forked here
            self._batches = batches = iter(self._loader)
        try:
            yield from batches
        except ImageError as error:
            raise _without_traceback(error) from None

    def close(self) -> None:
        """End the worker processes."""
        batches, self._loader, self._batches = self._batches, None, None
        _end_workers(batches)
        self._notes.close()


def train_loader(
    dataset: DetectionDataset,
    global_batch: int,
    env: DistEnv,
    num_workers: int,
    *,
    stride: int = 32,
    start_epoch: int = 0,
    start_batch: int = 0,
) -> TrainLoader:
    """Start loading this rank's share of the training batches.

    Args:
        dataset: with ``hyp``; its ``rect`` chooses rectangular batches.
        global_batch: images in a batch over all ranks.
        env: rank, world size and device of this process.
        num_workers: loader processes of this rank; see ``choose_num_workers``.
        stride: sides of rectangular batches are multiples of it.
        start_epoch: epoch of the first batch.
        start_batch: number of the first batch in its epoch.
    """
    index = dataset.index
    rect = rect_batches(index.shapes, global_batch, dataset.imgsz, stride, pad=0.0) if dataset.rect else None
    batches = TrainBatches(
        len(dataset),
        global_batch,
        dataset.seed,
        env.rank,
        env.world_size,
        imgsz=dataset.imgsz,
        start_epoch=start_epoch,
        start_batch=start_batch,
        rect=rect,
    )
    return TrainLoader(*_data_loader(dataset, batches, global_batch, num_workers, env.device), env.device)


def val_loader(
    dataset: DetectionDataset,
    batch_size: int,
    env: DistEnv,
    num_workers: int,
    *,
    stride: int = 32,
    pad: float = 0.5,
) -> ValLoader:
    """This rank's share of the validation batches: whole ones, every ``world_size``-th.

    Args:
        dataset: without ``hyp``.
        batch_size: images in a batch; every batch is computed by one rank.
        env: rank, world size and device of this process.
        num_workers: loader processes of this rank; see ``choose_num_workers``.
        stride: sides of the batches are multiples of it.
        pad: see ``rect_batches``.
    """
    batches = val_batches(dataset.index, dataset.imgsz, batch_size, stride, pad)[env.rank :: env.world_size]
    loader, notes, _ = _data_loader(dataset, batches, batch_size, num_workers, env.device)
    return ValLoader(loader, notes)
