"""Detection metrics: matching, average precision, the summary of a validation and the confusion matrix.

Shape letters: N detections in the split, L labels (of one image or of the split), K detections of one image,
C classes that have labels, T IoU thresholds. Arithmetic is in float64; nothing here knows about ranks.
Ties are resolved by order: the earlier detection, the earlier label.

How the AP here differs from COCO's (pycocotools), for the same detections:
    - Both read precision, made non-increasing, at 101 recall points. COCO takes the step function's value at each
      point and averages 101 values; here the curve is linear between its points, runs from (0, 1) to (1, 0), and the
      area is summed by trapezoids.
    - In COCO a detection whose best label is taken falls back to the next one it overlaps enough; here it counts as
      false (`match_detections`).
    - COCO's usual figures keep 100 detections of each class in an image; here it is whatever non-maximum suppression
      kept, 300 an image by default. For a comparison give pycocotools ``maxDets`` 300.
    Together they come to a few thousandths. `utils.metrics.coco` has COCO's own figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from utils.core.wording import one_line

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
ClassIds = npt.NDArray[np.number[Any]]  # whole numbers of any dtype: rows of boxes carry them as floats

# Quotients, not a linspace: 0.6 is then the same number as an IoU of 3 / 5.
IOU_THRESHOLDS = np.arange(50, 100, 5) / 100

RECALL_POINTS = np.linspace(0, 1, 101)  # where AP samples the precision-recall curve, as COCO does
CURVE_POINTS = np.linspace(0, 1, 1000)  # confidences (or recalls) of the curves that are kept
SMOOTHING = 101  # points of the moving average over the mean F1 curve: a tenth of it, odd
TINY = 1e-16  # keeps 0 / 0 at 0


def match_detections(detections: FloatArray, labels: FloatArray, iou_thresholds: FloatArray) -> BoolArray:
    """Decide which detections of one image are true positives, at each IoU threshold by itself.

    A detection points at the label of its class that it overlaps most, if that IoU reaches the threshold. Of the
    detections that point at one label the most confident is the true positive. The others are false: there is no
    second choice.

    Args:
        detections: (K, 6) [x1, y1, x2, y2, conf, class], pixels of the original image, clipped to it.
        labels: (L, 5) [class, x1, y1, x2, y2], pixels of the original image.
        iou_thresholds: (T,) in (0, 1].

    Returns:
        (K, T), true where the detection is a true positive; all false without labels.
    """
    true_positive = np.zeros((len(detections), len(iou_thresholds)), dtype=bool)
    if len(detections) == 0 or len(labels) == 0:
        return true_positive
    order = np.argsort(-detections[:, 4], kind="stable")
    rows, columns = np.nonzero(detections[order, 5:6] == labels[:, 0])
    iou = _iou(detections[order[rows], :4], labels[columns, 1:])
    close = iou >= iou_thresholds.min(initial=1)  # few are
    rows, columns, iou = rows[close], columns[close], iou[close]
    # Row by row, the largest overlap first: of equals the earlier label, as sorting keeps their order.
    best = np.lexsort((-iou, rows))
    rows, columns, iou = rows[best], columns[best], iou[best]
    leads = np.ones(len(rows), dtype=bool)
    leads[1:] = rows[1:] != rows[:-1]
    rows, columns, iou = rows[leads], columns[leads], iou[leads]
    pointing, thresholds = np.nonzero(iou[:, None] >= iou_thresholds)
    # Rows come in falling confidence, so the first one of a (label, threshold) pair is its most confident detection.
    _, first = np.unique(columns[pointing] * len(iou_thresholds) + thresholds, return_index=True)
    true_positive[order[rows[pointing[first]]], thresholds[first]] = True
    return true_positive


def _iou(a: FloatArray, b: FloatArray) -> FloatArray:
    """IoU (n,) of xyxy boxes (n, 4), row by row, in float64; 0 for pairs without area."""
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = a.T.astype(np.float64), b.T.astype(np.float64)
    width, height = np.minimum(ax2, bx2) - np.maximum(ax1, bx1), np.minimum(ay2, by2) - np.maximum(ay1, by1)
    overlap = np.maximum(width, 0) * np.maximum(height, 0)
    area_a = np.maximum(ax2 - ax1, 0) * np.maximum(ay2 - ay1, 0)
    area_b = np.maximum(bx2 - bx1, 0) * np.maximum(by2 - by1, 0)
    return np.divide(overlap, area_a + area_b - overlap, out=np.zeros_like(overlap), where=overlap > 0)


@dataclass(frozen=True)
class Curves:
    """What is plotted, at IoU 0.5, sampled at ``CURVE_POINTS`` (1000).

    Attributes:
        precision: (C, 1000) over confidence.
        recall: (C, 1000) over confidence.
        f1: (C, 1000) over confidence.
        precision_at_recall: (C, 1000) over recall, made non-increasing.
    """

    precision: FloatArray
    recall: FloatArray
    f1: FloatArray
    precision_at_recall: FloatArray


@dataclass(frozen=True)
class ClassMetrics:
    """Figures per class that has labels.

    Attributes:
        classes: (C,) class ids, rising.
        instances: (C,) labels of each class.
        precision: (C,) at ``confidence`` and IoU 0.5; likewise ``recall`` and ``f1``.
        recall: (C,).
        f1: (C,).
        ap: (C, T) average precision at each IoU threshold.
        confidence: where the smoothed mean F1 over classes is largest.
        curves: the curves these figures were read from.
    """

    classes: IntArray
    instances: IntArray
    precision: FloatArray
    recall: FloatArray
    f1: FloatArray
    ap: FloatArray
    confidence: float
    curves: Curves


def ap_per_class(tp: BoolArray, conf: FloatArray, pred_cls: ClassIds, target_cls: ClassIds) -> ClassMetrics:
    """Average precision and the best operating point, for each class that has labels.

    Args:
        tp: (N, T) true positives of the whole split, the first column at IoU 0.5 (`match_detections`).
        conf: (N,) confidences.
        pred_cls: (N,) class ids of the detections.
        target_cls: (L,) class ids of the labels.

    Returns:
        Figures of the C classes in ``target_cls``; zeros for a class without detections; C = 0 without labels.
    """
    classes, instances = np.unique(target_cls.astype(np.int64), return_counts=True)
    order = np.lexsort((-conf, pred_cls))  # class by class, the best first
    tp, conf, pred_cls = tp[order], conf[order].astype(np.float64), pred_cls[order]
    starts, ends = np.searchsorted(pred_cls, classes), np.searchsorted(pred_cls, classes, side="right")

    ap = np.zeros((len(classes), tp.shape[1]))
    precision, recall, precision_at_recall = np.zeros((3, len(classes), len(CURVE_POINTS)))
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start == end:
            continue
        hits = np.ascontiguousarray(tp[start:end].T).cumsum(axis=1)  # (T, n)
        class_recall = hits / (instances[i] + TINY)
        class_precision = hits / np.arange(1, end - start + 1)
        # Negated, because np.interp wants rising x. Above the highest confidence nothing is detected yet.
        recall[i] = np.interp(-CURVE_POINTS, -conf[start:end], class_recall[0], left=0)
        precision[i] = np.interp(-CURVE_POINTS, -conf[start:end], class_precision[0], left=1)
        curves = [_precision_envelope(*curve) for curve in zip(class_recall, class_precision, strict=True)]
        ap[i] = [_area(*curve) for curve in curves]
        precision_at_recall[i] = np.interp(CURVE_POINTS, *curves[0])

    f1 = 2 * precision * recall / (precision + recall + TINY)
    best = int(_smooth(f1.mean(axis=0)).argmax()) if len(classes) else 0
    return ClassMetrics(
        classes=classes,
        instances=instances,
        precision=precision[:, best],
        recall=recall[:, best],
        f1=f1[:, best],
        ap=ap,
        confidence=float(CURVE_POINTS[best]),
        curves=Curves(precision, recall, f1, precision_at_recall),
    )


def _precision_envelope(recall: FloatArray, precision: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The curve (n,), (n,) with its ends (0, 1) and (1, 0) added and precision made non-increasing, (n + 2,) each."""
    recall = np.concatenate(([0.0], recall, [1.0]))
    precision = np.concatenate(([1.0], precision, [0.0]))
    return recall, np.maximum.accumulate(precision[::-1])[::-1]


