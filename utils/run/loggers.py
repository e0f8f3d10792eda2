"""The built-in loggers: where the figures of a run go, by name.

``csv`` is part of every run: results.png and a resumed run build on results.csv. Others on the same interface are
written as any callback is, with ``may_stop`` False.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from utils.config.flags import LOGGERS
from utils.core.errors import UserError, nearest
from utils.core.logging import CsvLog, append_whole, get_logger, without_nan
from utils.core.whole_files import write_whole
from utils.run.callbacks import Callback, EpochEnd, ExceptionRaised, Stop, TrainEnd, TrainStart
from utils.run.folder import versions

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FIGURES = {  # names in results.csv, as YOLOv5 has them
    "precision": "metrics/precision",
    "recall": "metrics/recall",
    "map50": "metrics/mAP_0.5",
    "map": "metrics/mAP_0.5:0.95",
}
JSONL = "results.jsonl"
TENSORBOARD_FILES = "events.out.tfevents.*"
TENSORBOARD = "the TensorBoard file"


def loggers_from_names(names: Iterable[str]) -> list[Callback]:
    """Make loggers, ``csv`` always among them; nothing is written yet.

    Raises:
        UserError: an unknown name, or a logger whose package is not installed.
    """
    wanted = dict.fromkeys(["csv", *names])
    for name in wanted:
        if name not in _LOGGERS:
            raise UserError(f"--loggers is one of {', '.join(LOGGERS)}, not {name!r}{nearest(name, LOGGERS)}")
    return [_LOGGERS[name]() for name in wanted]


def columns(start: TrainStart) -> tuple[str, ...]:
    """Return the columns of results.csv in their order, ``epoch`` first."""
    train, val = ([f"{split}/{name}_loss" for name in start.losses] for split in ("train", "val"))
    return ("epoch", *train, *FIGURES.values(), *val, *(f"x/{name}" for name in start.rates))


def figures(event: EpochEnd) -> dict[str, float]:
    """Return the figures of an epoch by their names in results.csv; those of a validation only if there was one."""
    found = {f"train/{name}_loss": value for name, value in event.train_losses.items()}
    if event.metrics is not None:
        found |= {column: getattr(event.metrics, name) for name, column in FIGURES.items()}
    found |= {f"val/{name}_loss": value for name, value in event.val_losses.items()}
    return found | {f"x/{name}": value for name, value in event.rates.items()}


class FileLogger(Callback):
    """A logger whose files a run can do without for a while: a disk that does not take them is a warning, said once."""

    may_stop: ClassVar[bool] = False
    _said = False

    @contextlib.contextmanager
    def _or_warn(self, what: str) -> Iterator[None]:
        try:
            yield
            self.not_written = ""  # with this epoch came what was due from others
        except OSError as error:
            self.not_written = what
            if not self._said:
                get_logger().warning(f"{what} can't be written ({error}); training goes on")
            self._said = True


class CsvLogger(FileLogger):
    """results.csv: one row per epoch."""

    def on_train_start(self, event: TrainStart) -> None:
        """Make the file, or cut off the epochs that are done again; rows that are gone are taken from results.jsonl."""
        done, log = (event.resumed_epoch or 1) - 1, get_logger()
        spare = _figures_in(event.run_dir / JSONL) if done else {}
        self._log = CsvLog(event.run_dir / "results.csv", columns(event), done, spare)
        if self._log.filled:
            log.info(f"{len(self._log.filled)} of {done} rows were gone from results.csv; they are back from {JSONL}")
        if self._log.missing:
            log.warning(
                f"{len(self._log.missing)} of {done} rows are gone from results.csv, the first of them that of epoch "
                f"{self._log.missing[0]}; it goes on without them"
            )

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        """Add a row; what was not measured is nan."""
        with self._or_warn("results.csv"):
            self._log.append(dict.fromkeys(self._log.columns, math.nan) | {"epoch": event.epoch} | figures(event))
        return None


class JsonlLogger(FileLogger):
    """results.jsonl: a JSON object in each line; first the run with its flags and versions, then the epochs.

    Figures have the names of results.csv and all their digits; what was not measured or is not finite is null.
    """

    def on_train_start(self, event: TrainStart) -> None:
        """Write the first line, or keep the one that is there and cut off the epochs that are done again."""
        self._path, self._columns = event.run_dir / JSONL, columns(event)
        first = {key: value for key, value in asdict(event).items() if key != "resumed_epoch"}
        lines = [_json_line(first | {"run_dir": str(event.run_dir), "versions": versions()})]
        if event.resumed_epoch is not None and self._path.exists():
            there = _whole_lines(self._path)
            lines = [line for line, content in there if "flags" in content][:1] or lines
            lines += [line for line, content in there if content.get("epoch", math.inf) < event.resumed_epoch]
        write_whole(self._path, b"".join(lines))
        self._size, self._due = self._path.stat().st_size, b""

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        """Add a line."""
        row: dict[str, Any] = dict.fromkeys(self._columns) | {"epoch": event.epoch} | figures(event)
        row |= {"best_value": event.best_value, "better": event.better, "seconds": event.seconds}
        row["class_maps"] = None if event.metrics is None else dict(event.metrics.class_maps)
        self._due += _json_line(row)
        with self._or_warn(JSONL):
            self._size, self._due = append_whole(self._path, self._due, self._size), b""
        return None


def _json_line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(without_nan(content), allow_nan=False).encode() + b"\n"


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines that hold a JSON object, and these; a run may have died while it wrote one."""
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            content = json.loads(line)
        except ValueError:  # also of bytes that are no text
            continue
        if line.endswith(b"\n") and isinstance(content, dict):
            found.append((line, content))
    return found


