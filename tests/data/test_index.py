import gc
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.common import PROJECT, SHARED, as_nobody, needs_root, needs_shared, wait_until
from utils.config.data_yaml import DataConfig
from utils.core.errors import UserError
from utils.data import index as index_module
from utils.data import scan
from utils.data.index import LabelIndex, build_index
from utils.data.labels import label_path
from utils.data.splits import open_splits

FORK = multiprocessing.get_context("fork") if sys.platform == "linux" else None
needs_fork = pytest.mark.skipif(FORK is None, reason="processes are forked on Linux only")
LOGGER = logging.getLogger("lockstep")
GOOD = "0 0.5 0.5 0.2 0.3\n"


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("user_cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "lockstep"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, logger="lockstep")
    return caplog


def write_image(path: Path, height: int = 24, width: int = 32) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((height, width, 3), 90, np.uint8))
    return path


def make_split(root: Path, labels: list[str | None], split: str = "train") -> Path:
    """One image per entry, all alike, with that text as its label file (None: no file); returns the images folder."""
    images = root / "images" / split
    picture = write_image(images / "00000.jpg").read_bytes()
    (root / "labels" / split).mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(labels):
        (images / f"{i:05d}.jpg").write_bytes(picture)
        if text is not None:
            (root / "labels" / split / f"{i:05d}.txt").write_bytes(text.encode())
    return images


# --- rules -----------------------------------------------------------------------------------------------------------

CASES = {
    # text: (rows kept, [(line, value, part of the rule)])
    "": ([], []),
    "\n  \n": ([], []),
    GOOD: ([[0, 0.5, 0.5, 0.2, 0.3]], []),
    "\ufeff1\t0.5 0.5  1 1\r\n\r\n0 .25 2.5e-1 0.1 0.1": ([[1, 0.5, 0.5, 1, 1], [0, 0.25, 0.25, 0.1, 0.1]], []),
    "0 0.5 0.5 0.2\n": ([], [(1, "4 columns", "neither 5 columns")]),
    "0 0.5 0.5 0.2 0.2 0.9\n": ([], [(1, "6 columns", "neither 5 columns")]),
    "class x y w h\n" + GOOD: ([[0, 0.5, 0.5, 0.2, 0.3]], [(1, "class", "not a number")]),
    "0 0,5 0.5 0.2 0.3\n": ([], [(1, "0,5", "not a number")]),
    "0 nan 0.5 0.2 0.3\n": ([], [(1, "nan", "finite")]),
    "0 inf 0.5 0.2 0.3\n": ([], [(1, "inf", "finite")]),
    GOOD + "\n1 320 240 100 80\n": ([[0, 0.5, 0.5, 0.2, 0.3]], [(3, "320", "by more than 0.01")]),
    "0 0.5 -0.02 0.2 0.3\n": ([], [(1, "-0.02", "by more than 0.01")]),
    "0 1.0021 0.5 0.2 0.2\n": ([[0, 0.95, 0.5, 0.1, 0.2]], [(1, "1.0021", "slightly"), (1, "1.1", "reaches out")]),
    "0 0.5 0.5 0 0.3\n": ([], [(1, "0", "without width or height")]),
    "0 0.5 0.5 0.2 -0.005\n": ([], [(1, "-0.005", "slightly"), (1, "0", "without width")]),
    "0 0.1 0.5 0.4 0.2\n": ([[0, 0.15, 0.5, 0.3, 0.2]], [(1, "-0.1", "reaches out of the image, clipped")]),
    "0 0.500001 0.5 1.000000 0.2\n": ([[0, 0.500001, 0.5, 1, 0.2]], []),  # rounding in the sixth decimal is no finding
    GOOD * 3: ([[0, 0.5, 0.5, 0.2, 0.3]], [(2, "0", "repeated"), (3, "0", "repeated")]),
    "1 0.1 0.2 0.5 0.2 0.3 0.8\n" + GOOD: ([[1, 0.3, 0.5, 0.4, 0.6], [0, 0.5, 0.5, 0.2, 0.3]], []),
    "1 0.1 0.2 1.005 0.2 0.3 0.8 0.2 0.5\n": ([[1, 0.55, 0.5, 0.9, 0.6]], [(1, "1.005", "slightly")]),
    "1 0.1 0.2 1.0371 0.2 0.3 0.8\n": ([], [(1, "1.0371", "by more than 0.01")]),
    "1 0.1 0.2 0.5 0.2 0.3 0.2\n": ([], [(1, "0", "without width or height")]),
    "1 0.1 0.2 0.5 0.2 0.3 0.8 0.9\n": ([], [(1, "8 columns", "neither 5 columns")]),
}


