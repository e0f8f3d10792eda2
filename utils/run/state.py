"""The state of a training run: its parts, what of them moves, and how that is saved and found again."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from models.families import Family
from models.yolo import DetectionModel
from utils.checkpoints.writer import CheckpointWriter, Outcome
from utils.config.data_yaml import DataConfig
from utils.config.flags import TrainConfig, config_to_dict
from utils.config.recipe import Hyp
from utils.core.errors import RESUMABLE, NotWrittenError, Stopped, UserError
from utils.core.heartbeat import Phase, beat, waiting
from utils.core.logging import DeviceMeter, get_logger, mean_of
from utils.core.seeds import rng_state, set_rng_state
from utils.core.signals import OURS, StopRequest, ignore_from_here
from utils.data.index import LabelIndex
from utils.data.loaders import choose_val_batch
from utils.data.report import UnreadableImages
from utils.dist.collectives import all_gather_rows, all_reduce_sum, barrier, once
from utils.dist.place import DistEnv
from utils.run.callbacks import Callbacks
from utils.run.folder import how_to_go_on, is_finished, versions, write_resume_file
from utils.run.inputs import data_facts
from utils.run.plots import Plots
from utils.torch_utils import BatchPlan, ModelEMA
from utils.training.bad_batches import SkipLog, SpikeLog
from utils.training.loss import DetectionLoss
from utils.training.optim import Schedule, load_optimizer
from utils.training.steps import BufferSnapshot, Precision

VOTES = 3  # of a rank at the end of a window: to stop, to save, and where it is; see `votes`
SAVE_EVERY = 900.0  # seconds between two checkpoints at most


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


class Ballot:
    """What the ranks wish for at the end of a window, added up on the way of a collective that is there anyway.

    Where computing is not on the CPU, reading the sums at once would make the host wait for the device: there they are
    read when the next ones are, so all ranks act a window later.
    """

    def __init__(self, env: DistEnv) -> None:
        self._env = env
        self._on_the_way: tuple[Tensor, torch.cuda.Event, int] | None = None

    def cast(self, wishes: Sequence[bool], place: int) -> Tensor:
        """Return what this rank has to say, int64 (len(wishes) + 1,), to be added up over ranks.

        Args:
            wishes: each yes or no.
            place: micro-batches of the run that this rank has done.
        """
        return torch.tensor([*wishes, place], dtype=torch.int64)

    def count(self, sums: Tensor, place: int) -> list[bool]:
        """Return for each wish whether any rank has it, the same on all ranks.

        Args:
            sums: of what the ranks cast.
            place: that this rank cast.

        Raises:
            RuntimeError: the ranks are not at the same place.
        """
        if self._env.device.type != "cuda":
            return self._read(sums, place)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
        before, copied = self._on_the_way, torch.cuda.Event()
        copied.record()
        self._on_the_way = on_host, copied, place
        if before is None:
            return [False] * (len(sums) - 1)
        with waiting:
            before[1].synchronize()  # of the window before, whose work is done while this one's is still queued
        return self._read(before[0], before[2])

    def _read(self, sums: Tensor, place: int) -> list[bool]:
        *wishes, places = sums.tolist()
        if places != place * self._env.world_size:
            raise RuntimeError(
                f"the ranks are not at the same batch any more: rank {self._env.rank} has done {place}, and all "
                f"{self._env.world_size} together {places}; one of them left out a batch or did one twice"
            )
        return [wish > 0 for wish in wishes]


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
    writer: CheckpointWriter
    ballot: Ballot
    skips: SkipLog
    spikes: SpikeLog
    stop: StopRequest
    state: TrainState
    unreadable: UnreadableImages
    step_bytes: int = 0  # of this machine's memory that a step of all its ranks takes at least
    recipe_note: str = ""  # what of the recipe is not as its file has it
    waited: Callable[[], float] = float  # seconds of waiting for images so far, on this rank
    data_facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # made when they are first asked for
    proven: tuple[float, int] = (-1.0, 0)  # best_fitness and best_epoch as of best.pt
    just_saved: bool = False  # at the end of the window before; the same on all ranks
    saved_at: float = field(default_factory=time.monotonic)  # when a checkpoint was last taken

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
        sums = all_reduce_sum(self.meter.sums(), self.env)
        with waiting:  # where the device does
            return mean_of(sums, self.env.world_size)


def leave(run: Run, *, save: bool = True) -> NoReturn:
    """Save a run and stop it here, because it was asked to. Collective: every rank must call it, at the same step.

    Args:
        run: at the end of a window.
        save: False if its last checkpoint is as good.

    Raises:
        Stopped: it was saved.
        NotWrittenError: it was not.
    """
    where = f"epoch {run.state.epoch + 1}, batch {run.state.batch} of {run.schedule.batches_per_epoch}"
    get_logger().info(f"asked to stop ({run.stop.by or 'another rank was'}): stopping in {where}")
    if save:
        save_in_epoch(run)
    if once(lambda: not_written(run), run.env):
        raise NotWrittenError("\n".join([
            f"stopped by {run.stop.by or 'a signal to another rank'}, but the state of {run.run_dir} was not written; "
            "the warnings above say why",
            *last_words(run),
        ]))  # fmt: skip
    if run.env.is_main_process:
        write_resume_file(run.run_dir)
    if run.env.launched:
        ignore_from_here(run.stop.by)
    barrier(run.env)  # whoever left earlier would have the others ended in the middle of the save
    going_on = how_to_go_on(run.run_dir) if run.env.is_main_process else []
    raise Stopped(run.stop.by or "a signal to another rank", RESUMABLE, going_on)


def not_written(run: Run) -> bool:
    """Wait for the last checkpoint, and return whether it came to nothing; rank 0's work."""
    run.writer.wait()
    return run.writer.failed


