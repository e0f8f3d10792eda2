"""What the benchmarks have in common: things that take turns, ratios of the same round, and the table they end in."""

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from utils.core.errors import UserError

ROUNDS = 7  # that count; one before them does not


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio, measured round by round.

    Attributes:
        key: short name, as in docs/performance.md.
        what: what is divided by what.
        ratios: one of each round; a single one where it is a count, which has no noise.
        aim: what it should be; None where the figure is for information.
        at_least: whether more is better.
        note: what else a reader should know, such as the seconds behind the ratio.
    """

    key: str
    what: str
    ratios: tuple[float, ...]
    aim: float | None = None
    at_least: bool = True
    note: str = ""

    @property
    def median(self) -> float:
        """What the line says."""
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached; None without one."""
        if self.aim is None:
            return None
        return self.median >= self.aim if self.at_least else self.median <= self.aim

    def to_dict(self) -> dict[str, object]:
        """Return the line as plain values, for JSON."""
        low, high = min(self.ratios), max(self.ratios)
        bound = {"aim": self.aim, "at_least": self.at_least, "met": self.met}
        return (
            {"key": self.key, "what": self.what, "median": self.median, "low": low, "high": high}
            | bound
            | {
                "note": self.note,
                "ratios": list(self.ratios),
            }
        )


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, *, repeat: int = 1, name: str = ""
) -> dict[str, list[float]]:
    """Time some functions, one after the other in each round, so that a slow moment of the machine hits all of them.

    Args:
        contestants: functions by name.
        rounds: that count; one before them does not.
        repeat: calls of a function in a round.
        name: for the progress bar; none is shown without.

    Returns:
        Seconds of a call by name, one figure a round.
    """
    taken: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for number in tqdm(range(rounds + 1), name, leave=False, disable=None if name else True):
        for contestant, work in contestants.items():
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            if number:
                taken[contestant].append((time.perf_counter() - start) / repeat)
    return taken


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Divide the figures of the same round."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


def milliseconds(taken: Mapping[str, Sequence[float]]) -> str:
    """Say the medians behind a ratio."""
    return ", ".join(f"{name} {statistics.median(seconds) * 1e3:.3g} ms" for name, seconds in taken.items())


@dataclass(frozen=True)
class Options:
    """What every group of lines is asked with.

    Attributes:
        rounds: that count.
        data: data set YAML whose images are used, "" for some that are made on the way.
    """

    rounds: int = ROUNDS
    data: str = ""


def run_group(measure: Callable[[Options], list[Row]], description: str | None) -> None:
    """Parse the command line of one group, measure, and print its lines."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count")
    parser.add_argument("--data", default="", help="data set YAML whose images are used; default: images made here")
    parser.add_argument("--rows", type=Path, help="also write the lines here, as JSON")
    given = parser.parse_args()
    if given.rounds < 1:
        raise UserError(f"--rounds {given.rounds}: must be at least 1")
    rows = measure(Options(given.rounds, given.data))
    print(format_rows(rows))
    if given.rows:
        write_rows(rows, given.rows)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write lines as JSON, for `Row(**fields)`."""
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]) + "\n")


def load_of_others() -> float:
    """Return the load of the last minute in processes that want a core, 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def format_rows(rows: Sequence[Row]) -> str:
    """Return the table, one line a row and its note below it."""
    width = max([20, *(len(row.what) for row in rows)])
    lines = [f"{'':<5}{'ratio of':<{width}}{'median':>10}{'range':>20}{'aim':>10}"]
    for row in rows:
        spread = f"{min(row.ratios):.3f} to {max(row.ratios):.3f}" if len(row.ratios) > 1 else "counted"
        aim = "" if row.aim is None else f"{'>=' if row.at_least else '<='} {row.aim:g}"
        verdict = {None: "", True: "", False: "  MISSED"}[row.met]
        lines.append(f"{row.key:<5}{row.what:<{width}}{row.median:>10.3f}{spread:>20}{aim:>10}{verdict}")
        if row.note:
            lines.append(f"{'':<7}{row.note}")
    return "\n".join(lines)
