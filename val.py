"""Measure weights on a split of a data set.

python val.py --weights runs/train/exp/weights/best.pt                             the data it was trained on
python val.py --weights best.pt --data coco.yaml --img 640 --task test             another data set, another split
python val.py --weights best.pt --device 0,1 ...                                   the same figures from two devices
"""

import sys

from own_packages import check_packages

check_packages()

from utils.config.build import parse
from utils.config.flags import MAX_DET, ValConfig
from utils.core.errors import end_quietly_by_ctrl_c
from utils.run.preflight import check_opencv

if __name__ == "__main__":
    end_quietly_by_ctrl_c()
    parse(ValConfig, sys.argv[1:])  # --help and mistyped flags end here, before torch is imported
    check_opencv()

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from models.families import Family
from models.yolo import DetectionModel
from utils.config.command_line import repeated_flags
from utils.config.data_yaml import DataConfig
from utils.core.devices import time_on, upload
from utils.core.errors import run_cli
from utils.core.heartbeat import Phase, beat, beating
from utils.core.logging import get_logger
from utils.data.dataset import DetectionDataset, Unreadable
from utils.data.image_cache import ImageCache
from utils.data.index import LabelIndex
from utils.data.loader_notes import deaths_explained
from utils.data.loaders import Batch, ValLoader, choose_num_workers, val_loader
from utils.data.report import NOTHING_FOUND, ScanReport, UnreadableImages, write_report
from utils.dist.collectives import gather_objects, once
from utils.dist.job_files import shown_weights
from utils.dist.launch import launch, say, worker_devices
from utils.dist.place import DistEnv, dist_env
from utils.dist.worker import as_worker
from utils.inference.val_files import (
    annotations_of,
    coco_results,
    coco_score,
    image_ids,
    score_with_coco,
    write_json,
    write_labels,
    write_predictions,
)
from utils.metrics.average_precision import IOU_THRESHOLDS, match_detections
from utils.metrics.boxes import cxcywh_to_xyxy, scale_boxes
from utils.metrics.evaluation import Evaluation, ImageResult, TableRow, format_table, summarize
from utils.run.folder import create_run_dir, script
from utils.run.plots import Plots
from utils.run.val_inputs import check_classes, detection_cap, doubts_about_density, most_labels, read_val_inputs
from utils.torch_utils import process_group
from utils.training.loss import DetectionLoss

MANY_CLASSES = 50  # from here on the table shows them with --verbose only
# Flags that figures follow from; the second ones have to be as they are by default, to compare.
DECISIVE = ("weights", "data", "task", "imgsz", "batch_size", "single_cls", "half", "max_det")
THRESHOLDS = ("conf_thres", "iou_thres", "augment")


@dataclass(frozen=True)
class Results:
    """What a finished validation hands back.

    Attributes:
        run_dir: folder with everything that was written; of ``--task speed``, which writes nothing, the one above.
        evaluation: None off rank 0.
        rows: the table of that; [] without.
    """

    run_dir: Path
    evaluation: Evaluation | None
    rows: list[TableRow]


@dataclass(frozen=True)
class BatchResult:
    """One validation batch as its rank saw it; what is gathered and put in order at the end of the pass."""

    number: int
    indices: list[int]
    detections: list[NDArray[np.float32]]  # (K, 6) [x1, y1, x2, y2, confidence, class] original pixels, best first
    sums: NDArray[np.float64]  # (3, L)
    counts: NDArray[np.int64]  # (3, L)
    seconds: NDArray[np.float64]  # (3,) [preparing, inference, NMS]
    unreadable: list[Unreadable]


