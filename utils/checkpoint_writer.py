"""Checkpoints written by a thread while training goes on: training waits for a copy of the state only."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint_files import NonFiniteError, check_finite, write_checkpoint
from utils.logging import get_logger


@dataclass(frozen=True)
class Outcome:
    """How a write ended that the disk did not stop.

    Attributes:
        path: of last.pt.
        also: further files with the same content: best.pt, epochN.pt.
        epoch: that it was saved in or after, 0-based.
        fitness: the best so far.
        better: whether that is of these weights.
        written: whether all is on the disk, whole; False if the weights were not finite: they replace nothing.
    """

    path: Path
    also: tuple[Path, ...]
    epoch: int
    fitness: float
    better: bool
    written: bool = True


class CheckpointWriter:
    """Writes one checkpoint at a time; rank 0's.

    A write that fails is a warning at once, and training goes on. The next write makes up for it: best weights that
    the disk did not take are kept until it does, and always in place before a newer last.pt is.

    Attributes:
        failed: whether the disk did not take the last write.
    """

    def __init__(self) -> None:
        self.failed = False
        self._copy: dict[str, Any] = {}  # of the state; its memory serves the next write again
        self._owed: tuple[dict[str, Any], Path] | None = None  # best weights that the disk did not take
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._outcomes: list[Outcome] = []

    def write(self, state: Mapping[str, Any], goal: Outcome, best: Path) -> None:
        """Copy a state and begin to write it; waits for the write before, should that still run.

        Args:
            state: see `utils.torch_utils.save_checkpoint`.
            goal: where to, and why.
            best: the name among ``goal.also`` of better weights.

        Raises:
            TypeError: the write before met something that is no plain value.
        """
        self.wait()
        if self._owed is not None and self._owed[0] is self._copy:
            self._copy = {}
        self._copy = copy_state(state, self._copy)
        self._thread = threading.Thread(target=self._work, args=(self._copy, goal, best), name="checkpoint writer")
        self._thread.start()

    def _work(self, state: dict[str, Any], goal: Outcome, best: Path) -> None:
        try:
            check_finite(state, goal.path)
            if goal.better:
                self._owed = None  # better ones take their place
            elif self._owed is not None:
                write_checkpoint(*self._owed, (), keep_previous=False)
                self._owed = None
            write_checkpoint(state, goal.path, goal.also, keep_previous=True)
        except NonFiniteError as error:
            get_logger().warning(f"{error}; the checkpoint before it stays")
            self._outcomes.append(replace(goal, written=False))
        except OSError as error:
            self.failed = True
            if goal.better:
                self._owed = (state, best)
            get_logger().warning(
                f"{goal.path} was not written: {error}; the one before it stays, training goes on, and the next save "
                "tries again"
            )
        except BaseException as error:  # raised in the thread that trains, at its next look
            self._error = error
        else:
            self.failed = False
            self._outcomes.append(goal)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def outcomes(self) -> list[Outcome]:
        """Return how the writes ended that ended since the last call; does not wait."""
        if self._error is not None:
            self.wait()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """Wait for the last write, whatever it met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def copy_state(state: Any, old: Any) -> Any:
    """Copy nested dicts, lists and tuples and the tensors in them, to the CPU.

    Args:
        state: what is copied.
        old: an earlier copy that is not needed any more; its tensors are filled anew where they fit.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    copied = _copied(state, old, sources, targets)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    return copied


def _copied(value: Any, old: Any, sources: list[Tensor], targets: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if not (isinstance(old, Tensor) and old.shape == value.shape and old.dtype == value.dtype):
            return value.detach().to("cpu", copy=True)
        sources.append(value)
        targets.append(old)
        return old
    if isinstance(value, Mapping):
        olds = old if isinstance(old, dict) else {}
        return {key: _copied(item, olds.get(key), sources, targets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        befores = old if isinstance(old, (list, tuple)) and len(old) == len(value) else [None] * len(value)
        items = [_copied(item, before, sources, targets) for item, before in zip(value, befores, strict=True)]
        return items if isinstance(value, list) else tuple(items)
    return value
