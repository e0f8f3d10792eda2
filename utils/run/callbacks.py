"""What happens in a run, told to whoever wants to know: events, the base class of callbacks, and what may be one.

A callback is an object of a class of your own, with a method for each event that it cares about::

    class Enough(Callback):
        def on_epoch_end(self, event: EpochEnd) -> Stop | None:
            return STOP if event.metrics and event.metrics.map50 > 0.9 else None
"""

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, ClassVar

from utils.config.flags import LOGGERS
from utils.core.errors import Problems, UserError
from utils.core.heartbeat import Phase, beat
from utils.core.logging import get_logger

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainStart:
    """Everything is ready for the first batch.

    Attributes:
        run_dir: where the run writes.
        epochs: of the whole run.
        batches_per_epoch: micro-batches of an epoch.
        names: of the classes, index = class id.
        losses: names of the loss terms.
        rates: names of the learning rates, one for each parameter group.
        flags: every flag with its value.
        hyp: every hyperparameter with its value.
        resumed_epoch: the epoch, from 1, that a resumed run goes on with; None in a new run. That epoch, or later ones,
            may have been told of before the run stopped.
    """

    run_dir: Path
    epochs: int
    batches_per_epoch: int
    names: Sequence[str]
    losses: Sequence[str]
    rates: Sequence[str]
    flags: Mapping[str, Any]
    hyp: Mapping[str, Any]
    resumed_epoch: int | None


@dataclass(frozen=True)
class Figures:
    """What a validation found; all in [0, 1], the larger the better.

    Attributes:
        precision: mean over the classes, at the best mean F1.
        recall: mean over the classes at the same confidence.
        map50: mean AP at IoU 0.5.
        map: mean AP over IoU 0.5 to 0.95.
        fitness: 0.1 mAP50 + 0.9 mAP50-95.
        class_maps: AP over IoU 0.5 to 0.95 of each class by its name, nan of one without labels; classes of equal names
            have their id behind it.
    """

    precision: float
    recall: float
    map50: float
    map: float
    fitness: float
    class_maps: Mapping[str, float]


