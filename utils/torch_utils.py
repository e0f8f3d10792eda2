"""Ranks and what passes between them, the global batch, EMA and checkpoints: what a run needs from torch itself."""

import copy
import gc
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would hold for good
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from utils.checkpoints.files import check_finite, load_checkpoint, previous_path, write_checkpoint
from utils.core.errors import ENDS, LostPeerError, UserError
from utils.core.logging import get_logger
from utils.core.signals import stops_need_no_python, stops_reach_c
from utils.dist.collectives import _board, _machine_group, all_gather_objects, barrier, broadcast_tensors
from utils.dist.interfaces import interface_towards, ipv4_addresses
from utils.dist.place import DistEnv, dist_env, rank_device

M = TypeVar("M", bound=nn.Module)


JOIN_TIMEOUT = 900  # seconds for all ranks to connect to the first one, as torchrun has them for its machines


WAIT_LINE = 10  # seconds between lines of a rank that waits for that


MEET_TIMEOUT, HINT_AFTER = 300, 60  # seconds: for all ranks at the meeting point; for the GPUs' first exchange


ROLL_CALL = 2.0  # seconds in which ranks say that they are there, once others have waited in vain


TIMED_OUT = ("Timed out waiting", "Application timeout caused pair closure")  # Gloo's words


LOST = (*TIMED_OUT, "Connection closed by peer", "Connection reset by peer", "Broken pipe")  # Gloo's as well


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
    _disconnect()  # from what an exception has left
    done = False
    try:
        _connect(env, timedelta(seconds=timeout))
        with stops_reach_c() if backend(env) == "NCCL" else nullcontext():
            yield env
            barrier(env)  # whoever leaves first would take the meeting point along
        done = True
    except ENDS:  # said by us, whatever the words
        raise
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST):
            raise
        raise LostPeerError(_loss(str(error), env, timeout)) from error
    finally:
        _disconnect(failed=not done)


def _disconnect(failed: bool = False) -> None:
    """Leave the process group, if there is one of ours.

    Args:
        failed: whether this rank leaves by an exception. NCCL's way out waits for the other ranks of the machine
            (pytorch/pytorch#180611), which may be waiting for this one, so that then it is the end of the process that
            ends the group, or the next one.
    """
    if not _board or (failed and "nccl" in dist.get_backend_config()):
        return
    _machine_group.clear()
    _board.clear()
    _nodes.clear()
    gc.collect()  # a network in a cycle of references would keep the group, and Gloo's threads, beyond its end
    dist.destroy_process_group()


_groups = itertools.count()  # numbers the process groups of this process


_nodes: list[int] = []  # the machine of each rank, while a process group is up


def backend(env: DistEnv) -> str:
    """Return what joins the ranks' computing: NCCL between CUDA devices where it is there, else Gloo."""
    return "NCCL" if env.device.type == "cuda" and dist.is_nccl_available() else "Gloo"


def _connect(env: DistEnv, timeout: timedelta) -> None:
    """Join the ranks and see that they can talk."""
    interface = None
    if not os.environ.get("GLOO_SOCKET_IFNAME"):  # read by Gloo; left to itself it takes what the hostname resolves to
        several_machines = env.local_world_size < env.world_size
        named = os.environ.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
        interface = named if named in dict(ipv4_addresses()) else None
        interface = interface or interface_towards(os.environ["MASTER_ADDR"], several_machines)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    on_nccl = backend(env) == "NCCL"
    if on_nccl and interface is not None and interface != "lo" and not os.environ.get("NCCL_SOCKET_IFNAME"):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    try:
        with stops_need_no_python():  # there is nothing to clean up yet, and the other ranks may never come
            store = _meet(env, timeout)
            name = "cpu:gloo,cuda:nccl" if on_nccl else "gloo"
            dist.init_process_group(name, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
            _board.append(store)
            _await_all("joined", store, env)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {env.rank} of {env.world_size} can't join the others at {where} (interface "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', 'chosen by Gloo')}): {error}; check that every machine reaches "
            "that address, or name the interface in GLOO_SOCKET_IFNAME"
        ) from error
    finally:
        if interface is not None:
            del os.environ["GLOO_SOCKET_IFNAME"]  # a later group may lead elsewhere
    if on_nccl:
        hint = Timer(HINT_AFTER, get_logger().warning, [NCCL_HINT])
        hint.daemon = True
        hint.start()
        dist.all_reduce(torch.ones((), device=env.device))
        torch.cuda.synchronize(env.device)
        hint.cancel()
    nodes = all_gather_objects(env.node_rank, env)
    _nodes[:] = nodes
    for node in sorted(set(nodes)) if len(set(nodes)) > 1 else ():
        group = dist.new_group([rank for rank, its in enumerate(nodes) if its == node], timeout, "gloo")
        if node == env.node_rank and isinstance(group, dist.ProcessGroup):
            _machine_group.append(group)


