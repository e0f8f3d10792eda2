"""The built-in data set: textured shapes on cluttered backgrounds, drawn on this machine the first time they are used.

Every image has its own counter-based random stream (key = (SEED, split), image index in the highest counter word), and
geometry and colors are integers from the moment they are chosen, so the set does not depend on the number of threads,
the operating system or the instruction set; the same OpenCV gives the same bytes.

    python -m utils.data.shapes [FOLDER]        draw it now
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from utils.config.yaml_files import ROOT
from utils.core.caches import cache_folder, may_be_made
from utils.core.errors import UserError
from utils.core.logging import get_logger
from utils.core.whole_files import temporary_path
from utils.data.shape_painting import paint
from utils.data.shape_scenes import Scene, label_lines, make_scene

# Any change of what is drawn, in scenes and painting too, needs a new version: older sets are then redrawn.
VERSION = 4
SEED = 20
COUNTS = {"train": 720, "val": 100, "test": 60}  # images: how much there is to learn from
EMPTY_EVERY = 20  # every 20th image has no object
JPEG_QUALITY = 92
MARKER = "shapes.json"  # written last into a set; a folder without it is not ours


def sample_rng(split: str, index: int) -> np.random.Generator:
    """Random stream of one image; streams of different images never overlap."""
    key = np.array([SEED, list(COUNTS).index(split)], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))


def shapes_root() -> Path:
    """Where the set lives by default: ``datasets/shapes`` of the project, else (read-only) the user's cache folder."""
    local = ROOT / "datasets" / "shapes"
    if is_complete(local) or may_be_made(local):
        return local
    return cache_folder() / "shapes"


def is_complete(root: Path) -> bool:
    """Whether ``root`` holds the whole set as this version draws it."""
    if _version(root) != VERSION:
        return False
    folders = [(root / kind / split, count) for kind in ("images", "labels") for split, count in COUNTS.items()]
    try:
        return all(len(os.listdir(folder)) >= count for folder, count in folders)
    except FileNotFoundError:
        return False  # somebody removed part of it


def ensure_shapes(root: Path, logger: logging.Logger | None = None) -> None:
    """Draw the set into ``root`` unless it is there.

    The folder appears whole or not at all, also when the process is killed or several draw at once. A set of another
    version, or one with files missing, is replaced.

    Args:
        root: the data set's folder; what it holds belongs to this module.
        logger: says one line before drawing, and where it does there is a progress bar; by default the project's.

    Raises:
        UserError: ``root`` exists and holds something else, or can't be written.
    """
    root = Path(root).resolve()
    if is_complete(root):
        return
    if _is_foreign(root):
        raise UserError(f"{root} is not the built-in data set: move it away, or change path in the data YAML")
    logger = logger or logging.getLogger("lockstep")
    logger.info(f"Drawing the built-in shapes data set ({sum(COUNTS.values())} images, once) into {root}")
    scratch = temporary_path(root)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        draw_set(scratch, COUNTS, progress=logger.isEnabledFor(logging.INFO))
        _install(scratch, root)
    except OSError as error:
        raise UserError(f"can't draw the shapes into {root} ({error}); path in the data YAML names another") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def draw_set(folder: Path, counts: dict[str, int], num_threads: int | None = None, progress: bool = False) -> None:
    """Draw images, labels and the marker into a new folder.

    Args:
        folder: must not exist.
        counts: images per split.
        num_threads: drawing at once; by default one per core, 8 at most. The files do not depend on it.
        progress: show a bar.
    """
    for kind in ("images", "labels"):
        for split in counts:
            (folder / kind / split).mkdir(parents=True)
    work = [(folder, split, index) for split, count in counts.items() for index in range(count)]
    cv2_threads = cv2.getNumThreads()
    cv2.setNumThreads(1)  # images side by side are faster than OpenCV's threads inside of one
    pool = ThreadPoolExecutor(num_threads or min(8, os.cpu_count() or 1))
    try:
        done = pool.map(_write_sample, work)
        for _ in tqdm(done, "shapes", len(work), unit="image", disable=None if progress else True, leave=False):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
        cv2.setNumThreads(cv2_threads)
    (folder / MARKER).write_text(json.dumps({"generator": "shapes", "version": VERSION}) + "\n", encoding="utf-8")


def draw_sample(split: str, index: int) -> tuple[np.ndarray, Scene]:
    """Image (H, W, 3) uint8 BGR and scene number ``index`` of a split."""
    rng = sample_rng(split, index)
    scene = make_scene(rng, empty=index % EMPTY_EVERY == EMPTY_EVERY // 2)
    return paint(scene, rng), scene


def _write_sample(job: tuple[Path, str, int]) -> None:
    folder, split, index = job
    image, scene = draw_sample(split, index)
    _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY, cv2.IMWRITE_JPEG_OPTIMIZE, 1])
    (folder / "images" / split / f"{index:04d}.jpg").write_bytes(data.tobytes())
    (folder / "labels" / split / f"{index:04d}.txt").write_text(label_lines(scene), encoding="utf-8", newline="\n")


def _version(root: Path) -> int | None:
    """Version of the set in ``root``; None if it is not one of ours."""
    try:
        marker = json.loads((root / MARKER).read_text(encoding="utf-8"))
        return int(marker["version"]) if marker["generator"] == "shapes" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_foreign(root: Path) -> bool:
    """Whether ``root`` is somebody's: not absent, not empty and not a set of any version."""
    try:
        content = os.listdir(root)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return root.exists()  # else a folder above it is a file
    if MARKER not in content:
        return bool(content)
    return _version(root) is None and (root / MARKER).exists()  # else another process has just moved it


def _remove_leftovers(root: Path) -> None:
    """Remove what a killed process left; what is younger than an hour may still be in use."""
    for folder in root.parent.glob(f".{root.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - folder.stat().st_mtime > 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _install(scratch: Path, root: Path) -> None:
    """Give a finished folder its name, unless another process did so first; that one's set is the same."""
    while not is_complete(root):
        aside = temporary_path(root)
        try:
            root.rename(aside)  # an older version
        except FileNotFoundError:
            pass
        else:
            if is_complete(aside):  # another process was faster by a hair
                scratch = aside
            else:
                shutil.rmtree(aside, ignore_errors=True)
        try:
            scratch.rename(root)
            return
        except OSError:
            if not root.exists():
                raise
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    ensure_shapes(Path(sys.argv[1]) if len(sys.argv) > 1 else shapes_root(), get_logger())
