"""AP by COCO's rules against pycocotools and worked examples."""

import contextlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from utils.metrics.coco import AREAS, CocoMetrics, Found, Truth, coco_metrics

CLASSES = 5  # the last of them has no labels
IMAGES = 12
Array = npt.NDArray[Any]


def found(*rows: tuple[float, ...]) -> Found:
    """Detections from rows of [image, class, x, y, w, h, score]."""
    table = np.array(rows, dtype=float).reshape(-1, 7)
    return Found(table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2:6], table[:, 6])


def truth(*rows: tuple[float, ...], crowd: tuple[int, ...] = ()) -> Truth:
    """Labels from rows of [image, class, x, y, w, h]; their areas are those of the boxes."""
    table = np.array(rows, dtype=float).reshape(-1, 6)
    boxes = table[:, 2:]
    crowds = np.isin(np.arange(len(table)), crowd)
    return Truth(table[:, 0].astype(int), table[:, 1].astype(int), boxes, boxes[:, 2] * boxes[:, 3], crowds)


def random_split(seed: int) -> tuple[Found, Truth]:
    """A split with everything that is difficult.

    Boxes on a grid, so that many IoUs are equal or exactly a threshold; few different scores; crowds; outlines smaller
    than boxes, of all sizes; an image and class with more than 100 detections, images without any, without labels.
    """
    rng = np.random.default_rng(seed)
    labels, detections = 60, 400
    image, category = rng.integers(0, IMAGES - 2, labels), rng.integers(0, CLASSES - 1, labels)
    boxes = np.hstack([rng.integers(0, 5, (labels, 2)) * 10, rng.integers(1, 13, (labels, 2)) * 10]).astype(float)
    area = boxes[:, 2] * boxes[:, 3] * rng.choice([0.5, 1.0], labels)
    there = Truth(image, category, boxes, area, rng.random(labels) < 0.1)

    near = rng.integers(0, labels, detections)
    moved = boxes[near] + rng.choice([-5, 0, 0, 5], (detections, 4))
    image, category = image[near], np.where(rng.random(detections) < 0.8, category[near], CLASSES - 1)
    many = np.arange(detections) < 130
    image, category = np.where(many, image[0], image), np.where(many, category[0], category)
    image = np.where(rng.random(detections) < 0.1, IMAGES - 1, image)
    return Found(image, category, moved, rng.integers(1, 20, detections) / 20), there


def pycocotools_ap(found: Found, truth: Truth) -> Array:
    """AP (areas, classes, T) from COCO's own code; -1 where there are no labels."""
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations: list[dict[str, Any]] = []
    for image, category, box, area, crowd in zip(*(column.tolist() for column in truth), strict=True):
        one = {"image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": int(crowd)}
        annotations.append({"id": len(annotations) + 1, **one})
    results = [
        {"image_id": image, "category_id": category, "bbox": box, "score": score}
        for image, category, box, score in zip(*(column.tolist() for column in found), strict=True)
    ]
    coco = COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": image} for image in range(IMAGES)],
        "categories": [{"id": category} for category in range(CLASSES)],
        "annotations": annotations,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][..., -1]  # (T, 101, classes, areas)
    assert evaluation.stats[:6].tolist() == pytest.approx(list(coco_metrics(found, truth).figures().values()), abs=1e-9)
    return precision.mean(axis=1).transpose(2, 1, 0)


def ap_of_all(metrics: CocoMetrics, name: str) -> Array:
    """AP (classes, T); -1 for classes without labels."""
    ap = np.full((CLASSES, 10), -1.0)
    ap[metrics.classes] = np.nan_to_num(metrics.ap[name], nan=-1.0)
    return ap


@pytest.mark.parametrize("seed", range(8))
def test_equals_pycocotools(seed: int) -> None:
    split = random_split(seed)
    expected, metrics = pycocotools_ap(*split), coco_metrics(*split)
    assert metrics.classes.tolist() == list(range(CLASSES - 1))
    assert 0.1 < expected[0, :-1].mean() < 0.9
    for i, name in enumerate(AREAS):
        np.testing.assert_allclose(ap_of_all(metrics, name), expected[i], rtol=0, atol=1e-9, err_msg=name)


def test_labels_in_any_order() -> None:
    there, labels = random_split(0)
    by_image = np.argsort(labels.image, kind="stable")
    backwards = np.argsort(-there.image, kind="stable")
    a, b = coco_metrics(there, labels), coco_metrics(there.rows(backwards), labels.rows(by_image))
    assert all(np.array_equal(a.ap[name], b.ap[name], equal_nan=True) for name in AREAS)


def test_second_choice() -> None:
    """The weaker detection overlaps the taken label more (0.82), the free one by 0.54: COCO lets it take that."""
    labels = truth((0, 0, 0, 0, 10, 10), (0, 0, 0, 4, 10, 10))
    ap = coco_metrics(found((0, 0, 0, 0, 10, 10, 0.9), (0, 0, 0, 1, 10, 10, 0.8)), labels).ap[""]
    at_half = 51 / 101  # recalls up to 0.5
    assert ap[0].tolist() == pytest.approx([1] + [at_half] * 9, abs=1e-12)


