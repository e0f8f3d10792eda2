"""Images and label files of a split: found, checked by written rules and packed into one index.

Shape letters: n images, M boxes over all images, L boxes of one image.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from utils.data_config import DataConfig, check_split_paths
from utils.errors import UserError
from utils.images import IMAGE_SUFFIXES, ImageError, image_size, read_image
from utils.labels import BAD_CLASS, Problem, RowReader, ScanReport, check_rows, label_path
from utils.shapes import ensure_shapes

__all__ = ["LabelIndex", "ScanReport", "build_index", "cache_folders", "image_size", "list_images", "read_image"]

RULES_VERSION = 1  # raise it whenever a rule, the row format or the file format changes: older cache files are rebuilt
MAGIC = b"LSINDEX1"
CHUNK = 512  # images per unit of work: long enough for vectorized checks, short enough for an even progress bar
MIN_SIDE, MAX_PIXELS = 10, 1 << 28
LABELLED, MISSING, EMPTY, CORRUPT = range(4)
NO_FILE, NO_ACCESS = -1, -2  # in place of a file's size


# --- 1. Which images -------------------------------------------------------------------------------------------------


def list_images(sources: Sequence[Path]) -> list[str]:
    """Absolute paths of all images of a split, with forward slashes; an image named twice is kept once, with a note.

    A folder is searched with its subfolders and gives sorted paths; a ``.txt`` list keeps its order. Its lines starting
    with ``./`` are relative to its folder, other relative ones to it or, if nothing is there, to the working folder.

    Raises:
        UserError: a source does not exist or is of another kind, or there is no image at all.
    """
    logger = logging.getLogger("lockstep")
    paths: list[str] = []
    for source in sources:
        if source.is_dir():
            paths += sorted(_walk(os.path.abspath(source), ()))
        elif source.suffix == ".txt" and source.is_file():
            paths += _read_list(source, logger)
        else:
            what = "is neither a folder nor a .txt list of images" if source.exists() else "does not exist"
            raise UserError(f"{source} {what}; check train, val and test in the data YAML")
    unique = list(dict.fromkeys(paths))
    if len(unique) < len(paths):
        logger.warning(f"{len(paths) - len(unique)} images are listed more than once and used once")
    if not unique:
        places = ", ".join(map(str, sources)) or "an empty list of sources"
        raise UserError(f"no images in {places}; looked for the suffixes {', '.join(sorted(IMAGE_SUFFIXES))}")
    return unique


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Image files below a folder; links to folders are followed unless they lead back to a folder above."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, (*above, real))
            elif entry.name.rpartition(".")[2].lower() in IMAGE_SUFFIXES:
                yield entry.path.replace(os.sep, "/")


def _read_list(source: Path, logger: logging.Logger) -> list[str]:
    """Images of a list file, in order; blank lines and those starting with # are skipped."""
    folder = os.path.abspath(source.parent)
    paths: list[str] = []
    strangers: list[str] = []
    for raw in source.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        path = os.path.join(folder, line)  # an absolute line stays as it is
        if not line.startswith("./") and not os.path.exists(path) and os.path.exists(line):
            path = os.path.abspath(line)
        is_image = path.rpartition(".")[2].lower() in IMAGE_SUFFIXES
        (paths if is_image else strangers).append(os.path.normpath(path).replace(os.sep, "/"))
    if strangers:
        logger.warning(f"{source}: {len(strangers)} lines are left out, they name no image: {', '.join(strangers[:3])}")
    return paths


# --- 2. The scan -----------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Result for consecutive images: status (n,) uint8, shapes (n, 2) int32, counts (n,) int64, rows (M, 5) float32."""

    status: np.ndarray
    shapes: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    problems: list[Problem]


def _scan_chunk(paths: Sequence[str], stats: np.ndarray, num_classes: int) -> _Part:
    """Check some images and their label files; stats (n, 4) int64 as from ``_file_stats``."""
    status = np.full(len(paths), LABELLED, np.uint8)
    shapes = np.zeros((len(paths), 2), np.int32)
    names = [label_path(path) for path in paths]
    problems: list[Problem] = []
    reader = RowReader(problems)
    for i, (path, name, label_size) in enumerate(zip(paths, names, stats[:, 2].tolist(), strict=True)):
        try:
            shapes[i] = _checked_size(path)
            text = b"" if label_size in (0, NO_FILE) else _read(name)
        except ImageError as error:
            status[i] = CORRUPT
            problems.append(Problem(path, 0, str(error).removeprefix(f"{path}: "), "image left out"))
        except OSError as error:
            status[i] = CORRUPT
            problems.append(Problem(name, 0, error.strerror or str(error), "label file unreadable, image left out"))
        else:
            if not reader.read(i, name, text):
                status[i] = MISSING if label_size == NO_FILE else EMPTY
    rows = check_rows(reader.rows(), names, num_classes, problems)
    counts = np.bincount(rows.image, minlength=len(paths))
    return _Part(status, shapes, counts, rows.box.astype(np.float32), problems)


