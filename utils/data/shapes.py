"""The built-in data set: textured shapes on cluttered backgrounds, drawn on this machine the first time they are used.

Every image has its own counter-based random stream (key = (SEED, split), image index in the highest counter word), and
geometry and colors are integers from the moment they are chosen, so the set does not depend on the number of threads,
the operating system or the instruction set; the same OpenCV gives the same bytes.

A label is the axis-aligned hull of the part of a shape that lies inside the image, to a quarter of a pixel, whatever
other shapes cover. At least MIN_VISIBLE of each shape (its full area, also what lies outside) stays visible.

    python -m utils.data.shapes [FOLDER]        draw it now
"""

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from utils.config.yaml_files import ROOT
from utils.core.caches import cache_folder, may_be_made
from utils.core.errors import UserError
from utils.core.logging import get_logger

# Any change of what is drawn, also of a constant below, needs a new version: older sets are then redrawn.
VERSION = 4
SEED = 20

# How much there is to learn from
COUNTS = {"train": 720, "val": 100, "test": 60}  # images
EMPTY_EVERY = 20  # every 20th image has no object
LONG_SIDE = 320  # pixels
SHORT_SIDE = (240, 320)
JPEG_QUALITY = 92

# How hard it is
OBJECTS = (2, 6)  # per image, both ends included
SIZE = (52.0, 190.0)  # longer side of a box, pixels, log-uniform
SMALL_SHARE, SMALL_SIZE = 0.025, (12.0, 52.0)
LARGE_SHARE, LARGE_SIZE = 0.05, (190.0, 290.0)
MIN_SIDE, MAX_SIDE = 8.0, 300.0  # of a label, pixels
OVERLAP_SHARE = 0.16  # chance that a shape is put onto another
OVERLAP_IOU = (0.21, 0.40)
APART_IOU = 0.10  # at most, for the others
MIN_VISIBLE = 0.55  # of a shape's full area
MIN_CONTRAST = 48  # grey levels between a shape's mean color and what is under it (largest channel difference)
LOW_CONTRAST_SHARE = 0.05  # shapes that have little more than the minimum
TEXTURE_STRENGTH = 50  # grey levels between the two colors of a texture, at most
CLUTTER = (2, 9)  # distractors per image: strokes, arcs, blobs
NOISE = 3  # grey levels, at most

PIXEL = 64  # geometry is in 1/64 pixel
SUBPIXELS = 4  # masks are drawn 4 times as large
SHIFT = 4  # PIXEL = SUBPIXELS << SHIFT: fractional bits of OpenCV's coordinates on the large mask
OPAQUE = 128
PLACE_TRIES = 40
MARKER = "shapes.json"  # written last into a set; a folder without it is not ours

Box = tuple[float, float, float, float]  # xyxy, pixels


# Shapes: each function returns contours in a unit square around the origin, even-odd filled


def _arc(points: int, radius: float = 1.0) -> np.ndarray:
    angles = np.arange(points) * (2 * math.pi / points)
    return np.stack([np.cos(angles), np.sin(angles)], 1) * radius


def _triangle(rng: np.random.Generator) -> list[np.ndarray]:
    tip = _uniform(rng, (-0.35, 0.35))
    return [np.array([[-1.0, 0.9], [1.0, 0.9], [tip, -0.9]])]


def _star(rng: np.random.Generator) -> list[np.ndarray]:
    points = _arc(10)
    points[1::2] *= _uniform(rng, (0.40, 0.52))
    return [points]


