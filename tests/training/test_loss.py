"""The loss: golden values, gradients, and the sums-and-counts form that ranks rely on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.common import golden
from utils.config.recipe import Hyp
from utils.training.loss import DetectionLoss

PIXEL_ANCHORS = torch.tensor(
    [
        [[10, 13], [16, 30], [33, 23]],
        [[30, 61], [62, 45], [59, 119]],
        [[116, 90], [156, 198], [373, 326]],
    ]
).float()
STRIDES = [8, 16, 32]
ANCHORS = PIXEL_ANCHORS / torch.tensor(STRIDES)[:, None, None]


def criterion(hyp: Hyp | None = None, num_classes: int = 3, label_smoothing: float = 0.0) -> DetectionLoss:
    return DetectionLoss(ANCHORS, STRIDES, num_classes, hyp or Hyp(), 320, label_smoothing)


def compute(loss_of: DetectionLoss, outputs: list[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    matches = loss_of.match(targets, len(outputs[0]), 320, 320)
    items = loss_of.items(loss_of.sums(outputs, matches), loss_of.counts(matches))
    return items.sum() * len(outputs[0]), items


@pytest.fixture(scope="module")
def case() -> dict[str, Any]:
    arrays, facts = golden("loss_case.npz"), golden("loss_case.json")
    outputs = [torch.from_numpy(arrays[f"pred{level}"]).requires_grad_() for level in range(3)]
    return {"arrays": arrays, "facts": facts, "outputs": outputs, "targets": torch.from_numpy(arrays["targets"])}


def test_golden_loss_gradients_and_matches(case: dict[str, Any]) -> None:
    arrays, outputs = case["arrays"], case["outputs"]
    loss_of = criterion()
    matches = loss_of.match(case["targets"], 4, 320, 320)
    assert [len(level.cell) for level in matches] == arrays["matches"].tolist()

    loss, items = compute(loss_of, outputs, case["targets"])
    np.testing.assert_allclose(loss.item(), arrays["loss"], rtol=1e-6)
    np.testing.assert_allclose(items.detach().numpy(), arrays["items"], rtol=1e-6)
    for level, gradient in enumerate(torch.autograd.grad(loss, outputs)):
        expected = torch.from_numpy(arrays[f"grad{level}"])
        assert (gradient - expected).norm() <= 1e-6 * expected.norm()


def test_golden_loss_without_targets(case: dict[str, Any]) -> None:
    loss, items = compute(criterion(), case["outputs"], torch.zeros(0, 6))
    np.testing.assert_allclose(loss.item(), case["facts"]["loss_empty_targets"], rtol=1e-6)
    np.testing.assert_allclose(items.detach().numpy(), case["facts"]["items_empty"], rtol=1e-6)


@pytest.mark.parametrize("variant", ["label_smoothing=0.1", "fl_gamma=1.5", "obj_pw=0.7", "cls_pw=0.5"])
def test_golden_variants(case: dict[str, Any], variant: str) -> None:
    key, value = variant.split("=")
    if key == "label_smoothing":
        loss_of = criterion(label_smoothing=float(value))
    else:
        loss_of = criterion(replace(Hyp(), **{key: float(value)}))
    loss, items = compute(loss_of, case["outputs"], case["targets"])
    np.testing.assert_allclose([loss.item(), *items.tolist()], case["facts"][f"variant_{variant}"], rtol=1e-6)


def random_case(batch: int = 6, num_classes: int = 3, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Outputs of a network and uneven targets: the third image has none, the first has most."""
    generator = torch.Generator().manual_seed(seed)
    outputs = [
        torch.randn(batch, 3, 320 // s, 320 // s, 5 + num_classes, generator=generator, dtype=torch.float64)
        for s in STRIDES
    ]
    image = torch.tensor([0] * 9 + [1] * 2 + [3] * 3 + [5] * 4)
    targets = torch.rand(len(image), 6, generator=generator)
    targets[:, 0], targets[:, 1] = image, torch.randint(num_classes, (len(image),), generator=generator)
    targets[:, 4:] = targets[:, 4:] * 0.4 + 0.02
    return outputs, targets


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_counts_make_rank_gradients_add_up(world_size: int) -> None:
    """The mean over ranks of N x B x local sums / global counts is the whole batch's gradient (B3).

    Per-rank counts are what made four GPUs lose 0.23 mAP in LibreYOLO/libreyolo#484; the whole is compared to them here
    by an exact equality that they break.
    """
    outputs, targets = random_case()
    loss_of = criterion()
    whole = [output.clone().requires_grad_() for output in outputs]
    compute(loss_of, whole, targets)[0].backward()

    share = 6 // world_size
    ranks = []
    for rank in range(world_size):
        low = rank * share
        mine = targets[(targets[:, 0] >= low) & (targets[:, 0] < low + share)].clone()
        mine[:, 0] -= low
        local = [output[low : low + share].clone().requires_grad_() for output in outputs]
        ranks.append((local, loss_of.match(mine, share, 320, 320)))
    counts = torch.stack([loss_of.counts(matches) for _, matches in ranks]).sum(0)
    for rank, (local, matches) in enumerate(ranks):
        (loss_of.items(loss_of.sums(local, matches), counts).sum() * 6 * world_size).backward()
        for level in range(3):
            gradient = local[level].grad
            expected = whole[level].grad
            assert gradient is not None and expected is not None
            expected = expected[rank * share : (rank + 1) * share]
            assert (gradient / world_size - expected).norm() <= 1e-6 * expected.norm()


def test_a_rank_without_targets_reaches_every_output() -> None:
    """A constant graph: lyuwenyu/RT-DETR under ultralytics/ultralytics#14093 died on a batch without objects."""
    outputs = [output.requires_grad_() for output in random_case()[0]]
    loss, items = compute(criterion(), outputs, torch.zeros(0, 6))
    assert all(gradient is not None for gradient in torch.autograd.grad(loss, outputs))
    assert items[0] == items[2] == 0


def test_the_last_match_of_a_cell_sets_its_objectness() -> None:
    """Two targets with one center and shape: one cell, listed by target; the later one owns the cell."""
    targets = torch.tensor([[0, 0, 0.5, 0.5, 0.05, 0.05], [0, 1, 0.5, 0.5, 0.06, 0.06]])
    for level in criterion().match(targets, 1, 320, 320):
        owners = dict(zip(level.cell[level.owner].tolist(), level.owner.tolist(), strict=True))
        last = {cell: position for position, cell in enumerate(level.cell.tolist())}
        assert owners == last


def test_centers_on_the_far_border_stay_inside_the_grid() -> None:
    targets = torch.tensor([[0, 0, 1.0, 1.0, 0.2, 0.2], [0, 0, 0.0, 0.0, 0.2, 0.2]])
    for level in criterion().match(targets, 1, 320, 320):
        assert level.cell.numel() == 0 or 0 <= level.cell.min() <= level.cell.max() < level.cells


def test_one_class_has_no_class_loss() -> None:
    outputs, targets = random_case(num_classes=1)
    _, items = compute(criterion(num_classes=1), outputs, targets)
    assert items[2] == 0 and items[0] > 0


def test_weights_of_positives_are_made_on_the_device() -> None:
    """The host waited for the device at each level where obj_pw or cls_pw is not 1: a number of its own is copied."""
    outputs, targets = random_case()
    loss_of = criterion(Hyp(obj_pw=0.7, cls_pw=0.5))
    matches = loss_of.match(targets, 6, 320, 320)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of.sums(outputs, matches)
    assert "aten::lift_fresh" not in {event.key for event in profile.key_averages()}


def test_half_precision_outputs_are_scored_in_float32() -> None:
    outputs, targets = random_case()
    half = [output.bfloat16() for output in outputs]
    full = [output.float() for output in half]
    assert compute(criterion(), half, targets)[0] == compute(criterion(), full, targets)[0]
