"""Ranks whose process group is like NCCL's, as far as that can be without a GPU, and of which one fails.

    torchrun ... -m tests.dist.like_nccl

What is changed is PyTorch's: it says that there are two GPUs and NCCL, joins what is on GPUs by Gloo, and leaves a
group as NCCL does, when the other ranks of the machine come along.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from utils.dist.collectives import all_gather_objects, barrier
from utils.dist.worker import as_worker
from utils.torch_utils import process_group

PATIENCE = 20.0  # seconds that a rank waits at the end
NAME = "cpu:gloo,cuda:nccl"

make, ones = dist.init_process_group, torch.ones


def make_by_gloo(name: str, **how: Any) -> None:
    assert name == NAME
    make("cpu:gloo,cuda:gloo", **how)


def destroy_when_all_do(end: Callable[[], None] = dist.destroy_process_group) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"leaves {dist.get_rank()}", "")
    until = time.monotonic() + PATIENCE
    while not store.check([f"leaves {rank}" for rank in range(dist.get_world_size())]):
        if time.monotonic() > until:
            print(f"rank {dist.get_rank()} waited in vain", flush=True)
            os._exit(3)
        time.sleep(0.05)
    end()


CHANGES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.cuda, "device_count", lambda: 2),
    (torch.cuda, "set_device", lambda device: None),
    (torch.cuda, "synchronize", lambda device: None),
    (torch, "ones", lambda *size, device: ones(*size)),  # of the first exchange
    (dist, "is_nccl_available", lambda: True),
    (dist, "init_process_group", make_by_gloo),
    (dist, "get_backend_config", lambda: NAME),
    (dist, "destroy_process_group", destroy_when_all_do),
)


def fail_to_connect() -> None:
    """What goes wrong when the ranks have met leaves no group behind."""
    with suppress(OSError), mock.patch.object(dist, "all_gather_object", side_effect=OSError), process_group("cpu"):
        raise AssertionError("they talk without a first word")
    assert not dist.is_initialized()


def main() -> None:
    fail_to_connect()
    for module, name, change in CHANGES:
        setattr(module, name, change)
    with process_group() as env:
        assert all_gather_objects(str(env.device), env) == ["cuda:0", "cuda:1"]
    assert not dist.is_initialized()
    for _ in range(2):  # a mistake that all ranks meet: the group that it leaves is no hindrance
        with suppress(LookupError), process_group():
            raise LookupError("caught")
    with process_group() as env:
        if env.rank == 1:
            raise LookupError("of one rank")
        barrier(env)


if __name__ == "__main__":
    as_worker(main)()
