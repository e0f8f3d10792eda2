"""Ranks and devices, seeds, precision, guarded steps, EMA and checkpoints: what a run needs from torch itself."""

import copy
import math
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from utils.checkpoint_files import (
    load_checkpoint,
    non_finite,
    place,
    previous_path,
    remove_stale,
    sealed,
    sync_folder,
    temporary_path,
    write_synced,
)
from utils.errors import UserError
from utils.logging import get_logger

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

# Devices --------------------------------------------------------------------------------------------------------------

CUDA_INDEX = re.compile(r"(?:cuda:)?(0|[1-9][0-9]*)")


def parse_device(flag: str | int | Sequence[str | int], cuda_count: int, has_mps: bool) -> list[torch.device]:
    """Read a device flag strictly; touches no device.

    Args:
        flag: "", "auto", "all", "cpu", "mps", "0", "cuda:0", 0, or several of them as a list or joined by commas.
        cuda_count: CUDA devices of this machine; indices count inside ``CUDA_VISIBLE_DEVICES``.
        has_mps: whether Apple's GPU can be used.

    Returns:
        The devices in the order given, at least one. "" and "auto" are one device: the first CUDA device, else MPS,
        else the CPU.

    Raises:
        UserError: nonsense, an index that this machine lacks, a GPU named twice, or different kinds mixed. Ids of two
            digits are ordinary ids (ultralytics/ultralytics#8481).
    """
    items = flag.split(",") if isinstance(flag, str) else [flag] if isinstance(flag, int) else list(flag)
    names = [str(item).strip().lower() for item in items]
    shown = ",".join(names)
    exists = ", ".join([*(f"cuda:{i}" for i in range(cuda_count)), *(["mps"] if has_mps else []), "cpu"])
    if names in ([""], ["auto"]):
        return [torch.device("cuda", 0) if cuda_count else torch.device("mps" if has_mps else "cpu")]
    if names == ["all"] and cuda_count:
        return [torch.device("cuda", i) for i in range(cuda_count)]
    if set(names) == {"cpu"} or (names == ["mps"] and has_mps):
        return [torch.device(name) for name in names]
    matches = [CUDA_INDEX.fullmatch(name) for name in names]
    indices = [int(match.group(1)) for match in matches if match]
    if not names or len(indices) < len(names):
        problem = "is not a device or a list of CUDA devices"
    elif len(set(indices)) < len(indices):
        problem = "names a device twice"
    elif max(indices) >= cuda_count:
        problem = f"asks for cuda:{max(indices)}, which this machine does not have"
    else:
        return [torch.device("cuda", i) for i in indices]
    raise UserError(f"--device {shown or flag!r} {problem}; here are: {exists}")


def select_device(flag: str | int | Sequence[str | int] = "") -> torch.device:
    """Return the one device that a flag names; see `parse_device`. Leaves ``CUDA_VISIBLE_DEVICES`` as it is.

    Raises:
        UserError: the flag is wrong, or names several devices.
    """
    devices = parse_device(flag, torch.cuda.device_count(), torch.backends.mps.is_available())
    if len(devices) > 1:
        raise UserError(f"--device {flag}: training on several devices is not available yet; name one of them")
    return devices[0]


def memory_usage(device: torch.device) -> float:
    """Return the GB (1e9 bytes) this process holds: reserved on a GPU, resident on the CPU, 0 where that is unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return resident_pages * os.sysconf("SC_PAGE_SIZE") / 1e9


# Ranks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DistEnv:
    """The place of this process among all that train together; without a launcher the only one.

    Attributes:
        rank: global index, 0 to world_size - 1.
        local_rank: index on this machine.
        world_size: processes in the job.
        local_world_size: processes on this machine.
        device: what this process computes on.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main_process(self) -> bool:
        """Whether this rank does the side effects: files, logs, progress bar."""
        return self.rank == 0


def dist_env() -> DistEnv:
    """Read the launcher's environment; the device is chosen later, by `process_group`.

    Raises:
        UserError: the variables contradict each other.
    """
    values = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if not values["WORLD_SIZE"]:
        return DistEnv()
    try:
        world_size = int(values["WORLD_SIZE"])
        rank = int(values["RANK"] or 0)
        local_rank = int(values["LOCAL_RANK"] or 0)
        local_world_size = int(values["LOCAL_WORLD_SIZE"] or world_size)
    except ValueError:
        shown = " ".join(f"{name}={value}" for name, value in values.items() if value)
        raise UserError(f"the launcher's variables are not whole numbers: {shown}") from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise UserError(
            f"RANK={rank} LOCAL_RANK={local_rank} do not fit WORLD_SIZE={world_size} "
            f"LOCAL_WORLD_SIZE={local_world_size}; start the run with torchrun, or unset these variables"
        )
    return DistEnv(rank, local_rank, world_size, local_world_size)