@pytest.mark.parametrize("text", CASES)
def test_rules(tmp_path: Path, text: str) -> None:
    """Row by row, with file, line and value (yolov5#2785, #4798, PR #5210)."""
    images = make_split(tmp_path, ["1 0.3 0.3 0.1 0.1", text, "0 0.4 0.4 0.1 0.1"])
    index = build_index([images], 2, cache=False)
    want, problems = CASES[text]
    np.testing.assert_allclose(index.labels(1), np.reshape(want, (-1, 5)).astype(np.float32), atol=1e-7)
    np.testing.assert_allclose(
        index.labels(0), np.array([[1, 0.3, 0.3, 0.1, 0.1]], np.float32)
    )  # the neighbors are untouched
    np.testing.assert_allclose(index.labels(2), np.array([[0, 0.4, 0.4, 0.1, 0.1]], np.float32))
    found = index.report.problems
    assert [(p.line, p.value) for p in found] == [(line, value) for line, value, _ in problems]
    for problem, (_, _, part) in zip(found, problems, strict=True):
        assert problem.file == f"{tmp_path}/labels/train/00001.txt"
        assert part in problem.rule
    assert index.report.empty == (not text.strip())
    assert (images.parent.parent / "labels/train/00001.txt").read_bytes() == text.encode()


@pytest.mark.parametrize("split", ["train", "val"])
def test_bad_classes_are_one_error(tmp_path: Path, split: str) -> None:
    """All files at once, in every split (ultralytics PR #26207 is one of many late index errors)."""
    images = make_split(tmp_path, ["2 .5 .5 .1 .1", GOOD, GOOD + "0.5 .5 .5 .1 .1\n-1 .5 .5 .1 .1"], split)
    with pytest.raises(UserError, match=r"from 0 to 1; correct them or the names in the data YAML") as caught:
        build_index([images], 2, split=split)
    text = str(caught.value)
    said = "class id outside the names of the data YAML"
    for part in (
        f"00000.txt:1: {said} (2)",
        f"00002.txt:2: {said} (0.5)",
        f"00002.txt:3: {said} (-1)",
        "2 label files",
    ):
        assert part in text
    assert "00001.txt" not in text
    assert not (tmp_path / ".lockstep").exists()


def test_bad_images_are_left_out_and_named(tmp_path: Path) -> None:
    images = make_split(tmp_path, [GOOD] * 6)
    data = (images / "00000.jpg").read_bytes()
    (images / "00001.jpg").write_bytes(b"")
    (images / "00002.jpg").write_bytes(data[:-9])
    write_image(images / "00003.jpg", 9, 50)
    huge = bytearray(write_image(tmp_path / "huge.png").read_bytes())
    huge[16:24] = struct.pack(">II", 20000, 20000)
    huge[29:33] = struct.pack(">I", zlib.crc32(huge[12:29]))
    (images / "00004.png").write_bytes(huge)
    (images / "00004.jpg").unlink()
    before = {path: path.read_bytes() for path in images.iterdir()}
    index = build_index([images], 1)
    assert [Path(index.path(i)).name for i in range(index.n)] == ["00000.jpg", "00005.jpg"]
    assert index.shapes.tolist() == [[24, 32], [24, 32]]
    assert index.num_instances == 2
    report = index.report
    assert (report.found, report.corrupt, report.total) == (2, 4, 6)
    assert [Path(problem.file).stem for problem in report.problems] == ["00001", "00002", "00003", "00004"]
    for part, problem in zip(
        ("cannot be decoded", "cut short", "50 x 9", "20000 x 20000"), report.problems, strict=True
    ):
        assert part in problem.value
    assert before == {path: path.read_bytes() for path in images.iterdir()}


def test_pages_of_images(tmp_path: Path) -> None:
    """ultralytics/yolov5#7726: of several pages the first was used, and nothing said so."""
    images = make_split(tmp_path, [GOOD, GOOD])
    pages = [np.full((24, 32, 3), 90, np.uint8)] * 3
    cv2.imwritemulti(str(images / "00001.tif"), pages)
    (images / "00001.jpg").unlink()
    index = build_index([images], 1)
    assert index.n == 2
    assert index.report.problems == [
        (str(images / "00001.tif"), 0, "3 pages", "only the first page of the image is used")
    ]


