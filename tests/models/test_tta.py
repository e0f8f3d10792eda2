"""Test-time augmentation: what the network is shown, and where its predictions land."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from models import tta as looks
from models.families import YOLOV3, YOLOV5
from models.tta import augmented_anchors, look
from models.yolo import DetectionModel, load_state
from tests.common import PROJECT, SHARED, needs_shared
from utils.data.dataset import DetectionDataset
from utils.data.image_cache import ImageCache
from utils.data.index import build_index
from utils.data.loaders import val_loader
from utils.dist.place import DistEnv
from val import evaluate


class BlobFinder(nn.Module):
    """A stand-in for a network: at every look it finds the bright rectangle of each image, with the exact edges.

    Its three levels of 8, 16 and 32 pixels answer with one row per cell; every row holds the box, so that the rows that
    are left can be counted and all must agree.
    """

    max_stride = 32
    strides = (8, 16, 32)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> list[Tensor]:
        self.seen.append(images)
        return [self._level(images, stride) for stride in self.strides]

    def _level(self, images: Tensor, stride: int) -> Tensor:
        output = torch.zeros(len(images), 1, images.shape[2] // stride, images.shape[3] // stride, 6)
        for b, image in enumerate(images):
            rows, columns = (edges(image[0].amax(axis)) for axis in (1, 0))
            box = torch.tensor([sum(columns) / 2, sum(rows) / 2, columns[1] - columns[0], rows[1] - rows[0]])
            output[b, ..., :4], output[b, ..., 4], output[b, ..., 5] = box, 0.9, float(stride)
        return output

    def decode(self, outputs: list[Tensor]) -> Tensor:
        return torch.cat([level.flatten(1, 3) for level in outputs], 1)


def edges(profile: Tensor) -> tuple[float, float]:
    """Where brightness crosses a half, with fractions, in pixels from the outer edge of the first one."""
    bright = profile > 0.5
    first, last = int(bright.nonzero()[0]), int(bright.nonzero()[-1])
    low, high = profile.tolist()[first - 1 : first + 1], profile.tolist()[last : last + 2]
    return (
        first - 0.5 + (0.5 - low[0]) / (low[1] - low[0]),
        last + 0.5 + (high[0] - 0.5) / (high[0] - high[1]),
    )


def test_boxes_of_all_looks_are_those_of_the_image() -> None:
    """Scaled and flipped back, each look's box is the one drawn; widths and heights keep their order."""
    images = torch.zeros(2, 3, 160, 224)
    images[0, :, 40:72, 20:90] = 1
    images[1, :, 100:150, 150:200] = 1
    model = BlobFinder()
    found = augmented_anchors(model, images)  # type: ignore[arg-type]
    expected = torch.tensor([[55.0, 56, 70, 32], [175, 125, 50, 50]])
    off = (found[..., :4] - expected[:, None]).abs()  # an edge is blurred over a pixel of the smallest look
    assert off[..., :2].max() < 0.6 and off[..., 2:].max() < 2
    assert [tuple(seen.shape[2:]) for seen in model.seen] == [(160, 224), (160, 192), (128, 160)]
    assert torch.equal(model.seen[0], images)
    assert model.seen[1][1, 0, :, :96].sum() > model.seen[1][1, 0, :, 96:186].sum()  # flipped: right is left