@contextmanager
def process_group(device_flag: str | int | Sequence[str | int] = "", env: DistEnv | None = None) -> Iterator[DistEnv]:
    """Hold the connection between the ranks. Collective: every rank must call it.

    Args:
        device_flag: see `parse_device`.
        env: from `dist_env`; read here if not given.

    Yields:
        The environment with this rank's device, made the current one.

    Raises:
        UserError: the device flag is wrong, or a launcher started several processes.
    """
    env = dist_env() if env is None else env
    if env.world_size > 1:
        raise UserError(
            f"WORLD_SIZE={env.world_size}: training with several processes is not available yet; start one process"
        )
    env = replace(env, device=select_device(device_flag))
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    get_logger(env.rank)
    yield env


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


def all_reduce_sum(tensor: Tensor, env: DistEnv) -> Tensor:
    """Sum over ranks, the same on each. Collective: every rank must call it."""
    assert env.world_size == 1
    return tensor


def broadcast_object(obj: T, env: DistEnv) -> T:
    """Rank 0's object, on every rank. Collective: every rank must call it."""
    assert env.world_size == 1
    return obj


def all_gather_objects(obj: T, env: DistEnv) -> list[T]:
    """The objects of all ranks in rank order, on every rank. Collective: every rank must call it."""
    assert env.world_size == 1
    return [obj]


def barrier(env: DistEnv) -> None:
    """Wait for all ranks. Collective: every rank must call it."""
    assert env.world_size == 1


# Seeds ----------------------------------------------------------------------------------------------------------------


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed Python, NumPy and torch, and choose between repeatable and fastest kernels.

    Args:
        seed: for all three generators and every device.
        deterministic: take the repeatable kernel wherever there is one. On the CPU that is all of them; on CUDA an
            operation without one warns, instead of ending a long run.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it first starts
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing
    torch.backends.cudnn.deterministic = deterministic


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators as plain numbers and tensors, which a checkpoint can hold.

    Args:
        device: what the run computes on; another device's generator is not touched, for that would claim its memory.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put all generators where `rng_state` saw them; a run that moves from GPU to CPU or back keeps the CUDA seed."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# Precision ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """What the forward pass computes in; weights, losses and optimizer stay fp32.

    Attributes:
        name: "bf16", "fp16" or "off".
    """

    name: str

    def autocast(self, device_type: str) -> torch.autocast:
        """Context for forward pass and loss."""
        dtype = torch.float16 if self.name == "fp16" else torch.bfloat16
        return torch.autocast(device_type, dtype=dtype, enabled=self.name != "off")

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Loss scaler; does nothing unless the precision is fp16, whose small gradients vanish without one."""
        return torch.amp.GradScaler(device.type, enabled=self.name == "fp16")


def choose_precision(flag: str, device: torch.device) -> Precision:
    """Decide the precision of a run.

    Args:
        flag: "bf16", "fp16", "off" (fp32), or "auto": bf16 where the hardware has it, else fp16 on CUDA, else off.
        device: where the run computes.

    Raises:
        UserError: the device can't do what the flag says.
    """
    usable = ["off"]
    if device.type == "cuda":
        # bf16 from Ampere (8.0) on; older ones emulate it, slower than fp32
        native = torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8
        usable = ["bf16", "fp16", "off"] if native else ["fp16", "off"]
    elif device.type == "cpu" and cpu_has_bf16():
        usable = ["bf16", "off"]
    if flag == "auto":
        return Precision(usable[0])
    if flag not in usable:
        names = " or ".join(["auto", *usable])
        raise UserError(f"--amp {flag} does not work on this {device.type} device; use --amp {names}")
    return Precision(flag)


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 in hardware (AVX512_BF16 or AMX); elsewhere it is slower than fp32."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private, so a torch without them is no error
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


# Guarded steps: a window whose gradient is not finite leaves no trace -------------------------------------------------

GATED_DEVICES = ("cpu", "cuda")  # where torch's fused optimizers skip by a flag on the device


def clip_and_check(parameters: Iterable[Tensor], max_norm: float = 10.0) -> tuple[Tensor, Tensor]:
    """Clip the gradients to a global norm and say whether they are finite; the host does not wait.

    Args:
        parameters: those without gradient are passed over.
        max_norm: of all gradients together.

    Returns:
        Norm before clipping () and found_inf (), float32: 1 if the norm is not finite, else 0. Clipped gradients are
        useless in the first case. Under data parallelism both are the same on all ranks, for the gradients are.
    """
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm, torch.logical_not(torch.isfinite(norm)).to(torch.float32)


