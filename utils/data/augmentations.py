"""Augmentations: pure functions of (image, labels, generator).

Images are (H, W, 3) uint8 BGR and are never changed in place. Labels are (n, 5) float32 [class, x1, y1, x2, y2] in
pixels of their image, (0, 5) where there is none. Coordinates are continuous: pixel (i, j) covers [j, j + 1) x
[i, i + 1), so an image whose left edge is at 0 has its first pixel's center at 0.5. A function that takes a generator
always draws the same number of values from it, whatever the hyperparameters are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from utils.config.recipe import Hyp
from utils.data import polygons
from utils.data.polygons import Polygons
from utils.data.resizing import pad_offset
from utils.data.warping import Tile, draw_geometry, paint_canvas, place_labels, warp_tiles

MAX_COVERED = 0.3  # of a box that a pasted copy may hide


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
    """Four images around a random center on a canvas of twice the side, warped into a square (YOLOv4, section 3.3).

    Args:
        samples: four pairs of image and labels: top left, top right, bottom left, bottom right. Each image touches the
            center with one corner.
        side: of the output, pixels. The center is uniform in [0.5, 1.5] x side.
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
            image, labels, drawn = copy_paste(paint_canvas(tiles, canvas), placed, drawn, chosen)
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
