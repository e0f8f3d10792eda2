"""What a training is given: read, checked against each other and the machine before anything is made.

Everything that is wrong comes in one message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.build import check_imgsz, fit_imgsz, freeze, network_spec, start_from, with_anchor_count
from models.costs import check_batch
from models.families import Family, build_network, family_of, load_weights
from models.yolo import DetectionModel, load_state
from utils.checkpoints.files import checkpoint_bytes
from utils.config.build import build_config, config_to_dict
from utils.config.data_yaml import DataConfig, is_fetched, load_data
from utils.config.flags import TrainConfig
from utils.config.recipe import Hyp, Recipe, load_recipe
from utils.core.errors import Problems
from utils.core.heartbeat import Phase, beat
from utils.core.image_files import depth_doubts
from utils.core.logging import get_logger
from utils.data.class_names import check_names, same_names
from utils.data.forks import may_have_children
from utils.data.index import LabelIndex
from utils.data.loaders import choose_val_batch, share_workers
from utils.data.report import Problem
from utils.data.sampler import max_imgsz
from utils.data.splits import check_same_data, open_splits
from utils.dist.collectives import all_gather_objects, once, share_problems
from utils.dist.job_files import shown_weights
from utils.dist.place import DistEnv
from utils.run.agreement import check_moved_data, check_same_settings, code_digest, flags_of_all
from utils.run.callbacks import Callback
from utils.run.loggers import loggers_from_names
from utils.run.preflight import check_disk, check_open_files, check_resumed_folder, check_run_folder
from utils.torch_utils import BatchPlan, split_global_batch
from utils.training.compilation import check_compiler
from utils.training.data_parallel import replica_devices
from utils.training.steps import Precision, choose_precision

MOVED = "; if the data set of the run has moved, name its YAML in the new place with --data"


@dataclass(frozen=True)
class TrainInputs:
    """What a training starts from; all parts fit together."""

    recipe: Recipe
    data: DataConfig
    plan: BatchPlan
    precision: Precision
    family: Family
    raw_model: DetectionModel  # on its device, with its weights, frozen where wanted
    imgsz: int
    train_index: LabelIndex
    val_index: LabelIndex
    loggers: list[Callback]  # rank 0's
    findings: list[Problem]  # on the names of the classes
    step_bytes: int  # of this machine's memory that a step of all its ranks takes at least


def read_inputs(config: TrainConfig, env: DistEnv, resumed: Mapping[str, Any] | None = None) -> TrainInputs:
    """Read and check what a training is given. Collective: every rank must call it.

    Args:
        config: every flag.
        env: this rank's place.
        resumed: checkpoint of the run to go on with; it keeps its own recipe, network and weights.

    Raises:
        UserError: lists what is wrong with recipe, data, labels, network, weights, image size, batch, and with the
            machine for such a run.
    """
    program = {"the code of Lockstep": code_digest(), "the version of torch": torch.__version__}
    check_same_settings(flags_of_all(config) | program, env)
    problems = Problems()
    plan = problems.attempt(lambda: split_global_batch(config.batch_size, env.world_size, config.nbs))
    precision = problems.attempt(lambda: same_precision(config.amp, env))
    own = Path(resumed["run_dir"]) if resumed and resumed["run_dir"] else None  # which a run goes on in
    folder = own or Path(config.project, config.name)
    if env.is_main_process:
        problems.attempt(lambda: check_resumed_folder(own) if own else check_run_folder(folder, config.exist_ok))
    loggers = problems.attempt(lambda: loggers_from_names(config.loggers)) if env.is_main_process else []
    recipe = problems.attempt(lambda: recipe_of(config, resumed))
    hyp = recipe.hyp if recipe else None
    allowed = config.allow_download_script and resumed is None  # a checkpoint, which says what was, allows nothing
    way_out = MOVED if resumed else ""
    data = problems.attempt(lambda: load_data(config.data, config.single_cls, allowed), way_out)
    if resumed and data is not None and not same_names(data.names, resumed["names"]):
        problems.add(f"--resume: the class names in {data.path} are no longer those of the run")
    findings: list[Problem] = []
    raw_model = read_network(config, env, hyp, data, resumed, problems, findings)
    known = data if plan is not None else None  # a batch that can't be shared out is not worth reading labels for
    indexes = read_labels(known, ("train", "val"), config.strict, env, problems, way_out)
    if resumed and config.data != resumed["config"]["data"]:
        problems.attempt(lambda: check_moved_data(config.data, indexes, resumed["data"]))
    beat(Phase.SET_UP)
    share_problems(problems, env)
    check_same_data(indexes, env)
    assert plan and precision and recipe and data and raw_model  # else there were problems
    settings = {f"{name} of --hyp": value for name, value in config_to_dict(recipe.hyp).items()}
    check_same_settings(settings | {"the network of --cfg": raw_model.yaml, "the class names": data.names}, env)

    family, imgsz = family_of(raw_model.yaml), fit_imgsz(config.imgsz, raw_model)
    copies = max(len(replica_devices(config.dp, config.device, env)), 1)
    share = -(-plan.local_batch // copies)  # of the first device
    largest = max_imgsz(imgsz, raw_model.max_stride, config.multi_scale)
    taken = problems.attempt(lambda: check_batch(raw_model, share, largest, precision, env, plan.world_size * copies))
    inputs = TrainInputs(
        recipe,
        data,
        plan,
        precision,
        family,
        raw_model,
        imgsz,
        indexes["train"],
        indexes["val"],
        loggers or [],
        findings,
        taken or 0,
    )
    check_machine(config, raw_model, plan, env, folder, config.exist_ok or own is not None, problems)
    share_problems(problems, env)
    doubts = [*doubts_about_depth(indexes, env), *doubts_about_splits(indexes["train"], indexes["val"], env)]
    for doubt in [*data.doubts, *recipe.doubts, *findings, *doubts]:
        get_logger().warning(doubt)
    return inputs


def recipe_of(config: TrainConfig, resumed: Mapping[str, Any] | None) -> Recipe:
    """Return the hyperparameters of a run; one that is resumed keeps those that it began with.

    Raises:
        UserError: the file has mistakes.
    """
    if resumed is None:
        return load_recipe(config.hyp, config.optimizer)
    return Recipe(build_config(Hyp, resumed["hyp"]))


def same_precision(flag: str, env: DistEnv) -> Precision:
    """Return the precision that rank 0 decided on. Collective.

    Raises:
        UserError: rank 0 or this rank can't compute in it.
    """
    name = once(lambda: choose_precision(flag, env.device).name, env)
    return choose_precision(name, env.device)


def doubts_about_splits(train: LabelIndex, val: LabelIndex, env: DistEnv) -> list[str]:
    """Return a sentence if images that are measured are trained on; rank 0's work, nothing elsewhere."""
    if not env.is_main_process:
        return []
    trained_on = set(map(train.path, range(len(train))))
    both = [path for path in map(val.path, range(len(val))) if path in trained_on]
    if not both:
        return []
    return [
        f"{len(both)} of the {len(val)} images in val are in train too, such as {both[0]}: the figures tell how well "
        "they were learned by heart; name images in val that are not trained on",
    ]


