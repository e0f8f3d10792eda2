"""A network's forward pass for its shapes alone: what its maps measure, what they take and what they cost.

PyTorch's own way to that, the meta device, imports its compiler at the first addition, which takes as long as importing
all of torch; a run would do that at its start, and each of its ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UPSAMPLING = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")  # of maps, as F.interpolate has it
FLOAT_BYTES, INDEX_BYTES = 4, 8


class Costs:
    """What a pass adds up.

    Attributes:
        flops: 2 x multiply-adds of the convolutions.
        kept: bytes, in fp32, of each storage that autograd would keep for the backward pass; weights are not counted.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.kept: dict[object, int] = {}


class Map:
    """Stands for a tensor in a forward pass in which nothing is computed.

    Functions of torch find the rules of this module by ``__torch_function__``, PyTorch's protocol for things that are
    like tensors. There are rules for what the modules of a model YAML call, and for nothing else.

    Args:
        shape: of the tensor.
        costs: of the pass.
        requires_grad: whether autograd would follow it.
    """

    def __init__(self, shape: Sequence[int], costs: Costs, requires_grad: bool = False) -> None:
        self.shape, self.costs, self.requires_grad = tuple(shape), costs, requires_grad
        self._storage = object()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in RULES:
            raise TypeError(f"shapes can't be followed through {getattr(func, '__name__', func)}")
        return RULES[func](*args, **(kwargs or {}))

    def __add__(self, other: Map) -> Map:
        if other.shape != self.shape:
            raise RuntimeError(f"maps of sizes {self.shape} and {other.shape} can't be added")
        return Map(self.shape, self.costs, self.requires_grad or other.requires_grad)

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Map:
        """Split an axis; the storage stays."""
        return self._view((*self.shape[:axis], *sizes, *self.shape[axis + 1 :]))

    def permute(self, *axes: int) -> Map:
        """Put axes in another order; the storage stays."""
        return self._view(tuple(self.shape[axis] for axis in axes))

    def keep(self) -> None:
        """Note that autograd keeps this for the backward pass."""
        self.costs.kept[self._storage] = math.prod(self.shape) * FLOAT_BYTES

    def _view(self, shape: tuple[int, ...]) -> Map:
        view = Map(shape, self.costs, self.requires_grad)
        view._storage = self._storage
        return view


def follow(module: nn.Module, inputs: Map | Sequence[Map]) -> Any:
    """Run a module on maps; it stays as it is.

    Raises:
        RuntimeError, ValueError, IndexError: a map does not fit, as where it is computed.
        TypeError: the module calls something that there is no rule for.
    """
    with _evaluating(module):
        return module(inputs)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorm from counting the pass."""
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.training = False
    try:
        yield
    finally:
        for one in training:
            one.training = True


# Rules ----------------------------------------------------------------------------------------------------------------


def _conv2d(
    x: Map,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Map:
    if x.shape[1] != weight.shape[1] * groups:
        raise RuntimeError(f"it reads {x.shape[1]} channels where its weights have {weight.shape[1] * groups}")
    sides = _windows(x, weight.shape[2:], stride, padding, dilation)
    if weight.requires_grad:
        x.keep()
    out = Map((x.shape[0], weight.shape[0], *sides), x.costs, x.requires_grad or weight.requires_grad)
    x.costs.flops += 2 * math.prod(out.shape) * math.prod(weight.shape[1:])
    return out


def _batch_norm(x: Map, mean: Tensor | None, var: Tensor | None, weight: Tensor, *others: Any, **more: Any) -> Map:
    requires_grad = x.requires_grad or weight.requires_grad
    if requires_grad:
        x.keep()
    return Map(x.shape, x.costs, requires_grad)


def _activation(x: Map, *others: Any, **more: Any) -> Map:
    if x.requires_grad:
        x.keep()
    return Map(x.shape, x.costs, x.requires_grad)


def _relu(x: Map, *others: Any, **more: Any) -> Map:
    out = Map(x.shape, x.costs, x.requires_grad)
    if x.requires_grad:
        out.keep()  # its gradient is read off the result
    return out


def _max_pool2d(
    x: Map, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **_: Any
) -> Map:
    if any(pad > kernel // 2 for pad, kernel in zip(_pair(padding), _pair(kernel_size), strict=True)):
        raise RuntimeError(f"its padding of {padding} is more than half of its kernel of {kernel_size}")
    sides = _windows(x, _pair(kernel_size), kernel_size if stride is None else stride, padding, dilation)
    out = Map((*x.shape[:2], *sides), x.costs, x.requires_grad)
    if x.requires_grad:
        x.keep()
        x.costs.kept[object()] = math.prod(out.shape) * INDEX_BYTES
    return out


def _interpolate(x: Map, size: Any = None, scale_factor: Any = None, mode: str = "nearest", **_: Any) -> Map:
    if mode not in UPSAMPLING:
        raise ValueError(f"its mode is {mode!r}; known: {', '.join(UPSAMPLING)}")
    if (size is None) == (scale_factor is None):
        raise ValueError("either its size or its scale_factor has to be given")
    if size is not None:
        sides = _pair(size)
    else:
        sides = tuple(math.floor(side * scale) for side, scale in zip(x.shape[2:], _pair(scale_factor), strict=True))
    if min(sides) < 1:
        raise RuntimeError(f"of a map of {_sides(x)} nothing would be left")
    return Map((*x.shape[:2], *sides), x.costs, x.requires_grad)


def _pad(x: Map, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Map:
    left, right, top, bottom = pad
    height, width = x.shape[2:]
    return Map((*x.shape[:2], height + top + bottom, width + left + right), x.costs, x.requires_grad)


def _cat(maps: Sequence[Map], dim: int = 0) -> Map:
    first = maps[0]
    if not -first.dim() <= dim < first.dim():
        raise IndexError(f"its dimension is {dim}, but maps have {first.dim()}")
    dim %= first.dim()
    rest = {one.shape[:dim] + one.shape[dim + 1 :] for one in maps}
    if len(rest) > 1:
        raise RuntimeError(f"maps of sizes {', '.join(str(one.shape) for one in maps)} can't be joined along {dim}")
    joined = sum(one.shape[dim] for one in maps)
    shape = (*first.shape[:dim], joined, *first.shape[dim + 1 :])
    return Map(shape, first.costs, any(one.requires_grad for one in maps))


def _windows(x: Map, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> tuple[int, ...]:
    """Return the sides of a map that windows are laid over."""
    numbers = zip(x.shape[2:], kernel, _pair(stride), _pair(padding), _pair(dilation), strict=True)
    sides = tuple((side + 2 * pad - step * (width - 1) - 1) // move + 1 for side, width, move, pad, step in numbers)
    if min(sides) < 1:
        raise RuntimeError(f"a map of {_sides(x)} is smaller than its kernel of {kernel[0]} x {kernel[1]}")
    return sides


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def _sides(x: Map) -> str:
    return " x ".join(map(str, x.shape[2:]))


RULES: dict[Any, Callable[..., Map]] = {
    torch.conv2d: _conv2d,
    F.batch_norm: _batch_norm,
    F.silu: _activation,
    F.leaky_relu: _activation,
    F.hardswish: _activation,
    F.mish: _activation,
    F.relu: _relu,
    F.max_pool2d: _max_pool2d,
    F.interpolate: _interpolate,
    F.pad: _pad,
    torch.cat: _cat,
}
