"""The built-in data set: what the numbers say it is, the same everywhere, whole or absent."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.common import PROJECT
from utils.config.data_yaml import load_data
from utils.core.errors import UserError
from utils.data import shapes
from utils.data.shape_painting import paint
from utils.data.shape_scenes import OUTLINES, PIXEL, Scene, label_lines, make_scene
from utils.data.shapes import COUNTS, draw_sample, draw_set, ensure_shapes, is_complete, sample_rng

SMALL = {"train": 24, "val": 5, "test": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole set, drawn once."""
    folder = tmp_path_factory.mktemp("datasets") / "shapes"
    ensure_shapes(folder)
    return folder


def labels_of(root: Path, split: str) -> list[np.ndarray]:
    """(L, 5) [class, cx, cy, w, h] cxcywhn of each image of a split, in order."""
    files = sorted((root / "labels" / split).glob("*.txt"))
    return [np.array([line.split() for line in f.read_text().splitlines()], float).reshape(-1, 5) for f in files]


def sizes_of(root: Path, split: str) -> np.ndarray:
    """(n, 2) [width, height] of each image of a split, in order."""
    return np.array([read(f).shape[1::-1] for f in sorted((root / "images" / split).glob("*.jpg"))])


def read(path: Path) -> np.ndarray:
    image = cv2.imread(str(path))
    assert image is not None
    return image


