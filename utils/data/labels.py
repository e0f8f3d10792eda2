"""Label files: where they are, and their rows as numbers."""

import re

import numpy as np

from utils.core.text_files import as_utf8
from utils.data.label_looks import Looks
from utils.data.label_rules import BOX_COLUMNS, Rows
from utils.data.report import Problem

BEHIND = "numbers behind the boxes of this file, not used"
NOT_A_NUMBER = "not a number, row left out"
BAD_COLUMNS = "neither 5 columns (class cx cy w h) nor a polygon (class and 3 or more x y pairs), row left out"
MARKS = {"commas": b",", "semicolons": b";", "zero bytes": b"\0"}  # in what should be numbers

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
