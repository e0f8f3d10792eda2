"""A training run: its parts, what of them moves, and how that is saved and found again."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.build import choose_sync_bn
from utils.checkpoints.writer import CheckpointWriter
from utils.config.build import config_to_dict, seconds_of
from utils.config.flags import TrainConfig
from utils.core.errors import UserError
from utils.core.logging import get_logger
from utils.core.seeds import rng_state, set_rng_state
from utils.core.signals import StopRequest
from utils.data.loaders import choose_val_batch
from utils.data.report import Problem, ScanReport, write_report
from utils.dist.ballot import Ballot
from utils.dist.place import DistEnv
from utils.run.agreement import data_facts
from utils.run.callback_calls import Callbacks
from utils.run.callbacks import Callback
from utils.run.folder import check_claim, versions, write_description
from utils.run.inputs import TrainInputs
from utils.run.notes import Notes
from utils.run.plots import Plots
from utils.torch_utils import ModelEMA
from utils.training.optim import Schedule, build_optimizer, load_optimizer
from utils.training.steps import BufferSnapshot


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


class Run:
    """What the parts of a run hand to each other.

    Args:
        config: every flag.
        inputs: what is trained, and on what.
        env: this rank's place.
        run_dir: folder that everything is written to.
        callbacks: told what happens, besides the loggers; only rank 0's are.
    """

    def __init__(
        self, config: TrainConfig, inputs: TrainInputs, env: DistEnv, run_dir: Path, callbacks: Sequence[Callback] = ()
    ) -> None:
        main = env.is_main_process
        self.config, self.env, self.run_dir = config, env, run_dir
        # What it is given.
        self.hyp, self.recipe_note = inputs.recipe.hyp, inputs.recipe.note
        self.data, self.train_index, self.val_index = inputs.data, inputs.train_index, inputs.val_index
        self.plan, self.imgsz, self.step_bytes = inputs.plan, inputs.imgsz, inputs.step_bytes
        # The network, and what trains it.
        self.family, self.raw_model = inputs.family, inputs.raw_model
        self.model: nn.Module = inputs.raw_model  # maybe wrapped
        self.parameters = [parameter for parameter in self.raw_model.parameters() if parameter.requires_grad]
        self.sync_bn = choose_sync_bn(config.sync_bn, self.family, self.raw_model, self.plan)
        self.criterion = self.family.criterion(self.raw_model, self.hyp, self.imgsz, config.label_smoothing)
        self.optimizer = build_optimizer(self.raw_model, config.optimizer, self.hyp, self.plan)
        batches_per_epoch = math.ceil(len(self.train_index) / self.plan.global_batch)
        self.schedule = Schedule(self.hyp, config.epochs, batches_per_epoch, self.plan, config.cos_lr)
        self.precision, self.scaler = inputs.precision, inputs.precision.make_scaler(env.device)
        self.ema = ModelEMA(self.raw_model, buffers_only=not main)
        self.buffers = BufferSnapshot(self.raw_model)
        # Where it is.
        self.state = TrainState()
        self.stop, self.ballot = StopRequest(seconds_of(config.time_limit)), Ballot(env)
        self.proven = (-1.0, 0)  # best_fitness and best_epoch as of best.pt
        self.just_saved = False  # at the end of the window before; the same on all ranks
        self.saved_at = time.monotonic()  # when a checkpoint was last taken
        self.waited: Callable[[], float] = float  # seconds of waiting for images so far, on this rank
        # What it notes, says and leaves.
        self.notes = Notes(env, self.train_index, run_dir, len(self.family.losses))
        self.plots = Plots(run_dir, self.data.names, enabled=main and not config.noplots)
        self.callbacks = Callbacks([*inputs.loggers, *callbacks] if main else [])
        self.writer = CheckpointWriter(functools.partial(check_claim, run_dir))

    @property
    def weights_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_dir / "weights"

    @property
    def val_batch(self) -> int:
        """Images of a validation batch."""
        return choose_val_batch(self.config.val_batch, self.plan.global_batch)

    @property
    def batches_done(self) -> int:
        """Micro-batches of the run that this rank has done."""
        return self.state.epoch * self.schedule.batches_per_epoch + self.state.batch

    @functools.cached_property
    def data_facts(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint says of the data; a digest of all labels takes a while where there are many."""
        return data_facts({"train": self.train_index, "val": self.val_index})


