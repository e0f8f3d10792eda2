"""Anchors: how well they fit labels, the search, and the network that takes what was found."""

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from models.build import with_anchor_count
from models.families import YOLOV5, fit_anchors
from models.parser import generic_anchors
from models.yolo import DetectionModel
from tests.common import PROJECT, SHARED, needs_shared
from utils.config.recipe import Hyp
from utils.core.errors import UserError
from utils.core.logging import get_logger
from utils.data.index import LabelIndex, build_index
from utils.dist.place import DistEnv
from utils.training import autoanchor
from utils.training.autoanchor import label_sizes, measure, search, vary

ENV = DistEnv()
ANCHOR_T = 4.0


def shipped(name: str) -> dict[str, Any]:
    return yaml.safe_load((PROJECT / "models" / f"{name}.yaml").read_text())


def index_of(sizes: np.ndarray, side: int = 640, per_image: int = 5) -> LabelIndex:
    """Square images with boxes of these (M, 2) sizes in pixels."""
    n = -(-len(sizes) // per_image)
    rows = np.full((len(sizes), 5), 0.5, np.float32)
    rows[:, 0], rows[:, 3:] = 0, sizes / side
    arrays: dict[str, np.ndarray] = {
        "names": np.zeros(n, np.uint8),
        "name_offsets": np.arange(n + 1),
        "shapes": np.full((n, 2), side, np.int32),
        "offsets": np.minimum(np.arange(n + 1) * per_image, len(sizes)),
        "rows": rows,
        "report": np.zeros(0, np.uint8),
    }
    return LabelIndex(arrays, {"num_classes": 2, "name": "made", "images_digest": ""})


def unusual(seed: int = 0, n: int = 200) -> np.ndarray:
    """Tiny boxes of 4:1 and 1:6."""
    rng = np.random.default_rng(seed)
    area = np.exp(rng.uniform(np.log(8), np.log(500), n))
    aspect = rng.choice([4.0, 1 / 6], n)
    return np.stack([np.sqrt(area * aspect), np.sqrt(area / aspect)], 1)


def recall(anchors: Tensor, sizes: np.ndarray) -> float:
    """Share of boxes with an anchor neither of whose sides is 4 times the box's or a fourth; one by one."""
    found = 0
    for w, h in sizes.tolist():
        ratios = [max(w / aw, aw / w, h / ah, ah / h) for aw, ah in anchors.reshape(-1, 2).tolist()]
        found += min(ratios) < ANCHOR_T
    return found / len(sizes)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.INFO, logger="lockstep")
    return caplog


# --- Measuring -------------------------------------------------------------------------------------------------------


def test_measure_by_hand() -> None:
    anchors = np.array([[[10.0, 10.0], [20.0, 20.0]], [[40.0, 40.0], [80.0, 80.0]]])
    sizes = np.array([[9.0, 20.0], [200.0, 90.0], [10.0, 400.0]])
    # (9, 20): worst ratios 1/2, 9/20, 9/40, 9/80, of which two are above 1/4; (200, 90): 2/5 and 1/5; (10, 400): none
    fit = measure(anchors, sizes, ANCHOR_T)
    assert (fit.bpr, fit.aat) == (2 / 3, pytest.approx(3 / 3))
    assert fit.score == pytest.approx((1 / 2 + 2 / 5) / 3)


