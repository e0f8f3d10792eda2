"""A network as one of several copies: wrapped so that gradients are averaged over ranks, once in a window."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.logging import get_logger
from utils.steps import Precision
from utils.torch_utils import DistEnv

THROW_AWAY_PASSES = 2


def wrap(raw_model: nn.Module, env: DistEnv, precision: Precision, images: Tensor) -> nn.Module:
    """Return a network whose backward pass ends with the mean of all ranks' gradients. Collective.

    All ranks start from rank 0's weights and buffers. DDP sorts its buckets anew after the first backward pass, which
    changes the order in which gradients are summed; two passes that leave nothing behind settle it, so that a resumed
    run sums like one that was never stopped.

    Args:
        raw_model: on its device, SyncBN in place, with the weights to train from.
        env: this rank's place.
        precision: of the training.
        images: (B, 3, H, W) any input that the network takes.

    Returns:
        The raw model itself where it is the only one.
    """
    if env.world_size == 1:
        return raw_model
    raw_model.train()
    with _left_as_it_was(raw_model):
        _pass(raw_model, env, precision, images)
        idle = [name for name, its in raw_model.named_parameters() if its.requires_grad and its.grad is None]
    for name in idle:  # DDP would wait for their gradients; alone such a parameter is not trained either
        raw_model.get_parameter(name).requires_grad_(False)
    if idle:
        get_logger().warning(
            f"{len(idle)} parameters have no part in the outputs and are not trained: {', '.join(idle[:5])}"
            + (", ..." if len(idle) > 5 else "")
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions would call broadcast_buffers another name
        model = DistributedDataParallel(
            raw_model,
            device_ids=[env.device] if env.device.type == "cuda" else None,
            broadcast_buffers=False,  # at every forward pass; SyncBN or `sync_bn.average_buffers` do without
            gradient_as_bucket_view=True,
        )
    with _left_as_it_was(raw_model):
        for _ in range(THROW_AWAY_PASSES):
            _pass(model, env, precision, images)
    return model


def accumulating(model: nn.Module, step_now: bool) -> AbstractContextManager[None]:
    """Context of a forward and backward pass: ranks exchange gradients in the last one of a window only.

    Args:
        model: from `wrap`.
        step_now: whether an optimizer step follows.
    """
    if step_now or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def _pass(model: nn.Module, env: DistEnv, precision: Precision, images: Tensor) -> None:
    with precision.autocast(env.device.type):
        outputs = model(images)
    sum(output.float().mean() for output in outputs).backward()


@contextmanager
def _left_as_it_was(raw_model: nn.Module) -> Iterator[None]:
    """Put buffers back and drop gradients at the end."""
    buffers = {name: buffer.clone() for name, buffer in raw_model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in raw_model.named_buffers():
                buffer.copy_(buffers[name])
        raw_model.zero_grad(set_to_none=True)
