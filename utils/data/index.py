"""Images and label files of a split: found, checked by written rules and packed into one index.

Shape letters: n images, M boxes over all images, L boxes of one image.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import signal
import stat
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from utils.config.data_yaml import DataConfig, check_split_paths
from utils.config.flags import cache_folder
from utils.core.errors import Problems, UserError
from utils.core.heartbeat import Phase, beat, beating
from utils.core.image_files import ImageError, image_size, page_count, read_image, retried
from utils.core.signals import STOP_SIGNALS, interrupts_held
from utils.data.fetch import ensure_data
from utils.data.forks import fork_context, may_have_children
from utils.data.image_lists import find_labels, list_images
from utils.data.index_arrays import arrays_of, check_numbers
from utils.data.labels import (
    BAD_CLASS,
    BOX_COLUMNS,
    LEFT_OUT_ROW,
    Looks,
    RowReader,
    around_images,
    check_rows,
    label_path,
)
from utils.data.polygons import Polygons
from utils.data.report import Problem, ScanReport, report_csv, shortened
from utils.data.shapes import ensure_shapes
from utils.dist.collectives import all_gather_objects, gather_on_machine, once_per_machine
from utils.dist.place import ALONE, DistEnv

__all__ = ["LabelIndex", "build_index", "cache_folders", "open_splits", "read_image"]

RULES_VERSION = 7  # raise it whenever a rule, the row format or the file format changes: older cache files are rebuilt
MAGIC = b"LSINDEX1"
CHUNK = 512  # images per unit of work: long enough for vectorized checks, short enough for an even progress bar
MIN_SIDE, MAX_PIXELS = 10, 1 << 28
LARGEST_LABELS = 64 << 20  # bytes of a label file
LISTED = 20  # problems in an error message
LABELLED, MISSING, EMPTY, CORRUPT = range(4)
NO_FILE, NO_ACCESS = -1, -2  # in place of a file's size
READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH  # by everybody
NO_POINTS = np.zeros((0, 2), np.float32)
LEFT_OUT = ("image left out", "label file unreadable, image left out")
FIRST_PAGE = "only the first page of the image is used"


# --- 1. The scan -----------------------------------------------------------------------------------------------------


class _Files(NamedTuple):
    """Images, their label files ('' where there is none), and figures (n, 4) int64 as of ``_file_stats``."""

    images: Sequence[str]
    labels: Sequence[str]
    stats: np.ndarray


class _Rules(NamedTuple):
    """What a split's labels are checked by, see ``build_index``."""

    num_classes: int
    single_cls: bool
    columns: int


class _Part(NamedTuple):
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


def _scan_chunk(files: _Files, rules: _Rules) -> _Part:
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
    return _Part(status, shapes, counts, rows.box.astype(np.float32), corners, points, problems, reader.looks)


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


