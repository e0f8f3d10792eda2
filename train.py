"""Train a detector.

python train.py                                                           on the built-in data, whatever device there is
python train.py --data my.yaml --cfg yolov5s.yaml --img 640 --batch 32    on your own
python train.py --resume runs/train/exp                                   go on where a run stopped
python train.py --device 0,1 --batch 64 ...                               two GPUs, 64 images a step in total
python -m torch.distributed.run --nproc_per_node 2 train.py ...           the same, launched by hand or by a scheduler
... run --nnodes 2 --node_rank R --master_addr HOST --master_port P --nproc_per_node G train.py ...    two machines
"""

import sys

from own_packages import check_packages

check_packages()

from utils.config.flags import TrainConfig, parse_train
from utils.core.errors import end_quietly_by_ctrl_c
from utils.run.preflight import check_opencv

if __name__ == "__main__":
    end_quietly_by_ctrl_c()
    parse_train(sys.argv[1:])  # --help and mistyped flags end here, before torch is imported
    check_opencv()

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import val
from models.build import choose_sync_bn
from models.families import weights_of
from models.yolo import load_state
from utils.checkpoints.writer import CheckpointWriter
from utils.config.command_line import given_flags, repeated_flags, without_flags
from utils.config.flags import AUTOMATIC, config_to_dict, seconds_of
from utils.core.devices import to_device, upload
from utils.core.errors import DivergedError, NotWrittenError, run_cli
from utils.core.heartbeat import Phase, beat
from utils.core.logging import DeviceMeter, get_logger
from utils.core.seeds import seed_everything
from utils.core.signals import BEGAN, STARTED, StopRequest, stops_end_the_process
from utils.core.wording import duration, format_lines
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.loader_notes import deaths_explained
from utils.data.loaders import Batch, TrainLoader, ValLoader, resize_batch, share_workers, train_loader, val_loader
from utils.data.report import NOTHING_FOUND, REPLACED, ScanReport, UnreadableImages, write_report
from utils.data.sampler import batch_imgsz
from utils.dist.collectives import (
    all_gather_objects,
    broadcast_object,
    check_same_weights,
    gather_objects,
    is_posted,
    once,
    post,
    start_all_reduce_sum,
)
from utils.dist.job_files import shown_weights
from utils.dist.launch import as_worker, launch, say, tell_launcher
from utils.dist.place import DistEnv, dist_env
from utils.dist.stalls import Pace, watched
from utils.metrics.average_precision import Evaluation, TableRow, format_table
from utils.run.autobatch import automatic_batch
from utils.run.callbacks import Callback, Callbacks, CheckpointSaved, check_callbacks
from utils.run.events import epoch_end, train_end, train_start
from utils.run.folder import (
    check_claim,
    claim,
    claims_released,
    create_run_dir,
    forget_end,
    going_on,
    prepare_weights_dir,
    say_finished,
    script,
    take_along,
    write_description,
)
from utils.run.header import header, remedies
from utils.run.inputs import detection_cap, read_inputs
from utils.run.plots import Plots
from utils.run.progress import EpochProgress, RunClock
from utils.run.restarts import begin_life, find_own_run, this_life
from utils.run.resume import check_ranks, resume
from utils.run.settings import for_workers, go_on, places, say_resumed, settings
from utils.run.state import (
    VOTES,
    Ballot,
    Run,
    TrainState,
    interruptible,
    last_words,
    leave,
    load_run_state,
    save_at_end,
    save_in_epoch,
    votes,
)
from utils.torch_utils import ModelEMA, load_checkpoint, process_group, strip_checkpoint
from utils.training.bad_batches import LIMIT, LIMIT_FP16, SkipLog, SpikeLog
from utils.training.compilation import can_capture, can_compile, capture, compile_network
from utils.training.data_parallel import accumulating, replica_devices, replicate, wrap
from utils.training.optim import Schedule, build_optimizer
from utils.training.profiler import no_step, profiling
from utils.training.steps import MAX_GRAD_NORM, BufferSnapshot, guarded_step
from utils.training.sync_bn import average_statistics, convert_sync_bn

LOSSES = ("box", "obj", "cls")
SHOWN_IMAGES = 8  # names in a warning
SHOWN_SPIKES = 3  # warnings of an epoch
STOP = "stop"  # posted by a rank that is asked to in a validation


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