def never() -> bool:
    """Never."""
    return False


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
    conf_thres: float = ValConfig.conf_thres,
    iou_thres: float = ValConfig.iou_thres,
    max_det: int = MAX_DET,
    augment: bool = False,
    single_cls: bool = False,
    description: str = "validation",
    give_up: Callable[[], bool] = never,
) -> Evaluation | None:
    """Run a network over a split and score it. Collective: every rank must call it.

    The unit of work is a whole batch, fixed by split, image size and validation batch, and no rank waits for another
    during the pass: results are gathered at the end and scored in image order, so that the figures do not depend on the
    number of ranks.

    Args:
        model: the raw network, in evaluation mode; it computes in the precision of its weights, everything behind it in
            full precision.
        family: how its outputs are decoded and post-processed.
        loader: this rank's batches.
        index: labels of the split.
        names: of the classes.
        env: this rank's place.
        criterion: gives the validation loss, if wanted.
        conf_thres: least confidence of a detection.
        iou_thres: of NMS.
        max_det: detections kept in an image.
        augment: look at each image several times (test-time augmentation); there is no loss then.
        single_cls: count every detection as of class 0.
        description: beside the progress bar.
        give_up: asked before each batch whether to throw away what was found so far.

    Returns:
        The evaluation on rank 0, None elsewhere, and everywhere if any rank gave up.
    """
    assert criterion is None or not augment, "augmented predictions have no raw outputs to take a loss of"
    beat(Phase.VALIDATION)
    model.eval()
    dtype = next(model.parameters()).dtype
    results: list[BatchResult] = []
    gave_up = False
    quiet = None if env.is_main_process else True  # None: on a terminal only
    progress = tqdm(loader, description, len(loader), leave=False, disable=quiet, unit="batch")
    for batch in progress:
        beat()
        if gave_up := give_up():
            break
        start = time_on(env.device)
        images = family.inputs.prepare(upload(batch.images, env.device)).to(dtype)
        prepared = time_on(env.device)
        outputs = [] if augment else _forward(model, images)
        if augment:
            decoded = _forward(lambda some: [family.augmented(model, some)], images)[0]
        else:
            decoded = family.decode(model, outputs)
        inferred = time_on(env.device)
        found = family.postprocess(
            decoded, conf_thres, iou_thres, multi_label=len(names) > 1, max_det=max_det, agnostic=single_cls
        )
        if single_cls:
            for one in found:
                one[:, 5] = 0
        detections = _detections(found, batch)
        done = time_on(env.device)
        sums, counts = _losses(criterion, outputs, batch)
        seconds = np.diff([start, prepared, inferred, done])
        unreadable = list(batch.unreadable)
        results.append(BatchResult(batch.k, batch.indices.tolist(), detections, sums, counts, seconds, unreadable))
    shares = gather_objects(None if gave_up else results, env)
    if not env.is_main_process or None in shares:
        return None
    gathered = [result for share in shares if share for result in share]
    return _score(sorted(gathered, key=lambda result: result.number), index, names, criterion)


def _forward(model: Callable[[Tensor], list[Tensor]], images: Tensor) -> list[Tensor]:
    """Run a network; halve the batch where memory does not suffice."""
    try:
        return model(images)
    except torch.OutOfMemoryError:
        if len(images) == 1:
            raise
    torch.cuda.empty_cache()
    halves = [_forward(model, half) for half in images.chunk(2)]
    return [torch.cat(level) for level in zip(*halves, strict=True)]


def _detections(found: list[Tensor], batch: Batch) -> list[NDArray[np.float32]]:
    """Detections of each image in original pixels; none in the grey that stands for an image that can't be read."""
    unreadable = {image for image, _ in batch.unreadable}
    return [
        _to_original(image[:0] if index in unreadable else image, geometry)
        for image, geometry, index in zip(found, batch.geometry, batch.indices.tolist(), strict=True)
    ]


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
    images = [
        ImageResult(result.number, image, detections, _original_labels(index, image))
        for result in results
        for image, detections in zip(result.indices, result.detections, strict=True)
    ]
    correct = [np.zeros((0, len(IOU_THRESHOLDS)), bool)]
    correct += [match_detections(image.detections, image.labels, IOU_THRESHOLDS) for image in beating(images)]
    scored = [np.zeros((0, 2), np.float32), *(image.detections[:, 4:6] for image in images)]
    truth = [image.labels[:, 0] for image in images]
    confidence, category = np.concatenate(scored).T
    metrics = summarize(np.concatenate(correct), confidence, category, truth, names)

    losses = [0.0, 0.0, 0.0]
    if criterion is not None:
        sums = torch.from_numpy(np.sum([result.sums for result in results], 0))
        counts = torch.from_numpy(np.sum([result.counts for result in results], 0))
        losses = criterion.items(sums, counts).tolist()
    seconds = np.sum([result.seconds for result in results], 0) / len(images) * 1e3
    speed = dict(zip(("prepare", "inference", "nms"), seconds.tolist(), strict=True))
    unreadable = {index.path(image): reason for result in results for image, reason in result.unreadable}
    return Evaluation(metrics, losses, speed, images, unreadable)


def _original_labels(index: LabelIndex, image: int) -> NDArray[np.float32]:
    """Return (L, 5) [class, x1, y1, x2, y2] in original pixels."""
    labels = index.labels(image)
    height, width = index.shapes[image]
    boxes = cxcywh_to_xyxy(labels[:, 1:5]) * np.array([width, height, width, height], np.float32)
    return np.concatenate([labels[:, :1], boxes], 1)