def _read(file: str) -> bytes:
    with open(file, "rb", buffering=0) as opened:  # label files are short: a buffer costs more than it saves
        return opened.readall()


def _checked_size(path: str) -> tuple[int, int]:
    """Size of an image that is usable for training, else ImageError."""
    height, width = image_size(path)
    if min(height, width) < MIN_SIDE:
        raise ImageError(f"{path}: {width} x {height} pixels, less than {MIN_SIDE} on a side")
    if height * width > MAX_PIXELS:
        raise ImageError(f"{path}: {width} x {height} pixels, more than {MAX_PIXELS} in all")
    return height, width


def _scan(paths: list[str], stats: np.ndarray, num_classes: int, split: str) -> _Part:
    """Scan all images on all cores; the result does not depend on how many there are."""
    starts = range(0, len(paths), CHUNK)

    def work(start: int) -> _Part:
        return _scan_chunk(paths[start : start + CHUNK], stats[start : start + CHUNK], num_classes)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts: dict[int, _Part] = {}
    with tqdm(total=len(paths), desc=f"Scanning {split}", unit="images", delay=1, disable=None) as bar:
        for start, part in _parallel(work, list(starts), min(cores, len(starts) // 2)):
            parts[start] = part
            bar.update(len(part.status))
    ordered = [parts[start] for start in starts]
    status, shapes, counts, rows = (np.concatenate(columns) for columns in list(zip(*ordered, strict=True))[:4])
    return _Part(status, shapes, counts, rows, sorted(problem for part in ordered for problem in part.problems))


def _parallel(work: Callable[[int], _Part], items: list[int], workers: int) -> Iterator[tuple[int, _Part]]:
    """Yield (item, work(item)) in any order, from forked processes on Linux, from threads where fork is not safe."""
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    if sys.platform != "linux":
        with ThreadPoolExecutor(workers) as pool:
            yield from zip(items, pool.map(work, items), strict=True)
        return
    context = get_context("fork")
    readers: list[connection.Connection] = []
    processes = []
    try:
        for k in range(workers):
            reader, writer = context.Pipe(duplex=False)
            readers.append(reader)
            process = context.Process(
                target=_forked, args=(work, items[k::workers], writer, list(readers)), daemon=True
            )
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
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


# --- 3. The index ----------------------------------------------------------------------------------------------------


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
    """

    def __init__(self, arrays: dict[str, np.ndarray], meta: dict[str, Any], file: Path | None = None) -> None:
        self._arrays, self._meta, self.file = arrays, meta, file
        self._names, self._name_offsets = arrays["names"], arrays["name_offsets"]
        self.shapes, self.offsets, self.rows = arrays["shapes"], arrays["offsets"], arrays["rows"]
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


def build_index(
    sources: Sequence[Path],
    num_classes: int,
    *,
    split: str = "train",
    cache: bool = True,
    logger: logging.Logger | None = None,
) -> LabelIndex:
    """Index of a split, from its cache file if images, labels and rules are the same as when that was written.

    Args:
        sources: folders and ``.txt`` lists.
        num_classes: classes named in the data YAML.
        split: its name, for messages; ``train`` must have labels.
        cache: read and write the cache file.
        logger: where the report goes.

    Raises:
        UserError: no images, class ids outside the names, or a train split without any label.
    """
    logger = logger or logging.getLogger("lockstep")
    paths = list_images(sources)
    stats = _file_stats(paths)
    names = [os.fsencode(path) for path in paths]
    key = content_digest(b"\n".join(names), stats.tobytes(), str((num_classes, RULES_VERSION)).encode())
    places = json.dumps([os.path.abspath(source) for source in sources])
    name = f"{sources[0].stem}-{content_digest(places.encode(), str(num_classes).encode())[:12]}"
    files = [folder / f"{name}.index" for folder in cache_folders(paths[0])] if cache else []
    index = next((found for file in files if (found := open_index(file, key, logger))), None)
    if index is None:
        part = _scan(paths, stats, num_classes, split)
        _refuse_bad_classes(part.problems, num_classes)
        index = _pack(names, stats, part, {"key": key, "name": name, "num_classes": num_classes})
        index = _store(index, files, logger) or index
    _tell(index.report, split, logger)
    if not index.num_instances and split == "train":
        raise UserError(
            f"no labels in {', '.join(map(str, sources))}: training needs at least one; the label file of the first "
            f"image would be {label_path(paths[0])}"
        )
    return index


def _file_stats(paths: list[str]) -> np.ndarray:
    """(n, 4) int64 [image size, image mtime, label size, label mtime]; bytes, nanoseconds; sizes < 0: no such file."""
    stats = np.empty((len(paths), 4), np.int64)
    for i, path in enumerate(paths):
        stats[i] = *_stat(path), *_stat(label_path(path))
    return stats


def _stat(path: str) -> tuple[int, int]:
    try:
        result = os.stat(path)
    except FileNotFoundError:
        return NO_FILE, 0
    except OSError:
        return NO_ACCESS, 0
    return result.st_size, result.st_mtime_ns


def content_digest(*parts: bytes) -> str:
    """SHA-256 over the parts and their lengths, as hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _refuse_bad_classes(problems: list[Problem], num_classes: int) -> None:
    bad = [problem for problem in problems if problem.rule == BAD_CLASS]
    if bad:
        files = sorted({problem.file for problem in bad})
        shown = "\n".join(f"- {problem.file}:{problem.line}: {problem.value}" for problem in bad[:20])
        more = f"\n... and {len(bad) - 20} more rows" if len(bad) > 20 else ""
        raise UserError(
            f"class ids in {len(files)} label files are not whole numbers from 0 to {num_classes - 1}; correct them or "
            f"the names in the data YAML\n{shown}{more}"
        )


def _pack(names: list[bytes], stats: np.ndarray, part: _Part, meta: dict[str, Any]) -> LabelIndex:
    """Index in memory from a scan; images left out by the scan are not in it."""
    kept = part.status != CORRUPT
    names = [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]
    counts = np.bincount(part.status, minlength=4).tolist()
    report = asdict(ScanReport(counts[LABELLED], counts[MISSING], counts[EMPTY], counts[CORRUPT], part.problems))
    arrays = {
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_offsets": np.cumsum([0, *map(len, names)], dtype=np.int64),
        "shapes": part.shapes[kept],
        "offsets": np.concatenate(([0], np.cumsum(part.counts[kept]))).astype(np.int64),
        "rows": part.rows,
        "report": np.frombuffer(json.dumps(report).encode(), np.uint8),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return LabelIndex(arrays, {**meta, "images_digest": content_digest(b"\n".join(names), stats[kept, :2].tobytes())})


def _tell(report: ScanReport, split: str, logger: logging.Logger) -> None:
    """Log the report: one line, then problems, then a warning where something is likely wrong with the whole split."""
    logger.info(f"{split}: {report.summary()}")
    for line in report.details(10) if report.problems else []:
        logger.warning(line)
    if report.missing > report.total / 2:
        logger.warning(
            f"{report.missing} of {report.total} images in {split} HAVE NO LABEL FILE and count as background; labels "
            "are looked for in the folder 'labels' beside the folder 'images', one .txt per image"
        )


# --- 4. The cache file: magic, crc32 of the header, its length, a JSON header, then the arrays, each 64-byte aligned --


def cache_folders(image: str) -> list[Path]:
    """Where caches of a data set go, best first: beside its images or labels folder, else in the user's cache."""
    head, found, _ = image.rpartition("/images/")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(head or "/" if found else os.path.dirname(image)) / ".lockstep", Path(user) / "lockstep"]


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[int]:
    """Descriptor of a new file that takes the place of ``file`` if the block succeeds, and is removed if it fails.

    The temporary name is unique, so several processes may do this at once and the last one wins. What a killed process
    left behind is removed an hour later.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for old in file.parent.glob(f"{file.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 3600:
                old.unlink()
    descriptor, temporary = tempfile.mkstemp(".tmp", f"{file.name}.", file.parent)
    try:
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

    A damaged file is None too, with a warning. Without a logger the arrays' checksum is not computed: for another
    process of the same run.
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
        if logger is not None and zlib.crc32(body.data) != header["crc"]:
            raise ValueError("damaged arrays")
    except (ValueError, TypeError, KeyError, struct.error):
        if logger is not None:
            logger.warning(f"the label index {file} is damaged and is built again")
        return None
    arrays = {name: np.ndarray(shape, kind, data, start + at) for name, (kind, shape, at) in header["arrays"].items()}
    return LabelIndex(arrays, header, file)


def _reopen(file: Path, key: str) -> LabelIndex:
    """Map the file that another process of this run has mapped; how an index is unpickled."""
    index = open_index(file, key)
    if index is None:
        raise RuntimeError(f"the label index {file} was replaced while it was in use; start the run again")
    return index


def open_split(data: DataConfig, split: str) -> LabelIndex:
    """Return the labels of one split, drawing the data set first if it is the built-in one.

    Raises:
        UserError: the split is not there, has no image or no usable labels.
    """
    if data.generator is not None:
        ensure_shapes(data.root)
    check_split_paths(data, [split])
    return build_index(getattr(data, split), data.num_classes, split=split)