def _figures_in(path: Path) -> dict[int, dict[str, float | None]]:
    """Return the numbers of each epoch in a results.jsonl, {} without one."""
    lines = _whole_lines(path) if path.exists() else []
    return {
        row["epoch"]: {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
        for _, row in lines
        if isinstance(row.get("epoch"), int)
    }


def _wait_for_a_later_name(run_dir: Path) -> None:
    """Wait, at most for a second, until no event file of a run has the name of the current second.

    TensorBoard reads files in the order of their names, which begin with the second of their start and go on with the
    number of the process: a run that is resumed in the same second might be read before what it goes on from.
    """
    while any(run_dir.glob(TENSORBOARD_FILES.replace("*", f"{int(time.time()):010d}.*"))):
        time.sleep(0.02)


class TensorBoardLogger(FileLogger):
    """Event files in the run folder, for ``tensorboard --logdir runs/train``; steps are epochs, counted from 1.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # one that is there may still be broken, in ways of its own
            raise UserError(
                f"--loggers tensorboard: TensorBoard can't be imported ({error}); pip install tensorboard, or leave "
                "the name out"
            ) from error
        self._make = SummaryWriter

    def on_train_start(self, event: TrainStart) -> None:
        """Open a file; of those of the run so far the epochs that are done again no longer count."""
        if event.resumed_epoch is None:
            for path in event.run_dir.glob(TENSORBOARD_FILES):  # of another run (--exist-ok)
                path.unlink()
        self._run_dir = str(event.run_dir)
        self._due: list[EpochEnd] = []
        self._writer: SummaryWriter | None = None
        with self._or_warn(TENSORBOARD):
            _wait_for_a_later_name(event.run_dir)
            self._writer = self._make(self._run_dir, purge_step=event.resumed_epoch)
            self._writer.add_text("run/flags", _table(event.flags), event.resumed_epoch or 1)
            self._writer.add_text("run/hyperparameters", _table(event.hyp), event.resumed_epoch or 1)

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        """Write what was measured; also what a killed run leaves can be read."""
        self._due.append(event)
        with self._or_warn(TENSORBOARD):
            if self._writer is None:
                self._writer = self._make(self._run_dir, purge_step=self._due[0].epoch)
            for due in self._due:
                self._add(self._writer, due)
            self._writer.flush()
            self._due.clear()
        if self._due:  # a writer that failed once fails for good: the next epoch tries with a file of its own
            self._close()
        return None

    def _add(self, writer: "SummaryWriter", event: EpochEnd) -> None:
        by_class = event.metrics.class_maps if event.metrics is not None else {}
        found = figures(event) | {f"class_mAP/{name}": value for name, value in by_class.items()}
        for name, value in found.items():
            if not (name.startswith("class_mAP/") and math.isnan(value)):  # without labels
                writer.add_scalar(name, value, event.epoch)

    def _close(self) -> None:
        with self._or_warn(TENSORBOARD):
            if self._writer is not None:
                self._writer.close()
        self._writer = None

    def on_train_end(self, event: TrainEnd) -> None:
        """Close the file."""
        self._close()

    def on_exception(self, event: ExceptionRaised) -> None:
        """Close the file."""
        self._close()


def _table(values: Mapping[str, Any]) -> str:
    """Return a table in Markdown."""
    return "\n".join(
        ["| name | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in values.items())]
    )


_LOGGERS: dict[str, Callable[[], Callback]] = {
    "csv": CsvLogger,
    "jsonl": JsonlLogger,
    "tensorboard": TensorBoardLogger,
}