def _scan(files: _Files, rules: _Rules, split: str, env: DistEnv) -> _Part | None:
    """Scan all images on all cores of a machine, each of its ranks a share. Collective.

    Returns:
        The same result however many cores and ranks there are; None but on the machine's first rank.
    """
    count = len(files.images)
    all_starts = range(0, count, CHUNK)
    starts = all_starts[env.local_rank :: env.local_world_size]

    def work(start: int) -> _Part:
        chunk = slice(start, start + CHUNK)
        return _scan_chunk(_Files(files.images[chunk], files.labels[chunk], files.stats[chunk]), rules)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(max(cores // env.local_world_size, 1), len(starts) // 2)
    own: dict[int, _Part] = {}
    total = sum(min(CHUNK, count - start) for start in starts)
    quiet = True if not env.is_main_process else None  # None: on a terminal only
    with tqdm(total=total, desc=f"Scanning {split}", unit="images", delay=1, disable=quiet) as bar:
        for start, part in beating(_parallel(work, list(starts), workers)):
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
    return _Part(status, shapes, counts, rows, corners, points, problems, looks)


def _parallel(work: Callable[[int], _Part], items: list[int], workers: int) -> Iterator[tuple[int, _Part]]:
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


def _receive(reader: Any) -> tuple[int, _Part] | None:
    """Next result of a worker, None behind its last one."""
    try:
        result = reader.recv()
    except EOFError:
        raise RuntimeError("a process of the label scan ended early; was it killed for lack of memory?") from None
    if isinstance(result, Exception):
        raise result
    return result


def _forked(work: Callable[[int], _Part], items: list[int], writer: Any, inherited: list[Any]) -> None:
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


# --- 2. The index ----------------------------------------------------------------------------------------------------


class LabelIndex:
    """Images and labels of a split in a handful of arrays; from a cache file they are mapped, so processes share pages.

    Attributes:
        n: images, without those left out.
        shapes: (n, 2) int32 [height, width] pixels, upright.
        offsets: (n + 1,) int64; image i has rows ``offsets[i]:offsets[i + 1]``.
        rows: (M, 5) float32 [class, cx, cy, w, h] cxcywhn in [0, 1].
        num_classes: classes of the data set.
        name: short name that tells this split from others, the same in every run.
        images_digest: digest of paths, sizes and modification times of the images, for caches of their pixels.
        file: cache file the arrays are mapped from, None if they are in memory.
        polygon_offsets: (M + 1,) int64; row k has ``points[polygon_offsets[k]:polygon_offsets[k + 1]]``. None if no row
            of the split has a polygon.
        points: (P, 2) float32 [x, y] divided by the image's width and height, in [0, 1]; None likewise.
    """

    def __init__(self, arrays: dict[str, np.ndarray], meta: dict[str, Any], file: Path | None = None) -> None:
        self._arrays, self._meta, self.file = arrays, meta, file
        self._names, self._name_offsets = arrays["names"], arrays["name_offsets"]
        self.shapes, self.offsets, self.rows = arrays["shapes"], arrays["offsets"], arrays["rows"]
        self.polygon_offsets, self.points = arrays.get("polygon_offsets"), arrays.get("points")
        self.n = len(self.shapes)
        self.num_classes: int = meta["num_classes"]
        self.name: str = meta["name"]
        self.images_digest: str = meta["images_digest"]

    def __len__(self) -> int:
        return self.n

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is None:
            return LabelIndex, (self._arrays, self._meta)
        return _reopen, (self.file, self._meta["key"])

    @property
    def num_instances(self) -> int:
        """Boxes in all images."""
        return len(self.rows)

    @property
    def report(self) -> ScanReport:
        """What the scan found; read anew at every access, the index itself holds bytes only."""
        fields = json.loads(self._arrays["report"].tobytes())
        return ScanReport(**{**fields, "problems": [Problem(*problem) for problem in fields["problems"]]})

    def path(self, i: int) -> str:
        """Path of image i."""
        return os.fsdecode(self._names[self._name_offsets[i] : self._name_offsets[i + 1]].tobytes())

    def labels(self, i: int) -> np.ndarray:
        """(L, 5) float32 [class, cx, cy, w, h] cxcywhn of image i, read-only; (0, 5) for a background."""
        return self.rows[self.offsets[i] : self.offsets[i + 1]]

    def labels_digest(self) -> str:
        """Digest of what training sees of the labels: names of the images below their folder, sizes and rows."""
        paths = [self.path(i).split("/") for i in range(self.n)]
        first, *_, last = sorted(path[:-1] for path in [*paths, paths[0]])
        above = next((k for k, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
        names = "\n".join("/".join(path[above:]) for path in paths)
        arrays = (self.shapes, self.offsets, self.rows)
        return content_digest(os.fsencode(names), *(np.ascontiguousarray(array).tobytes() for array in arrays))

    def outlines(self, i: int) -> Polygons | None:
        """Polygons of the labels of image i, normalized as ``points``; None if none of them has one."""
        if self.polygon_offsets is None or self.points is None:
            return None
        offsets = self.polygon_offsets[self.offsets[i] : self.offsets[i + 1] + 1]
        if offsets[0] == offsets[-1]:
            return None
        return Polygons(self.points[offsets[0] : offsets[-1]], offsets - offsets[0])


def build_index(
    sources: Sequence[Path],
    num_classes: int,
    env: DistEnv = ALONE,
    *,
    split: str = "train",
    single_cls: bool = False,
    columns: int = 0,
    cache: bool = True,
    named_in: str = "",
    logger: logging.Logger | None = None,
) -> LabelIndex:
    """Index of a split, from its cache file if images, labels and rules are the same as when that was written.

    The ranks of a machine share the work, and map the same file. Collective: every rank must call it.

    Args:
        sources: folders and ``.txt`` lists.
        num_classes: classes named in the data YAML.
        env: this rank's place.
        split: its name, for messages.
        single_cls: give all boxes class 0, after their ids were checked.
        columns: that the row of a box has, of which the first five are used; 0 = not said.
        cache: read and write the cache file.
        named_in: file and key that name the sources, for messages.
        logger: where the report goes.

    Raises:
        UserError: no image, none that can be used, class ids outside the names, or rows that may mean two things.
    """
    beat(Phase.LABELS)
    logger = logger or logging.getLogger("lockstep")
    paths, labels, problems = once_per_machine(partial(_listed_images, sources, named_in), env)
    files = _Files(paths, labels, _shared_stats(paths, labels, env))
    rules = _Rules(num_classes, single_cls, columns)
    names = [os.fsencode(path) for path in paths]
    said = json.dumps([RULES_VERSION, rules, problems]).encode()
    key = content_digest(b"\n".join(names), os.fsencode("\n".join(labels)), files.stats.tobytes(), said)
    places = json.dumps([os.path.abspath(source) for source in sources])
    name = f"{sources[0].stem}-{content_digest(places.encode(), str(num_classes).encode())[:12]}"
    file_name = f"{name}-single.index" if single_cls else f"{name}.index"
    kept_in = [folder / file_name for folder in cache_folders(paths[0])] if cache else []
    index = once_per_machine(
        lambda: next((found for file in kept_in if (found := open_index(file, key, logger))), None), env
    )
    if index is None:
        scanned = _scan(files, rules, split, env)

        def checked_and_stored() -> LabelIndex:
            assert scanned is not None
            part = scanned._replace(problems=sorted(problems + scanned.problems))
            _refuse_unclear_rows(part.looks, columns, split)
            _refuse_bad_classes(part, num_classes, split, paths[0])
            _refuse_unreadable(part, sources)
            if single_cls:
                part.rows[:, 0] = 0
            meta = {"key": key, "name": name, "num_classes": 1 if single_cls else num_classes}
            made = _pack(names, files.stats, part, meta)
            return _store(made, kept_in, logger) or made

        index = once_per_machine(checked_and_stored, env)
    index.report.tell(split, logger)
    return index


def _listed_images(sources: Sequence[Path], named_in: str) -> tuple[list[str], list[str], list[Problem]]:
    """Images of a split, their label files, and what is wrong with its lists and folders."""
    problems: list[Problem] = []
    try:
        paths = list_images(sources, problems)
        labels, odd = find_labels(paths, sources)
    except UserError as error:
        raise UserError(f"{named_in}: {error}".removeprefix(": ")) from error
    return paths, labels, problems + odd


def _shared_stats(paths: list[str], labels: list[str], env: DistEnv) -> np.ndarray:
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


def content_digest(*parts: bytes) -> str:
    """SHA-256 over the parts and their lengths, as hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _refuse_unclear_rows(looks: Looks, columns: int, split: str) -> None:
    unclear = "" if columns == BOX_COLUMNS else looks.unclear()
    if unclear:
        raise UserError(f"{split}: {unclear}")


def _refuse_bad_classes(part: _Part, num_classes: int, split: str, image: str) -> None:
    bad = [problem for problem in part.problems if problem.rule == BAD_CLASS]
    if not bad:
        return
    files = len({problem.file for problem in bad})
    if part.looks.ids_from_one():
        raise UserError(
            f"{split}: class ids run from 1 to {num_classes}, but are counted from 0: subtract 1 from each, or put a "
            f"name for 0 in front of the names in the data YAML ({len(bad)} rows in {files} label files have no name, "
            f"such as {bad[0].file}:{bad[0].line})"
        )
    hints = "".join(f"; {hint}" for hint in part.looks.hints())
    raise UserError(
        f"{split}: class ids in {files} label files are not whole numbers from 0 to {num_classes - 1}; correct "
        f"them or the names in the data YAML{hints}\n{listed({split: bad}, image)}"
    )


def _refuse_unreadable(part: _Part, sources: Sequence[Path]) -> None:
    if (part.status == CORRUPT).all():
        reasons = [problem for problem in part.problems if problem.rule in LEFT_OUT]
        shown = "\n".join(shortened([f"  {problem}" for problem in reasons[:3]], len(reasons)))
        places = ", ".join(map(str, sources))
        raise UserError(f"no image of {places} can be used, all {len(part.status)} are bad\n{shown}")


def listed(problems: dict[str, list[Problem]], image: str) -> str:
    """Return the first problems, one a line, and where all are listed if that is elsewhere.

    Args:
        problems: by split.
        image: any of the data set: the list is kept where caches are, for there is no run folder yet.
    """
    flat = [str(problem) for found in problems.values() for problem in found]
    lines = shortened([f"  {line}" for line in flat[:LISTED]], len(flat))
    for folder in cache_folders(image) if len(flat) > LISTED else ():
        with contextlib.suppress(OSError), replacing(folder / "problems.csv") as descriptor:
            os.write(descriptor, report_csv(problems).encode("utf-8", "surrogateescape"))
            lines.append(f"  all of them: {folder / 'problems.csv'}")
            break
    return "\n".join(lines)


def _pack(names: list[bytes], stats: np.ndarray, part: _Part, meta: dict[str, Any]) -> LabelIndex:
    """Index in memory from a scan; images left out by the scan are not in it."""
    kept = part.status != CORRUPT
    names = [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]
    labelled, missing, empty, corrupt = np.bincount(part.status, minlength=4).tolist()
    background = int((part.counts[kept] == 0).sum())
    found = ScanReport(labelled, missing, empty, corrupt, background, part.problems, part.looks.hints())
    arrays = {
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_offsets": np.cumsum([0, *map(len, names)], dtype=np.int64),
        "shapes": part.shapes[kept],
        "offsets": np.concatenate(([0], np.cumsum(part.counts[kept]))).astype(np.int64),
        "rows": part.rows,
        "report": np.frombuffer(json.dumps(asdict(found)).encode(), np.uint8),
    }
    if len(part.points):
        arrays["polygon_offsets"] = np.concatenate(([0], np.cumsum(part.corners)))
        arrays["points"] = part.points
    for array in arrays.values():
        array.flags.writeable = False
    return LabelIndex(arrays, {**meta, "images_digest": content_digest(b"\n".join(names), stats[kept, :2].tobytes())})


# --- 3. The cache file: magic, crc32 of the header, its length, a JSON header, then the arrays, each 64-byte aligned --


def cache_folders(image: str) -> list[Path]:
    """Where caches of a data set go, best first: beside its images or labels folder, else the user's, if any."""
    folder = image.rpartition("/")[0]
    around = around_images(folder)
    places = [Path((around[0][0] if around else folder) or "/") / ".lockstep"]
    with contextlib.suppress(UserError):  # a run goes without
        places.append(cache_folder())
    return places


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[int]:
    """Descriptor of a new file that takes the place of ``file`` if the block succeeds, and is removed if it fails.

    The temporary name is unique, so several processes may do this at once and the last one wins. What a killed process
    left behind is removed an hour later.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f"{file.name}.", file.parent)
    try:
        now = os.fstat(descriptor).st_mtime  # by the clock of the file system, which may be another machine's
        for old in file.parent.glob(f"{file.name}.*.tmp"):
            with contextlib.suppress(OSError):
                if now - old.stat().st_mtime > 3600:
                    old.unlink()
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o644)  # a data set may be shared by several users
        yield descriptor
        os.close(descriptor)
        descriptor = -1
        os.replace(temporary, file)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        os.unlink(temporary)
        raise


def _store(index: LabelIndex, files: list[Path], logger: logging.Logger) -> LabelIndex | None:
    """Write the index to the first place that takes it and map it from there; None if there is no such place."""
    header, at = json.loads(json.dumps(index._meta)), 0
    header["arrays"], crc, body = {}, 0, []
    for name, array in index._arrays.items():
        header["arrays"][name] = [array.dtype.str, array.shape, at]
        body.append(array.tobytes() + b"\0" * (-array.nbytes % 64))
        crc, at = zlib.crc32(body[-1], crc), at + len(body[-1])
    text = json.dumps({**header, "crc": crc, "bytes": at}).encode()
    front = MAGIC + struct.pack("<II", zlib.crc32(text), len(text)) + text
    errors = []
    for file in files:
        try:
            with replacing(file) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as out:
                out.writelines([front, b"\0" * (-len(front) % 64), *body])
        except OSError as error:
            errors.append(f"{file.parent}: {error.strerror}")
        else:
            return open_index(file, index._meta["key"], logger)
    if errors:
        logger.warning(f"the label index is not kept for the next run ({'; '.join(errors)})")
    return None


def open_index(file: Path, key: str, logger: logging.Logger | None = None) -> LabelIndex | None:
    """Map a cache file; None if there is none or if it belongs to another state of the data set.

    A damaged file is None too, with a warning. Without a logger the arrays' checksum is not computed, and what they say
    is not checked: for another process of the same run.
    """
    try:
        with open(file, "rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    try:
        crc, length = struct.unpack_from("<II", data, len(MAGIC))
        start = len(MAGIC) + 8
        if data[: len(MAGIC)] != MAGIC or zlib.crc32(data[start : start + length]) != crc:
            raise ValueError("damaged header")
        header = json.loads(data[start : start + length])
        start += length + -(start + length) % 64
        body = np.ndarray(header["bytes"], np.uint8, data, start)
        if header["key"] != key:
            return None
        arrays = arrays_of(header, body)
        if logger is not None:
            if zlib.crc32(body.data) != header["crc"]:
                raise ValueError("damaged arrays")
            check_numbers(arrays, header["num_classes"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error):
        if logger is not None:
            logger.warning(f"the label index {file} is damaged and is built again")
        return None
    return LabelIndex(arrays, header, file)


def _reopen(file: Path, key: str) -> LabelIndex:
    """Map the file that another process of this run has mapped; how an index is unpickled."""
    index = open_index(file, key)
    if index is None:
        raise RuntimeError(f"the label index {file} was replaced while it was in use; start the run again")
    return index


def open_splits(
    data: DataConfig,
    splits: Sequence[str],
    env: DistEnv = ALONE,
    *,
    strict: bool = False,
    labelled: Sequence[str] = ("train", "val"),
) -> dict[str, LabelIndex]:
    """Return the labels of some splits, drawing or fetching the data set first if it is not there. Collective.

    Args:
        data: where they are.
        splits: their names.
        env: this rank's place.
        strict: whether any problem of images and labels is a mistake.
        labelled: splits that must have a label.

    Raises:
        UserError: says of all splits together what is missing or not usable.
    """
    if data.generator is not None:
        once_per_machine(partial(ensure_shapes, data.root), env)
    else:
        once_per_machine(partial(ensure_data, data, splits), env)
    problems = Problems()
    found = {split: problems.attempt(partial(_open_split, data, split, split in labelled, env)) for split in splits}
    indexes = {split: index for split, index in found.items() if index is not None}
    wrong = {split: report.problems for split, index in indexes.items() if (report := index.report).problems}
    if strict and wrong:
        some = next(iter(indexes.values()))
        count = sum(map(len, wrong.values()))
        hints = "".join(f"; {hint}" for index in indexes.values() for hint in index.report.hints)
        problems.add(f"--strict: {count} problems in {' and '.join(wrong)}{hints}\n{listed(wrong, some.path(0))}")
    problems.raise_if_any()
    return indexes


def _open_split(data: DataConfig, split: str, labelled: bool, env: DistEnv) -> LabelIndex:
    check_split_paths(data, [split])
    sources = getattr(data, split)
    named_in = f"{data.path}: {split}"
    index = build_index(
        sources,
        data.label_classes,
        env,
        split=split,
        single_cls=data.merged > 0,
        columns=data.columns,
        named_in=named_in,
    )
    if labelled and not index.num_instances:
        raise UserError(f"{split}: no labels in {', '.join(map(str, sources))}: {_why_no_labels(index, split)}")
    return index


def _why_no_labels(index: LabelIndex, split: str) -> str:
    """What to do about a split without labels."""
    report = index.report
    lost = [problem for problem in report.problems if problem.line and problem.rule.endswith(LEFT_OUT_ROW)]
    if lost:
        files = len({problem.file for problem in lost})
        reasons = "; ".join([*report.rule_counts(lost), *report.hints])
        examples = listed({split: lost}, index.path(0))
        return f"all {len(lost)} rows of {files} label files were left out: {reasons}\n{examples}"
    if report.empty:
        return f"all label files that are there, {report.empty}, are empty; at least one label is needed"
    first = label_path(index.path(0))
    return f"at least one is needed; the label file of the first image would be {first}, or beside the image"


def check_same_data(indexes: Mapping[str, LabelIndex], env: DistEnv) -> None:
    """Compare the data of all machines: file names, shapes and labels, not where they are or when they were written.

    Collective: every rank must call it.

    Raises:
        UserError: some are not the same.
    """
    if env.local_world_size == env.world_size:
        return
    own = (env.node_rank, {split: (len(index), index.labels_digest()) for split, index in indexes.items()})
    found = dict(all_gather_objects(own, env))
    for split in indexes:
        if len({digests[split] for digests in found.values()}) > 1:
            counts = ", ".join(f"{digests[split][0]} on machine {node}" for node, digests in sorted(found.items()))
            raise UserError(
                f"{split}: the machines have different data ({counts} images, or other names, sizes or labels); copy "
                "the data set from one to the others"
            )