def _area(recall: FloatArray, precision: FloatArray) -> float:
    """Area under the curve by trapezoids between 101 evenly spaced recall points."""
    sampled = np.interp(RECALL_POINTS, recall, precision)
    return float((sampled[:-1] + sampled[1:]).sum() / 2 / (len(RECALL_POINTS) - 1))


def _smooth(values: FloatArray) -> FloatArray:
    """Moving average over ``SMOOTHING`` points, both ends repeated, same length."""
    padded = np.pad(values, SMOOTHING // 2, mode="edge")
    return np.convolve(padded, np.full(SMOOTHING, 1 / SMOOTHING), mode="valid")


def fitness(map50: float, map50_95: float) -> float:
    """The scalar that picks the best checkpoint: 0.1 mAP50 + 0.9 mAP50-95."""
    return 0.1 * map50 + 0.9 * map50_95


class TableRow(NamedTuple):
    """One line of the validation table; all figures but the counts in [0, 1], nan where there are no labels."""

    name: str
    images: int
    instances: int
    p: float
    r: float
    map50: float
    map: float


@dataclass(frozen=True)
class Metrics:
    """The result of a validation. Means go over the classes that have labels; nan if none has: nothing was measured.

    Attributes:
        p: mean precision at the best mean F1, IoU 0.5.
        r: mean recall at the same confidence.
        map50: mean AP at IoU 0.5.
        map: mean AP over IoU 0.5 to 0.95 (mAP50-95).
        images: images in the split, those without labels included.
        images_per_class: (num_classes,) images with a label of each class.
        instances_per_class: (num_classes,) labels of each class.
        per_class: figures of the classes that have labels.
    """

    p: float
    r: float
    map50: float
    map: float
    images: int
    images_per_class: IntArray
    instances_per_class: IntArray
    per_class: ClassMetrics

    @property
    def fitness(self) -> float:
        """The scalar that picks the best checkpoint; nan without labels."""
        return fitness(self.map50, self.map)

    def value(self, name: str) -> float:
        """Return the mean that a name of ``METRICS`` of the flags stands for, nan without labels; larger is better."""
        values = {"fitness": self.fitness, "mAP50": self.map50, "mAP50-95": self.map, "precision": self.p}
        return float((values | {"recall": self.r, "F1": _mean(self.per_class.f1)})[name])

    @property
    def class_maps(self) -> FloatArray:
        """(num_classes,) mAP50-95 of every class; one without labels has the mean, which favors nobody, or else 0."""
        maps = np.full(len(self.instances_per_class), np.nan_to_num(self.map))
        maps[self.per_class.classes] = self.per_class.ap.mean(axis=1)
        return maps

    def rows(self, names: Sequence[str]) -> list[TableRow]:
        """The validation table: ``all`` first, then every class.

        Args:
            names: class names, index = class id.
        """
        total = int(self.instances_per_class.sum())
        rows = [TableRow("all", self.images, total, self.p, self.r, self.map50, self.map)]
        figures = self.per_class
        measured = np.column_stack((figures.precision, figures.recall, figures.ap[:, 0], figures.ap.mean(axis=1)))
        by_class = dict(zip(figures.classes.tolist(), measured.tolist(), strict=True))
        for class_id, name in enumerate(names):
            images, instances = int(self.images_per_class[class_id]), int(self.instances_per_class[class_id])
            rows.append(TableRow(name, images, instances, *by_class.get(class_id, [math.nan] * 4)))
        return rows


def summarize(
    tp: BoolArray, conf: FloatArray, pred_cls: ClassIds, target_cls: Sequence[ClassIds], names: Sequence[str]
) -> Metrics:
    """Score a whole split.

    Args:
        tp: (N, T) true positives (`match_detections`), the first column at IoU 0.5.
        conf: (N,) confidences.
        pred_cls: (N,) class ids of the detections.
        target_cls: for each image of the split (L,) class ids of its labels, (0,) where it has none.
        names: class names; every class id is below their number.

    Returns:
        The metrics; zero without detections, nan without labels.
    """
    per_image = [np.bincount(ids.astype(np.int64), minlength=len(names)) for ids in target_cls]
    counts = np.array(per_image, dtype=np.int64).reshape(-1, len(names))  # (images, num_classes)
    instances = counts.sum(axis=0)
    per_class = ap_per_class(tp, conf, pred_cls, np.repeat(np.arange(len(names)), instances))
    return Metrics(
        p=_mean(per_class.precision),
        r=_mean(per_class.recall),
        map50=_mean(per_class.ap[:, 0]),
        map=_mean(per_class.ap),
        images=len(counts),
        images_per_class=(counts > 0).sum(axis=0),
        instances_per_class=instances,
        per_class=per_class,
    )


def format_table(rows: Sequence[TableRow]) -> str:
    """The validation table as aligned text, header first, one line a row; "-" where nothing was measured."""
    shown = [row._replace(name=one_line(row.name)) for row in rows]
    width = max([22, *(len(row.name) for row in shown)])
    titles = ("Images", "Instances", "P", "R", "mAP50", "mAP50-95")
    lines = [f"{'Class':>{width}}" + "".join(f"{title:>11}" for title in titles)]
    for name, images, instances, *figures in shown:
        lines.append(f"{name:>{width}}{images:>11}{instances:>11}" + "".join(_figure(one) for one in figures))
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{'-':>11}" if math.isnan(value) else f"{value:>11.3f}"


@dataclass(frozen=True)
class ImageResult:
    """What a validation found in one image.

    Attributes:
        batch: number of its batch in the split.
        index: its place in the label index.
        detections: (K, 6) [x1, y1, x2, y2, confidence, class], pixels of the original image, best first.
        labels: (L, 5) [class, x1, y1, x2, y2], likewise.
    """

    batch: int
    index: int
    detections: FloatArray
    labels: FloatArray


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a split gives.

    Attributes:
        metrics: precision, recall and AP, overall and for each class.
        losses: [box, objectness, class] over the whole split; zeros without a criterion.
        speed: milliseconds per image: preparing, inference, NMS.
        images: detections and labels of each image, batch by batch.
        unreadable: images that could not be read, reason by path; they count as images in which nothing was found.
    """

    metrics: Metrics
    losses: list[float]
    speed: dict[str, float]
    images: list[ImageResult]
    unreadable: dict[str, str] = field(default_factory=dict)


class ConfusionMatrix:
    """Counts of predicted against true classes, the background as the last class.

    Detections and labels are paired one to one whatever their classes, the pair of the largest IoU first. Confidence
    and IoU thresholds are those at which detections are shown, not those of the AP.

    Args:
        num_classes: classes of the data set.
        conf_thres: detections count if their confidence is above this.
        iou_thres: pairs count if their IoU is above this.

    Attributes:
        matrix: (num_classes + 1, num_classes + 1) int64 counts [predicted, true]: the last row holds missed labels,
            the last column detections of nothing.
    """

    def __init__(self, num_classes: int, conf_thres: float = 0.25, iou_thres: float = 0.45) -> None:
        self.num_classes = num_classes
        self.conf_thres = conf_thres
        self.iou_thres = iou_thres
        self.matrix = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)

    def update(self, detections: FloatArray, labels: FloatArray) -> None:
        """Add one image.

        Args:
            detections: (K, 6) [x1, y1, x2, y2, conf, class], pixels; may be empty.
            labels: (L, 5) [class, x1, y1, x2, y2], pixels; may be empty.
        """
        detections = detections[detections[:, 4] > self.conf_thres]
        predicted, true = detections[:, 5].astype(np.int64), labels[:, 0].astype(np.int64)
        paired, found = self._pair(detections, labels)
        partner = np.full(len(predicted), self.num_classes)  # the background, unless paired
        partner[paired] = true[found]
        np.add.at(self.matrix, (predicted, partner), 1)
        self.matrix[-1] += np.bincount(np.delete(true, found), minlength=self.num_classes + 1)

    def normalized(self) -> FloatArray:
        """(num_classes + 1, num_classes + 1) shares of each true class; columns without counts are 0."""
        totals = self.matrix.sum(axis=0, keepdims=True)
        return self.matrix / np.maximum(totals, 1)

    def _pair(self, detections: FloatArray, labels: FloatArray) -> tuple[IntArray, IntArray]:
        """Greedy one-to-one pairs as (rows of detections, rows of labels)."""
        rows, columns = (numbers.ravel() for numbers in np.indices((len(detections), len(labels))))
        iou = _iou(detections[rows, :4], labels[columns, 1:])
        close = iou > self.iou_thres
        rows, columns, iou = rows[close], columns[close], iou[close]
        pairs: dict[int, int] = {}
        taken: set[int] = set()
        # At equal IoU (two classes predicted for one box) the more confident detection comes first.
        for i in np.lexsort((columns, -detections[rows, 4], -iou)):
            row, column = int(rows[i]), int(columns[i])
            if row not in pairs and column not in taken:
                pairs[row] = column
                taken.add(column)
        return np.array(list(pairs), dtype=np.int64), np.array(list(pairs.values()), dtype=np.int64)


def _mean(values: FloatArray) -> float:
    """Mean over all elements, nan if there is none."""
    return float(values.mean()) if values.size else math.nan
