"""Which image goes to which rank at which step, and at which size a batch is made (--rect, --multi-scale).

A pure function of (seed, epoch, position in the epoch). Ranks, workers, prefetching, caches and restarts do not enter:
the sampler says everything about a sample in a ``SampleRequest``, and the random numbers of a sample come from a
generator of its own.

Shape letters: n images of the split, K batches in an epoch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.data.index import LabelIndex

# A position is a 64-bit word of a generator's counter. No epoch has this many samples, so the topmost ones serve what
# is drawn once per epoch or batch.
ORDER_POSITION = 2**64 - 1
SHAPE_POSITION = 2**64 - 2

MULTI_SCALE = (0.5, 1.5)  # of the image size


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
