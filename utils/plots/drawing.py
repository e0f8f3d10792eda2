"""Boxes and labels on pictures, drawn with OpenCV."""

import math
import unicodedata
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from utils.core.wording import one_line

Color = tuple[int, int, int]  # as OpenCV orders it: blue, green, red

# Okabe and Ito 2008, "Color Universal Design": told apart with any kind of color vision. Their black is lost in dark
# pictures; a light grey stands for it. RGB here, as published.
PALETTE: tuple[Color, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (221, 221, 221),
)
BLACK: Color = (0, 0, 0)
WHITE: Color = (255, 255, 255)

FONT = cv2.FONT_HERSHEY_SIMPLEX
CAP_HEIGHT = 21.0  # of a capital letter in pixels at scale 1
CAP_SHARE = 0.014  # of the image's mean side that a capital letter is high
MIN_CAP, TINY_CAP = 9.0, 6.0  # pixels: what reads well, and what a small image makes do with
LINE_SHARE = 0.003  # of the image's mean side that a line is wide
SMALL_SIDE = 160  # pixels; from here on lines have two pixels, so that there is room for a rim
ALL_LETTERS = hasattr(cv2, "FontFace")  # OpenCV 5 draws any script, older versions ASCII only


def class_color(class_id: int) -> Color:
    """Return the BGR color of a class; they repeat after eight classes."""
    red, green, blue = PALETTE[class_id % len(PALETTE)]
    return blue, green, red


def text_color(background: Color) -> Color:
    """Return black or white, whichever stands out more (contrast ratio of WCAG 2.1, 1.4.3)."""
    shares = (value / 255 for value in background)
    blue, green, red = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    luminance = 0.0722 * blue + 0.7152 * green + 0.2126 * red
    return BLACK if (luminance + 0.05) ** 2 > 1.05 * 0.05 else WHITE


def draw_detections(
    image: NDArray[np.uint8],
    boxes: NDArray[np.float32],
    labels: Sequence[str],
    classes: Sequence[int],
    line_thickness: int = 0,
    overlapping_tags: bool = True,
) -> NDArray[np.uint8]:
    """Draw boxes with a tag each; where boxes cover each other, the first rows are on top.

    Lines and letters grow with the image, so that they are readable when it is shown smaller. Tags keep inside the
    image and avoid each other.

    Args:
        image: (H, W, 3) uint8 BGR; left as it is.
        boxes: (N, 4) xyxy, pixels; (0, 4) draws nothing.
        labels: N texts; '' draws a box without a tag.
        classes: N class ids, which choose the colors.
        line_thickness: of the boxes in pixels; 0 = in proportion to the image.
        overlapping_tags: whether a tag is drawn where it has to cover another one.

    Returns:
        A new (H, W, 3) image.
    """
    picture = np.ascontiguousarray(image).copy()
    height, width = picture.shape[:2]
    side = math.sqrt(height * width)
    thickness = line_thickness or max(1 if side < SMALL_SIDE else 2, round(side * LINE_SHARE))
    corners = _corners(boxes, height, width)
    colors = [class_color(int(class_id)) for class_id in classes]
    for (x1, y1, x2, y2), color in reversed(list(zip(corners, colors, strict=True))):
        if thickness > 1:  # a dark rim sets the line off from a background of its own color
            cv2.rectangle(picture, (x1, y1), (x2, y2), BLACK, thickness + 2)
        cv2.rectangle(picture, (x1, y1), (x2, y2), color, thickness)
    _draw_tags(picture, corners, labels, colors, thickness, overlapping_tags)
    return picture


def put_text(image: NDArray[np.uint8], text: str, left: int, baseline: int, cap: float, color: Color) -> None:
    """Write one line in place, with capital letters ``cap`` pixels high."""
    scale = cap / CAP_HEIGHT
    cv2.putText(image, drawable(text), (left, baseline), FONT, scale, color, _stroke(scale), cv2.LINE_AA)


def text_width(text: str, cap: float) -> int:
    """Return how many pixels wide `put_text` writes a text."""
    scale = cap / CAP_HEIGHT
    return int(cv2.getTextSize(drawable(text), FONT, scale, _stroke(scale))[0][0])


def drawable(text: str) -> str:
    """Return a text as this OpenCV can write it, in one line; older versions have no accents and no other scripts.

    Bytes of a file name that are no UTF-8, which OpenCV does not survive, become ``?``.
    """
    text = one_line(text.encode("utf-8", "replace").decode())
    if ALL_LETTERS:
        return text
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letter if letter.isascii() else "?" for letter in letters)


def written_name(name: str, class_id: int) -> str:
    """Return a class name as it is written on pictures: in one line, its number where no letter can be written."""
    line = one_line(name)
    return line if drawable(line).strip("? ") else f"class {class_id}"


