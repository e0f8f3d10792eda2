"""Average precision by COCO's rules, equal to what pycocotools computes from the same detections and labels.

Shape letters: N detections and L labels of the whole split, P pairs of both, C classes, T = 10 IoU thresholds.

The rules (https://cocodataset.org/#detection-eval; what is left open there is as in pycocotools' ``COCOeval``):
    - In each image and class the 100 most confident detections count.
    - At each IoU threshold, the most confident detection first, a detection takes the label that it overlaps most of
      those of its image and class that are still free; the last one of equals. One that finds none is false.
    - A crowd is no label to be found, but what lies in it is not false: any number of detections may take it if they
      find nothing else, and do not count. Their overlap is the share of the detection inside.
    - For objects of one size, labels of other areas are treated so too, except that each is taken only once, and
      detections of other areas that found nothing do not count.
    - Precision, made non-increasing, is read at 101 recalls as a step function; AP is the mean of these.

What differs from the AP of the validation table: `utils.metrics.average_precision`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint16]  # bit t: at the IoU threshold t

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
REACHED = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)  # IoU from which a detection may take a label
RECALL_POINTS = np.linspace(0, 1, 101)
MAX_DETECTIONS = 100  # in an image, of a class
AREAS = {"": (0, 1e5**2), " small": (0, 32**2), " medium": (32**2, 96**2), " large": (96**2, 1e5**2)}  # square pixels
EVERY = (1 << len(IOU_THRESHOLDS)) - 1
NO_LABELS = -1.0  # as COCO says it


class Found(NamedTuple):
    """Detections of a split.

    Attributes:
        image: (N,) number of the image.
        category: (N,) class.
        boxes: (N, 4) xywh (top-left), pixels of the original image.
        score: (N,) confidence.
    """

    image: IntArray
    category: IntArray
    boxes: FloatArray
    score: FloatArray

    def rows(self, order: IntArray) -> "Found":
        """Return some of them."""
        return Found(self.image[order], self.category[order], self.boxes[order], self.score[order])


class Truth(NamedTuple):
    """Labels of a split.

    Attributes:
        image: (L,) number of the image.
        category: (L,) class.
        boxes: (L, 4) xywh (top-left), pixels of the original image.
        area: (L,) square pixels: of the object's outline, or of the box where that is not known.
        crowd: (L,) whether it is a crowd.
    """

    image: IntArray
    category: IntArray
    boxes: FloatArray
    area: FloatArray
    crowd: BoolArray

    def rows(self, order: IntArray) -> "Truth":
        """Return some of them."""
        return Truth(self.image[order], self.category[order], self.boxes[order], self.area[order], self.crowd[order])


class Pairs(NamedTuple):
    """Detections and labels of the same image and class that overlap enough at the first threshold.

    Attributes:
        found: (P,) rows of the detections; rising.
        truth: (P,) rows of the labels.
        iou: (P,).
        turn: (P,) how many detections of the pair's image and class, of those that are in pairs, come before its own.
    """

    found: IntArray
    truth: IntArray
    iou: FloatArray
    turn: IntArray


@dataclass(frozen=True)
class CocoMetrics:
    """AP by COCO's rules.

    Attributes:
        classes: (C,) classes that have labels which are no crowds, rising.
        ap: for each name of ``AREAS`` (C, T) AP of each class at each IoU threshold; NaN where a class has no such
            labels.
    """

    classes: IntArray
    ap: dict[str, FloatArray]

    def figures(self) -> dict[str, float]:
        """COCO's usual figures by name: means over classes and thresholds, -1 where there are no labels."""
        everything = self.ap[""]
        chosen = {"AP": everything, "AP50": everything[:, 0], "AP75": everything[:, 5]}
        chosen |= {f"AP{size}": ap for size, ap in self.ap.items() if size}
        return {name: _mean_of_known(ap) for name, ap in chosen.items()}


def coco_metrics(found: Found, truth: Truth) -> CocoMetrics:
    """Score detections by COCO's rules.

    Args:
        found: the detections, in any order; of equal scores in an image and class the earlier one comes first.
        truth: the labels, in any order; those of an image and class keep theirs.

    Returns:
        AP of the classes that have labels, 0 of those without detections; C = 0 without labels.
    """
    classes = np.unique(truth.category[~truth.crowd])
    truth_keys, found_keys = _keys(truth, found)
    order = np.argsort(truth_keys, kind="stable")
    truth, truth_keys = truth.rows(order), truth_keys[order]
    order = np.lexsort((-found.score, found_keys))
    order = order[_place_in_run(found_keys[order]) < MAX_DETECTIONS]
    found, found_keys = found.rows(order), found_keys[order]

    pairs = _pairs(found, found_keys, truth, truth_keys)
    # Class by class, the best first; of equal scores the one of the earlier image.
    ranked = np.lexsort((-found.score, found.category))
    ap = {name: _ap(found, truth, pairs, ranked, classes, *span) for name, span in AREAS.items()}
    return CocoMetrics(classes, ap)


def _keys(truth: Truth, found: Found) -> tuple[IntArray, IntArray]:
    """A number for each image and class, (L,) and (N,), that rises with the image in a class."""
    image = np.concatenate([truth.image, found.image]).astype(np.int64)
    category = np.concatenate([truth.category, found.category]).astype(np.int64)
    keys = category * (image.max(initial=0) + 1) + image
    return keys[: len(truth.image)], keys[len(truth.image) :]