def _cross(rng: np.random.Generator) -> list[np.ndarray]:
    a = _uniform(rng, (0.26, 0.38))
    quarter = np.array([[a, -1.0], [a, -a], [1.0, -a]])
    turns = [quarter @ np.array([[c, s], [-s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    return [np.concatenate(turns)]


def _ring(rng: np.random.Generator) -> list[np.ndarray]:
    return [_arc(96), _arc(64, _uniform(rng, (0.45, 0.62)))]


OUTLINES: dict[str, Callable[[np.random.Generator], list[np.ndarray]]] = {
    "circle": lambda rng: [_arc(96)],
    "triangle": _triangle,
    "square": lambda rng: [np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])],
    "star": _star,
    "cross": _cross,
    "ring": _ring,
}


@dataclass(frozen=True)
class Shape:
    """One object of a scene.

    Args:
        class_id: index into OUTLINES.
        contours: (P, 2) int32 polygons each, even-odd filled, x and y in 1/64 pixel of the image.
        area: of the whole shape, also outside of the image, pixels.
        box: xyxy, pixels, clipped to the image: the label.
        left, top: where ``alpha`` lies in the image.
        alpha: (h, w) uint8, 0 to OPAQUE: coverage of each pixel.
    """

    class_id: int
    contours: list[np.ndarray]
    area: float
    box: Box
    left: int
    top: int
    alpha: np.ndarray

    @property
    def window(self) -> tuple[slice, slice]:
        """Rows and columns of the image that ``alpha`` covers."""
        height, width = self.alpha.shape
        return slice(self.top, self.top + height), slice(self.left, self.left + width)


@dataclass(frozen=True)
class Scene:
    """What an image shows; later shapes lie on top of earlier ones."""

    height: int
    width: int
    shapes: list[Shape]


def sample_rng(split: str, index: int) -> np.random.Generator:
    """Random stream of one image; streams of different images never overlap."""
    key = np.array([SEED, list(COUNTS).index(split)], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))


def make_scene(rng: np.random.Generator, empty: bool = False) -> Scene:
    """Choose the image size and place the shapes.

    Args:
        rng: the image's stream.
        empty: no shapes at all.
    """
    short = int(rng.integers(SHORT_SIDE[0], SHORT_SIDE[1] + 1))
    height, width = (short, LONG_SIDE) if rng.random() < 0.65 else (LONG_SIDE, short)
    count = 0 if empty else int(rng.integers(OBJECTS[0], OBJECTS[1] + 1))
    shapes: list[Shape] = []
    owner = np.full((height, width), -1, np.int32)  # index of the shape on top, -1 = background
    for _ in range(count):
        shape = _place(rng, shapes, owner)
        if shape is not None:  # else there is no room
            owner[shape.window][shape.alpha > OPAQUE // 2] = len(shapes)
            shapes.append(shape)
    return Scene(height, width, shapes)


def _place(rng: np.random.Generator, shapes: Sequence[Shape], owner: np.ndarray) -> Shape | None:
    """Find room for one more shape; None if none was found."""
    partner = shapes[int(rng.integers(len(shapes)))] if shapes and rng.random() < OVERLAP_SHARE else None
    low, high = OVERLAP_IOU if partner is not None else (0.0, APART_IOU)
    for _ in range(PLACE_TRIES):
        size, cx, cy = _draw_place(rng, partner, *owner.shape)
        shape = _draw_shape(rng, size, cx, cy, *owner.shape)
        if shape is None:
            continue
        closest = max((_iou(shape.box, other.box) for other in shapes), default=0.0)
        if low <= closest <= high and _all_visible(shape, shapes, owner):
            return shape
    return None


def _draw_place(rng: np.random.Generator, partner: Shape | None, height: int, width: int) -> tuple[float, float, float]:
    """Size and center for a shape, in pixels: anywhere, or beside the middle of its partner."""
    if partner is None:
        kind = rng.random()
        span = SMALL_SIZE if kind < SMALL_SHARE else LARGE_SIZE if kind < SMALL_SHARE + LARGE_SHARE else SIZE
        size = span[0] * (span[1] / span[0]) ** rng.random()
        margin = 0.3 * size  # most shapes lie inside, some are cut off
        return size, margin + rng.random() * (width - 2 * margin), margin + rng.random() * (height - 2 * margin)
    x1, y1, x2, y2 = partner.box
    size = max(x2 - x1, y2 - y1) * _uniform(rng, (0.75, 1.25))
    angle, distance = _uniform(rng, (0, 2 * math.pi)), size * _uniform(rng, (0.25, 0.60))
    return size, (x1 + x2) / 2 + distance * math.cos(angle), (y1 + y2) / 2 + distance * math.sin(angle)


def _draw_shape(rng: np.random.Generator, size: float, cx: float, cy: float, height: int, width: int) -> Shape | None:
    """A shape of a random class, aspect and rotation, ``size`` long; None if the image cuts off too much."""
    class_id = int(rng.integers(len(OUTLINES)))
    outline = list(OUTLINES.values())[class_id](rng)
    aspect, angle = _uniform(rng, (0.70, 1.0)), _uniform(rng, (0, 2 * math.pi))
    c, s = math.cos(angle), math.sin(angle)
    turn = np.array([[aspect * c, aspect * s], [-s, c]])
    turned = [points @ turn for points in outline]
    low, high = turned[0].min(0), turned[0].max(0)
    scale = size * PIXEL / (high - low).max()
    offset = np.array([cx, cy]) * PIXEL - (low + high) / 2 * scale
    contours = [np.rint(points * scale + offset).astype(np.int32) for points in turned]
    return rasterize(class_id, contours, height, width)


def rasterize(class_id: int, contours: list[np.ndarray], height: int, width: int) -> Shape | None:
    """Mask and label of contours; None if too little lies inside the image or a side of the box is out of bounds."""
    low = np.maximum(contours[0].min(0) // PIXEL, 0)
    high = np.minimum(-(-contours[0].max(0) // PIXEL), [width, height])
    columns, rows = (high - low).tolist()
    if columns <= 0 or rows <= 0:
        return None
    large = np.zeros((rows * SUBPIXELS, columns * SUBPIXELS), np.uint8)
    # OpenCV's integer coordinates are pixel centers, ours are pixel corners: half a (small) pixel apart
    local = [points - low.astype(np.int32) * PIXEL - (1 << SHIFT) // 2 for points in contours]
    cv2.fillPoly(large, local, OPAQUE, cv2.LINE_8, SHIFT)
    x, y, w, h = cv2.boundingRect(large)
    areas = [cv2.contourArea(points) / PIXEL**2 for points in contours]
    area = areas[0] - sum(areas[1:])  # the others are holes
    inside = cv2.countNonZero(large) / SUBPIXELS**2
    if inside < MIN_VISIBLE * area or not MIN_SIDE * SUBPIXELS <= min(w, h) <= max(w, h) <= MAX_SIDE * SUBPIXELS:
        return None
    left, top = low.tolist()
    box = (left + x / SUBPIXELS, top + y / SUBPIXELS, left + (x + w) / SUBPIXELS, top + (y + h) / SUBPIXELS)
    alpha = cv2.resize(large, (columns, rows), interpolation=cv2.INTER_AREA)  # multiples of 8: nothing to round
    return Shape(class_id, contours, area, box, left, top, alpha)


def _all_visible(shape: Shape, shapes: Sequence[Shape], owner: np.ndarray) -> bool:
    """Whether enough of each shape can be seen once ``shape`` lies on top."""
    solid = shape.alpha > OPAQUE // 2
    if np.count_nonzero(solid) < MIN_VISIBLE * shape.area:
        return False
    below = owner[shape.window][solid]
    hidden = np.bincount(below[below >= 0], minlength=len(shapes))
    touched = np.flatnonzero(hidden).tolist()
    return all(np.count_nonzero(owner == i) - hidden[i] >= MIN_VISIBLE * shapes[i].area for i in touched)


def _iou(a: Box, b: Box) -> float:
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inter = max(w, 0.0) * max(h, 0.0)
    return inter / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter)


def _uniform(rng: np.random.Generator, span: tuple[float, float]) -> float:
    return span[0] + (span[1] - span[0]) * float(rng.random())


# Painting: colors are BGR, blends are integers


def paint(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Draw a scene: background, clutter, shapes, noise.

    Args:
        scene: what to show.
        rng: the image's stream; what it gives to the background and the noise does not depend on the shapes.

    Returns:
        (H, W, 3) uint8, BGR.
    """
    height, width = scene.height, scene.width
    strength = int(rng.integers(NOISE + 1))
    # a sum of two uniform integers: close to Gaussian, and the same on every machine
    noise = rng.integers(-strength, strength + 1, (2, height, width), np.int16).sum(0, dtype=np.int16)
    image = _background(rng, height, width)
    for _ in range(int(rng.integers(CLUTTER[0], CLUTTER[1] + 1))):
        _clutter(rng, image)
    for shape in scene.shapes:
        _paint_shape(rng, image, shape)
    return _add(image, noise)


def _blend(color: np.ndarray, other: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Mix two colors (3,) by weights (H, W) uint8, 0 = all ``color``, 255 = all ``other``; (H, W, 3) uint8."""
    steps = np.arange(256)[:, None]
    table = (color.astype(np.int32) * (255 - steps) + other.astype(np.int32) * steps + 127) // 255
    return cv2.LUT(cv2.merge([weight] * 3), table.astype(np.uint8)[None])


def _add(image: np.ndarray, field: np.ndarray) -> np.ndarray:
    """Add (H, W) int16 grey levels to each channel of (H, W, 3) uint8, clipped."""
    return cv2.add(image, cv2.merge([field] * 3), dtype=cv2.CV_8U)


def _clip(field: np.ndarray) -> np.ndarray:
    return np.clip(field, 0, 255).astype(np.uint8)


def _ramp(rng: np.random.Generator, height: int, width: int, period: float) -> np.ndarray:
    """(H, W) int32 triangle wave 0 .. 256 in a random direction; ``period`` in pixels."""
    angle, phase = _uniform(rng, (0, 2 * math.pi)), int(rng.integers(512))
    step = 512 * 256 / period
    a, b = round(step * math.cos(angle)), round(step * math.sin(angle))
    position = (np.arange(width, dtype=np.int32) * a + np.arange(height, dtype=np.int32)[:, None] * b) >> 8
    return np.abs(((position + phase) & 511) - 256)


def _mottle(rng: np.random.Generator, height: int, width: int, cell: float) -> np.ndarray:
    """(H, W) uint8 smooth random field with features of ``cell`` pixels."""
    grid = rng.integers(0, 256, (max(2, round(height / cell)), max(2, round(width / cell))), np.uint8)
    return cv2.resize(grid, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)


def _pattern(rng: np.random.Generator, height: int, width: int, size: float) -> np.ndarray:
    """(H, W) uint8 weights of a texture: plain, shaded, striped, checkered, dotted or mottled."""
    kind = int(rng.integers(6))
    period = max(6.0, size * _uniform(rng, (0.15, 0.40)))
    if kind == 0:
        return np.full((height, width), int(rng.integers(256)), np.uint8)
    if kind == 1:
        return _clip(_ramp(rng, height, width, 3 * size))
    if kind == 2:
        return _clip((_ramp(rng, height, width, period) - 128) * 4 + 128)
    if kind in (3, 4):
        one, other = _ramp(rng, height, width, period), _ramp(rng, height, width, period)
        checks = ((one - 128) * (other - 128) >> 4) + 128
        return _clip(checks if kind == 3 else (one + other - 320) * 4)
    return _mottle(rng, height, width, period)


def _color(rng: np.random.Generator, vivid: bool) -> np.ndarray:
    """A random color (3,) uint8; muted ones for backgrounds."""
    saturation, value = ((90, 240), (90, 250)) if vivid else ((10, 110), (50, 220))
    hsv = [rng.integers(180), rng.integers(*saturation), rng.integers(*value)]
    return cv2.cvtColor(np.array([[hsv]], np.uint8), cv2.COLOR_HSV2BGR)[0, 0]


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8: a gradient, mottled, with a faint pattern at times."""
    weight = _clip(_ramp(rng, height, width, _uniform(rng, (700, 1600))))
    image = _blend(_color(rng, False), _color(rng, False), weight)
    if rng.random() < 0.7:
        image = _shift(image, _mottle(rng, height, width, _uniform(rng, (30, 120))), int(rng.integers(20, 90)))
    if rng.random() < 0.3:
        image = _shift(image, _pattern(rng, height, width, _uniform(rng, (50, 160))), int(rng.integers(10, 45)))
    return image


def _shift(image: np.ndarray, weight: np.ndarray, strength: int) -> np.ndarray:
    """Lighten and darken by a field of weights 0 .. 255; ``strength`` is the whole span in grey levels."""
    return _add(image, (weight.astype(np.int16) - 128) * strength >> 8)


def _clutter(rng: np.random.Generator, image: np.ndarray) -> None:
    """Draw one thing that is of no class: a stroke, a zigzag, an arc or a blob; in place."""
    height, width = image.shape[:2]
    color = _color(rng, bool(rng.random() < 0.5)).tolist()
    kind = int(rng.integers(4))
    x, y = int(rng.integers(width)), int(rng.integers(height))
    thickness = int(rng.integers(1, 5))
    if kind == 0:
        x2, y2 = int(rng.integers(width)), int(rng.integers(height))
        cv2.line(image, (x, y), (x2, y2), color, thickness, cv2.LINE_AA)
    elif kind == 1:
        steps = rng.integers(-45, 46, (int(rng.integers(3, 7)), 2))
        points = (np.array([x, y]) + np.cumsum(steps, 0)).astype(np.int32)
        cv2.polylines(image, [points], False, color, thickness, cv2.LINE_AA)
    elif kind == 2:
        axes = (int(rng.integers(10, 90)), int(rng.integers(10, 90)))
        start, sweep = int(rng.integers(360)), int(rng.integers(50, 170))
        cv2.ellipse(image, (x, y), axes, int(rng.integers(180)), start, start + sweep, color, thickness, cv2.LINE_AA)
    else:
        _blob(rng, image, x, y, color)


def _blob(rng: np.random.Generator, image: np.ndarray, x: int, y: int, color: list[int]) -> None:
    """Fill an irregular rounded outline; in place."""
    t = np.arange(48) * (2 * math.pi / 48)
    radius = np.ones(48)
    for k, strength in ((2, 0.28), (3, 0.22), (5, 0.14)):
        radius += strength * np.cos(k * t + _uniform(rng, (0, 2 * math.pi)))
    size = _uniform(rng, (6, 45))
    points = np.stack([x + size * radius * np.cos(t), y + size * radius * np.sin(t)], 1)
    cv2.fillPoly(image, [np.rint(points * 16).astype(np.int32)], color, cv2.LINE_AA, 4)


def _paint_shape(rng: np.random.Generator, image: np.ndarray, shape: Shape) -> None:
    """Paint a textured shape over the image; in place."""
    window = image[shape.window]
    texture = _texture(rng, np.array(cv2.mean(window, (shape.alpha > 0).astype(np.uint8))[:3]), shape)
    if rng.random() < 0.35:
        local = [points - np.array([shape.left, shape.top], np.int32) * PIXEL - PIXEL // 2 for points in shape.contours]
        shade = 0.45 if rng.random() < 0.7 else 1.6
        edge = np.clip(np.rint(np.array(cv2.mean(texture)[:3]) * shade), 0, 255).tolist()
        thickness = min(1 + min(shape.alpha.shape) // 24, 6)
        cv2.polylines(texture, local, True, edge, thickness, cv2.LINE_AA, 6)  # its outer half is masked away
    alpha = shape.alpha.astype(np.int32)[..., None]
    window[:] = (window * (OPAQUE - alpha) + texture * alpha + OPAQUE // 2) // OPAQUE


def _texture(rng: np.random.Generator, under: np.ndarray, shape: Shape) -> np.ndarray:
    """(h, w, 3) uint8 for a shape, whose mean color differs enough from ``under`` (3,), the mean of what it covers."""
    height, width = shape.alpha.shape
    pattern = _pattern(rng, height, width, float(max(height, width)))
    faint = rng.random() < LOW_CONTRAST_SHARE
    best, best_contrast = np.zeros((height, width, 3), np.uint8), -1.0
    for _ in range(12):
        color = np.clip(under + rng.integers(-60, 61, 3), 0, 255) if faint else _color(rng, True)
        change = rng.integers(-TEXTURE_STRENGTH, TEXTURE_STRENGTH + 1, 3) // (2 if faint else 1)
        texture = _blend(color, np.clip(color + change, 0, 255), pattern)
        contrast = float(np.abs(np.array(cv2.mean(texture, shape.alpha)[:3]) - under).max())
        if contrast > best_contrast:
            best, best_contrast = texture, contrast
        if best_contrast >= MIN_CONTRAST:
            break
    return best


# Files


def shapes_root() -> Path:
    """Where the set lives by default: ``datasets/shapes`` of the project, else (read-only) the user's cache folder."""
    local = ROOT / "datasets" / "shapes"
    if is_complete(local) or may_be_made(local):
        return local
    return cache_folder() / "shapes"


def is_complete(root: Path) -> bool:
    """Whether ``root`` holds the whole set as this version draws it."""
    if _version(root) != VERSION:
        return False
    folders = [(root / kind / split, count) for kind in ("images", "labels") for split, count in COUNTS.items()]
    try:
        return all(len(os.listdir(folder)) >= count for folder, count in folders)
    except FileNotFoundError:
        return False  # somebody removed part of it


def ensure_shapes(root: Path, logger: logging.Logger | None = None) -> None:
    """Draw the set into ``root`` unless it is there.

    The folder appears whole or not at all, also when the process is killed or several draw at once. A set of another
    version, or one with files missing, is replaced.

    Args:
        root: the data set's folder; what it holds belongs to this module.
        logger: says one line before drawing, and where it does there is a progress bar; by default the project's.

    Raises:
        UserError: ``root`` exists and holds something else, or can't be written.
    """
    root = Path(root).resolve()
    if is_complete(root):
        return
    if _is_foreign(root):
        raise UserError(f"{root} is not the built-in data set: move it away, or change path in the data YAML")
    logger = logger or logging.getLogger("lockstep")
    logger.info(f"Drawing the built-in shapes data set ({sum(COUNTS.values())} images, once) into {root}")
    scratch = _beside(root)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        draw_set(scratch, COUNTS, progress=logger.isEnabledFor(logging.INFO))
        _install(scratch, root)
    except OSError as error:
        raise UserError(f"can't draw the shapes into {root} ({error}); path in the data YAML names another") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def draw_set(folder: Path, counts: dict[str, int], num_threads: int | None = None, progress: bool = False) -> None:
    """Draw images, labels and the marker into a new folder.

    Args:
        folder: must not exist.
        counts: images per split.
        num_threads: drawing at once; by default one per core, 8 at most. The files do not depend on it.
        progress: show a bar.
    """
    for kind in ("images", "labels"):
        for split in counts:
            (folder / kind / split).mkdir(parents=True)
    work = [(folder, split, index) for split, count in counts.items() for index in range(count)]
    cv2_threads = cv2.getNumThreads()
    cv2.setNumThreads(1)  # images side by side are faster than OpenCV's threads inside of one
    pool = ThreadPoolExecutor(num_threads or min(8, os.cpu_count() or 1))
    try:
        done = pool.map(_write_sample, work)
        for _ in tqdm(done, "shapes", len(work), unit="image", disable=None if progress else True, leave=False):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
        cv2.setNumThreads(cv2_threads)
    (folder / MARKER).write_text(json.dumps({"generator": "shapes", "version": VERSION}) + "\n", encoding="utf-8")


def draw_sample(split: str, index: int) -> tuple[np.ndarray, Scene]:
    """Image (H, W, 3) uint8 BGR and scene number ``index`` of a split."""
    rng = sample_rng(split, index)
    scene = make_scene(rng, empty=index % EMPTY_EVERY == EMPTY_EVERY // 2)
    return paint(scene, rng), scene


def label_lines(scene: Scene) -> str:
    """The label file of a scene: one line ``class cx cy w h`` (cxcywhn) per shape; empty without shapes."""
    lines = []
    for shape in scene.shapes:
        x1, y1, x2, y2 = shape.box
        cx, w = (x1 + x2) / 2 / scene.width, (x2 - x1) / scene.width
        cy, h = (y1 + y2) / 2 / scene.height, (y2 - y1) / scene.height
        lines.append(f"{shape.class_id} {cx:.6f} {cy:.6f} {w:.6f} {h:.6f}\n")
    return "".join(lines)


def _write_sample(job: tuple[Path, str, int]) -> None:
    folder, split, index = job
    image, scene = draw_sample(split, index)
    _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, cv2.IMWRITE_JPEG_OPTIMIZE, 1])
    (folder / "images" / split / f"{index:04d}.jpg").write_bytes(data.tobytes())
    (folder / "labels" / split / f"{index:04d}.txt").write_text(label_lines(scene), encoding="utf-8", newline="\n")


def _version(root: Path) -> int | None:
    """Version of the set in ``root``; None if it is not one of ours."""
    try:
        marker = json.loads((root / MARKER).read_text(encoding="utf-8"))
        return int(marker["version"]) if marker["generator"] == "shapes" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_foreign(root: Path) -> bool:
    """Whether ``root`` is somebody's: not absent, not empty and not a set of any version."""
    try:
        content = os.listdir(root)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return root.exists()  # else a folder above it is a file
    if MARKER not in content:
        return bool(content)
    return _version(root) is None and (root / MARKER).exists()  # else another process has just moved it


def _beside(root: Path) -> Path:
    """A new name in the same folder, so that renaming is atomic."""
    return root.with_name(f".{root.name}.{uuid.uuid4().hex}.tmp")


def _remove_leftovers(root: Path) -> None:
    """Remove what a killed process left; what is younger than an hour may still be in use."""
    for folder in root.parent.glob(f".{root.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - folder.stat().st_mtime > 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _install(scratch: Path, root: Path) -> None:
    """Give a finished folder its name, unless another process did so first; that one's set is the same."""
    while not is_complete(root):
        aside = _beside(root)
        try:
            root.rename(aside)  # an older version
        except FileNotFoundError:
            pass
        else:
            if is_complete(aside):  # another process was faster by a hair
                scratch = aside
            else:
                shutil.rmtree(aside, ignore_errors=True)
        try:
            scratch.rename(root)
            return
        except OSError:
            if not root.exists():
                raise
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    ensure_shapes(Path(sys.argv[1]) if len(sys.argv) > 1 else shapes_root(), get_logger())
