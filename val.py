"""Measure weights on a split of a data set.

python val.py --weights runs/train/exp/weights/best.pt                             the validation split of shapes
python val.py --weights best.pt --data coco.yaml --img 640 --task test             another data set, another split
"""

import sys

from utils.config import ValConfig, parse_val
from utils.data_config import load_data

if __name__ == "__main__":
    parse_val(sys.argv[1:])  # --help and mistyped flags end here, before torch is imported

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from models.families import Family, load_model
from models.start import fit_imgsz
from models.yolo import DetectionModel
from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.dataloaders import Batch, DetectionDataset, ValLoader, choose_num_workers, val_loader
from utils.dataset import LabelIndex, open_split
from utils.errors import Problems, UserError, run_cli
from utils.image_cache import ImageCache
from utils.logging import get_logger
from utils.loss import DetectionLoss
from utils.metrics import IOU_THRESHOLDS, Metrics, format_table, match_detections, summarize
from utils.run_folder import create_run_dir
from utils.torch_utils import DistEnv, all_gather_objects, process_group

MANY_CLASSES = 50  # from here on the table shows them with --verbose only


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a split gives.

    Attributes:
        metrics: precision, recall and AP, overall and for each class.
        losses: [box, objectness, class] over the whole split; zeros without a criterion.
        speed: milliseconds per image: preparing, inference, NMS.
    """

    metrics: Metrics
    losses: list[float]
    speed: dict[str, float]


@dataclass(frozen=True)
class BatchResult:
    """One validation batch as its rank saw it; what is gathered and put in order at the end of the pass."""

    number: int
    indices: list[int]
    detections: list[NDArray[np.float32]]  # (K, 6) [x1, y1, x2, y2, confidence, class] original pixels, best first
    sums: NDArray[np.float64]  # (3, L)
    counts: NDArray[np.int64]  # (3, L)
    seconds: NDArray[np.float64]  # (3,) [preparing, inference, NMS]


@torch.inference_mode()
def evaluate(
    model: DetectionModel,
    family: Family,
    loader: ValLoader,
    index: LabelIndex,
    names: list[str],
    env: DistEnv,
    *,
    criterion: DetectionLoss | None = None,
    conf_thres: float = 0.001,
    iou_thres: float = 0.6,
    max_det: int = 300,
    description: str = "validation",
) -> Evaluation | None:
    """Run a network over a split and score it. Collective: every rank must call it.

    The unit of work is a whole batch, fixed by split, image size and validation batch, and no rank waits for another
    during the pass: results are gathered at the end and scored in image order, so that the figures do not depend on the
    number of ranks.

    Args:
        model: the raw network, in evaluation mode; always run in full precision.
        family: how its outputs are decoded and post-processed.
        loader: this rank's batches.
        index: labels of the split.
        names: of the classes.
        env: this rank's place.
        criterion: gives the validation loss, if wanted.
        conf_thres: least confidence of a detection.
        iou_thres: of NMS.
        max_det: detections kept in an image.
        description: beside the progress bar.

    Returns:
        The evaluation on rank 0, None elsewhere.
    """
    model.eval()
    results = []
    progress = tqdm(loader, description, len(loader), leave=False, disable=not env.is_main_process, unit="batch")
    for batch in progress:
        start = _now(env.device)
        images = family.inputs.prepare(batch.images.to(env.device, non_blocking=True))
        prepared = _now(env.device)
        outputs = _forward(model, images)
        decoded = family.decode(model, outputs)
        inferred = _now(env.device)
        found = family.postprocess(decoded, conf_thres, iou_thres, multi_label=len(names) > 1, max_det=max_det)
        detections = [_to_original(image, geometry) for image, geometry in zip(found, batch.geometry, strict=True)]
        done = _now(env.device)
        sums, counts = _losses(criterion, outputs, batch)
        seconds = np.diff([start, prepared, inferred, done])
        results.append(BatchResult(batch.k, batch.indices.tolist(), detections, sums, counts, seconds))
    gathered = [result for rank in all_gather_objects(results, env) for result in rank]
    return _score(sorted(gathered, key=lambda result: result.number), index, names, criterion)


def _now(device: torch.device) -> float:
    """Return the time at which the device has done what it was told so far; every mark costs a wait for it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _forward(model: DetectionModel, images: Tensor) -> list[Tensor]:
    """Run the network; halve the batch where memory does not suffice (ultralytics/yolov5#2586)."""
    try:
        return model(images)
    except torch.OutOfMemoryError:
        if len(images) == 1:
            raise
    torch.cuda.empty_cache()
    halves = [_forward(model, half) for half in images.chunk(2)]
    return [torch.cat(level) for level in zip(*halves, strict=True)]


