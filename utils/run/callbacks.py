"""What happens in a run, told to whoever wants to know: events, and the base class of callbacks.

A callback is an object of a class of your own, with a method for each event that it cares about::

    class Enough(Callback):
        def on_epoch_end(self, event: EpochEnd) -> Stop | None:
            return STOP if event.metrics and event.metrics.map50 > 0.9 else None
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar


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
