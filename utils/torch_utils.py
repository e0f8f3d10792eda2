"""Ranks and what passes between them, the global batch, EMA and checkpoints: what a run needs from torch itself."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from utils.checkpoints.files import check_finite, load_checkpoint, previous_path, write_checkpoint
from utils.core.errors import ENDS, LostPeerError, UserError
from utils.core.logging import get_logger
from utils.core.signals import stops_reach_c
from utils.dist.collectives import barrier, broadcast_tensors
from utils.dist.meeting import LOST, backend, connect, disconnect, loss_of_ranks
from utils.dist.place import DistEnv, dist_env, rank_device

M = TypeVar("M", bound=nn.Module)


@contextmanager
def process_group(
    device_flag: str | int | Sequence[str | int] = "", env: DistEnv | None = None, timeout: float = 10_800
) -> Iterator[DistEnv]:
    """Hold the connection between the ranks. Collective: every rank must call it.

    NCCL joins ranks on CUDA where it is there, Gloo all others, and the small objects of all.

    Args:
        device_flag: see `rank_device`.
        env: from `dist_env`; read here if not given.
        timeout: seconds that a rank waits in a collective for the others.

    Yields:
        The environment with this rank's device, made the current one.

    Raises:
        UserError: the device flag is wrong, or the ranks do not find each other.
        LostPeerError: another rank ended, or did not come to a collective in time.
    """
    env = dist_env() if env is None else env
    env = replace(env, device=rank_device(device_flag, env))
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    get_logger(env.rank)
    if env.world_size == 1:
        yield env
        return
    disconnect()  # from what an exception has left
    done = False
    try:
        connect(env, timedelta(seconds=timeout))
        with stops_reach_c() if backend(env) == "NCCL" else nullcontext():
            yield env
            barrier(env)  # whoever leaves first would take the meeting point along
        done = True
    except ENDS:  # said by us, whatever the words
        raise
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST):
            raise
        raise LostPeerError(loss_of_ranks(str(error), env, timeout)) from error
    finally:
        disconnect(failed=not done)


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is shared out; independent of the ranks but for ``local_batch``.

    Attributes:
        global_batch: images of one forward pass over all ranks.
        local_batch: of them on each rank.
        world_size: ranks.
        nbs: nominal batch that the recipe is tuned for.
        accumulate: micro-batches per optimizer step once the warm-up is over.
    """

    global_batch: int
    local_batch: int
    world_size: int
    nbs: int
    accumulate: int