def test_measure_is_the_rule_of_the_loss() -> None:
    """A label that counts as recalled is matched by the loss, and no other."""
    sizes = unusual(3)
    model = DetectionModel(shipped("yolov5n"), 2)
    criterion = YOLOV5.criterion(model, Hyp(), 640, 0.0)
    targets = torch.full((len(sizes), 6), 0.501)
    targets[:, 0], targets[:, 1] = torch.arange(len(sizes)), 0  # one label in each image
    targets[:, 4:] = torch.from_numpy(sizes) / 640
    levels = criterion.match(targets, len(sizes), 640, 640)
    matched = len(torch.cat([level.cell // (level.cells // len(sizes)) for level in levels]).unique())
    assert measure(model.anchors.numpy(), sizes, ANCHOR_T).bpr == matched / len(sizes)
    assert 0 < matched < len(sizes)


def test_sizes_are_those_in_the_resized_image() -> None:
    """The longer side of an image is the image size, whichever it is."""
    rows = np.array([[0, 0.5, 0.5, 0.1, 0.2], [0, 0.5, 0.5, 1, 1], [0, 0.5, 0.5, 0.5, 0.5]], np.float32)
    shapes, offsets = np.array([[100, 200], [80, 10], [600, 300]], np.int32), np.array([0, 2, 2, 3])
    expected = [[32, 32], [320, 160], [80, 160]]
    np.testing.assert_allclose(label_sizes(shapes, offsets, rows, 320), expected, rtol=1e-6)


def test_scale_varies_by_image_and_seed() -> None:
    sizes, offsets = np.ones((6, 2)), np.array([0, 2, 2, 6])
    varied = vary(sizes, offsets, 5)
    assert (varied >= 0.9).all() and (varied <= 1.1).all()
    assert len(np.unique(varied[:2])) == len(np.unique(varied[2:])) == 1 and varied[0, 0] != varied[2, 0]
    assert (vary(sizes, offsets, 5) == varied).all() and (vary(sizes, offsets, 6) != varied).any()


# --- Searching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "per_level"), [(3, 3), (4, 3), (2, 3), (5, 1)])
def test_search_finds_unusual_boxes(levels: int, per_level: int) -> None:
    sizes = unusual()
    anchors = search(sizes, levels, per_level, ANCHOR_T, 0)
    assert anchors.shape == (levels, per_level, 2) and (anchors > 0).all()
    assert recall(torch.from_numpy(anchors), sizes) > 0.98
    areas = anchors.reshape(-1, 2).prod(1)
    assert (np.diff(areas) >= 0).all()  # the finest level has the smallest


def test_search_beats_kmeans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.exp(np.random.default_rng(1).normal(3.0, 1.2, (300, 2)))
    refined = measure(search(sizes, 3, 3, ANCHOR_T, 0), sizes, ANCHOR_T)
    monkeypatch.setattr(autoanchor, "GENERATIONS", 0)
    plain = measure(search(sizes, 3, 3, ANCHOR_T, 0), sizes, ANCHOR_T)
    assert refined.score > plain.score + 0.01


def test_kmeans_finds_clusters() -> None:
    """Tight clusters far from each other: the centers are their means."""
    rng = np.random.default_rng(0)
    centers = np.array([[10.0, 30.0], [80.0, 20.0], [200.0, 300.0]])
    sizes = np.concatenate([center * rng.uniform(0.98, 1.02, (40, 2)) for center in centers])
    means = sizes.reshape(3, 40, 2).mean(1)
    best = min(
        (autoanchor._kmeans(sizes, 3, np.random.default_rng(seed)) for seed in range(5)),
        key=lambda found: np.abs(found[np.argsort(found.prod(1))] - means).max(),
    )
    np.testing.assert_allclose(best[np.argsort(best.prod(1))], means, rtol=1e-9)


def test_search_follows_from_the_seed() -> None:
    sizes = np.exp(np.random.default_rng(1).normal(3.0, 1.0, (200, 2)))
    torch.manual_seed(1)
    np.random.seed(1)
    first = search(sizes, 3, 3, ANCHOR_T, 7)
    torch.manual_seed(2)
    np.random.seed(2)
    assert (search(sizes, 3, 3, ANCHOR_T, 7) == first).all()
    assert (search(sizes, 3, 3, ANCHOR_T, 8) != first).any()


@pytest.mark.parametrize("count", [1, 2, 5, 9, 10])
def test_few_labels(count: int) -> None:
    sizes = unusual(2, count)
    assert recall(torch.from_numpy(search(sizes, 3, 3, ANCHOR_T, 0)), sizes) == 1.0


@pytest.mark.parametrize("size", [(1.0, 1.0), (7.0, 7.0), (0.001, 300.0)])
def test_labels_of_one_size(size: tuple[float, float]) -> None:
    """No spread to whiten by, and with the first one no label large enough for the search."""
    sizes = np.tile(size, (50, 1))
    anchors = search(sizes, 3, 3, ANCHOR_T, 0)
    assert np.isfinite(anchors).all() and (anchors > 0).all()


def test_many_labels_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoanchor, "SEARCHED", 150)
    sizes = unusual(0, 2000)
    assert measure(search(sizes, 3, 3, ANCHOR_T, 0), sizes, ANCHOR_T).bpr > 0.98


# --- The network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["yolov5n", "yolov5n6", "yolov3-tiny"])
def test_the_network_takes_what_fits(name: str, log: pytest.LogCaptureFixture) -> None:
    sizes = unusual()
    model = DetectionModel(shipped(name), 2)
    before = recall(model.anchors, sizes)
    fit_anchors(model, index_of(sizes), Hyp(), 640, 0, ENV)
    assert recall(model.anchors, sizes) > 0.98 > before
    assert "replaced by" in log.text and "best possible recall 0." in log.text
    # A checkpoint's spec builds it again, bit for bit, and the loss reads it.
    again = DetectionModel(copy.deepcopy(model.yaml), 2)
    assert torch.equal(again.detect.anchors, model.detect.anchors)
    assert again.detect.anchors.dtype == torch.float32
    assert torch.equal(YOLOV5.criterion(model, Hyp(), 640, 0.0).anchors, model.detect.anchors)
    twin = DetectionModel(shipped(name), 2)
    fit_anchors(twin, index_of(sizes), Hyp(), 640, 0, ENV)
    assert torch.equal(twin.detect.anchors, model.detect.anchors)


def test_never_worse(log: pytest.LogCaptureFixture) -> None:
    """Sizes all over the place: what is found is taken if more labels match, and else nothing changes."""
    model = DetectionModel(shipped("yolov5n"), 2)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        index = index_of(np.exp(rng.uniform(0, 6.4, (int(rng.integers(1, 60)), 2))))
        looked_at = vary(label_sizes(index.shapes, index.offsets, index.rows, 640), index.offsets, seed)
        before, old = copy.deepcopy(model.detect.anchors), recall(model.anchors, looked_at)
        fit_anchors(model, index, Hyp(), 640, seed, ENV)
        assert recall(model.anchors, looked_at) > old or torch.equal(model.detect.anchors, before)
    assert "replaced by" in log.text


def test_a_worse_find_is_not_taken(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors that the search could not find fit nearly all labels; without its luck nothing must change."""
    monkeypatch.setattr(autoanchor, "SEARCHED", 1)  # it looks at one label
    sizes = np.exp(np.random.default_rng(0).uniform(0, 6.4, (300, 2)))
    model = DetectionModel(shipped("yolov5n"), 2)
    before = copy.deepcopy(model.yaml)
    fit_anchors(model, index_of(sizes), Hyp(), 640, 0, ENV)
    assert model.yaml == before and "kept, a search found none that more labels match" in log.text


def test_a_frozen_head_keeps_its_anchors(log: pytest.LogCaptureFixture) -> None:
    """Its weights are for these: frozen layers stay bit-identical (ultralytics/ultralytics#9391)."""
    model = DetectionModel(shipped("yolov5n"), 2)
    before = model.anchors
    model.freeze([24])
    fit_anchors(model, index_of(unusual()), Hyp(), 640, 0, ENV)
    assert torch.equal(model.anchors, before)
    assert log.messages[-1].endswith("kept, for the head is frozen")


def test_good_anchors_are_kept(log: pytest.LogCaptureFixture) -> None:
    model = DetectionModel(shipped("yolov5n"), 2)
    before = copy.deepcopy(model.yaml)
    fit_anchors(model, index_of(model.anchors.reshape(-1, 2).numpy() * 1.2), Hyp(), 640, 0, ENV)
    assert model.yaml == before and torch.equal(model.detect.anchors, DetectionModel(before, 2).detect.anchors)
    assert "best possible recall 1.0000" in log.text and log.text.rstrip().endswith("kept")


@needs_shared
@pytest.mark.parametrize("name", ["yolov5n", "yolov3-tiny"])
def test_bccd_keeps_its_anchors(name: str) -> None:
    index = build_index([SHARED / "datasets/bccd/images/train"], 3, cache=False)
    model = DetectionModel(shipped(name), 3)
    before = model.anchors
    fit_anchors(model, index, Hyp(), 320, 0, ENV)
    assert torch.equal(model.anchors, before)


def test_tiny_labels_are_reported(log: pytest.LogCaptureFixture) -> None:
    sizes = np.array([[2.0, 50.0], [10.0, 2.9], [3.1, 3.1], [100.0, 80.0]])
    fit_anchors(DetectionModel(shipped("yolov5n"), 2), index_of(sizes), Hyp(), 640, 0, ENV)
    assert "2 of 4 labels are less than 3 pixels" in log.text


def test_a_number_of_anchors_in_the_yaml(log: pytest.LogCaptureFixture) -> None:
    """Generic squares until labels are seen; then the best that is found, written out."""
    spec = {**shipped("yolov5n"), "anchors": 3}
    model = DetectionModel(spec, 2)
    sides = model.anchors[..., 0]
    assert torch.equal(model.anchors[..., 1], sides)
    np.testing.assert_allclose(sides[0], [32, 32 * 2 ** (1 / 3), 32 * 2 ** (2 / 3)], rtol=1e-6)
    np.testing.assert_allclose(sides[1] / sides[0], 2, rtol=1e-6)
    assert generic_anchors([8], 1) == [[32.0, 32.0]]
    sizes = model.anchors.reshape(-1, 2).numpy() * (1.5, 0.8)  # recalled by the generic ones, but not closely
    fit_anchors(model, index_of(sizes), Hyp(), 640, 0, ENV)
    assert isinstance(model.yaml["anchors"], list) and "replaced by" in log.text
    assert measure(model.anchors.numpy(), sizes, ANCHOR_T).score > 0.9


@pytest.mark.parametrize("anchors", [0, -1, 2.5, True, "3", []])
def test_wrong_numbers_of_anchors(anchors: object) -> None:
    with pytest.raises(UserError, match="anchors"):
        DetectionModel({**shipped("yolov5n"), "anchors": anchors}, 2)


def test_a_recipe_may_ask_for_another_number() -> None:
    spec = shipped("yolov5n")
    assert with_anchor_count(spec, 0) is spec and with_anchor_count(spec, 3) is spec
    assert DetectionModel(with_anchor_count(spec, 4), 2).detect.anchors.shape == (3, 4, 2)
    assert DetectionModel(with_anchor_count({**spec, "anchors": 5}, 0), 2).detect.anchors.shape == (3, 5, 2)


def test_order_is_by_area() -> None:
    """Long boxes have long sides at small areas; the levels must not be turned around when built again."""
    model = DetectionModel({**shipped("yolov3-tiny"), "anchors": [[4, 4], [8, 8]]}, 2)
    model.set_anchors([[[1.0, 200.0]], [[15.0, 15.0]]])
    again = DetectionModel(model.yaml, 2)
    assert torch.equal(again.detect.anchors, model.detect.anchors)
    assert again.anchors[0].tolist() == [[1.0, 200.0]]
