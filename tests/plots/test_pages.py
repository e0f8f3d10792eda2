"""Pages of images: boxes at their pixels, everything in its place, names of any kind."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.plots import drawing
from utils.plots.drawing import PALETTE, class_color, draw_detections
from utils.plots.pages import GAP, LINE_HEIGHT, PAPER, fitted, page, short_name, with_boxes

NAMES = [f"kind {i}" for i in range(80)]


def rows(*boxes: tuple[float, float, float, float, float, int]) -> np.ndarray:
    """Rows [x1, y1, x2, y2, confidence, class]."""
    return np.array(boxes, np.float32).reshape(-1, 6)


def extent(picture: np.ndarray, class_id: int) -> tuple[int, int, int, int]:
    """First and last column, first and last row with the color of a class."""
    y, x = np.nonzero((picture == class_color(class_id)).all(2))
    return x.min(), x.max(), y.min(), y.max()


def gray(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 128, np.uint8)


@pytest.mark.parametrize("side", [100, 200, 50])
def test_boxes_are_at_their_pixels(side: int) -> None:
    """A box [20, 10, 60, 40] of a 100 x 50 image is scaled with it; lines are up to one pixel off their middle."""
    picture = with_boxes(gray(50, 100), rows((20, 10, 60, 40, np.nan, 4)), side, [""] * 5)
    scale = side / 100
    assert picture.shape == (side // 2, side, 3)
    expected = np.array([20, 60, 10, 40]) * scale - [0, 1, 0, 1]
    assert np.abs(np.array(extent(picture, 4)) - expected).max() <= 1


def test_page_puts_boxes_on_their_images() -> None:
    """Arrays are RGB; the second of two images, and its box, are in the second column."""
    left, right = gray(320, 320), gray(320, 320)
    right[100:200, 50:150] = (255, 0, 0)  # red
    sheet = page([left, right], ["a", "b"], [rows(), rows((50, 100, 150, 200, np.nan, 2))], ["x", "y", ""], "caption")
    top, start = GAP + 2 * LINE_HEIGHT, GAP + 640 + GAP  # pictures of 640 pixels: twice their size
    middle = sheet[top + 300, start + 200]
    assert middle.tolist() == [0, 0, 255]  # BGR
    x1, x2, _, _ = extent(sheet[top + 300 : top + 301, start:], 2)
    _, _, y1, y2 = extent(sheet[top:, start + 280 : start + 281], 2)  # right of the tag
    assert np.abs(np.array([x1, x2, y1, y2]) - [100, 299, 200, 399]).max() <= 2


def test_page_reads_files(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    same = page([image[:, :, ::-1]], ["a.png"], [rows()], ["x"], "")
    assert (page([str(tmp_path / "a.png")], ["a.png"], [rows()], ["x"], "") == same).all()


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", [(60, 60), (30, 90), (90, 30)])
def test_page_size_is_sane(count: int, shape: tuple[int, int]) -> None:
    """Any number of images of any shape, some without boxes."""
    boxes = [rows((5, 5, 20, 25, 0.9, i)) if i % 2 else rows() for i in range(count)]
    sheet = page([gray(*shape)] * count, ["title " * 40] * count, boxes, NAMES, "caption " * 99)
    assert 600 <= max(sheet.shape[:2]) <= 1800
    assert (sheet[:GAP] == PAPER).all() and (sheet[:, :GAP] == PAPER).all() and (sheet[-GAP:] == PAPER).all()


def test_legend_only_where_colors_suffice() -> None:
    arguments = ([gray(50, 50)], [""], [rows((5, 5, 20, 25, 0.9, 1))])
    few, many = page(*arguments, NAMES[: len(PALETTE)], ""), page(*arguments, NAMES, "")
    assert few.shape[0] == many.shape[0] + LINE_HEIGHT
    assert (few[-GAP - LINE_HEIGHT :] == class_color(1)).all(2).any()


def test_tags_never_cover_tags() -> None:
    """At one box there are eight places at most; what comes after them has a box and no tag."""
    corners = np.tile(np.array([[40, 40, 160, 160]], np.float32), (40, 1))
    tags = ["tag"] * 8 + ["another, longer tag"] * 32
    crowded = draw_detections(gray(200, 200), corners, tags, [0] * 40, overlapping_tags=False)
    assert (crowded == draw_detections(gray(200, 200), corners[:8], tags[:8], [0] * 8, overlapping_tags=False)).all()


def test_the_surest_detection_has_its_tag() -> None:
    """Order of the rows does not matter, order of confidence does."""
    boxes = rows((10, 10, 60, 60, 0.3, 0), (12, 12, 61, 61, 0.9, 1), (11, 11, 62, 62, 0.5, 2))
    assert (with_boxes(gray(80, 80), boxes, 80, NAMES) == with_boxes(gray(80, 80), boxes[::-1], 80, NAMES)).all()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat", "cat"),
        ("two\nlines\tand \x07 more", "two lines and more"),
        ("", "class 7"),
        ("a class with a very long name indeed", "a class wit..name indeed"),
    ],
)
def test_short_names(name: str, shown: str) -> None:
    assert short_name(name, 7) == shown


def test_a_name_that_cannot_be_written_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "ALL_LETTERS", False)  # as with OpenCV 4
    assert short_name("\u7ea2\u7ec6\u80de", 3) == "class 3"
    assert short_name("caf\u00e9", 3) == "caf\u00e9"  # readable without its accent


def test_any_name_can_be_drawn() -> None:
    """Each gives a picture of its own with the box in its place; what can't be shown stands for something that can."""
    alike = {"": "class 0", "x" * 500: "x" * 11 + ".." + "x" * 11, "a\x00b\n": "a b"}
    other_scripts = ["\u7ea2\u7ec6\u80de", "\U0001f600", "\u0627\u0644\u0639"]
    if not drawing.ALL_LETTERS:
        alike |= dict.fromkeys(other_scripts, "class 0")

    def sheet(name: str, title: str = "a.jpg") -> np.ndarray:
        return page([gray(160, 320)], [title], [rows((40, 60, 280, 140, 0.5, 0))], [name], "")

    plain = sheet("cat")
    pictures = [plain]
    for name in [*alike, *other_scripts, "$x_1$", "x_1"]:
        drawn = sheet(name)
        assert drawn.shape == plain.shape
        top = GAP + 2 * LINE_HEIGHT  # pictures of 640 pixels: twice their size
        x1, x2, _, _ = extent(drawn[top + 200 : top + 220, :], 0)
        _, _, y1, y2 = extent(drawn[top : top + 320, GAP + 540 : GAP + 550], 0)
        assert np.abs(np.array([x1 - GAP, x2 - GAP, y1, y2]) - [80, 559, 120, 279]).max() <= 2
        if name in alike:
            np.testing.assert_array_equal(drawn, sheet(alike[name]))
        else:
            assert not any(np.array_equal(drawn, other) for other in pictures)
            pictures.append(drawn)
    titles = [sheet("cat", title) for title in ("\u7ea2.jpg", "", "x" * 500, "a.jpg")]
    assert len({title.tobytes() for title in titles}) == 4 and {title.shape for title in titles} == {plain.shape}


def test_fitted_is_as_wide_as_asked() -> None:
    assert fitted("abc", 500) == "abc"
    assert drawing.text_width(fitted("some long file name.jpg" * 9, 100), 9.0) <= 100
