"""Label files that are wrong as a whole: what is said about the cause and the way out."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.test_faults import assert_clear, call
from utils.config.data_yaml import load_data
from utils.core.errors import UserError
from utils.data.index import LabelIndex, build_index
from utils.data.splits import open_splits

IMAGES, BOXES = 4, 3


def boxes() -> np.ndarray:
    """(n, 4) [cx, cy, w, h] cxcywhn of all images, inside of them."""
    rng = np.random.default_rng(0)
    sizes = rng.uniform(0.05, 0.2, (IMAGES * BOXES, 2))
    return np.concatenate([rng.uniform(sizes / 2, 1 - sizes / 2), sizes], axis=1)


CENTERS = boxes()
CORNERS = np.concatenate([CENTERS[:, :2] - CENTERS[:, 2:] / 2, CENTERS[:, :2] + CENTERS[:, 2:] / 2], axis=1)
WIDE = [640, 480, 640, 480]
KEYPOINTS = [0.45, 0.45, 0.55, 0.55, 0.5, 0.6]


def rows(numbers: np.ndarray, before: str = "0", *behind: float) -> list[str]:
    """A class, four numbers and maybe more in each row."""
    return [" ".join([before, *(f"{one:.6f}" for one in row), *map(str, behind)]).strip() for row in numbers]


def write(root: Path, texts: list[str], more: str = "") -> Path:
    """A data set of those rows, three an image, and its YAML."""
    for i in range(IMAGES):
        for name in ("images", "labels"):
            (root / name).mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(root / f"images/{i}.png"), np.full((48, 64, 3), 90, np.uint8))
        (root / f"labels/{i}.txt").write_text("\n".join(texts[i * BOXES : (i + 1) * BOXES]) + "\n")
    (root / "d.yaml").write_text(f"train: images\nval: images\nnames: [a, b]\n{more}")
    return root / "d.yaml"


def read(path: Path) -> LabelIndex:
    return open_splits(load_data(path), ["train"])["train"]


def error(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value)


HINTS = {
    "pixels": (
        rows(CENTERS * WIDE),
        "12 of 12 rows have coordinates above 1, like pixels: write x and width divided by",
    ),
    "corners in pixels": (rows(CORNERS * WIDE), "the rows look like corners x1 y1 x2 y2 in pixels: write center x"),
    "decimal commas": ([row.replace(".", ",") for row in rows(CENTERS)], "12 rows have commas: write 0.5 for 0,5"),
    "commas": ([row.replace(" ", ",") for row in rows(CENTERS)], "12 rows have commas: write 0.5 for 0,5, and blanks"),
    "semicolons": ([row.replace(" ", "; ") for row in rows(CENTERS)], "12 rows have semicolons: write blanks between"),
    "both": (
        [f"0;{row[2:]}".replace(".", ",") for row in rows(CENTERS)],
        "12 rows have commas: write 0.5 for 0,5, and",
    ),
    "words": (rows(CENTERS, "cat"), "rows begin with words, such as 'cat': write the id of the class"),
    "odd ids": (rows(CENTERS, "1_"), "rows begin with words, such as '1_': write the id of the class"),
    "long ids": (rows(CENTERS, "1_0"), "rows begin with words, such as '1_0': write the id of the class"),
    "utf-16": (["\0".join(row) for row in rows(CENTERS)], "12 rows have zero bytes: save the files as UTF-8, not as"),
    "no class": (rows(CENTERS, ""), "12 rows have 4 columns: write all of class id, center x"),
    "confidence": (
        rows(CENTERS, "0", 0.9),
        "12 rows have 6 columns: if they are boxes with a number behind them (a con",
    ),
    "angle": (rows(CENTERS, "0", 1.57), "if the last one is an angle, write the box as its four corners"),
    "visible keypoints": (rows(CENTERS, "0", 0.4, 0.5, 2), "write columns: 8 into the data YAML"),
}


@pytest.mark.parametrize("kind", HINTS)
def test_rows_that_are_all_left_out(kind: str, tmp_path: Path) -> None:
    """ultralytics/yolov5#2785, #4798: the error named a label file that was there, and not what is wrong with it."""
    texts, hint = HINTS[kind]
    said = error(write(tmp_path, texts))
    start = f"train: no labels in {tmp_path}/images: all 12 rows of 4 label files were left out: 12 x "
    assert said.startswith(start) and hint in said.splitlines()[0]
    assert f"\n  {tmp_path}/labels/0.txt:1: " in said


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_encodings_of_windows(encoding: str, tmp_path: Path) -> None:
    """What an editor puts in front of a file, or between its letters, is none of its rows."""
    path = write(tmp_path, rows(CENTERS))
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "images/0.png").rename(tmp_path / "images/\u00e9.png")
    (tmp_path / "labels/0.txt").rename(tmp_path / "labels/\u00e9.txt")
    (tmp_path / "list.txt").write_text("\n".join(map(str, sorted((tmp_path / "images").iterdir()))))
    path.write_text(path.read_text().replace("train: images", "train: list.txt"))
    expected = read(path)
    for file in (path, tmp_path / "list.txt", *(tmp_path / "labels").iterdir()):
        file.write_bytes((mark + file.read_text()).encode(encoding))
    found = read(path)
    assert len(found) == IMAGES and found.report == expected.report and not found.report.problems
    np.testing.assert_array_equal(found.rows, expected.rows)


