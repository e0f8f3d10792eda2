"""The anchor-based head of a detector.

Shape letters: B images, L levels, A anchors of a level, N all anchors of all cells and levels, C classes, H W rows and
columns of a level's map.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Detect(nn.Module):
    """The head: one biased 1x1 convolution per level, A boxes per cell.

    Args:
        num_classes: C.
        anchors: L levels of flat [w0, h0, w1, h1...], pixels.
        channels: of the L maps that are read.
        strides: of these maps, pixels.
    """

    anchors: Tensor

    def __init__(
        self,
        num_classes: int,
        anchors: Sequence[Sequence[float]],
        channels: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_outputs = 5 + num_classes
        self.num_anchors = len(anchors[0]) // 2
        self.strides = tuple(strides)
        # Numbers also where the weights have none (the meta device).
        sizes = torch.tensor([list(level) for level in anchors], dtype=torch.float32, device="cpu")
        grid = sizes.view(len(anchors), -1, 2) / torch.tensor(self.strides, device="cpu").view(-1, 1, 1)
        # (L, A, 2) widths and heights in grid units (pixels / stride), as published weights hold them
        self.register_buffer("anchors", grid)
        self.m = nn.ModuleList(nn.Conv2d(width, self.num_anchors * self.num_outputs, 1) for width in channels)
        self.initialize_biases()

    @torch.no_grad()
    def initialize_biases(self) -> None:
        """Start from the expected share of objects: 8 per 640 px image, all classes alike (Lin et al. 2017, 4.1)."""
        for conv, stride in zip(self.m, self.strides, strict=True):
            if conv.weight.is_meta:
                return
            bias = conv.get_parameter("bias").view(self.num_anchors, self.num_outputs)
            bias[:, 4] = math.log(8 / (640 / stride) ** 2)
            bias[:, 5:] = math.log(0.6 / (self.num_classes - 0.99999))

    @torch.no_grad()
    def reorder_classes(self, order: Sequence[int]) -> None:
        """Let class i be what class ``order[i]`` was."""
        outputs = [*range(5), *(5 + place for place in order)]
        for parameter in self.m.parameters():
            by_anchor = parameter.unflatten(0, (self.num_anchors, self.num_outputs))
            parameter.copy_(by_anchor[:, outputs].flatten(0, 1))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Return the raw outputs of the L levels, (B, A, H, W, 5 + C) [x, y, w, h, objectness, classes] logits.

        These are views of the convolutions' results; nothing is copied, in either memory format.
        """
        raw = (conv(x) for conv, x in zip(self.m, maps, strict=True))
        return [x.unflatten(1, (self.num_anchors, self.num_outputs)).permute(0, 1, 3, 4, 2) for x in raw]

    def decode(self, outputs: Sequence[Tensor]) -> Tensor:
        """Turn raw outputs into boxes and scores, in fp32. No device sync, no state.

        Args:
            outputs: L tensors (B, A, H, W, 5 + C), as `forward` returns them.

        Returns:
            (B, N, 5 + C) [cx, cy, w, h, objectness, classes]; pixels of the network input, scores in [0, 1].
            Rows by level, then anchor, row, column.
        """
        decoded = []
        for output, anchors, stride in zip(outputs, self.anchors, self.strides, strict=True):
            x = output.float().sigmoid()
            height, width = x.shape[2:4]
            rows = torch.arange(height, device=x.device, dtype=x.dtype)
            columns = torch.arange(width, device=x.device, dtype=x.dtype)
            cells = torch.stack((columns.expand(height, width), rows[:, None].expand(height, width)), -1)  # (H, W, 2)
            centers = (x[..., :2] * 2 - 0.5 + cells) * stride
            sizes = (x[..., 2:4] * 2) ** 2 * (anchors.to(x.dtype) * stride)[:, None, None]
            decoded.append(torch.cat((centers, sizes, x[..., 4:]), -1).flatten(1, 3))
        return torch.cat(decoded, 1)
