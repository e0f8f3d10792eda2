"""What a run says before it starts, which is everything that follows from its flags, and at its end."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from models.costs import count_flops
from utils.config.flags import MAX_DET
from utils.core.logging import get_logger
from utils.core.wording import duration, format_lines
from utils.data.loaders import share_workers
from utils.dist.meeting import backend
from utils.metrics.evaluation import TableRow, format_table
from utils.run.folder import lockstep_version, script
from utils.run.progress import machine
from utils.run.state import Run
from utils.run.val_inputs import detection_cap, doubts_about_density


def say(run: Run) -> None:
    """Log what is going to happen, and what speaks against it."""
    get_logger().info(header(run))
    for doubt in [*run.schedule.doubts(), *doubts_about_density(0, run.val_index)]:
        get_logger().warning(doubt)


def header(run: Run) -> str:
    """Say what is going to happen, before it does."""
    config, plan, hyp, schedule = run.config, run.plan, run.hyp, run.schedule
    parameters = sum(parameter.numel() for parameter in run.raw_model.parameters())
    trained = sum(parameter.numel() for parameter in run.raw_model.parameters() if parameter.requires_grad)
    taken = {name: value for name, value in run.data.defaults.items() if getattr(config, name) == value}
    own = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in taken.items())
    gflops = count_flops(run.ema.module, run.imgsz) / 1e9
    cap = detection_cap(0, run.val_index)
    times_seen = schedule.batches_per_epoch * plan.global_batch / len(run.train_index)
    lines = [
        ("Lockstep", f"{lockstep_version()}, {machine(run.env.device)}"),
        (
            "run",
            f"{run.run_dir}, seed {config.seed}"
            + (", deterministic" if torch.are_deterministic_algorithms_enabled() else ""),
        ),
        (
            "data",
            f"{run.data.path.name}: {len(run.train_index)} images to train on with {run.train_index.num_instances} "
            f"objects of {run.data.num_classes} classes, {len(run.val_index)} to validate on"
            + (f" with up to {cap} detections each" if cap > MAX_DET else "")
            + (f"; an epoch sees each image {times_seen:.1f} times" if times_seen >= 1.5 else ""),
        ),
        (
            "network",
            f"{Path(config.cfg or config.weights).name}: {parameters:,} parameters"
            + (f" ({trained:,} trained)" if trained < parameters else "")
            + f", {gflops:.{1 if gflops >= 1 else 3}f} GFLOPs at {run.imgsz} px",
        ),
        (
            "batch",
            f"{plan.global_batch} images = {plan.world_size} x {plan.local_batch}, accumulated over {plan.accumulate}: "
            f"{plan.global_batch * plan.accumulate} images an optimizer step; {run.val_batch} in validation",
        ),
        (
            "schedule",
            f"{config.epochs} epochs of {schedule.batches_per_epoch} batches, {config.optimizer}, learning rate "
            f"{hyp.lr0:g} to {hyp.lr0 * hyp.lrf:g} ({'cosine' if config.cos_lr else 'linear'}), "
            + schedule.describe_warmup(),
        ),
        *ranks(run),
        ("loader", loader(run)),
        (
            "recipe",
            ", ".join(filter(None, (Path(config.hyp).name, run.recipe_note)))
            + (f"; defaults of {run.data.path.name}: {own}" if own else ""),
        ),
        ("precision", {"off": "fp32"}.get(run.precision.name, f"{run.precision.name} autocast, fp32 weights")),
    ]
    if run.state.epoch:
        lines.append(("resumed", f"after epoch {run.state.epoch} of {config.epochs}"))
    return format_lines(lines)


def ranks(run: Run) -> list[tuple[str, str]]:
    """Say how many processes train together, and on what; nothing of one alone."""
    env = run.env
    if env.world_size == 1:
        return []
    machines = -(-env.world_size // env.local_world_size)
    where = "this machine" if machines == 1 else f"{machines} machines"
    norm = "BatchNorm over the global batch (SyncBN)" if run.sync_bn else "BatchNorm over each rank's own images"
    sent = "; gradients are sent in bf16" if run.config.grad_compress == "bf16" else ""
    return [("ranks", f"{env.world_size} on {where}, joined by {backend(env)}; {norm}{sent}")]


def loader(run: Run) -> str:
    """Say how many processes load images for a rank, and what they keep."""
    workers, val_workers = loader_processes(run, run.config.workers)
    rank = " for each rank" if run.env.world_size > 1 else ""
    processes = f"{workers} process{'es' if workers > 1 else ''}{rank}" if workers else "in the training process"
    validation = f", {val_workers or 'none'} for validation" if workers != val_workers else ""
    return f"{processes}{validation}, cache {run.config.cache}"


def remedies(run: Run) -> str:
    """Say what makes images come faster, by what is possible still."""
    workers, most = (loader_processes(run, limit)[0] for limit in (run.config.workers, sys.maxsize))
    found = [f"more --workers (now {run.config.workers})"] if most > workers else []
    found += ["--cache ram"] if run.config.cache == "off" else []
    found += ["a smaller --img"]
    return "what helps: " + ", ".join(found[:-1]) + (" or " if len(found) > 1 else "") + found[-1]


def loader_processes(run: Run, limit: int) -> tuple[int, int]:
    """Return how many processes load images for this rank, to train on and for validation."""
    return share_workers(limit, run.env.local_world_size, run.plan.local_batch, run.val_batch)


def summary(run: Run, rows: Sequence[TableRow], epoch: int, seconds: float) -> str:
    """Say how good the weights are that a finished run leaves, and where everything is.

    Args:
        run: at its end.
        rows: the table of its best weights.
        epoch: that they are of, 1-based.
        seconds: of training.
    """
    best, config = run.weights_dir / "best.pt", run.config
    again = ["--weights", best, "--data", run.data.path, "--img", run.imgsz, "--batch", run.val_batch]
    again += ["--device", config.device] if config.device else []
    again += ["--single-cls"] if run.data.merged else []
    return (
        f"\n{duration(seconds)} of training. Weights of epoch {epoch}, measured again:\n"
        f"{format_table(rows)}\n\n"
        f"weights     {best} to use, {run.weights_dir / 'last.pt'} to resume from\n"
        f"figures     {run.run_dir / 'results.csv'}\n"
        f"again       {shlex.join(['python', script('val.py'), *map(str, again)])}"
    )