def rank_buffers(run: Run) -> Tensor:
    """Return the floating BatchNorm buffers of raw and averaged weights as they are on this rank, in a row."""
    return torch.cat([buffer.reshape(-1).double() for buffer in _norm_buffers(run)])


def _norm_buffers(run: Run) -> list[Tensor]:
    return [
        buffer
        for model in (run.raw_model, run.ema.module)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]


def describe(run: Run, findings: list[Problem]) -> None:
    """Write to the folder of a new run what it is, and every problem of its data; rank 0's work.

    Args:
        run: not yet started.
        findings: on the names of the classes.
    """
    write_description(run.run_dir, config_to_dict(run.config), config_to_dict(run.hyp), dataclasses.asdict(run.plan))
    reports = {"": ScanReport(problems=findings), "train": run.train_index.report, "val": run.val_index.report}
    write_report(run.run_dir, reports, get_logger())


def run_state(run: Run) -> dict[str, Any]:
    """Return everything that moves, and what it takes to build the run again; the format of our checkpoints."""
    return {
        "state": dataclasses.asdict(run.state),
        "model": dict(run.raw_model.state_dict()),
        "ema": run.ema.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "meters": None,  # of each rank, in the middle of an epoch
        "rank_buffers": None,  # of each rank, in the middle of an epoch without SyncBN
        "rng": rng_state(run.env.device),
        "spec": run.raw_model.yaml,
        "names": run.raw_model.names,
        "config": config_to_dict(run.config),
        "precision": run.precision.name,
        "data": run.data_facts,
        "hyp": config_to_dict(run.hyp),
        "run_dir": str(run.run_dir),
        "versions": versions(),
    }


def load_run_state(run: Run, saved: Mapping[str, Any]) -> None:
    """Put a run where its checkpoint was taken.

    Raises:
        UserError: something in it is not as this program saves it.
    """
    try:
        _load(run, saved)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--resume {saved['path']}: its state is not as this program saves it ({type(error).__name__}: {reason}); "
            "go on with the version that saved it, or start a new run with --weights"
        ) from error


def _load(run: Run, saved: Mapping[str, Any]) -> None:
    run.raw_model.load_state_dict(saved["model"])
    run.ema.load_state_dict(saved["ema"])
    load_optimizer(run.optimizer, saved["optimizer"])
    if run.scaler.is_enabled() and saved["scaler"]:  # a run may move to a device of another precision
        run.scaler.load_state_dict(saved["scaler"])
    run.state = TrainState(**saved["state"])
    run.proven = run.state.best_fitness, run.state.best_epoch
    _load_shares(run, saved)
    set_rng_state(saved["rng"])
    data = {split: dict(facts) for split, facts in run.data_facts.items()}
    if "labels" not in saved["data"].get("train", {}):  # the run is older than that digest
        for facts in data.values():
            del facts["labels"]
    own_facts = {"data": data, "precision": run.precision.name, "versions": versions()}
    if run.config.data != saved["config"]["data"]:  # it has moved, and was compared before
        del own_facts["data"]
    for what, now in own_facts.items():
        if saved[what] != now:
            get_logger().warning(f"since this run was saved its {what} changed: {_difference(saved[what], now)}")


def _difference(before: Any, now: Any) -> str:
    """Say in words how two plain values differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return f"{before} became {now}"
    changed = {key: (before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)}
    said = {"digest": "other files, or other times of them", "labels": "other names, sizes or labels"}
    for digest in said:
        if digest in changed and len(changed) > 1:
            del changed[digest]
    return ", ".join(said.get(key) or f"{key} {_difference(*pair)}" for key, pair in changed.items())


def _load_shares(run: Run, saved: Mapping[str, Any]) -> None:
    """Give each rank its own meter and buffers of the middle of an epoch; what they add up to, if ranks are others."""
    meters, buffers, env = saved["meters"], saved["rank_buffers"], run.env
    if meters is not None and len(meters) == env.world_size:
        run.notes.meter.load(meters[env.rank])
    elif meters is not None and env.is_main_process:
        total = meters.sum(0)
        total[-1] *= env.world_size / len(meters)  # every rank counts every batch
        run.notes.meter.load(total)
    if buffers is None or run.sync_bn:
        return
    row = buffers[env.rank] if len(buffers) == env.world_size else buffers.mean(0)
    own = _norm_buffers(run)
    with torch.no_grad():
        for buffer, values in zip(own, row.split([buffer.numel() for buffer in own]), strict=True):
            buffer.copy_(values.view_as(buffer))