def train(
    config: TrainConfig, env: DistEnv, resumed: dict[str, Any] | None = None, callbacks: Sequence[Callback] = ()
) -> Results:
    """Run one training from start to end. Collective: every rank must call it.

    Args:
        config: every flag.
        env: this rank's place.
        resumed: checkpoint of the run to go on with.
        callbacks: told what happens, besides the loggers; only rank 0's are.

    Raises:
        UserError: flags, data, network and weights do not fit together; nothing has been trained then.
    """
    with claims_released(), contextlib.ExitStack() as stack:
        if resumed is not None and resumed["run_dir"]:
            stack.enter_context(interruptible(Path(resumed["run_dir"]), env))
        return carry_out(set_up(config, env, resumed, callbacks), resumed is not None)


def carry_out(run: Run, resumed: bool) -> Results:
    """Train a run from where it is to its end. Collective: every rank must call it.

    Raises:
        NotWrittenError: the disk did not take all that a run leaves.
    """
    config, env, log = run.config, run.env, get_logger()
    with interruptible(run.run_dir, env), run.callbacks, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(run.writer))
        stack.enter_context(run.plots)
        train_batches, val_batches = open_loaders(run, stack)
        stack.enter_context(deaths_explained())
        log.info(header(run))
        for doubt in run.schedule.doubts():
            log.warning(doubt)
        run.plots.add_labels(run.train_index)
        run.callbacks.train_start(train_start(run, LOSSES, resumed))

        # 5. loop ----------------------------------------------------------------------------------------------------
        clock = RunClock(config.epochs, run.state.epoch + run.state.batch / run.schedule.batches_per_epoch)
        pace = Pace(env, run.waited, remedies(run), filling=config.cache != "off")
        batches_left = run.schedule.batches_per_epoch - run.state.batch
        step_done = stack.enter_context(profiling(config.profile, env, run.run_dir, batches_left))
        stack.enter_context(run.stop.heeded())
        if env.is_main_process:
            forget_end(run.run_dir)
        while run.state.epoch < config.epochs and not run.state.stopped:
            with pace.epoch():
                losses = train_epoch(run, train_batches, clock, step_done)
            say_unreadable(run, train_batches.take_unreadable())
            say_spikes(run)

            # 6. epoch end: validation, files, verdict ---------------------------------------------------------------
            end_epoch(run, losses, val_batches, clock)

        # 7. end -----------------------------------------------------------------------------------------------------
        results = finish(run, val_batches, clock)
        tell_launcher(None)
        stack.close()  # waits for the pictures
        run.callbacks.train_end(train_end(run, results.evaluation))
    missing = once(lambda: what_is_missing(run), env)
    if missing:
        raise NotWrittenError(missing)
    return results


def what_is_missing(run: Run) -> str:
    """Say what of a run's files is not on the disk, "" if all are; and in its description if nothing is left to do."""
    if run.writer.failed:
        message = f"the last checkpoint of {run.run_dir} was not written; the warnings above say why"
        return "\n".join([message, *last_words(run)])
    say_finished(run.run_dir)
    missing = [*run.writer.left_out, *run.callbacks.not_written()]
    if missing:
        return f"{run.run_dir} is finished, but without {', '.join(missing)}; the warnings above say why"
    return ""


