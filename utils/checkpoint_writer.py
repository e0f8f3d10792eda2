"""Checkpoints written by a thread while training goes on: training waits for a copy of the state only."""

from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint_files import NonFiniteError, check_finite, write_checkpoint
from utils.heartbeat import Phase, beat, beating
from utils.logging import get_logger

PATIENCE = 600  # seconds for which a write is slow rather than stuck


@dataclass(frozen=True)
class Outcome:
    """How a write ended that the disk did not stop.

    Attributes:
        path: of last.pt; of best.pt where that is made up for.
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
        failed: whether the last write came to nothing: the disk did not take it, or weights were not finite.
    """

    def __init__(self) -> None:
        self.failed = False
        self._copy: dict[str, Any] = {}
        self._copies = StateCopies()
        self._owed: tuple[dict[str, Any], Outcome] | None = None  # best weights that the disk did not take, as best.pt
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint writer")  # to start one for each write takes longer
        self._writing: futures.Future[None] | None = None
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
            self._copies.keep()
        self._copy = self._copies.take(state)
        self._writing = self._thread.submit(self._work, self._copy, goal, best)

    def _work(self, state: dict[str, Any], goal: Outcome, best: Path) -> None:
        self.failed, finite = True, False  # until it is known better
        try:
            finite = self._is_finite(state, goal)
            if goal.better and finite:
                self._owed = None  # better ones take their place
            self._pay()
            if finite:
                write_checkpoint(state, goal.path, goal.also, keep_previous=True)
                self.failed = False
            self._outcomes.append(replace(goal, written=finite))
        except OSError as error:
            if goal.better and finite:
                self._owed = (state, replace(goal, path=best, also=()))
            elif not finite:
                self._outcomes.append(replace(goal, written=False))
            get_logger().warning(
                f"{goal.path} was not written: {error}; the one before it stays, training goes on, and the next save "
                f"tries again{''.join(f'; {path.name} is left out' for path in goal.also if path != best)}"
            )

    def _is_finite(self, state: dict[str, Any], goal: Outcome) -> bool:
        try:
            check_finite(state, goal.path)
        except NonFiniteError as error:
            get_logger().warning(f"{error}; the checkpoint before it stays")
            return False
        return True

    def _pay(self) -> None:
        """Write best weights that the disk did not take before."""
        if self._owed is not None:
            state, goal = self._owed
            write_checkpoint(state, goal.path, (), keep_previous=False)
            self._owed = None
            self._outcomes.append(goal)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            beat(Phase.SAVING)
            for _ in beating(range(PATIENCE)):
                if futures.wait([self._writing], 1.0).done:
                    break
            futures.wait([self._writing])
            written, self._writing = self._writing, None
            written.result()  # raises what was raised in the thread

    def write_now(self, work: Callable[[], None]) -> None:
        """Wait until nothing is being written, then for work that writes something else; raises what that raises."""
        self.wait()
        self._writing = self._thread.submit(work)
        self.wait()

    def outcomes(self) -> list[Outcome]:
        """Return how the writes ended that ended since the last call; does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()
        outcomes = self._outcomes[:]
        del self._outcomes[: len(outcomes)]  # the thread may have added one meanwhile
        return outcomes

    def close(self) -> None:
        """Wait for the last write, whatever it met, and end the thread."""
        self._thread.shutdown()


class StateCopies:
    """Copies of a state on the CPU, each in the memory of the one before.

    Tensors are told apart by identity, which is much faster than a comparison of what they look like: those of a run
    are the same ones from save to save.
    """

    def __init__(self) -> None:
        self._pairs: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id of the original

    def take(self, state: Any) -> Any:
        """Copy nested dicts, lists and tuples and the tensors in them; the copy before is overwritten.

        What stands in a state twice stands twice in its copy.
        """
        before, self._pairs = self._pairs, {}
        copied = self._copied(state, before)
        pairs = self._pairs.values()
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])
        return copied

    def keep(self) -> None:
        """Leave the copy that was taken last alone from here on; the next one gets new memory."""
        self._pairs = {}

    def _copied(self, value: Any, before: Mapping[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, Tensor):
            name = id(value)
            pair = self._pairs.get(name) or before.get(name) or (value, torch.empty_like(value, device="cpu"))
            self._pairs[name] = pair
            return pair[1]
        if isinstance(value, (dict, Mapping)):  # the first is much faster to ask for
            return {key: self._copied(item, before) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._copied(item, before) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value
