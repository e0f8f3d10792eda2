"""Batches that go wrong: windows that were skipped because their gradients were not finite, losses that leapt."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST = 64  # micro-batches that are remembered; many more than there are between two looks
LIMIT = 10  # windows in a row after which a run has gone wrong
LIMIT_FP16 = 26  # the same where the loss scale, 2^16 at first, is still being found


@dataclass(frozen=True)
class Skipped:
    """A window that was skipped.

    Attributes:
        step: its optimizer step, 0-based.
        images: of this rank, in those of its micro-batches whose own loss was not finite; [] if all losses were.
    """

    step: int
    images: list[int]


class SkipLog:
    """Notes taken on the device and read at log points, so that no step waits for the host.

    Attributes:
        in_row: windows skipped one after another, up to the last one, as of the last `read`.

    Args:
        device: of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self.in_row = 0
        self._spoiled = torch.zeros(LONGEST, device=device)
        self._skipped = torch.zeros(LONGEST, device=device)
        self._batches: deque[tuple[int, Sequence[int]]] = deque(maxlen=LONGEST)  # step and images since the last read
        self._steps: deque[int] = deque(maxlen=LONGEST)

    def add_batch(self, step: int, images: Sequence[int], losses: Tensor) -> None:
        """Note a micro-batch.

        Args:
            step: optimizer steps before it.
            images: places of its images in the label index.
            losses: of this rank, (3,).
        """
        if len(self._batches) == LONGEST:  # of a window with so many spoiled ones the first have to do
            return
        self._spoiled[len(self._batches)] = losses.detach().isfinite().logical_not().any()
        self._batches.append((step, images))

    def add_window(self, step: int, found_inf: Tensor) -> None:
        """Note the end of a window.

        Args:
            step: optimizer steps before it.
            found_inf: () 1 if it was skipped.
        """
        self._skipped[len(self._steps)] = found_inf
        self._steps.append(step)

    def read(self) -> list[Skipped]:
        """Return the windows that were skipped since the last call. One host sync; the same steps on all ranks."""
        spoiled, skipped = torch.stack((self._spoiled, self._skipped)).tolist()
        found = []
        for step, was_skipped in zip(self._steps, skipped, strict=False):
            self.in_row = self.in_row + 1 if was_skipped else 0
            if was_skipped:
                of_step = [pair for pair in zip(self._batches, spoiled, strict=False) if pair[0][0] == step]
                found.append(Skipped(step, [image for (_, images), bad in of_step if bad for image in images]))
        ended = self._steps[-1] if self._steps else -1
        # Of a window that is not done only what was spoiled is kept, so that the window may be of any length.
        current = [batch for batch, bad in zip(self._batches, spoiled, strict=False) if bad and batch[0] > ended]
        self._spoiled[: len(current)] = 1
        self._batches = deque(current, LONGEST)
        self._steps.clear()
        return found


# Losses that leap -----------------------------------------------------------------------------------------------------

FACTOR = 10.0  # times the largest loss so far, as Megatron-LM has it
SETTLED = 100  # micro-batches before the first that can be one
KEPT = 0.999  # of the largest loss, from one micro-batch to the next: what was large long ago is forgotten


@dataclass(frozen=True)
class Spike:
    """A micro-batch of this rank.

    Attributes:
        step: its optimizer step, 0-based.
        loss: all parts added up.
        before: the largest before it.
        images: its images.
    """

    step: int
    loss: float
    before: float
    images: Sequence[int]


class SpikeLog:
    """Notes taken on the device and read at log points, so that no step waits for the host.

    Each rank compares its own images' loss. They are of one process: a resumed run settles anew.

    Args:
        device: of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._seen = 0
        self._largest = torch.zeros((), device=device)
        self._noted = torch.zeros(2, LONGEST, device=device)  # losses, and the largest before each
        self._batches: list[tuple[int, Sequence[int]]] = []  # steps and images since the last read, from SETTLED on
        self._found: list[Spike] = []

    def add(self, step: int, images: Sequence[int], losses: Tensor) -> None:
        """Note a micro-batch.

        Args:
            step: optimizer steps before it.
            images: places of its images in the label index.
            losses: of this rank, (3,), as large as those of all; what is not finite is the business of
                `SkipLog`.
        """
        loss = losses.detach().sum()
        if self._seen >= SETTLED and len(self._batches) < LONGEST:
            self._noted[:, len(self._batches)] = torch.stack((loss, self._largest))
            self._batches.append((step, images))
        self._seen += 1
        self._largest = torch.maximum(KEPT * self._largest, loss.nan_to_num(0.0, 0.0, 0.0))

    def read(self) -> None:
        """Look at what was noted since the last call, at least every LONGEST micro-batches. One host sync."""
        for (step, images), loss, before in zip(self._batches, *self._noted.tolist(), strict=False):
            if math.isfinite(loss) and loss > FACTOR * before:
                self._found.append(Spike(step, loss, before, images))
        self._batches.clear()

    def take(self) -> list[Spike]:
        """Return what was found since the last call. One host sync."""
        self.read()
        taken, self._found = self._found, []
        return taken
