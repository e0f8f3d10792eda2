"""Batches of samples, made by processes of their own while the network computes.

Shape letters: B images in a batch of this rank, T targets in the batch, H W network input in pixels, K batches in an
epoch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from utils.core.errors import LostDataError, UserError
from utils.core.image_files import ImageError
from utils.core.signals import STOP_SIGNALS, end_in_a_while, interrupts_held
from utils.data.batch_slots import BatchSlots
from utils.data.dataset import DetectionDataset, Sample, Unreadable
from utils.data.forks import fork_context, keep_freed_memory, may_have_children, name_process
from utils.data.loader_notes import LoaderNotes
from utils.data.sampler import SampleRequest, TrainBatches, rect_batches, val_batches
from utils.dist.place import DistEnv

PREFETCH_BATCHES = 2  # per worker
SLOTS = PREFETCH_BATCHES + 2  # per worker: training holds a batch and maybe the one before, which it is about to drop
NICENESS = 10  # of processes that share their cores with training: it holds 56 of 58 images/s beside them, else 44
FILLING = 1.0  # seconds that the first step waits at most for the queues to be full

# What keeps a process from being started, by errno or by Python's words.
LIMITS: dict[int | str, str] = {
    errno.EMFILE: "too many open files (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.EAGAIN: "too many processes (ulimit -u, or the limit of a container)",
    errno.ENOMEM: "no memory is left for them (ulimit -v, or the limit of a container)",
    "can't start new thread": "too many processes (ulimit -u, or the limit of a container)",
}


class Batch(NamedTuple):
    """One rank's share of a batch.

    Attributes:
        images: (B, 3, H, W) uint8 RGB, channels last in memory as images are, and as networks are fastest with.
        targets: (T, 6) float32 [image, class, cx, cy, w, h], cxcywhn of the network input; image indexes this batch.
        indices: (B,) int64, the places in the label index of the images that were asked for.
        epoch: 0-based.
        k: number of the batch in its epoch (training) or in the split (validation).
        geometry: (B, 5) float32 [h0, w0, ratio, pad_left, pad_top]: the original's size in pixels, its enlargement and
            the padding before it in pixels of the network input. Zeros in training.
        unreadable: images that are not in it, for they could not be read: in training others are in their place, in
            validation grey.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    epoch: int
    k: int
    geometry: Tensor
    unreadable: Sequence[Unreadable] = ()


