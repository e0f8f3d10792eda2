"""Precision of the forward pass, and optimizer steps that leave no trace when their gradient is not finite."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from utils.core.errors import UserError

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
CLIP_EPSILON = 1e-6  # that torch's clip_grads_with_norm_ adds to the norm
GATED_DEVICES = ("cpu", "cuda")  # where torch's fused optimizers skip by a flag on the device


def guarded_step(
    optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float, scaler: torch.amp.GradScaler
) -> Tensor:
    """Unscale, clip and step, unless a gradient is not finite: then parameters and optimizer state stay as they are.

    Torch's fused optimizers read ``found_inf`` (1 skips) on the device, the mechanism that its GradScaler uses, so the
    host does not wait. An optimizer without it costs one wait per step. They also divide gradients by ``grad_scale``
    while they step, which clips them without another walk through memory.

    Args:
        optimizer: over the parameters, made by `utils.training.optim.build_optimizer`.
        parameters: whose gradients are clipped, all together, to a global norm (Pascanu et al. 2013, by torch's
            formula); those without gradient are passed over.
        max_norm: of all gradients together.
        scaler: enabled or not. It needs no word from us: wherever it would find an infinity the norm is not finite.

    Returns:
        found_inf (), float32, 0 or 1; for `BufferSnapshot.restore` and `ModelEMA.update`, in this order. Under data
        parallelism it is the same on all ranks, for the gradients are.
    """
    scaler.unscale_(optimizer)
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in clipped if parameter.grad is not None])
    found_inf = torch.logical_not(torch.isfinite(norm)).to(torch.float32)
    gated = getattr(optimizer, "_step_supports_amp_scaling", False) and norm.device.type in GATED_DEVICES
    in_step = gated and norm.dtype == torch.float32  # grad_scale is float32, too coarse for gradients of float64
    if not in_step:
        nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    if gated:
        steered: Any = optimizer
        steered.found_inf = found_inf
        steered.grad_scale = ((norm + CLIP_EPSILON) / max_norm).clamp(min=1.0) if in_step else None
        optimizer.step()
        del steered.found_inf, steered.grad_scale
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