def guarded_step(
    optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float, scaler: torch.amp.GradScaler
) -> Tensor:
    """Unscale, clip and step, unless a gradient is not finite: then parameters and optimizer state stay as they are.

    Torch's fused optimizers read ``found_inf`` (1 skips) on the device, the mechanism that its GradScaler uses, so the
    host does not wait. An optimizer without it costs one wait per step.

    Args:
        optimizer: over the parameters, made by `utils.optim.build_optimizer`.
        parameters: whose gradients are clipped together.
        max_norm: see `clip_and_check`.
        scaler: enabled or not. It needs no word from us: wherever it would find an infinity the norm is not finite.

    Returns:
        found_inf (), float32, 0 or 1; for `BufferSnapshot.restore` and `ModelEMA.update`, in this order.
    """
    scaler.unscale_(optimizer)
    _, found_inf = clip_and_check(parameters, max_norm)
    if getattr(optimizer, "_step_supports_amp_scaling", False) and found_inf.device.type in GATED_DEVICES:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif not found_inf.item():
        optimizer.step()
    scaler.update()
    return found_inf


class BufferSnapshot:
    """BatchNorm buffers as they were at the start of a window, to be put back if the window is skipped.

    A batch with one NaN otherwise spoils the running statistics for good.

    Args:
        model: whose BatchNorm layers are watched; taken at once, and again by `take` at every window's start.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        dtypes = sorted({buffer.dtype for buffer in buffers}, key=str)
        self.groups = [[buffer for buffer in buffers if buffer.dtype == dtype] for dtype in dtypes]
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Remember the buffers; call it at the start of every window."""
        self.saved = [self._flat(group) for group in self.groups]

    @torch.no_grad()
    def restore(self, found_inf: Tensor) -> None:
        """Put the buffers back where found_inf () is 1; the host does not wait."""
        skip = found_inf.bool()
        for group, saved in zip(self.groups, self.saved, strict=True):
            values = torch.where(skip, saved, self._flat(group)).split([buffer.numel() for buffer in group])
            torch._foreach_copy_(group, [value.view_as(buffer) for value, buffer in zip(values, group, strict=True)])

    @staticmethod
    def _flat(group: list[Tensor]) -> Tensor:
        return torch.cat([buffer.reshape(-1) for buffer in group])


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
    """

    def __init__(self, raw_model: M, decay: float = 0.9999, tau: float = 2000.0) -> None:
        self.module: M = copy.deepcopy(raw_model).eval().requires_grad_(False)
        self.decay, self.tau = decay, tau
        self.updates = 0
        distinct = {tensor.data_ptr(): name for name, tensor in self.module.state_dict().items()}  # tied ones once
        self.floating = [name for name in distinct.values() if self.module.state_dict()[name].is_floating_point()]
        self.counters = [name for name in distinct.values() if name not in set(self.floating)]
        self.skipped = torch.zeros((), device=next(raw_model.parameters()).device)

    @torch.no_grad()
    def update(self, raw_model: nn.Module, found_inf: Tensor | None = None) -> None:
        """Move toward the model after an optimizer step; the host does not wait.

        Args:
            raw_model: as after the step; if the step was skipped, with its buffers restored.
            found_inf: () 1 leaves the average as it was.
        """
        self.updates += 1
        source, target = raw_model.state_dict(), self.module.state_dict()
        weight: float | Tensor = 1.0 - self.decay * (1.0 - math.exp(-self.updates / self.tau))
        if found_inf is not None:
            self.skipped += found_inf
            weight = weight * (1.0 - found_inf)
            weight = weight.item() if found_inf.device.type == "cpu" else weight  # on the CPU there is no wait
        foreach_lerp([target[name] for name in self.floating], [source[name] for name in self.floating], weight)
        if self.counters:
            torch._foreach_copy_([target[name] for name in self.counters], [source[name] for name in self.counters])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that moves."""
        return {"module": self.module.state_dict(), "updates": self.updates, "skipped": int(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
        self.skipped.fill_(state["skipped"])


# Checkpoints ----------------------------------------------------------------------------------------------------------

WEIGHT_KEYS = ("model", "ema", "optimizer")  # must be finite; meters and the like may hold the NaN of a skipped window


class NonFiniteError(ValueError):
    """Weights hold NaN or infinity, so they were not saved over finite ones."""


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
    content = sealed(state)
    spoiled = [name for key in WEIGHT_KEYS for name in non_finite(content.get(key), key)]
    if spoiled:
        raise NonFiniteError(
            f"{path} was not written: {spoiled[0]} holds NaN or infinity ({len(spoiled)} such tensors)"
        )
    folders = sorted({path.parent, *(copy_path.parent for copy_path in also)})
    for folder in folders:
        remove_stale(folder)
    temporary = temporary_path(path)
    try:
        write_synced(content, temporary)
        if keep_previous and path.exists():
            place(path, previous_path(path))
        for copy_path in also:
            place(temporary, copy_path)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    for folder in folders:
        sync_folder(folder)


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
    source: Path, target: Path, drop: Sequence[str] = ("ema", "optimizer", "scaler", "rng", "gradients", "meter")
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