def resize_batch(images: Tensor, imgsz: int, stride: int) -> Tensor:
    """Stretch (B, C, H, W) float images bilinearly so that the longer side is ``imgsz``, sides multiples of ``stride``.

    The shorter side is rounded up. Normalized targets stay valid.
    """
    height, width = images.shape[2:]
    longer = max(height, width)
    shape = [stride * -(-side * imgsz // (longer * stride)) for side in (height, width)]
    if shape == [height, width]:
        return images
    return F.interpolate(images, size=shape, mode="bilinear", align_corners=False)


def collate(samples: Sequence[Sample], batch_size: int, slots: BatchSlots | None = None) -> Batch:
    """Join samples of one shape.

    Args:
        samples: at least one.
        batch_size: images in a batch over all ranks, by which positions are counted.
        slots: for the images of the batches of loader processes.
    """
    first, worker = samples[0].request, get_worker_info()
    shape = (len(samples), first.height, first.width, 3)
    handed = slots.take(worker.id, shape) if slots is not None and worker is not None else None
    array = np.empty(shape, np.uint8) if handed is None else handed.array
    for image, sample in zip(array, samples, strict=True):
        cv2.cvtColor(sample.image, cv2.COLOR_BGR2RGB, dst=image)
    counts = [len(sample.labels) for sample in samples]
    targets = np.empty((sum(counts), 6), np.float32)
    targets[:, 0] = np.repeat(np.arange(len(samples)), counts)
    targets[:, 1:] = np.concatenate([sample.labels for sample in samples])
    images: Any = torch.from_numpy(array).permute(0, 3, 1, 2) if handed is None else handed
    return Batch(
        images,
        torch.from_numpy(targets),
        torch.tensor([sample.request.index for sample in samples], dtype=torch.int64),
        first.epoch,
        first.position // batch_size,
        torch.tensor([sample.geometry for sample in samples], dtype=torch.float32),
        [unreadable for sample in samples for unreadable in sample.unreadable],
    )


def choose_num_workers(limit: int, local_world_size: int, local_batch: int) -> int:
    """Loader processes of one rank: at most ``limit``, its share of the cores and its images in a batch; 0 = none."""
    if not may_have_children():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(limit, max(cores // local_world_size, 1), local_batch)


def share_workers(limit: int, local_world_size: int, local_batch: int, val_batch: int) -> tuple[int, int]:
    """Loader processes of one rank for training and for validation, at most ``limit`` together.

    They live side by side, so that an epoch begins with batches that are ready. Where that is too many, validation,
    which has less to do, gets a quarter of them, one at least.

    Args:
        limit: ``--workers``.
        local_world_size: ranks of this machine.
        local_batch: images of this rank in a training batch.
        val_batch: images in a validation batch.
    """
    train, val = (choose_num_workers(limit, local_world_size, batch) for batch in (local_batch, val_batch))
    val = min(val, max(limit - train, limit // 4, int(limit > 1)))
    return min(train, limit - val), val


def choose_val_batch(wanted: int, global_batch: int) -> int:
    """Images of a validation batch: as wanted; for 0 no more than of a training batch, so that it fits as well."""
    return wanted or min(global_batch, 32)


def _init_worker(worker_id: int, notes: LoaderNotes, yield_cores: bool) -> None:
    """One thread per worker; signals to stop are the main process's business, which then ends the workers.

    Schedulers send them to all processes at once, and the main process may still need batches up to where it stops.
    """
    info: Any = get_worker_info()
    if yield_cores and hasattr(os, "nice"):
        os.nice(NICENESS)
    info.dataset.note = notes.begin(worker_id)
    name_process(f"loader {worker_id}")
    keep_freed_memory()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda number, frame: end_in_a_while())


def _data_loader(
    dataset: DetectionDataset,
    batches: TrainBatches | list[list[SampleRequest]],
    batch_size: int,
    num_workers: int,
    device: torch.device,
) -> tuple[DataLoader, LoaderNotes, BatchSlots | None]:
    """PyTorch's loader over batches of requests, with workers that live as long as it does, their notes and slots."""
    parallel = num_workers > 0
    notes = LoaderNotes(dataset.index.path, num_workers)
    if not parallel:
        dataset.note = notes.begin(0)
    forked = parallel and sys.platform == "linux"
    slots = BatchSlots(num_workers, SLOTS, _largest_batch(batches)) if forked else None
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=partial(collate, batch_size=batch_size, slots=slots),
        pin_memory=device.type == "cuda",
        worker_init_fn=partial(_init_worker, notes=notes, yield_cores=device.type == "cpu"),
        multiprocessing_context=fork_context() if forked else "spawn" if parallel else None,
        prefetch_factor=PREFETCH_BATCHES if parallel else None,
        persistent_workers=parallel,
        generator=torch.Generator(),  # of seeds that nobody uses; each pass would else move PyTorch's global generator
    )
    return loader, notes, slots


def _largest_batch(batches: TrainBatches | list[list[SampleRequest]]) -> int:
    """Bytes of the images of this rank's largest batch."""
    if isinstance(batches, TrainBatches):
        shapes = [(batches.imgsz, batches.imgsz)] if batches.rect is None else batches.rect.shapes
        return 3 * len(batches.slots) * max(height * width for height, width in shapes)
    return 3 * max((len(requests) * requests[0].height * requests[0].width for requests in batches), default=0)


def _without_traceback(error: ImageError | LostDataError) -> UserError | LostDataError:
    """Say which image could not be read; PyTorch puts the traceback of the worker into the message."""
    said = str(error).rpartition(f"{type(error).__module__}.{type(error).__name__}: ")[2].strip()
    if isinstance(error, LostDataError):
        return LostDataError(said)
    return UserError(f"{said}, although it could be read when the run began (--strict); replace the image or remove it")


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Hold interrupts while loader processes are started, and say which limit they meet with.

    Raises:
        UserError: there can't be so many.
    """
    try:
        with interrupts_held():
            yield
    except (OSError, RuntimeError) as error:
        limit = LIMITS.get(getattr(error, "errno", None) or str(error))
        if limit is None:
            raise
        raise UserError(
            f"the processes that load images can't be started: {limit}; raise that, or use fewer --workers"
        ) from None


def _end_workers(batches: Iterator[Batch] | None) -> None:
    """End the processes of one of PyTorch's iterators, which does so by itself only when its last reference goes.

    An exception on its way keeps references, a notebook even the last one that was shown. And if it is a cycle that
    goes, the iterator's queues are closed before it can tell its processes to end: it then waits 10 s for each of them.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        batches._shutdown_workers()


class TrainLoader(Iterator[Batch]):
    """An endless iterator of training batches; one pass over all epochs, so nothing is set anew between them.

    Args:
        loader: over ``TrainBatches``.
        notes: of its processes.
        slots: of their batches.
        device: that trains.

    Attributes:
        batches_per_epoch: K.
    """

    def __init__(self, loader: DataLoader, notes: LoaderNotes, slots: BatchSlots | None, device: torch.device) -> None:
        self.batches_per_epoch = len(loader)
        self._notes = notes
        self._filling = slots if device.type == "cpu" else None
        self._full = loader.num_workers * PREFETCH_BATCHES
        self._device, self._waited = device, 0.0
        self._unreadable: dict[int, str] = {}
        with _starting():
            self._batches: Iterator[Batch] | None = iter(loader)

    def __next__(self) -> Batch:
        assert self._batches is not None, "the loader is closed"
        began = time.perf_counter()
        if self._filling:
            self._fill(self._filling)
        try:
            batch = next(self._batches)
        except (ImageError, LostDataError) as error:
            raise _without_traceback(error) from None
        # On CUDA the host runs ahead of its device, which only loses time if it has nothing left to do by now.
        if self._device.type != "cuda" or torch.cuda.current_stream(self._device).query():
            self._waited += time.perf_counter() - began
        if batch.unreadable:
            self._unreadable.update(batch.unreadable)
        return batch

    def _fill(self, slots: BatchSlots) -> None:
        """Wait until the queues are full, before training takes the cores that fill them: both would be slowed down."""
        self._filling = None
        end = time.perf_counter() + FILLING
        while slots.taken() < self._full and time.perf_counter() < end:
            time.sleep(0.005)

    def waited(self) -> float:
        """Return for how many seconds training has waited for batches so far."""
        return self._waited

    def take_unreadable(self) -> dict[int, str]:
        """Return the images that could not be read since the last call: reason by place in the label index."""
        taken, self._unreadable = self._unreadable, {}
        return taken

    def close(self) -> None:
        """End the worker processes."""
        batches, self._batches = self._batches, None
        _end_workers(batches)
        self._notes.close()


class ValLoader:
    """This rank's batches of a validation pass; every ``iter`` is a new pass with the same workers.

    Args:
        loader: over the batches of this rank.
        notes: of its processes.
    """

    def __init__(self, loader: DataLoader, notes: LoaderNotes) -> None:
        self._loader: DataLoader | None = loader
        self._batches: Iterator[Batch] | None = None
        self._notes = notes

    def __len__(self) -> int:
        assert self._loader is not None, "the loader is closed"
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        assert self._loader is not None, "the loader is closed"
        with _starting():  # the first time
            self._batches = batches = iter(self._loader)
        try:
            yield from batches
        except ImageError as error:
            raise _without_traceback(error) from None

    def close(self) -> None:
        """End the worker processes."""
        batches, self._loader, self._batches = self._batches, None, None
        _end_workers(batches)
        self._notes.close()


def train_loader(
    dataset: DetectionDataset,
    global_batch: int,
    env: DistEnv,
    num_workers: int,
    *,
    stride: int = 32,
    start_epoch: int = 0,
    start_batch: int = 0,
) -> TrainLoader:
    """Start loading this rank's share of the training batches.

    Args:
        dataset: with ``hyp``; its ``rect`` chooses rectangular batches.
        global_batch: images in a batch over all ranks.
        env: rank, world size and device of this process.
        num_workers: loader processes of this rank; see ``choose_num_workers``.
        stride: sides of rectangular batches are multiples of it.
        start_epoch: epoch of the first batch.
        start_batch: number of the first batch in its epoch.
    """
    index = dataset.index
    rect = rect_batches(index.shapes, global_batch, dataset.imgsz, stride, pad=0.0) if dataset.rect else None
    batches = TrainBatches(
        len(dataset),
        global_batch,
        dataset.seed,
        env.rank,
        env.world_size,
        imgsz=dataset.imgsz,
        start_epoch=start_epoch,
        start_batch=start_batch,
        rect=rect,
    )
    return TrainLoader(*_data_loader(dataset, batches, global_batch, num_workers, env.device), env.device)


def val_loader(
    dataset: DetectionDataset,
    batch_size: int,
    env: DistEnv,
    num_workers: int,
    *,
    stride: int = 32,
    pad: float = 0.5,
) -> ValLoader:
    """This rank's share of the validation batches: whole ones, every ``world_size``-th.

    Args:
        dataset: without ``hyp``.
        batch_size: images in a batch; every batch is computed by one rank.
        env: rank, world size and device of this process.
        num_workers: loader processes of this rank; see ``choose_num_workers``.
        stride: sides of the batches are multiples of it.
        pad: see ``rect_batches``.
    """
    batches = val_batches(dataset.index, dataset.imgsz, batch_size, stride, pad)[env.rank :: env.world_size]
    loader, notes, _ = _data_loader(dataset, batches, batch_size, num_workers, env.device)
    return ValLoader(loader, notes)