def test_corners(tmp_path: Path) -> None:
    """Such rows are numbers between 0 and 1, and most were clipped without a word on the cause."""
    index = read(write(tmp_path, rows(CORNERS)))
    [hint] = index.report.hints
    assert hint.startswith("the rows look like corners x1 y1 x2 y2: write center x, center y, width and height, x and")
    assert hint in index.report.details()
    assert read(tmp_path / "d.yaml").report == index.report  # from its file


def test_large_boxes_are_no_corners(tmp_path: Path) -> None:
    """Boxes of whole images, and boxes cut at the upper left, are as wide as their centers are far."""
    whole = np.tile([0.5, 0.5, 1.0, 1.0], (len(CENTERS), 1)) - np.linspace(0, 0.01, len(CENTERS))[:, None]
    assert read(write(tmp_path / "a", rows(whole))).report.hints == []
    assert read(write(tmp_path / "b", rows(CENTERS))).report.hints == []


def test_class_ids_from_one(tmp_path: Path) -> None:
    """One sentence in place of a line for each row (ultralytics PR #26207 is of the errors that come late)."""
    texts = [f"{1 + i % 2}{row[1:]}" for i, row in enumerate(rows(CENTERS))]
    said = error(write(tmp_path / "one", texts))
    assert said == (
        "train: class ids run from 1 to 2, but are counted from 0: subtract 1 from each, or put a name for 0 in front "
        f"of the names in the data YAML (6 rows in 4 label files have no name, such as {tmp_path}/one/labels/0.txt:2)"
    )
    said = error(write(tmp_path / "also zero", [*texts[:-1], rows(CENTERS)[-1]]))
    assert "are not whole numbers from 0 to 1; correct them" in said and said.count("labels/") == 5
    last = [f"{row[2:]} {i % 2}" for i, row in enumerate(rows(CENTERS))]
    assert "the class id looks to be in the last column" in error(write(tmp_path / "last", last)).splitlines()[0]


@pytest.mark.parametrize(
    "behind", [KEYPOINTS, [0.9, 0.3], [0.9, 7.0], [0.4, 0.5, 2, 0.5, 0.5, 1, 0.3, 0.3, 0, 0.5, 0.4, 2]]
)
def test_rows_with_more_behind_the_box(behind: list[float], tmp_path: Path) -> None:
    """ultralytics/yolov5#12330: class, box and keypoints were taken for outlines, and gave other boxes in silence."""
    columns = 5 + len(behind)
    path = write(tmp_path, rows(CENTERS, "1", *behind))
    said = error(path)
    first = (
        f"train: 12 rows have {columns} columns, the first in {tmp_path}/labels/0.txt:1, and may be outlines or boxes "
    )
    assert said.startswith(first)
    assert f"columns: {columns} for boxes (kpt_shape does too), columns: 5 for outlines" in said
    path.write_text(path.read_text() + f"columns: {columns}\n")
    index = read(path)
    np.testing.assert_allclose(index.rows[:, 1:], CENTERS, atol=1e-6)
    assert index.points is None
    rule = "numbers behind the boxes of this file, not used"
    assert {(one.line, one.value, one.rule) for one in index.report.problems} == {(1, f"{columns} columns", rule)}
    assert len(index.report.problems) == 4  # one a file


def test_keypoints_by_their_shape(tmp_path: Path) -> None:
    """ultralytics/yolov5#12330: the key of other tools for such data."""
    index = read(write(tmp_path, rows(CENTERS, "1", *KEYPOINTS), "kpt_shape: [3, 2]\n"))
    np.testing.assert_allclose(index.rows[:, 1:], CENTERS, atol=1e-6)


def test_outlines_stay_outlines(tmp_path: Path) -> None:
    """Oriented boxes, which have as many corners each; outlines of several lengths; and those that the YAML says."""
    x1, y1, x2, y2 = CORNERS.T
    oriented = np.stack([x1, y1, x2, y1, x2, y2, x1, y2], axis=1)
    index = read(write(tmp_path / "oriented", rows(oriented)))
    np.testing.assert_allclose(index.rows[:, 1:], CENTERS, atol=1e-5)
    mixed = [row + (" 0.5 0.5" if i % 2 else "") for i, row in enumerate(rows(CENTERS, "0", 0.5, 0.5, 0.4, 0.6))]
    assert read(write(tmp_path / "mixed", mixed)).points is not None
    triangles = rows(CENTERS, "0", 0.5, 0.5)
    assert read(write(tmp_path / "said", triangles, "columns: 5\n")).points is not None
    build_index([tmp_path / "said/images"], 2, columns=5)
    with pytest.raises(UserError, match="may be outlines or boxes"):  # what was said belongs to what is kept
        build_index([tmp_path / "said/images"], 2)


def test_a_training_says_all_of_it(tmp_path: Path) -> None:
    """Both splits in one message, before anything is made."""
    path = write(tmp_path / "data", rows(CENTERS, "0", *KEYPOINTS))
    (tmp_path / "cwd").mkdir()
    done = call("train.py", "--data", path, "--strict", "--device", "cpu", cwd=tmp_path / "cwd")
    assert_clear(done, "train: 12 rows have 11 columns", "val: 12 rows have 11 columns", left=tmp_path / "cwd")
