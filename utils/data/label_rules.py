"""The rules that the rows of label files must keep, and what is done with rows that break them.

Shape letter: M boxes of many files.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from utils.data.report import Problem

TOLERANCE = 0.01  # annotation tools round; what leaves the image by up to this share is clipped, beyond it is a mistake
NOISE = 2e-6  # rounding of labels written with six decimals; neither changed nor reported
BOX_COLUMNS = 5  # class cx cy w h


class Rows(NamedTuple):
    """Rows of many label files: image (M,) position, line (M,), box (M, 5) [class, cx, cy, w, h] cxcywhn.

    ``low`` and ``high`` (M,) are the smallest and largest coordinate as written (for polygons, of their points).
    ``outline`` (M,) is the place of a polygon in the reader's ``outlines``, -1 for a box.
    """

    image: np.ndarray
    line: np.ndarray
    box: np.ndarray
    low: np.ndarray
    high: np.ndarray
    outline: np.ndarray


class Verdict(NamedTuple):
    """Rows that break a rule, (M,) bool; the value to report, (M,); corrected boxes, or None: these rows go."""

    hit: np.ndarray
    value: np.ndarray
    box: np.ndarray | None = None


def not_finite(rows: Rows) -> Verdict:
    """NaN and infinity."""
    return Verdict(~np.isfinite(rows.box).all(1), rows.box.sum(1))


def bad_class(rows: Rows, num_classes: int) -> Verdict:
    """Class ids are whole numbers from 0 to num_classes - 1."""
    ids = rows.box[:, 0]
    return Verdict((ids != np.floor(ids)) | (ids < 0) | (ids >= num_classes), ids)


def far_outside(rows: Rows) -> Verdict:
    """Coordinates that are not normalized, or annotated wrongly."""
    worst = np.where(rows.low < -TOLERANCE, rows.low, rows.high)
    return Verdict((rows.low < -TOLERANCE) | (rows.high > 1 + TOLERANCE), worst)


def slightly_outside(rows: Rows) -> Verdict:
    """Coordinates beyond 0 or 1 within the tolerance."""
    box = rows.box.copy()
    np.clip(box[:, 1:], 0, 1, out=box[:, 1:])
    return Verdict((rows.low < 0) | (rows.high > 1), np.where(rows.low < 0, rows.low, rows.high), box)


def no_area(rows: Rows) -> Verdict:
    """Boxes without width or height."""
    smaller = rows.box[:, 3:].min(1)
    return Verdict(smaller <= 0, smaller)


def corners_outside(rows: Rows) -> Verdict:
    """Boxes whose center is inside while a corner is not."""
    half = rows.box[:, 3:] / 2
    corners = np.concatenate((rows.box[:, 1:3] - half, rows.box[:, 1:3] + half), 1)
    low, high = corners.min(1), corners.max(1)
    hit = (low < -NOISE) | (high > 1 + NOISE)
    corners = corners.clip(0, 1)
    box = rows.box.copy()
    box[hit, 1:3] = (corners[hit, :2] + corners[hit, 2:]) / 2
    box[hit, 3:] = corners[hit, 2:] - corners[hit, :2]
    return Verdict(hit, np.where(-low > high - 1, low, high), box)


def repeated(rows: Rows, any_class: bool = False) -> Verdict:
    """The same class and box once more in the same file; with ``any_class`` the same box."""
    key = np.empty((len(rows.image), 6), np.float64)
    key[:, 0], key[:, 1:] = rows.image, rows.box.astype(np.float32)
    if any_class:
        key[:, 1] = 0
    seen: set[bytes] = set()
    hit = np.zeros(len(key), bool)
    for k, row in enumerate((key + 0.0).view("V48")[:, 0].tolist()):  # + 0.0: no negative zeros
        hit[k] = row in seen
        seen.add(row)
    return Verdict(hit, rows.box[:, 0])


LEFT_OUT_ROW = "row left out"  # how a rule ends if it does that
BAD_CLASS = "class id outside the names of the data YAML"
ROW_RULES: tuple[tuple[str, Callable[[Rows], Verdict]], ...] = (  # in this order, each on what the ones before left
    ("not a finite number, row left out", not_finite),
    ("coordinate outside 0 to 1 by more than 0.01, row left out", far_outside),
    ("coordinate slightly outside 0 to 1, clipped", slightly_outside),
    ("box without width or height, row left out", no_area),
    ("box reaches out of the image, clipped", corners_outside),
)
REPEATED = "row repeated, kept once"
REPEATED_BOX = "box repeated where all classes count as one, kept once"


def check_rows(
    rows: Rows, names: Sequence[str], num_classes: int, problems: list[Problem], single_cls: bool = False
) -> Rows:
    """Apply every rule.

    Args:
        rows: as they were read.
        names: the label files that ``rows.image`` counts.
        num_classes: classes of the data set.
        problems: where to add what breaks a rule.
        single_cls: whether all classes count as one. The rows keep their ids.

    Returns:
        What is left, maybe corrected.
    """
    rules = (
        ROW_RULES[0],
        (BAD_CLASS, lambda rows: bad_class(rows, num_classes)),
        *ROW_RULES[1:],
        (REPEATED_BOX, lambda rows: repeated(rows, any_class=True)) if single_cls else (REPEATED, repeated),
    )
    for text, rule in rules:
        hit, value, box = rule(rows)
        for k in np.flatnonzero(hit):
            problems.append(Problem(names[rows.image[k]], int(rows.line[k]), f"{value[k]:.6g}", text))
        if box is not None:
            rows = rows._replace(box=box)
        elif hit.any():
            rows = Rows(*(column[~hit] for column in rows))
    return rows
