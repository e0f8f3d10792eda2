"""BatchNorm over the global batch, also where torch has none (CPU with Gloo), and averaged running statistics.

Shape letters: N images on this rank, C channels, G groups of values; whatever follows N and C is spatial.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from utils.dist.collectives import all_gather_rows, all_reduce_sum, small_sum
from utils.dist.place import DistEnv, Meeting

PART = 2**19  # values, about, that statistics are taken of at a time: so they stay in a processor's cache


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of the values of all ranks (Ioffe and Szegedy 2015).

    In training mode there is one collective in the forward pass and one in the backward pass, none in evaluation mode,
    where this is BatchNorm. Gradients of weight and bias are this rank's share, like those of any other layer.

    Args:
        num_features: C.
        env: the ranks.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None averages all batches.
        affine: have weight and bias.
        track_running_stats: have running statistics.
    """

    def __init__(
        self,
        num_features: int,
        env: DistEnv,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.env = env

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (N, C, ...); N may be 0 on some ranks. Collective in training mode: every rank must call it.

        Raises:
            ValueError: all ranks together have a single value per channel.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        input = input.contiguous(memory_format=_memory_format(input))
        with torch.no_grad():
            statistics = _pool(all_gather_rows(_local_statistics(input), self.env))
            count, mean, var = statistics.split((1, self.num_features, self.num_features))
            if count <= 1:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
            if self.track_running_stats:
                self._update_running_statistics(mean, var * (count / (count - 1)))
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, mean, var, count, self.eps, self.env)
        return output

    def _update_running_statistics(self, mean: Tensor, unbiased_var: Tensor) -> None:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += 1
        newest = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), newest)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), newest)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class _Normalize(torch.autograd.Function):
    """Normalization by statistics of the values of all ranks, through which their gradients are coupled."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        env: DistEnv,
    ) -> Tensor:
        dtype = _statistics_dtype(input)
        weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(input, weight, mean, var, count)
        ctx.eps, ctx.env = eps, env
        return F.batch_norm(input, mean, var, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # With g the gradient of the output and x^ the normalized input, both of all ranks:
        # dL/dx = scale * (g - mean(g) - x^ mean(g x^)), where scale = weight / sqrt(var + eps).
        input, weight, mean, var, count = ctx.saved_tensors
        grad_output = grad_output.contiguous(memory_format=_memory_format(input))
        scale = (var + ctx.eps).rsqrt() if weight is None else (var + ctx.eps).rsqrt() * weight

        grad_weight, grad_bias = _local_gradient_sums(grad_output, input, mean, var, ctx.eps)
        sums = small_sum(torch.cat((grad_weight, grad_bias)), ctx.env)
        slope, offset = (sums / count.to(sums.dtype) * -scale.repeat(2)).chunk(2)

        grad_input = F.batch_norm(input, mean, var, slope, offset, eps=ctx.eps)
        if grad_output.dtype == scale.dtype:
            grad_input.addcmul_(grad_output, _per_channel(scale, input))
        else:  # with mixed types that is slow; the derivative in evaluation mode is the same product
            grad_input += F.batch_norm(grad_output, torch.zeros_like(mean), var, weight, eps=ctx.eps)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        affine = (grad_weight if needs_weight else None, grad_bias if needs_bias else None)
        return grad_input, *affine, None, None, None, None, None


def _local_gradient_sums(
    grad_output: Tensor, input: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sums over this rank, (C,) each: of g x^ and of g; the gradients of weight and bias."""
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # torch's kernel for evaluation mode has both in one pass.
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad_output, input, None, mean, var, None, None, False, eps, [False, True, True]
    )
    return grad_weight, grad_bias


