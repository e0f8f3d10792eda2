"""The anchor-based detection loss, written as sums and counts so that it can be made global over ranks.

A term of the loss is a sum divided by a count. The counts depend on targets and anchors only, never on what the network
answers, so they are known before the forward pass ends and can be added up over ranks meanwhile; dividing local sums by
global counts makes the gradient of N ranks that of one process with the same global batch.

Shape letters: B images on this rank, T targets in the batch, L levels of the head, A anchors of a level, H W cells of a
level, C classes, M matches of a level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.config.recipe import Hyp
from utils.core.devices import to_device
from utils.metrics.boxes import ciou

BOX, OBJ, CLS = range(3)
"""Rows of every (3, L) tensor here, and the order in which the losses are reported."""

FOCAL_ALPHA = 0.25  # Lin et al. 2017, "Focal Loss for Dense Object Detection"

# Weight of each level's objectness, finest first: fine levels have most cells and so the smallest share of objects.
OBJECTNESS_BALANCE, OBJECTNESS_BALANCE_OF_THREE = (4.0, 1.0, 0.25, 0.06, 0.02), (4.0, 1.0, 0.4)

# The cell itself, then left, up, right, down: a match is also given to the neighbors its center is nearest to.
OFFSETS = ((0.0, 0.0), (-1.0, 0.0), (0.0, -1.0), (1.0, 0.0), (0.0, 1.0))


@dataclass(frozen=True)
class LevelMatches:
    """Which cells of one level answer for which targets.

    Attributes:
        cell: (M,) int64 flat index into (B, H, W, A), the order in which channels-last outputs lie in memory.
        box: (M, 4) cxcywh, grid units, center relative to the cell's corner.
        anchor: (M, 2) anchor width and height, grid units.
        category: (M,) int64 class.
        owner: (K,) int64 indices into the M matches, one for each distinct cell: the last match listed for it.
        cells: B * H * W * A of the level.
    """

    cell: Tensor
    box: Tensor
    anchor: Tensor
    category: Tensor
    owner: Tensor
    cells: int

    def to(self, device: torch.device) -> "LevelMatches":
        """Return the same matches on another device; the copy does not make the host wait."""
        cell, box, anchor, category, owner = (
            to_device(tensor, device) for tensor in (self.cell, self.box, self.anchor, self.category, self.owner)
        )
        return LevelMatches(cell, box, anchor, category, owner, self.cells)


class DetectionLoss:
    """Box (CIoU), objectness and class loss over anchors matched by their shape.

    Gains are scaled as the recipes expect: by the number of levels, the number of classes over 80, and the image area
    over 640 x 640.
    """

    def __init__(
        self,
        anchors: Tensor,
        strides: Sequence[float],
        num_classes: int,
        hyp: Hyp,
        imgsz: int,
        label_smoothing: float = 0.0,
    ) -> None:
        """Prepare constants.

        Args:
            anchors: (L, A, 2) widths and heights, grid units of their level.
            strides: L strides, pixels.
            num_classes: C; with one class the class term is left out.
            hyp: loss gains and the matching threshold.
            imgsz: side of the training images, pixels.
            label_smoothing: epsilon; class targets become 1 - epsilon / 2 and epsilon / 2.
        """
        levels = len(strides)
        self.anchors = anchors.detach().float().cpu().clone()
        self.strides = [int(stride) for stride in strides]
        self.num_classes = num_classes
        self.anchor_t, self.gamma = hyp.anchor_t, hyp.fl_gamma
        self.obj_pw, self.cls_pw = hyp.obj_pw, hyp.cls_pw
        self.positive, self.negative = 1.0 - 0.5 * label_smoothing, 0.5 * label_smoothing

        balance = torch.tensor(OBJECTNESS_BALANCE_OF_THREE if levels == 3 else OBJECTNESS_BALANCE[:levels])
        gains = torch.ones(3, levels) * (3 / levels)
        gains[BOX] *= hyp.box
        gains[OBJ] *= hyp.obj * (imgsz / 640) ** 2 * balance
        gains[CLS] *= hyp.cls * num_classes / 80 if num_classes > 1 else 0.0
        self.gains = gains

    def match(self, targets: Tensor, batch: int, height: int, width: int) -> list[LevelMatches]:
        """Assign targets to cells by the shape of the anchors. Runs on the CPU, ahead of the network.

        A target and an anchor belong together where neither side is ``anchor_t`` times the other's; no level excludes
        another. Of several matches in one cell and anchor all count for box and class, and the last listed sets the
        objectness.

        Args:
            targets: (T, 6) [image, class, cx, cy, w, h]; cxcywhn; image indexes the local batch. On the CPU.
            batch: B, images in the local batch.
            height: of the network input, pixels.
            width: of the network input, pixels.

        Returns:
            One entry for each level; without targets each has M = 0.
        """
        return [
            self._match_level(targets.float(), anchors, (batch, len(anchors), height // stride, width // stride))
            for anchors, stride in zip(self.anchors, self.strides, strict=True)
        ]

    def _match_level(self, targets: Tensor, anchors: Tensor, shape: tuple[int, int, int, int]) -> LevelMatches:
        _, num_anchors, rows, columns = shape
        size = torch.tensor([columns, rows], dtype=torch.float32)
        center, extent = targets[:, 2:4] * size, targets[:, 4:6] * size

        ratio = extent[None] / anchors[:, None]  # (A, T, 2)
        fits = torch.maximum(ratio, 1 / ratio).amax(2) < self.anchor_t  # (A, T)
        anchor_index, target_index = fits.nonzero(as_tuple=True)  # by anchor, then target

        xy, to_end = center[target_index], size - center[target_index]
        near_start = (xy % 1 < 0.5) & (xy > 1)
        near_end = (to_end % 1 < 0.5) & (to_end > 1)
        given = torch.stack([torch.ones_like(near_start[:, 0]), *near_start.T, *near_end.T])  # (5, M') as OFFSETS
        offset_index, match_index = given.nonzero(as_tuple=True)  # own cell first, then left, up, right, down

        anchor_index, target_index = anchor_index[match_index], target_index[match_index]
        xy = center[target_index]
        # A center on the far border belongs to the last cell, not to one outside the grid.
        corner = (xy.floor() + torch.tensor(OFFSETS)[offset_index]).clamp(min=torch.zeros(2), max=size - 1)
        column, row = corner.long().unbind(1)
        image = targets[target_index, 0].long()
        cell = ((image * rows + row) * columns + column) * num_anchors + anchor_index
        return LevelMatches(
            cell=cell,
            box=torch.cat([xy - corner, extent[target_index]], 1),
            anchor=anchors[anchor_index],
            category=targets[target_index, 1].long(),
            owner=_last_of_each(cell),
            cells=math.prod(shape),
        )

    def counts(self, matches: list[LevelMatches]) -> Tensor:
        """Count what the sums of :meth:`sums` run over; to be added up over ranks before dividing.

        Args:
            matches: of :meth:`match`.

        Returns:
            (3, L) int64 [box, objectness, class] matches, cells, and matches x classes of each level.
        """
        found = [level.cell.numel() for level in matches]
        cells = [level.cells for level in matches]
        return torch.tensor([found, cells, [number * self.num_classes for number in found]])

    def sums(self, outputs: Sequence[Tensor], matches: list[LevelMatches]) -> Tensor:
        """Add up the loss over this rank's share of the batch. Computed in float32 at least.

        Args:
            outputs: L raw outputs (B, A, H, W, 5 + C) [x, y, w, h, objectness, classes] logits.
            matches: of :meth:`match`, on the device of the outputs.

        Returns:
            (3, L) [box, objectness, class] sums; with gradient to every output, also without any match.
        """
        with torch.autocast(outputs[0].device.type, enabled=False):
            columns = [self._level_sums(output, level) for output, level in zip(outputs, matches, strict=True)]
        return torch.stack(columns, 1)

    def _level_sums(self, output: Tensor, level: LevelMatches) -> Tensor:
        flat = output.permute(0, 2, 3, 1, 4).reshape(-1, output.shape[-1])  # (B * H * W * A, 5 + C)
        matched = _full_precision(flat[level.cell])  # (M, 5 + C)
        xy = matched[:, 0:2].sigmoid() * 2 - 0.5
        wh = (matched[:, 2:4].sigmoid() * 2) ** 2 * level.anchor
        _, overlap = ciou(torch.cat([xy, wh], 1), level.box)

        objectness = _full_precision(flat[:, 4])
        wanted = torch.zeros_like(objectness)
        # One write for each cell: duplicate indices would have no defined order on CUDA.
        wanted[level.cell[level.owner]] = overlap.detach().clamp(min=0)[level.owner]

        obj_sum = self._bce(objectness, wanted, self.obj_pw).sum()
        if self.num_classes > 1:
            classes = torch.full_like(matched[:, 5:], self.negative)
            classes.scatter_(1, level.category[:, None], self.positive)
            cls_sum = self._bce(matched[:, 5:], classes, self.cls_pw).sum()
        else:
            cls_sum = obj_sum.new_zeros(())
        return torch.stack([(1 - overlap).sum(), obj_sum, cls_sum])

    def _bce(self, logits: Tensor, wanted: Tensor, positive_weight: float) -> Tensor:
        # Filled on the device: to copy a number there makes the host wait.
        pos_weight = None if positive_weight == 1.0 else logits.new_full((), positive_weight)
        loss = F.binary_cross_entropy_with_logits(logits, wanted, pos_weight=pos_weight, reduction="none")
        if self.gamma == 0:
            return loss
        probability = logits.sigmoid()
        right = wanted * probability + (1 - wanted) * (1 - probability)
        alpha = wanted * FOCAL_ALPHA + (1 - wanted) * (1 - FOCAL_ALPHA)
        return loss * alpha * (1 - right) ** self.gamma

    def items(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Divide sums by counts and weigh the levels.

        Args:
            sums: (3, L) of :meth:`sums`.
            counts: (3, L) of :meth:`counts`, of the same images or, over ranks, of the whole global batch.

        Returns:
            (3,) [box, objectness, class] losses; a term without any match is zero. Their sum times the global batch is
            the loss to descend on; over N ranks also times N, since DDP averages gradients.
        """
        gains = self.gains.to(sums.device, non_blocking=sums.is_cuda)
        return (gains * sums / counts.to(sums.device, non_blocking=sums.is_cuda).clamp(min=1)).sum(1)


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _last_of_each(cell: Tensor) -> Tensor:
    """Return the position of the last entry of each distinct value, in ascending order of the values."""
    if cell.numel() == 0:
        return cell
    order = torch.argsort(cell, stable=True)
    ranked = cell[order]
    return order[torch.cat([ranked[1:] != ranked[:-1], torch.ones(1, dtype=torch.bool)])]
