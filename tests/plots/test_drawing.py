"""Boxes and tags on pictures of every size."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.inference.detection_files import annotate
from utils.inference.predictions import Prediction
from utils.plots import drawing
from utils.plots.drawing import (
    PALETTE,
    class_color,
    draw_detections,
    lettering_doubts,
    text_color,
    text_width,
    written_name,
)
from utils.plots.pages import short_name
from utils.run.plots import Plots


def boxes(*rows: tuple[float, float, float, float]) -> np.ndarray:
    return np.array(rows, np.float32).reshape(-1, 4)


def luminance(color: tuple[int, int, int]) -> float:
    """Relative luminance of a BGR color (WCAG 2.1)."""
    blue, green, red = (c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_box_is_drawn_around_its_pixels_and_the_image_is_left_alone() -> None:
    image = np.full((60, 80, 3), 10, np.uint8)
    drawn = draw_detections(image, boxes((20, 10, 60, 50)), [""], [3], line_thickness=1)
    assert (image == 10).all() and drawn.shape == image.shape
    rows, columns = np.nonzero((drawn == class_color(3)).all(2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 49, 20, 59)
    assert (drawn[11:49, 21:59] == 10).all()


def test_nothing_to_draw() -> None:
    image = np.full((30, 40, 3), 7, np.uint8)
    assert (draw_detections(image, boxes(), [], []) == image).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 500), (500, 3), (17, 23), (60, 60), (480, 640), (2000, 3000)])
def test_any_size_any_box(shape: tuple[int, int]) -> None:
    """Boxes at and beyond the edges, of no size, and labels longer than the image is wide."""
    height, width = shape
    image = np.zeros((height, width, 3), np.uint8)
    rows = boxes((0, 0, width, height), (-50, -50, 9999, 9999), (width, height, width, height), (0.2, 0.2, 0.3, 0.3))
    drawn = draw_detections(image, rows, ["a", "label " * 60, "x" * 300, "\u00e9\u4eba"], [0, 1, 2, 9])
    assert drawn.shape == image.shape and drawn.any()


def test_letters_grow_with_the_image() -> None:
    """A tag takes about the same share of a large picture as of a small one."""
    shares = []
    for height, width in ((480, 640), (2880, 3840)):
        image = np.full((height, width, 3), 90, np.uint8)
        row = boxes((0.3 * width, 0.3 * height, 0.9 * width, 0.9 * height))
        drawn = draw_detections(image, row, ["person 0.87"], [0])
        shares.append((drawn[: int(0.29 * height)] != 90).any(2).mean())
    assert shares[1] == pytest.approx(shares[0], rel=0.5) and shares[0] > 0.002


def test_tags_of_neighbors_do_not_cover_each_other() -> None:
    image = np.full((400, 400, 3), 90, np.uint8)
    rows = boxes((100, 100, 220, 220), (105, 103, 225, 223))
    both = draw_detections(image, rows, ["first 0.90", "second 0.80"], [0, 1])
    filled = {name: (both == class_color(number)).all(2).sum() for number, name in enumerate(("first", "second"))}
    alone = [
        (draw_detections(image, rows[number : number + 1], [label], [number]) == class_color(number)).all(2).sum()
        for number, label in enumerate(("first 0.90", "second 0.80"))
    ]
    assert filled["first"] > 0.95 * alone[0] and filled["second"] > 0.6 * alone[1]


def test_text_stands_out_from_every_color() -> None:
    for class_id in range(len(PALETTE)):
        color = class_color(class_id)
        low, high = sorted((luminance(color), luminance(text_color(color))))
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.1, 1.4.3, level AA


@pytest.mark.parametrize(
    ("text", "shown"), [("b\udcffd.png", "b?d.png"), ("\ud800", "?"), ("two\nlines\tand\x00more", "two lines and more")]
)
def test_what_cannot_be_drawn_is_replaced(text: str, shown: str) -> None:
    """OpenCV ends the process at bytes of a name that are no UTF-8, and starts a second line at a line break."""
    assert drawing.drawable(text) == shown
    assert text_width(text, 20) == text_width(shown, 20)


def test_names_that_an_older_opencv_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """ultralytics/yolov5#4351, #6522: names were ??? on detect's pictures, class 1 on pages, unsaid why."""
    names = ["Soci\u00e9t\u00e9", "\u7fd8\u5934", "cat", ""]
    found = np.array([[0, 0, 200, 60, 0.5, 1]], np.float32)
    image = np.zeros((64, 256, 3), np.uint8)
    assert not drawing.ALL_LETTERS or lettering_doubts(names) == []
    monkeypatch.setattr(drawing, "ALL_LETTERS", False)
    assert [written_name(name, k) for k, name in enumerate(names)] == [names[0], "class 1", "cat", "class 3"]
    assert [short_name(name, k) for k, name in enumerate(names)] == [names[0], "class 1", "cat", "class 3"]
    np.testing.assert_array_equal(annotate(image, found, names), annotate(image, found, ["", "class 1"]))
    said = f"OpenCV {cv2.__version__} can't write all letters of 2 class names: on pictures, {names[0]} is 'Societe'; "
    assert lettering_doubts(names) == [f"{said}version 5 can"]
    assert lettering_doubts(["cat", "two\nlines", ""]) == []
    assert Prediction(image, "a.jpg", None, names, found).plot().any()


def test_the_substitute_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(drawing, "ALL_LETTERS", False)
    found = np.array([[0, 0, 200, 60, 0.5, 0]], np.float32)
    for _ in range(2):
        Prediction(np.zeros((64, 256, 3), np.uint8), "a.jpg", None, ["\u7fd8"], found).plot()
    assert capsys.readouterr().out.count("WARNING: OpenCV ") == 1
    for enabled in (True, False):
        Plots(tmp_path, ["\u7fd8"], enabled)
    assert capsys.readouterr().out.count("WARNING: OpenCV ") == 1


def test_letters_that_an_older_opencv_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "ALL_LETTERS", False)
    assert drawing.drawable("\u00e9l\u00e9phant \u4eba 0.5") == "elephant ? 0.5"
    assert text_width("\u00e9", 20) == text_width("e", 20)