def _local_statistics(input: Tensor) -> Tensor:
    """Number, mean and biased variance of this rank's values in each channel: (2C + 1) [count, means, variances].

    In double precision, which costs nothing at this size. Zeros for an empty input.
    """
    if input.numel() == 0:
        return input.new_zeros(2 * input.shape[1] + 1, dtype=torch.float64)
    parts = input.split(max(len(input) * PART // input.numel(), 1))
    return _pool(torch.stack([_moments(part) for part in parts]))


def _moments(part: Tensor) -> Tensor:
    """As `_local_statistics`, of some images."""
    channels = part.shape[1]
    count = part.new_full((1,), part.numel() // channels, dtype=torch.float64)
    if part.dtype in (torch.bfloat16, torch.float16):
        # The statistics are float32 because the unused running ones are.
        unused = part.new_zeros(channels, dtype=torch.float32)
        return torch.cat((count, *torch.ops.aten.batch_norm_update_stats(part, unused, unused.clone(), 0.0)))
    # With float32 that kernel would not do: it adds channels-last values up one by one and loses the spread beside a
    # large mean. And torch.var_mean takes ten times as long as these passes.
    dims = [dim for dim in range(part.dim()) if dim != 1]
    mean = part.mean(dims, keepdim=True)
    return torch.cat((count, mean.flatten(), (part - mean).square_().mean(dims)))


def _pool(groups: Tensor) -> Tensor:
    """Join the statistics of groups of values, in their order: (G, 2C + 1) [count, means, variances] to one such row.

    After Chan, Golub and LeVeque 1983: by differences of means, not by squares of them.
    """
    if len(groups) == 1:
        return groups[0]
    channels = groups.shape[1] // 2
    counts, means, variances = groups.split((1, channels, channels), 1)
    count = counts.sum(0)
    share = counts / count
    mean = (share * means).sum(0)
    return torch.cat((count, mean, (share * (variances + (means - mean).square())).sum(0)))


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 2))


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """The format that a tensor has, or is to be copied to: torch's kernels take only dense ones without a detour."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    return last if tensor.is_contiguous(memory_format=last) else torch.contiguous_format


def convert_sync_bn(model: nn.Module, env: DistEnv) -> nn.Module:
    """Put SyncBatchNorm in the place of every BatchNorm, with the same parameters, buffers and state-dict keys.

    On CUDA it is torch's own, elsewhere that of this module; among a single rank nothing changes.

    Args:
        model: changed in place, before it is wrapped.
        env: the ranks, with this one's device.

    Returns:
        The model; another object only if it is itself a BatchNorm.
    """
    if env.world_size == 1:
        return model
    if env.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    env = dataclasses.replace(env, meeting=Meeting())  # layers are copied and pickled, which a meeting can't be
    if isinstance(model, _BatchNorm):
        return _synchronized(model, env)
    replacements = {module: _synchronized(module, env) for module in model.modules() if isinstance(module, _BatchNorm)}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children leaves out a second name of a shared layer
            if child in replacements:
                parent.register_module(name, replacements[child])
    return model


def _synchronized(norm: _BatchNorm, env: DistEnv) -> SyncBatchNorm:
    """A SyncBatchNorm that shares parameters and buffers with a BatchNorm."""
    sync = SyncBatchNorm(norm.num_features, env, norm.eps, norm.momentum, affine=False, track_running_stats=False)
    sync.affine, sync.track_running_stats = norm.affine, norm.track_running_stats
    sync.register_parameter("weight", norm.weight)
    sync.register_parameter("bias", norm.bias)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        sync.register_buffer(name, getattr(norm, name))
    return sync.train(norm.training)


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], env: DistEnv) -> None:
    """Replace floating buffers by their mean over ranks, with one message per dtype; others are left as they are.

    For runs without SyncBN, whose running statistics drift apart: before validation and before they are saved.
    Collective: every rank must call it, with buffers of the same shapes in the same order.
    """
    if env.world_size == 1:  # which may be on MPS, without fp64
        return
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    for dtype in sorted({buffer.dtype for buffer in floating}, key=str):
        group = [buffer for buffer in floating if buffer.dtype == dtype]
        # In fp64: averaging what is the same on all ranks already then changes no bit of it.
        flat = all_reduce_sum(torch.cat([buffer.reshape(-1).double() for buffer in group]), env) / env.world_size
        for buffer, values in zip(group, flat.split([buffer.numel() for buffer in group]), strict=True):
            buffer.copy_(values.view_as(buffer))


def average_statistics(model: nn.Module, env: DistEnv) -> None:
    """Average the running statistics of all BatchNorm layers over ranks; see `average_buffers`. Collective."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    average_buffers([buffer for norm in norms for buffer in norm.buffers(recurse=False)], env)
