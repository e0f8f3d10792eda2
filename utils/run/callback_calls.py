"""The calls of callbacks: events told to all of them on rank 0, what they answer, what becomes of those that fail."""

from collections.abc import Sequence
from types import TracebackType

from utils.core.heartbeat import Phase, beat
from utils.core.logging import get_logger
from utils.run.callback_checks import check_callbacks
from utils.run.callbacks import STOP, Callback, CheckpointSaved, EpochEnd, ExceptionRaised, Stop, TrainEnd, TrainStart


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
