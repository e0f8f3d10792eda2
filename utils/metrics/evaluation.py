"""What a validation found: the figures of a split and of its classes, the table of them, fitness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from utils.core.wording import one_line
from utils.metrics.average_precision import BoolArray, ClassIds, ClassMetrics, FloatArray, IntArray, ap_per_class


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
        losses: over the whole split, in the order of the family's; zeros without a criterion.
        speed: milliseconds per image: preparing, inference, NMS.
        images: detections and labels of each image, batch by batch.
        unreadable: images that could not be read, reason by path; they count as images in which nothing was found.
    """

    metrics: Metrics
    losses: list[float]
    speed: dict[str, float]
    images: list[ImageResult]
    unreadable: dict[str, str] = field(default_factory=dict)


def _mean(values: FloatArray) -> float:
    """Mean over all elements, nan if there is none."""
    return float(values.mean()) if values.size else math.nan
