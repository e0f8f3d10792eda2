"""The state of a training run: its parts, what of them moves, and how that is saved and found again."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.families import Family
from models.yolo import DetectionModel
from utils.callbacks import Callbacks
from utils.config import Hyp, TrainConfig, config_to_dict
from utils.data_config import DataConfig
from utils.dataloaders import choose_val_batch
from utils.dataset import LabelIndex
from utils.logging import DeviceMeter, get_logger, mean_of
from utils.loss import DetectionLoss
from utils.optim import Schedule, load_optimizer
from utils.plots import Plots
from utils.run_folder import how_to_go_on, versions
from utils.seeds import rng_state, set_rng_state
from utils.steps import BufferSnapshot, Precision
from utils.torch_utils import BatchPlan, DistEnv, ModelEMA, NonFiniteError, all_reduce_sum, save_checkpoint


@dataclass
class TrainState:
    """Where a run is; everything here moves and is saved.

    Attributes:
        epoch: the one that runs, or is to run next.
        batch: micro-batches of it that are done.
        step: optimizer steps so far.
        since_step: micro-batches since the last step.
        skipped: windows so far whose gradient was not finite; nothing of them was kept.
        best_fitness: the best value of ``--metric`` in all validations so far; -1 before the first.
        best_epoch: the epoch it was reached in.
        class_maps: mAP50-95 of each class at the last validation.
        stopped: whether the run ended early, by ``--patience`` or because a callback asked for it.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    since_step: int = 0
    skipped: int = 0
    best_fitness: float = -1.0
    best_epoch: int = 0
    class_maps: list[float] = field(default_factory=list)
    stopped: bool = False


@dataclass
class Run:
    """What the parts of a run hand to each other."""

    config: TrainConfig
    hyp: Hyp
    data: DataConfig
    train_index: LabelIndex
    val_index: LabelIndex
    env: DistEnv
    plan: BatchPlan
    run_dir: Path
    imgsz: int
    family: Family
    raw_model: DetectionModel
    model: nn.Module  # the raw model, maybe wrapped
    criterion: DetectionLoss
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    scaler: torch.amp.GradScaler
    sync_bn: bool  # whether BatchNorm sees the global batch
    ema: ModelEMA[DetectionModel]
    buffers: BufferSnapshot
    meter: DeviceMeter
    plots: Plots
    callbacks: Callbacks
    state: TrainState

    @property
    def weights_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_dir / "weights"

    @property
    def val_batch(self) -> int:
        """Images of a validation batch."""
        return choose_val_batch(self.config.val_batch, self.plan.global_batch)

    def mean_losses(self) -> list[float]:
        """Return the mean [box, objectness, class] losses of the epoch so far, over all ranks. Collective."""
        return mean_of(all_reduce_sum(self.meter.sums(), self.env), self.env.world_size)


@contextlib.contextmanager
def resumable(run: Run) -> Iterator[None]:
    """Let a KeyboardInterrupt say how to go on with a run, if something was saved and is left to do."""
    try:
        yield
    except KeyboardInterrupt:
        over = run.state.stopped or run.state.epoch >= run.config.epochs
        raise KeyboardInterrupt(*([] if over else how_to_go_on(run.run_dir))) from None


def save(run: Run, better: bool, final: bool) -> list[Path] | None:
    """Write last.pt, and best.pt and epochN.pt where they are due.

    Args:
        run: as it is between two epochs.
        better: whether its weights are the best so far.
        final: whether no epoch follows.

    Returns:
        What was written, last.pt first, [] if nothing was due; None if the weights are not finite: they never replace
        finite ones.
    """
    config, done = run.config, run.state.epoch
    if config.nosave and not final:
        return []
    last = run.weights_dir / "last.pt"
    also = [run.weights_dir / "best.pt"] if better else []
    if config.save_period > 0 and done % config.save_period == 0:
        also.append(run.weights_dir / f"epoch{done}.pt")
    try:
        save_checkpoint(run_state(run), last, also)
    except NonFiniteError as error:
        get_logger().warning(f"{error}; the checkpoint before it stays")
        return None
    return [last, *also]


def run_state(run: Run) -> dict[str, Any]:
    """Return everything that moves, and what it takes to build the run again; the format of our checkpoints."""
    return {
        "state": dataclasses.asdict(run.state),
        "model": run.raw_model.state_dict(),
        "ema": run.ema.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "gradients": None,  # saved at the end of a window only, where they are spent
        "meter": run.meter.state_dict(),
        "rng": rng_state(run.env.device),
        "spec": run.raw_model.yaml,
        "names": run.raw_model.names,
        "config": config_to_dict(run.config),
        "precision": run.precision.name,
        "data": data_facts(run),
        "hyp": config_to_dict(run.hyp),
        "run_dir": str(run.run_dir),
        "versions": versions(),
    }


def load_run_state(run: Run, saved: Mapping[str, Any]) -> None:
    """Put a run where its checkpoint was taken."""
    run.raw_model.load_state_dict(saved["model"])
    run.ema.load_state_dict(saved["ema"])
    load_optimizer(run.optimizer, saved["optimizer"])
    if run.scaler.is_enabled() and saved["scaler"]:  # a run may move to a device of another precision
        run.scaler.load_state_dict(saved["scaler"])
    run.meter.load_state_dict(saved["meter"])
    run.state = TrainState(**saved["state"])
    set_rng_state(saved["rng"])
    for what, now in {"data": data_facts(run), "precision": run.precision.name, "versions": versions()}.items():
        if saved[what] != now:
            get_logger().warning(f"since this run was saved its {what} changed: {saved[what]} became {now}")


def data_facts(run: Run) -> dict[str, Any]:
    """Return what identifies the data of a run; other data would change the schedule and the order of the images."""
    return {
        split: {"images": len(index), "instances": index.num_instances, "digest": index.images_digest}
        for split, index in {"train": run.train_index, "val": run.val_index}.items()
    }
