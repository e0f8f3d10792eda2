"""What a training sample costs, and its way to the training process, against the plain way and this machine's limits.

python -m benchmarks.loader                          photo-like images that are made on the way
python -m benchmarks.loader --data coco128.yaml      images of your own

The plain way is what many training scripts do: decode four whole images, paste them onto a canvas of twice the side,
warp the canvas into the sample, convert it to HSV and back, mirror it, and turn it to planes of RGB. Both make mosaics
at 640 px of the same images with the same augmentation; the random numbers differ.

Limits leave out what is no work on pixels: four decoded files; four warps straight into the sample, the colors and the
planes; two copies of a sample from memory to memory.
"""

import contextlib
import itertools
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import torch

from benchmarks.measuring import Options, Row, milliseconds, ratios, run_group, take_turns
from utils.config.data_yaml import load_data
from utils.config.recipe import Hyp
from utils.core.errors import run_cli
from utils.data import resizing, warping
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.forks import keep_freed_memory
from utils.data.image_cache import ImageCache
from utils.data.image_lists import list_images
from utils.data.index import LabelIndex, build_index
from utils.data.loaders import collate, val_loader
from utils.data.sampler import SampleRequest
from utils.dist.place import DistEnv

IMGSZ = 640
IMAGES = 128  # at most, all of them in the page cache
MADE_SIZE = (480, 640)  # as most photos of COCO
BATCH = 16
MOSAIC = 4  # images in a sample
HYP = Hyp()  # of mosaics that are neither turned nor mixed
GREY = (resizing.GREY,) * 3
QUIET = logging.Logger("benchmarks.loader", logging.CRITICAL)  # what data sets and caches have to say


