"""Outlines of objects: packed, moved with their image, cut at its edges, painted.

Shape letters: n labels of an image, P points of all their outlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

SUBPIXEL_BITS = 4  # of the points that OpenCV fills between


class Polygons(NamedTuple):
    """The outlines of the labels of one image.

    Attributes:
        points: (P, 2) [x, y]; closed polygons, without the first point once more.
        offsets: (n + 1,) int64; label k has points[offsets[k]:offsets[k + 1]], none at all if only its box is known.
    """

    points: np.ndarray
    offsets: np.ndarray

    @property
    def outlined(self) -> np.ndarray:
        """(n,) bool: labels that have an outline."""
        return self.offsets[1:] > self.offsets[:-1]

    def of(self, label: int) -> np.ndarray:
        """(p, 2) points of one label."""
        return self.points[self.offsets[label] : self.offsets[label + 1]]


def join(parts: Sequence[Polygons | None], counts: Sequence[int]) -> Polygons | None:
    """Put the outlines of several images one behind the other.

    Args:
        parts: of each image, None where no label has an outline.
        counts: labels of each image.

    Returns:
        The outlines of all labels; None if no label has one.
    """
    if not any(part is not None for part in parts):
        return None
    points, sizes = [np.zeros((0, 2), np.float32)], [np.zeros(0, np.int64)]
    for part, count in zip(parts, counts, strict=True):
        points.append(points[0] if part is None else part.points)
        sizes.append(np.zeros(count, np.int64) if part is None else np.diff(part.offsets))
    return Polygons(np.concatenate(points), np.concatenate(([0], np.cumsum(np.concatenate(sizes)))))


def visible_boxes(polygons: Polygons, width: float, height: float) -> np.ndarray:
    """Boxes around what is seen of each outlined object through a window.

    Exact, without sampling points along the sides: the box of a cut polygon is that of the pieces of its sides within
    the window (found as by Liang and Barsky 1984) and of the window's corners within the polygon.

    Args:
        polygons: in pixels of the window, float64.
        width: of the window, which starts at (0, 0).
        height: of the window.

    Returns:
        (number of outlined labels, 4) xyxy within the window; zeros where nothing is seen.
    """
    starts = polygons.offsets[:-1][polygons.outlined]
    if not len(starts):
        return np.zeros((0, 4))
    begin = polygons.points
    following = np.arange(1, len(begin) + 1)
    following[np.append(starts[1:], len(begin)) - 1] = starts  # from the last point back to the first
    end = begin[following]
    low, high = _pieces(begin, end, np.array([width, height]))
    low, high = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    for corner in ((0.0, 0.0), (width, 0.0), (0.0, height), (width, height)):
        inside = np.add.reduceat(_crossed(begin, end, corner), starts) % 2 == 1
        low[inside], high[inside] = np.minimum(low[inside], corner), np.maximum(high[inside], corner)
    seen = np.isfinite(low).all(axis=1)
    return np.where(seen[:, None], np.concatenate([low, high], axis=1), 0.0)


def _pieces(begin: np.ndarray, end: np.ndarray, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest coordinates (P, 2) of each side's piece in the window; inf and -inf without one."""
    span = end - begin
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second = -begin / span, (limit - begin) / span  # where the side meets the window's edges, as shares
    enter, leave = np.minimum(first, second), np.maximum(first, second)
    level, within = span == 0, (begin >= 0) & (begin <= limit)
    enter = np.where(level, np.where(within, -np.inf, np.inf), enter).max(axis=1).clip(min=0)[:, None]
    leave = np.where(level, np.where(within, np.inf, -np.inf), leave).min(axis=1).clip(max=1)[:, None]
    with np.errstate(invalid="ignore"):
        a, b = (np.clip(begin + share * span, 0, limit) for share in (enter, leave))
    seen = enter <= leave
    return np.where(seen, np.minimum(a, b), np.inf), np.where(seen, np.maximum(a, b), -np.inf)


def _crossed(begin: np.ndarray, end: np.ndarray, point: tuple[float, float]) -> np.ndarray:
    """(P,) int: sides that a ray from a point to the right crosses; an odd number of a polygon's if it is inside."""
    x, y = point
    astride = (begin[:, 1] > y) != (end[:, 1] > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        meets = begin[:, 0] + (y - begin[:, 1]) / (end[:, 1] - begin[:, 1]) * (end[:, 0] - begin[:, 0])
    return (astride & (x < meets)).astype(np.int64)


def paint(mask: np.ndarray, points: np.ndarray) -> None:
    """Set the pixels of a uint8 mask whose centers lie in a polygon to 1, its edge included.

    Args:
        mask: (h, w), changed in place.
        points: (p, 2) pixels of the mask.
    """
    shifted = np.round((points - 0.5) * (1 << SUBPIXEL_BITS)).astype(np.int32)  # OpenCV puts pixel 0's center at 0
    cv2.fillPoly(mask, [shifted], 1, shift=SUBPIXEL_BITS)