def lettering_doubts(names: Sequence[str]) -> list[str]:
    """Return a sentence if this OpenCV can't write some class names as they are."""
    other = [(name, class_id) for class_id, name in enumerate(names) if drawable(name) != one_line(name)]
    if ALL_LETTERS or not other:
        return []
    name, shown = other[0][0], drawable(written_name(*other[0]))
    return [
        f"OpenCV {cv2.__version__} can't write all letters of {len(other)} class names: on pictures, {name} is "
        f"{shown!r}; version 5 can"
    ]


def _stroke(scale: float) -> int:
    return max(1, round(scale * 1.3))


def _corners(boxes: NDArray[np.float32], height: int, width: int) -> list[list[int]]:
    """The first and last pixel of each box, inside the image."""
    limit = np.array([width - 1, height - 1] * 2)
    rounded = np.rint(boxes).astype(np.int64).reshape(-1, 4) - [0, 0, 1, 1]
    rounded[:, 2:] = np.maximum(rounded[:, 2:], rounded[:, :2])
    return np.clip(rounded, 0, limit).tolist()


def _draw_tags(
    picture: NDArray[np.uint8],
    corners: Sequence[Sequence[int]],
    labels: Sequence[str],
    colors: Sequence[Color],
    thickness: int,
    overlapping: bool,
) -> None:
    """Find a place for each tag, the first rows choosing first, then draw them; in place."""
    height, width = picture.shape[:2]
    wanted = max(MIN_CAP, math.sqrt(height * width) * CAP_SHARE)
    placed = np.zeros((0, 4), np.int64)  # xyxy, pixels
    tags = []
    for corner, label, color in zip(corners, labels, colors, strict=True):
        cap = min(wanted, height / 5)
        text, cap = _fit(label, cap, width)
        if not text:
            continue
        margin = max(2, round(cap / 3))
        size = (text_width(text, cap) + 2 * margin, round(cap) + 2 * margin)
        place = _place(corner, size, placed, (height, width), thickness)
        if not overlapping and _overlap(np.array(place), placed) > 0:
            continue
        placed = np.concatenate([placed, [place]])
        tags.append((place, text, cap, margin, color))
    for (x1, y1, x2, y2), text, cap, margin, color in reversed(tags):
        cv2.rectangle(picture, (x1, y1), (x2 - 1, y2 - 1), color, cv2.FILLED)
        put_text(picture, text, x1 + margin, y2 - margin, cap, text_color(color))


def _fit(label: str, cap: float, width: int) -> tuple[str, float]:
    """Make a label fit into ``width`` pixels: smaller letters first, then fewer; ('', 0) where there is no room."""
    room = width - 4
    if not label or cap < TINY_CAP or room < 4 * cap:
        return "", 0.0
    needed = text_width(label, cap) + cap
    if needed > room:
        cap = max(TINY_CAP, cap * room / needed)
    text = label
    while text_width(text, cap) > room and len(text) > 3:
        text = f"{text.removesuffix('..')[:-1]}.."
    return text, cap


def _place(
    corner: Sequence[int], size: tuple[int, int], placed: NDArray[np.int64], shape: tuple[int, int], thickness: int
) -> list[int]:
    """Choose where a tag goes: above its box, inside, below, at the left or the right; where it covers others least.

    Args:
        corner: [x1, y1, x2, y2] of the box, pixels.
        size: (width, height) of the tag.
        placed: (N, 4) xyxy of the tags before it.
        shape: (height, width) of the image.
        thickness: of the box.

    Returns:
        [x1, y1, x2, y2] of the tag, inside the image.
    """
    x1, y1, x2, y2 = corner
    width, height = size
    rim = thickness // 2 + (thickness > 1)
    columns = (x1 - rim, x2 + 1 + rim - width)
    rows = (y1 - rim - height, y1 - rim, y2 + 1 + rim, y2 + 1 + rim - height)
    best, best_cost = [0, 0, width, height], math.inf
    for y in rows:
        for x in columns:
            left = max(0, min(x, shape[1] - width))
            top = max(0, min(y, shape[0] - height))
            place = np.array([left, top, left + width, top + height])
            cost = _overlap(place, placed) + abs(top - y) * width  # moved down it covers what it names
            if cost < best_cost:
                best, best_cost = place.tolist(), cost
            if cost == 0:
                return best
    return best


def _overlap(place: NDArray[np.int64], placed: NDArray[np.int64]) -> float:
    """Pixels that a tag [x1, y1, x2, y2] shares with those placed before it, (N, 4)."""
    shared = np.minimum(placed[:, 2:], place[2:]) - np.maximum(placed[:, :2], place[:2])
    return float(shared.clip(0).prod(1).sum())