def test_the_last_of_equal_labels_is_taken() -> None:
    """The first detection overlaps both labels by 2/3; the second one can have the first label only."""
    labels = truth((0, 0, 0, 0, 10, 10), (0, 0, 4, 0, 10, 10))
    split = found((0, 0, 2, 0, 10, 10, 0.9), (0, 0, 0, 0, 10, 10, 0.8)), labels
    ap = coco_metrics(*split).ap[""]
    assert ap[0, :4].tolist() == pytest.approx([1] * 4, abs=1e-12)
    np.testing.assert_allclose(pycocotools_ap(*split)[0, 0], ap[0], rtol=0, atol=1e-12)


def test_step_function() -> None:
    """A hit, a miss, a hit, of three labels: precision 1 up to recall 1/3, 2/3 up to 2/3, then 0."""
    boxes = [(0, 0, 100 * i, 0, 10, 10) for i in range(3)]
    rows = [(*boxes[0], 0.9), (0, 0, 0, 500, 10, 10, 0.8), (*boxes[1], 0.7)]
    ap = coco_metrics(found(*rows), truth(*boxes)).ap[""]
    assert ap[0].tolist() == pytest.approx([(34 + 33 * 2 / 3) / 101] * 10, abs=1e-12)


def test_what_lies_in_a_crowd_does_not_count() -> None:
    """All of a detection inside is enough, however much larger the crowd; and any number of them."""
    labels = truth((0, 0, 0, 0, 10, 10), (0, 0, 20, 0, 100, 100), crowd=(1,))
    rows = [(0, 0, 30 + i, 30, 10, 10, 0.9) for i in range(3)]
    metrics = coco_metrics(found(*rows, (0, 0, 0, 0, 10, 10, 0.5)), labels)
    assert metrics.figures() == {
        "AP": pytest.approx(1, abs=1e-12),
        "AP50": pytest.approx(1, abs=1e-12),
        "AP75": pytest.approx(1, abs=1e-12),
        "AP small": pytest.approx(1, abs=1e-12),
        "AP medium": -1,
        "AP large": -1,
    }
    assert coco_metrics(found(*rows), labels._replace(crowd=np.array([True, True]))).classes.tolist() == []


def test_sizes() -> None:
    """Labels and unmatched detections of other areas do not count; a matched detection does, whatever its area."""
    labels = truth((0, 0, 0, 0, 31, 31), (0, 0, 100, 0, 50, 50), (0, 0, 200, 0, 100, 100))
    rows = [(0, 0, 0, 0, 33, 33, 0.5), (0, 0, 100, 0, 50, 50, 0.6), (0, 0, 400, 400, 200, 200, 0.9)]
    figures = coco_metrics(found(*rows), labels).figures()
    assert figures["AP medium"] == pytest.approx(1, abs=1e-12)
    assert figures["AP large"] == 0
    assert figures["AP small"] == pytest.approx(0.8, abs=1e-12)  # IoU 0.882: up to the threshold of 0.85


def test_a_hundred_of_a_class_in_an_image() -> None:
    """The label's own detection is the 100th of its class, then the 101st; others of the image are no matter."""
    labels = truth((0, 0, 0, 0, 10, 10), (0, 1, 0, 0, 10, 10))
    for before, hits in ((99, 10), (100, 0)):
        rows = [(0, 0, 50, 50, 10, 10, 0.9)] * before + [(0, 0, 0, 0, 10, 10, 0.1), (0, 1, 0, 0, 10, 10, 0.01)]
        ap = coco_metrics(found(*rows), labels).ap[""]
        assert (ap > 0).sum(axis=1).tolist() == [hits, 10]


def test_a_threshold_is_reached_from_exactly() -> None:
    """IoU 1/2; and 1, at thresholds up to 0.95."""
    labels = truth((0, 0, 0, 0, 10, 10), (1, 1, 0, 0, 10, 10))
    ap = coco_metrics(found((0, 0, 0, 0, 10, 5, 0.9), (1, 1, 0, 0, 10, 10, 0.9)), labels).ap[""]
    assert (ap > 0).sum(axis=1).tolist() == [1, 10]


def test_empty() -> None:
    nothing = coco_metrics(found(), truth())
    assert nothing.classes.tolist() == [] and set(nothing.figures().values()) == {-1.0}
    assert coco_metrics(found((0, 0, 0, 0, 9, 9, 0.9)), truth()).figures() == nothing.figures()
    missed = coco_metrics(found(), truth((3, 2, 0, 0, 50, 50)))
    assert missed.classes.tolist() == [2] and not missed.ap[""].any()
    assert list(missed.figures().values()) == [0, 0, 0, -1, 0, -1]
    elsewhere = coco_metrics(found((4, 2, 0, 0, 50, 50, 0.9), (3, 1, 0, 0, 50, 50, 0.9)), truth((3, 2, 0, 0, 50, 50)))
    assert elsewhere.figures() == missed.figures()