def test_listed_image_that_is_not_there(tmp_path: Path) -> None:
    images = make_split(tmp_path, [GOOD])
    (tmp_path / "list.txt").write_text(f"{images}/00000.jpg\n{images}/gone.jpg\n")
    index = build_index([tmp_path / "list.txt"], 1)
    assert index.n == 1
    assert "gone.jpg: No such file" in "\n".join(index.report.details())


def test_label_that_cannot_be_read_is_no_background(tmp_path: Path) -> None:
    images = make_split(tmp_path, [GOOD, None])
    (tmp_path / "labels/train/00001.txt").mkdir()
    index = build_index([images], 1)
    assert (index.n, index.report.missing, index.report.corrupt) == (1, 0, 1)
    assert "label file unreadable" in index.report.problems[0].rule


def test_report(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Missing labels are loud (ultralytics#9161), everything else is one line and some details."""
    images = make_split(tmp_path, [GOOD * 4, None, None, None, ""])
    index = build_index([images], 1)
    assert index.report.summary() == (
        "5 images: 1 with labels, 3 without a label file, 1 with an empty one, 0 left out; 3 problems"
    )
    details = index.report.details(2)
    assert details[0] == "3 x row repeated, kept once"
    assert details[1].startswith(f"{tmp_path}/labels/train/00000.txt:2: row repeated, kept once (0)")
    assert details[-1] == "... and 1 more"
    assert "4 of 5 images in train HAVE NO LABELS" in log.text
    first = log.text
    log.clear()
    build_index([images], 1)  # from the cache file: the same is said
    assert log.text == first


def test_split_without_labels(tmp_path: Path) -> None:
    images = make_split(tmp_path, [None, ""])
    data = DataConfig(tmp_path / "data.yaml", tmp_path, [images], [images], ["a"], [images])
    for split in ("train", "val", "val"):
        with pytest.raises(UserError, match=rf"{split}: no labels in .*: all label files that are there, 1, are empty"):
            open_splits(data, [split])
    assert open_splits(data, ["test"])["test"].labels(0).shape == (0, 5)  # to detect on it
    (tmp_path / "labels/train/00001.txt").unlink()
    with pytest.raises(
        UserError, match=rf"the label file of the first image would be {tmp_path}/labels/train/00000.txt"
    ):
        open_splits(data, ["train"])


@needs_shared
def test_real_data_against_golden_figures() -> None:
    index = build_index([SHARED / "datasets/coco128/images"], 80, cache=False)
    golden = json.loads((SHARED / "golden/val_batches.json").read_text())
    sizes = {image["file"]: tuple(image["original_hw"]) for image in golden["images"]}
    assert {Path(index.path(i)).name: tuple(index.shapes[i]) for i in range(index.n)} == sizes
    assert index.report.missing == 2
    alone = {path.stem for path in (SHARED / "datasets/coco128/labels").rglob("*.txt")} - {Path(n).stem for n in sizes}
    assert {Path(problem.file).stem for problem in index.report.problems} == alone
    for i in range(index.n):
        file = Path(label_path(index.path(i)))
        want = np.loadtxt(file, dtype=np.float32, ndmin=2) if file.exists() else np.empty((0, 5))
        np.testing.assert_array_equal(index.labels(i), want)
    cells = build_index([SHARED / "datasets/bccd/images/train"], 3, cache=False)
    assert (cells.n, cells.report.found, cells.report.problems) == (205, 205, [])
    assert cells.shapes.tolist() == [[480, 640]] * 205


# --- index and cache file --------------------------------------------------------------------------------------------


def same(a: LabelIndex, b: LabelIndex) -> bool:
    arrays = all(np.array_equal(a._arrays[name], b._arrays[name]) for name in a._arrays)
    return arrays and a.images_digest == b.images_digest and a.name == b.name


def test_cache_hit_gives_the_same(tmp_path: Path) -> None:
    images = make_split(tmp_path, [GOOD, None, GOOD * 2, ""])
    first, second = build_index([images], 1), build_index([images], 1)
    memory = build_index([images], 1, cache=False)
    assert memory.file is None
    assert first.file == second.file
    assert first.file is not None
    assert first.file.parent == tmp_path / ".lockstep"
    assert same(first, second)
    assert same(first, memory)
    assert first.report == second.report
    assert not second.rows.flags.writeable
    assert not memory.labels(0).flags.writeable
    assert [path.name for path in first.file.parent.iterdir()] == [first.file.name]


def rebuilt(images: Path, file: Path, num_classes: int = 1) -> bool:
    before = file.stat().st_ino, file.stat().st_mtime_ns
    index = build_index([images], num_classes)
    return index.file != file or before != (file.stat().st_ino, file.stat().st_mtime_ns)


def test_cache_follows_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits that keep the total size (yolov5#306), other class counts (ultralytics PR #26207), new files and rules."""
    images = make_split(tmp_path, [GOOD, GOOD, None])
    label = tmp_path / "labels/train/00001.txt"
    index = build_index([images], 1)
    file = index.file
    assert file is not None
    assert not rebuilt(images, file)
    label.write_text(GOOD.replace("0.2", "0.1"))  # same size; time stamps are coarse, so set another one
    os.utime(label, ns=(0, file.stat().st_mtime_ns + 10**9))
    assert rebuilt(images, file)
    assert not rebuilt(images, file)
    (tmp_path / "labels/train/00002.txt").write_text(GOOD)
    assert rebuilt(images, file)
    write_image(images / "00000.jpg", 40, 50)
    assert rebuilt(images, file)
    assert build_index([images], 1).shapes[0].tolist() == [40, 50]
    write_image(images / "00007.jpg")
    assert rebuilt(images, file)
    assert rebuilt(images, file, num_classes=2)
    assert not rebuilt(images, file)  # each class count has its own file
    monkeypatch.setattr(index_module, "RULES_VERSION", index_module.RULES_VERSION + 1)
    assert rebuilt(images, file)


@needs_root
@pytest.mark.parametrize("name", ["images/train/00001.jpg", "labels/train/00001.txt"])
def test_cache_follows_permissions(tmp_path: Path, name: str) -> None:
    """A file that may no longer be read has the size and time that it had."""
    images = make_split(tmp_path, [GOOD, GOOD])
    (tmp_path / name).chmod(0o600)
    assert build_index([images], 1).n == 2
    with as_nobody(tmp_path):
        index = build_index([images], 1)
    assert index.n == 1 and "Permission denied" in str(index.report.problems)
    (tmp_path / name).chmod(0o640)  # that user is in root's group
    with as_nobody(tmp_path):
        assert build_index([images], 1).n == 2


def test_lists_of_one_folder_do_not_share_a_file(tmp_path: Path) -> None:
    """Train and val list over the same folder (yolov5#2121)."""
    images = make_split(tmp_path, [GOOD, GOOD * 2])
    (tmp_path / "a.txt").write_text(f"{images}/00000.jpg\n")
    (tmp_path / "b.txt").write_text(f"{images}/00001.jpg\n")
    a, b = build_index([tmp_path / "a.txt"], 1), build_index([tmp_path / "b.txt"], 1)
    both = build_index([tmp_path / "a.txt", tmp_path / "b.txt"], 1)
    assert len({a.file, b.file, both.file}) == 3
    assert build_index([tmp_path / "a.txt"], 1).path(0) == f"{images}/00000.jpg"


def test_damaged_cache_is_rebuilt(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Whatever byte is wrong or missing: a warning and a new file, never an exception (yolov5#1507)."""
    images = make_split(tmp_path, [GOOD, None, GOOD * 3])
    index = build_index([images], 1)
    file = index.file
    assert file is not None
    data = file.read_bytes()
    damaged = [data[:n] for n in (0, 1, 9, 100, len(data) // 2, len(data) - 1)] + [b"\x80\x04N." * 50]
    for at in (*range(0, 20), 60, len(data) // 2, len(data) - 70):
        damaged.append(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    for wrong in damaged:
        file.unlink()
        file.write_bytes(wrong)
        log.clear()
        assert same(build_index([images], 1), index)
        assert file.read_bytes() == data
        assert "is damaged" in log.text or not wrong


def test_no_python_objects_per_image(tmp_path: Path) -> None:
    """Lists of objects are copied page by page into every worker (ultralytics#617, #14150)."""
    counts = []
    for n in (10, 20, 600):  # the first one also pays for what is imported and kept once
        images = make_split(tmp_path / str(n), [GOOD] * n)
        build_index([images], 1)
        gc.collect()
        before = len(gc.get_objects())
        index = build_index([images], 1)
        gc.collect()
        counts.append(len(gc.get_objects()) - before)
        assert index.n == n
        assert len(pickle.dumps(index)) < 500
    assert abs(counts[1] - counts[2]) < 300  # one for each image would be 580; what other tests left goes away at times


@pytest.mark.parametrize("cache", [True, False])
def test_pickle(tmp_path: Path, cache: bool) -> None:
    images = make_split(tmp_path, [GOOD, None])
    index = build_index([images], 1, cache=cache)
    data = pickle.dumps(index)
    assert same(pickle.loads(data), index)
    if cache:
        (images / "00001.jpg").unlink()
        build_index([images], 1)
        with pytest.raises(RuntimeError, match="was replaced while it was in use"):
            pickle.loads(data)
        assert index.n == 2  # what is mapped stays as it is
        assert index.path(1).endswith("00001.jpg")


def build_and_report(images: Path, barrier: object, queue: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    index = build_index([images], 1)
    queue.put((str(index.file), index.num_instances, zlib.crc32(index.rows.tobytes())))  # type: ignore[attr-defined]


@needs_fork
def test_concurrent_builds(tmp_path: Path) -> None:
    """Four at once write one name (ultralytics#8627)."""
    assert FORK is not None
    images = make_split(tmp_path, [GOOD] * 50)
    barrier, queue = FORK.Barrier(4), FORK.Queue()
    processes = [FORK.Process(target=build_and_report, args=(images, barrier, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    results = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(results) == 1
    assert [path.suffix for path in (tmp_path / ".lockstep").iterdir()] == [".index"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that even root cannot write, with a data set in it; skipped where there can be none."""
    source, target = tmp_path / "writable", tmp_path / "read_only"
    make_split(source, [GOOD, GOOD])
    target.mkdir()
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        shutil.copytree(source, target, dirs_exist_ok=True)
        target.chmod(0o555)
        yield target
        target.chmod(0o755)
        return
    options = [["mount", "--bind", str(source), str(target)], ["mount", "-o", "remount,bind,ro", str(target)]]
    if shutil.which("mount") is None or any(subprocess.run(c, capture_output=True).returncode for c in options):
        pytest.skip("no read-only mounts here")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_read_only_data_set(read_only: Path, user_cache: Path) -> None:
    first = build_index([read_only / "images/train"], 1)
    assert first.file is not None
    assert first.file.parent == user_cache
    assert not rebuilt(read_only / "images/train", first.file)
    assert sorted(path.name for path in read_only.iterdir()) == ["images", "labels"]


def test_no_place_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    images = make_split(tmp_path, [GOOD])
    (tmp_path / ".lockstep").touch()  # files where the folders should be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".lockstep"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ".lockstep"))
    index = build_index([images], 1)
    assert index.file is None
    assert index.num_instances == 1
    assert "the label index is not kept for the next run" in log.text


# --- the scan's processes --------------------------------------------------------------------------------------------


@needs_fork
def test_result_does_not_depend_on_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str | None] = [[GOOD, None, "", "0 2 2 2 2\n" + GOOD, GOOD * 2][i % 5] for i in range(60)]
    images = make_split(tmp_path, texts)
    alone = build_index([images], 1, cache=False)
    monkeypatch.setattr(scan, "CHUNK", 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    shared = build_index([images], 1, cache=False)
    assert same(alone, shared)
    assert len(alone.report.problems) == 24


@needs_fork
def test_worker_that_fails_or_dies_is_an_error() -> None:
    def fail(item: int) -> scan.Part:
        raise KeyError("broken rule")

    def die(item: int) -> scan.Part:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    before = multiprocessing.active_children()
    with pytest.raises(KeyError, match="broken rule"):
        list(scan.in_processes(fail, [1, 2, 3, 4], 2))
    with pytest.raises(RuntimeError, match="ended early"):
        list(scan.in_processes(die, [1, 2, 3, 4], 2))
    assert set(multiprocessing.active_children()) <= set(before)


KILLED = """
import os, sys, time
import numpy as np
from utils.data import scan
def work(item):
    print(os.getpid(), flush=True)
    time.sleep(0.05)
    return scan.Part(*[np.zeros(100_000)] * 4, [])
for item, part in scan.in_processes(work, list(range(200)), 2):
    time.sleep(100)
"""


@needs_fork
def test_workers_end_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    assert parent.stdout is not None
    workers: set[int] = set()
    while len(workers) < 2:
        workers.add(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))
    parent.stdout.close()


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended and was not fetched yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
