"""The scan of a split: every image and label file read and checked, on all cores of a machine.

Shape letters: n images, M boxes over all images.
"""

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from utils.core.heartbeat import beating
from utils.core.image_files import ImageError, image_size, page_count, retried
from utils.core.signals import STOP_SIGNALS, interrupts_held
from utils.data.forks import fork_context, may_have_children
from utils.data.label_looks import Looks
from utils.data.label_rules import check_rows
from utils.data.labels import RowReader
from utils.data.report import Problem
from utils.dist.collectives import gather_on_machine, once_per_machine
from utils.dist.place import DistEnv

CHUNK = 512  # images per unit of work: long enough for vectorized checks, short enough for an even progress bar
MIN_SIDE, MAX_PIXELS = 10, 1 << 28
LARGEST_LABELS = 64 << 20  # bytes of a label file
LABELLED, MISSING, EMPTY, CORRUPT = range(4)
NO_FILE, NO_ACCESS = -1, -2  # in place of a file's size
READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH  # by everybody
NO_POINTS = np.zeros((0, 2), np.float32)
LEFT_OUT = ("image left out", "label file unreadable, image left out")
FIRST_PAGE = "only the first page of the image is used"


class Files(NamedTuple):
    """Images, their label files ('' where there is none), and figures (n, 4) int64 as of ``_file_stats``."""

    images: Sequence[str]
    labels: Sequence[str]
    stats: np.ndarray


class Rules(NamedTuple):
    """What a split's labels are checked by, see ``build_index``."""

    num_classes: int
    single_cls: bool
    columns: int


class Part(NamedTuple):
    """Result for consecutive images: status (n,) uint8, shapes (n, 2) int32, counts (n,) int64, rows (M, 5) float32.

    Of polygons also: corners (M,) int64, how many each row has, 0 for a box; points (P, 2) float32, their places. Of
    all rows, also those left out, what they look like.
    """

    status: np.ndarray
    shapes: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    corners: np.ndarray
    points: np.ndarray
    problems: list[Problem]
    looks: Looks