def make_photos(folder: Path, count: int) -> Path:
    """Write textured JPEG files of 100 to 170 kB with some boxes; returns the folder with the images."""
    for name in ("images", "labels"):
        (folder / name).mkdir()
    for number in range(count):
        rng = np.random.default_rng(number)
        photo = np.zeros((*MADE_SIZE, 3))
        for octave in range(1, 8):  # detail at every size, less of the fine: the spectrum of natural images
            coarse = rng.normal(0, 1, (*(side >> (8 - octave) for side in MADE_SIZE), 3)) / octave**0.5
            photo += cv2.resize(coarse, MADE_SIZE[::-1], interpolation=cv2.INTER_CUBIC)
        pixels = np.clip(128 + 45 * photo / photo.std(), 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / "images" / f"{number:04d}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 93])
        boxes = rng.uniform(0.2, 0.8, (5, 2))
        (folder / "labels" / f"{number:04d}.txt").write_text("".join(f"0 {x:.4f} {y:.4f} 0.2 0.3\n" for x, y in boxes))
    return folder / "images"


@contextlib.contextmanager
def opened(data: str, count: int) -> Iterator[LabelIndex]:
    """Labels of the data set's training images, or of images that are made and are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        if data:
            config = load_data(data)
            listed, classes = Path(folder, "some.txt"), config.label_classes
            listed.write_text("\n".join(list_images(config.train, [])[:IMAGES]))
        else:
            listed, classes = make_photos(Path(folder), count), 1
        yield build_index([listed], classes, split="train", cache=False, logger=QUIET)


class Turns:
    """The samples of one contestant, from a place on that goes on with every call.

    Args:
        sample: makes the sample with a number.
        count: samples of a call.
    """

    def __init__(self, sample: Callable[[int], object], count: int) -> None:
        self._sample, self._count, self._numbers = sample, count, itertools.count()

    def __call__(self) -> None:
        """Make the next samples."""
        for number in itertools.islice(self._numbers, self._count):
            self._sample(number)


class OurWay:
    """Samples as a loader process makes them, up to the batch that it hands over."""

    def __init__(self, index: LabelIndex, cache: ImageCache) -> None:
        self.dataset = DetectionDataset(index, cache, HYP, IMGSZ)

    def batch(self, number: int) -> torch.Tensor:
        """Return a batch of mosaics."""
        first = number * BATCH
        requests = [
            SampleRequest(0, position, position % len(self.dataset), IMGSZ, IMGSZ)
            for position in range(first, first + BATCH)
        ]
        return collate([self.dataset[request] for request in requests], BATCH).images


def read_whole(path: str) -> np.ndarray:
    """Decode a file."""
    image = cv2.imread(path)
    assert image is not None, path
    return image


class PlainWay:
    """The same in the plain way, with the images of the cache, or files that are decoded whole."""

    def __init__(self, index: LabelIndex, decoded: list[np.ndarray] | None) -> None:
        self.index, self.decoded = index, decoded

    def load(self, i: int) -> np.ndarray:
        """Image with its longer side at the image size."""
        if self.decoded is not None:
            return self.decoded[i]
        image = read_whole(self.index.path(i))
        scale = IMGSZ / max(image.shape[:2])
        if scale == 1:
            return image
        return cv2.resize(image, (round(image.shape[1] * scale), round(image.shape[0] * scale)))

    def labels(self, i: int, image: np.ndarray) -> np.ndarray:
        """Boxes in pixels."""
        return resizing.labels_to_pixels(self.index.labels(i), *image.shape[:2])

    def sample(self, number: int) -> np.ndarray:
        """Return one mosaic as planes (3, H, W) RGB."""
        rng = np.random.default_rng(number)
        canvas = np.full((2 * IMGSZ, 2 * IMGSZ, 3), resizing.GREY, np.uint8)
        x, y = rng.integers(IMGSZ // 2, IMGSZ + IMGSZ // 2, 2).tolist()
        found = []
        for place, i in enumerate([number % len(self.index), *rng.integers(len(self.index), size=MOSAIC - 1)]):
            image = self.load(int(i))
            height, width = image.shape[:2]
            left, top = (x if place % 2 else x - width), (y if place // 2 else y - height)
            x1, y1, x2, y2 = max(left, 0), max(top, 0), min(left + width, 2 * IMGSZ), min(top + height, 2 * IMGSZ)
            canvas[y1:y2, x1:x2] = image[y1 - top : y2 - top, x1 - left : x2 - left]
            found.append(self.labels(int(i), image) + np.array([0, left, top, left, top], np.float32))
        geometry = warping.draw_geometry(rng, HYP, canvas.shape[:2], (IMGSZ, IMGSZ))
        image = cv2.warpAffine(canvas, geometry.matrix[:2], (IMGSZ, IMGSZ), borderValue=GREY)
        labels = warping.warp_labels(np.concatenate(found), geometry, (IMGSZ, IMGSZ))
        hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        gains = 1 + rng.uniform(-1, 1, 3) * (HYP.hsv_h, HYP.hsv_s, HYP.hsv_v)
        values = np.arange(256) * gains[:, None]
        tables = np.clip([values[0] % 180, values[1], values[2]], 0, 255).astype(np.uint8)
        parts = [cv2.LUT(part, table) for part, table in zip((hue, saturation, value), tables, strict=True)]
        image = cv2.cvtColor(cv2.merge(parts), cv2.COLOR_HSV2BGR)
        if rng.random() < HYP.fliplr:
            image = np.fliplr(image)
            labels[:, [1, 3]] = IMGSZ - labels[:, [3, 1]]
        return np.ascontiguousarray(image.transpose(2, 0, 1)[::-1])

    def batch(self, number: int) -> torch.Tensor:
        """Return a batch of mosaics."""
        first = number * BATCH
        return torch.stack([torch.from_numpy(self.sample(first + k)) for k in range(BATCH)])


class Pixels:
    """The work on pixels that a mosaic takes at least: four warps, colors by tables, and RGB in a batch's memory."""

    def __init__(self, decoded: list[np.ndarray]) -> None:
        self.decoded = decoded
        self.table = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, 3))

    def batch(self, number: int) -> np.ndarray:
        """Return a batch of samples whose quarters are images at their mean scale, as many pixels as of mosaics."""
        images = np.empty((BATCH, IMGSZ, IMGSZ, 3), np.uint8)
        half, scale = IMGSZ // 2, np.array([[1.0, 0, 0.25], [0, 1.0, 0.25]])
        for k, image in enumerate(images):
            sample = np.empty((IMGSZ, IMGSZ, 3), np.uint8)
            for place in range(MOSAIC):
                source = self.decoded[(MOSAIC * (number * BATCH + k) + place) % len(self.decoded)]
                quarter = sample[place // 2 * half :, place % 2 * half :][:half, :half]
                cv2.warpAffine(source, scale, (half, half), dst=quarter)
            hsv = cv2.LUT(cv2.cvtColor(sample, cv2.COLOR_BGR2HSV), self.table)
            cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=image)
        return images


