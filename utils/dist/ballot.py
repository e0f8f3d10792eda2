"""What the ranks wish for, agreed on without a collective of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from utils.core.heartbeat import waiting
from utils.dist.place import DistEnv


class Ballot:
    """What the ranks wish for at the end of a window, added up on the way of a collective that is there anyway.

    Where computing is not on the CPU, reading the sums at once would make the host wait for the device: there they are
    read when the next ones are, so all ranks act a window later.
    """

    def __init__(self, env: DistEnv) -> None:
        self._env = env
        self._on_the_way: tuple[Tensor, torch.cuda.Event, int] | None = None

    def cast(self, wishes: Sequence[bool], place: int) -> Tensor:
        """Return what this rank has to say, int64 (len(wishes) + 1,), to be added up over ranks.

        Args:
            wishes: each yes or no.
            place: micro-batches of the run that this rank has done.
        """
        return torch.tensor([*wishes, place], dtype=torch.int64)

    def count(self, sums: Tensor, place: int) -> list[bool]:
        """Return for each wish whether any rank has it, the same on all ranks.

        Args:
            sums: of what the ranks cast.
            place: that this rank cast.

        Raises:
            RuntimeError: the ranks are not at the same place.
        """
        if self._env.device.type != "cuda":
            return self._read(sums, place)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
        before, copied = self._on_the_way, torch.cuda.Event()
        copied.record()
        self._on_the_way = on_host, copied, place
        if before is None:
            return [False] * (len(sums) - 1)
        with waiting:
            before[1].synchronize()  # of the window before, whose work is done while this one's is still queued
        return self._read(before[0], before[2])

    def _read(self, sums: Tensor, place: int) -> list[bool]:
        *wishes, places = sums.tolist()
        if places != place * self._env.world_size:
            raise RuntimeError(
                f"the ranks are not at the same batch any more: rank {self._env.rank} has done {place}, and all "
                f"{self._env.world_size} together {places}; one of them left out a batch or did one twice"
            )
        return [wish > 0 for wish in wishes]
