"""What scoring costs: AP by COCO's rules against pycocotools, our own AP, and non-maximum suppression.

python -m benchmarks.evaluation

Labels and detections are drawn: 80 classes, some of them frequent and most rare, about seven labels and 100 detections
an image, half of which lie near a label. Both sides get them ready to use, pycocotools as its own objects. It needs a
minute for 5,000 images, so there is one round of these; the other rounds are of fewer.
"""

import contextlib
import io
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.measuring import Options, Row, milliseconds, ratios, run_group, take_turns
from utils.core.errors import UserError, run_cli
from utils.metrics.average_precision import IOU_THRESHOLDS, ClassMetrics, ap_per_class, match_detections
from utils.metrics.boxes import cxcywh_to_xyxy, non_max_suppression
from utils.metrics.coco import AREAS, MAX_DETECTIONS, CocoMetrics, Found, Truth, coco_metrics

CLASSES, SIZE = 80, 640  # pixels
DETECTIONS, LABELS = 100, 7.3  # in an image; of labels the mean
ALL_IMAGES, SOME_IMAGES = 5_000, 200
LARGEST_DIFFERENCE = 1e-9
CONF_THRES, IOU_THRES, MAX_DET = 0.001, 0.6, 300
BATCH, ROWS = 4, 25_200  # images and predictions of each, as at 640 pixels


class Split(NamedTuple):
    """A split to be scored."""

    images: int
    found: Found
    truth: Truth


def make_split(images: int, seed: int = 0) -> Split:
    """Draw labels and detections of some images."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, CLASSES + 1)
    share /= share.sum()

    def boxes(count: int) -> NDArray[np.float64]:
        sides = np.exp(rng.normal(np.log(70), 0.9, (count, 2))).clip(4, 600)
        return np.hstack([rng.random((count, 2)) * (SIZE - sides), sides])

    per_image = np.maximum(rng.poisson(LABELS, images), 1)
    truth_image, found_image = np.repeat(np.arange(images), per_image), np.repeat(np.arange(images), DETECTIONS)
    truth_class, truth_boxes = rng.choice(CLASSES, len(truth_image), p=share), boxes(len(truth_image))

    count = len(found_image)
    near = rng.random(count) < 0.5
    nearest = (np.cumsum(per_image) - per_image)[found_image] + (rng.random(count) * per_image[found_image]).astype(int)
    noise = rng.gamma(1.5, 0.08, (count, 1))
    moved = truth_boxes[nearest]
    moved[:, :2] += rng.normal(0, 1, (count, 2)) * noise * moved[:, 2:]
    moved[:, 2:] *= np.exp(rng.normal(0, 1, (count, 2)) * noise)
    found_boxes = np.where(near[:, None], moved, boxes(count))
    right = near & (rng.random(count) < 0.8)
    found_class = np.where(right, truth_class[nearest], rng.choice(CLASSES, count, p=share))
    score = np.where(near, rng.beta(2, 2, count) * np.exp(-3 * noise[:, 0]), rng.beta(1, 6, count))
    best_first = np.lexsort((-score, found_image))
    found = Found(found_image, found_class, found_boxes, score).rows(best_first)
    area = truth_boxes[:, 2] * truth_boxes[:, 3]
    return Split(images, found, Truth(truth_image, truth_class, truth_boxes, area, np.zeros(len(area), bool)))


class Pycocotools:
    """A split as pycocotools takes it.

    Args:
        split: the split.

    Raises:
        UserError: pycocotools is not installed.
    """

    def __init__(self, split: Split) -> None:
        try:
            from pycocotools.coco import COCO
            from pycocotools.cocoeval import COCOeval
        except ImportError as error:
            raise UserError("the lines of C14 need pycocotools: pip install pycocotools") from error
        self._evaluation = COCOeval
        truth, found = split.truth, split.found
        self._truth = COCO()
        self._truth.dataset = {
            "info": {},
            "images": [{"id": image} for image in range(split.images)],
            "categories": [{"id": one} for one in range(CLASSES)],
            "annotations": [
                {"id": i, "image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": int(crowd)}
                for i, (image, category, box, area, crowd) in enumerate(_plain(truth), start=1)
            ],
        }
        with contextlib.redirect_stdout(io.StringIO()):
            self._truth.createIndex()
            self._found = self._truth.loadRes(
                [
                    {"image_id": image, "category_id": category, "bbox": box, "score": score}
                    for image, category, box, score in _plain(found)
                ]
            )

    def score(self) -> NDArray[np.float64]:
        """AP (areas, classes, T); -1 where there are no labels."""
        with contextlib.redirect_stdout(io.StringIO()):  # what it says of its progress
            evaluation = self._evaluation(self._truth, self._found, "bbox")
            evaluation.params.maxDets = [MAX_DETECTIONS]  # by default it also scores the best one and ten of each image
            evaluation.evaluate()
            evaluation.accumulate()
        return evaluation.eval["precision"][..., 0].mean(axis=1).transpose(2, 1, 0)  # of (T, 101, classes, areas, 3)


def _plain(columns: Found | Truth) -> Any:
    """Rows of plain numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def largest_difference(ours: CocoMetrics, theirs: NDArray[np.float64]) -> float:
    """Largest difference of an AP, of any area, class and threshold."""
    known = np.stack([ours.ap[name] for name in AREAS])  # (areas, C, T)
    return float(np.abs(np.nan_to_num(known, nan=-1.0) - theirs[:, ours.classes]).max())


