"""What a validation is given: read and checked against each other before anything is made.

Everything that is wrong comes in one message.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.build import check_imgsz, fit_imgsz, trained_on
from models.families import Family, build_model, load_weights
from models.yolo import DetectionModel
from utils.config.data_yaml import DataConfig, load_data
from utils.config.flags import MAX_DET, MOST_DET, ValConfig
from utils.core.devices import check_half
from utils.core.errors import Problems
from utils.core.logging import get_logger
from utils.data.class_names import Match, check_measurable
from utils.data.index import LabelIndex
from utils.data.loaders import choose_num_workers
from utils.data.report import Problem
from utils.data.splits import check_same_data
from utils.dist.collectives import share_problems
from utils.dist.job_files import shown_weights
from utils.dist.place import ALONE, DistEnv
from utils.run.agreement import check_same_settings, flags_of_all
from utils.run.inputs import check_loading, doubts_about_depth, read_labels
from utils.run.preflight import check_run_folder


@dataclass(frozen=True)
class ValInputs:
    """What a validation starts from; all parts fit together."""

    data: DataConfig
    model: DetectionModel  # on its device, in evaluation mode
    family: Family
    imgsz: int
    index: LabelIndex
    findings: list[Problem]  # on the names of the classes


def read_classes(
    config: ValConfig, env: DistEnv, problems: Problems
) -> tuple[Mapping[str, Any] | None, DataConfig | None, Match | None, list[Problem]]:
    """Read weights and the YAML of a data set, and see whether their classes are the same. Collective.

    Args:
        config: every flag.
        env: this rank's place.
        problems: where mistakes go.

    Returns:
        The weights, the data set, which of their classes is which, and what is to be said of that.
    """
    shown = shown_weights(config.weights)
    checkpoint = problems.attempt(lambda: load_weights(Path(config.weights), env, "--weights"))
    name = config.data
    if not name and checkpoint is not None:
        name = problems.attempt(lambda: trained_on(checkpoint, config.weights)) or ""
    data = None
    if name:
        data = problems.attempt(lambda: load_data(name, config.single_cls, config.allow_download_script))
    if checkpoint is None or data is None or config.single_cls or "names" not in checkpoint:
        return checkpoint, data, None, []
    known, names = checkpoint["names"], data.names
    checked = problems.attempt(lambda: check_measurable(known, names, data.path, shown, config.strict))
    return checkpoint, data, *(checked or (None, []))


def check_classes(config: ValConfig) -> None:
    """Find out in the process that is to start ranks whether weights and data set fit together.

    Raises:
        UserError: they can't be read, or not be scored.
    """
    problems = Problems()
    read_classes(config, ALONE, problems)
    problems.raise_if_any()


def read_val_inputs(config: ValConfig, env: DistEnv) -> ValInputs:
    """Read and check what a validation is given. Collective: every rank must call it.

    Raises:
        UserError: lists what is wrong with data, labels, weights, image size and the run folder.
    """
    check_same_settings(flags_of_all(config), env)
    problems = Problems()
    run_dir = Path(config.project, config.name)
    if env.is_main_process:
        problems.attempt(lambda: check_run_folder(run_dir, config.exist_ok))
    problems.attempt(lambda: check_half(config.half, env.device))
    checkpoint, data, match, findings = read_classes(config, env, problems)
    loaded = None
    if checkpoint is not None:
        loaded = problems.attempt(lambda: build_model(checkpoint, Path(config.weights), env, "--weights"))
    if loaded is not None:
        model, family, trained_at = loaded
        problems.attempt(lambda: check_imgsz(config.imgsz or trained_at, model))
        if match is not None:
            model.detect.reorder_classes(match.order)
    processes = choose_num_workers(config.workers, env.local_world_size, config.batch_size)
    check_loading(config.workers, processes, problems)
    indexes = read_labels(data, [config.split], config.strict, env, problems)
    share_problems(problems, env)
    check_same_data(indexes, env)
    assert data is not None
    imgsz = fit_imgsz(config.imgsz or trained_at, model)
    if not config.data:
        get_logger().info(f"data        {data.path}, what the weights were trained on (--data)")
    doubts = [*data.doubts, *findings, *doubts_about_depth(indexes, env)]
    if config.single_cls and len(model.names) > 1:
        doubts.append(
            f"--single-cls: the weights tell {len(model.names)} classes apart, which count as one here: these figures "
            "can't be compared with those without the flag"
        )
    for doubt in doubts:
        get_logger().warning(doubt)
    return ValInputs(data, model, family, imgsz, indexes[config.split], findings)


def detection_cap(asked: int, index: LabelIndex) -> int:
    """Return how many detections of an image are kept.

    Args:
        asked: so many; 0 = 300, or twice the labels of the densest image where these are more, up to `MOST_DET`. With
            just as many the places of unsure but right ones would be taken by wrong ones.
        index: of the split.
    """
    return asked or max(MAX_DET, min(2 * most_labels(index), MOST_DET))


def doubts_about_density(asked: int, index: LabelIndex) -> list[str]:
    """Return a sentence if an image has more labels than can be found; see `detection_cap`."""
    most, cap = most_labels(index), detection_cap(asked, index)
    if most <= cap:
        return []
    if asked:
        lost = "so not all can be found; leave the flag out"
        return [f"--max-det {asked} is less than the {most} labels of one image, {lost}"]
    return [f"one image has {most} labels, but only {cap} objects of an image are looked for: is that image right?"]


def most_labels(index: LabelIndex) -> int:
    """Return the labels of the densest image of a split."""
    return int(np.diff(index.offsets).max(initial=0))
