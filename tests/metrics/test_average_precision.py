"""Matching, AP, the summary and the confusion matrix against reference figures, pycocotools and worked examples."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.common import golden
from utils.config.flags import METRICS
from utils.metrics.average_precision import CURVE_POINTS, IOU_THRESHOLDS, ap_per_class, match_detections
from utils.metrics.confusion import ConfusionMatrix
from utils.metrics.evaluation import Metrics, TableRow, fitness, format_table, summarize

Array = npt.NDArray[Any]


class ImageResult(NamedTuple):
    """One image of the split: what was found and what is there, in original pixels."""

    detections: Array  # (K, 6) [x1, y1, x2, y2, conf, class]
    labels: Array  # (L, 5) [class, x1, y1, x2, y2]


def detection_rows(*rows: tuple[float, ...]) -> Array:
    return np.array(rows, dtype=float).reshape(-1, 6)


def label_rows(*rows: tuple[float, ...]) -> Array:
    return np.array(rows, dtype=float).reshape(-1, 5)


def summarize_images(images: list[ImageResult], names: list[str]) -> Metrics:
    tp = [match_detections(image.detections, image.labels, IOU_THRESHOLDS) for image in images]
    detections = np.concatenate([image.detections for image in images])
    target_cls = [image.labels[:, 0] for image in images]
    return summarize(np.concatenate(tp), detections[:, 4], detections[:, 5], target_cls, names)


def plain_match(detections: Array, labels: Array, threshold: float) -> list[bool]:
    """The matching rule for distinct confidences, one detection at a time, at one threshold."""
    result = [False] * len(detections)
    taken = set()
    for i in sorted(range(len(detections)), key=lambda i: -detections[i, 4]):
        best, best_iou = -1, 0.0
        for j, (class_id, *label) in enumerate(labels):
            width = min(detections[i, 2], label[2]) - max(detections[i, 0], label[0])
            height = min(detections[i, 3], label[3]) - max(detections[i, 1], label[1])
            overlap = max(width, 0.0) * max(height, 0.0)
            area = (detections[i, 2] - detections[i, 0]) * (detections[i, 3] - detections[i, 1])
            iou = overlap / (area + (label[2] - label[0]) * (label[3] - label[1]) - overlap)
            if class_id == detections[i, 5] and iou > best_iou:
                best, best_iou = j, iou
        if best_iou >= threshold and best not in taken:
            taken.add(best)
            result[i] = True
    return result


class TestMatching:
    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=60, deadline=None)
    def test_equals_the_rule(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        labels = np.hstack([rng.integers(0, 2, (6, 1)), rng.uniform(0, 30, (6, 2)), rng.uniform(0, 30, (6, 2))])
        labels[:, 3:] += labels[:, 1:3] + 5
        near = labels[rng.integers(0, 6, 25)]
        corners = near[:, 1:] + rng.uniform(-2, 2, (25, 4))
        detections = np.hstack([corners, rng.permutation(25)[:, None] / 25, near[:, :1]])
        tp = match_detections(detections, labels, IOU_THRESHOLDS)
        for t, threshold in enumerate(IOU_THRESHOLDS):
            assert tp[:, t].tolist() == plain_match(detections, labels, threshold)

    def test_no_second_choice(self) -> None:
        """The weaker detection points at the taken label, though it also overlaps the free one by 0.54."""
        labels = label_rows((0, 0, 0, 10, 10), (0, 0, 4, 10, 14))
        detections = detection_rows((0, 0, 10, 10, 0.9, 0), (0, 1, 10, 11, 0.8, 0))
        assert match_detections(detections, labels, np.array([0.5])).tolist() == [[True], [False]]

    def test_each_threshold_by_itself(self) -> None:
        """At 0.5 the confident detection takes the label; at 0.75 it no longer reaches it, and the other does."""
        labels = label_rows((0, 0, 0, 10, 10))
        detections = detection_rows((0, 4, 10, 14, 0.7, 0), (0, 0, 10, 9, 0.6, 0), (0, 3, 10, 13, 0.9, 0))
        tp = match_detections(detections, labels, np.array([0.5, 0.75]))
        assert tp.tolist() == [[False, False], [False, True], [True, False]]

    def test_class_must_agree(self) -> None:
        tp = match_detections(detection_rows((0, 0, 9, 9, 0.9, 1)), label_rows((0, 0, 0, 9, 9)), IOU_THRESHOLDS)
        assert not tp.any()

    @pytest.mark.parametrize("twentieths", range(10, 20))
    def test_threshold_is_inclusive(self, twentieths: int) -> None:
        """An IoU of exactly a threshold reaches it, also where float32 would be off by its last bit."""
        detections, labels = detection_rows((0, 0, twentieths, 9, 0.9, 0)), label_rows((0, 0, 0, 20, 9))
        assert match_detections(detections, labels, IOU_THRESHOLDS).sum() == twentieths - 9

    def test_equal_confidences_and_overlaps_go_to_the_first(self) -> None:
        labels = label_rows((0, 0, 0, 10, 10), (0, 0, 0, 10, 10))
        confidences = [0.9 if i % 3 == 2 else 0.5 for i in range(300)]
        tp = match_detections(
            detection_rows(*[(0, 0, 10, 10, conf, 0) for conf in confidences]), labels, IOU_THRESHOLDS
        )
        assert np.unique(np.nonzero(tp)[0]).tolist() == [2]

    def test_empty(self) -> None:
        detections, labels = detection_rows((0, 0, 9, 9, 0.9, 0)), label_rows((0, 0, 0, 9, 9))
        assert match_detections(detection_rows(), labels, IOU_THRESHOLDS).shape == (0, 10)
        assert match_detections(detection_rows(), label_rows(), IOU_THRESHOLDS).shape == (0, 10)
        assert match_detections(detections, label_rows(), IOU_THRESHOLDS).tolist() == [[False] * 10]


def ap_cases() -> list[dict[str, Array]]:
    return [{key: np.array(value) for key, value in case.items()} for case in golden("ap_cases.json.gz")]


class TestAveragePrecision:
    @pytest.mark.parametrize("case", ap_cases(), ids=lambda case: f"seed{case['seed']}")
    def test_reference(self, case: dict[str, Array]) -> None:
        metrics = ap_per_class(case["tp"].astype(bool), case["conf"], case["pred_cls"], case["target_cls"])
        assert metrics.classes.tolist() == case["classes"].tolist()
        for name, figure in {"p": metrics.precision, "r": metrics.recall, "f1": metrics.f1, "ap": metrics.ap}.items():
            np.testing.assert_allclose(figure, case[name], rtol=0, atol=1e-9, err_msg=name)

    def test_by_hand(self) -> None:
        """Two labels; a hit, a miss, a hit: the curve is (0, 1), (0.5, 1), (0.5, 2/3), (1, 2/3)."""
        tp = np.array([[True], [False], [True]])
        metrics = ap_per_class(tp, np.array([0.9, 0.8, 0.7]), np.zeros(3), np.zeros(2))
        # 50 steps at precision 1, less half a step where recall 0.5 already reads 2/3; the last point reads (1, 0).
        expected = 0.01 * (49 + (1 + 2 / 3) / 2 + 49 * 2 / 3 + (2 / 3 + 0) / 2)
        assert metrics.ap[0, 0] == pytest.approx(expected, abs=1e-12)

    def test_perfect(self) -> None:
        metrics = ap_per_class(
            np.ones((4, 10), dtype=bool), np.full(4, 0.9), np.array([0, 0, 2, 2]), np.array([0, 0, 2, 2])
        )
        assert metrics.classes.tolist() == [0, 2]
        np.testing.assert_allclose(metrics.ap, 0.995, atol=1e-12)  # the trapezoid down to (1, 0) costs half a step
        np.testing.assert_allclose([metrics.precision, metrics.recall], 1, atol=1e-12)

    def test_best_confidence_at_the_end_of_the_curve(self) -> None:
        """F1 is 1 everywhere, so the first point is the best; a moving average without repeated ends would miss it."""
        metrics = ap_per_class(np.ones((2, 10), dtype=bool), np.ones(2), np.zeros(2), np.zeros(2))
        assert metrics.confidence == 0

    def test_order_of_the_input_is_no_matter(self) -> None:
        rng = np.random.default_rng(0)
        tp, conf = rng.random((50, 10)) < 0.5, rng.permutation(50) / 50
        pred_cls, target_cls = rng.integers(0, 3, 50), rng.integers(0, 3, 60)
        shuffled = rng.permutation(50)
        a = ap_per_class(tp, conf, pred_cls, target_cls)
        b = ap_per_class(tp[shuffled], conf[shuffled], pred_cls[shuffled], rng.permutation(target_cls))
        assert np.array_equal(a.ap, b.ap)
        assert np.array_equal(a.curves.f1, b.curves.f1)

    def test_classes_without_labels_do_not_count(self) -> None:
        metrics = ap_per_class(np.zeros((3, 10), dtype=bool), np.full(3, 0.9), np.array([1, 1, 7]), np.array([1, 4]))
        assert metrics.classes.tolist() == [1, 4]
        assert metrics.instances.tolist() == [1, 1]
        assert not metrics.ap.any()
        assert not metrics.recall.any()

    @pytest.mark.parametrize(("num_detections", "num_labels"), [(0, 0), (0, 3), (3, 0)])
    def test_empty(self, num_detections: int, num_labels: int) -> None:
        tp = np.zeros((num_detections, 10), dtype=bool)
        metrics = ap_per_class(tp, np.zeros(num_detections), np.zeros(num_detections), np.zeros(num_labels))
        num_classes = min(num_labels, 1)
        assert metrics.ap.shape == (num_classes, 10)
        assert metrics.curves.f1.shape == (num_classes, 1000)
        assert not metrics.ap.any()
        assert not metrics.f1.any()

    def test_curves(self) -> None:
        tp = np.array([[True] * 10, [False] * 10, [True] * 10])
        metrics = ap_per_class(tp, np.array([0.9, 0.8, 0.7], dtype=np.float32), np.zeros(3), np.zeros(2))
        curves = metrics.curves
        for curve in (curves.precision, curves.recall, curves.f1, curves.precision_at_recall):
            assert curve.shape == (1, 1000)
            assert curve.dtype == np.float64
        above, below = CURVE_POINTS > 0.9001, CURVE_POINTS < 0.7
        assert not curves.recall[0, above].any()
        assert (curves.precision[0, above] == 1).all()
        assert (curves.recall[0, below] == 1).all()
        np.testing.assert_allclose(curves.precision[0, below], 2 / 3)
        np.testing.assert_allclose(curves.f1[0, below], 0.8)
        assert (np.diff(curves.precision_at_recall[0]) <= 0).all()


class TestSummary:
    def result(self) -> Metrics:
        images = [
            ImageResult(detection_rows((0, 0, 10, 10, 0.9, 0)), label_rows((0, 0, 0, 10, 10), (0, 50, 50, 60, 60))),
            ImageResult(detection_rows((0, 0, 10, 10, 0.8, 2)), label_rows((2, 0, 0, 10, 10), (0, 20, 20, 30, 30))),
            ImageResult(detection_rows(), label_rows()),
        ]
        return summarize_images(images, ["a", "b", "c", "d"])

    def test_rows(self) -> None:
        """A class without labels is not measured, and says so (ultralytics/yolov5#158)."""
        overall, first, bare, second, last = self.result().rows(["a", "b", "c", "d"])
        assert (bare[:3], last[:3]) == (("b", 0, 0), ("d", 0, 0)) and np.isnan([*bare[3:], *last[3:]]).all()
        assert overall[:3] == ("all", 3, 4)
        assert first[:3] == ("a", 2, 3)
        assert second[:3] == ("c", 1, 1)
        assert first.r == pytest.approx(1 / 3)
        assert second[3:] == pytest.approx((1, 1, 0.995, 0.995))
        for name in ("p", "r", "map50", "map"):
            assert getattr(overall, name) == pytest.approx((getattr(first, name) + getattr(second, name)) / 2)

    def test_fitness(self) -> None:
        assert fitness(0.5, 0.3) == pytest.approx(0.1 * 0.5 + 0.9 * 0.3)
        result = self.result()
        assert result.fitness == pytest.approx(0.1 * result.map50 + 0.9 * result.map)

    def test_class_maps_cover_every_class(self) -> None:
        result = self.result()
        expected = [result.per_class.ap[0].mean(), result.map, 0.995, result.map]
        assert result.class_maps.tolist() == pytest.approx(expected)

    def test_table(self) -> None:
        rows = [TableRow("all", 87, 1137, 0.8061, 0.877, 0.86, 0.5234), TableRow("x" * 30, 1, 2, 1, 1, 1, 1)]
        header, first, second = format_table(rows).splitlines()
        assert header.split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
        assert first.split() == ["all", "87", "1137", "0.806", "0.877", "0.860", "0.523"]
        assert len(header) == len(first) == len(second)
        assert second.startswith("x" * 30 + " ")
        bare = format_table([TableRow("bare", 3, 0, *[math.nan] * 4)]).splitlines()[1]
        assert bare.split() == ["bare", "3", "0", "-", "-", "-", "-"] and len(bare) == len(format_table(rows[:1])) // 2
        assert format_table([rows[0]._replace(name="two\nlines")]).splitlines()[1].lstrip().startswith("two lines  ")

    def test_nothing_to_score(self) -> None:
        metrics = summarize_images([ImageResult(detection_rows(), label_rows())], ["a", "b"])
        rows = metrics.rows(["a", "b"])
        assert [row[:3] for row in rows] == [("all", 1, 0), ("a", 0, 0), ("b", 0, 0)]
        assert np.isnan([row[3:] for row in rows]).all()
        assert all(math.isnan(metrics.value(name)) for name in METRICS)
        assert metrics.class_maps.tolist() == [0, 0]


class TestConfusionMatrix:
    def test_counts(self) -> None:
        matrix = ConfusionMatrix(2)
        labels = label_rows((0, 0, 0, 10, 10), (1, 50, 50, 60, 60), (1, 80, 80, 90, 90))
        detections = detection_rows(
            (0, 0, 10, 10, 0.9, 0),  # right
            (50, 50, 60, 60, 0.8, 0),  # the wrong class
            (20, 20, 30, 30, 0.7, 1),  # nothing there
            (80, 80, 90, 90, 0.25, 1),  # not above the confidence: its label is missed
        )
        matrix.update(detections, labels)
        assert matrix.matrix.tolist() == [[1, 1, 0], [0, 0, 1], [0, 1, 0]]  # [predicted, true]
        matrix.update(detections, labels)
        assert matrix.matrix.tolist() == [[2, 2, 0], [0, 0, 2], [0, 2, 0]]
        assert matrix.normalized().sum(axis=0).tolist() == pytest.approx([1, 1, 1])

    def test_pairs_are_one_to_one_and_the_closest_first(self) -> None:
        matrix = ConfusionMatrix(2)
        labels = label_rows((0, 0, 0, 10, 10))
        matrix.update(detection_rows((0, 1, 10, 11, 0.9, 1), (0, 0, 10, 10, 0.5, 0)), labels)
        assert matrix.matrix.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]

    def test_two_classes_for_one_box(self) -> None:
        matrix = ConfusionMatrix(2)
        matrix.update(detection_rows((0, 0, 9, 9, 0.3, 0), (0, 0, 9, 9, 0.6, 1)), label_rows((1, 0, 0, 9, 9)))
        assert matrix.matrix.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 0]]

    def test_iou_threshold(self) -> None:
        matrix = ConfusionMatrix(1)
        matrix.update(detection_rows((0, 0, 10, 4.6, 0.9, 0)), label_rows((0, 0, 0, 10, 10)))
        matrix.update(detection_rows((0, 0, 10, 4.4, 0.9, 0)), label_rows((0, 0, 0, 10, 10)))
        assert matrix.matrix.tolist() == [[1, 1], [1, 0]]

    def test_empty(self) -> None:
        matrix = ConfusionMatrix(2)
        matrix.update(detection_rows(), label_rows())
        assert matrix.matrix.tolist() == [[0] * 3] * 3
        assert not matrix.normalized().any()

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=30, deadline=None)
    def test_every_label_counts_once(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        corners = np.hstack([rng.uniform(0, 20, (20, 2)), rng.uniform(30, 50, (20, 2))])
        detections = np.hstack([corners, rng.random((20, 1)), rng.integers(0, 3, (20, 1))])
        labels = np.hstack([rng.integers(0, 3, (8, 1)), corners[:8] + rng.uniform(-4, 4, (8, 4))])
        matrix = ConfusionMatrix(3)
        matrix.update(detections, labels)
        assert matrix.matrix[:, :3].sum(axis=0).tolist() == np.bincount(labels[:, 0].astype(int), minlength=3).tolist()
        shown = detections[detections[:, 4] > 0.25, 5].astype(int)
        assert matrix.matrix[:3].sum(axis=1).tolist() == np.bincount(shown, minlength=3).tolist()