def set_up(
    config: TrainConfig, env: DistEnv, resumed: dict[str, Any] | None = None, callbacks: Sequence[Callback] = ()
) -> Run:
    """Make everything that a run needs, ready for its next batch. Collective: every rank must call it.

    Raises:
        UserError: flags, data, network and weights do not fit together; no run folder is made then.
    """
    # 1. callbacks and seeds -----------------------------------------------------------------------------------------
    check_callbacks(callbacks)
    deterministic = env.device.type == "cpu" if config.deterministic is None else config.deterministic
    seed_everything(config.seed, deterministic)

    # 2. inputs: recipe, labels, network with its weights; all that is wrong with them, or with the machine, at once ---
    inputs = read_inputs(config, env, resumed)
    config = dataclasses.replace(config, weights=shown_weights(config.weights))  # what travelled is gone afterwards
    hyp, data, plan, family, raw_model, imgsz = (
        inputs.recipe.hyp, inputs.data, inputs.plan, inputs.family, inputs.raw_model, inputs.imgsz
    )  # fmt: skip

    # 3. model: anchors, loss, optimizer, schedule, EMA --------------------------------------------------------------
    if resumed is None and not config.noautoanchor:
        family.fit_labels(raw_model, inputs.train_index, hyp, imgsz, config.seed, env)
    criterion = family.criterion(raw_model, hyp, imgsz, config.label_smoothing)  # of the anchors as they are by now
    batches_per_epoch = math.ceil(len(inputs.train_index) / plan.global_batch)
    sync_bn = choose_sync_bn(config.sync_bn, family, raw_model, plan)
    run_dir = once(lambda: open_run_dir(config, resumed), env)
    tell_launcher(run_dir)
    run = Run(
        config=config,
        hyp=hyp,
        data=data,
        train_index=inputs.train_index,
        val_index=inputs.val_index,
        env=env,
        plan=plan,
        run_dir=run_dir,
        imgsz=imgsz,
        family=family,
        raw_model=raw_model,
        model=raw_model,
        criterion=criterion,
        optimizer=build_optimizer(raw_model, config.optimizer, hyp, plan),
        schedule=Schedule(hyp, config.epochs, batches_per_epoch, plan, config.cos_lr),
        precision=inputs.precision,
        scaler=inputs.precision.make_scaler(env.device),
        sync_bn=sync_bn,
        ema=ModelEMA(raw_model, buffers_only=not env.is_main_process),
        buffers=BufferSnapshot(raw_model),
        meter=DeviceMeter(len(LOSSES), env.device),
        plots=Plots(run_dir, data.names, enabled=env.is_main_process and not config.noplots),
        callbacks=Callbacks([*inputs.loggers, *callbacks] if env.is_main_process else []),
        writer=CheckpointWriter(functools.partial(check_claim, run_dir)),
        ballot=Ballot(env),
        skips=SkipLog(env.device),
        spikes=SpikeLog(env.device),
        stop=StopRequest(seconds_of(config.time_limit)),
        state=TrainState(),
        unreadable=UnreadableImages(run_dir),
        recipe_note=inputs.recipe.note,
        step_bytes=inputs.step_bytes,
    )

    # 4. resume, then join the ranks' networks -----------------------------------------------------------------------
    if resumed is not None:
        load_run_state(run, resumed)
    if env.is_main_process and not (resumed and resumed["run_dir"]):
        write_description(run.run_dir, config_to_dict(config), config_to_dict(hyp), dataclasses.asdict(plan))
        write_report(
            run.run_dir,
            {"": ScanReport(problems=inputs.findings), "train": run.train_index.report, "val": run.val_index.report},
            get_logger(),
        )
    if sync_bn:
        convert_sync_bn(raw_model, env)
        run.buffers = BufferSnapshot(raw_model)
    images = family.inputs.blank(raw_model, env.device)
    if can_compile(config, env, sync_bn):
        images = family.inputs.blank(raw_model, env.device, plan.local_batch, imgsz)  # others would be compiled anew
        compiled = compile_network(raw_model, images, run.precision)
        get_logger().info(format_lines([("compile", compiled.describe(batches_per_epoch))]))
    run.model = wrap(raw_model, env, run.precision, images, config.grad_compress)
    copies = replica_devices(config.dp, config.device, env)
    if copies:
        run.model = replicate(raw_model, run.precision, copies, plan.global_batch)
    check_same_weights(raw_model, env, "before the first batch")
    if can_capture(config, env):
        capture(raw_model, family.inputs.blank(raw_model, env.device, plan.local_batch, imgsz), run.precision)
    return run


