"""Images and labels turned, scaled, sheared and moved together: one warp from a canvas of tiles to the output.

Images are (H, W, 3) uint8 BGR and are never changed in place. Labels are (n, 5) float32 [class, x1, y1, x2, y2] in
pixels of their image, (0, 5) where there is none. Coordinates are continuous: pixel (i, j) covers [j, j + 1) x
[i, i + 1), so an image whose left edge is at 0 has its first pixel's center at 0.5.
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
from utils.data.resizing import GREY

MIN_SIDE = 2.0  # pixels; a box with a shorter side after the warp is dropped
MIN_AREA_RATIO, MIN_AREA_RATIO_OUTLINED = 0.1, 0.01  # of the box's area that must still be visible
MAX_ASPECT = 100.0  # of what cutting leaves; objects that are thinner as they are, such as wires, are kept
ROUNDING = 1.01
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


def draw_geometry(rng: np.random.Generator, hyp: Hyp, canvas: tuple[int, int], output: tuple[int, int]) -> Geometry:
    """Draw a random perspective, rotation, scale, shear and translation.

    The canvas center goes to the origin, then come perspective, rotation with scale, shear, and last the translation to
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


def paint_canvas(tiles: Sequence[Tile], canvas: tuple[int, int]) -> np.ndarray:
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
    painted = paint_canvas(tiles, canvas)
    # OpenCV puts pixel 0's center at 0, we at 0.5.
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
        First and last + 1 output pixel whose center lies in the piece, so that neighbors meet without gap or overlap;
        and where the center of an extra pixel before the piece is, from the center of the first of these. With one
        repeated pixel around it a piece is interpolated up to its edges from itself alone.
    """
    first = max(math.ceil(scale * start + move - 0.5), 0)
    stop = min(math.ceil(scale * (start + length) + move - 0.5), limit)
    return first, stop, scale * (start - 0.5) + move - 0.5 - first
