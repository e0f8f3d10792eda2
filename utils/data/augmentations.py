"""Image geometry and augmentation: pure functions of (image, labels, generator).

Images are (H, W, 3) uint8 BGR and are never changed in place. Labels are (n, 5) float32 [class, x1, y1, x2, y2] in
pixels of their image, (0, 5) where there is none. Coordinates are continuous: pixel (i, j) covers [j, j + 1) x
[i, i + 1), so an image whose left edge is at 0 has its first pixel's centre at 0.5. A function that takes a generator
always draws the same number of values from it, whatever the hyperparameters are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from utils.config.recipe import Hyp
from utils.data import polygons
from utils.data.polygons import Polygons

GREY = 114  # fill of everything that no image covers

MIN_SIDE = 2.0  # pixels; a box with a shorter side after the warp is dropped
MIN_AREA_RATIO, MIN_AREA_RATIO_OUTLINED = 0.1, 0.01  # of the box's area that must still be visible
MAX_ASPECT = 100.0  # of what cutting leaves; objects that are thinner as they are, such as wires, are kept
ROUNDING = 1.01
MAX_COVERED = 0.3  # of a box that a pasted copy may hide

# Under perspective a point may fall behind the viewer; it is moved in front of him, far away in its own direction.
MIN_DEPTH = 1e-3


class Tile(NamedTuple):
    """An image with its labels, placed on a canvas.

    Attributes:
        image: (h, w, 3) uint8.
        labels: (n, 5) [class, x1, y1, x2, y2] pixels of the image.
        left: canvas column of the image's left edge; may be negative.
        top: canvas row of the image's top edge; may be negative.
        outlines: of the labels, pixels of the image; None if no label has one.
    """

    image: np.ndarray
    labels: np.ndarray
    left: int
    top: int
    outlines: Polygons | None = None


class Geometry(NamedTuple):
    """A warp from canvas to output: ``matrix`` (3, 3) float64 on (x, y, 1), and the ``scale`` it was drawn with."""

    matrix: np.ndarray
    scale: float


def resized_shape(height: int, width: int, imgsz: int) -> tuple[int, int]:
    """(height, width) with the longer side at ``imgsz`` and the shorter in proportion, rounded up."""
    longer = max(height, width)
    return -(-height * imgsz // longer), -(-width * imgsz // longer)


def resized_shapes(shapes: np.ndarray, imgsz: int) -> np.ndarray:
    """``resized_shape`` of (n, 2) int [height, width]; (n, 2) int64."""
    return -(-shapes.astype(np.int64) * imgsz // shapes.max(axis=1, keepdims=True))


def decoding_reduction(height: int, width: int, imgsz: int) -> int:
    """How much smaller than it is an image may be decoded for training: 1, 2, 4 or 8, and not below ``imgsz``."""
    return next(reduction for reduction in (8, 4, 2, 1) if max(height, width) >= reduction * imgsz or reduction == 1)


def resize_longest(
    image: np.ndarray, imgsz: int, shrink: int = cv2.INTER_LINEAR, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Resize so that the longer side is ``imgsz``.

    Args:
        image: (H, W, 3) uint8.
        imgsz: pixels.
        shrink: OpenCV interpolation used when the image gets smaller: linear for training, ``cv2.INTER_AREA`` for
            validation. Enlarging is linear.
        size: height and width of the image in its file, where it was decoded smaller: they give the proportions.

    Returns:
        (h, w, 3) uint8 of ``resized_shape``; the image itself if it has that shape already.
    """
    height, width = image.shape[:2]
    whole_height, whole_width = size or (height, width)
    h, w = resized_shape(whole_height, whole_width, imgsz)
    if (h, w) == (height, width):
        return image
    return cv2.resize(image, (w, h), interpolation=shrink if max(height, width) > imgsz else cv2.INTER_LINEAR)


