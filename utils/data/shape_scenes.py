"""What the images of the built-in data set show: outlines of the shapes, where they lie, their labels.

A label is the axis-aligned hull of the part of a shape that lies inside the image, to a quarter of a pixel, whatever
other shapes cover. At least MIN_VISIBLE of each shape (its full area, also what lies outside) stays visible.
Any change needs a new VERSION in shapes.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

LONG_SIDE = 320  # pixels
SHORT_SIDE = (240, 320)

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

PIXEL = 64  # geometry is in 1/64 pixel
SUBPIXELS = 4  # masks are drawn 4 times as large
SHIFT = 4  # PIXEL = SUBPIXELS << SHIFT: fractional bits of OpenCV's coordinates on the large mask
OPAQUE = 128
PLACE_TRIES = 40
Box = tuple[float, float, float, float]  # xyxy, pixels


def _arc(points: int, radius: float = 1.0) -> np.ndarray:
    angles = np.arange(points) * (2 * math.pi / points)
    return np.stack([np.cos(angles), np.sin(angles)], 1) * radius


def _triangle(rng: np.random.Generator) -> list[np.ndarray]:
    tip = uniform(rng, (-0.35, 0.35))
    return [np.array([[-1.0, 0.9], [1.0, 0.9], [tip, -0.9]])]


def _star(rng: np.random.Generator) -> list[np.ndarray]:
    points = _arc(10)
    points[1::2] *= uniform(rng, (0.40, 0.52))
    return [points]


def _cross(rng: np.random.Generator) -> list[np.ndarray]:
    a = uniform(rng, (0.26, 0.38))
    quarter = np.array([[a, -1.0], [a, -a], [1.0, -a]])
    turns = [quarter @ np.array([[c, s], [-s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
    return [np.concatenate(turns)]


def _ring(rng: np.random.Generator) -> list[np.ndarray]:
    return [_arc(96), _arc(64, uniform(rng, (0.45, 0.62)))]


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
    size = max(x2 - x1, y2 - y1) * uniform(rng, (0.75, 1.25))
    angle, distance = uniform(rng, (0, 2 * math.pi)), size * uniform(rng, (0.25, 0.60))
    return size, (x1 + x2) / 2 + distance * math.cos(angle), (y1 + y2) / 2 + distance * math.sin(angle)


def _draw_shape(rng: np.random.Generator, size: float, cx: float, cy: float, height: int, width: int) -> Shape | None:
    """A shape of a random class, aspect and rotation, ``size`` long; None if the image cuts off too much."""
    class_id = int(rng.integers(len(OUTLINES)))
    outline = list(OUTLINES.values())[class_id](rng)
    aspect, angle = uniform(rng, (0.70, 1.0)), uniform(rng, (0, 2 * math.pi))
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


def uniform(rng: np.random.Generator, span: tuple[float, float]) -> float:
    """Draw a number between two others."""
    return span[0] + (span[1] - span[0]) * float(rng.random())


def label_lines(scene: Scene) -> str:
    """The label file of a scene: one line ``class cx cy w h`` (cxcywhn) per shape; empty without shapes."""
    lines = []
    for shape in scene.shapes:
        x1, y1, x2, y2 = shape.box
        cx, w = (x1 + x2) / 2 / scene.width, (x2 - x1) / scene.width
        cy, h = (y1 + y2) / 2 / scene.height, (y2 - y1) / scene.height
        lines.append(f"{shape.class_id} {cx:.6f} {cy:.6f} {w:.6f} {h:.6f}\n")
    return "".join(lines)