def run(config: ValConfig, env: DistEnv) -> Results:
    """Evaluate ``--weights`` on ``--task`` of ``--data`` and say what came out. Collective: every rank must call it.

    Raises:
        UserError: weights, data and flags do not fit together.
    """
    log = get_logger()
    inputs = read_val_inputs(config, env)
    data, model, family, index = inputs.data, inputs.model, inputs.family, inputs.index
    dataset = DetectionDataset(index, ImageCache(), None, inputs.imgsz, strict=config.strict)
    workers = choose_num_workers(config.workers, env.local_world_size, config.batch_size)
    writes = config.task != "speed"
    max_det = detection_cap(config.max_det, index)
    if writes:
        for doubt in doubts_about_figures(config, index):
            log.warning(doubt)
    if max_det > (config.max_det or MAX_DET):
        log.info(f"up to {max_det} detections of an image are kept, not {MAX_DET}: one has {most_labels(index)} labels")
    run_dir = Path(config.project)
    if writes:
        run_dir = once(lambda: create_run_dir(config.project, config.name, config.exist_ok), env)
    with (
        contextlib.closing(val_loader(dataset, config.batch_size, env, workers, stride=model.max_stride)) as loader,
        deaths_explained(),
    ):
        evaluation = evaluate(
            model.half() if config.half else model,
            family,
            loader,
            index,
            data.names,
            env,
            conf_thres=config.conf_thres,
            iou_thres=config.iou_thres,
            max_det=max_det,
            augment=config.augment,
            single_cls=config.single_cls,
            description=config.task,
        )
    rows = evaluation.metrics.rows(data.names) if evaluation else []
    if evaluation is not None:
        if writes:
            shown = None if config.verbose or data.num_classes < MANY_CLASSES else 1
            log.info(format_table(rows[:shown]))
        log.info("speed per image: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in evaluation.speed.items()))
    if evaluation is not None and writes:
        found = {"data": str(data.path), "weights": shown_weights(config.weights), "imgsz": inputs.imgsz}
        settings = {name: getattr(config, name) for name in DECISIVE + THRESHOLDS} | found | {"max_det": max_det}
        report = {"": ScanReport(problems=inputs.findings), config.split: index.report}
        write_report(run_dir, report, log)
        _write(config, settings, run_dir, data, index, evaluation)
        log.info(f"results in {run_dir}")
    return Results(run_dir, evaluation, rows)


def doubts_about_figures(config: ValConfig, index: LabelIndex) -> list[str]:
    """Return a sentence for each reason why the figures of a validation are no measure, or none to compare by."""
    usual = {item.name: item.default for item in dataclasses.fields(ValConfig)} | {"max_det": detection_cap(0, index)}
    own = {name: getattr(config, name) for name in THRESHOLDS} | {"max_det": detection_cap(config.max_det, index)}
    typed = {
        name: f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in own.items()
    }
    other = [typed[name] for name, value in own.items() if value != usual[name]]
    doubts = []
    if other:
        doubts.append(
            f"{', '.join(other)}: these figures can't be compared with those of a training or of other people, which "
            "are measured with the defaults"
        )
    doubts += doubts_about_density(config.max_det, index)
    if not index.num_instances:
        doubts.append(f"{config.split} has no labels: nothing can be measured, and there are no figures")
    return doubts


def _write(
    config: ValConfig,
    settings: Mapping[str, Any],
    run_dir: Path,
    data: DataConfig,
    index: LabelIndex,
    evaluation: Evaluation,
) -> None:
    """Write what a validation leaves in its run folder."""
    log = get_logger()
    rows = [row._asdict() for row in evaluation.metrics.rows(data.names)]
    UnreadableImages(run_dir).tell(config.split, evaluation.unreadable, NOTHING_FOUND, log)
    write_json(run_dir / "metrics.json", {"settings": dict(settings), "rows": rows}, indent=2)
    if config.save_txt:
        write_labels(run_dir, evaluation.images, index, config.save_conf)
    annotations = annotations_of(data, config.split)
    if config.coco_metrics:
        figures = coco_score(evaluation.images, index, data.names, annotations, log)
        write_json(run_dir / "coco_metrics.json", figures, indent=2)
    if config.save_json:
        found = coco_results(evaluation.images, index, data.names)
        write_predictions(run_dir, found)
        if annotations is not None:
            ids = image_ids(index)
            score_with_coco(annotations, found, [ids[image.index] for image in evaluation.images], log)
    if not config.noplots:
        with Plots(run_dir, data.names) as plots:
            plots.add_evaluation(evaluation.metrics, evaluation.images, index)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and evaluate; with a list of devices in a process for each."""
    argv = sys.argv[1:] if argv is None else argv
    config, env = parse(ValConfig, argv), dist_env()
    devices = worker_devices(config.device, env)
    if devices:
        check_classes(config)
        return say(launch([script("val.py"), *argv], devices))
    with process_group(config.device, env, config.dist_timeout) as env:
        for sentence in repeated_flags(ValConfig, argv):
            get_logger().info(sentence)
        run(config, env)
    return 0


if __name__ == "__main__":
    run_cli(as_worker(main))