def _to_original(detections: Tensor, geometry: Tensor) -> NDArray[np.float32]:
    height, width, ratio, left, top = geometry.tolist()
    detections[:, :4] = scale_boxes(detections[:, :4], ratio, left, top, (int(height), int(width)))
    return detections.cpu().numpy()


def _losses(
    criterion: DetectionLoss | None, outputs: list[Tensor], batch: Batch
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    if criterion is None:
        return np.zeros((3, len(outputs))), np.ones((3, len(outputs)), np.int64)
    size, _, height, width = batch.images.shape
    matches = criterion.match(batch.targets, size, height, width)
    sums = criterion.sums(outputs, [level.to(outputs[0].device) for level in matches])
    return sums.cpu().double().numpy(), criterion.counts(matches).numpy()


def _score(
    results: list[BatchResult], index: LabelIndex, names: list[str], criterion: DetectionLoss | None
) -> Evaluation:
    correct, scored, truth = [np.zeros((0, len(IOU_THRESHOLDS)), bool)], [np.zeros((0, 2), np.float32)], []
    for result in results:
        for image, detections in zip(result.indices, result.detections, strict=True):
            labels = _original_labels(index, image)
            correct.append(match_detections(detections, labels, IOU_THRESHOLDS))
            scored.append(detections[:, 4:6])
            truth.append(labels[:, 0])
    confidence, category = np.concatenate(scored).T
    metrics = summarize(np.concatenate(correct), confidence, category, truth, names)

    losses = [0.0, 0.0, 0.0]
    if criterion is not None:
        sums = torch.from_numpy(np.sum([result.sums for result in results], 0))
        counts = torch.from_numpy(np.sum([result.counts for result in results], 0))
        losses = criterion.items(sums, counts).tolist()
    images = sum(len(result.indices) for result in results)
    seconds = np.sum([result.seconds for result in results], 0) / images * 1e3
    return Evaluation(metrics, losses, dict(zip(("prepare", "inference", "nms"), seconds.tolist(), strict=True)))


def _original_labels(index: LabelIndex, image: int) -> NDArray[np.float32]:
    """Return (L, 5) [class, x1, y1, x2, y2] in original pixels."""
    labels = index.labels(image)
    height, width = index.shapes[image]
    boxes = cxcywh_to_xyxy(labels[:, 1:5]) * np.array([width, height, width, height], np.float32)
    return np.concatenate([labels[:, :1], boxes], 1)


def run(config: ValConfig, env: DistEnv) -> Evaluation | None:
    """Evaluate ``--weights`` on ``--task`` of ``--data`` and say what came out.

    Raises:
        UserError: weights, data and flags do not fit together.
    """
    log = get_logger()
    problems = Problems()
    data = problems.attempt(lambda: load_data(config.data))
    loaded = problems.attempt(lambda: load_model(Path(config.weights), env.device))
    problems.raise_if_any()
    assert data is not None and loaded is not None
    model, family, trained_at = loaded
    if model.num_classes != data.num_classes:
        raise UserError(
            f"--weights {config.weights} knows {model.num_classes} classes, --data {config.data} has "
            f"{data.num_classes}; use the data set that the weights were trained on"
        )
    index = open_split(data, config.task)
    dataset = DetectionDataset(index, ImageCache(), None, fit_imgsz(config.imgsz or trained_at, model))
    workers = choose_num_workers(config.workers, env.local_world_size, config.batch_size)
    loader = val_loader(dataset, config.batch_size, env, workers, stride=model.max_stride)
    evaluation = evaluate(
        model,
        family,
        loader,
        index,
        data.names,
        env,
        conf_thres=config.conf_thres,
        iou_thres=config.iou_thres,
        max_det=config.max_det,
        description=config.task,
    )
    loader.close()
    if evaluation is not None:
        run_dir = create_run_dir(config.project, config.name, config.exist_ok)
        shown = None if config.verbose or data.num_classes < MANY_CLASSES else 1
        log.info(format_table(evaluation.metrics.rows(data.names)[:shown]))
        log.info("speed per image: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in evaluation.speed.items()))
        rows = [row._asdict() for row in evaluation.metrics.rows(data.names)]
        (run_dir / "metrics.json").write_text(json.dumps(rows, indent=2) + "\n")
        log.info(f"results in {run_dir}")
    return evaluation


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and evaluate."""
    config = parse_val(sys.argv[1:] if argv is None else argv)
    with process_group(config.device) as env:
        run(config, env)


if __name__ == "__main__":
    run_cli(main)
