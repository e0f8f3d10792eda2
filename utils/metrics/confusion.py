"""The confusion matrix: which classes are taken for which, missed, or seen where nothing is."""

import numpy as np

from utils.metrics.average_precision import FloatArray, IntArray, pairwise_iou


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
        iou = pairwise_iou(detections[rows, :4], labels[columns, 1:])
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
