"""A process's place in a job step of the SLURM scheduler, read from the variables that srun sets for it."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from utils.core.errors import UserError

FIRST_PORT, PORTS = 20_000, 10_000  # below the range that systems hand out by themselves


class SlurmPlace(NamedTuple):
    """Where a task of a job step is, and where its first task listens."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    address: str
    port: int


def slurm_place(variables: Mapping[str, str]) -> SlurmPlace | None:
    """Read the place of this process.

    Args:
        variables: the environment.

    Returns:
        None outside a step (in an sbatch script or a salloc shell the variables describe one process that starts
        others) and in a step of one task.

    Raises:
        UserError: the variables are incomplete or not as SLURM writes them.
    """
    if not variables.get("SLURM_STEP_ID"):
        return None
    tasks = _first(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks in ("", "1"):
        return None
    needed = {
        "SLURM_PROCID": variables.get("SLURM_PROCID", ""),
        "SLURM_LOCALID": variables.get("SLURM_LOCALID", ""),
        "SLURM_NODEID": variables.get("SLURM_NODEID", ""),
        "SLURM_STEP_TASKS_PER_NODE": _first(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "SLURM_STEP_NODELIST": _first(variables, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"),
        "SLURM_JOB_ID": variables.get("SLURM_JOB_ID", ""),
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        raise UserError(
            f"this is a SLURM step of {tasks} tasks, but {', '.join(missing)} is not set; start the run with srun, or "
            "unset SLURM_STEP_ID for a run of one process"
        )
    try:
        node = int(needed["SLURM_NODEID"])
        place = SlurmPlace(
            rank=int(needed["SLURM_PROCID"]),
            local_rank=int(needed["SLURM_LOCALID"]),
            world_size=int(tasks),
            local_world_size=tasks_per_node(needed["SLURM_STEP_TASKS_PER_NODE"])[node],
            node_rank=node,
            address=first_host(needed["SLURM_STEP_NODELIST"]),
            port=FIRST_PORT + int(needed["SLURM_JOB_ID"]) % PORTS,
        )
    except (ValueError, IndexError) as error:
        shown = " ".join(f"{name}={value}" for name, value in needed.items())
        raise UserError(f"SLURM's variables can't be read ({error}): {shown}; start the run with srun") from error
    return place


def check_launched_once(variables: Mapping[str, str]) -> None:
    """Check that a launcher whose worker this is was not itself started by each of several tasks of a machine.

    All but one would fail, for the port is in use, or each would train alone. A shell in a step (``srun --pty``) is the
    first of its tasks, and may start a launcher.

    Args:
        variables: the environment of the worker.

    Raises:
        UserError: it was.
    """
    if "SLURM_PTY_PORT" in variables:
        return
    try:
        place = slurm_place(variables)
    except UserError:  # a launcher needs none of them
        return
    if place is not None and place.local_world_size > 1:
        raise UserError(
            f"this SLURM step has {place.local_world_size} tasks on this machine, and a launcher in each would start "
            "ranks of its own: give srun --ntasks-per-node=1, or let it start the ranks: srun python train.py ..., "
            "without a launcher. If that is what you want, unset SLURM_STEP_ID"
        )


def tasks_per_node(text: str) -> list[int]:
    """Expand what SLURM writes: ``2(x3),1`` is [2, 2, 2, 1].

    Raises:
        ValueError: the text is something else.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(f"tasks per node: {text!r}")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first name of a node list: ``gpu[07-09,12],login`` gives gpu07.

    Raises:
        ValueError: the text is no such list.
    """
    match = re.fullmatch(r"([^\[\],]+)(?:\[(\d+)[^\]]*\]([^\[\],]*))?(?:,.*)?", nodes)
    if match is None:
        raise ValueError(f"node list: {nodes!r}")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def _first(variables: Mapping[str, str], *names: str) -> str:
    return next((value for name in names if (value := variables.get(name, ""))), "")
