"""Box formats, IoU, CIoU and NMS against reference figures, an independent NMS and their own laws."""

import itertools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.common import golden
from utils.metrics.boxes import (
    ciou,
    clip_boxes,
    cxcywh_to_xyxy,
    non_max_suppression,
    scale_boxes,
    xyxy_to_cxcywh,
)

Array = npt.NDArray[Any]

VAL: dict[str, Any] = {"conf_thres": 0.001, "iou_thres": 0.6, "multi_label": True}
DETECT: dict[str, Any] = {"conf_thres": 0.25, "iou_thres": 0.45, "multi_label": False, "max_det": 1000}
NMS_SETTINGS: dict[str, dict[str, Any]] = {
    "val": VAL,
    "detect": DETECT,
    "agnostic": {**DETECT, "agnostic": True},
    "classes": {**DETECT, "classes": [1]},
}

seeds = st.integers(0, 2**32 - 1)
center = st.floats(-100, 100)
size = st.floats(0, 100)
cxcywh_lists = st.lists(st.tuples(center, center, size, size), min_size=1, max_size=8)


def random_predictions(seed: int, images: int, rows: int, num_classes: int) -> Tensor:
    """Decoded predictions (B, A, 5 + C) crowded enough to overlap, some of them left of and above the image."""
    rng = np.random.default_rng(seed)
    xy = rng.uniform(-10, 90, (images, rows, 2))
    wh = rng.uniform(5, 60, (images, rows, 2))
    scores = rng.uniform(0, 1, (images, rows, 1 + num_classes))
    return torch.from_numpy(np.concatenate([xy, wh, scores], axis=2)).float()