def pixels_of(labels: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Boxes (L, 4) xyxy, pixels."""
    center, side = labels[:, 1:3] * size, labels[:, 3:5] * size
    return np.concatenate([center - side / 2, center + side / 2], 1)


def iou_matrix(boxes: np.ndarray) -> np.ndarray:
    """Pairwise IoU with a zero diagonal, straight from the definition."""
    result = np.zeros((len(boxes), len(boxes)))
    for i, a in enumerate(boxes):
        for j, b in enumerate(boxes):
            w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            if i != j and w > 0 and h > 0:
                union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - w * h
                result[i, j] = w * h / union
    return result


def inside_mask(contours: list[np.ndarray], height: int, width: int, fine: int) -> np.ndarray:
    """Even-odd rule at ``fine`` x ``fine`` points per pixel, edge by edge: (H * fine, W * fine) bool."""
    x = (np.arange(width * fine) + 0.5) / fine
    y = (np.arange(height * fine) + 0.5) / fine
    mask = np.zeros((len(y), len(x)), bool)
    for points in contours:
        corners = points / PIXEL
        for (x1, y1), (x2, y2) in zip(corners, np.roll(corners, -1, 0), strict=True):
            rows = np.flatnonzero((y1 > y) != (y2 > y))
            crossing = x1 + (y[rows] - y1) * (x2 - x1) / (y2 - y1) if len(rows) else np.zeros(0)
            mask[rows] ^= x < crossing[:, None]
    return mask


def hull(mask: np.ndarray) -> np.ndarray:
    """(4,) xyxy of what is set."""
    ys, xs = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return np.array([xs[0], ys[0], xs[-1] + 1, ys[-1] + 1], float)


def digest(folder: Path) -> dict[str, str]:
    files = (f for f in sorted(folder.rglob("*")) if f.is_file())
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


# What is in it


def test_splits_have_an_image_and_a_label_file_each(root: Path) -> None:
    for split, count in COUNTS.items():
        images = sorted(f.stem for f in (root / "images" / split).iterdir())
        labels = sorted(f.stem for f in (root / "labels" / split).iterdir())
        assert images == labels
        assert len(images) == count
    assert COUNTS["train"] >= 400
    assert COUNTS["val"] >= 90
    assert COUNTS["test"] >= 50
    assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) < 16e6


def test_images_are_of_several_sizes_with_a_longer_side_of_320(root: Path) -> None:
    sizes = np.concatenate([sizes_of(root, split) for split in COUNTS])
    assert (sizes.max(1) == 320).all()
    assert sizes.min() >= 240
    assert len(np.unique(sizes, axis=0)) > 50
    landscape = np.mean(sizes[:, 0] >= sizes[:, 1])
    assert 0.5 < landscape < 0.8


@pytest.mark.parametrize("split", COUNTS)
def test_labels_keep_their_promises(root: Path, split: str) -> None:
    labels, sizes = labels_of(root, split), sizes_of(root, split)
    boxes = [pixels_of(rows, size) for rows, size in zip(labels, sizes, strict=True)]
    classes = np.concatenate([rows[:, 0] for rows in labels])
    assert 0.03 <= np.mean([len(rows) == 0 for rows in labels]) <= 0.07
    assert max(len(rows) for rows in labels) > 1
    share = np.bincount(classes.astype(int), minlength=len(OUTLINES)) / len(classes)
    assert len(share) == len(OUTLINES) >= 6
    assert share.min() > 0.5 / len(OUTLINES)
    sides = np.concatenate([rows[:, 2:] - rows[:, :2] for rows in boxes])
    assert sides.min() >= 8 - 0.01
    assert sides.max() <= 300 + 0.01
    assert np.mean((sides.max(1) >= 24) & (sides.max(1) <= 160)) > 0.8
    assert np.mean(sides.max(1) < 24) > 0.01
    assert np.mean(sides.max(1) > 160) > 0.01
    overlapping = np.concatenate([iou_matrix(rows).max(1, initial=0) >= 0.2 for rows in boxes])
    assert overlapping.mean() >= 0.2
    assert max(iou_matrix(rows).max(initial=0) for rows in boxes) < 0.6  # NMS must be able to keep both
    for rows, size in zip(boxes, sizes, strict=True):
        assert (rows > -0.01).all()
        assert (rows < np.tile(size, 2) + 0.01).all()


def test_label_is_the_hull_of_the_shape_inside_the_image(root: Path) -> None:
    errors, cut_off = [], 0
    for index in range(12):
        image, scene = draw_sample("train", index)
        size = np.array(image.shape[1::-1])
        boxes = pixels_of(labels_of(root, "train")[index], size)
        assert len(boxes) == len(scene.shapes)
        for box, shape in zip(boxes, scene.shapes, strict=True):
            errors.append(np.abs(box - hull(inside_mask(shape.contours, scene.height, scene.width, 8)) / 8))
            if (box[:2] < 0.01).any() or (box[2:] > size - 0.01).any():
                cut_off += 1
            else:
                corners = shape.contours[0] / PIXEL
                assert np.abs(box - [*corners.min(0), *corners.max(0)]).max() <= 0.3
    assert cut_off >= 3
    assert np.median(errors) <= 0.25
    assert np.max(errors) <= 0.75  # sharp tips slip between the points of the test's mask


def test_label_is_where_the_image_changes() -> None:
    """End to end: the pixels that differ with and without the topmost shape."""
    errors = []
    for index in range(40):
        rng = sample_rng("val", index)
        scene = make_scene(rng)
        state = rng.bit_generator.state
        image = paint(scene, rng).astype(int)
        rng.bit_generator.state = state
        without = paint(Scene(scene.height, scene.width, scene.shapes[:-1]), rng).astype(int)
        errors.append(np.abs(hull(np.abs(image - without).max(2) > 2) - scene.shapes[-1].box))
    assert np.median(errors) <= 0.5
    assert np.max(errors) <= 2.0  # a thin tip of little contrast


def test_at_least_two_fifths_of_each_shape_can_be_seen() -> None:
    for index in range(30):
        rng = sample_rng("train", index)
        scene = make_scene(rng)
        owner = np.full((scene.height * 2, scene.width * 2), -1)
        for i, shape in enumerate(scene.shapes):
            owner[inside_mask(shape.contours, scene.height, scene.width, 2)] = i
        for i, shape in enumerate(scene.shapes):
            low, high = shape.contours[0].min(0) // PIXEL, -(-shape.contours[0].max(0) // PIXEL)
            moved = [points - low * PIXEL for points in shape.contours]
            whole = inside_mask(moved, int(high[1] - low[1]), int(high[0] - low[0]), 2).sum()
            assert (owner == i).sum() / whole >= 0.40


def test_yaml_names_the_classes_and_the_splits() -> None:
    data = load_data("shapes.yaml")
    assert data.names == list(OUTLINES)
    assert data.generator == "shapes"
    assert data.root == PROJECT / "datasets" / "shapes"
    assert [data.train, data.val, data.test] == [[data.root / "images" / split] for split in COUNTS]


# The same everywhere


def test_drawing_does_not_depend_on_threads_or_process(tmp_path: Path) -> None:
    draw_set(tmp_path / "one", SMALL, num_threads=1)
    draw_set(tmp_path / "two", SMALL, num_threads=2)
    environment = {"PYTHONHASHSEED": "7", "OPENCV_IPP": "disabled"}
    assert start_python("draw_set(root, SMALL, 3)", tmp_path / "other", environment).wait() == 0
    expected = digest(tmp_path / "one")
    assert len(expected) == 2 * sum(SMALL.values()) + 1
    assert digest(tmp_path / "two") == expected
    assert digest(tmp_path / "other") == expected


def test_images_and_splits_have_streams_of_their_own() -> None:
    firsts = {sample_rng(split, index).random() for split in COUNTS for index in range(200)}
    assert len(firsts) == 3 * 200


def test_a_sample_does_not_depend_on_what_was_drawn_before(root: Path) -> None:
    image, scene = draw_sample("val", 7)
    assert label_lines(scene) == (root / "labels/val/0007.txt").read_text()
    decoded = read(root / "images/val/0007.jpg")
    assert np.abs(decoded.astype(int) - image).mean() < 6


def test_geometry_of_this_version() -> None:
    """A change of the labels needs a new VERSION and a new digest here."""
    text = "".join(label_lines(draw_sample("train", index)[1]) for index in range(30))
    assert (shapes.VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (4, "72f96f4b9128f21d")


# Whole or absent


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set as large as this version makes them."""
    monkeypatch.setattr(shapes, "COUNTS", SMALL)
    folder = tmp_path_factory.mktemp("small") / "shapes"
    ensure_shapes(folder)
    return folder


def start_python(code: str, root: Path, environment: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """A process of its own that runs ``code`` with small sets."""
    head = "import sys; from pathlib import Path; from utils.data import shapes; from utils.data.shapes import *; "
    head += f"SMALL = {SMALL}; "
    run = [sys.executable, "-c", f"{head}shapes.COUNTS = SMALL; root = Path(sys.argv[1]); {code}", str(root)]
    return subprocess.Popen(run, cwd=PROJECT, env={**os.environ, **(environment or {})})


def test_killed_halfway_leaves_nothing_that_looks_complete(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "shapes"
    process = start_python("shapes.COUNTS = {**SMALL, 'train': 5000}; ensure_shapes(root)", target)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".shapes.*/images/train/0010.jpg")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not target.exists()
    (leftover,) = tmp_path.iterdir()
    assert not is_complete(leftover)
    old = time.time() - 7200
    os.utime(leftover, (old, old))
    ensure_shapes(target)
    assert is_complete(target)
    assert digest(target) == digest(small)
    assert [f.name for f in tmp_path.iterdir()] == ["shapes"]  # the leftover is gone


@pytest.mark.parametrize("older", [False, True])
def test_several_processes_at_once(tmp_path: Path, small: Path, older: bool) -> None:
    target = tmp_path / "new" / "shapes"
    if older:
        draw_set(target, {"train": 2})
        (target / shapes.MARKER).write_text(json.dumps({"generator": "shapes", "version": 0}))
    processes = [start_python("ensure_shapes(root)", target) for _ in range(2)]
    half_drawn = False
    while any(p.poll() is None for p in processes):
        half_drawn |= not older and target.exists() and not is_complete(target)
        time.sleep(0.002)
    assert [p.returncode for p in processes] == [0, 0]
    assert not half_drawn
    assert digest(target) == digest(small)
    assert [f.name for f in target.parent.iterdir()] == ["shapes"]


def test_a_complete_set_is_left_alone(small: Path) -> None:
    before = {f: f.stat().st_mtime_ns for f in small.rglob("*")}
    ensure_shapes(small)
    assert {f: f.stat().st_mtime_ns for f in small.rglob("*")} == before


@pytest.mark.parametrize("fault", ["version", "missing image", "missing folder"])
def test_another_version_or_a_damaged_set_is_redrawn(tmp_path: Path, small: Path, fault: str) -> None:
    target = tmp_path / "shapes"
    shutil.copytree(small, target)
    if fault == "version":
        (target / shapes.MARKER).write_text(json.dumps({"generator": "shapes", "version": shapes.VERSION - 1}))
        (target / "images/train/9999.jpg").write_bytes(b"from an older version")
    elif fault == "missing image":
        (target / "images/val/0003.jpg").unlink()
    else:
        shutil.rmtree(target / "labels/test")
    assert not is_complete(target)
    ensure_shapes(target)
    assert digest(target) == digest(small)
    assert [f.name for f in tmp_path.iterdir()] == ["shapes"]


def test_a_set_that_appears_meanwhile_is_kept(tmp_path: Path, small: Path) -> None:
    target, scratch = tmp_path / "shapes", tmp_path / ".shapes.mine.tmp"
    shutil.copytree(small, target)
    inode = target.stat().st_ino
    draw_set(scratch, {"train": 1})
    shapes._install(scratch, target)
    assert target.stat().st_ino == inode
    assert not scratch.exists()


@pytest.mark.parametrize("name", ["mine.txt", shapes.MARKER])
def test_a_users_own_folder_is_never_touched(tmp_path: Path, name: str) -> None:
    target = tmp_path / "shapes"
    target.mkdir()
    (target / name).write_text("precious")
    with pytest.raises(UserError, match=r"shapes is not the built-in data set.*path"):
        ensure_shapes(target)
    assert digest(tmp_path) == {f"shapes/{name}": hashlib.sha256(b"precious").hexdigest()}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't draw the shapes into .*file/shapes"):
        ensure_shapes(tmp_path / "file" / "shapes")


def test_default_place_is_the_project_else_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROOT", tmp_path)
    assert shapes.shapes_root() == tmp_path / "datasets" / "shapes"
    (tmp_path / "cache").mkdir()
    # Root may write anywhere: a mode would not do.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_relative_to(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert shapes.shapes_root() == tmp_path / "cache" / "lockstep" / "shapes"
