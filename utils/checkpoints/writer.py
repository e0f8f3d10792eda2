"""Checkpoints written by a thread while training goes on: training waits for a copy of the state only."""

from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from utils.checkpoints.files import NonFiniteError, check_finite, write_checkpoint
from utils.core.errors import NotWrittenError
from utils.core.heartbeat import Phase, beat, beating
from utils.core.logging import get_logger

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
        undone: what `write_now` did not get onto the disk, "" if it did.
        left_out: names of files that were due with a write that came to nothing, and are not made up for.

    Args:
        check: called when a file is whole and about to take its place; what it raises keeps it from that, and comes
            out of the next call here.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.failed, self._check = False, check
        self.left_out: list[str] = []
        self.undone = ""
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
        self._writing = self._thread.submit(self._work, copy_state(state), goal, best)

    def _work(self, state: dict[str, Any], goal: Outcome, best: Path) -> None:
        self.failed, finite = True, False  # until it is known better
        try:
            finite = self._is_finite(state, goal)
            if goal.better and finite:
                self._owed = None  # better ones take their place
            self._pay()
            if finite:
                write_checkpoint(state, goal.path, goal.also, keep_previous=True, check=self._check)
                self.failed = False
            else:
                self._leave_out(goal, best)
            self._outcomes.append(replace(goal, written=finite))
        except NotWrittenError as error:
            get_logger().warning(str(error))  # the run may end before it asks
            raise
        except OSError as error:
            if goal.better and finite:
                self._owed = (state, replace(goal, path=best, also=()))
            elif not finite:
                self._outcomes.append(replace(goal, written=False))
            left_out = self._leave_out(goal, best)
            get_logger().warning(
                f"{goal.path} was not written: {error}; the one before it stays, training goes on, and the next save "
                f"tries again{''.join(f'; {name} is left out' for name in left_out)}"
            )

    def _leave_out(self, goal: Outcome, best: Path) -> list[str]:
        names = [path.name for path in goal.also if path != best]
        self.left_out += names
        return names

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
            write_checkpoint(state, goal.path, (), keep_previous=False, check=self._check)
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

    def write_now(self, work: Callable[[], None], what: str) -> None:
        """Wait until nothing is being written, then for work that writes something else; raises what that raises.

        Args:
            work: what to do.
            what: is ``undone`` if the disk does not take it.
        """
        self.wait()
        self._writing = self._thread.submit(work)
        try:
            self.wait()
        except OSError:
            self.undone = what
            raise

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


def copy_state(value: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """Copy nested dicts, lists and tuples and the tensors in them to the CPU.

    Args:
        value: a state.
        copies: of the tensors so far, by id: a tensor that stands in a state twice is one tensor in its copy, too.
    """
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return copies[id(value)]
    if isinstance(value, Mapping):
        return {key: copy_state(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_state(item, copies) for item in value)
    return value