def _place_in_run(values: IntArray) -> IntArray:
    """(n,) how many equal neighbors come before each of some values that are sorted."""
    places = np.arange(len(values))
    return places - np.maximum.accumulate(np.where(np.diff(values, prepend=-1) != 0, places, 0))


def _pairs(found: Found, found_keys: IntArray, truth: Truth, truth_keys: IntArray) -> Pairs:
    """Pair what is in one image and of one class; both are sorted by their keys."""
    first, end = (np.searchsorted(truth_keys, found_keys, side) for side in ("left", "right"))
    count = end - first  # (N,) labels of the image and class of each detection
    rows = np.repeat(np.arange(len(count)), count)
    labels = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    iou = _iou(found.boxes[rows], truth.boxes[labels], truth.crowd[labels])
    close = iou >= REACHED[0]
    rows, labels, iou = rows[close], labels[close], iou[close]
    paired, place = np.unique(rows, return_inverse=True)
    return Pairs(rows, labels, iou, _place_in_run(found_keys[paired])[place])


def _iou(a: FloatArray, b: FloatArray, crowd: BoolArray) -> FloatArray:
    """IoU (n,) of boxes (n, 4) xywh, row by row; where ``b`` is a crowd, the share of ``a`` inside."""
    sides = np.minimum(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    overlap = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0.0)
    area_a, area_b = a[:, 2] * a[:, 3], b[:, 2] * b[:, 3]
    whole = np.where(crowd, area_a, area_a + area_b - overlap)
    return np.divide(overlap, whole, out=np.zeros_like(overlap), where=overlap > 0)


def _ap(
    found: Found, truth: Truth, pairs: Pairs, ranked: IntArray, classes: IntArray, low: float, high: float
) -> FloatArray:
    """AP (C, T) of objects of an area from low to high; NaN for classes without."""
    ignored = truth.crowd | (truth.area < low) | (truth.area > high)
    hits, aside = _match(pairs, ignored, truth.crowd, len(found.score))
    area = found.boxes[:, 2] * found.boxes[:, 3]
    outside = (area < low) | (area > high)
    aside = np.where(outside, ~hits, aside)
    hits, aside, category = hits[ranked], aside[ranked], found.category[ranked]

    bounds = np.searchsorted(category, classes), np.searchsorted(category, classes, side="right")
    wanted = [int(np.count_nonzero(~ignored[truth.category == one])) for one in classes]
    ap = np.full((len(classes), len(REACHED)), np.nan)
    for t in range(len(REACHED)):
        hit = hits >> t & 1 > 0
        # Places among the detections that count: a detection that is put aside leaves no gap.
        place = np.cumsum(aside >> t & 1 == 0)
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            if wanted[i]:
                before = place[start - 1] if start else 0
                ap[i, t] = _area(place[start:end][hit[start:end]] - before, wanted[i])
    return ap


def _match(pairs: Pairs, ignored: BoolArray, crowd: BoolArray, size: int) -> tuple[Bits, Bits]:
    """Let detections take labels, at all thresholds at once.

    Groups (an image and a class) know nothing of each other. So all groups take their turns together: in a step each
    has one detection ask for one label, the most confident detection first and each for its best label first.

    Args:
        pairs: of all groups.
        ignored: (L,) labels that are not to be found.
        crowd: (L,) labels that stay free.
        size: N.

    Returns:
        (N,) thresholds at which a detection took a label; (N,) at which it took an ignored one.
    """
    wish = np.lexsort((-pairs.truth, -pairs.iou, ignored[pairs.truth], pairs.found))
    turn, choice = pairs.turn[wish], _place_in_run(pairs.found[wish])
    schedule = np.lexsort((choice, turn))
    turn, choice, wish = turn[schedule], choice[schedule], wish[schedule]
    found, truth = pairs.found[wish], pairs.truth[wish]
    # The thresholds that a pair reaches are the first ones. What is left of these bits is where the label is taken.
    taken = ((1 << np.searchsorted(REACHED, pairs.iou[wish], side="right")) - 1).astype(np.uint16)
    free, seeking = np.full(len(ignored), EVERY, np.uint16), np.full(size, EVERY, np.uint16)
    new_step = np.flatnonzero((np.diff(turn, prepend=-1) != 0) | (np.diff(choice, prepend=-1) != 0))
    for step in map(slice, new_step, [*new_step[1:], len(wish)]):
        rows, labels = found[step], truth[step]
        taken[step] &= free[labels] & seeking[rows]
        seeking[rows] &= ~taken[step]
        free[labels] &= np.where(crowd[labels], EVERY, ~taken[step])
    hits, aside = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
    np.bitwise_or.at(hits, found[~ignored[truth]], taken[~ignored[truth]])
    np.bitwise_or.at(aside, found[ignored[truth]], taken[ignored[truth]])
    return hits, aside


def _area(places: IntArray, wanted: int) -> float:
    """Mean of the precision at 101 recalls.

    Between hits precision falls and recall stays, so the hits alone decide how high precision is from a recall on.

    Args:
        places: (n,) of the hits among the detections that count, from 1, rising.
        wanted: labels to be found.
    """
    hits = np.arange(1, len(places) + 1)
    precision = hits / (places + np.spacing(1))
    precision = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(precision[np.searchsorted(hits / wanted, RECALL_POINTS)].mean())


def _mean_of_known(ap: FloatArray) -> float:
    known = ap[~np.isnan(ap)]
    return float(known.mean()) if known.size else NO_LABELS
