"""The benchmark of scoring measures what it says, on a few images."""

import sys

import numpy as np
import pytest
import torch

from benchmarks import evaluation
from utils.core.errors import UserError
from utils.metrics.boxes import non_max_suppression


def test_split() -> None:
    images, found, truth = evaluation.make_split(30)
    assert np.bincount(found.image).tolist() == [100] * 30
    assert (np.diff(found.image) >= 0).all()
    best_first = np.diff(found.score) <= 0
    assert best_first[np.diff(found.image) == 0].all()
    assert 4 < len(truth.image) / images < 11 and set(truth.image.tolist()) == set(range(30))
    assert len(set(truth.category.tolist())) > 20
    again = evaluation.make_split(30)
    assert np.array_equal(again.found.boxes, found.boxes) and np.array_equal(again.truth.boxes, truth.boxes)


@pytest.mark.parametrize("count", [7, 3_000, 30_001])
def test_predictions_have_as_many_candidates_as_asked_for(count: int) -> None:
    for crowded in (False, True):
        for image in evaluation.make_predictions(count, crowded):
            boxes, confidence, _ = evaluation.candidates_of(image)
            assert len(boxes) == count
            rows = -(-count // (1 + count // evaluation.ROWS))
            assert int((image[:, 4] > evaluation.CONF_THRES).sum()) == rows
            assert confidence.max() < 1


def test_lines() -> None:
    """What is compared gives the same answers; every line has as many ratios as rounds."""
    pytest.importorskip("pycocotools")
    lines = evaluation.measure_metrics(2, some=4, all_images=10)
    assert [len(line.ratios) for line in lines] == [2, 2, 1, 1]
    assert all(line.median > 1 for line in lines[:3])
    assert lines[3].met
    split = evaluation.make_split(10)
    theirs, ours = evaluation.Pycocotools(split).score(), evaluation.coco_metrics(split.found, split.truth)
    assert 0.1 < ours.figures()["AP"] < 0.9
    assert evaluation.largest_difference(ours, theirs) < 1e-9
    theirs[0, ours.classes[-1], 3] += 0.01
    assert evaluation.largest_difference(ours, theirs) == pytest.approx(0.01)
    assert evaluation.own_metric(split).ap.mean() == pytest.approx(ours.figures()["AP"], abs=0.05)


def test_nms_line() -> None:
    """One thread for both, and the process is left as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        line = evaluation.measure_nms(50, 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(line.ratios) == 2 and min(line.ratios) > 0
    predictions = evaluation.make_predictions(50)
    found = non_max_suppression(predictions, evaluation.CONF_THRES, 1.0, multi_label=True)
    for kept, image in zip(found, predictions, strict=True):
        boxes, confidence, classes = evaluation.candidates_of(image)
        order = confidence.argsort(descending=True, stable=True)
        assert torch.equal(kept, torch.cat([boxes, confidence[:, None], classes[:, None].float()], 1)[order])


def test_pycocotools_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(UserError, match="pip install pycocotools"):
        evaluation.Pycocotools(evaluation.make_split(1))
