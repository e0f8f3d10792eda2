"""Images and labels that are made up: whatever they are, samples come out or the fault is named."""

import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from utils.config.recipe import Hyp
from utils.core.errors import UserError
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.index import build_index
from utils.data.loaders import Batch, collate
from utils.data.sampler import SampleRequest, val_batches

IMGSZ = 64
LABEL = st.floats(-0.3, 1.3) | st.sampled_from([0.0, 1.0, 1.005, -0.005, 0.5, 1e-9, 1e-30, 0.9999999])
BOX = st.tuples(st.integers(0, 2), LABEL, LABEL, LABEL, LABEL)
POLYGON = st.tuples(st.integers(0, 2), st.lists(LABEL, min_size=3, max_size=8).map(lambda sides: [*sides, *sides]))
WORDS = st.sampled_from(["", "cat", "0 0.5", "0 nan 0.5 0.2 0.2", "\u00e9\u4e2d", "0 0.5 0.5 0.2 0.2 0.9", "# note"])
SIDE = st.integers(10, 90) | st.sampled_from([10, 11, 32, 64, 65, 700, 3000])
# Any letters of a file name: neither a separator, nor what the label's name is told by, nor surrogates.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0\n\r"), min_size=1, max_size=12)
FORMATS = [("png", depth, channels) for depth in (np.uint8, np.uint16) for channels in (1, 2, 3, 4)]
FORMATS += [("jpg", np.uint8, channels) for channels in (1, 3)] + [("tif", np.uint16, 1), ("bmp", np.uint8, 3)]
FORMATS += [("webp", np.uint8, 4), ("JPEG", np.uint8, 3)]


def row(values: Any) -> str:
    if isinstance(values, str):
        return values
    category, *rest = values
    numbers = rest[0] if isinstance(rest[0], list) else rest
    return " ".join(map(str, (category, *numbers)))


ROWS = st.lists(BOX | POLYGON | WORDS, max_size=6).map(lambda rows: "\n".join(map(row, rows)))
CROWD = st.integers(0, 2**32 - 1).map(
    lambda seed: "\n".join(f"1 {x} {y} 0.01 0.02" for x, y in np.random.default_rng(seed).random((300, 2)))
)
IMAGE = st.fixed_dictionaries(
    {
        "name": NAMES,
        "height": SIDE,
        "width": SIDE,
        "format": st.sampled_from(FORMATS),
        "labels": st.none() | ROWS | CROWD,
        "keep": st.sampled_from([1.0, 1.0, 1.0, 0.6]),
    }
)


def grey_alpha_png(values: np.ndarray) -> bytes:
    """A PNG of grey and opacity, which OpenCV reads and cannot write (PNG specification, 11.2.2)."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + values[i].astype(values.dtype.newbyteorder(">")).tobytes() for i in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8 * values.itemsize, 4, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return png


def write(root: Path, number: int, image: dict[str, Any]) -> None:
    suffix, depth, channels = image["format"]
    name = f"{number}{image['name']}"
    values = np.random.default_rng(number).integers(0, np.iinfo(depth).max, (image["height"], image["width"], channels))
    values = values.astype(depth)
    encoded = grey_alpha_png(values) if channels == 2 else cv2.imencode(f".{suffix}", values)[1].tobytes()
    (root / "images" / f"{name}.{suffix}").write_bytes(encoded[: int(len(encoded) * image["keep"])])
    if image["labels"] is not None:
        (root / "labels" / f"{name}.txt").write_text(image["labels"], encoding="utf-8")


def assert_sound(batch: Batch, height: int, width: int) -> None:
    assert batch.images.shape[1:] == (3, height, width)
    assert batch.targets.isfinite().all()
    boxes = batch.targets[:, 2:]
    assert bool((boxes >= 0).all()) and bool((boxes <= 1).all())


DATA = (st.lists(IMAGE, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.booleans())
STRIP = {"name": "x", "height": 3000, "width": 10, "format": ("png", np.uint8, 2), "labels": "0 .5 .5 1 1", "keep": 1}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(*DATA)
@example([STRIP], 0, False)
@example([STRIP, {**STRIP, "width": 3000, "height": 10, "name": "\u00e9 %d'\"*?"}], 1, True)
def test_samples_of_any_data(images: list[dict[str, Any]], seed: int, rect: bool) -> None:
    """10 to 3000 pixels, 1 to 4 channels, 8 and 16 bit, odd names, empty, crowded, cut short."""
    check_samples(images, seed, rect)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(*DATA)
def test_samples_of_much_data(images: list[dict[str, Any]], seed: int, rect: bool) -> None:
    check_samples(images, seed, rect)


def check_samples(images: list[dict[str, Any]], seed: int, rect: bool) -> None:
    """Index the images and draw training and validation samples from them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("images", "labels"):
            (root / name).mkdir()
        for number, image in enumerate(images):
            write(root, number, image)
        whole = sum(image["keep"] == 1 for image in images)
        if not whole:
            with pytest.raises(UserError, match="can be used, all"):
                build_index([root / "images"], 3, cache=False)
            return
        index = build_index([root / "images"], 3, cache=False)
        assert index.n == whole
        hyp = Hyp(degrees=10, shear=5, perspective=0.001, mixup=0.5, copy_paste=0.5, flipud=0.5, mosaic=0.7)
        cache = create_cache(index, IMGSZ, "ram", train=True)
        train_set = DetectionDataset(index, cache, hyp, IMGSZ, seed, rect)
        requests = [SampleRequest(0, i, i % index.n, IMGSZ, 2 * IMGSZ if rect else IMGSZ) for i in range(4)]
        for _ in range(2):  # decoded, then from the cache
            batch = collate([train_set[request] for request in requests], 4)
            assert_sound(batch, IMGSZ, requests[0].width)
        cache.close()
        val_set = DetectionDataset(index, create_cache(index, IMGSZ, "off", train=False), None, IMGSZ)
        for group in val_batches(index, IMGSZ, 2, 32):
            assert_sound(collate([val_set[request] for request in group], 2), group[0].height, group[0].width)


def test_class_ids_are_an_error_whatever_else_there_is(tmp_path: Path) -> None:
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    image = {"name": "x", "height": 20, "width": 20, "format": FORMATS[0], "labels": "3 .5 .5 .1 .1", "keep": 1}
    write(tmp_path, 0, image)
    with pytest.raises(UserError, match="class ids in 1 label files"):
        build_index([tmp_path / "images"], 3, cache=False)
