"""What a validation leaves behind on demand: detections in COCO's format, label files, COCO's figures."""

import contextlib
import importlib
import io
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.data_yaml import DataConfig
from utils.core.errors import UserError
from utils.core.logging import get_logger, without_nan
from utils.core.whole_files import write_whole
from utils.data.class_names import same_names
from utils.data.index import LabelIndex
from utils.inference.detection_files import label_rows
from utils.metrics.average_precision import FloatArray
from utils.metrics.coco import Found, Truth, coco_metrics
from utils.metrics.evaluation import ImageResult

PREDICTIONS = "predictions.json"  # in a run folder
COCO_NAMES = (  # spaces in names as underscores
    "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter "
    "bench bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee "
    "skis snowboard sports_ball "
    "kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass cup "
    "fork knife spoon bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch "
    "potted_plant bed dining_table toilet tv laptop mouse remote keyboard cell_phone microwave oven toaster sink "
    "refrigerator book clock vase scissors teddy_bear hair_drier toothbrush"
)
UNUSED_COCO_IDS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of 1 to 90
SCORERS = (("faster_coco_eval", "COCOeval_faster"), ("pycocotools", "COCOeval"))  # the first one installed is used
STATS = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large")


def category_ids(names: Sequence[str]) -> list[int]:
    """Return the category id of each class: COCO's own ids if these are COCO's 80 classes, else the class ids."""
    if same_names(names, COCO_NAMES.split()):
        return [number for number in range(1, 91) if number not in UNUSED_COCO_IDS]
    return list(range(len(names)))


def image_id(path: str) -> int | str:
    """Return COCO's id of an image: its name without suffix, as a number if it is one."""
    stem = Path(path).stem
    return int(stem) if stem.isascii() and stem.isdigit() else stem


def image_ids(index: LabelIndex) -> list[int | str]:
    """Return an id for each image of a split that no other one has: COCO's if these differ.

    COCO's come from the names alone. Where folders hold images of the same name the ids of all images are their paths
    from the folder that they have in common, which no annotations in COCO's format have.
    """
    paths = [index.path(i) for i in range(len(index))]
    ids = [image_id(path) for path in paths]
    if len(set(ids)) == len(ids):
        return ids
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, common).replace(os.sep, "/") for path in paths]