def scan(files: Files, rules: Rules, split: str, env: DistEnv) -> Part | None:
    """Scan all images on all cores of a machine, each of its ranks a share. Collective.

    Returns:
        The same result however many cores and ranks there are; None but on the machine's first rank.
    """
    count = len(files.images)
    all_starts = range(0, count, CHUNK)
    starts = all_starts[env.local_rank :: env.local_world_size]

    def work(start: int) -> Part:
        chunk = slice(start, start + CHUNK)
        return _scan_chunk(Files(files.images[chunk], files.labels[chunk], files.stats[chunk]), rules)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(max(cores // env.local_world_size, 1), len(starts) // 2)
    own: dict[int, Part] = {}
    total = sum(min(CHUNK, count - start) for start in starts)
    quiet = True if not env.is_main_process else None  # None: on a terminal only
    with tqdm(total=total, desc=f"Scanning {split}", unit="images", delay=1, disable=quiet) as bar:
        for start, part in beating(in_processes(work, list(starts), workers)):
            own[start] = part
            bar.update(len(part.status))
    shares = gather_on_machine(own, env)
    if not shares:
        return None
    parts = {start: part for share in shares for start, part in share.items()}
    ordered = [parts[start] for start in all_starts]
    problems = sorted(problem for part in ordered for problem in part.problems)
    looks = Looks()
    for part in ordered:
        looks.add(part.looks)
    status, shapes, counts, rows, corners, points = (
        np.concatenate(columns) for columns in list(zip(*ordered, strict=True))[:6]
    )
    return Part(status, shapes, counts, rows, corners, points, problems, looks)


def _scan_chunk(files: Files, rules: Rules) -> Part:
    """Check some images and their label files."""
    paths, names = files.images, files.labels
    status = np.full(len(paths), LABELLED, np.uint8)
    shapes = np.zeros((len(paths), 2), np.int32)
    problems: list[Problem] = []
    reader = RowReader(problems, rules.columns)
    for i, (path, name, label_size) in enumerate(zip(paths, names, files.stats[:, 2].tolist(), strict=True)):
        try:
            shapes[i] = _checked_size(path)
            if name and label_size == NO_FILE:
                raise OSError(errno.ENOENT, "a link to a file that is not there")
            text = b"" if label_size in (0, NO_FILE) else _read(name, label_size)
        except ImageError as error:
            status[i] = CORRUPT
            problems.append(Problem(path, 0, str(error).removeprefix(f"{path}: "), LEFT_OUT[0]))
        except OSError as error:
            status[i] = CORRUPT
            problems.append(Problem(name, 0, error.strerror or str(error), LEFT_OUT[1]))
        else:
            if path.lower().endswith((".tif", ".tiff")) and (pages := page_count(path)) > 1:
                problems.append(Problem(path, 0, f"{pages} pages", FIRST_PAGE))
            if not reader.read(i, name, text):
                status[i] = MISSING if label_size == NO_FILE else EMPTY
    rows = reader.rows()
    reader.looks.add_rows(rows, rules.num_classes)
    rows = check_rows(rows, names, rules.num_classes, problems, rules.single_cls)
    counts = np.bincount(rows.image, minlength=len(paths))
    outlines = [reader.outlines[k] if k >= 0 else NO_POINTS for k in rows.outline.tolist()]
    corners = np.array([len(outline) for outline in outlines], np.int64)
    points = np.concatenate([NO_POINTS, *outlines])
    return Part(status, shapes, counts, rows.box.astype(np.float32), corners, points, problems, reader.looks)


def _read(file: str, size: int) -> bytes:
    if size > LARGEST_LABELS:
        raise OSError(errno.EFBIG, f"{size} bytes, more than {LARGEST_LABELS}")

    def contents() -> bytes:
        with open(file, "rb", buffering=0) as opened:  # label files are short: a buffer costs more than it saves
            return opened.readall()

    return retried(contents)


def _checked_size(path: str) -> tuple[int, int]:
    """Size of an image that is usable for training, else ImageError."""
    height, width = image_size(path)
    if min(height, width) < MIN_SIDE:
        raise ImageError(f"{path}: {width} x {height} pixels, less than {MIN_SIDE} on a side")
    if height * width > MAX_PIXELS:
        raise ImageError(f"{path}: {width} x {height} pixels, more than {MAX_PIXELS} in all")
    return height, width


def in_processes(work: Callable[[int], Part], items: list[int], workers: int) -> Iterator[tuple[int, Part]]:
    """Yield (item, work(item)) in any order, from forked processes on Linux, from threads where there can't be any."""
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    if sys.platform != "linux" or not may_have_children():
        with ThreadPoolExecutor(workers) as pool:
            yield from zip(items, pool.map(work, items), strict=True)
        return
    context = fork_context()
    readers: list[connection.Connection] = []
    processes = []
    try:
        for k in range(workers):
            reader, writer = context.Pipe(duplex=False)
            readers.append(reader)
            process = context.Process(
                target=_forked, args=(work, items[k::workers], writer, list(readers)), daemon=True
            )
            with interrupts_held():
                process.start()
                processes.append(process)
            writer.close()  # so that the end of a worker is seen as the end of its pipe
        waiting: list[Any] = list(readers)
        while waiting:
            for ready in connection.wait(waiting):
                result = _receive(ready)
                if result is None:
                    waiting.remove(ready)
                else:
                    yield result
    finally:
        for process in processes:
            process.kill()  # workers only read; SIGTERM may be handled by what they inherited
            process.join()


def _receive(reader: Any) -> tuple[int, Part] | None:
    """Next result of a worker, None behind its last one."""
    try:
        result = reader.recv()
    except EOFError:
        raise RuntimeError("a process of the label scan ended early; was it killed for lack of memory?") from None
    if isinstance(result, Exception):
        raise result
    return result


def _forked(work: Callable[[int], Part], items: list[int], writer: Any, inherited: list[Any]) -> None:
    """Life of a scan worker: send (item, result) for each item, then None; an exception takes the place of a result."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    for reader in inherited:
        reader.close()  # with no reader left when the parent is gone, sending fails and this process ends as well
    try:
        for item in items:
            writer.send((item, work(item)))
        writer.send(None)
    except BrokenPipeError:
        pass
    except Exception as error:
        writer.send(error)


def shared_stats(paths: list[str], labels: list[str], env: DistEnv) -> np.ndarray:
    """Figures of all files as of ``_file_stats``, each rank of a machine asking for its share. Collective."""
    cuts = [len(paths) * rank // env.local_world_size for rank in range(env.local_world_size + 1)]
    own = slice(cuts[env.local_rank], cuts[env.local_rank + 1])
    shares = gather_on_machine(_file_stats(paths[own], labels[own]), env)
    return once_per_machine(lambda: np.concatenate(shares), env)


def _file_stats(paths: list[str], labels: list[str]) -> np.ndarray:
    """(n, 4) int64 [image size, image mtime, label size, label mtime]; bytes, nanoseconds; sizes < 0: no such file."""
    stats = np.empty((len(paths), 4), np.int64)
    for i, (path, label) in enumerate(beating(zip(paths, labels, strict=True))):
        stats[i] = *_stat(path), *(_stat(label) if label else (NO_FILE, 0))
    return stats


def _stat(path: str) -> tuple[int, int]:
    try:
        result = os.stat(path)
    except FileNotFoundError:
        return NO_FILE, 0
    except OSError:
        return NO_ACCESS, 0
    # Asked for the few that not everybody may read: asking for all would take half as long again.
    if result.st_mode & READABLE != READABLE and not os.access(path, os.R_OK):
        return NO_ACCESS, 0
    return result.st_size, result.st_mtime_ns
