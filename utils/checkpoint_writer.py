"""Checkpoints written by a thread while training goes on: training waits for a copy of the state only."""

from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint_files import NonFiniteError, check_finite, write_checkpoint
from utils.errors import NotWrittenError
from utils.heartbeat import Phase, beat, beating
from utils.logging import get_logger

ONE_THREAD = 1 << 15  # values; torch shares more than that out among threads (at::internal::GRAIN_SIZE)
ON_DEVICE = 1 << 24  # values of a part on a device: 64 MiB of float32
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

    Args:
        check: called when a file is whole and about to take its place; what it raises keeps it from that, and comes
            out of the next call here.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.failed, self._check = False, check
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
                write_checkpoint(state, goal.path, goal.also, keep_previous=True, check=self._check)
                self.failed = False
            self._outcomes.append(replace(goal, written=finite))
        except NotWrittenError as error:
            get_logger().warning(str(error))  # the run may end before it asks
            raise
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

    A state has hundreds of small tensors, and to copy them one by one takes longer than to move their bytes. Those of a
    run are the same ones from save to save, so their copies lie side by side and are filled by one call.
    """

    def __init__(self) -> None:
        self._block = _Block([])
        # Tensors that are not in the block, with their copies; by id, which is theirs while they are held here.
        self._others: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, state: Any) -> Any:
        """Copy nested dicts, lists and tuples and the tensors in them; the copy before is overwritten.

        A tensor that stands in a state twice is one tensor in its copy, too.
        """
        before, self._others = self._others, {}
        copied = self._copied(state)
        self._block.fill()
        first = not self._block.sources
        steady = [
            tensor for name, (tensor, _) in self._others.items() if _is_dense(tensor) and (first or name in before)
        ]
        if steady:
            self._block = _Block(self._block.sources + steady)
        return copied

    def keep(self) -> None:
        """Leave the copy that was taken last alone from here on; the next one gets new memory."""
        self._block = _Block(self._block.sources)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = id(value)
            copy = self._block.copies.get(name)
            if copy is None:
                _, copy = self._others.setdefault(name, (value, value.detach().to("cpu", copy=True)))
            return copy
        if isinstance(value, (dict, Mapping)):  # the first is much faster to ask for
            return {key: self._copied(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._copied(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value


class _Block:
    """Copies of some tensors, side by side in memory.

    Args:
        sources: dense ones; each is copied as it lies in memory.

    Attributes:
        copies: of the sources, on the CPU, by the id of the source; each in a storage of its own, as files are to have.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        self.sources = sources
        self.copies: dict[int, Tensor] = {}
        self._parts: list[tuple[list[Tensor], Tensor]] = []  # sources of one kind, and all their copies in one piece
        self._places: list[int] = []
        for alike in _alike(sources):
            dtype = alike[0].dtype
            whole = torch.empty(sum(source.numel() for source in alike), dtype=dtype)
            memory, at = whole.view(torch.uint8).numpy(), 0
            for source in alike:
                place = torch.from_numpy(memory[at : at + source.nbytes]).view(dtype)
                self.copies[id(source)] = place.as_strided(source.size(), source.stride())
                at += source.nbytes
            self._parts.append((alike, whole))
        self._look()

    def _look(self) -> None:
        """Note where the sources are."""
        self._places = [source.data_ptr() for source in self.sources]
        self._flat = [
            [source.detach().as_strided((source.numel(),), (1,)) for source in alike] for alike, _ in self._parts
        ]

    def fill(self) -> None:
        """Copy what the sources hold now."""
        if [source.data_ptr() for source in self.sources] != self._places:
            self._look()  # one was given other memory
        with torch.no_grad():
            for flat, (_, whole) in zip(self._flat, self._parts, strict=True):
                if len(flat) > 1 and flat[0].device.type == "cpu":
                    torch.cat(flat, out=whole)
                else:
                    whole.copy_(torch.cat(flat) if len(flat) > 1 else flat[0])


def _alike(sources: list[Tensor]) -> list[list[Tensor]]:
    """Divide tensors into parts of one device and dtype, in which order does not matter.

    On the CPU large ones stay by themselves, and small ones come together for as long as torch joins them in one
    thread, which takes a tenth of the time per tensor. On a device a part is joined there first, and needs its memory.
    """
    parts: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
    for source in sorted(sources, key=lambda tensor: tensor.numel()):
        of_kind = parts.setdefault((source.device, source.dtype), [[]])
        together = sum(tensor.numel() for tensor in of_kind[-1]) + source.numel()
        if of_kind[-1] and together >= (ONE_THREAD if source.device.type == "cpu" else ON_DEVICE):
            of_kind.append([])
        of_kind[-1].append(source)
    return [part for of_kind in parts.values() for part in of_kind if part]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
