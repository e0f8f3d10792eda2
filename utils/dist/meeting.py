"""The meeting of the ranks: how they find and join each other, and who of them is missing."""

import gc
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread, Timer

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would hold for good
from torch.distributed.rendezvous import rendezvous

from utils.core.errors import UserError, say_on_stderr
from utils.core.logging import get_logger
from utils.core.signals import stops_need_no_python
from utils.dist.collectives import all_gather_objects
from utils.dist.interfaces import interface_towards, ipv4_addresses
from utils.dist.place import DistEnv, Meeting

JOIN_TIMEOUT = 900  # seconds for all ranks to connect to the first one, as torchrun has them for its machines
WAIT_LINE = 10  # seconds between lines of a rank that waits for that
MEET_TIMEOUT, HINT_AFTER = 300, 60  # seconds: for all ranks at the meeting point; for the GPUs' first exchange
ROLL_CALL = 2.0  # seconds in which ranks say that they are there, once others have waited in vain
TIMED_OUT = ("Timed out waiting", "Application timeout caused pair closure")  # Gloo's words
LOST = (*TIMED_OUT, "Connection closed by peer", "Connection reset by peer", "Broken pipe")  # Gloo's as well
NCCL_HINT = (
    f"the GPUs' first exchange has not come to an end after {HINT_AFTER} seconds. On consumer cards and in some "
    "virtual machines direct transfer between GPUs is broken: try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows what it "
    "waits for"
)

_groups = itertools.count()  # numbers the process groups of this process
_open: list[Meeting] = []  # of the process group that is up, which an exception may have left


def disconnect(failed: bool = False) -> None:
    """Leave the process group, if there is one of ours.

    Args:
        failed: whether this rank leaves by an exception. NCCL's way out waits for the other ranks of the machine,
            which may be waiting for this one, so that then it is the end of the process that ends the group, or the
            next one.
    """
    if not _open or (failed and "nccl" in dist.get_backend_config()):
        return
    meeting = _open.pop()
    meeting.store, meeting.nodes, meeting.machine = None, (), None  # whoever still has it
    gc.collect()  # a network in a cycle of references would keep the group, and Gloo's threads, beyond its end
    dist.destroy_process_group()


def backend(env: DistEnv) -> str:
    """Return what joins the ranks' computing: NCCL between CUDA devices where it is there, else Gloo."""
    return "NCCL" if env.device.type == "cuda" and dist.is_nccl_available() else "Gloo"


def connect(env: DistEnv, timeout: timedelta) -> None:
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
            env.meeting.store = store
            _open.append(env.meeting)
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
    env.meeting.nodes = nodes
    for node in sorted(set(nodes)) if len(set(nodes)) > 1 else ():
        group = dist.new_group([rank for rank, its in enumerate(nodes) if its == node], timeout, "gloo")
        if node == env.node_rank and isinstance(group, dist.ProcessGroup):
            env.meeting.machine = group


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
            say_on_stderr(f"rank {env.rank} of {env.world_size} has waited {waited} for {whom} at {where}")

    if env.local_rank == 0 and env.local_world_size < env.world_size:  # on one machine nobody is far
        Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def loss_of_ranks(error: str, env: DistEnv, timeout: float) -> str:
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
    nodes = env.meeting.nodes
    machine = f" on machine {nodes[rank]}" if nodes and env.local_world_size < env.world_size else ""
    return f"rank {rank}{machine}"


def _roll_call(env: DistEnv, seconds: float) -> list[int] | None:
    """Say that this rank is there, and return those that do not say so in time; None without a place to ask."""
    answers: list[list[int]] = []

    def call() -> None:
        store, end = env.meeting.store, time.monotonic() + seconds
        if store is None:
            return
        with suppress(RuntimeError):  # the place where all met may go while they are asked
            store.set(f"here {env.rank}", "")
            while not answers or (answers[-1] and time.monotonic() < end):
                answers.append([rank for rank in range(env.world_size) if not store.check([f"here {rank}"])])
                time.sleep(0.1)

    asking = Thread(target=call, daemon=True)  # without an answer it never comes back
    asking.start()
    asking.join(seconds + ROLL_CALL)
    return answers[-1] if answers else None
