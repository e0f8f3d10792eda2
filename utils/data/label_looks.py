"""What the label rows of a split look like: mistakes that all of them share are recognized, and what to do is said."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from utils.data.label_rules import BOX_COLUMNS, TOLERANCE, Rows

FEW_ROWS = 5  # fewer don't tell what all of a data set look like
MOST, SOME = 0.9, 0.1  # of the rows: all but some that are wrong in another way, and too many to be mistakes
FAR_OUT = 0.1  # a box that reaches out of its image by this share was not drawn there
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
