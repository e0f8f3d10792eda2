"""How a run is left in its middle: asked to, by all ranks at the same step, or because it gets nowhere.

Stopping early for --patience is decided at the end of an epoch, in train.py.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from utils.core.errors import RESUMABLE, DivergedError, NotWrittenError, Stopped
from utils.core.logging import get_logger
from utils.core.signals import ignore_from_here
from utils.dist.collectives import barrier, is_posted, once, post
from utils.dist.place import DistEnv
from utils.run.folder import how_to_go_on, is_finished, write_resume_file
from utils.run.saving import last_words, save_in_epoch
from utils.run.state import Run
from utils.training.bad_batches import LIMIT, LIMIT_FP16

VOTES = 3  # of a rank at the end of a window: to stop, to save, and where it is; see `votes`
SAVE_EVERY = 900.0  # seconds between two checkpoints at most
STOP = "stop"  # posted by a rank that is asked to where no window ends


def votes(run: Run) -> Tensor:
    """Return what this rank has to say at the end of a window: whether to stop, to save, and where it is."""
    due = run.env.is_main_process and not run.config.nosave and time.monotonic() - run.saved_at >= SAVE_EVERY
    return run.ballot.cast([bool(run.stop), due], run.batches_done)


def is_asked(run: Run) -> bool:
    """Whether this rank or another was asked to stop; for a validation, which no collective interrupts."""
    if run.stop:
        post(STOP, run.env)
    return bool(run.stop) or is_posted(STOP, run.env)


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
        ignore_from_here()
    barrier(run.env)  # whoever left earlier would have the others ended in the middle of the save
    going_on = how_to_go_on(run.run_dir) if run.env.is_main_process else []
    raise Stopped(run.stop.by or "a signal to another rank", RESUMABLE, going_on)


def stop_if_diverged(run: Run) -> None:
    """End a run that gets nowhere, at the end of a window. Collective: every rank must call it.

    Raises:
        DivergedError: too many windows in a row were skipped; the run is saved as it was before them.
    """
    if run.notes.skips.in_row < (LIMIT_FP16 if run.scaler.is_enabled() else LIMIT):  # the same on all ranks
        return
    save_in_epoch(run)
    run.notes.say_spikes()
    once(run.writer.wait, run.env)
    where = "could not be written" if run.writer.failed else f"are in {run.weights_dir / 'last.pt'}"  # rank 0 speaks
    raise DivergedError(
        f"the last {run.notes.skips.in_row} optimizer steps had gradients that are not finite and were skipped. The "
        f"weights of before {where}: look at the images that were named, then start anew from them (--weights) with a "
        "lower lr0 in --hyp, or with --amp off if that is not the default here"
    )


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


def not_written(run: Run) -> bool:
    """Wait for the last checkpoint, and return whether it came to nothing; rank 0's work."""
    run.writer.wait()
    return run.writer.failed