def plain_iou(a: Array, b: Array) -> float:
    """IoU of two xyxy boxes, one number at a time."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    overlap = float(width) * float(height)
    return overlap / (float(a[2] - a[0]) * float(a[3] - a[1]) + float(b[2] - b[0]) * float(b[3] - b[1]) - overlap)


def plain_nms(predictions: Array, conf_thres: float, iou_thres: float, multi_label: bool, agnostic: bool) -> Array:
    """Textbook NMS of one image (A, 5 + C), in quadratic time; returns (K, 6)."""
    candidates = []
    for cx, cy, w, h, objectness, *scores in predictions:
        ids = range(len(scores)) if multi_label else [int(np.argmax(scores))]
        corners = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]
        candidates += [[*corners, objectness * scores[c], c] for c in ids if objectness * scores[c] > conf_thres]
    kept: list[Array] = []
    for candidate in map(np.array, sorted(candidates, key=lambda row: -row[4])):
        rivals = (other for other in kept if agnostic or other[5] == candidate[5])
        if all(plain_iou(candidate, other) <= iou_thres for other in rivals):
            kept.append(candidate)
    return np.array(kept).reshape(-1, 6)


def greedy_nms(boxes: Array, scores: Array, iou_thres: float) -> list[int]:
    """NMS of boxes (N, 4) xyxy over the whole matrix of overlaps; returns kept rows, best first."""
    low, high = np.maximum(boxes[:, None, :2], boxes[None, :, :2]), np.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    overlap = np.clip(high - low, 0, None).prod(axis=2)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    iou = overlap / (area[:, None] + area[None, :] - overlap)
    kept: list[int] = []
    for i in np.argsort(-scores, kind="stable"):
        if not (iou[i, kept] > iou_thres).any():
            kept.append(int(i))
    return kept


class TestFormats:
    @given(cxcywh_lists)
    @settings(deadline=None)
    def test_round_trip(self, rows: list[tuple[float, ...]]) -> None:
        boxes = np.array(rows)
        np.testing.assert_allclose(xyxy_to_cxcywh(cxcywh_to_xyxy(boxes)), boxes, atol=1e-12)
        torch.testing.assert_close(
            cxcywh_to_xyxy(xyxy_to_cxcywh(torch.from_numpy(boxes))), torch.from_numpy(boxes), rtol=0, atol=1e-12
        )

    def test_corners(self) -> None:
        boxes = np.array([[10.0, 20.0, 4.0, 6.0]])
        assert cxcywh_to_xyxy(boxes).tolist() == [[8, 17, 12, 23]]
        assert torch.equal(cxcywh_to_xyxy(torch.from_numpy(boxes)), torch.tensor([[8.0, 17, 12, 23]]).double())

    def test_any_leading_shape(self) -> None:
        assert cxcywh_to_xyxy(torch.zeros(2, 3, 4)).shape == (2, 3, 4)
        assert xyxy_to_cxcywh(np.zeros((0, 4), dtype=np.float32)).shape == (0, 4)

    def test_input_is_left_alone(self) -> None:
        boxes = np.array([[-5.0, 20.0, 400.0, 60.0]])
        before = boxes.copy()
        cxcywh_to_xyxy(boxes), xyxy_to_cxcywh(boxes), clip_boxes(boxes, 10, 10), scale_boxes(boxes, 2, 1, 1, (9, 9))
        assert np.array_equal(boxes, before)

    def test_clip(self) -> None:
        boxes = np.array([[-5.0, -6.0, 400.0, 300.0], [1.0, 2.0, 3.0, 4.0], [250.0, 150.0, 260.0, 160.0]])
        expected = [[0, 0, 200, 100], [1, 2, 3, 4], [200, 100, 200, 100]]
        assert clip_boxes(boxes, height=100, width=200).tolist() == expected
        assert clip_boxes(torch.from_numpy(boxes), height=100, width=200).tolist() == expected

    def test_scale_undoes_a_letterbox(self) -> None:
        original = np.array([[0.0, 10.0, 639.0, 470.0], [100.0, 120.0, 131.0, 144.0]])
        padded = original * 0.5 + np.array([16, 8, 16, 8])
        assert np.array_equal(scale_boxes(padded, 0.5, 16, 8, (480, 640)), original)

    def test_scale_clips_to_the_original(self) -> None:
        in_padding = torch.tensor([[0.0, 0.0, 352.0, 256.0]])
        assert scale_boxes(in_padding, 0.5, 16, 8, (480, 640)).tolist() == [[0, 0, 640, 480]]


class TestCiou:
    def test_reference(self) -> None:
        case = golden("ciou_case.npz")
        iou, complete = ciou(torch.from_numpy(case["box1_xywh"]), torch.from_numpy(case["box2_xywh"]))
        np.testing.assert_allclose(iou, case["iou"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(complete, case["ciou"], rtol=0, atol=1e-9)

    @given(cxcywh_lists, seeds)
    @settings(deadline=None)
    def test_never_above_iou(self, rows: list[tuple[float, ...]], seed: int) -> None:
        pred = torch.tensor(rows, dtype=torch.float64)
        target = pred[torch.randperm(len(pred), generator=torch.Generator().manual_seed(seed))] + 0.25
        iou, complete = ciou(pred, target)
        assert ((iou >= 0) & (iou <= 1)).all()
        assert (complete <= iou).all()
        assert (complete > -1.5).all()

    def test_equal_boxes(self) -> None:
        boxes = torch.tensor([[5.0, 6.0, 3.0, 4.0]], dtype=torch.float64)
        iou, complete = ciou(boxes, boxes)
        assert iou.item() == pytest.approx(1, abs=1e-7)
        assert complete.item() == pytest.approx(1, abs=1e-7)

    def test_alpha_carries_no_gradient(self) -> None:
        """With alpha a constant the aspect term's gradient is alpha dv: checked by differences at a fixed alpha."""
        pred = torch.tensor([[0.0, 0.0, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)
        target = torch.tensor([[0.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
        ciou(pred, target)[1].sum().backward()

        def formula(w: float, h: float, alpha: float) -> float:
            overlap = min(w, 1) * min(h, 2)
            v = 4 / np.pi**2 * (np.arctan(1 / 2) - np.arctan(w / h)) ** 2
            return float(overlap / (w * h + 2 - overlap) - alpha * v)

        aspect = 4 / np.pi**2 * (np.arctan(1 / 2) - np.arctan(2)) ** 2
        alpha = aspect / (1 - 1 / 3 + aspect)
        step = 1e-6
        by_width = (formula(2 + step, 1, alpha) - formula(2 - step, 1, alpha)) / (2 * step)
        by_height = (formula(2, 1 + step, alpha) - formula(2, 1 - step, alpha)) / (2 * step)
        assert pred.grad is not None
        assert pred.grad[0, 2:].tolist() == pytest.approx([by_width, by_height], abs=1e-6)

    @pytest.mark.parametrize("wh", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1e-22, 1e-30)])
    def test_vanishing_size_keeps_the_gradient_finite(self, wh: tuple[float, float]) -> None:
        pred = torch.tensor([[0.5, 0.5, *wh]], requires_grad=True)
        ciou(pred, torch.tensor([[0.4, 0.4, 1.0, 2.0]]))[1].sum().backward()
        assert pred.grad is not None
        assert pred.grad.isfinite().all()

    def test_empty(self) -> None:
        iou, complete = ciou(torch.zeros(0, 4), torch.zeros(0, 4))
        assert iou.shape == complete.shape == (0,)


class TestNms:
    @pytest.mark.parametrize("setting", NMS_SETTINGS)
    def test_reference(self, setting: str) -> None:
        case = golden("nms_case.npz")
        detections = non_max_suppression(torch.from_numpy(case["pred"]), **NMS_SETTINGS[setting])
        assert len(detections) == 2
        for i, kept in enumerate(detections):
            np.testing.assert_allclose(kept, case[f"{setting}_{i}"], rtol=0, atol=1e-4)

    @given(seeds, st.integers(1, 4), st.booleans(), st.booleans(), st.floats(0.1, 0.9))
    @settings(max_examples=40, deadline=None)
    def test_equals_the_textbook(
        self, seed: int, num_classes: int, multi_label: bool, agnostic: bool, iou_thres: float
    ) -> None:
        predictions = random_predictions(seed, 2, 30, num_classes)
        detections = non_max_suppression(predictions, 0.2, iou_thres, multi_label=multi_label, agnostic=agnostic)
        for image, kept in zip(predictions.double().numpy(), detections, strict=True):
            expected = plain_nms(image, 0.2, iou_thres, multi_label, agnostic)
            np.testing.assert_allclose(kept, expected, rtol=1e-5, atol=1e-4)

    def test_crowds_of_doubles(self) -> None:
        """The best 100 candidates are doubles of one box, the next 100 of another, and so on for 30 boxes.

        Whoever looks at the best few only finds too little: what is looked at must grow until it suffices.
        """
        rng = np.random.default_rng(3)
        centers = np.stack(np.meshgrid(np.arange(6), np.arange(5)), axis=2).reshape(-1, 2) * 50 + 40.0
        boxes = np.hstack([centers, np.full((30, 2), 40.0)]).repeat(100, axis=0) + rng.uniform(-2, 2, (3000, 4))
        rows = np.hstack([boxes, np.linspace(0.9, 0.1, 3000)[:, None], np.ones((3000, 1))])[rng.permutation(3000)]
        corners = np.hstack([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2])
        best = greedy_nms(corners, rows[:, 4], 0.6)
        assert len(best) == 30
        predictions = torch.from_numpy(rows)[None]
        for max_det in (1, 3, 20, 30, 40, 300):
            (found,) = non_max_suppression(predictions, 0.001, 0.6, multi_label=True, max_det=max_det)
            assert found[:, 4].tolist() == rows[best[:max_det], 4].tolist()
            np.testing.assert_allclose(found[:, :4].numpy(), corners[best[:max_det]])

    @given(seeds, st.floats(0.1, 0.9))
    @settings(max_examples=25, deadline=None)
    def test_subset_without_doubles(self, seed: int, iou_thres: float) -> None:
        predictions = random_predictions(seed, 1, 60, 3)
        kept = non_max_suppression(predictions, 0.1, iou_thres, multi_label=True)[0]
        unsuppressed = non_max_suppression(predictions, 0.1, 1.0, multi_label=True)[0]
        assert {tuple(row) for row in kept.tolist()} <= {tuple(row) for row in unsuppressed.tolist()}
        assert (kept[:, 4].diff() <= 0).all()
        same_class = kept[:, None, 5] == kept[None, :, 5]
        overlaps = torchvision.ops.box_iou(kept[:, :4].double(), kept[:, :4].double()).fill_diagonal_(0)
        assert (overlaps[same_class] <= iou_thres).all()

    def test_empty(self) -> None:
        for predictions in (torch.zeros(2, 0, 8), torch.zeros(2, 7, 8)):
            detections = non_max_suppression(predictions, **VAL)
            assert [kept.shape for kept in detections] == [(0, 6), (0, 6)]
        assert non_max_suppression(torch.zeros(0, 7, 8), **VAL) == []
        assert non_max_suppression(random_predictions(0, 1, 9, 2), **{**DETECT, "classes": [7]})[0].shape == (0, 6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_is_computed_in_fp32(self, dtype: torch.dtype) -> None:
        """Products and corners of fp16 inputs must not be rounded to fp16 (fp16 corners overflow or move by pixels)."""
        predictions = random_predictions(3, 2, 50, 3).to(dtype)
        predictions[..., :2] += 1000
        halves = non_max_suppression(predictions, **VAL)
        for half, single in zip(halves, non_max_suppression(predictions.float(), **VAL), strict=True):
            assert half.dtype == torch.float32
            assert torch.equal(half, single)

    def test_no_time_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slow machine must get the same detections: YOLOv5 gives the rest of a batch none after a time limit."""
        predictions = random_predictions(0, 4, 40, 3)
        expected = non_max_suppression(predictions, **VAL)
        ticks = itertools.count(0, 10_000)
        for clock in ("time", "monotonic", "perf_counter", "process_time"):
            monkeypatch.setattr(time, clock, lambda: float(next(ticks)))
        detections = non_max_suppression(predictions, **VAL)
        assert all(len(kept) > 0 for kept in detections)
        assert all(torch.equal(*pair) for pair in zip(detections, expected, strict=True))

    def test_classes_stay_apart_outside_the_image(self) -> None:
        """Moving classes by the largest coordinate alone would lay the second box on the first."""
        boxes = [
            [95.0, 95.0, 10.0, 10.0],
            [-6.0, -6.0, 10.0, 10.0],
        ]  # class 0 up to (100, 100), class 1 from (-11, -11)
        predictions = torch.tensor([[[*boxes[0], 1.0, 0.9, 0.0], [*boxes[1], 1.0, 0.0, 0.8]]])
        assert len(non_max_suppression(predictions, 0.25, 0.45, multi_label=True)[0]) == 2

    @pytest.mark.parametrize("apart", [7500.0, 7680.0, 30000.0, 1e6])
    def test_classes_stay_apart_in_large_images(self, apart: float) -> None:
        """Moved by 7680 pixels, class 1 at (0, 0) lay on class 0 at (7680, 7680)."""
        predictions = torch.zeros(1, 4, 7)
        predictions[0, :, :4] = torch.tensor([50.0, 50.0, 100.0, 100.0])
        predictions[0, 1:3, :2] += apart
        predictions[0, :, 4] = torch.tensor([0.9, 0.8, 0.7, 0.6])
        predictions[0, [0, 1, 2, 3], [6, 5, 5, 6]] = 1.0
        kept = non_max_suppression(predictions, 0.25, 0.45, multi_label=False)[0]
        assert kept[:, [0, 5]].tolist() == [[0, 1], [apart, 0]]

    def test_a_wild_box_spoils_no_other(self) -> None:
        predictions = torch.zeros(1, 3, 7)
        predictions[0, :, :4] = torch.tensor([50.0, 50.0, 10.0, 10.0])
        predictions[0, 0, :4] *= 1e30
        predictions[0, :, 4], predictions[0, :, 6] = torch.tensor([0.9, 0.8, 0.7]), 1.0
        assert len(non_max_suppression(predictions, 0.25, 0.45, multi_label=False)[0]) == 2

    def test_last_class_is_as_exact_as_the_first(self) -> None:
        """IoU 0.633 at a threshold of 0.62: corners rounded to 1/4 px at a large class offset would give 0.6."""
        width, shift, num_classes = 4.0, 0.9, 500
        for class_id in (0, num_classes - 1):
            predictions = torch.zeros(1, 2, 5 + num_classes)
            predictions[0, :, :4] = torch.tensor([[50.0, 50.0, width, width], [50.0 + shift, 50.0, width, width]])
            predictions[0, :, 4] = 1
            predictions[0, :, 5 + class_id] = torch.tensor([0.9, 0.8])
            assert len(non_max_suppression(predictions, 0.25, 0.62, multi_label=False)[0]) == 1

    def test_limits_keep_the_best(self) -> None:
        predictions = random_predictions(5, 1, 50, 2)
        everything = non_max_suppression(predictions, 0.01, 0.6, multi_label=True)[0]
        assert len(everything) > 10
        assert torch.equal(non_max_suppression(predictions, 0.01, 0.6, multi_label=True, max_det=7)[0], everything[:7])
        unsuppressed = non_max_suppression(predictions, 0.01, 1.0, multi_label=True)[0]
        best = non_max_suppression(predictions, 0.01, 1.0, multi_label=True, max_candidates=5)[0]
        assert torch.equal(best, unsuppressed[:5])

    def test_thresholds_are_exclusive(self) -> None:
        predictions = torch.tensor([[[50.0, 50.0, 10.0, 10.0, 0.5, 0.5, 0.0]]])
        assert len(non_max_suppression(predictions, 0.25, 0.45, multi_label=True)[0]) == 0
        assert len(non_max_suppression(predictions, 0.2499, 0.45, multi_label=True)[0]) == 1

    def test_classes_filter_comes_after_the_best_class(self) -> None:
        """A box whose best class is filtered out must not come back as its second-best class."""
        predictions = torch.tensor([[[50.0, 50.0, 10.0, 10.0, 1.0, 0.9, 0.8]]])
        assert len(non_max_suppression(predictions, 0.25, 0.45, multi_label=False, classes=[1])[0]) == 0
        kept = non_max_suppression(predictions, 0.25, 0.45, multi_label=True, classes=[1])[0]
        assert kept[:, 5].tolist() == [1]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_non_finite_rows_are_dropped(self, bad: float) -> None:
        predictions = random_predictions(9, 1, 20, 2)
        expected = non_max_suppression(predictions[:, 1:], **VAL)[0]
        for column in range(4):
            spoiled = predictions.clone()
            spoiled[0, 0, column] = bad
            assert torch.equal(non_max_suppression(spoiled, **VAL)[0], expected)

    def test_equal_scores_keep_their_order(self) -> None:
        predictions = torch.zeros(1, 40, 6)
        predictions[0, :, :4] = torch.tensor([0.0, 0.0, 10.0, 10.0])
        predictions[0, :, 0] = torch.arange(40) * 20
        predictions[0, :, 4:] = 0.9
        kept = non_max_suppression(predictions, **VAL)[0]
        assert kept[:, 0].tolist() == [20.0 * i - 5 for i in range(40)]