def last_words(run: Run) -> list[str]:
    """Return the line that tells how to go on with a run that failed, none where nothing was saved.

    Of workers that our launcher started it speaks itself, when all are gone.
    """
    return how_to_go_on(run.run_dir) if run.env.is_main_process and OURS not in os.environ else []


@contextlib.contextmanager
def interruptible(run_dir: Path, env: DistEnv) -> Iterator[None]:
    """Let a stop that does not wait for a window's end say how to go on with a run, if something was saved.

    Not where a launcher ends this process: maybe another rank has failed.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        by_launcher = env.launched and isinstance(stop, Stopped)
        if stop.args or by_launcher or not env.is_main_process or is_finished(run_dir):
            raise
        write_resume_file(run_dir)
        stop.args = tuple(how_to_go_on(run_dir))
        raise


def save_at_end(run: Run, better: bool, final: bool) -> None:
    """Begin to write last.pt, and best.pt and epochN.pt where they are due; rank 0's work.

    Args:
        run: between two epochs.
        better: whether its weights are the best so far.
        final: whether no epoch follows.
    """
    config, done = run.config, run.state.epoch
    if config.nosave and not final:
        return
    also = [run.weights_dir / "best.pt"] if better else []
    if config.save_period > 0 and done % config.save_period == 0:
        also.append(run.weights_dir / f"epoch{done}.pt")
    _write(run, run_state(run), also, done - 1, better)


def save_in_epoch(run: Run) -> None:
    """Begin to write last.pt at the end of a window. Collective: every rank must call it."""
    meters = all_gather_rows(run.meter.sums(), run.env)
    buffers = None
    if not run.sync_bn and run.plan.world_size > 1:  # until they are averaged, each rank has its own
        buffers = all_gather_rows(rank_buffers(run), run.env)
    if run.env.is_main_process:
        state = run_state(run) | {"meters": meters, "rank_buffers": buffers}
        _write(run, state, [], run.state.epoch, better=False)


def _write(run: Run, state: dict[str, Any], also: list[Path], epoch: int, better: bool) -> None:
    beat(Phase.SAVING)
    goal = Outcome(run.weights_dir / "last.pt", tuple(also), epoch, run.state.best_fitness, better)
    run.writer.write(state, goal, run.weights_dir / "best.pt")
    run.saved_at = time.monotonic()


def votes(run: Run) -> Tensor:
    """Return what this rank has to say at the end of a window: whether to stop, to save, and where it is."""
    due = run.env.is_main_process and not run.config.nosave and time.monotonic() - run.saved_at >= SAVE_EVERY
    return run.ballot.cast([bool(run.stop), due], place(run))


def place(run: Run) -> int:
    """Return the number of micro-batches of the run that this rank has done."""
    return run.state.epoch * run.schedule.batches_per_epoch + run.state.batch


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
        "data": _data_facts(run),
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
    data = {split: dict(facts) for split, facts in _data_facts(run).items()}
    if "labels" not in saved["data"].get("train", {}):  # the run is older than that digest
        for facts in data.values():
            del facts["labels"]
    own_facts = {"data": data, "precision": run.precision.name, "versions": versions()}
    if run.config.data != saved["config"]["data"]:  # it has moved, and was compared before
        del own_facts["data"]
    for what, now in own_facts.items():
        if saved[what] != now:
            get_logger().warning(f"since this run was saved its {what} changed: {_difference(saved[what], now)}")


def _data_facts(run: Run) -> dict[str, Any]:
    if not run.data_facts:  # a digest of all labels takes a while where there are many
        run.data_facts = data_facts({"train": run.train_index, "val": run.val_index})
    return run.data_facts


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
        run.meter.load(meters[env.rank])
    elif meters is not None and env.is_main_process:
        total = meters.sum(0)
        total[-1] *= env.world_size / len(meters)  # every rank counts every batch
        run.meter.load(total)
    if buffers is None or run.sync_bn:
        return
    row = buffers[env.rank] if len(buffers) == env.world_size else buffers.mean(0)
    own = _norm_buffers(run)
    with torch.no_grad():
        for buffer, values in zip(own, row.split([buffer.numel() for buffer in own]), strict=True):
            buffer.copy_(values.view_as(buffer))
