"""Average precision: detections matched to labels, curves of precision and recall, the area under them.

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

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
    iou = pairwise_iou(detections[order[rows], :4], labels[columns, 1:])
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


def pairwise_iou(a: FloatArray, b: FloatArray) -> FloatArray:
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