def train_epoch(
    run: Run, batches: Iterator[Batch], clock: RunClock, step_done: Callable[[], None] = no_step
) -> list[float]:
    """Train on the batches of one epoch that are still to do. Collective: every rank must call it.

    Args:
        run: where it is.
        batches: of the training split, from where the run is.
        clock: of the run.
        step_done: called after each batch; see `utils.training.profiler`.

    Returns:
        Mean [box, objectness, class] losses of the epoch.
    """
    state, schedule, criterion, device = run.state, run.schedule, run.criterion, run.env.device
    parameters = [parameter for parameter in run.raw_model.parameters() if parameter.requires_grad]
    with EpochProgress(state.epoch, schedule.batches_per_epoch, state.batch, clock, run.env, run.waited()) as progress:
        run.model.train()
        while state.batch < schedule.batches_per_epoch:
            batch = next_batch(run, batches)
            run.plots.add_train_batch(batch, run.train_index)
            i = state.epoch * schedule.batches_per_epoch + state.batch
            schedule.apply(run.optimizer, i)
            if state.since_step == 0:
                run.buffers.take()
            state.since_step += 1
            step_now = schedule.step_now(i, state.since_step)

            images = network_input(run, batch)
            matches = criterion.match(batch.targets, len(images), *images.shape[2:])
            own = torch.cat((criterion.counts(matches).flatten(), votes(run)))
            shared = start_all_reduce_sum(to_device(own, device), run.env)
            with accumulating(run.model, step_now):
                with run.precision.autocast(device.type):
                    outputs = run.model(images)
                sums = criterion.sums(outputs, [level.to(device) for level in matches])
                counts, voted = shared().split((sums.numel(), VOTES))
                items = criterion.items(sums, counts.view_as(sums))
                beat(Phase.BACKWARD)
                # Times N because DDP averages over ranks: the gradient is then that of the global batch, whatever N.
                run.scaler.scale(items.sum() * run.plan.global_batch * run.plan.world_size).backward()

            run.meter.update(items)
            run.skips.add_batch(state.step, batch.indices.tolist(), items)
            run.spikes.add(state.step, batch.indices.tolist(), items * run.plan.world_size)
            if step_now:
                optimizer_step(run, parameters)
            step_done()
            state.batch += 1
            if progress.advance(run.plan.global_batch):
                progress.show(run.mean_losses(), schedule.lr(i)[1], images.shape[2], run.waited())
                look_at_skips(run)
                run.spikes.read()
            if step_now:
                between_windows(run, voted, i)
    return run.mean_losses()


def next_batch(run: Run, batches: Iterator[Batch]) -> Batch:
    """Return the next batch of a run."""
    beat(Phase.LOADING, run.state.epoch, run.state.batch)
    batch = next(batches)
    assert (batch.epoch, batch.k) == (run.state.epoch, run.state.batch), "loader and run are at different batches"
    beat(Phase.FORWARD)
    return batch


def network_input(run: Run, batch: Batch) -> torch.Tensor:
    """Return the images of a batch on the device, as the network takes them; with --multi-scale at their own size."""
    images = run.family.inputs.prepare(upload(batch.images, run.env.device))
    if run.config.multi_scale:
        stride = run.raw_model.max_stride
        size = batch_imgsz(run.config.seed, batch.epoch, batch.k, run.imgsz, stride, multi_scale=True)
        images = resize_batch(images, size, stride)
    return images


def optimizer_step(run: Run, parameters: list[torch.nn.Parameter]) -> None:
    """Step with the gradients of a window, unless they are not finite: then nothing of it is kept."""
    beat(Phase.STEP)
    found_inf = guarded_step(run.optimizer, parameters, MAX_GRAD_NORM, run.scaler)
    run.skips.add_window(run.state.step, found_inf)
    run.buffers.restore(found_inf)
    run.ema.update(run.raw_model, found_inf)
    run.optimizer.zero_grad(set_to_none=True)
    run.state.step, run.state.since_step = run.state.step + 1, 0


def look_at_skips(run: Run) -> None:
    """Name the images of windows that were skipped. Collective: every rank must call it."""
    skipped = run.skips.read()
    if not skipped:  # the same on all ranks
        return
    own = [run.train_index.path(i) for window in skipped for i in window.images]
    paths = sorted({path for paths in all_gather_objects(own, run.env) for path in paths})
    if paths:
        steps = ", ".join(str(window.step) for window in skipped)
        get_logger().warning(f"the loss was not finite in optimizer step {steps}, with these images: {shown(paths)}")


def say_unreadable(run: Run, own: Mapping[int, str]) -> None:
    """Say which images others had to stand for in an epoch. Collective: every rank must call it.

    Args:
        run: at the end of an epoch.
        own: those that this rank could not read, reason by place in the label index.
    """
    shares = gather_objects({run.train_index.path(i): reason for i, reason in own.items()}, run.env)
    found = {path: reason for share in shares for path, reason in share.items()}
    run.unreadable.tell("train", found, REPLACED, get_logger())