def own_metric(split: Split) -> ClassMetrics:
    """Score by our own rules, as val.py does: image by image, then class by class."""
    found, truth = split.found, split.truth
    found_corners, truth_corners = (
        np.hstack([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]]) for xywh in (found.boxes, truth.boxes)
    )
    detections = np.hstack([found_corners, found.score[:, None], found.category[:, None]])
    labels = np.hstack([truth.category[:, None], truth_corners])
    cuts = [np.searchsorted(one.image, np.arange(1, split.images)) for one in (found, truth)]
    pairs = zip(np.split(detections, cuts[0]), np.split(labels, cuts[1]), strict=True)
    correct = np.concatenate([match_detections(*pair, IOU_THRESHOLDS) for pair in pairs])
    return ap_per_class(correct, detections[:, 4], detections[:, 5], labels[:, 0])


def make_predictions(candidates: int, crowded: bool = False, seed: int = 0) -> Tensor:
    """Draw decoded predictions (BATCH, ROWS, 5 + CLASSES), so many candidates of each image above the threshold.

    All predictions lie around 40 objects if they are crowded, else half of them do and the others anywhere. A row has
    one candidate, or several where there are more candidates than rows.
    """
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.zeros(BATCH, ROWS, 5 + CLASSES)
    classes = -(-candidates // ROWS)  # in a row
    for image in predictions:
        sides = (4.2 + 0.8 * torch.randn(40, 2, generator=generator)).exp().clamp(4, 600)
        objects = torch.cat([SIZE * torch.rand(40, 2, generator=generator), sides], 1)
        around = torch.randint(40, (ROWS,), generator=generator)
        image[:, :4] = objects[around] + 0.1 * sides.repeat(1, 2)[around] * torch.randn(ROWS, 4, generator=generator)
        if not crowded:
            anywhere = torch.rand(ROWS, 1, generator=generator) < 0.5
            image[:, :2] = torch.where(anywhere, SIZE * torch.rand(ROWS, 2, generator=generator), image[:, :2])
        image[:, 4] = 0.0005  # too little, whatever the class
        chosen = torch.randperm(ROWS, generator=generator)[: -(-candidates // classes)]
        image[chosen, 4] = 0.01 + 0.98 * torch.rand(len(chosen), generator=generator) ** 2
        for more in range(classes):
            some = chosen[: len(chosen) if more == 0 else candidates - len(chosen)]
            image[some, 5 + (around[some] + more) % CLASSES] = 0.15 + 0.8 * torch.rand(len(some), generator=generator)
    return predictions


def candidates_of(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of one image in a plain way: (N, 4) xyxy, (N,) confidence, (N,) class."""
    scores = image[:, 4:5] * image[:, 5:]
    rows, classes = (scores > CONF_THRES).nonzero(as_tuple=True)
    return cxcywh_to_xyxy(image[rows, :4]), scores[rows, classes], classes


def measure_nms(candidates: int, rounds: int, crowded: bool = False) -> Row:
    """Compare the whole of non-maximum suppression with batched_nms on candidates that are there, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torchvision's NMS takes one
    predictions = make_predictions(candidates, crowded)
    ready = [candidates_of(image) for image in predictions]
    taken = take_turns(
        {
            "batched_nms": lambda: [torchvision.ops.batched_nms(*one, IOU_THRES)[:MAX_DET] for one in ready],
            "ours": lambda: non_max_suppression(predictions, CONF_THRES, IOU_THRES, multi_label=True, max_det=MAX_DET),
        },
        rounds,
        name=f"NMS {candidates:,}",
    )
    torch.set_num_threads(threads)
    where = " in crowds" if crowded else ""
    return Row(
        "C14",
        f"NMS, {candidates:,} candidates{where}: batched_nms alone / ours with finding them",
        ratios(taken["batched_nms"], taken["ours"]),
        None if crowded else 1,
        note=f"{BATCH} images of {ROWS:,} predictions: {milliseconds(taken)}",
    )


def measure_metrics(rounds: int, some: int = SOME_IMAGES, all_images: int = ALL_IMAGES) -> list[Row]:
    """Compare with pycocotools, round by round on some images and once on all.

    Raises:
        UserError: pycocotools is not installed.
    """
    split = make_split(some)
    theirs = Pycocotools(split)
    taken = take_turns(
        {
            "pycocotools": theirs.score,
            "by COCO's rules": lambda: coco_metrics(split.found, split.truth),
            "our own": lambda: own_metric(split),
        },
        rounds,
        name="AP",
    )
    whole = make_split(all_images)
    theirs = Pycocotools(whole)
    moments = [time.perf_counter()]
    expected = theirs.score()
    moments.append(time.perf_counter())
    answer = coco_metrics(whole.found, whole.truth)
    moments.append(time.perf_counter())
    own_metric(whole)
    moments.append(time.perf_counter())
    pycocotools, ours, own = np.diff(moments).tolist()
    difference = largest_difference(answer, expected)
    note = f"{some:,} images: {milliseconds(taken)}"
    return [
        Row(
            "C14",
            "AP: pycocotools / ours by COCO's rules",
            ratios(taken["pycocotools"], taken["by COCO's rules"]),
            10,
            note=f"{note}; evaluate and accumulate, four areas",
        ),
        Row("C14", "AP: pycocotools / our own metric", ratios(taken["pycocotools"], taken["our own"]), note=note),
        Row(
            "C14",
            f"AP, {all_images:,} images: pycocotools / ours by COCO's rules",
            (pycocotools / ours,),
            10,
            note=f"one round: pycocotools {pycocotools:.1f} s, by COCO's rules {ours:.2f} s, our own {own:.2f} s",
        ),
        Row(
            "C14",
            "AP: largest difference to pycocotools / 1e-9",
            (difference / LARGEST_DIFFERENCE,),
            1,
            at_least=False,
            note=f"{difference:.1e} of any area, class and threshold, {all_images:,} images",
        ),
    ]


def measure(options: Options) -> list[Row]:
    """Measure everything.

    Raises:
        UserError: pycocotools is not installed.
    """
    suppression = [measure_nms(count, options.rounds) for count in (3_000, 30_000)]
    return [*measure_metrics(options.rounds), *suppression, measure_nms(3_000, options.rounds, crowded=True)]


if __name__ == "__main__":
    run_cli(lambda: run_group(measure, __doc__))
