"""Pages of images with their boxes."""

import math
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from utils.core.image_files import read_image
from utils.core.wording import shorten
from utils.plots.drawing import PALETTE, class_color, draw_detections, put_text, text_width, written_name

Array = NDArray[Any]

PAGE_WIDTH = 1600  # pixels, about
LARGEST_SIDE = 640  # of an image on the page, pixels
GAP = 8
CAP = 9.0  # height of capital letters, pixels
LINE_HEIGHT = 22
NAME_LENGTH = 24  # characters; longer class names lose their middle
PAPER, INK = (255, 255, 255), (30, 30, 30)


def page(
    images: Sequence[str | Array], titles: Sequence[str], boxes: Sequence[Array], names: Sequence[str], caption: str
) -> Array:
    """Draw images with their boxes side by side.

    A class is told by the tag of its boxes; by its color too, in a line at the bottom, where the colors suffice. A tag
    that would cover another one is left out.

    Args:
        images: paths, or (H, W, 3) uint8 RGB; at least one.
        titles: written above each image.
        boxes: for each image (n, 6) [x1, y1, x2, y2, confidence, class], pixels of it; confidence nan for labels.
        names: of the classes.
        caption: written above all.

    Returns:
        (H, W, 3) uint8 BGR.
    """
    shown = [short_name(name, number) for number, name in enumerate(names)]
    columns = math.ceil(math.sqrt(len(images)))
    side = min(LARGEST_SIDE, PAGE_WIDTH // columns - GAP)
    cells = [with_boxes(_load(image), rows, side, shown) for image, rows in zip(images, boxes, strict=True)]
    cell_height, cell_width = (max(cell.shape[axis] for cell in cells) + GAP for axis in (0, 1))
    row_height = LINE_HEIGHT + cell_height
    sheet = np.full((-(-len(cells) // columns) * row_height, columns * cell_width, 3), PAPER, np.uint8)
    for number, (cell, title) in enumerate(zip(cells, titles, strict=True)):
        y, x = number // columns * row_height, number % columns * cell_width
        put_text(sheet, fitted(title, cell_width - GAP), x, y + LINE_HEIGHT - 6, CAP, INK)
        sheet[y + LINE_HEIGHT : y + LINE_HEIGHT + cell.shape[0], x : x + cell.shape[1]] = cell
    used = sorted({int(class_id) for rows in boxes for class_id in rows[:, 5]})
    parts = [_caption(caption, sheet.shape[1]), sheet]
    if used and len(names) <= len(PALETTE):
        parts.append(_legend([(shown[class_id], class_color(class_id)) for class_id in used], sheet.shape[1]))
    return cv2.copyMakeBorder(np.concatenate(parts), GAP, GAP, GAP, 0, cv2.BORDER_CONSTANT, value=PAPER)


def with_boxes(image: Array, boxes: Array, side: int, names: Sequence[str]) -> Array:
    """Resize an image so that its longer side has ``side`` pixels, and draw its boxes, the surest ones on top.

    Args:
        image: (H, W, 3) uint8 BGR.
        boxes: (n, 6) [x1, y1, x2, y2, confidence, class], pixels of ``image``; confidence nan for labels.
        side: of the result, pixels.
        names: of the classes, as they are to be written.
    """
    scale = side / max(image.shape[:2])
    width, height = (max(round(length * scale), 1) for length in (image.shape[1], image.shape[0]))
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    resized: NDArray[np.uint8] = cv2.resize(image, (width, height), interpolation=method).astype(np.uint8, copy=False)
    boxes = boxes[np.argsort(-np.nan_to_num(boxes[:, 4]), kind="stable")]
    tags = [
        names[int(class_id)] if math.isnan(confidence) else f"{names[int(class_id)]} {confidence:.2f}"
        for confidence, class_id in boxes[:, 4:6].tolist()
    ]
    corners = boxes[:, :4] * np.array([width / image.shape[1], height / image.shape[0]] * 2, np.float32)
    return draw_detections(resized, corners, tags, boxes[:, 5].astype(int).tolist(), overlapping_tags=False)


def short_name(name: str, class_id: int) -> str:
    """Return a class name as it is written on pages: as on other pictures, but short."""
    return shorten(written_name(name, class_id), NAME_LENGTH)


def fitted(text: str, width: int) -> str:
    """Shorten a text until it is ``width`` pixels wide at most."""
    limit = len(text)
    while limit > 3 and text_width(shorten(text, limit), CAP) > width:
        limit -= 1
    return shorten(text, limit)


def _load(image: str | Array) -> Array:
    """Return (H, W, 3) uint8 BGR."""
    return read_image(image) if isinstance(image, str) else np.ascontiguousarray(image[:, :, ::-1])


def _caption(text: str, width: int) -> Array:
    line = np.full((LINE_HEIGHT, width, 3), PAPER, np.uint8)
    put_text(line, fitted(text, width), 0, LINE_HEIGHT - 6, CAP, INK)
    return line


def _legend(entries: Sequence[tuple[str, tuple[int, int, int]]], width: int) -> Array:
    """Write classes beside their colors, in as many lines as they need."""
    lines, x = [np.full((LINE_HEIGHT, width, 3), PAPER, np.uint8)], 0
    for name, color in entries:
        needed = LINE_HEIGHT + text_width(name, CAP)
        if x > 0 and x + needed > width:
            lines.append(np.full((LINE_HEIGHT, width, 3), PAPER, np.uint8))
            x = 0
        cv2.rectangle(lines[-1], (x, 4), (x + 12, LINE_HEIGHT - 6), color, cv2.FILLED)
        put_text(lines[-1], name, x + 18, LINE_HEIGHT - 6, CAP, INK)
        x += needed + 2 * GAP
    return np.concatenate(lines)
