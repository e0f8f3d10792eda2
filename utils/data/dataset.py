"""What a sample of a run looks like: the answer to a request, a function of nothing else.

The data set has no state, and equal requests give equal samples, also when an image can't be read.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
from torch.utils.data import Dataset

from utils.config.recipe import Hyp
from utils.core.errors import LostDataError
from utils.core.image_files import ImageError, read_image
from utils.data import augmentations, resizing
from utils.data.image_cache import ImageCache
from utils.data.index import LabelIndex
from utils.data.loader_notes import NO_IMAGE
from utils.data.polygons import Polygons
from utils.data.sampler import SampleRequest, sample_rng, substitutes_rng
from utils.dist.collectives import gather_objects, once_per_machine
from utils.dist.place import ALONE, DistEnv

SUBSTITUTES = 8  # images that are tried in the place of one that can't be read, before that is an error


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


def create_cache(
    index: LabelIndex,
    imgsz: int,
    mode: str,
    env: DistEnv = ALONE,
    *,
    train: bool,
    spare: int = 0,
    logger: logging.Logger | None = None,
) -> ImageCache:
    """A cache for the resized images of a ``DetectionDataset`` on ``index``, which training interpolates otherwise.

    Made by the first rank of each machine and shared by all its ranks. Collective: every rank must call it.

    Args:
        index: of the split.
        imgsz: longer side of the images, pixels.
        mode: ``ram``, ``disk`` or ``off``.
        env: this rank's place.
        train: whether the data set has ``hyp``.
        spare: see ``ImageCache.create``.
        logger: see there.
    """
    shapes = resizing.resized_shapes(index.shapes, imgsz)
    interpolation = "linear" if train else "area"
    cache = once_per_machine(
        lambda: ImageCache.create(
            index, imgsz, mode, shapes=shapes, interpolation=interpolation, spare=spare, logger=logger
        ),
        env,
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

    def __len__(self) -> int:
        return len(self.index)

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
        labels = resizing.labels_to_normalized(labels, request.height, request.width)
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
                image = resizing.resize_longest(image, self.imgsz, cv2.INTER_AREA)
            else:
                reduction = resizing.decoding_reduction(height, width, self.imgsz)
                image = read_image(self.index.path(i), (height, width), reduction)
                image = resizing.resize_longest(image, self.imgsz, cv2.INTER_LINEAR, (height, width))
            self.cache.put(i, image)
        return image, resizing.labels_to_pixels(self.index.labels(i), *image.shape[:2])

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
            shape = resizing.resized_shape(height, width, self.imgsz)
            image = np.full((*shape, 3), resizing.GREY, np.uint8)
            labels = resizing.labels_to_pixels(self.index.labels(request.index), *shape)
        # Boxes use the halves of the padding as they are, pixels the rounded ones: where the padding is odd, boxes are
        # half a pixel off. Published figures of YOLOv5 are measured so.
        pad_left, pad_top = (request.width - image.shape[1]) / 2, (request.height - image.shape[0]) / 2
        labels[:, [1, 3]] += pad_left
        labels[:, [2, 4]] += pad_top
        labels = resizing.labels_to_normalized(labels, request.height, request.width)
        padded, _, _ = resizing.letterbox(image, (request.height, request.width))
        ratio = self.imgsz / max(height, width)
        return Sample(request, padded, labels, (height, width, ratio, pad_left, pad_top), unreadable)


def _nobody_asks(i: int) -> None:
    """Take no note."""