def say_spikes(run: Run) -> None:
    """Name batches whose loss leapt since the last call. Collective: every rank must call it."""
    own = [(spike, [run.train_index.path(i) for i in spike.images]) for spike in run.spikes.take()]
    found = sorted(itertools.chain(*gather_objects(own, run.env)), key=lambda pair: pair[0].step)
    for _, of_step in itertools.islice(itertools.groupby(found, lambda pair: pair[0].step), SHOWN_SPIKES):
        spikes, images = zip(*of_step, strict=True)
        spike, paths = max(spikes, key=lambda spike: spike.loss), [path for own in images for path in own]
        get_logger().warning(
            f"the loss leapt to {spike.loss:.3g} in optimizer step {spike.step}, {spike.before:.3g} at most before, "
            f"with these images: {shown(paths)}; look at them and their labels. Weights of before are kept with "
            "--save-period, to start from (--weights)"
        )


def shown(paths: Sequence[str]) -> str:
    """Return paths for a message, not too many."""
    return ", ".join(paths[:SHOWN_IMAGES]) + (", ..." if len(paths) > SHOWN_IMAGES else "")


def stop_if_diverged(run: Run) -> None:
    """End a run that gets nowhere, at the end of a window. Collective: every rank must call it.

    Raises:
        DivergedError: too many windows in a row were skipped; the run is saved as it was before them.
    """
    if run.skips.in_row < (LIMIT_FP16 if run.scaler.is_enabled() else LIMIT):  # the same on all ranks
        return
    save_in_epoch(run)
    say_spikes(run)
    once(run.writer.wait, run.env)
    where = "could not be written" if run.writer.failed else f"are in {run.weights_dir / 'last.pt'}"  # rank 0 speaks
    raise DivergedError(
        f"the last {run.skips.in_row} optimizer steps had gradients that are not finite and were skipped. The weights "
        f"of before {where}: look at the images that were named, then start anew from "
        "them (--weights) with a lower lr0 in --hyp, or with --amp off if that is not the default here"
    )


def between_windows(run: Run, voted: torch.Tensor, i: int) -> None:
    """Save where it is due, and stop if any rank was asked to, or all is lost. Collective: every rank must call it.

    Args:
        run: behind a window.
        voted: what all ranks said in its last micro-batch.
        i: number of that.
    """
    tell_written(run)
    stop_if_diverged(run)
    stop, save = run.ballot.count(voted, i)
    if stop:
        say_spikes(run)
        leave(run)
    every = run.config.save_steps
    # A wish that was on its way while the one before it was granted is no wish for another.
    run.just_saved = (save and not run.just_saved) or (every > 0 and run.state.step % every == 0)
    if run.just_saved:
        save_in_epoch(run)


def end_epoch(run: Run, losses: list[float], val_batches: ValLoader, clock: RunClock) -> None:
    """Validate, decide, write results and checkpoints. Collective: every rank must call it."""
    config, state, log = run.config, run.state, get_logger()
    epoch, last = state.epoch, state.epoch + 1 == config.epochs
    check_same_weights(run.raw_model, run.env, f"at the end of epoch {epoch + 1}")
    if not run.sync_bn:
        average_statistics(run.raw_model, run.env)
        average_statistics(run.ema.module, run.env)
    better, impatient, evaluation = False, False, None
    due = last or (not config.noval and (epoch + 1) % config.val_period == 0)
    if due:
        evaluation = validate(run, val_batches)
    if once(lambda: due and evaluation is None, run.env):
        leave(run)
    if evaluation is not None:  # on rank 0
        value = evaluation.metrics.value(config.metric)
        better = value > state.best_fitness
        if better:
            state.best_fitness, state.best_epoch = value, epoch
        state.class_maps = evaluation.metrics.class_maps.tolist()
        log.info(format_table(evaluation.metrics.rows(run.data.names)[:1]))
        impatient = not last and 0 < config.patience <= epoch - state.best_epoch
        if impatient:
            log.info(f"no better {config.metric} for {config.patience} epochs (--patience): stopping early")
    once(run.writer.wait, run.env)  # for what was written while this epoch was trained
    tell_written(run)
    event = epoch_end(run, dict(zip(LOSSES, losses, strict=True)), evaluation, better, clock.lap())
    asked = run.callbacks.epoch_end(event)
    state.stopped = not last and (asked or impatient)
    state.epoch, state.batch = epoch + 1, 0
    run.meter.reset()
    say_skipped(run)
    run.state = broadcast_object(state, run.env)  # the verdict

    if run.env.is_main_process:  # nobody waits for these files before the next epoch ends
        run.callbacks.log_epoch(event)  # first: a row too many is cut off on resume, a lost one can't be made again
        final = last or state.stopped
        save_at_end(run, better, final)
        best_epoch = state.best_epoch + 1 if state.best_fitness >= 0 else None
        if config.nosave:
            best_epoch = state.epoch if final else None  # best.pt is the last epoch's
        run.plots.end_epoch(state.epoch, best_epoch, final)


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