def split_global_batch(batch: int, world_size: int, nbs: int = 64) -> BatchPlan:
    """Share a global batch out over the ranks; nothing else in the program divides it.

    Raises:
        UserError: the batch is not a positive multiple of the ranks.
    """
    if batch < 1 or batch % world_size:
        below, above = batch // world_size * world_size, (batch // world_size + 1) * world_size
        valid = f"{below} or {above}" if below > 0 else str(max(above, world_size))
        raise UserError(
            f"--batch-size {batch} is the batch of all processes together and must be a positive multiple of their "
            f"number, {world_size}; use {valid}"
        )
    if nbs < 1:
        raise UserError(f"--nbs {nbs} must be at least 1; the recipes are tuned for 64")
    return BatchPlan(batch, batch // world_size, world_size, nbs, max(round(nbs / batch), 1))


def foreach_lerp(tensors: list[Tensor], ends: list[Tensor], weight: float | Tensor) -> None:
    """Move tensors toward others in place; weight 0 leaves them, 1 takes the others.

    Torch has no fused kernel for a weight () that is on the device; three of them and a copy of the tensors stand in.
    """
    if isinstance(weight, float):
        torch._foreach_lerp_(tensors, ends, weight)
        return
    change = torch._foreach_sub(ends, tensors)
    torch._foreach_mul_(change, weight)
    torch._foreach_add_(tensors, change)


class ModelEMA(Generic[M]):
    """Exponential moving average of everything in a model's state dict, BatchNorm statistics included.

    After update t an entry is d e + (1 - d) m with d(t) = decay (1 - exp(-t / tau)): short memory first, long later.
    Entries that are not floating (counters) are copied.

    Attributes:
        module: the averaged copy, in eval mode, without gradients.
        updates: t, every call of `update` counted, on the host. Skipped ones count too, so that the host need not ask
            the device; they are rare, and d hardly differs.
        skipped: how many of them were skipped, () float32 on the device.

    Args:
        raw_model: on its final device and in its final memory format.
        decay: what d tends to.
        tau: updates after which d has reached 63 % of that.
        buffers_only: follow the buffers and leave the weights, for ranks other than 0: theirs come with `broadcast`.
    """

    def __init__(self, raw_model: M, decay: float = 0.9999, tau: float = 2000.0, *, buffers_only: bool = False) -> None:
        self.module: M = copy.deepcopy(raw_model).eval().requires_grad_(False)
        self.decay, self.tau = decay, tau
        self.updates = 0
        self.buffers_only = buffers_only
        self.skipped = torch.zeros((), device=next(raw_model.parameters()).device)
        self._pairs: list[tuple[Tensor, Tensor]] = []  # of the average and of the model, made by the first update

    @torch.no_grad()
    def update(self, raw_model: nn.Module, found_inf: Tensor | None = None) -> None:
        """Move toward the model after an optimizer step; the host does not wait.

        Args:
            raw_model: as after the step; if the step was skipped, with its buffers restored. From the first update on
                its parameters and buffers are the same tensors.
            found_inf: () 1 leaves the average as it was.
        """
        self.updates += 1
        self._pairs = self._pairs or self._pair(raw_model)
        weight: float | Tensor = 1.0 - self.decay * (1.0 - math.exp(-self.updates / self.tau))
        if found_inf is not None:
            self.skipped += found_inf
            weight = weight * (1.0 - found_inf)
            weight = weight.item() if found_inf.device.type == "cpu" else weight  # on the CPU there is no wait
        floating = [pair for pair in self._pairs if pair[0].is_floating_point()]
        counters = [pair for pair in self._pairs if not pair[0].is_floating_point()]
        foreach_lerp([own for own, _ in floating], [its for _, its in floating], weight)
        if counters:
            torch._foreach_copy_([own for own, _ in counters], [its for _, its in counters])

    def _pair(self, raw_model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return what follows which: walks through a network take longer than an update."""
        own, its = self.module.state_dict(), raw_model.state_dict()
        distinct = {tensor.data_ptr(): name for name, tensor in own.items()}.values()  # tied ones once
        followed = {name for name, _ in raw_model.named_buffers()} if self.buffers_only else set(own)
        return [(own[name], its[name]) for name in distinct if name in followed]

    def broadcast(self, env: DistEnv) -> None:
        """Give rank 0's average to all ranks' copies. Collective: every rank must call it."""
        broadcast_tensors(list(self.module.state_dict().values()), env)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that moves; the very tensors, not copies."""
        return {"module": self.module.state_dict(), "updates": self.updates, "skipped": int(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
        self.skipped.fill_(state["skipped"])


def save_checkpoint(
    state: Mapping[str, Any], path: Path, also: Sequence[Path] = (), *, keep_previous: bool = True
) -> None:
    """Save a run's state so that the file is whole or absent at every instant, whatever interrupts.

    It is written beside its place, synced and renamed; the file it replaces stays as the previous generation:
    ``last.pt`` becomes ``last.prev.pt``. What dead runs left behind is removed.

    Args:
        state: tensors, numbers, strings, None, and lists, tuples and dicts of them. Digest and format are added.
        path: of the file; its folder exists.
        also: further names for the same content (``best.pt``), in place before ``path`` is: a run that dies in
            between resumes from the older state and saves both again.
        keep_previous: whether the file that is replaced stays.

    Raises:
        NonFiniteError: model, EMA or optimizer hold NaN or infinity; nothing was written.
        OSError: the disk is full or broken; the files that were there are as they were.
        TypeError: the state holds something else than plain values.
    """
    check_finite(state, path)
    write_checkpoint(state, path, also, keep_previous)


def load_newest(path: Path) -> tuple[dict[str, Any], Path]:
    """Read a checkpoint, or the generation before it if it is damaged or missing, then with a warning.

    Args:
        path: of a checkpoint, or of a folder with ``last.pt``.

    Returns:
        The state, and the file it is from.

    Raises:
        UserError: neither can be read.
    """
    newest = path / "last.pt" if path.is_dir() else path
    try:
        return load_checkpoint(newest), newest
    except UserError as error:
        previous = previous_path(newest)
        if not previous.exists():
            raise
        try:
            state = load_checkpoint(previous)
        except UserError as second:
            raise UserError(f"{error}; {second}") from second
        get_logger().warning(f"{error}; going on from {previous}")
        return state, previous


def strip_checkpoint(
    source: Path, target: Path, drop: Sequence[str] = ("ema", "optimizer", "scaler", "rng", "meters", "rank_buffers")
) -> None:
    """Write a checkpoint for use rather than for resuming: the EMA weights become ``model``.

    Args:
        source: a checkpoint; the target may be the same file.
        target: what is written.
        drop: entries that only a resume needs.

    Raises:
        UserError: the source can't be read.
    """
    state = load_checkpoint(source)
    if "ema" in state:
        state["model"] = state["ema"]["module"]
    save_checkpoint({key: value for key, value in state.items() if key not in drop}, target, keep_previous=False)