def doubts_about_depth(indexes: Mapping[str, LabelIndex], env: DistEnv) -> list[str]:
    """Return a sentence for each split of which 16-bit images are almost black; rank 0's work, nothing elsewhere."""
    if not env.is_main_process:
        return []
    return [f"{split}: {doubt}" for split, index in indexes.items() for doubt in depth_doubts(index.path, len(index))]


def read_network(
    config: TrainConfig,
    env: DistEnv,
    hyp: Hyp | None,
    data: DataConfig | None,
    resumed: Mapping[str, Any] | None,
    problems: Problems,
    findings: list[Problem],
) -> DetectionModel | None:
    """Build the network with its weights on the device; without a data set to see whether that is possible.

    Args:
        config: every flag.
        env: this rank's place.
        hyp: None if something is wrong with it; may ask for another number of anchors.
        data: None if something is wrong with it.
        resumed: as in `read_inputs`.
        problems: where mistakes go.
        findings: where it goes if the classes of ``--weights`` have other names, or another order.
    """
    weights, shown = resumed, shown_weights(config.weights)
    if resumed is None and config.weights:
        weights = problems.attempt(lambda: load_weights(Path(config.weights), env))
    spec = problems.attempt(lambda: _spec(config, hyp, weights, resumed))
    if spec is None:
        return None
    names = ["?"] if data is None else data.names
    from_file = f"--cfg {config.cfg}" if config.cfg else f"--weights {shown}"
    where = from_file if resumed is None else f"--resume {resumed['path']}"
    raw_model = problems.attempt(lambda: build_network(spec, names, where)[0])
    if raw_model is None:
        return None
    if data is not None and resumed is not None:
        problems.attempt(lambda: load_state(raw_model, resumed["model"], strict=True))
    elif data is not None and weights is not None:
        problems.attempt(lambda: start_from(raw_model, shown, weights, keep_anchors=bool(config.cfg)))
        known = weights.get("names", [])
        if len(known) == len(names) and not data.merged:
            checked = problems.attempt(lambda: check_names(known, names, data.path, shown, config.strict))
            if checked is not None:
                raw_model.detect.reorder_classes(checked[0].order)
                findings += checked[1]
    problems.attempt(lambda: freeze(raw_model, config.freeze))
    problems.attempt(lambda: check_imgsz(config.imgsz, raw_model))
    raw_model.to(env.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return raw_model


def _spec(
    config: TrainConfig, hyp: Hyp | None, weights: Mapping[str, Any] | None, resumed: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the content of the network's YAML, None if the weights that know it can't be read."""
    if resumed is not None:
        return resumed["spec"]
    if not config.cfg and weights is None:
        return None
    spec = network_spec(config.cfg, shown_weights(config.weights), weights)
    return spec if hyp is None else with_anchor_count(spec, round(hyp.anchors))


def read_labels(
    data: DataConfig | None,
    splits: Sequence[str],
    strict: bool,
    env: DistEnv,
    problems: Problems,
    way_out: str = "",
) -> dict[str, LabelIndex]:
    """Open splits; {} where something is wrong with them. Nothing is drawn or fetched after other mistakes.

    Mistakes that were found before are said at once, for to look at the labels may take minutes.

    Collective: every rank must call it.
    """
    made = data is not None and (data.generator is not None or is_fetched(data, splits))
    said = all_gather_objects((bool(problems), made), env)  # some mistakes are found by one rank, and all have to scan
    if data is None or (any(mistaken for mistaken, _ in said) and any(made for _, made in said)):
        return {}
    for message in problems.messages if env.is_main_process else ():
        get_logger().warning(f"found before the labels are looked at: {message}")
    return problems.attempt(lambda: open_splits(data, splits, env, strict=strict), way_out) or {}


def check_machine(
    config: TrainConfig,
    raw_model: DetectionModel,
    plan: BatchPlan,
    env: DistEnv,
    run_dir: Path,
    replaces: bool,
    problems: Problems,
) -> None:
    """Check disk, compiler and loader processes for a run whose other inputs are right; it may replace checkpoints."""
    replaced = (run_dir / "weights").glob("*.pt") if replaces else ()
    there = sum(path.stat().st_size for path in replaced)
    if env.is_main_process:
        problems.attempt(lambda: check_disk(run_dir, checkpoints_bytes(raw_model, config) - there))
    val_batch = choose_val_batch(config.val_batch, plan.global_batch)
    processes = share_workers(config.workers, env.local_world_size, plan.local_batch, val_batch)
    check_loading(config.workers, sum(processes), problems)
    if config.compile:
        problems.attempt(lambda: check_compiler(env.device))


def check_loading(workers: int, processes: int, problems: Problems) -> None:
    """Check that there may be so many processes that load images.

    Args:
        workers: ``--workers``.
        processes: of this rank.
        problems: where mistakes go.
    """
    if workers and not may_have_children():
        get_logger().warning(
            "this process is daemonic (one of Celery's, or of a pool) and may start no others; it loads images itself, "
            "which is slower"
        )
    problems.attempt(lambda: check_open_files(processes))


def checkpoints_bytes(raw_model: DetectionModel, config: TrainConfig) -> int:
    """Bytes that the checkpoints of a run take on the disk at most: last, its previous, best, one being written."""
    moments = 1 if config.optimizer == "SGD" else 2
    one = checkpoint_bytes(raw_model.state_dict()) * (2 + moments)
    kept = config.epochs // config.save_period if config.save_period > 0 else 0
    return one * (4 + kept)
