"""What is wrong with the images and labels of a data set: one finding each, its summary, its file, its error."""

import csv
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from utils.core.errors import UserError
from utils.core.wording import escaped

REPORT_FILE = "data_report.csv"  # in a run folder
SHOWN = 10  # problems of a split on the terminal
# What is done with one image that can't be read any more, and with several: in training and in validation.
REPLACED = ("was replaced", "were replaced")
NOTHING_FOUND = ("counts as one without detections", "count as ones without detections")


class Problem(NamedTuple):
    """One finding: line is 0 where the whole file is meant; value is what stands there; rule says what is done.

    Of a whole file the value is the reason, '' where the rule says enough.
    """

    file: str
    line: int
    value: str
    rule: str

    def __str__(self) -> str:
        if self.line:
            return f"{self.file}:{self.line}: {self.rule} ({self.value})"
        return f"{self.file}: {self.value}: {self.rule}" if self.value else f"{self.file}: {self.rule}"


@dataclass
class ScanReport:
    """What a scan found.

    Attributes:
        found: images with a label file that is not empty.
        missing: without a label file.
        empty: with an empty one.
        corrupt: left out.
        background: of those that are kept, without any box; missing and empty are among them.
        problems: every finding, by file and line.
        hints: mistakes that many rows look to have in common, and what to do.
    """

    found: int = 0
    missing: int = 0
    empty: int = 0
    corrupt: int = 0
    background: int = 0
    problems: list[Problem] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Images looked at."""
        return self.found + self.missing + self.empty + self.corrupt

    def summary(self) -> str:
        """One line for the log."""
        text = f"{self.total} images: {self.found} with labels, {self.missing} without a label file"
        text += f", {self.empty} with an empty one, {self.corrupt} left out"
        return text + (f"; {len(self.problems)} problems" if self.problems else "")

    def details(self, limit: int = SHOWN) -> list[str]:
        """Counts per rule, then hints, then up to ``limit`` problems with file, line and value."""
        lines = [*self.rule_counts(self.problems), *self.hints]
        return lines + shortened([*map(str, self.problems[:limit])], len(self.problems))

    @staticmethod
    def rule_counts(problems: Sequence[Problem]) -> list[str]:
        """How often which rule is broken, most frequent first."""
        return [f"{count} x {rule}" for rule, count in Counter(problem.rule for problem in problems).most_common()]

    def tell(self, split: str, logger: logging.Logger) -> None:
        """Log one line, then problems, then a warning where something is likely wrong with the whole split."""
        logger.info(f"{split}: {self.summary()}")
        for line in self.details() if self.problems else []:
            logger.warning(line)
        if self.background > (self.total - self.corrupt) / 2:
            logger.warning(
                f"{self.background} of {self.total - self.corrupt} images in {split} HAVE NO LABELS and count as "
                "background; labels are looked for in the folder 'labels' beside the folder 'images', else beside the "
                "image, a .txt of its name"
            )


def shortened(lines: Sequence[str], total: int) -> list[str]:
    """Return the lines that are shown, and how many are not."""
    return [*lines, f"... and {total - len(lines)} more"] if total > len(lines) else list(lines)


def report_csv(problems: Mapping[str, Sequence[Problem]]) -> str:
    """Return the problems of some splits as a table: split, file, line (0: the whole file), value, rule."""

    class Lines(list[str]):
        write = list.append

    lines = Lines()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(("split", *Problem._fields))
    writer.writerows((split, *problem) for split, found in problems.items() for problem in found)
    return "".join(lines)


def write_report(run_dir: Path, reports: Mapping[str, ScanReport], logger: logging.Logger) -> None:
    """Write every problem of some splits to the run folder and say where, if there is any.

    Raises:
        UserError: the file can't be written.
    """
    problems = {split: report.problems for split, report in reports.items()}
    path = run_dir / REPORT_FILE
    try:
        path.unlink(missing_ok=True)  # of a run that was here before (--exist-ok)
        if any(problems.values()):
            path.write_text(report_csv(problems), encoding="utf-8", errors="surrogateescape")
            logger.info(f"every problem of the data is listed in {path}")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


class UnreadableImages:
    """Tells of images that could not be read while a run went on: once of each file, and in each epoch how many.

    Args:
        run_dir: its report gets them as well.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._told: set[tuple[str, str]] = set()

    def tell(self, split: str, found: Mapping[str, str], done: tuple[str, str], logger: logging.Logger) -> None:
        """Log how many there were, and name those that were not there before; nothing if there were none.

        Args:
            split: that they belong to.
            found: reason by file, of one epoch or validation.
            done: REPLACED or NOTHING_FOUND.
            logger: where the line goes.
        """
        if not found:
            return
        new = {path: reason for path, reason in sorted(found.items()) if (split, path) not in self._told}
        self._told.update((split, path) for path in new)
        names = ", ".join(shortened([f"{escaped(path)} ({new[path]})" for path in list(new)[:SHOWN]], len(new)))
        several = len(found) > 1
        text = f"{len(found)} image{'s' * several} of {split} could not be read and {done[several]}"
        if len(new) < len(found):
            text += f", {len(new)} of them for the first time" if new else ", as before"
        logger.warning(f"{text}: {names}" if new else text)
        if new:
            problems = [
                Problem(path, 0, reason, f"could not be read in the run and {done[0]}") for path, reason in new.items()
            ]
            self._append(split, problems, logger)

    def _append(self, split: str, problems: Sequence[Problem], logger: logging.Logger) -> None:
        path = self._run_dir / REPORT_FILE
        try:
            text = report_csv({split: problems})
            if path.exists():
                text = text.partition("\n")[2]  # the head is there
            with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
        except OSError as error:
            logger.warning(f"{path} can't be written: {error.strerror}")
