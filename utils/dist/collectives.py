"""What passes between ranks; with one rank each function gives back what it was given."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would hold for good
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from utils.core.errors import DivergedError, NotWrittenError, Problems, UserError
from utils.core.heartbeat import begun, collective, waiting
from utils.dist.place import DistEnv

T = TypeVar("T")


MOST_GATHERED = 4  # ranks whose small tensors are gathered to be summed


# Collectives: with one rank each gives back what it was given ---------------------------------------------------------


def all_reduce_sum(tensor: Tensor, env: DistEnv) -> Tensor:
    """Sum a tensor over ranks in place, the same on each; returns it. Collective: every rank must call it."""
    if env.world_size > 1:
        with collective:
            dist.all_reduce(tensor)
    return tensor


def small_sum(tensor: Tensor, env: DistEnv) -> Tensor:
    """Return the sum of a small tensor over ranks, the same on each. Collective: every rank must call it.

    What it takes is waking who waits for a message, and to gather takes one message where an all-reduce takes two.
    Among many ranks it would be too many bytes.
    """
    if env.world_size > MOST_GATHERED:
        return all_reduce_sum(tensor, env)
    return all_gather_rows(tensor, env).sum(0)


def start_all_reduce_sum(tensor: Tensor, env: DistEnv) -> Callable[[], Tensor]:
    """Begin to sum a tensor over ranks in place; what is returned waits for the sum. Collective."""
    if env.world_size == 1:
        return lambda: tensor
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    begun()

    def wait() -> Tensor:
        with waiting:
            work.wait()
        return tensor

    return wait


def all_gather_rows(tensor: Tensor, env: DistEnv) -> Tensor:
    """Return (world_size, *shape): the tensors of all ranks in their order. Collective: every rank must call it."""
    if env.world_size == 1:
        return tensor[None]
    rows = tensor.new_empty((env.world_size, *tensor.shape))
    with collective:
        dist.all_gather(list(rows.unbind()), tensor.contiguous())
    return rows


def average_in_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over ranks in bf16, which halves the bytes: a hook of DDP.

    PyTorch's `bf16_compress_hook`, which DDP refuses by its name where PyTorch is built without CUDA; Gloo adds bf16 as
    well. Each rank rounds its gradients and divides them by the number of ranks, then they are added up, in bf16 too:
    the mean is off by 2^-8 of the summands at most for each time it is rounded, the same on all ranks. Division before
    the sum keeps fp16 in its range; bf16 has the range of fp32, where nothing overflows and half of a value is exact.

    Args:
        group: None for all ranks.
        bucket: of gradients; the mean takes their place.
    """
    return bf16_compress_hook(group, bucket)  # type: ignore[arg-type]  # torch takes None, and says otherwise


@torch.no_grad()
def check_same_weights(model: nn.Module, env: DistEnv, when: str) -> None:
    """Check that all ranks have the same parameters, to the bit. Collective: every rank must call it.

    Args:
        model: raw or wrapped.
        env: this rank's place.
        when: for the message.

    Raises:
        RuntimeError: names the ranks that have others than most.
    """
    patterns = {torch.float64: torch.int64, torch.float32: torch.int32}
    sums = [
        parameter.detach().view(patterns.get(parameter.dtype, torch.int16)).sum(dtype=torch.int64)
        for parameter in model.parameters()
    ]
    found = all_gather_rows(torch.stack(sums), env)
    if bool((found == found[0]).all()):
        return
    rows = [tuple(row) for row in found.tolist()]
    most = max(rows, key=rows.count)
    others = ", ".join(str(rank) for rank, row in enumerate(rows) if row != most)
    raise RuntimeError(f"{when} the weights of rank {others} differ from the others'; they had to be the same")


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], env: DistEnv) -> None:
    """Overwrite tensors with rank 0's, in one message for each dtype. Collective: every rank must call it."""
    if env.world_size == 1:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        with collective:
            dist.broadcast(flat, 0)
        for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def broadcast_object(obj: T, env: DistEnv) -> T:
    """Rank 0's object, on every rank. Collective: every rank must call it."""
    if env.world_size == 1:
        return obj
    return _broadcast(obj, None)


def all_gather_objects(obj: T, env: DistEnv) -> list[T]:
    """The objects of all ranks in rank order, on every rank. Collective: every rank must call it."""
    if env.world_size == 1:
        return [obj]
    gathered: list[Any] = [None] * env.world_size
    with collective:
        dist.all_gather_object(gathered, obj)
    return gathered


def gather_objects(obj: T, env: DistEnv) -> list[T]:
    """The objects of all ranks in rank order, on rank 0; an empty list elsewhere. Collective."""
    if env.world_size == 1:
        return [obj]
    return _gather(obj, env.world_size, env.is_main_process, None)


def gather_on_machine(obj: T, env: DistEnv) -> list[T]:
    """The objects of this machine's ranks in their order, on its first; an empty list elsewhere. Collective."""
    if env.local_world_size == 1:
        return [obj]
    return _gather(obj, env.local_world_size, env.local_rank == 0, env.meeting.machine)


def barrier(env: DistEnv) -> None:
    """Wait for all ranks. Collective: every rank must call it."""
    if env.world_size > 1:
        all_gather_objects(None, env)  # over Gloo, as all objects: NCCL's barrier would need to be told the device


def post(word: str, env: DistEnv) -> None:
    """Put up a word for all ranks, where they met; nobody waits for it, and it stays until the group ends."""
    if env.meeting.store is not None:
        env.meeting.store.set(word, "")


def is_posted(word: str, env: DistEnv) -> bool:
    """Whether any rank has put up a word; costs a question over the network. Never so without other ranks."""
    return env.meeting.store is not None and env.meeting.store.check([word])


def once(work: Callable[[], T], env: DistEnv) -> T:
    """Let rank 0 do something and give its result to all. Collective: every rank must call it.

    Raises:
        UserError: rank 0's work raised it; it is raised on all ranks.
    """
    return _shared(work, env.is_main_process, env.world_size, None)


def once_per_machine(work: Callable[[], T], env: DistEnv) -> T:
    """Let the first rank of each machine do something and give its result to that machine's ranks. Collective.

    Raises:
        UserError: the work raised it; it is raised on all ranks of the machine.
    """
    return _shared(work, env.local_rank == 0, env.local_world_size, env.meeting.machine)


def _shared(work: Callable[[], T], does: bool, ranks: int, group: dist.ProcessGroup | None) -> T:
    if ranks == 1:
        return work()
    result: T | None = None
    mistake: UserError | DivergedError | NotWrittenError | None = None
    if does:
        try:
            result = work()
        except (UserError, DivergedError, NotWrittenError) as error:
            mistake = error
    result, mistake = _broadcast((result, mistake), group)
    if mistake is not None:
        raise mistake
    return result  # type: ignore[return-value]  # None only if the work gives that


def _broadcast(obj: T, group: dist.ProcessGroup | None) -> T:
    holder: list[Any] = [obj]
    with collective:
        dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]


def _gather(obj: T, ranks: int, receives: bool, group: dist.ProcessGroup | None) -> list[T]:
    gathered: list[Any] = [None] * ranks if receives else []
    with collective:
        dist.gather_object(obj, gathered if receives else None, group=group, group_dst=0)
    return gathered


def share_problems(problems: Problems, env: DistEnv) -> None:
    """Let every rank know the mistakes that any of them found, and raise them on all. Collective.

    Raises:
        UserError: there are some.
    """
    for messages in all_gather_objects(problems.messages, env):
        for message in messages:
            problems.add(message)
    problems.raise_if_any()