def say_skipped(run: Run) -> None:
    """Say how many windows of the epoch were skipped for a gradient that was not finite."""
    skipped = int(run.ema.skipped)
    new = skipped - run.state.skipped
    if new and run.scaler.is_enabled():
        get_logger().info(f"optimizer steps skipped in this epoch: {new}, to find a loss scale that suits fp16")
    elif new:
        get_logger().warning(
            f"optimizer steps skipped in this epoch: {new}, for their gradients were not finite; weights and BatchNorm "
            "are as if those batches had not been there. If it goes on, lower lr0 in --hyp"
        )
    run.state.skipped = skipped


def validate(run: Run, batches: ValLoader) -> Evaluation | None:
    """Evaluate rank 0's averaged weights on all ranks. Collective: every rank must call it.

    Returns:
        None off rank 0, and where the run was asked to stop meanwhile.
    """

    def asked() -> bool:
        if run.stop:
            post(STOP)
        return bool(run.stop) or is_posted(STOP)

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
        give_up=asked,
    )
    if evaluation is not None:
        run.unreadable.tell("val", evaluation.unreadable, NOTHING_FOUND, get_logger())
    return evaluation


def open_run_dir(config: TrainConfig, resumed: Mapping[str, Any] | None) -> Path:
    """Return the run's folder, a new one unless a run goes on in its own; it is this process's own from here on."""
    own = Path(resumed["run_dir"]) if resumed is not None and resumed["run_dir"] else None
    run_dir = own or create_run_dir(config.project, config.name, config.exist_ok)
    claim(run_dir)
    if own is None:
        forget_end(run_dir)
        prepare_weights_dir(run_dir / "weights")
    if own is None and resumed is not None:
        origin, best = (Path(resumed[key]) if resumed[key] else None for key in ("origin", "best"))
        take_along(origin, Path(resumed["path"]), best, run_dir)
    begin_life(run_dir, this_life(), 0 if resumed is None else resumed["state"]["step"])
    return run_dir


def open_loaders(run: Run, stack: contextlib.ExitStack) -> tuple[TrainLoader, ValLoader]:
    """Open image caches and loaders, all to be closed by the stack."""
    config, imgsz, env = run.config, run.imgsz, run.env
    stride = run.raw_model.max_stride
    if run.hyp.copy_paste and (run.train_index.points is None or config.rect or not run.hyp.mosaic):
        get_logger().info(f"copy_paste {run.hyp.copy_paste:g} of the recipe has no effect: no polygons or mosaics")
    train_cache = create_cache(run.train_index, imgsz, config.cache, env, train=True, spare=run.step_bytes)
    stack.enter_context(contextlib.closing(train_cache))
    val_cache = create_cache(run.val_index, imgsz, config.cache, env, train=False, spare=run.step_bytes)
    stack.enter_context(contextlib.closing(val_cache))
    train_set = DetectionDataset(
        run.train_index, train_cache, run.hyp, imgsz, config.seed, config.rect, strict=config.strict
    )
    val_set = DetectionDataset(run.val_index, val_cache, None, imgsz, strict=config.strict)
    workers, val_workers = share_workers(config.workers, env.local_world_size, run.plan.local_batch, run.val_batch)
    train_batches = train_loader(
        train_set,
        run.plan.global_batch,
        env,
        workers,
        stride=stride,
        start_epoch=run.state.epoch,
        start_batch=run.state.batch,
    )
    stack.enter_context(contextlib.closing(train_batches))
    run.waited = train_batches.waited
    val_batches = val_loader(val_set, run.val_batch, env, val_workers, stride=stride)
    stack.enter_context(contextlib.closing(val_batches))
    return train_batches, val_batches