def _meet(env: DistEnv, timeout: timedelta) -> dist.Store:
    """Wait for all ranks where the launcher says, and return what they share there."""
    with _wait_told(env):
        meeting_point = next(rendezvous("env://", timeout=min(timeout, timedelta(seconds=JOIN_TIMEOUT))))[0]
        # A launcher keeps its store: under the same names a second group would find the addresses of the first one.
        store = dist.PrefixStore(f"group {next(_groups)}", meeting_point)
        _await_all("started", store, env)  # ranks may start further apart than --dist-timeout
    meeting_point.set_timeout(timeout)
    return store


def _await_all(what: str, store: dist.Store, env: DistEnv) -> None:
    """Say at the meeting point that this rank has done something, and wait for all; an error names who has not."""
    store.set(f"{what} {env.rank}", "")
    store.wait([f"{what} {rank}" for rank in range(env.world_size)], timedelta(seconds=MEET_TIMEOUT))


@contextmanager
def _wait_told(env: DistEnv) -> Iterator[None]:
    """Context in which the first rank of each of several machines says every few seconds that it waits."""
    whom = "the others" if env.is_main_process else "rank 0"
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    over, began = Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(WAIT_LINE):
            waited = f"{time.monotonic() - began:.0f} s"
            print(
                f"rank {env.rank} of {env.world_size} has waited {waited} for {whom} at {where}",
                file=sys.stderr,
                flush=True,
            )

    if env.local_rank == 0 and env.local_world_size < env.world_size:  # on one machine nobody is far
        Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _loss(error: str, env: DistEnv, timeout: float) -> str:
    """Say which ranks are lost.

    Args:
        error: Gloo's.
        env: this rank's place.
        timeout: ``--dist-timeout``, seconds.
    """
    reason = re.sub(r"^\[[^]]*\] *", "", error)  # without the place in Gloo's sources
    timed_out = any(words in error for words in TIMED_OUT)
    # All that are left answer: the first whose patience is over takes along others, who are not the ones that are lost.
    missing = _roll_call(env, ROLL_CALL if timed_out else 0.0)
    if not timed_out:
        return f"rank {env.rank} lost another rank, which ended or was cut off: {reason}"
    if missing is None:
        lost = f"rank 0: {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} can't be reached any more"
    elif missing:
        lost = ", ".join(_named(rank, env) for rank in missing)
    else:
        lost = "another rank for a while, though all are there"
    return f"rank {env.rank} lost {lost}; it waited {timeout:g} s (--dist-timeout): {reason}"


def _named(rank: int, env: DistEnv) -> str:
    machine = f" on machine {_nodes[rank]}" if _nodes and env.local_world_size < env.world_size else ""
    return f"rank {rank}{machine}"


def _roll_call(env: DistEnv, seconds: float) -> list[int] | None:
    """Say that this rank is there, and return those that do not say so in time; None without a place to ask."""
    answers: list[list[int]] = []

    def call() -> None:
        with suppress(RuntimeError, IndexError):  # the place where all met may go while they are asked
            store, end = _board[0], time.monotonic() + seconds
            store.set(f"here {env.rank}", "")
            while not answers or (answers[-1] and time.monotonic() < end):
                answers.append([rank for rank in range(env.world_size) if not store.check([f"here {rank}"])])
                time.sleep(0.1)

    asking = Thread(target=call, daemon=True)  # without an answer it never comes back
    asking.start()
    asking.join(seconds + ROLL_CALL)
    return answers[-1] if answers else None


NCCL_HINT = (
    f"the GPUs' first exchange has not come to an end after {HINT_AFTER} seconds. On consumer cards and in some "
    "virtual machines direct transfer between GPUs is broken: try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows what it "
    "waits for"
)


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


# EMA ------------------------------------------------------------------------------------------------------------------


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


# Checkpoints ----------------------------------------------------------------------------------------------------------


def save_checkpoint(
    state: Mapping[str, Any], path: Path, also: Sequence[Path] = (), *, keep_previous: bool = True
) -> None:
    """Save a run's state so that the file is whole or absent at every instant, whatever interrupts.

    It is written beside its place, synced and renamed (ultralytics/ultralytics#5793); the file it replaces stays as
    the previous generation (``last.pt`` becomes ``last.prev.pt``). What dead runs left behind is removed.

    Args:
        state: tensors, numbers, strings, None, and lists, tuples and dicts of them. Digest and format are added.
        path: of the file; its folder exists.
        also: further names for the same content (``best.pt``), in place before ``path`` is: a run that dies in
            between resumes from the older state and saves both again.
        keep_previous: whether the file that is replaced stays.

    Raises:
        NonFiniteError: model, EMA or optimizer hold NaN or infinity; nothing was written
            (ultralytics/ultralytics#24170).
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
