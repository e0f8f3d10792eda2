"""Train a detector.

python train.py                                                           on the built-in data, whatever device there is
python train.py --data my.yaml --cfg yolov5s.yaml --img 640 --batch 32    on your own
python train.py --resume runs/train/exp                                   go on where a run stopped
python train.py --device 0,1 --batch 64 ...                               two GPUs, 64 images a step in total
python -m torch.distributed.run --nproc_per_node 2 train.py ...           the same, launched by hand or by a scheduler
... run --nnodes 2 --node_rank R --master_addr HOST --master_port P --nproc_per_node G train.py ...    two machines
"""

# Told in two stages: mistakes in what was typed are found before torch is imported, which takes seconds. The run begins
# with `main`.
import sys

from own_packages import check_packages

check_packages()

from utils.config.build import parse
from utils.config.flags import TrainConfig
from utils.core import errors
from utils.run import preflight

if __name__ == "__main__":
    errors.end_quietly_by_ctrl_c()
    parse(TrainConfig, sys.argv[1:])  # --help and mistyped flags end here, before torch is imported
    preflight.check_opencv()

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import val
from utils.config import command_line
from utils.core import devices, seeds, signals
from utils.core.heartbeat import Phase, beat
from utils.core.logging import get_logger
from utils.core.wording import format_lines
from utils.data.loader_notes import deaths_explained
from utils.data.loaders import Batch, ValLoader
from utils.dist import job_files, launch, stalls, worker
from utils.dist.collectives import broadcast_object, check_same_weights, once, start_all_reduce_sum
from utils.dist.place import DistEnv, dist_env
from utils.metrics.evaluation import Evaluation, TableRow, format_table
from utils.run import events, folder, header, loading, notes, restarts, saving, settings, state, stopping
from utils.run.callback_checks import check_callbacks
from utils.run.callbacks import Callback
from utils.run.inputs import read_inputs
from utils.run.progress import EpochProgress, RunClock
from utils.run.state import Run
from utils.run.val_inputs import detection_cap
from utils.torch_utils import process_group
from utils.training import compilation, data_parallel, steps, sync_bn
from utils.training.profiler import no_step, profiling


