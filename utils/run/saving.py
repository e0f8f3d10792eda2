"""When a run writes its checkpoints, and what is said of those that were written or were not."""

import os
import time
from pathlib import Path
from typing import Any

from models.families import weights_of
from models.yolo import load_state
from utils.checkpoints.files import load_checkpoint
from utils.checkpoints.writer import Outcome
from utils.core.heartbeat import Phase, beat
from utils.core.logging import get_logger
from utils.core.signals import OURS
from utils.dist.collectives import all_gather_rows
from utils.run.callbacks import CheckpointSaved
from utils.run.folder import check_claim, how_to_go_on, say_finished
from utils.run.state import Run, rank_buffers, run_state
from utils.torch_utils import strip_checkpoint


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


def epoch_of_best(run: Run, final: bool) -> int | None:
    """Return the epoch, 1-based, that best.pt is of at the end of an epoch; None if there is none.

    Args:
        run: between two epochs.
        final: whether no epoch follows.
    """
    if run.config.nosave:  # best.pt is the last epoch's
        return run.state.epoch if final else None
    return run.state.best_epoch + 1 if run.state.best_fitness >= 0 else None


def save_in_epoch(run: Run) -> None:
    """Begin to write last.pt at the end of a window. Collective: every rank must call it."""
    meters = all_gather_rows(run.notes.meter.sums(), run.env)
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


def tell_written(run: Run) -> None:
    """Tell the callbacks of checkpoints that were written meanwhile; rank 0's work, nothing elsewhere."""
    beat(Phase.FILES)
    for outcome in run.writer.outcomes():
        if outcome.written:
            event = CheckpointSaved(outcome.path, outcome.epoch + 1, outcome.better, outcome.also)
            run.callbacks.checkpoint(event)
        if outcome.better and outcome.written:
            run.proven = outcome.fitness, outcome.epoch
            if outcome.fitness > run.state.best_fitness:  # made up for, after others that were not finite
                run.state.best_fitness, run.state.best_epoch = run.proven
        elif outcome.better:  # what is not finite is not the best
            run.state.best_fitness, run.state.best_epoch = run.proven


def load_best(run: Run) -> int | None:
    """Take the weights of the best checkpoint, or of the last one where there is none; rank 0's work.

    Returns:
        Epochs that were done when it was saved; None if there is none.
    """
    best, last = run.weights_dir / "best.pt", run.weights_dir / "last.pt"
    if not (best.exists() or last.exists()):
        return None
    saved = load_checkpoint(best if best.exists() else last)
    load_state(run.ema.module, weights_of(saved), strict=True)
    return saved["state"]["epoch"]


def strip_best(run: Run) -> None:
    """Strip the best checkpoint to what is needed for use; rank 0's work, and the last of a run."""
    best, last = run.weights_dir / "best.pt", run.weights_dir / "last.pt"

    def strip() -> None:
        check_claim(run.run_dir)
        strip_checkpoint(best if best.exists() else last, best)

    try:
        run.writer.write_now(strip, f"the final best.pt of {run.run_dir}")
    except OSError as error:
        get_logger().warning(f"{best} still holds the state of the run besides its weights: {error}")


def what_is_missing(run: Run) -> str:
    """Say what of a run's files is not on the disk, "" if all are; and in its description if nothing is left to do."""
    if run.writer.failed or run.writer.undone:
        what = f"the last checkpoint of {run.run_dir}" if run.writer.failed else run.writer.undone
        message = f"{what} was not written; the warnings above say why"
        return "\n".join([message, *last_words(run)])
    say_finished(run.run_dir)
    missing = [*run.writer.left_out, *run.callbacks.not_written()]
    if missing:
        return f"{run.run_dir} is finished, but without {', '.join(missing)}; the warnings above say why"
    return ""


def last_words(run: Run) -> list[str]:
    """Return the line that tells how to go on with a run that failed, none where nothing was saved.

    Of workers that our launcher started it speaks itself, when all are gone.
    """
    return how_to_go_on(run.run_dir) if run.env.is_main_process and OURS not in os.environ else []
