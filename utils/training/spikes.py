"""Batches whose loss leapt far above all before them: wrong labels, broken images, or a step that was too long."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 10.0  # times the largest loss so far, as Megatron-LM has it
SETTLED = 100  # micro-batches before the first that can be one
KEPT = 0.999  # of the largest loss, from one micro-batch to the next: what was large long ago is forgotten
LONGEST = 64  # micro-batches that are remembered; many more than there are between two looks


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
            losses: of this rank, (3,), as large as those of all; what is not finite is the business of `utils.training.skips`.
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