def finish(run: Run, val_batches: ValLoader, clock: RunClock) -> Results:
    """Strip the best weights, measure them, and say where everything is. Collective: every rank must call it."""
    beat(Phase.END)
    log, best, last = get_logger(), run.weights_dir / "best.pt", run.weights_dir / "last.pt"
    once(run.writer.wait, run.env)
    tell_written(run)
    epoch = once(lambda: load_best(run), run.env)
    if epoch is None:  # the warnings say why, and so does the end of `train`
        return Results(run.run_dir, run.state.best_fitness, None)
    evaluation, rows = validate(run, val_batches), []
    if once(lambda: evaluation is None, run.env):
        leave(run, save=False)
    if evaluation is not None:
        rows = evaluation.metrics.rows(run.data.names)
        again = ["--weights", best, "--data", run.data.path, "--img", run.imgsz, "--batch", run.val_batch]
        again += ["--device", run.config.device] if run.config.device else []
        again += ["--single-cls"] if run.data.merged else []
        log.info(
            f"\n{duration(clock.elapsed())} of training. Weights of epoch {epoch}, measured again:\n"
            f"{format_table(rows)}\n\n"
            f"weights     {best} to use, {last} to resume from\n"
            f"figures     {run.run_dir / 'results.csv'}\n"
            f"again       {shlex.join(['python', script('val.py'), *map(str, again)])}"
        )
        run.plots.add_evaluation(evaluation.metrics, evaluation.images, run.val_index)
        strip_best(run)
    return Results(run.run_dir, run.state.best_fitness, evaluation, rows)


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
        run.writer.write_now(strip)
    except OSError as error:
        get_logger().warning(f"{best} still holds the state of the run besides its weights: {error}")


def begin(
    given: Mapping[str, Any],
    config: TrainConfig | None,
    resumed: dict[str, Any] | None,
    env: DistEnv,
    callbacks: Sequence[Callback] = (),
    may_be_ended: bool = True,
) -> Results:
    """Train as one of the ranks, maybe the only one. Collective: every rank must call it.

    Args:
        given: flags that were typed.
        config: of `settings`.
        resumed: of `settings`.
        env: this rank's place.
        callbacks: see `train`.
        may_be_ended: whether this process is the run's own, so that a watchdog may end it.
    """
    life, own = this_life(), None
    if life.restarts:
        project = given.get("project", TrainConfig.project)
        own = once(lambda: find_own_run(project, life), env)
    if own is not None:
        config, resumed = go_on(own, given, config, env)
    elif config is None:
        config, resumed = once(lambda: resume(given), env)
    if resumed is not None:
        check_ranks(config, env.world_size)
        say_resumed(resumed)  # here, for a launcher has looked for it as well
    if config.batch_size == AUTOMATIC:
        batch = once(functools.partial(automatic_batch, config, given, env.device, env.world_size), env)
        config = dataclasses.replace(config, batch_size=batch)
    with claims_released(), watched(env, config.stall_warning, config.stall_timeout if may_be_ended else 0):
        if resumed is not None and resumed["run_dir"]:
            once(functools.partial(claim, Path(resumed["run_dir"])), env)  # before anything that takes long
        return train(config, env, resumed, callbacks)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train; with a list of devices in a process for each."""
    argv = sys.argv[1:] if argv is None else argv
    given, env = given_flags(TrainConfig, argv), dist_env()
    config, resumed = settings(given, env)
    device, devices = places(given, config, env)
    if config and devices:
        more = for_workers(given, config, resumed, devices)
        resumed = None  # workers read their own
        command = [script("train.py"), *without_flags(TrainConfig, argv, ("device", "batch_size"))]
        command += ["--device", device, "--batch-size", str(more["batch_size"])]
        return say(launch(command, devices, max_restarts=config.max_restarts, going_on=going_on))
    timeout = given.get("dist_timeout", TrainConfig.dist_timeout)
    with stops_end_the_process(), process_group(device, env, timeout) as env:
        for sentence in repeated_flags(TrainConfig, argv):
            get_logger().info(sentence)
        begin(given, config, resumed, env)
    return 0


if __name__ == "__main__":
    os.environ.setdefault(STARTED, str(BEGAN))
    run_cli(as_worker(main))