@dataclass(frozen=True)
class EpochEnd:
    """An epoch was trained and, where it was due, validated; nothing of it is saved yet.

    Attributes:
        epoch: its number, from 1.
        epochs: of the whole run.
        train_losses: means over the epoch by name; nan if none was finite.
        val_losses: the same over the validation split; {} without a validation.
        metrics: None without a validation.
        rates: learning rates by name, at the last batch of the epoch.
        best_value: best of what ``--metric`` names in all validations so far, this one included; -1 before the first.
        better: whether this epoch's is the best so far.
        seconds: since the end of the epoch before.
    """

    epoch: int
    epochs: int
    train_losses: Mapping[str, float]
    val_losses: Mapping[str, float]
    metrics: Figures | None
    rates: Mapping[str, float]
    best_value: float
    better: bool
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on the disk, whole.

    Attributes:
        path: of last.pt; of best.pt where the disk had not taken that with its own last.pt.
        epoch: that it was saved in or after, from 1.
        better: whether its weights are the best so far.
        also: further files with the same content: best.pt, epochN.pt.
    """

    path: Path
    epoch: int
    better: bool
    also: Sequence[Path] = ()


@dataclass(frozen=True)
class TrainEnd:
    """The run is over, all its files are there.

    Attributes:
        run_dir: where they are.
        best: the weights to use; None if there are none, for they were never finite.
        metrics: of these weights, measured again; None without weights.
    """

    run_dir: Path
    best: Path | None
    metrics: Figures | None


@dataclass(frozen=True)
class ExceptionRaised:
    """Something ends the run before its end: an error, another callback's included, or Ctrl-C.

    Attributes:
        error: what was raised; it goes on to whoever started the run.
    """

    error: BaseException


class Stop(Enum):
    """What a callback may ask for."""

    STOP = "stop"


STOP = Stop.STOP  # returned by `Callback.on_epoch_end`: this epoch is the last one


# Callbacks ------------------------------------------------------------------------------------------------------------


class Callback:
    """Is told what happens in a run; override the methods that matter to you.

    Callbacks live in rank 0's process, however many devices train. Where the run starts processes of its own they are
    copies: what one keeps in itself stays there, so write to a file what you want to have later. Between two batches
    nothing is called, and an exception ends the run.

    Attributes:
        may_stop: True: the end of an epoch is told before it is decided whether the run goes on, and all ranks wait for
            the answer. False, for loggers: after that, while the others train, and results.csv has the epoch.
        not_written: a file that lacks figures as the disk did not take them, "" if none does; a run that ends so has
            failed.
    """

    may_stop: ClassVar[bool] = True
    not_written: str = ""

    def on_train_start(self, event: TrainStart) -> None:
        """Everything is ready for the first batch."""

    def on_epoch_end(self, event: EpochEnd) -> Stop | None:
        """Look at an epoch; return `STOP` to make it the last one."""
        return None

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """A checkpoint was written."""

    def on_train_end(self, event: TrainEnd) -> None:
        """All is done and written."""

    def on_exception(self, event: ExceptionRaised) -> None:
        """The run fails; only a callback whose `on_train_start` came to its end is told, and not the one that failed.

        An exception in here is logged, and the first one goes on.
        """


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """The callbacks of a run, told one after another; empty off rank 0. A context manager that tells of exceptions.

    Args:
        members: in the order that they are told.

    Raises:
        UserError: not all of them are callbacks.
    """

    def __init__(self, members: Sequence[Callback] = ()) -> None:
        check_callbacks(members)
        self.members = tuple(members)
        self._started: list[Callback] = []
        self._failed: Callback | None = None

    def __enter__(self) -> "Callbacks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        for callback in self._started:
            if callback is self._failed:
                continue
            try:
                callback.on_exception(ExceptionRaised(error))
            except BaseException:  # whatever it is, the first one is what the run ends with
                name = type(callback).__name__
                get_logger().exception(f"{name}.on_exception failed as well, after the error that ends the run:")

    def train_start(self, event: TrainStart) -> None:
        """Tell all that the run begins."""
        for callback in self.members:
            self._tell(callback, "on_train_start", event)
            self._started.append(callback)

    def epoch_end(self, event: EpochEnd) -> bool:
        """Tell those that may stop the run of an epoch, before it is decided whether another one follows.

        Returns:
            Whether one of them asks to stop; all have been told then.
        """
        asking = [
            type(callback).__name__
            for callback in self.members
            if callback.may_stop and self._tell(callback, "on_epoch_end", event) is STOP
        ]
        if asking:
            get_logger().info(f"{' and '.join(asking)} asked to stop after epoch {event.epoch} of {event.epochs}")
        return bool(asking)

    def not_written(self) -> list[str]:
        """Return the files that lack figures of the run."""
        return [callback.not_written for callback in self.members if callback.not_written]

    def log_epoch(self, event: EpochEnd) -> None:
        """Tell the others of the epoch, while no rank waits."""
        for callback in self.members:
            if not callback.may_stop:
                self._tell(callback, "on_epoch_end", event)

    def checkpoint(self, event: CheckpointSaved) -> None:
        """Tell all of a checkpoint."""
        for callback in self.members:
            self._tell(callback, "on_checkpoint", event)

    def train_end(self, event: TrainEnd) -> None:
        """Tell all that the run is over."""
        for callback in self.members:
            self._tell(callback, "on_train_end", event)

    def _tell(self, callback: Callback, hook: str, event: object) -> Stop | None:
        beat(Phase.FILES)
        try:
            answer = getattr(callback, hook)(event)
            may_stop = hook == "on_epoch_end" and callback.may_stop
            if answer is not None and not (may_stop and answer is STOP):
                wanted = "STOP or None" if may_stop else "None"
                raise TypeError(f"{type(callback).__name__}.{hook} returned {answer!r}; it returns {wanted}")
        except BaseException:
            self._failed = callback
            raise
        return answer


# What may be a callback -----------------------------------------------------------------------------------------------


BUILT_IN = f"the built-in loggers by name, loggers={list(LOGGERS)}"


def check_callbacks(callbacks: object, argument: str = "callbacks") -> None:
    """Check that these are objects of subclasses of `Callback` whose methods will be called.

    Args:
        callbacks: what a user gave.
        argument: its name, for messages.

    Raises:
        UserError: lists all that are not.
    """
    problems = Problems()
    for position, callback in enumerate(_listed(callbacks, argument)):
        where = f"{argument}[{position}]"
        if isinstance(callback, type):
            problems.add(f"{where} is the class {callback.__name__} itself; give an object: {callback.__name__}()")
        elif not isinstance(callback, Callback):
            problems.add(
                f"{where} is {_described(callback)}, not a callback; write a subclass of lockstep.Callback at "
                f"the top level of a module, or use {BUILT_IN}"
            )
        else:
            for name in dir(type(callback)):
                if name.startswith("on_") and name not in HOOKS:
                    problems.add(
                        f"{where}, {_described(callback)}, has a method {name} that nothing calls; methods that are "
                        f"called are {', '.join(HOOKS)}"
                    )
    problems.raise_if_any()


def check_picklable(callbacks: object, argument: str = "callbacks") -> None:
    """Check that these are callbacks which can travel to processes that a run starts.

    Args:
        callbacks: what a user gave.
        argument: its name, for messages.

    Raises:
        UserError: lists all that can't, and why, or that are none (`check_callbacks`); no process has been started.
    """
    problems = Problems()
    for position, callback in enumerate(_listed(callbacks, argument)):
        if (why := _obstacle(callback)) is not None:
            problems.add(
                f"{argument}[{position}] is {_described(callback)} and can't travel to the processes of a run on "
                f"several devices: {why}. Define a class at the top level of a module and keep only plain values in "
                f"its objects, or use {BUILT_IN}"
            )
    problems.raise_if_any()
    check_callbacks(callbacks, argument)


def _listed(callbacks: object, argument: str) -> Sequence[object]:
    if not isinstance(callbacks, list | tuple):
        raise UserError(f"{argument} takes a list of callbacks, not {_described(callbacks)}")
    return callbacks


def _described(value: object) -> str:
    """Return what kind of thing a value is, in words that tell it from others."""
    if isinstance(value, FunctionType):
        return "a lambda (function)" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
    kind = type(value)
    return f"of type {kind.__qualname__}" + (f" ({kind.__module__})" if kind.__module__ != "builtins" else "")


def _obstacle(callback: object) -> str | None:
    """Return why a value can't be pickled, naming the attribute that is to blame; None if it can be."""
    why = _why_not(callback)
    if why is None:
        return None
    for name, value in getattr(callback, "__dict__", {}).items():
        if (reason := _why_not(value)) is not None:
            return f"its attribute {name} holds {reason}"
    return why


