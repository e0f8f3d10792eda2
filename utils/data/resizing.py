"""Images at training size, and letterboxed; labels in pixels and as shares of the sides.

Images are (H, W, 3) uint8 BGR and are never changed in place.
"""

from __future__ import annotations

import cv2
import numpy as np

GREY = 114  # fill of everything that no image covers


def resized_shape(height: int, width: int, imgsz: int) -> tuple[int, int]:
    """(height, width) with the longer side at ``imgsz`` and the shorter in proportion, rounded up."""
    longer = max(height, width)
    return -(-height * imgsz // longer), -(-width * imgsz // longer)


def resized_shapes(shapes: np.ndarray, imgsz: int) -> np.ndarray:
    """``resized_shape`` of (n, 2) int [height, width]; (n, 2) int64."""
    return -(-shapes.astype(np.int64) * imgsz // shapes.max(axis=1, keepdims=True))


def decoding_reduction(height: int, width: int, imgsz: int) -> int:
    """How much smaller than it is an image may be decoded for training: 1, 2, 4 or 8, and not below ``imgsz``."""
    return next(reduction for reduction in (8, 4, 2, 1) if max(height, width) >= reduction * imgsz or reduction == 1)


def resize_longest(
    image: np.ndarray, imgsz: int, shrink: int = cv2.INTER_LINEAR, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Resize so that the longer side is ``imgsz``.

    Args:
        image: (H, W, 3) uint8.
        imgsz: pixels.
        shrink: OpenCV interpolation used when the image gets smaller: linear for training, ``cv2.INTER_AREA`` for
            validation. Enlarging is linear.
        size: height and width of the image in its file, where it was decoded smaller: they give the proportions.

    Returns:
        (h, w, 3) uint8 of ``resized_shape``; the image itself if it has that shape already.
    """
    height, width = image.shape[:2]
    whole_height, whole_width = size or (height, width)
    h, w = resized_shape(whole_height, whole_width, imgsz)
    if (h, w) == (height, width):
        return image
    return cv2.resize(image, (w, h), interpolation=shrink if max(height, width) > imgsz else cv2.INTER_LINEAR)


def pad_offset(inner: int, outer: int) -> int:
    """Padding in front of ``inner`` pixels centerd in ``outer``; an odd rest leaves the smaller half in front."""
    return round((outer - inner) / 2 - 0.1)


def letterbox(image: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """Centre an image on grey.

    Args:
        image: (h, w, 3) uint8.
        shape: (H, W) with H >= h and W >= w.

    Returns:
        (H, W, 3) contiguous image, and the columns left of and the rows above the original.
    """
    h, w = image.shape[:2]
    assert max(h - shape[0], w - shape[1]) <= 0, f"an image of {h} x {w} does not fit into {shape[0]} x {shape[1]}"
    left, top = pad_offset(w, shape[1]), pad_offset(h, shape[0])
    padded = np.full((*shape, 3), GREY, np.uint8)
    padded[top : top + h, left : left + w] = image
    return padded, left, top


def labels_to_pixels(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n, 5) [class, cx, cy, w, h] cxcywhn -> (n, 5) float32 [class, x1, y1, x2, y2] pixels of (height, width)."""
    pixels = np.empty((len(labels), 5), np.float32)
    half = labels[:, 3:5] / 2
    size = np.array([width, height], np.float32)
    pixels[:, 0] = labels[:, 0]
    pixels[:, 1:3] = (labels[:, 1:3] - half) * size
    pixels[:, 3:5] = (labels[:, 1:3] + half) * size
    return pixels


def labels_to_normalized(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n, 5) [class, x1, y1, x2, y2] pixels of (height, width) -> (n, 5) float32 [class, cx, cy, w, h] cxcywhn."""
    normalized = np.empty((len(labels), 5), np.float32)
    size = np.array([width, height], np.float32)
    normalized[:, 0] = labels[:, 0]
    normalized[:, 1:3] = (labels[:, 1:3] + labels[:, 3:5]) / 2 / size
    normalized[:, 3:5] = (labels[:, 3:5] - labels[:, 1:3]) / size
    return normalized
