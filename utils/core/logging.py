"""Where a run tells what it does: the log, results.csv, and meters that stay on the device."""

import csv
import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from utils.core.errors import note_output, say_on_stderr
from utils.core.whole_files import write_whole


class _Handler(logging.Handler):
    """Writes to the stdout of the moment, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stdout is None:  # closed by whoever started this process
            return
        prefix = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        try:
            line = (prefix + self.format(record)).encode(encoding, "backslashreplace").decode(encoding)
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except (OSError, ValueError) as error:  # closed, or its disk full: no reason to end a training run
            if note_output(error):
                say_on_stderr(f"WARNING: stdout can't be written ({error}); the work goes on")


def get_logger(rank: int | None = None) -> logging.Logger:
    """Return the logger of this process: plain lines on stdout.

    Args:
        rank: said once, when it is known: ranks other than 0 write errors only from then on, for what they meet is
            what rank 0 meets.
    """
    logger = logging.getLogger("lockstep")
    if not logger.handlers:
        logger.addHandler(_Handler())
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a script with its own root handler would see each line twice
    if rank is not None:
        logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    return logger


class CsvLog:
    """results.csv: a plain table of one row per epoch, which are counted from 1.

    Args:
        path: the file; made or cut to the kept rows at once.
        columns: names in order; the first is ``epoch``.
        keep_epochs: rows up to this epoch are kept; a resumed run names the last that is done, so that an epoch that is
            done again has one row. 0 = start afresh.
        spare: rows by epoch, for those that should be kept but are not there.
        enabled: whether this rank writes; the others' logs do nothing.

    Attributes:
        filled: epochs whose rows are spare ones.
        missing: epochs up to ``keep_epochs`` without a row.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        keep_epochs: int = 0,
        spare: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        assert columns[0] == "epoch"
        self.path, self.columns, self.enabled = path, tuple(columns), enabled
        self.filled: list[int] = []
        self.missing: list[int] = []
        self._rows_due: list[str] = []
        self._size = 0
        if enabled:
            self.trim(keep_epochs, spare)
            self._size = path.stat().st_size

    def append(self, row: Mapping[str, float]) -> None:
        """Add one row; it must have all columns and no others. Floats are cut to six digits.

        A row that the disk does not take is kept and written with the next one.
        """
        assert set(row) == set(self.columns), f"columns {sorted(set(row) ^ set(self.columns))} do not match"
        if not self.enabled:
            return
        self._rows_due.append(_line(_cell(row[name]) for name in self.columns))
        self._size = append_whole(self.path, "".join(self._rows_due).encode(), self._size)
        self._rows_due.clear()

    def trim(self, epoch: int, spare: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Remove the rows behind this epoch, and what is not a whole row (a run may die while it writes).

        Columns are matched by name: those that the file lacks stay empty in the rows that are kept.
        """
        rows, spare, lines = self._rows(), spare or {}, [_line(self.columns)]
        self.filled = [number for number in range(1, epoch + 1) if number not in rows and number in spare]
        self.missing = [number for number in range(1, epoch + 1) if number not in rows and number not in spare]
        rows |= {number: {name: _cell(value) for name, value in spare[number].items()} for number in self.filled}
        lines += [
            _line(rows[number].get(name, "") for name in self.columns) for number in sorted(rows) if number <= epoch
        ]
        write_whole(self.path, "".join(lines))

    def _rows(self) -> dict[int, dict[str, str]]:
        """Return what the file holds, by epoch; of an epoch that is there twice the last row."""
        if not self.path.exists():
            return {}
        text = self.path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        try:
            table = [[cell.strip() for cell in line] for line in csv.reader(whole_lines)]
        except csv.Error:  # of another program
            return {}
        header = table[0] if table else []
        rows = [dict(zip(header, cells, strict=True)) for cells in table[1:] if len(cells) == len(header)]
        found = {int(row["epoch"]): row for row in rows if re.fullmatch("[0-9]{1,9}", row.get("epoch", ""))}
        shift = 0 in found  # a table that was begun with epochs counted from 0
        return {epoch + shift: row | {"epoch": str(epoch + shift)} for epoch, row in found.items()}


def without_nan(value: Any) -> Any:
    """Return plain values with None, JSON's null, for nan and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: without_nan(element) for key, element in value.items()}
    if isinstance(value, list):
        return [without_nan(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_whole(path: Path, data: bytes, size: int) -> int:
    """Write behind the first so many bytes of a file; of what a full disk cut off before nothing stays.

    Returns:
        The size of the file.

    Raises:
        OSError: not all of it was written; the next call may begin at the same size again.
    """
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(data)
    return size + len(data)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "nan" if value is None else str(value)


def _line(cells: Iterable[str]) -> str:
    return ",".join(cells) + "\n"


class DeviceMeter:
    """Weighted means of a few values, summed where they are computed, so that a step never waits for the host.

    Args:
        size: how many values.
        device: where the sums live.
    """

    def __init__(self, size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._sums = torch.zeros(size + 1, dtype=dtype, device=device)  # the last one sums the weights

    def update(self, values: Tensor, weight: float = 1.0) -> None:
        """Add ``values`` (size,), each with this weight; none if one is not finite. No host sync."""
        values = values.detach().to(self._sums.dtype)
        counted = values.isfinite().all() * weight
        self._sums[:-1] += values.nan_to_num(posinf=0, neginf=0) * counted
        self._sums[-1] += counted

    def mean(self) -> list[float]:
        """Return the means of what this meter itself has seen; see `mean_of`."""
        return mean_of(self._sums)

    def sums(self) -> Tensor:
        """Return a copy of the weighted sums and, last, of the sum of the weights (size + 1,); for `mean_of`."""
        return self._sums.clone()

    def reset(self) -> None:
        """Forget everything."""
        self._sums.zero_()

    def load(self, sums: Tensor) -> None:
        """Go on from what `sums` returned, also on another device."""
        self._sums.copy_(sums)


def mean_of(sums: Tensor, parts: int = 1) -> list[float]:
    """Return the means of a meter, nan before its first update. One host sync.

    Args:
        sums: as of `DeviceMeter.sums`; over ranks those of all of them, added up.
        parts: ranks that a value is spread over: each then adds its share of the value and the whole weight.
    """
    *values, weight = sums.tolist()
    return [value / weight * parts if weight else float("nan") for value in values]