def pad_offset(inner: int, outer: int) -> int:
    """Padding in front of ``inner`` pixels centred in ``outer``; an odd rest leaves the smaller half in front."""
    return round((outer - inner) / 2 - 0.1)


def letterbox(image: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """Centre an image on grey.

    Args:
        image: (h, w, 3) uint8.
        shape: (H, W) with H >= h and W >= w.

    Returns:
        (H, W, 3) contiguous image, and the columns left of and the rows above the original.
    """
    h, w = image.shape[:2]
    assert max(h - shape[0], w - shape[1]) <= 0, f"an image of {h} x {w} does not fit into {shape[0]} x {shape[1]}"
    left, top = pad_offset(w, shape[1]), pad_offset(h, shape[0])
    padded = np.full((*shape, 3), GREY, np.uint8)
    padded[top : top + h, left : left + w] = image
    return padded, left, top


def labels_to_pixels(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n, 5) [class, cx, cy, w, h] cxcywhn -> (n, 5) float32 [class, x1, y1, x2, y2] pixels of (height, width)."""
    pixels = np.empty((len(labels), 5), np.float32)
    half = labels[:, 3:5] / 2
    size = np.array([width, height], np.float32)
    pixels[:, 0] = labels[:, 0]
    pixels[:, 1:3] = (labels[:, 1:3] - half) * size
    pixels[:, 3:5] = (labels[:, 1:3] + half) * size
    return pixels


def labels_to_normalized(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n, 5) [class, x1, y1, x2, y2] pixels of (height, width) -> (n, 5) float32 [class, cx, cy, w, h] cxcywhn."""
    normalized = np.empty((len(labels), 5), np.float32)
    size = np.array([width, height], np.float32)
    normalized[:, 0] = labels[:, 0]
    normalized[:, 1:3] = (labels[:, 1:3] + labels[:, 3:5]) / 2 / size
    normalized[:, 3:5] = (labels[:, 3:5] - labels[:, 1:3]) / size
    return normalized


def draw_geometry(rng: np.random.Generator, hyp: Hyp, canvas: tuple[int, int], output: tuple[int, int]) -> Geometry:
    """Draw a random perspective, rotation, scale, shear and translation.

    The canvas centre goes to the origin, then come perspective, rotation with scale, shear, and last the translation to
    (0.5 +- translate) of the output's sides.

    Args:
        rng: eight values are drawn.
        hyp: ``perspective``, ``degrees``, ``scale``, ``shear`` (degrees), ``translate``.
        canvas: (height, width).
        output: (height, width).
    """
    px, py, angle, size, shear_x, shear_y, tx, ty = rng.uniform(-1.0, 1.0, 8).tolist()
    scale = 1.0 + size * hyp.scale
    cos = scale * math.cos(math.radians(angle * hyp.degrees))
    sin = scale * math.sin(math.radians(angle * hyp.degrees))
    tan_x, tan_y = (math.tan(math.radians(s * hyp.shear)) for s in (shear_x, shear_y))
    center = np.array([[1, 0, -canvas[1] / 2], [0, 1, -canvas[0] / 2], [0, 0, 1]])
    perspective = np.array([[1, 0, 0], [0, 1, 0], [px * hyp.perspective, py * hyp.perspective, 1]])
    rotation = np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    shear = np.array([[1, tan_x, 0], [tan_y, 1, 0], [0, 0, 1]])
    move_x, move_y = (0.5 + tx * hyp.translate) * output[1], (0.5 + ty * hyp.translate) * output[0]
    translation = np.array([[1, 0, move_x], [0, 1, move_y], [0, 0, 1]])
    return Geometry(translation @ shear @ rotation @ perspective @ center, scale)


def map_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Map (n, 2) points by a (3, 3) homogeneous matrix; float64."""
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    return mapped[:, :2] / np.maximum(mapped[:, 2:], MIN_DEPTH)


def warp_labels(
    labels: np.ndarray,
    geometry: Geometry,
    output: tuple[int, int],
    outlines: Polygons | None = None,
    uncut: np.ndarray | None = None,
) -> np.ndarray:
    """Warp boxes: the hull of the four mapped corners, clipped; what is too small or mostly out of view is dropped.

    An object whose outline is known gets the box of what is seen of it, however turned or cut.

    Args:
        labels: (n, 5) [class, x1, y1, x2, y2] pixels of the canvas.
        geometry: the warp.
        output: (height, width).
        outlines: of the labels, pixels of the canvas.
        uncut: (n, 5) labels before the edge of the canvas cut them, in any place; None: as ``labels``.

    Returns:
        (m, 5) float32, m <= n, in the same order, pixels of the output.
    """
    if not len(labels):
        return labels
    corners = labels[:, [1, 2, 3, 4, 1, 4, 3, 2]].astype(np.float64).reshape(-1, 2)
    mapped = map_points(corners, geometry.matrix).reshape(-1, 4, 2)
    limit = np.array([output[1], output[0]], np.float64)
    low = np.minimum(np.maximum(mapped.min(axis=1), 0.0), limit)
    high = np.minimum(np.maximum(mapped.max(axis=1), 0.0), limit)
    least = np.full(len(labels), MIN_AREA_RATIO)
    if outlines is not None:
        turned = outlines._replace(points=map_points(outlines.points.astype(np.float64), geometry.matrix))
        seen = polygons.visible_boxes(turned, output[1], output[0])
        low[outlines.outlined], high[outlines.outlined] = seen[:, :2], seen[:, 2:]
        least[outlines.outlined] = MIN_AREA_RATIO_OUTLINED
    width, height = (high - low).T
    before = (labels[:, 3] - labels[:, 1]) * (labels[:, 4] - labels[:, 2]) * geometry.scale**2
    keep = (width > MIN_SIDE) & (height > MIN_SIDE) & (width * height > least * before)
    thinnest = _thinnest(labels if uncut is None else uncut)
    keep &= (width < thinnest * height) & (height < thinnest * width)
    return np.concatenate([labels[:, :1], low, high], axis=1, dtype=np.float32)[keep]


def _thinnest(labels: np.ndarray) -> np.ndarray:
    """(n,) ratio of sides above which what is left of each of some (n, 5) boxes is a sliver that was cut off."""
    sides = labels[:, 3:] - labels[:, 1:3]
    return np.maximum(MAX_ASPECT, ROUNDING * sides.max(axis=1) / np.maximum(sides.min(axis=1), 0.01))


def warp_tiles(
    tiles: Sequence[Tile], geometry: Geometry, canvas: tuple[int, int], output: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Warp a canvas of tiles on grey into an output image.

    What lies outside the canvas is cut off, boxes included. Where tiles overlap, the later one is seen.

    Args:
        tiles: images with labels, placed on the canvas.
        geometry: the warp from canvas to output.
        canvas: (height, width).
        output: (H, W).

    Returns:
        (H, W, 3) uint8 image and (m, 5) labels of all tiles, in pixels of the output.
    """
    labels, outlines = place_labels(tiles, canvas)
    matrix = geometry.matrix
    upright = not (matrix[0, 1] or matrix[1, 0] or matrix[2, 0] or matrix[2, 1])
    image = _warp_each(tiles, matrix, canvas, output) if upright else _warp_canvas(tiles, matrix, canvas, output)
    uncut = np.concatenate([tile.labels for tile in tiles])
    return image, warp_labels(labels, geometry, output, outlines, uncut)


def place_labels(tiles: Sequence[Tile], canvas: tuple[int, int]) -> tuple[np.ndarray, Polygons | None]:
    """Labels of all tiles, (n, 5), and their outlines, in pixels of the canvas (height, width) and clipped to it."""
    limit = np.array([canvas[1], canvas[0], canvas[1], canvas[0]], np.float32)
    labels, outlines = [np.zeros((0, 5), np.float32)], []
    for tile in tiles:
        corner = np.array([tile.left, tile.top, tile.left, tile.top], np.float32)
        placed = tile.labels.copy()
        placed[:, 1:] = np.minimum(np.maximum(placed[:, 1:] + corner, 0.0), limit)
        labels.append(placed)
        part = tile.outlines
        if part is not None:
            part = part._replace(points=np.minimum(np.maximum(part.points + corner[:2], 0.0), limit[:2]))
        outlines.append(part)
    return np.concatenate(labels), polygons.join(outlines, [len(tile.labels) for tile in tiles])


def _on_canvas(tile: Tile, canvas: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """The part of a tile's image that lies on the canvas, maybe without a pixel, and the place of its top left corner.

    Returns:
        (h, w, 3) view, left, top.
    """
    height, width = tile.image.shape[:2]
    left, top = max(tile.left, 0), max(tile.top, 0)
    right, bottom = max(min(tile.left + width, canvas[1]), left), max(min(tile.top + height, canvas[0]), top)
    return tile.image[top - tile.top : bottom - tile.top, left - tile.left : right - tile.left], left, top


def _paint_canvas(tiles: Sequence[Tile], canvas: tuple[int, int]) -> np.ndarray:
    """Tiles on grey, (height, width, 3)."""
    painted = np.full((*canvas, 3), GREY, np.uint8)
    for tile in tiles:
        source, left, top = _on_canvas(tile, canvas)
        painted[top : top + source.shape[0], left : left + source.shape[1]] = source
    return painted


def _warp_canvas(
    tiles: Sequence[Tile], matrix: np.ndarray, canvas: tuple[int, int], output: tuple[int, int]
) -> np.ndarray:
    """Paint the canvas and warp it: for turned tiles, whose seams run across pixels."""
    painted = _paint_canvas(tiles, canvas)
    # OpenCV puts pixel 0's centre at 0, we at 0.5.
    enter, leave = (np.array([[1, 0, shift], [0, 1, shift], [0, 0, 1]]) for shift in (0.5, -0.5))
    own = leave @ matrix @ enter
    size = output[::-1]
    if matrix[2, 0] or matrix[2, 1]:
        return cv2.warpPerspective(painted, own, size, borderValue=(GREY, GREY, GREY))
    return cv2.warpAffine(painted, own[:2], size, borderValue=(GREY, GREY, GREY))


def _warp_each(
    tiles: Sequence[Tile], matrix: np.ndarray, canvas: tuple[int, int], output: tuple[int, int]
) -> np.ndarray:
    """Scale and move each tile straight into its rectangle of the output, which spares the canvas."""
    image = np.full((*output, 3), GREY, np.uint8)
    for tile in tiles:
        source, left, top = _on_canvas(tile, canvas)
        x1, x2, shift_x = _output_range(left, source.shape[1], matrix[0, 0], matrix[0, 2], output[1])
        y1, y2, shift_y = _output_range(top, source.shape[0], matrix[1, 1], matrix[1, 2], output[0])
        if x1 < x2 and y1 < y2:
            source = cv2.copyMakeBorder(source, 1, 1, 1, 1, cv2.BORDER_REPLICATE)
            own = np.array([[matrix[0, 0], 0, shift_x], [0, matrix[1, 1], shift_y]])
            cv2.warpAffine(source, own, (x2 - x1, y2 - y1), dst=image[y1:y2, x1:x2])
    return image


def _output_range(start: int, length: int, scale: float, move: float, limit: int) -> tuple[int, int, float]:
    """Where a piece of the canvas lands, along one axis.

    Args:
        start: of the piece on the canvas.
        length: of the piece.
        scale: of the warp.
        move: of the warp.
        limit: length of the output.

    Returns:
        First and last + 1 output pixel whose centre lies in the piece, so that neighbours meet without gap or overlap;
        and where the centre of an extra pixel before the piece is, from the centre of the first of these. With one
        repeated pixel around it a piece is interpolated up to its edges from itself alone.
    """
    first = max(math.ceil(scale * start + move - 0.5), 0)
    stop = min(math.ceil(scale * (start + length) + move - 0.5), limit)
    return first, stop, scale * (start - 0.5) + move - 0.5 - first


def letterbox_warp(
    image: np.ndarray,
    labels: np.ndarray,
    shape: tuple[int, int],
    hyp: Hyp,
    rng: np.random.Generator,
    outlines: Polygons | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Centre one image on a grey canvas of ``shape`` (H, W) and warp the canvas at random; see ``warp_tiles``."""
    left, top = pad_offset(image.shape[1], shape[1]), pad_offset(image.shape[0], shape[0])
    geometry = draw_geometry(rng, hyp, shape, shape)
    return warp_tiles([Tile(image, labels, left, top, outlines)], geometry, shape, shape)


def mosaic(
    samples: Sequence[tuple[np.ndarray, np.ndarray]],
    side: int,
    hyp: Hyp,
    rng: np.random.Generator,
    outlines: Sequence[Polygons | None] = (None, None, None, None),
) -> tuple[np.ndarray, np.ndarray]:
    """Four images around a random centre on a canvas of twice the side, warped into a square (YOLOv4, section 3.3).

    Args:
        samples: four pairs of image and labels: top left, top right, bottom left, bottom right. Each image touches the
            centre with one corner.
        side: of the output, pixels. The centre is uniform in [0.5, 1.5] x side.
        hyp: ``copy_paste``, and see ``draw_geometry``.
        rng: ten values are drawn, and one for each label with an outline.
        outlines: of each sample's labels, pixels of its image.

    Returns:
        (side, side, 3) uint8 image and (m, 5) labels.
    """
    x, y = rng.integers(side // 2, side + side // 2, size=2, endpoint=True).tolist()
    canvas = (2 * side, 2 * side)
    geometry = draw_geometry(rng, hyp, canvas, (side, side))
    tiles = []
    for place, (image, labels) in enumerate(samples):
        left = x if place % 2 else x - image.shape[1]
        top = y if place // 2 else y - image.shape[0]
        tiles.append(Tile(image, labels, left, top, outlines[place]))
    if any(outlines):
        placed, drawn = place_labels(tiles, canvas)
        assert drawn is not None
        chosen = draw_copies(placed, drawn, canvas[1], hyp, rng)
        if chosen:
            image, labels, drawn = copy_paste(_paint_canvas(tiles, canvas), placed, drawn, chosen)
            tiles = [Tile(image, labels, 0, 0, drawn)]
    return warp_tiles(tiles, geometry, canvas, (side, side))


def draw_copies(labels: np.ndarray, outlines: Polygons, width: int, hyp: Hyp, rng: np.random.Generator) -> list[int]:
    """Choose objects whose mirror images have room in the image (Ghiasi et al. 2021, "Simple Copy-Paste ...").

    Args:
        labels: (n, 5) pixels.
        outlines: of the labels; only objects that have one are chosen.
        width: of the image, pixels.
        hyp: ``copy_paste``, the share of them that is tried.
        rng: one value is drawn for each of them.

    Returns:
        Labels whose mirrored box covers less than 30 % of each box that is there, the copies before it included.
    """
    candidates = np.flatnonzero(outlines.outlined)
    order = np.argsort(rng.random(len(candidates)), kind="stable")
    there = labels[:, 1:].astype(np.float64)
    chosen = []
    for label in candidates[order[: round(hyp.copy_paste * len(candidates))]].tolist():
        x1, y1, x2, y2 = labels[label, 1:].tolist()
        if x1 >= x2 or y1 >= y2:
            continue  # nothing of it is on the canvas
        copy = np.array([width - x2, y1, width - x1, y2])
        overlap = (np.minimum(there[:, 2:], copy[2:]) - np.maximum(there[:, :2], copy[:2])).clip(min=0).prod(axis=1)
        area = (there[:, 2:] - there[:, :2]).prod(axis=1)
        if (overlap < MAX_COVERED * area)[area > 0].all():
            chosen.append(label)
            there = np.concatenate([there, copy[None]])
    return chosen


def copy_paste(
    image: np.ndarray, labels: np.ndarray, outlines: Polygons, chosen: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, Polygons]:
    """Paste some objects once more, mirrored left to right across the whole image.

    Args:
        image: (H, W, 3) uint8.
        labels: (n, 5) pixels.
        outlines: of the labels.
        chosen: of ``draw_copies``.

    Returns:
        A new image, and labels and outlines with those of the copies behind the others.
    """
    width = image.shape[1]
    pasted, mirrored = image.copy(), image[:, ::-1]
    copies = labels[chosen]
    copies[:, [1, 3]] = width - copies[:, [3, 1]]
    shapes = [np.array([width, 0], np.float32) + outlines.of(label) * np.array([-1, 1], np.float32) for label in chosen]
    for (_, x1, y1, x2, y2), shape in zip(copies.tolist(), shapes, strict=True):
        left, top, right, bottom = math.floor(x1), math.floor(y1), math.ceil(x2), math.ceil(y2)
        mask = np.zeros((bottom - top, right - left), np.uint8)
        polygons.paint(mask, shape - np.array([left, top], np.float32))
        window = (slice(top, bottom), slice(left, right))
        pasted[window][mask > 0] = mirrored[window][mask > 0]
    own = Polygons(np.concatenate(shapes), np.cumsum([0, *map(len, shapes)]))
    joined = polygons.join([outlines, own], [len(labels), len(copies)])
    assert joined is not None
    return pasted, np.concatenate([labels, copies]), joined


def mixup(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Blend two images of one shape by a Beta(32, 32) weight and join their labels (Zhang et al. 2018)."""
    weight = rng.beta(32.0, 32.0)
    image = cv2.addWeighted(first[0], weight, second[0], 1.0 - weight, 0.0)
    return image, np.concatenate([first[1], second[1]])


def adjust_hsv(image: np.ndarray, hyp: Hyp, rng: np.random.Generator) -> np.ndarray:
    """Multiply hue, saturation and value by gains uniform in 1 +- ``hsv_h``, ``hsv_s``, ``hsv_v``; three draws.

    The gains are applied by lookup tables. OpenCV's hue runs from 0 to 179 and wraps; the others saturate.
    """
    gains = 1.0 + rng.uniform(-1.0, 1.0, 3) * (hyp.hsv_h, hyp.hsv_s, hyp.hsv_v)
    if np.all(gains == 1.0):
        return image
    table = np.arange(256)[:, None] * gains
    table[:, 0] %= 180
    table = np.minimum(np.maximum(table, 0), 255).astype(np.uint8)
    hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
    return cv2.cvtColor(cv2.LUT(hsv, table[None]), cv2.COLOR_HSV2BGR, dst=hsv)  # fresh memory costs as much as the work


def flip(image: np.ndarray, labels: np.ndarray, hyp: Hyp, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Flip upside down with probability ``flipud``, left to right with ``fliplr``; two draws."""
    upside_down, left_right = (rng.random(2) < (hyp.flipud, hyp.fliplr)).tolist()
    if not upside_down and not left_right:
        return image, labels
    height, width = image.shape[:2]
    flipped = labels.copy()
    if upside_down:
        flipped[:, [2, 4]] = height - labels[:, [4, 2]]
    if left_right:
        flipped[:, [1, 3]] = width - labels[:, [3, 1]]
    return cv2.flip(image, {(True, True): -1, (True, False): 0, (False, True): 1}[upside_down, left_right]), flipped