def coco_results(images: Sequence[ImageResult], index: LabelIndex, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return detections as COCO's results format has them: pixels [x, y, w, h] of the original image, by image.

    Warns where COCO's ids do not tell the images apart; see `image_ids`.
    """
    categories, ids, results = category_ids(names), image_ids(index), []
    if ids and ids[0] != image_id(index.path(0)):
        get_logger().warning(
            f"{PREDICTIONS}: some images have the same name in different folders, or the same number; image_id is "
            f"their path instead, such as {ids[0]}, and COCO's code CAN'T SCORE that by its annotations. Give the "
            "images names of their own"
        )
    for image in sorted(images, key=lambda image: image.index):
        for x1, y1, x2, y2, score, class_id in image.detections.astype(np.float64).tolist():
            box = [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]
            one = {"image_id": ids[image.index], "category_id": categories[int(class_id)], "bbox": box}
            results.append({**one, "score": round(score, 5)})
    return results


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON file, whole or not at all; nan, which JSON does not have, is null.

    Args:
        path: in a run folder.
        content: what is written.
        indent: spaces of each level; None = all in one line.

    Raises:
        UserError: it can't be written.
    """
    try:
        write_whole(path, json.dumps(without_nan(content), indent=indent) + "\n")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def write_predictions(run_dir: Path, results: list[dict[str, Any]]) -> Path:
    """Write predictions.json, whole or not at all.

    Raises:
        UserError: it can't be written.
    """
    path = run_dir / PREDICTIONS
    write_json(path, results)
    return path


def write_labels(run_dir: Path, images: Sequence[ImageResult], index: LabelIndex, confidence: bool) -> None:
    """Write labels/STEM.txt with the detections of each image that has any; a second image of that name is STEM-2.

    Args:
        run_dir: the run folder.
        images: with their detections.
        index: of the split.
        confidence: add it as a 6th column.

    Raises:
        UserError: a file can't be written.
    """
    path = folder = run_dir / "labels"
    taken: set[str] = set()
    try:
        folder.mkdir(exist_ok=True)
        for image in sorted(images, key=lambda image: image.index):
            stem = Path(index.path(image.index)).stem
            number, name = 1, stem
            while name.casefold() in taken:
                number += 1
                name = f"{stem}-{number}"
            taken.add(name.casefold())
            height, width = index.shapes[image.index].tolist()
            rows = label_rows(image.detections, height, width, corners=False, confidence=confidence)
            path = folder / f"{name}.txt"
            path.unlink(missing_ok=True)  # of an earlier run
            if rows:
                path.write_text(rows, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"{error.filename or path} can't be written: {error.strerror}") from error


def annotations_of(data: DataConfig, split: str) -> Path | None:
    """Return annotations/instances_SPLIT.json of a data set, SPLIT being the name of its folder or list; None if none.

    A split of several folders has none: its annotations are in several files.
    """
    sources = getattr(data, split)
    if len(sources) != 1:
        return None
    name = sources[0].stem if sources[0].suffix == ".txt" else sources[0].name
    path = data.root / "annotations" / f"instances_{name}.json"
    return path if path.is_file() else None


def coco_score(
    images: Sequence[ImageResult],
    index: LabelIndex,
    names: Sequence[str],
    annotations: Path | None,
    logger: logging.Logger,
) -> dict[str, float]:
    """Score by COCO's rules and say what came out; pycocotools is not needed.

    Args:
        images: detections and labels.
        index: of the split.
        names: class names.
        annotations: in COCO's format. They know crowds and the areas of outlines; where they don't fit the data set,
            which is said, and without them the label files count, with the areas of boxes.
        logger: where that is said.

    Returns:
        Figures by name: AP, AP50, AP75, AP small, AP medium, AP large; -1 where there are no labels.
    """
    source, truth = "label files", labels_as_truth(images)
    if annotations is not None:
        try:
            source, truth = annotations.name, read_truth(annotations, images, index, names)
        except (OSError, ValueError, KeyError, TypeError) as error:  # somebody else's file
            reason = f"{type(error).__name__}: {error}"
            logger.warning(f"--coco-metrics: {annotations} can't be used, the label files are instead; {reason}")
    figures = coco_metrics(detections_as_found(images), truth).figures()
    logger.info(f"by COCO's rules, {source}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return figures


def detections_as_found(images: Sequence[ImageResult]) -> Found:
    """Return the detections of some images as `utils.metrics.coco` wants them."""
    rows = np.concatenate([np.zeros((0, 6)), *(image.detections for image in images)])  # float64
    number = np.repeat([image.index for image in images], [len(image.detections) for image in images])
    return Found(number, rows[:, 5].astype(np.int64), _xywh(rows[:, :4]), rows[:, 4])


def labels_as_truth(images: Sequence[ImageResult]) -> Truth:
    """Return the labels of some images likewise: no crowds, and the areas are those of the boxes."""
    rows = np.concatenate([np.zeros((0, 5)), *(image.labels for image in images)])
    number = np.repeat([image.index for image in images], [len(image.labels) for image in images])
    boxes = _xywh(rows[:, 1:])
    return Truth(number, rows[:, 0].astype(np.int64), boxes, boxes[:, 2] * boxes[:, 3], np.zeros(len(rows), bool))


def read_truth(annotations: Path, images: Sequence[ImageResult], index: LabelIndex, names: Sequence[str]) -> Truth:
    """Read the annotations of some images; images and categories are told by their names.

    Args:
        annotations: in COCO's format.
        images: that were looked at.
        index: of the split.
        names: class names.

    Raises:
        ValueError: it is no JSON, or images or names are not in it; KeyError and TypeError: not in COCO's format.
        OSError: it can't be read.
    """
    content = json.loads(annotations.read_text(encoding="utf-8"))
    ids = {Path(one["file_name"]).stem: one["id"] for one in content["images"]}
    stems = {image.index: Path(index.path(image.index)).stem for image in images}
    if len(set(stems.values())) < len(stems):
        raise ValueError("some images have the same name in different folders")
    unknown = [stem for stem in stems.values() if stem not in ids]
    if unknown:
        raise ValueError(f"{len(unknown)} images are not in it, such as {unknown[0]}")
    number = {ids[stem]: i for i, stem in stems.items()}
    category = {one["id"]: one["name"] for one in content["categories"]}
    chosen = [one for one in content["annotations"] if one["image_id"] in number]
    strange = {category[one["category_id"]] for one in chosen} - set(names)
    if strange:
        raise ValueError(f"its category {min(strange)!r} is no class of the data set")
    class_ids = {name: class_id for class_id, name in enumerate(names)}
    return Truth(
        np.array([number[one["image_id"]] for one in chosen], np.int64),
        np.array([class_ids[category[one["category_id"]]] for one in chosen], np.int64),
        np.array([one["bbox"] for one in chosen], np.float64).reshape(-1, 4),
        np.array([one["area"] for one in chosen], np.float64),
        np.array([bool(one.get("iscrowd", 0)) for one in chosen], bool),
    )


def _xywh(boxes: FloatArray) -> FloatArray:
    """Turn boxes (n, 4) from xyxy to xywh (top-left)."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def score_with_coco(
    annotations: Path, results: list[dict[str, Any]], image_ids: Sequence[int | str], logger: logging.Logger
) -> None:
    """Say what COCO's own code makes of detections, or why it makes nothing of them; the validation stands anyway.

    Args:
        annotations: in COCO's format.
        results: detections, likewise.
        image_ids: images that were looked at; others of the annotations do not count.
        logger: where that is said.
    """
    scorer = _scorer()
    if scorer is None:
        logger.info(f"COCO's own figures for {annotations}: pip install faster-coco-eval")
        return
    name, coco_class, evaluation_class = scorer
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what these packages say of their progress
            stats = _stats(annotations, results, image_ids, coco_class, evaluation_class)
    except Exception as error:  # from somebody else's code and files; said, and no reason to lose the results
        logger.warning(f"{name} could not score {annotations}: {type(error).__name__}: {error}")
        return
    logger.info(f"{name}, {annotations.name}: " + ", ".join(f"{k} {v:.3f}" for k, v in stats.items()))


def _scorer() -> tuple[str, Any, Any] | None:
    for package, evaluation in SCORERS:
        try:
            if package == "pycocotools":
                coco, cocoeval = (importlib.import_module(f"pycocotools.{part}") for part in ("coco", "cocoeval"))
                return package, coco.COCO, getattr(cocoeval, evaluation)
            module = importlib.import_module(package)
            return package, module.COCO, getattr(module, evaluation)
        except ImportError:
            continue
    return None


def _stats(
    annotations: Path,
    results: list[dict[str, Any]],
    image_ids: Sequence[int | str],
    coco_class: Any,
    evaluation_class: Any,
) -> dict[str, float]:
    truth = coco_class(str(annotations))
    unknown = sorted({str(one) for one in image_ids} - {str(one) for one in truth.getImgIds()})
    if unknown:
        raise ValueError(f"{len(unknown)} images are not in it, such as {unknown[0]}")
    for one in truth.loadImgs(list(image_ids)):
        if image_id(one["file_name"]) != one["id"]:
            raise ValueError(f"it gives {one['file_name']} the id {one['id']}; ids have to be the numbers in the names")
    strange = {one["category_id"] for one in results} - set(truth.getCatIds())
    if strange:
        raise ValueError(f"it has no category {min(strange)}; its categories are not the classes of the data set")
    if not results:
        raise ValueError("there are no detections")
    evaluation = evaluation_class(truth, truth.loadRes(results), "bbox")
    evaluation.params.imgIds = list(image_ids)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return {name: float(value) for name, value in zip(STATS, evaluation.stats, strict=False)}
