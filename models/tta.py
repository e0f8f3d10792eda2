"""Test-time augmentation: several looks at each image, whose predictions are joined before non-maximum suppression."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.yolo import DetectionModel

LOOKS = ((1.0, False), (0.83, True), (0.67, False))
"""Test-time augmentation: the scale of each look at an image, and whether it is flipped left to right."""

GREY = 114 / 255  # of the padding, as everywhere


def augmented_anchors(raw_model: DetectionModel, images: Tensor) -> Tensor:
    """Decode the predictions of three looks at each image, all in pixels of the images given.

    The coarsest level of the full-size look and the finest one of the smallest are left out: largest objects are
    better seen small, and smallest ones large.

    Args:
        raw_model: the network, in evaluation mode.
        images: (B, 3, height, width) as `InputConvention.prepare` makes them; sides a multiple of the largest stride.

    Returns:
        (B, N', 5 + C) as `Detect.decode` returns them; the looks one after the other.
    """
    looks = []
    for number, (scale, flipped) in enumerate(LOOKS):
        seen, ratio_x, ratio_y = look(images, scale, flipped, raw_model.max_stride)
        outputs = raw_model(seen)
        found = raw_model.decode(outputs)
        found[..., [0, 2]] /= ratio_x
        found[..., [1, 3]] /= ratio_y
        if flipped:
            found[..., 0] = images.shape[3] - found[..., 0]
        rows = [level[0, ..., 0].numel() for level in outputs]
        if len(rows) > 1:
            start = rows[0] if number == len(LOOKS) - 1 else 0
            stop = len(found[0]) - (rows[-1] if number == 0 else 0)
            found = found[:, start:stop]
        looks.append(found)
    return torch.cat(looks, 1)


def look(images: Tensor, scale: float, flipped: bool, stride: int) -> tuple[Tensor, float, float]:
    """Scale images, flip them left to right on request, and fill their right and lower edges up to whole strides.

    Args:
        images: (B, 3, height, width).
        scale: at 1 nothing is resized.
        flipped: before the padding is added.
        stride: sides of the result are multiples of it.

    Returns:
        (B, 3, height', width'), and the exact enlargement in x and in y.
    """
    height, width = images.shape[2:]
    if flipped:
        images = images.flip(3)
    h, w = round(height * scale), round(width * scale)
    if (h, w) != (height, width):
        images = F.interpolate(images, size=(h, w), mode="bilinear", align_corners=False)
    return F.pad(images, (0, -w % stride, 0, -h % stride), value=GREY), w / width, h / height