def rows_of_samples(index: LabelIndex, options: Options, batches: int) -> list[Row]:
    """Measure C3 and C4: samples in this process, as a loader process makes them."""
    files = [np.fromfile(index.path(i), np.uint8) for i in range(len(index))]
    off, cache = (
        ImageCache(),
        create_cache(index, IMGSZ, "ram", train=True, logger=QUIET),
    )
    with contextlib.closing(cache):
        cached = OurWay(index, cache)
        decoded = [cached.dataset.load(i)[0] for i in range(len(index))]

        def decode(number: int) -> None:
            for k in range(BATCH * MOSAIC):
                cv2.imdecode(files[(number * BATCH * MOSAIC + k) % len(files)], cv2.IMREAD_COLOR)

        makers = {
            "ours": OurWay(index, off).batch,
            "plain": PlainWay(index, None).batch,
            "four decodes": decode,
            "ours, cached": cached.batch,
            "plain, cached": PlainWay(index, decoded).batch,
            "pixels": Pixels(decoded).batch,
        }
        turns = {name: Turns(make, batches) for name, make in makers.items()}
        taken = take_turns(turns, options.rounds, name="samples")
    a_sample = {name: [one / (batches * BATCH) for one in seconds] for name, seconds in taken.items()}
    uncached = {name: a_sample[name] for name in ("ours", "plain", "four decodes")}
    kept = {name: a_sample[name] for name in ("ours, cached", "plain, cached", "pixels")}

    def best(plain: str, *limits: str) -> str:
        """Say the ratio of samples that take no longer than their limits."""
        least = [sum(seconds) for seconds in zip(*(taken[limit] for limit in limits), strict=True)]
        return f"{statistics.median(ratios(taken[plain], least)):.2f}"

    return [
        Row(
            "C3",
            f"training samples/s at {IMGSZ} px, uncached / the plain way",
            ratios(taken["plain"], taken["ours"]),
            1.35,
            note=f"a sample: {milliseconds(uncached)}; at best {best('plain', 'four decodes', 'pixels')}",
        ),
        Row(
            "C3", "training samples/s, uncached / four decodes alone", ratios(taken["four decodes"], taken["ours"]), 0.5
        ),
        Row(
            "C4",
            "training samples/s, cached / the plain way, cached",
            ratios(taken["plain, cached"], taken["ours, cached"]),
            1.5,
            note=f"a sample: {milliseconds(kept)}; at best {best('plain, cached', 'pixels')}",
        ),
        Row(
            "C4",
            "training samples/s, cached / four warps, colors, planes alone",
            ratios(taken["pixels"], taken["ours, cached"]),
            0.85,
        ),
    ]


def row_of_the_way(index: LabelIndex, options: Options) -> Row:
    """Measure C5: cached images without augmentation, from one loader process to this one, which reads them."""
    cache = create_cache(index, IMGSZ, "ram", train=False, logger=QUIET)
    with contextlib.closing(cache):
        dataset = DetectionDataset(index, cache, None, IMGSZ)
        for i in range(len(index)):
            dataset.load(i)
        # A device that is not the CPU: there a loader process makes way for the training process.
        with contextlib.closing(val_loader(dataset, BATCH, DistEnv(device=torch.device("meta")), 1, pad=0.0)) as loader:
            batches = [batch.images.clone() for batch in loader]
            targets = [torch.empty_like(batch) for batch in batches]

            def handed_over() -> None:
                for batch, target in zip(loader, targets, strict=True):
                    target.copy_(batch.images)

            def copied() -> None:
                for batch, target in zip(batches, targets, strict=True):
                    for source, copy in zip(batch, target, strict=True):
                        copy.copy_(source)
                        source.copy_(copy)

            taken = take_turns({"handed over": handed_over, "copied twice": copied}, options.rounds, name="hand-off")
    images = len(index)
    an_image = {name: [one / images for one in seconds] for name, seconds in taken.items()}
    return Row(
        "C5",
        "images/s from a loader process, cached / two copies in memory",
        ratios(taken["copied twice"], taken["handed over"]),
        0.5,
        note=f"an image: {milliseconds(an_image)}",
    )


def measure(options: Options, images: int = IMAGES, batches: int = 3) -> list[Row]:
    """Measure C3 to C5.

    Args:
        options: of the command line.
        images: that are made where no data set is given.
        batches: samples of a contestant in a round, in batches.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    keep_freed_memory()  # as loader processes; it makes the plain way faster as well
    with opened(options.data, images) as index:
        return [*rows_of_samples(index, options, batches), row_of_the_way(index, options)]


if __name__ == "__main__":
    run_cli(lambda: run_group(measure, __doc__))
