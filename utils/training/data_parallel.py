"""A network in several copies: one in each rank, whose gradients are averaged once in a window, or in one process."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.core.devices import as_typed, parse_device
from utils.core.errors import UserError
from utils.core.heartbeat import waiting
from utils.core.logging import get_logger
from utils.core.wording import first_of, format_lines
from utils.dist.collectives import average_in_bf16
from utils.dist.place import DistEnv
from utils.training.steps import Precision

THROW_AWAY_PASSES = 2
# Gradients leave in buckets of about so many MiB, each as soon as it is full. YOLOv5n has 7 MiB of them, YOLOv5s 28:
# with PyTorch's own 25 nearly all would leave when the backward pass is over and nothing is left to hide the exchange.
BUCKET_MIB = 4


def wrap(raw_model: nn.Module, env: DistEnv, precision: Precision, images: Tensor, compress: str = "off") -> nn.Module:
    """Return a network whose backward pass ends with the mean of all ranks' gradients. Collective.

    All ranks start from rank 0's weights and buffers. DDP sorts its buckets anew after the first backward pass, which
    changes the order in which gradients are summed; two passes that leave nothing behind settle it, so that a resumed
    run sums like one that was never stopped.

    Args:
        raw_model: on its device, SyncBN in place, with the weights to train from.
        env: this rank's place.
        precision: of the training.
        images: (B, 3, H, W) any input that the network takes.
        compress: ``bf16`` sends gradients in it, see `average_in_bf16`; ``off`` sends them as they are.

    Returns:
        The raw model itself where it is the only one.
    """
    if env.world_size == 1:
        if compress != "off":
            get_logger().info(
                format_lines([("gradients", f"--grad-compress {compress} has no effect: one rank sends none")])
            )
        return raw_model
    raw_model.train()
    with _left_as_it_was(raw_model):
        _pass(raw_model, env, precision, images)
        idle = [name for name, its in raw_model.named_parameters() if its.requires_grad and its.grad is None]
    for name in idle:  # DDP would wait for their gradients; alone such a parameter is not trained either
        raw_model.get_parameter(name).requires_grad_(False)
    if idle:
        get_logger().warning(
            f"{len(idle)} parameters have no part in the outputs and are not trained: {first_of(idle, 5)}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions would call broadcast_buffers another name
        model = DistributedDataParallel(
            raw_model,
            device_ids=[env.device] if env.device.type == "cuda" else None,
            broadcast_buffers=False,  # at every forward pass; SyncBN or `sync_bn.average_buffers` do without
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MIB,
        )
    if compress == "bf16":
        model.register_comm_hook(None, average_in_bf16)
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
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return _joined(model) if step_now else model.no_sync()


@contextmanager
def _joined(model: nn.Module) -> Iterator[None]:
    """Let a rank count as waiting from when it has the gradient of its first layer, which comes last."""
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    hook = first.register_hook(lambda _: waiting.enter()) if first.device.type == "cpu" else None
    try:
        yield
    finally:
        if hook is not None:  # elsewhere it is the device that waits
            hook.remove()
            waiting.leave()


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


# Several devices in one process (``--dp``) ----------------------------------------------------------------------------


def replica_devices(
    wanted: bool, flag: str, env: DistEnv, cuda_count: int | None = None, has_mps: bool | None = None
) -> list[torch.device]:
    """Return the CUDA devices that share the batches of this process, the first one its own; [] without ``--dp``.

    Also [] under a launcher, whose ranks have one device each: a resumed run may have begun elsewhere.

    Args:
        wanted: ``--dp``.
        flag: ``--device``.
        env: this process's place.
        cuda_count: CUDA devices of this machine; None asks PyTorch.
        has_mps: whether Apple's GPU can be used; None asks PyTorch.

    Raises:
        UserError: the flag does not name several CUDA devices.
    """
    if not wanted or env.launched:
        return []
    cuda_count = torch.cuda.device_count() if cuda_count is None else cuda_count
    devices = parse_device(flag, cuda_count, torch.backends.mps.is_available() if has_mps is None else has_mps)
    if len(devices) == 1 or devices[0].type != "cuda":
        raise UserError(
            f"--dp shares batches among several CUDA devices, and --device {as_typed(flag) or repr(flag)} is "
            f"{', '.join(map(str, devices))}; name several, as --device 0,1, or leave --dp out"
        )
    return devices


def replicate(
    raw_model: nn.Module, precision: Precision, devices: Sequence[torch.device], batch: int
) -> nn.DataParallel[nn.Module]:
    """Return a network that shares each batch among several devices of this process, and say what that costs.

    Args:
        raw_model: on the first of the devices; it keeps the weights and BatchNorm's running statistics.
        precision: of the training.
        devices: CUDA devices; where PyTorch finds no GPU at all the network computes where it is.
        batch: images of a batch.
    """
    share = -(-batch // max(len(devices), 1))
    get_logger().warning(
        f"--dp: DataParallel is slow and not recommended. BatchNorm sees the {share} images of its own device only, so "
        "results differ from those of one device; without --dp each device has a process"
    )
    return nn.DataParallel(_Replica(raw_model, precision), device_ids=list(devices))


class _Replica(nn.Module):
    """Computes in a run's precision: DataParallel's threads begin with PyTorch's default, fp16."""

    def __init__(self, raw_model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.raw_model, self.precision = raw_model, precision

    def forward(self, images: Tensor) -> list[Tensor]:
        with self.precision.autocast(images.device.type):
            outputs: list[Tensor] = self.raw_model(images)
            return outputs
