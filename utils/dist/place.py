"""The place of this process among all that train together, and the device that it computes on."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would hold for good

from utils.core.devices import as_typed, parse_device
from utils.core.errors import UserError
from utils.dist.slurm import SlurmPlace, check_launched_once, slurm_place

# Ranks ----------------------------------------------------------------------------------------------------------------

# What torchrun sets for every worker; a process that has one of the first three was started by a launcher.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(eq=False)
class Meeting:
    """What the ranks of a process group share beside it, while it is up.

    Attributes:
        store: where they met; None while there is no group.
        nodes: the machine of each rank.
        machine: the ranks of this machine as a group of their own; None where there is no other machine.
    """

    store: dist.Store | None = None
    nodes: Sequence[int] = ()
    machine: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class DistEnv:
    """The place of this process among all that train together; without a launcher the only one.

    Attributes:
        rank: global index, 0 to world_size - 1.
        local_rank: index on this machine.
        world_size: processes in the job.
        local_world_size: processes on this machine.
        node_rank: index of this machine.
        device: what this process computes on.
        launched: whether a launcher (torchrun, srun) started this process.
        own_devices: whether each process may see devices of its own, as with ``srun --gpus-per-task=1``; those of
            torchrun see the same ones.
        meeting: with the others; see `process_group`.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launched: bool = False
    own_devices: bool = False
    meeting: Meeting = field(default_factory=Meeting, compare=False, repr=False)

    @property
    def is_main_process(self) -> bool:
        """Whether this rank does the side effects: files, logs, progress bar."""
        return self.rank == 0


ALONE = DistEnv()


def dist_env() -> DistEnv:
    """Read the launcher's environment: torchrun's variables or, where there are none, SLURM's.

    SLURM's place is written into torchrun's variables, which the process group is made from. The device is chosen
    later, by `process_group`.

    Raises:
        UserError: variables are missing or contradict each other, or SLURM started launchers side by side.
    """
    values = {name: os.environ.get(name, "") for name in LAUNCHER_VARIABLES}
    if not any(values[name] for name in LAUNCHER_VARIABLES[:3]):
        task = slurm_place(os.environ)
        if task is None:
            return ALONE
        values = {name: str(value) for name, value in zip(LAUNCHER_VARIABLES, place_values(task), strict=True)}
        values |= {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name)}
        os.environ.update(values, GROUP_RANK=str(task.node_rank))
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun:
        check_launched_once(os.environ)
    missing = [name for name, value in values.items() if not value]
    if missing:
        there = " ".join(f"{name}={value}" for name, value in values.items() if value)
        raise UserError(
            f"a launcher's environment is set by halves: {there}, but {', '.join(missing)} not; start the run with "
            "python -m torch.distributed.run, or unset these variables for a run of one process"
        )
    try:
        rank, local_rank, world_size, local_world_size = (int(values[name]) for name in LAUNCHER_VARIABLES[:4])
        node_rank = int(os.environ.get("GROUP_RANK") or rank // max(local_world_size, 1))
    except ValueError:
        shown = " ".join(f"{name}={values[name]}" for name in LAUNCHER_VARIABLES[:4])
        raise UserError(f"the launcher's variables are not whole numbers: {shown}") from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise UserError(
            f"RANK={rank} LOCAL_RANK={local_rank} do not fit WORLD_SIZE={world_size} "
            f"LOCAL_WORLD_SIZE={local_world_size}; start the run with torchrun, or unset these variables"
        )
    place = rank, local_rank, world_size, local_world_size, node_rank
    return DistEnv(*place, launched=True, own_devices=not by_torchrun)


def place_values(place: SlurmPlace) -> tuple[int | str, ...]:
    """Return a SLURM place in the order of LAUNCHER_VARIABLES."""
    return (
        place.rank, place.local_rank, place.world_size, place.local_world_size, place.address, place.port,
    )  # fmt: skip


def rank_device(flag: str | int | Sequence[str | int], env: DistEnv) -> torch.device:
    """Return the device of this rank; see `assign_device`. No GPU is touched."""
    return assign_device(flag, env, torch.cuda.device_count(), torch.backends.mps.is_available())


def assign_device(flag: str | int | Sequence[str | int], env: DistEnv, cuda_count: int, has_mps: bool) -> torch.device:
    """Return the device of one rank.

    A launcher's list says which device each local rank takes, and "cpu" puts all of them on the CPU; without a flag
    rank r of a machine takes its GPU r. A rank that may see devices of its own, and sees one GPU, takes that.

    Args:
        flag: see `parse_device`.
        env: this rank's place.
        cuda_count: CUDA devices that this process sees.
        has_mps: whether Apple's GPU can be used.

    Raises:
        UserError: the flag is wrong, or names another number of devices than there are ranks on this machine.
    """
    ranks, typed = env.local_world_size, as_typed(flag)
    automatic = typed.strip().lower() in ("", "auto")
    devices = parse_device("all" if automatic and ranks > 1 and cuda_count else flag, cuda_count, has_mps)
    if automatic and ranks > 1 and not cuda_count:
        devices = [torch.device("cpu")]
    if not env.launched and len(devices) > 1:
        raise UserError(
            f"--device {typed} names {len(devices)} devices, which need a process each: start them with "
            f"python -m torch.distributed.run --nproc_per_node {len(devices)} in place of python, or name one device"
        )
    own_gpu = env.own_devices and cuda_count == 1 and devices == [torch.device("cuda", 0)]
    if devices == [torch.device("cpu")] or own_gpu:
        return devices[0]
    if len(devices) != ranks and not (automatic and len(devices) > ranks):
        given = "this machine has" if automatic else f"--device {typed} names"
        raise UserError(
            f"{given} {len(devices)} device{'s' * (len(devices) > 1)}, but the launcher started {ranks} "
            f"process{'es' * (ranks > 1)} on this machine (--nproc_per_node {ranks}), each of which needs one; make "
            "the two numbers equal"
        )
    return devices[env.local_rank]
