"""The layers that networks are made of.

Attribute names are those of published YOLOv5 weights (``cv1``, ``m``...), so that these load one to one.

Shape letters: B images, C channels in, D channels out, H W map height and width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, activation: (B, C, H, W) -> (B, D, H / stride, W / stride).

    Args:
        c_in: C.
        c_out: D.
        kernel: side of the kernel.
        stride: step of the kernel.
        padding: on every side; None keeps the size at stride 1 with an odd kernel.
        groups: of channels that are convolved apart.
    """

    def __init__(
        self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, padding: int | None = None, groups: int = 1
    ) -> None:
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(c_out, eps=1e-3, momentum=0.03)
        # Not in place: autograd needs SiLU's input, so in training the in-place form clones the map first.
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, normalize, activate."""
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution, around which the input is added (He et al. 2015): (B, C, H, W) -> (B, D, H, W).

    Args:
        c_in: C.
        c_out: D.
        shortcut: add the input, where C = D.
        groups: of the 3x3 convolution.
        expansion: hidden channels as a share of D.
    """

    def __init__(self, c_in: int, c_out: int, shortcut: bool = True, groups: int = 1, expansion: float = 0.5) -> None:
        super().__init__()
        hidden = int(c_out * expansion)
        self.cv1 = Conv(c_in, hidden, 1)
        self.cv2 = Conv(hidden, c_out, 3, groups=groups)
        self.add = shortcut and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolved map, plus the input where there is a shortcut."""
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3(nn.Module):
    """Cross-stage partial block of three convolutions (Wang et al. 2019, CSPNet): (B, C, H, W) -> (B, D, H, W).

    One half of the hidden channels runs through bottlenecks, the other goes past them.

    Args:
        c_in: C.
        c_out: D.
        repeats: number of bottlenecks.
        shortcut: whether these add their input.
        groups: of their 3x3 convolutions.
        expansion: hidden channels as a share of D.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        repeats: int = 1,
        shortcut: bool = True,
        groups: int = 1,
        expansion: float = 0.5,
    ) -> None:
        super().__init__()
        hidden = int(c_out * expansion)
        self.cv1 = Conv(c_in, hidden)
        self.cv2 = Conv(c_in, hidden)
        self.cv3 = Conv(2 * hidden, c_out)
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, groups, 1.0) for _ in range(repeats)))

    def forward(self, x: Tensor) -> Tensor:
        """Join the two halves."""
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class SPP(nn.Module):
    """Spatial pyramid pooling, poolings side by side (He et al. 2014): (B, C, H, W) -> (B, D, H, W).

    Args:
        c_in: C.
        c_out: D.
        kernels: odd sides of the max-poolings.
    """

    def __init__(self, c_in: int, c_out: int, kernels: Sequence[int] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = Conv(c_in, hidden)
        self.cv2 = Conv(hidden * (len(kernels) + 1), c_out)
        self.m = nn.ModuleList(nn.MaxPool2d(kernel, 1, kernel // 2) for kernel in kernels)

    def forward(self, x: Tensor) -> Tensor:
        """Pool at several sizes; the map itself comes first."""
        x = self.cv1(x)
        return self.cv2(torch.cat((x, *(pool(x) for pool in self.m)), 1))


class SPPF(nn.Module):
    """SPP with one small pooling three times in a row, which equals k, 2k - 1, 3k - 2: (B, C, H, W) -> (B, D, H, W).

    Args:
        c_in: C.
        c_out: D.
        kernel: odd side of the max-pooling.
    """

    def __init__(self, c_in: int, c_out: int, kernel: int = 5) -> None:
        super().__init__()
        hidden = c_in // 2
        self.cv1 = Conv(c_in, hidden)
        self.cv2 = Conv(hidden * 4, c_out)
        self.m = nn.MaxPool2d(kernel, 1, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Pool the pooled map again, and join all of them."""
        x = self.cv1(x)
        once = self.m(x)
        twice = self.m(once)
        return self.cv2(torch.cat((x, once, twice, self.m(twice)), 1))


class Concat(nn.Module):
    """Join maps of one size: several (B, C_i, H, W) -> (B, sum of C_i, H, W).

    Args:
        dim: the axis along which they are joined.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Join the maps in the order given."""
        return torch.cat(maps, self.dim)
