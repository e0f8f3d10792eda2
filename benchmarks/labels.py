"""What it costs to find, check and remember the labels of a data set.

python -m benchmarks.labels

The scan of a data set without a cache file is held against two bare processes that list the folder and read each image
and label file, nothing else. Reading the cache file is held against NumPy mapping as many bytes and a checksum of them.
A worker's own memory must not grow with the data set. Images are hard links to a few tiny ones, labels are files of
their own; all of it is in the page cache.
"""

import functools
import os
import tempfile
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from benchmarks.measuring import Options, Row, milliseconds, ratios, run_group, take_turns
from utils.core.errors import run_cli
from utils.core.logging import get_logger
from utils.data.forks import fork_context
from utils.data.index import LabelIndex, build_index, open_index
from utils.dist.place import ALONE

MANY, SOME, FEW = 100_000, 20_000, 1_000
SCAN_LIMIT, SCAN_SECONDS, READ_SECONDS, GROWTH_MB = 0.6, 15.0, 0.05, 2.0
LINKS = 10_000  # to one file: file systems have a limit
BOXES = 7  # of an image, as COCO has


def make_data(folder: Path, count: int) -> Path:
    """Make a data set and return its folder of images."""
    rng = np.random.default_rng(0)
    images, labels = folder / "images", folder / "labels"
    images.mkdir(parents=True)
    labels.mkdir()
    texts = []
    for _ in range(50):
        rows = np.column_stack(
            [rng.integers(0, 80, BOXES), rng.uniform(0.3, 0.6, (BOXES, 2)), rng.random((BOXES, 2)) / 2]
        )
        texts.append("".join(f"{int(row[0])} " + " ".join(f"{value:.6f}" for value in row[1:]) + "\n" for row in rows))
    source = images / "0.jpg"
    for i in tqdm(range(count), "files", leave=False, disable=None):
        if i % LINKS == 0:
            source = images / f"{i}.jpg"
            cv2.imwrite(str(source), rng.integers(0, 256, (48, 64, 3)).astype(np.uint8))
        else:
            os.link(source, images / f"{i}.jpg")
        (labels / f"{i}.txt").write_text(texts[i % len(texts)])
    return images


def scanned(images: Path, *, cache: bool = False) -> LabelIndex:
    """Find and check all labels anew; with a cache file keep them in it."""
    return build_index([images], 80, cache=cache, logger=get_logger(), env=ALONE)


def read_bare(paths: list[str]) -> None:
    """Read some images and their labels."""
    for path in paths:
        for file in (path, path.replace("/images/", "/labels/").replace(".jpg", ".txt")):
            descriptor = os.open(file, os.O_RDONLY)
            os.read(descriptor, 1 << 16)
            os.close(descriptor)


def listed_and_read(images: Path) -> None:
    """List a folder and read all of it, on two cores."""
    paths = [entry.path for entry in os.scandir(images)]
    context = fork_context()
    processes = [context.Process(target=read_bare, args=(paths[k::2],)) for k in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def own_memory(file: Path, key: str) -> float:
    """Return the MB that a process has to itself after it read all labels of an index file once."""
    reader, writer = fork_context().Pipe(duplex=False)
    process = fork_context().Process(target=_look_at_all, args=(file, key, writer))
    process.start()
    megabytes = reader.recv()
    process.join()
    return float(megabytes)


def _look_at_all(file: Path, key: str, answer: Connection) -> None:
    index = open_index(file, key)
    assert index is not None
    before = _private()
    total = 0.0
    for i in range(len(index)):
        total += float(index.labels(i).sum()) + len(index.path(i))
    answer.send(_private() - before)


def _private() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Swap:"))) / 1e3


def measure(options: Options) -> list[Row]:
    """Make data sets, scan them and read their indexes."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        some = make_data(folder / "some", SOME)
        taken = take_turns(
            {"scan": lambda: scanned(some), "bare": lambda: listed_and_read(some)}, options.rounds, name="scans"
        )
        per_image = f"{min(taken['scan']) / SOME * 1e6:.0f} us an image, bare {min(taken['bare']) / SOME * 1e6:.0f} us"
        scan = ratios(taken["bare"], taken["scan"])
        rows.append(Row("C6", "scan: listing and reading only / ours", scan, SCAN_LIMIT, note=per_image))

        many = make_data(folder / "many", MANY)
        start = time.perf_counter()
        index = scanned(many, cache=True)
        seconds = time.perf_counter() - start
        rows.append(Row("C6", "scan of 100,000 images, seconds", (seconds,), SCAN_SECONDS, at_least=False))
        file, key = index.file, index._meta["key"]
        assert file is not None, "the temporary folder cannot be written"
        flat = folder / "flat.npy"
        np.save(flat, np.fromfile(file, np.uint8))
        reads = take_turns(
            {
                "read": lambda: open_index(file, key, get_logger()),
                "bare": lambda: zlib.crc32(np.load(flat, mmap_mode="r").data),
            },
            options.rounds,
            repeat=5,
            name="reads",
        )
        said = milliseconds(reads)
        rows.append(
            Row(
                "C7",
                "index of 100,000 images: mapped and summed / ours",
                ratios(reads["bare"], reads["read"]),
                note=said,
            )
        )
        rows.append(Row("C7", "index of 100,000 images, seconds", tuple(reads["read"]), READ_SECONDS, at_least=False))
        if Path("/proc/self/smaps_rollup").exists():
            few = scanned(make_data(folder / "few", FEW), cache=True)
            assert few.file is not None
            growth = own_memory(file, key) - own_memory(few.file, few._meta["key"])
            rows.append(
                Row("C7", "own memory of a reader, 100,000 - 1,000 images, MB", (growth,), GROWTH_MB, at_least=False)
            )
    return rows


if __name__ == "__main__":
    run_cli(functools.partial(run_group, measure, __doc__))
