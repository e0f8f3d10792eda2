"""Label files: where they are, rows as numbers, the rules they must keep, and what rows that break them look like.

Shape letter: M boxes of many files.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from utils.core.text_files import as_utf8
from utils.data.report import Problem

TOLERANCE = 0.01  # annotation tools round; what leaves the image by up to this share is clipped, beyond it is a mistake
NOISE = 2e-6  # rounding of labels written with six decimals; neither changed nor reported
BOX_COLUMNS = 5  # class cx cy w h
FEW_ROWS = 5  # fewer don't tell what all of a data set look like
MOST, SOME = 0.9, 0.1  # of the rows: all but some that are wrong in another way, and too many to be mistakes
FAR_OUT = 0.1  # a box that reaches out of its image by this share was not drawn there

_IMAGES = [re.compile(r"(.*)/images((?:/.*)?)", flags | re.DOTALL) for flags in (0, re.IGNORECASE)]


def around_images(folder: str) -> list[tuple[str, str]]:
    """What stands before and behind the last folder ``images`` of a path: as it is written here, then in any case."""
    found = [match for pattern in _IMAGES if (match := pattern.fullmatch(folder))]
    return list(dict.fromkeys((match[1], match[2]) for match in found))


def label_path(image: str) -> str:
    """Where the label file of an image belongs: ``labels`` for the last folder ``images``, else beside the image."""
    folder, _, name = image.rpartition("/")
    around = around_images(folder)
    return f"{'/labels'.join(around[0]) if around else folder}/{name.rpartition('.')[0]}.txt"


class Rows(NamedTuple):
    """Rows of many label files: image (M,) position, line (M,), box (M, 5) [class, cx, cy, w, h] cxcywhn.

    ``low`` and ``high`` (M,) are the smallest and largest coordinate as written (for polygons, of their points).
    ``outline`` (M,) is the place of a polygon in the reader's ``outlines``, -1 for a box.
    """

    image: np.ndarray
    line: np.ndarray
    box: np.ndarray
    low: np.ndarray
    high: np.ndarray
    outline: np.ndarray


class Verdict(NamedTuple):
    """Rows that break a rule, (M,) bool; the value to report, (M,); corrected boxes, or None: these rows go."""

    hit: np.ndarray
    value: np.ndarray
    box: np.ndarray | None = None


def not_finite(rows: Rows) -> Verdict:
    """NaN and infinity."""
    return Verdict(~np.isfinite(rows.box).all(1), rows.box.sum(1))


def bad_class(rows: Rows, num_classes: int) -> Verdict:
    """Class ids are whole numbers from 0 to num_classes - 1."""
    ids = rows.box[:, 0]
    return Verdict((ids != np.floor(ids)) | (ids < 0) | (ids >= num_classes), ids)


def far_outside(rows: Rows) -> Verdict:
    """Coordinates that are not normalized, or annotated wrongly."""
    worst = np.where(rows.low < -TOLERANCE, rows.low, rows.high)
    return Verdict((rows.low < -TOLERANCE) | (rows.high > 1 + TOLERANCE), worst)


def slightly_outside(rows: Rows) -> Verdict:
    """Coordinates beyond 0 or 1 within the tolerance."""
    box = rows.box.copy()
    np.clip(box[:, 1:], 0, 1, out=box[:, 1:])
    return Verdict((rows.low < 0) | (rows.high > 1), np.where(rows.low < 0, rows.low, rows.high), box)


def no_area(rows: Rows) -> Verdict:
    """Boxes without width or height."""
    smaller = rows.box[:, 3:].min(1)
    return Verdict(smaller <= 0, smaller)


def corners_outside(rows: Rows) -> Verdict:
    """Boxes whose center is inside while a corner is not."""
    half = rows.box[:, 3:] / 2
    corners = np.concatenate((rows.box[:, 1:3] - half, rows.box[:, 1:3] + half), 1)
    low, high = corners.min(1), corners.max(1)
    hit = (low < -NOISE) | (high > 1 + NOISE)
    corners = corners.clip(0, 1)
    box = rows.box.copy()
    box[hit, 1:3] = (corners[hit, :2] + corners[hit, 2:]) / 2
    box[hit, 3:] = corners[hit, 2:] - corners[hit, :2]
    return Verdict(hit, np.where(-low > high - 1, low, high), box)


def repeated(rows: Rows, any_class: bool = False) -> Verdict:
    """The same class and box once more in the same file; with ``any_class`` the same box."""
    key = np.empty((len(rows.image), 6), np.float64)
    key[:, 0], key[:, 1:] = rows.image, rows.box.astype(np.float32)
    if any_class:
        key[:, 1] = 0
    seen: set[bytes] = set()
    hit = np.zeros(len(key), bool)
    for k, row in enumerate((key + 0.0).view("V48")[:, 0].tolist()):  # + 0.0: no negative zeros
        hit[k] = row in seen
        seen.add(row)
    return Verdict(hit, rows.box[:, 0])


LEFT_OUT_ROW = "row left out"  # how a rule ends if it does that
BAD_CLASS = "class id outside the names of the data YAML"
ROW_RULES: tuple[tuple[str, Callable[[Rows], Verdict]], ...] = (  # in this order, each on what the ones before left
    ("not a finite number, row left out", not_finite),
    ("coordinate outside 0 to 1 by more than 0.01, row left out", far_outside),
    ("coordinate slightly outside 0 to 1, clipped", slightly_outside),
    ("box without width or height, row left out", no_area),
    ("box reaches out of the image, clipped", corners_outside),
)
REPEATED = "row repeated, kept once"
REPEATED_BOX = "box repeated where all classes count as one, kept once"
BEHIND = "numbers behind the boxes of this file, not used"
NOT_A_NUMBER = "not a number, row left out"
BAD_COLUMNS = "neither 5 columns (class cx cy w h) nor a polygon (class and 3 or more x y pairs), row left out"
MARKS = {"commas": b",", "semicolons": b";", "zero bytes": b"\0"}  # in what should be numbers
WAYS_OUT = {
    "commas": "write 0.5 for 0,5, and blanks between the columns",
    "semicolons": "write blanks between the columns",
    "zero bytes": "save the files as UTF-8, not as UTF-16",
}


@dataclass
class Looks:
    """What the rows of a split look like, in numbers: a mistake that all of them share is recognized by these.

    Attributes:
        counts: how many rows are like what the key says.
        long: rows that were read as outlines, by their columns.
        like_boxes: those of them whose first columns make a box, too.
        refused: rows with a number of columns that nothing has, by that.
        first: file and line of the first long row, by its columns.
        word: the first one that stands in place of a class id.
    """

    counts: Counter[str] = field(default_factory=Counter)
    long: Counter[int] = field(default_factory=Counter)
    like_boxes: Counter[int] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    first: dict[int, str] = field(default_factory=dict)
    word: str = ""

    def add(self, other: "Looks") -> None:
        """Add those of files that come later."""
        self.counts += other.counts
        self.long += other.long
        self.like_boxes += other.like_boxes
        self.refused += other.refused
        self.first = other.first | self.first
        self.word = self.word or other.word

    def add_long(self, values: Sequence[float], place: str) -> None:
        """Count a row that is read as an outline."""
        columns = len(values)
        self.long[columns] += 1
        self.like_boxes[columns] += _is_like_a_box(values)
        self.first.setdefault(columns, place)

    def add_rows(self, rows: Rows, num_classes: int) -> None:
        """Count rows as they were read, before any rule."""
        ids, boxes = rows.box[:, 0], rows.box[(rows.outline < 0) & np.isfinite(rows.box).all(1)]
        first, second = boxes[:, 1:3], boxes[:, 3:]
        outside = (first - second / 2 < -FAR_OUT) | (first + second / 2 > 1 + FAR_OUT)
        whole_last = boxes[:, 4] == np.floor(boxes[:, 4])
        found = {
            "rows": len(ids),
            "boxes": len(boxes),
            "large": (rows.high > 1 + TOLERANCE).sum(),
            "ordered": (second > first).all(1).sum(),
            "outside": outside.any(1).sum(),
            "class last": ((boxes[:, 0] != np.floor(boxes[:, 0])) & whole_last).sum(),
            "id is one too high": (ids == num_classes).sum(),
            "id is 0 or wrong": (~(ids >= 1) | (ids > num_classes) | (ids != np.floor(ids))).sum(),
        }
        self.counts.update({key: int(count) for key, count in found.items()})

    def ids_from_one(self) -> bool:
        """Whether class ids run from 1 to the number of names."""
        enough = self.counts["rows"] >= FEW_ROWS
        return enough and self.counts["id is one too high"] > 0 and not self.counts["id is 0 or wrong"]

    def unclear(self) -> str:
        """What is wrong if long rows may as well be boxes with more behind them as outlines; '' if nothing is."""
        columns, rows = next(iter(self.long.most_common(1)), (0, 0))
        if rows < MOST * self.long.total():  # outlines have as many corners as it takes
            return ""
        if rows < FEW_ROWS or self.like_boxes[columns] < MOST * rows:
            return ""
        return (
            f"{rows} rows have {columns} columns, the first in {self.first[columns]}, and may be outlines or boxes "
            f"with {_numbers(columns - BOX_COLUMNS)} behind them (keypoints, a confidence, a track id); say in the "
            f"data YAML which: columns: {columns} for boxes (kpt_shape does too), columns: {BOX_COLUMNS} for outlines"
        )

    def hints(self) -> list[str]:
        """What mistakes the rows look like and what to do, a sentence each."""
        counts, hints = self.counts, []
        rows, boxes, large = counts["rows"], counts["boxes"], counts["large"]
        corners = boxes >= FEW_ROWS and counts["ordered"] >= MOST * boxes and counts["outside"] >= SOME * boxes
        divided = "divided by the image's width, y and height by its height"
        if 2 * large > rows and not corners:
            hints.append(f"{large} of {rows} rows have coordinates above 1, like pixels: write x and width {divided}")
        elif corners:
            pixels = " in pixels" if 2 * large > rows else ""
            hints.append(
                f"the rows look like corners x1 y1 x2 y2{pixels}: write center x, center y, width and height, x and "
                f"width {divided}"
            )
        if 2 * counts["class last"] > rows:
            hints.append("the class id looks to be in the last column: write it into the first one")
        hints += [f"{counts[kind]} rows have {kind}: {way}" for kind, way in WAYS_OUT.items() if counts[kind]]
        if 2 * counts["words"] > rows + counts["words"]:
            hints.append(
                f"rows begin with words, such as {self.word!r}: write the id of the class, its place among the names "
                "counted from 0"
            )
        for columns, refused in self.refused.most_common(1):
            if 2 * refused > rows or refused >= FEW_ROWS:
                hints.append(f"{refused} rows have {columns} columns: {self._about_columns(columns)}")
        return hints

    def _about_columns(self, columns: int) -> str:
        if columns < BOX_COLUMNS:
            return "write all of class id, center x, center y, width and height"
        behind = _numbers(columns - BOX_COLUMNS)
        text = f"if they are boxes with {behind} behind them (a confidence, a track id, keypoints), write "
        text += f"columns: {columns} into the data YAML"
        return text + ("; if the last one is an angle, write the box as its four corners" if columns == 6 else "")


def _numbers(count: int) -> str:
    return "a number" if count == 1 else f"{count} numbers"


def _is_like_a_box(values: Sequence[float]) -> bool:
    """Whether the first columns of a long row make a box inside of the image, and not all an oriented box."""
    x, y, width, height = values[1:5]
    if not all(
        size > 0 and size / 2 - TOLERANCE <= center <= 1 + TOLERANCE - size / 2
        for center, size in ((x, width), (y, height))
    ):
        return False
    if len(values) != 9:
        return True
    points = np.array(values[1:]).reshape(4, 2)
    gap = np.abs(points[0] - points[1] + points[2] - points[3])  # 0 in a parallelogram
    return bool((gap > 0.1 * np.ptp(points, axis=0)).any())


def check_rows(
    rows: Rows, names: Sequence[str], num_classes: int, problems: list[Problem], single_cls: bool = False
) -> Rows:
    """Apply every rule.

    Args:
        rows: as they were read.
        names: the label files that ``rows.image`` counts.
        num_classes: classes of the data set.
        problems: where to add what breaks a rule.
        single_cls: whether all classes count as one. The rows keep their ids.

    Returns:
        What is left, maybe corrected.
    """
    rules = (
        ROW_RULES[0],
        (BAD_CLASS, lambda rows: bad_class(rows, num_classes)),
        *ROW_RULES[1:],
        (REPEATED_BOX, lambda rows: repeated(rows, any_class=True)) if single_cls else (REPEATED, repeated),
    )
    for text, rule in rules:
        hit, value, box = rule(rows)
        for k in np.flatnonzero(hit):
            problems.append(Problem(names[rows.image[k]], int(rows.line[k]), f"{value[k]:.6g}", text))
        if box is not None:
            rows = rows._replace(box=box)
        elif hit.any():
            rows = Rows(*(column[~hit] for column in rows))
    return rows


class RowReader:
    """Collects the rows of label files as numbers; what cannot be read as numbers becomes a problem.

    Args:
        problems: where these go.
        columns: that the row of a box may have besides 5, which are the first then; what is behind them is not used.
    """

    def __init__(self, problems: list[Problem], columns: int = 0) -> None:
        self.problems = problems
        self.columns = columns
        self.looks = Looks()
        self.image: list[int] = []
        self.line: list[int] = []
        self.box: list[list[float]] = []
        self.polygon_range: dict[int, tuple[float, float]] = {}  # row -> smallest and largest coordinate
        self.outlines: list[np.ndarray] = []  # polygons, (p, 2) float32 in [0, 1]
        self.outline: list[int] = []  # of each row, -1 for a box

    def read(self, image: int, name: str, text: bytes) -> bool:
        """Add the rows of one label file; False if there is nothing but blank lines in it."""
        blank, told = True, False
        for number, line in enumerate(as_utf8(text).splitlines(), 1):
            words = line.split()
            if not words:
                continue
            blank = False
            try:
                values = [*map(_number, words)] if b"_" in line else [*map(float, words)]
            except ValueError:
                self._report(name, number, self._bad_word(words), NOT_A_NUMBER)
                continue
            outline = -1
            if len(values) in (BOX_COLUMNS, self.columns):
                if len(values) > BOX_COLUMNS and not told:
                    told = True
                    self._report(name, number, f"{len(values)} columns".encode(), BEHIND)
                values = values[:BOX_COLUMNS]
            elif len(values) >= 7 and len(values) % 2:
                outline = len(self.outlines)
                self.looks.add_long(values, f"{name}:{number}")
                values = self._polygon(values)
            else:
                self.looks.refused[len(values)] += 1
                self._report(name, number, f"{len(values)} columns".encode(), BAD_COLUMNS)
                continue
            self.image.append(image)
            self.line.append(number)
            self.box.append(values)
            self.outline.append(outline)
        return not blank

    def _bad_word(self, words: list[bytes]) -> bytes:
        """The first word that is no number; counted."""
        bad = next(word for word in words if not _is_number(word))
        kinds = [kind for kind, mark in MARKS.items() if mark in bad] or ["words"] * (bad is words[0])
        self.looks.counts.update(kinds[:1])
        if kinds[:1] == ["words"] and not self.looks.word:
            self.looks.word = _shown(bad)
        return bad

    def _polygon(self, values: list[float]) -> list[float]:
        """Box around a polygon's points, after these were clipped to the image."""
        points = np.array(values[1:]).reshape(-1, 2)
        self.polygon_range[len(self.box)] = points.min(), points.max()
        points = points.clip(0, 1)
        self.outlines.append(points.astype(np.float32))
        low, high = points.min(0), points.max(0)
        return [values[0], *((low + high) / 2), *(high - low)]

    def _report(self, name: str, line: int, word: bytes, rule: str) -> None:
        self.problems.append(Problem(name, line, _shown(word), rule))

    def rows(self) -> Rows:
        """Everything read so far."""
        box = np.array(self.box, np.float64).reshape(-1, 5)
        low, high = (box[:, 1:].min(1), box[:, 1:].max(1)) if len(box) else (np.empty(0), np.empty(0))
        for row, (smallest, largest) in self.polygon_range.items():
            low[row], high[row] = smallest, largest
        outline = np.array(self.outline, np.int64)
        return Rows(np.array(self.image, np.int64), np.array(self.line, np.int64), box, low, high, outline)


def _shown(word: bytes) -> str:
    return word[:40].decode("utf-8", "backslashreplace")


def _number(word: bytes) -> float:
    if b"_" in word:  # 1_0 is ten in Python only
        raise ValueError
    return float(word)


def _is_number(word: bytes) -> bool:
    try:
        _number(word)
    except ValueError:
        return False
    return True