class WholeFinder(BlobFinder):
    """Finds the white part of each look, which is all but the padding."""

    def _level(self, images: Tensor, stride: int) -> Tensor:
        white = images[0, 0] > 0.9
        width, height = float(white.any(0).sum()), float(white.any(1).sum())
        output = torch.zeros(len(images), 1, images.shape[2] // stride, images.shape[3] // stride, 6)
        output[..., :4] = torch.tensor([width / 2, height / 2, width, height])
        return output


def test_rounded_sizes_are_undone_exactly() -> None:
    """A side of 32 becomes 27 and 21, not 26.56 and 21.44: what is as large as the image stays so."""
    found = augmented_anchors(WholeFinder(), torch.ones(1, 3, 32, 96))  # type: ignore[arg-type]
    torch.testing.assert_close(found[..., :4], torch.tensor([48.0, 16, 96, 32]).expand_as(found[..., :4]))


def test_outer_levels_of_the_outer_looks_are_left_out() -> None:
    """From the full-size look the stride-32 rows, from the smallest look the stride-8 rows."""
    images = torch.zeros(1, 3, 160, 224)
    images[0, :, 40:72, 20:90] = 1
    model = BlobFinder()
    found = augmented_anchors(model, images)  # type: ignore[arg-type]
    sizes = [[(h // s) * (w // s) for s in model.strides] for h, w in ((160, 224), (160, 192), (128, 160))]
    strides = [8] * sizes[0][0] + [16] * sizes[0][1]
    strides += [8] * sizes[1][0] + [16] * sizes[1][1] + [32] * sizes[1][2]
    strides += [16] * sizes[2][1] + [32] * sizes[2][2]
    assert found[0, :, 5].tolist() == strides


def test_one_level_is_never_left_out() -> None:
    images = torch.zeros(1, 3, 64, 64)
    images[0, :, 20:40, 20:40] = 1
    model = BlobFinder()
    model.strides = (32,)  # type: ignore[assignment]
    assert augmented_anchors(model, images).shape == (1, 4 + 4 + 4, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scale", "flipped"), looks.LOOKS)
def test_a_look(scale: float, flipped: bool) -> None:
    """Padded with grey to whole strides at the right and below; the ratios are exact in both directions."""
    images = torch.linspace(0, 1, 320).expand(1, 3, 192, 320)
    seen, ratio_x, ratio_y = look(images, scale, flipped, 64)
    h, w = round(192 * scale), round(320 * scale)
    assert (ratio_x, ratio_y) == (w / 320, h / 192)
    assert all(side % 64 == 0 for side in seen.shape[2:])
    assert seen.shape[2] - h < 64 and seen.shape[3] - w < 64
    for border in (seen[:, :, h:], seen[:, :, :, w:]):
        torch.testing.assert_close(border, torch.full_like(border, 114 / 255))
    slope = seen[0, 0, 0, 1:w] - seen[0, 0, 0, : w - 1]
    assert (slope > 0).all() != flipped and (slope < 0).all() == flipped


def shipped(name: str) -> dict[str, Any]:
    return yaml.safe_load((PROJECT / "models" / f"{name}.yaml").read_text())


@pytest.mark.parametrize(("family", "name", "levels"), [(YOLOV5, "yolov5n6", 4), (YOLOV3, "yolov3-tiny", 2)])
def test_families_without_three_levels(family: Any, name: str, levels: int) -> None:
    model = DetectionModel({**shipped(name), "width_multiple": 0.1}, 2).eval()
    with torch.inference_mode():
        images = torch.rand(2, 3, 128, 192)
        found = family.augmented(model, images)
        shapes = [look(images, scale, flipped, model.max_stride)[0].shape[2:] for scale, flipped in looks.LOOKS]
    rows = [[3 * (h // s) * (w // s) for s in model.detect.strides] for h, w in shapes]
    assert len(rows[0]) == levels
    assert found.shape == (2, sum(map(sum, rows)) - rows[0][-1] - rows[2][0], 7)
    assert found.isfinite().all()


@pytest.fixture(scope="module")
def bccd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Part of BCCD's validation images and the golden network."""
    folder = tmp_path_factory.mktemp("bccd")
    images = sorted((SHARED / "datasets/bccd/images/val").iterdir())[:24]
    (folder / "val.txt").write_text("\n".join(map(str, images)))
    index = build_index([folder / "val.txt"], 3, split="val", cache=False)
    names = ["RBC", "WBC", "Platelets"]
    model = DetectionModel(shipped("yolov5n"), 3, names)
    arrays = np.load(SHARED / "golden/yolov5n_bccd_state.npz")
    load_state(model, {name: torch.from_numpy(arrays[name]) for name in arrays.files})
    loader = val_loader(DetectionDataset(index, ImageCache(), None, 320), 8, DistEnv(), 0)
    yield SimpleNamespace(model=model.eval(), index=index, names=names, loader=loader)
    loader.close()


@needs_shared
def test_figures_on_real_images_do_not_collapse(bccd: SimpleNamespace) -> None:
    """Three looks find what one finds; objects would be lost if a look's boxes landed elsewhere."""
    plain, augmented = (
        evaluate(bccd.model, YOLOV5, bccd.loader, bccd.index, bccd.names, DistEnv(), augment=augment)
        for augment in (False, True)
    )
    assert plain is not None and augmented is not None
    assert plain.metrics.map50 > 0.7
    assert abs(augmented.metrics.map50 - plain.metrics.map50) < 0.05
    assert abs(augmented.metrics.map - plain.metrics.map) < 0.05
    assert augmented.metrics.map != plain.metrics.map


@needs_shared
def test_a_flipped_image_gives_flipped_boxes_in_the_flipped_look(bccd: SimpleNamespace) -> None:
    """Of one flipped look, boxes are those that the network finds in the image itself when that is flipped by hand."""
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        direct = bccd.model.decode(bccd.model(image.flip(3)))
        patch.setattr(looks, "LOOKS", ((1.0, False), (1.0, True), (1.0, False)))
        found = augmented_anchors(bccd.model, image)
    count = direct.shape[1]
    first = found.shape[1] - count - (count - 3 * 8 * 12)  # rows of the first look
    flipped = found[:, first : first + count]
    torch.testing.assert_close(flipped[..., 0], 96 - direct[..., 0])
    torch.testing.assert_close(flipped[..., 1:], direct[..., 1:])


def test_single_class_evaluation(tmp_path: Path) -> None:
    """All classes as one: two names for one box are one detection, and it is right whatever its name."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    cv2.imwrite(str(tmp_path / "images/a.png"), np.zeros((64, 64, 3), np.uint8))
    (tmp_path / "labels/a.txt").write_text("2 0.5 0.5 0.5 0.5\n")
    box = [48.0, 48, 32, 32, 0.9]  # in the batch of 96 pixels, where the image is in the middle
    family = replace(YOLOV5, decode=lambda model, outputs: torch.tensor([[[*box, 0.1, 0.9, 0], [*box, 0.8, 0.1, 0]]]))
    model = DetectionModel({**shipped("yolov5n"), "width_multiple": 0.1}, 3)
    figures = []
    for single_cls, names in ((True, ["item"]), (False, ["a", "b", "c"])):
        index = build_index([tmp_path / "images"], 3, split="val", single_cls=single_cls, cache=False)
        loader = val_loader(DetectionDataset(index, ImageCache(), None, 64), 1, DistEnv(), 0)
        evaluation = evaluate(model, family, loader, index, names, DistEnv(), single_cls=single_cls)
        loader.close()
        assert evaluation is not None
        metrics = evaluation.metrics
        figures.append((metrics.p, metrics.r, metrics.instances_per_class.tolist()))
    assert figures == [(1.0, 1.0, [1]), (0.0, 0.0, [0, 0, 1])]
