"""Box formats, the IoU family and non-maximum suppression.

Shape letters: B images in a batch, A predictions per image, C classes, K kept detections, N and M boxes.
Formats: ``xyxy`` corners, ``cxcywh`` center and size. All functions return new arrays.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchvision.ops import nms

Boxes = TypeVar("Boxes", Tensor, npt.NDArray[Any])

# Distance in pixels between the classes in one NMS call: the first unless boxes reach further, the second at most.
# Class ids times these stay exact in fp64; in fp32 the 80th class would already be rounded to 1/16 pixel.
CLASS_OFFSETS = 7680.0, float(1 << 24)


def cxcywh_to_xyxy(boxes: Boxes) -> Boxes:
    """Convert boxes (..., 4) from cxcywh to xyxy, in whatever unit they have; (0, 4) stays (0, 4)."""
    cx, cy, half_w, half_h = boxes[..., 0], boxes[..., 1], boxes[..., 2] / 2, boxes[..., 3] / 2
    return _stack([cx - half_w, cy - half_h, cx + half_w, cy + half_h])


def xyxy_to_cxcywh(boxes: Boxes) -> Boxes:
    """Convert boxes (..., 4) from xyxy to cxcywh, in whatever unit they have; (0, 4) stays (0, 4)."""
    x1, y1, x2, y2 = boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]
    return _stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1])


def clip_boxes(boxes: Boxes, height: float, width: float) -> Boxes:
    """Clip boxes (..., 4) xyxy, pixels, to an image of ``height`` x ``width`` pixels."""
    x1, y1, x2, y2 = boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]
    return _stack([x1.clip(0, width), y1.clip(0, height), x2.clip(0, width), y2.clip(0, height)])


def scale_boxes(
    boxes: Boxes, ratio: float, pad_left: float, pad_top: float, original_shape: tuple[float, float]
) -> Boxes:
    """Map boxes from the network input back to the original image and clip them to it.

    Args:
        boxes: (..., 4) xyxy, pixels of the network input.
        ratio: network pixels per original pixel.
        pad_left: columns of padding left of the image in the network input.
        pad_top: rows of padding above it.
        original_shape: (height, width) of the original image, pixels.

    Returns:
        (..., 4) xyxy, pixels of the original image.
    """
    x1, y1, x2, y2 = boxes[..., 0], boxes[..., 1], boxes[..., 2], boxes[..., 3]
    unpadded = _stack([x1 - pad_left, y1 - pad_top, x2 - pad_left, y2 - pad_top])
    return clip_boxes(unpadded / ratio, *original_shape)


def ciou(pred: Tensor, target: Tensor, eps: float = 1e-7) -> tuple[Tensor, Tensor]:
    """IoU and Complete IoU of boxes, row by row (Zheng et al., "Enhancing Geometric Factors ...", 2020, eq. 10-13).

    CIoU = IoU - (center distance / hull diagonal)^2 - alpha v, where v compares the aspect ratios. The weight alpha is
    a trade-off, not something to optimize, so no gradient flows through it.

    Args:
        pred: (N, 4) cxcywh.
        target: (N, 4) cxcywh, same unit and dtype.
        eps: keeps divisions finite.

    Returns:
        IoU (N,) in [0, 1] and CIoU (N,) in (-1.5, IoU]; both (0,) for empty inputs.
    """
    pred_xyxy, target_xyxy = cxcywh_to_xyxy(pred), cxcywh_to_xyxy(target)
    pred_size, target_size = pred[:, 2:], target[:, 2:]

    overlap = torch.minimum(pred_xyxy[:, 2:], target_xyxy[:, 2:]) - torch.maximum(pred_xyxy[:, :2], target_xyxy[:, :2])
    # Not by prod(), in whose backward pass the host waits for the device, to look for zeros.
    intersection, pred_area, target_area = (
        size[:, 0] * size[:, 1] for size in (overlap.clamp(min=0), pred_size, target_size)
    )
    union = pred_area + target_area - intersection + eps
    iou = intersection / union

    hull = torch.maximum(pred_xyxy[:, 2:], target_xyxy[:, 2:]) - torch.minimum(pred_xyxy[:, :2], target_xyxy[:, :2])
    diagonal = hull.square().sum(dim=1) + eps
    distance = (pred[:, :2] - target[:, :2]).square().sum(dim=1)

    # A predicted size may underflow to 0; its aspect must not make the gradient infinite.
    pred_aspect, target_aspect = (size.clamp(min=eps) for size in (pred_size, target_size))
    angle = (target_aspect[:, 0] / target_aspect[:, 1]).atan() - (pred_aspect[:, 0] / pred_aspect[:, 1]).atan()
    aspect = (4 / math.pi**2) * angle.square()
    with torch.no_grad():
        alpha = aspect / (1 - iou + aspect + eps)
    return iou, iou - distance / diagonal - alpha * aspect


def non_max_suppression(
    predictions: Tensor,
    conf_thres: float,
    iou_thres: float,
    *,
    multi_label: bool,
    max_det: int = 300,
    max_candidates: int = 30000,
    agnostic: bool = False,
    classes: Sequence[int] | None = None,
) -> list[Tensor]:
    """Turn decoded predictions into detections: score, filter, suppress the doubles of each class.

    There is no time limit: what comes out depends on the predictions alone, never on the speed of the machine.
    Rows with a box that is not finite are dropped. Equal scores keep the order of the predictions.

    Args:
        predictions: (B, A, 5 + C) [cx, cy, w, h, objectness, C class scores], pixels of the network input, scores in
            [0, 1]; fp16 and bf16 are computed in fp32.
        conf_thres: a candidate has objectness x class score above this.
        iou_thres: of two boxes of one class with an IoU above this the better one stays.
        multi_label: every (box, class) pair above ``conf_thres`` is a candidate (validation); otherwise the best
            class of each box only (detection).
        max_det: detections kept per image.
        max_candidates: candidates per image that go into the suppression, best first.
        agnostic: suppress across classes.
        classes: class ids to keep, applied after the best class of a box is chosen; None keeps all.

    Returns:
        For each image (K, 6) [x1, y1, x2, y2, conf, class], pixels of the network input, best first; (0, 6) without
        any candidate.
    """
    assert predictions.ndim == 3, f"not (B, A, 5 + C): {tuple(predictions.shape)}"
    assert predictions.shape[2] > 5, f"no class scores: {tuple(predictions.shape)}"
    predictions = predictions.detach()
    predictions = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    detections = []
    for image_predictions in predictions:
        candidates = _candidates(image_predictions, conf_thres, multi_label, max_candidates, classes)
        detections.append(candidates[_nms(candidates, iou_thres, agnostic, max_det)])
    return detections


def _candidates(
    predictions: Tensor, conf_thres: float, multi_label: bool, max_candidates: int, classes: Sequence[int] | None
) -> Tensor:
    """Score one image's predictions (A, 5 + C); returns (K, 6) [xyxy, conf, class] above the threshold, best first."""
    # Class scores are at most 1, so objectness alone rules most rows out before anything is multiplied.
    likely = _true_places(predictions[:, 4] > conf_thres)
    finite = predictions[likely, :4].isfinite().all(dim=1)
    predictions = predictions.index_select(0, likely[finite])
    num_classes = predictions.shape[1] - 5
    scores = predictions[:, 4:5] * predictions[:, 5:]  # (A, C)
    if multi_label:
        index = _true_places((scores > conf_thres).flatten())  # row x C + class
    else:
        best, labels = scores.max(dim=1)
        rows = _true_places(best > conf_thres)
        index = rows * num_classes + labels[rows]
    if classes is not None:
        index = index[torch.isin(index % num_classes, torch.tensor(classes, dtype=index.dtype, device=index.device))]
    conf = scores.flatten()[index]
    if len(conf) > max_candidates:
        # Early in training there may be a million; to find the last one that counts is faster than to sort them all.
        good = conf >= conf.topk(max_candidates, sorted=False).values.min()
        index, conf = index[good], conf[good]
    order = conf.argsort(descending=True, stable=True)[:max_candidates]
    index, conf = index[order], conf[order]
    boxes = cxcywh_to_xyxy(predictions[index // num_classes, :4])
    return torch.cat([boxes, conf[:, None], (index % num_classes)[:, None].to(boxes.dtype)], dim=1)


def _true_places(mask: Tensor) -> Tensor:
    """Places (K,) where a mask (N,) is true; on the CPU numpy finds them several times as fast as PyTorch."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)


def _nms(candidates: Tensor, iou_thres: float, agnostic: bool, max_det: int) -> Tensor:
    """Greedy NMS of candidates (N, 6) [xyxy, conf, class], best first; returns (K,) kept rows, ``max_det`` at most.

    Classes are moved apart by more than the boxes span. ``torchvision.ops.batched_nms`` moves them by the largest
    coordinate, which lets a box left of the image (x < 0) meet one of the class before it, and loses digits in fp32.
    """
    precise = torch.float32 if candidates.device.type == "mps" else torch.float64  # MPS has no fp64
    boxes = candidates[:, :4].to(precise)
    if not agnostic and len(boxes):
        offset = (boxes.max() - boxes.min()).clamp(*CLASS_OFFSETS)
        boxes = boxes + candidates[:, 5:6].to(precise) * offset
    scores = candidates[:, 4].to(precise)
    # A box can be suppressed by kept, better ones only. So the best boxes alone decide who is kept among them, and then
    # those that are kept stand for all that were looked at. An untrained network makes tens of thousands of candidates,
    # of which the first few already fill an image.
    kept, start, end = torch.arange(0, device=boxes.device), 0, 2 * max_det
    while len(kept) < max_det and start < len(boxes):
        rows = torch.cat([kept, torch.arange(start, min(end, len(boxes)), device=boxes.device)])
        kept = rows[nms(boxes[rows], scores[rows], iou_thres)]
        start, end = end, 4 * end
    return kept[:max_det]


def _stack(columns: list[Boxes]) -> Boxes:
    """Join four coordinate columns of shape (...) to boxes (..., 4), of the kind they are."""
    if isinstance(columns[0], Tensor):
        return torch.stack(columns, dim=-1)
    return np.stack(columns, axis=-1)
