"""Where the batches of a run come from, and how they get to its network."""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from utils.core.devices import upload
from utils.core.heartbeat import Phase, beat
from utils.core.logging import get_logger
from utils.data.dataset import DetectionDataset, create_cache
from utils.data.loaders import Batch, TrainLoader, ValLoader, resize_batch, share_workers, train_loader, val_loader
from utils.data.sampler import batch_imgsz
from utils.run.state import Run


def open_loaders(run: Run, stack: contextlib.ExitStack) -> tuple[TrainLoader, ValLoader]:
    """Open image caches and loaders, all to be closed by the stack. Collective: every rank must call it.

    Returns:
        Batches to train on, from where the run is; batches of the validation split.
    """
    config, imgsz, env, spare = run.config, run.imgsz, run.env, run.step_bytes
    if run.hyp.copy_paste and (run.train_index.points is None or config.rect or not run.hyp.mosaic):
        get_logger().info(f"copy_paste {run.hyp.copy_paste:g} of the recipe has no effect: no polygons or mosaics")
    train_cache = create_cache(run.train_index, imgsz, config.cache, env, train=True, spare=spare)
    stack.enter_context(contextlib.closing(train_cache))
    val_cache = create_cache(run.val_index, imgsz, config.cache, env, train=False, spare=spare)
    stack.enter_context(contextlib.closing(val_cache))
    train_set = DetectionDataset(
        run.train_index, train_cache, run.hyp, imgsz, config.seed, config.rect, strict=config.strict
    )
    val_set = DetectionDataset(run.val_index, val_cache, None, imgsz, strict=config.strict)
    workers, val_workers = share_workers(config.workers, env.local_world_size, run.plan.local_batch, run.val_batch)
    stride, start = run.raw_model.max_stride, {"start_epoch": run.state.epoch, "start_batch": run.state.batch}
    train_batches = train_loader(train_set, run.plan.global_batch, env, workers, stride=stride, **start)
    stack.enter_context(contextlib.closing(train_batches))
    run.waited = train_batches.waited
    val_batches = val_loader(val_set, run.val_batch, env, val_workers, stride=stride)
    stack.enter_context(contextlib.closing(val_batches))
    return train_batches, val_batches


def batches_left(run: Run, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of an epoch that are still to do, by the state of the run, which its loop moves on."""
    state = run.state
    while state.batch < run.schedule.batches_per_epoch:
        beat(Phase.LOADING, state.epoch, state.batch)
        batch = next(batches)
        assert (batch.epoch, batch.k) == (state.epoch, state.batch), "loader and run are at different batches"
        run.plots.add_train_batch(batch, run.train_index)
        beat(Phase.FORWARD)
        yield batch


def network_input(run: Run, batch: Batch) -> Tensor:
    """Return the images of a batch on the device, as the network takes them; with --multi-scale at their own size."""
    images = run.family.inputs.prepare(upload(batch.images, run.env.device))
    if run.config.multi_scale:
        stride = run.raw_model.max_stride
        size = batch_imgsz(run.config.seed, batch.epoch, batch.k, run.imgsz, stride, multi_scale=True)
        images = resize_batch(images, size, stride)
    return images
