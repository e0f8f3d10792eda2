"""Precision of the forward pass, and optimizer steps that leave no trace when their gradient is not finite."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from utils.errors import UserError

# Precision ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """What the forward pass computes in; weights, losses and optimizer stay fp32.

    Attributes:
        name: "bf16", "fp16" or "off".
    """

    name: str

    def autocast(self, device_type: str, cache: bool = True) -> torch.autocast:
        """Context for forward pass and loss.

        Args:
            device_type: "cuda", "cpu" or "mps".
            cache: keep converted weights for the length of the context.
        """
        dtype = torch.float16 if self.name == "fp16" else torch.bfloat16
        return torch.autocast(device_type, dtype=dtype, enabled=self.name != "off", cache_enabled=cache)

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

MAX_GRAD_NORM = 10.0  # of all gradients of a step together
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