def _why_not(value: object) -> str | None:
    try:
        _Probe(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(value)
    except _NotPicklableError as error:
        return str(error)
    except Exception as error:  # pickling runs methods of the user's own classes
        return f"what Python refuses to pickle ({type(error).__name__}: {error})"
    return None


class _NotPicklableError(Exception):
    """Says what another process could not load, and why."""


class _Probe(pickle.Pickler):
    """Finds what another process could not load, also what pickle itself would let pass or explain badly."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what has a better reason than pickle's own; everything else goes its ordinary way."""
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            raise _NotPicklableError("an open file, which belongs to this process")
        if isinstance(obj, type | FunctionType):
            kind = "class" if isinstance(obj, type) else "function"
            if obj.__name__ == "<lambda>":
                raise _NotPicklableError("a lambda, which has no name to import it by")
            if "<locals>" in obj.__qualname__:
                raise _NotPicklableError(
                    f"the {kind} {obj.__qualname__}, defined inside a function, where no import can reach it"
                )
            if obj.__module__ == "__main__" and not _main_is_a_file():
                raise _NotPicklableError(
                    f"the {kind} {obj.__qualname__}, defined in a session (REPL, notebook) and not in a file"
                )
        return NotImplemented


def _main_is_a_file() -> bool:
    """Whether another process could run the file that this one was started with; not so in a REPL or a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and Path(path).is_file()