@dataclass(frozen=True)
class Results:
    """What a finished run hands back.

    Attributes:
        run_dir: folder with everything that was written.
        best_value: what ``--metric`` names, of the best epoch.
        evaluation: of the best weights; None off rank 0.
        rows: the table of that; [] without.
    """

    run_dir: Path
    best_value: float
    evaluation: Evaluation | None
    rows: list[TableRow] = dataclasses.field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train; with a list of devices in a process for each, which comes back here."""
    argv = sys.argv[1:] if argv is None else argv
    given, env = command_line.given_flags(TrainConfig, argv), dist_env()
    config, resumed = settings.settings(given, env)
    device, each = settings.places(given, config, env)
    if config and each:
        more = settings.for_workers(given, config, resumed, each)
        resumed = None  # let its memory go: workers read it again
        command = [folder.script("train.py"), *command_line.without_flags(TrainConfig, argv, ("device", "batch_size"))]
        command += ["--device", device, "--batch-size", str(more["batch_size"])]
        return launch.say(launch.launch(command, each, max_restarts=config.max_restarts, going_on=folder.going_on))
    timeout = given.get("dist_timeout", TrainConfig.dist_timeout)
    with signals.stops_end_the_process(), process_group(device, env, timeout) as env:
        for sentence in command_line.repeated_flags(TrainConfig, argv):
            get_logger().info(sentence)
        train(given, config, resumed, env)
    return 0


def train(
    given: Mapping[str, Any],
    config: TrainConfig | None,
    resumed: dict[str, Any] | None,
    env: DistEnv,
    callbacks: Sequence[Callback] = (),
    may_be_ended: bool = True,
) -> Results:
    """Run one training from start to end, as one of the ranks, maybe the only one. Collective: every rank must call it.

    1 to 4, callbacks and seeds, inputs, the run, joining the ranks' networks: `set_up`. 5, an epoch's batches:
    `train_epoch`. 6, its end: `end_epoch`. 7, the end of the run: `finish`.

    Args:
        given: flags that were typed.
        config: of `settings.settings`.
        resumed: of `settings.settings`.
        env: this rank's place.
        callbacks: told what happens, besides the loggers; only rank 0's are.
        may_be_ended: whether this process is the run's own, so that a watchdog may end it.

    Raises:
        UserError: flags, data, network and weights do not fit together; nothing has been trained then.
        NotWrittenError: the disk did not take all that a run leaves.
    """
    config, resumed = settings.of_all_ranks(given, config, resumed, env)
    timeout = config.stall_timeout if may_be_ended else 0
    with folder.claims_released(), stalls.watched(env, config.stall_warning, timeout), contextlib.ExitStack() as whole:
        if resumed is not None and resumed["run_dir"]:
            own = Path(resumed["run_dir"])
            once(lambda: folder.claim(own), env)  # before anything that takes long
            whole.enter_context(stopping.interruptible(own, env))  # known by now: Ctrl-C can name it
        run = set_up(config, env, resumed, callbacks)
        with stopping.interruptible(run.run_dir, env), run.callbacks, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(run.writer))
            stack.enter_context(run.plots)
            train_batches, val_batches = loading.open_loaders(run, stack)
            stack.enter_context(deaths_explained())
            header.say(run)
            run.plots.add_labels(run.train_index)
            run.callbacks.train_start(events.train_start(run, resumed is not None))

            clock = RunClock(config.epochs, run.batches_done / run.schedule.batches_per_epoch)
            pace = stalls.Pace(env, run.waited, header.remedies(run), filling=config.cache != "off")
            left = run.schedule.batches_per_epoch - run.state.batch
            step_done = stack.enter_context(profiling(config.profile, env, run.run_dir, left))
            stack.enter_context(run.stop.heeded())
            if env.is_main_process:
                folder.forget_end(run.run_dir)
            while run.state.epoch < config.epochs and not run.state.stopped:
                with pace.epoch():
                    losses = train_epoch(run, train_batches, clock, step_done)
                run.notes.say_unreadable(train_batches.take_unreadable())
                run.notes.say_spikes()
                end_epoch(run, losses, val_batches, clock)

            results = finish(run, val_batches, clock)
            worker.tell_launcher(None)
            stack.close()  # waits for the pictures
            run.callbacks.train_end(events.train_end(run, results.evaluation))
        missing = once(lambda: saving.what_is_missing(run), env)
        if missing:
            raise errors.NotWrittenError(missing)
    return results


def set_up(
    config: TrainConfig, env: DistEnv, resumed: dict[str, Any] | None = None, callbacks: Sequence[Callback] = ()
) -> Run:
    """Make everything that a run needs, ready for its next batch. Collective: every rank must call it.

    Raises:
        UserError: flags, data, network and weights do not fit together; no run folder is made then.
    """
    # 1. callbacks, seeds ----------------------------------------------------------------------------------------------
    check_callbacks(callbacks)
    deterministic = env.device.type == "cpu" if config.deterministic is None else config.deterministic
    seeds.seed_everything(config.seed, deterministic)

    # 2. inputs: recipe, labels, network with its weights; all that is wrong with them, or with the machine, at once ---
    inputs = read_inputs(config, env, resumed)
    config = dataclasses.replace(config, weights=job_files.shown_weights(config.weights))  # what travelled will be gone
    family, raw_model = inputs.family, inputs.raw_model
    if resumed is None and not config.noautoanchor:
        family.fit_labels(raw_model, inputs.train_index, inputs.recipe.hyp, inputs.imgsz, config.seed, env)

    # 3. run: its folder, and what trains the network: criterion, optimizer, schedule, EMA -----------------------------
    run_dir = once(lambda: restarts.open_run_dir(config, resumed), env)
    worker.tell_launcher(run_dir)
    run = Run(config, inputs, env, run_dir, callbacks)

    # 4. resume, then join the ranks' networks -------------------------------------------------------------------------
    if resumed is not None:
        state.load_run_state(run, resumed)
    if env.is_main_process and not (resumed and resumed["run_dir"]):
        state.describe(run, inputs.findings)
    join_ranks(run)
    return run


def join_ranks(run: Run) -> None:
    """Make one network of those of all ranks, compiled or captured where that is asked for. Collective."""
    config, env, raw_model, plan = run.config, run.env, run.raw_model, run.plan
    if run.sync_bn:
        sync_bn.convert_sync_bn(raw_model, env)
        run.buffers = steps.BufferSnapshot(raw_model)
    smallest = run.family.inputs.blank(raw_model, env.device)
    usual = functools.partial(run.family.inputs.blank, raw_model, env.device, plan.local_batch, run.imgsz)
    if compilation.can_compile(config, env, run.sync_bn):
        smallest = usual()  # another size would be compiled anew
        compiled = compilation.compile_network(raw_model, smallest, run.precision)
        get_logger().info(format_lines([("compile", compiled.describe(run.schedule.batches_per_epoch))]))
    run.model = data_parallel.wrap(raw_model, env, run.precision, smallest, config.grad_compress)
    copies = data_parallel.replica_devices(config.dp, config.device, env)
    if copies:
        run.model = data_parallel.replicate(raw_model, run.precision, copies, plan.global_batch)
    check_same_weights(raw_model, env, "before the first batch")
    if compilation.can_capture(config, env):
        compilation.capture(raw_model, usual(), run.precision)


# 5. loop --------------------------------------------------------------------------------------------------------------


def train_epoch(
    run: Run, batches: Iterator[Batch], clock: RunClock, step_done: Callable[[], None] = no_step
) -> list[float]:
    """Train on the batches of one epoch that are still to do. Collective: every rank must call it.

    A window is the micro-batches between two optimizer steps; gradients add up over it.

    Args:
        run: where it is.
        batches: of the training split, from where the run is.
        clock: of the run.
        step_done: called after each batch; see `utils.training.profiler`.

    Returns:
        Mean of each loss term over the epoch, in the order of the family's ``losses``.
    """
    state, schedule, criterion, device = run.state, run.schedule, run.criterion, run.env.device
    with EpochProgress(state.epoch, schedule.batches_per_epoch, state.batch, clock, run.env, run.waited()) as progress:
        run.model.train()
        for batch in loading.batches_left(run, batches):
            i = run.batches_done
            schedule.apply(run.optimizer, i)
            if state.since_step == 0:
                run.buffers.take()
            state.since_step += 1
            step_now = schedule.step_now(i, state.since_step)

            # The loss is sums / counts. Counts are added up over all ranks while the network runs, and what each rank
            # votes for (to stop, to save) rides along.
            images = loading.network_input(run, batch)
            matches = criterion.match(batch.targets, len(images), *images.shape[2:])
            counts_and_votes = torch.cat((criterion.counts(matches).flatten(), stopping.votes(run)))
            wait_for_totals = start_all_reduce_sum(devices.to_device(counts_and_votes, device), run.env)
            with data_parallel.accumulating(run.model, step_now):
                with run.precision.autocast(device.type):
                    outputs = run.model(images)
                sums = criterion.sums(outputs, [level.to(device) for level in matches])
                counts, voted = wait_for_totals().split((sums.numel(), stopping.VOTES))
                losses = criterion.items(sums, counts.view_as(sums))
                beat(Phase.BACKWARD)
                # Times N because DDP averages over ranks: the gradient is then that of the global batch, whatever N.
                run.scaler.scale(losses.sum() * run.plan.global_batch * run.plan.world_size).backward()

            run.notes.add(state.step, batch, losses)
            if step_now:
                optimizer_step(run)
            step_done()
            state.batch += 1
            if progress.advance(run.plan.global_batch):
                means = dict(zip(run.family.losses, run.notes.mean_losses(), strict=True))
                progress.show(means, schedule.lr(i)[1], images.shape[2], run.waited())
                run.notes.look()
            if step_now:
                between_windows(run, voted, i)
    return run.notes.mean_losses()


def optimizer_step(run: Run) -> None:
    """Step with the gradients of a window, unless they are not finite: then nothing of it is kept."""
    beat(Phase.STEP)
    found_inf = steps.guarded_step(run.optimizer, run.parameters, steps.MAX_GRAD_NORM, run.scaler)
    run.notes.skips.add_window(run.state.step, found_inf)
    run.buffers.restore(found_inf)
    run.ema.update(run.raw_model, found_inf)
    run.optimizer.zero_grad(set_to_none=True)
    run.state.step, run.state.since_step = run.state.step + 1, 0


def between_windows(run: Run, voted: torch.Tensor, i: int) -> None:
    """Save where it is due, and stop if any rank was asked to, or all is lost. Collective: every rank must call it.

    Args:
        run: behind a window.
        voted: what all ranks said in its last micro-batch.
        i: number of that.
    """
    saving.tell_written(run)
    stopping.stop_if_diverged(run)
    stop, save = run.ballot.count(voted, i)
    if stop:
        run.notes.say_spikes()
        stopping.leave(run)
    every = run.config.save_steps
    # On a GPU votes are counted a window late: one to save right after a save is that same vote.
    run.just_saved = (save and not run.just_saved) or (every > 0 and run.state.step % every == 0)
    if run.just_saved:
        saving.save_in_epoch(run)


# 6. epoch end: validation, verdict, files -----------------------------------------------------------------------------


def end_epoch(run: Run, losses: list[float], val_batches: ValLoader, clock: RunClock) -> None:
    """Validate, decide, write results and checkpoints. Collective: every rank must call it."""
    config, state = run.config, run.state
    last = state.epoch + 1 == config.epochs
    check_same_weights(run.raw_model, run.env, f"at the end of epoch {state.epoch + 1}")
    if not run.sync_bn:
        sync_bn.average_statistics(run.raw_model, run.env)
        sync_bn.average_statistics(run.ema.module, run.env)
    # What follows is decided by rank 0, which alone has the figures; the verdict is everyone's when it is broadcast.
    due = last or (not config.noval and (state.epoch + 1) % config.val_period == 0)
    evaluation = validate(run, val_batches) if due else None
    better = evaluation is not None and judge(run, evaluation)
    impatient = not last and evaluation is not None and 0 < config.patience <= state.epoch - state.best_epoch
    if impatient:
        get_logger().info(f"no better {config.metric} for {config.patience} epochs (--patience): stopping early")
    once(run.writer.wait, run.env)  # for what was written while this epoch was trained
    saving.tell_written(run)
    event = events.epoch_end(run, losses, evaluation, better, clock.lap())
    asked = run.callbacks.epoch_end(event)  # of the last epoch they are told too
    state.stopped = not last and (asked or impatient)
    state.epoch, state.batch = state.epoch + 1, 0
    run.notes.meter.reset()
    skipped = int(run.ema.skipped)
    notes.say_skipped(skipped - state.skipped, run.scaler.is_enabled())
    state.skipped = skipped
    run.state = broadcast_object(state, run.env)  # the verdict
    final = last or run.state.stopped

    if run.env.is_main_process:  # nobody waits for these files before the next epoch ends
        run.callbacks.log_epoch(event)  # first: a row too many is cut off on resume, a lost one can't be made again
        saving.save_at_end(run, better, final)
        run.plots.end_epoch(state.epoch, saving.epoch_of_best(run, final), final)


def validate(run: Run, batches: ValLoader, *, save: bool = True) -> Evaluation | None:
    """Evaluate rank 0's averaged weights on all ranks. Collective: every rank must call it.

    Args:
        run: at the end of an epoch; it is saved and left here if it was asked to stop meanwhile.
        batches: of the validation split.
        save: False if the last checkpoint is as good, then.

    Returns:
        None on all ranks but 0.
    """
    run.ema.broadcast(run.env)
    evaluation = val.evaluate(
        run.ema.module,
        run.family,
        batches,
        run.val_index,
        run.data.names,
        run.env,
        criterion=run.criterion,
        max_det=detection_cap(0, run.val_index),
        give_up=lambda: stopping.is_asked(run),
    )
    if once(lambda: evaluation is None, run.env):
        stopping.leave(run, save=save)
    if evaluation is not None:
        run.notes.say_unreadable_in_val(evaluation.unreadable)
    return evaluation


def judge(run: Run, evaluation: Evaluation) -> bool:
    """Note the figures of an epoch, and return whether they are the best so far; rank 0's work."""
    value = evaluation.metrics.value(run.config.metric)
    better = value > run.state.best_fitness
    if better:
        run.state.best_fitness, run.state.best_epoch = value, run.state.epoch
    run.state.class_maps = evaluation.metrics.class_maps.tolist()
    get_logger().info(format_table(evaluation.metrics.rows(run.data.names)[:1]))
    return better


# 7. end ---------------------------------------------------------------------------------------------------------------


def finish(run: Run, val_batches: ValLoader, clock: RunClock) -> Results:
    """Measure the best weights, strip them, and say where everything is. Collective: every rank must call it."""
    beat(Phase.END)
    once(run.writer.wait, run.env)
    saving.tell_written(run)
    epoch = once(lambda: saving.load_best(run), run.env)
    if epoch is None:  # the warnings say why, and so does the end of `train`
        return Results(run.run_dir, run.state.best_fitness, None)
    evaluation, rows = validate(run, val_batches, save=False), []
    if evaluation is not None:
        rows = evaluation.metrics.rows(run.data.names)
        get_logger().info(header.summary(run, rows, epoch, clock.elapsed()))
        run.plots.add_evaluation(evaluation.metrics, evaluation.images, run.val_index)
        saving.strip_best(run)
    return Results(run.run_dir, run.state.best_fitness, evaluation, rows)


if __name__ == "__main__":
    os.environ.setdefault(signals.STARTED, str(signals.BEGAN))
    errors.run_cli(worker.as_worker(main))
