"""Images that were there when a run began, and are not, or not as they were, when it needs them."""

from __future__ import annotations

import csv
import errno
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import val
from models.families import YOLOV5
from models.yolo import DetectionModel
from tests.callback_runs import Losing, draw_squares, flags, train_with
from tests.common import PROJECT
from tests.data.test_loaders import OFF, make_jpegs, mixed_shapes
from tests.data.test_sampler import HYP, load
from tests.dist.launch import descendants, free_port, kill, start, torchrun, wait_for, wait_for_end
from utils.config.recipe import Hyp
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import LostDataError, UserError
from utils.core.image_files import RETRY_AFTER, ImageError, _Storage, image_size, read_image, retried
from utils.core.whole_files import write_whole
from utils.core.wording import duration
from utils.data.dataset import SUBSTITUTES, DetectionDataset, create_cache
from utils.data.index import LabelIndex, build_index
from utils.data.loader_notes import being_read, deaths_explained
from utils.data.loaders import TrainLoader, train_loader, val_loader
from utils.data.report import NOTHING_FOUND, REPLACED, UnreadableImages
from utils.data.resizing import GREY, letterbox
from utils.data.sampler import SampleRequest, epoch_order, val_batches
from utils.dist.place import DistEnv
from utils.metrics.evaluation import Evaluation
from utils.run.progress import RunClock
from utils.torch_utils import process_group

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")

N = 12
STILL = Hyp(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, mosaic=0)
GONE = "No such file or directory"


@pytest.fixture
def index(tmp_path: Path) -> LabelIndex:
    return make_jpegs(tmp_path, mixed_shapes(N))


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Storage, "hopeless_until", -math.inf)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)
    return caplog


def lose(index: LabelIndex, *images: int) -> None:
    for image in images:
        Path(index.path(image)).unlink()


def report_rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "data_report.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


# --- In the place of an image ----------------------------------------------------------------------------------------


def substitute(seed: int, epoch: int, position: int, lost: set[int], before: int = 0) -> int:
    """What the rule says, from its words: the first that can be read of the draws of this stream."""
    counter = np.array([0, 0, 1 + before, position], np.uint64)
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=counter))
    return next(i for i in (int(rng.integers(N)) for _ in range(SUBSTITUTES)) if i not in lost)


def test_another_image_takes_its_place(index: LabelIndex) -> None:
    """With its own labels and size; another one at every position."""
    lost = {3, 5}
    lose(index, *lost)
    dataset = DetectionDataset(index, OFF, STILL, 64, seed=7)
    taken = set()
    for position in range(12):
        i = substitute(7, 2, position, lost)
        taken.add(i)
        sample = dataset[SampleRequest(2, position, 3, 64, 64)]
        expected = DetectionDataset(index, OFF, STILL, 64, seed=7)[SampleRequest(2, position, i, 64, 64)]
        np.testing.assert_array_equal(sample.image, expected.image)
        np.testing.assert_array_equal(sample.labels, expected.labels)
        assert sample.request.index == 3
        assert (3, GONE) in sample.unreadable
        assert not expected.unreadable
    assert len(taken) > 4


@pytest.mark.parametrize("rect", [False, True])
def test_all_else_of_a_sample_stays(index: LabelIndex, rect: bool) -> None:
    """Its other images, and every number that is drawn for it; samples without the lost image stay to the bit."""

    class Listed(DetectionDataset):
        def load(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            image, labels = super().load(instead.get((position, len(members)), i))
            members.append(i)
            return image, labels

    members: list[int] = []
    instead: dict[tuple[int, int], int] = {}
    whole = Listed(index, OFF, HYP, 64, 5, rect)
    before, who = [], []
    for position in range(40):
        members.clear()
        before.append(whole[SampleRequest(1, position, position % N, 64, 64)])
        who.append(list(members))
    for position, images in enumerate(who):
        places = [place for place, image in enumerate(images) if image == 4]
        instead.update({(position, place): substitute(5, 1, position, {4}, n) for n, place in enumerate(places)})
    expected = []
    for position in range(40):  # with the substitutes named by hand
        members.clear()
        expected.append(whole[SampleRequest(1, position, position % N, 64, 64)])
    lose(index, 4)
    dataset, changed = DetectionDataset(index, OFF, HYP, 64, 5, rect), 0
    for images, old, wanted in zip(who, before, expected, strict=True):
        sample = dataset[wanted.request]
        if 4 not in images:
            np.testing.assert_array_equal(sample.image, old.image)
            assert not sample.unreadable
        elif len(sample.unreadable) == 1:  # the first draw was another image
            changed += 1
            np.testing.assert_array_equal(sample.image, wanted.image)
            np.testing.assert_array_equal(sample.labels, wanted.labels)
            assert not np.array_equal(sample.image, old.image)
    assert changed >= (2 if rect else 8)


@pytest.mark.parametrize("rect", [False, True])
def test_ranks_and_workers_take_the_same(index: LabelIndex, rect: bool) -> None:
    """Also in an epoch's last batch, which is filled up, and in rectangular ones; in any order."""
    lose(index, 0, 1, 6)
    dataset = DetectionDataset(index, OFF, HYP, 64, 5, rect)
    alone = list(islice(load(dataset, 0), 6))
    for workers, world_size in ((2, 1), (0, 2)):
        for a, b in zip(alone, islice(load(dataset, workers, world_size), 6), strict=True):
            assert torch.equal(a.images, b.images)
            assert torch.equal(a.targets, b.targets)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (Path.unlink, GONE),
    "empty": (lambda path: path.write_bytes(b""), "cannot be decoded: it is empty"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-40]), "is cut short"),
    "text": (
        lambda path: path.write_text("<html>404</html>" * 9),
        "cannot be decoded: it is no image, but starts with b'<html>404</h'",
    ),
    "larger": (
        lambda path: path.write_bytes(cv2.imencode(path.suffix, np.zeros((90, 110, 3), np.uint8))[1].tobytes()),
        "was 80 x 70 pixels when it was checked, now 110 x 90",
    ),
    "folder": (become_a_folder, "Is a directory"),
}


def draw(path: Path) -> None:
    image = np.random.default_rng(1).integers(0, 256, (70, 80, 3), np.uint8)
    cv2.imwrite(str(path), cv2.GaussianBlur(image, (0, 0), 2))


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_may_befall_an_image(kind: str, suffix: str, tmp_path: Path) -> None:
    """Rows 70, 71, 73 of the faults, in mid-run; with --strict they end the run (see test_dataloaders)."""
    draw(tmp_path / f"a{suffix}")
    draw(tmp_path / f"b{suffix}")
    index = build_index([tmp_path], 1, cache=False)
    damage, reason = DAMAGE[kind]
    damage(tmp_path / f"a{suffix}")
    training, validation = DetectionDataset(index, OFF, STILL, 64), DetectionDataset(index, OFF, None, 64)
    sample = training[SampleRequest(0, 5, 0, 64, 64)]
    assert {problem.image: problem.reason for problem in sample.unreadable} == {0: reason}
    np.testing.assert_array_equal(sample.image, training[SampleRequest(0, 5, 1, 64, 64)].image)
    assert [tuple(problem) for problem in validation[SampleRequest(0, 0, 0, 64, 64)].unreadable] == [(0, reason)]
    with pytest.raises(ImageError, match=re.escape(reason)):
        DetectionDataset(index, OFF, STILL, 64, strict=True)[SampleRequest(0, 5, 0, 64, 64)]


def test_damage_in_the_middle(tmp_path: Path) -> None:
    """Header and end are right: a PNG's decoder tells, a JPEG's paints what it gets."""
    for suffix in (".png", ".jpg"):
        draw(tmp_path / f"a{suffix}")
    index = build_index([tmp_path], 1, cache=False)
    for suffix in (".png", ".jpg"):
        data = bytearray((tmp_path / f"a{suffix}").read_bytes())
        data[-300:-100] = bytes(b ^ 0x55 for b in data[-300:-100])
        (tmp_path / f"a{suffix}").write_bytes(data)
    dataset = DetectionDataset(index, OFF, None, 64)
    jpeg, png = (dataset[SampleRequest(0, i, i, 64, 64)].unreadable for i in range(2))
    assert list(jpeg) == []
    assert [tuple(problem) for problem in png] == [(1, "cannot be decoded")]


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_are_gone(index: LabelIndex, workers: int) -> None:
    lose(index, *range(N))
    dataset = DetectionDataset(index, OFF, Hyp(), 64)
    with (
        closing(train_loader(dataset, 4, DistEnv(), workers)) as batches,
        pytest.raises(LostDataError) as info,
    ):
        next(batches)
    said = str(info.value)
    assert re.fullmatch(
        rf"9 images in a row, drawn at random, .* last one was {re.escape(str(Path(index.path(0)).parent))}/0\d\d.jpg: "
        rf"{GONE}; is the disk with the data still there\?",
        said,
    ), said


def test_a_cached_image_is_not_missed(index: LabelIndex) -> None:
    with closing(create_cache(index, 64, "ram", train=True)) as cache:
        dataset = DetectionDataset(index, cache, STILL, 64)
        request = SampleRequest(0, 1, 3, 64, 64)
        image = dataset[request].image
        lose(index, 3)
        sample = dataset[request]
        np.testing.assert_array_equal(sample.image, image)
        assert not sample.unreadable


@pytest.mark.parametrize("workers", [0, 2])
def test_the_main_process_is_told(index: LabelIndex, workers: int) -> None:
    lose(index, 2, 9)
    with closing(train_loader(DetectionDataset(index, OFF, STILL, 64), 4, DistEnv(), workers)) as batches:
        assert batches.take_unreadable() == {}
        for _ in range(3):
            assert isinstance(next(batches).unreadable, list)
        assert batches.take_unreadable() == {2: GONE, 9: GONE}
        assert batches.take_unreadable() == {}


# --- Storage that is in trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT"])
def test_trouble_that_passes(name: str) -> None:
    tries: list[float] = []

    def work(failures: int) -> str:
        tries.append(time.monotonic())
        if len(tries) <= failures:
            raise OSError(getattr(errno, name), "trouble")
        return "done"

    assert retried(lambda: work(2)) == "done"
    assert [round(b - a, 1) >= pause for a, b, pause in zip(tries, tries[1:], RETRY_AFTER, strict=False)] == [True] * 2
    tries.clear()
    with pytest.raises(OSError, match="trouble"):
        retried(lambda: work(99))
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(OSError, match="trouble"):  # the disk is dead: nobody waits for the next file
        retried(lambda: work(99))
    assert len(tries) == 1


def test_other_errors_are_not_waited_for() -> None:
    tries = 0

    def work() -> None:
        nonlocal tries
        tries += 1
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError):
        retried(work)
    assert tries == 1


FAILING = Path("/proc/self/mem")  # reading its start is an input/output error


@linux_only
def test_a_file_that_cannot_be_read(index: LabelIndex) -> None:
    """EIO from the kernel itself: retried, then another image takes its place; by a scan it is listed."""
    path = Path(index.path(3))
    path.unlink()
    path.symlink_to(FAILING)
    begin = time.monotonic()
    sample = DetectionDataset(index, OFF, STILL, 64)[SampleRequest(0, 1, 3, 64, 64)]
    assert sum(RETRY_AFTER) <= time.monotonic() - begin
    assert [tuple(problem) for problem in sample.unreadable] == [(3, "Input/output error")]
    with pytest.raises(ImageError, match=r"003\.jpg: Input/output error$"):
        image_size(str(path))
    label = path.parents[1] / "labels/004.txt"
    label.unlink()
    label.symlink_to(FAILING)
    report = build_index([path.parent], 4, cache=False).report
    assert [(Path(problem.file).name, problem.value) for problem in report.problems] == [
        ("003.jpg", "Input/output error")
    ]  # a label file without a byte, as that one says of itself, is not read at all


@linux_only
@pytest.mark.parametrize("read", [read_image, image_size])
def test_a_file_that_can_be_read_a_moment_later(read: Callable[[str], object], index: LabelIndex) -> None:
    path = Path(index.path(3))
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(FAILING)

    def mend() -> None:
        link = path.with_name("link")
        link.symlink_to(kept)
        link.replace(path)

    timer = threading.Timer(0.05, mend)
    timer.start()
    found = read(str(path))
    timer.join()
    np.testing.assert_array_equal(found, read(str(kept)))


# --- Validation ------------------------------------------------------------------------------------------------------


def test_in_validation_an_image_is_grey(index: LabelIndex) -> None:
    """Its place, its labels and the geometry stay, so that all of its objects count as missed."""
    dataset = DetectionDataset(index, OFF, None, 64)
    request = next(q for batch in val_batches(index, 64, 4, 32) for q in batch if q.index == 4)
    whole = dataset[request]
    lose(index, 4)
    sample = dataset[request]
    assert (sample.image == GREY).all()
    np.testing.assert_array_equal(sample.labels, whole.labels)
    assert len(sample.labels)
    assert sample.geometry == whole.geometry


def test_in_validation_nothing_is_found_in_it(index: LabelIndex, tmp_path: Path) -> None:
    """Whatever a network sees in grey; all other images are as before to the bit."""
    torch.manual_seed(0)
    names = ["a", "b", "c", "d"]
    model = DetectionModel(load_yaml(find_yaml("yolov5n.yaml", "model")), 4, names).eval()
    with process_group("cpu") as env:

        def evaluate(workers: int) -> Evaluation:
            with closing(val_loader(DetectionDataset(index, OFF, None, 64), 4, env, workers)) as loader:
                found = val.evaluate(model, YOLOV5, loader, index, names, env, conf_thres=1e-5)
                assert found is not None
                return found

        before = evaluate(0)
        lose(index, 4, 5)
        for workers in (0, 1):
            after = evaluate(workers)
            assert after.unreadable == {index.path(4): GONE, index.path(5): GONE}
            for a, b in zip(before.images, after.images, strict=True):
                assert len(a.detections)
                np.testing.assert_array_equal(b.detections, a.detections[:0] if a.index in (4, 5) else a.detections)
                np.testing.assert_array_equal(a.labels, b.labels)
    assert before.unreadable == {}


# --- The report ------------------------------------------------------------------------------------------------------


def test_each_file_is_named_once(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lockstep")
    report = UnreadableImages(tmp_path)
    report.tell("train", {}, REPLACED, logger)
    report.tell("train", {"b.jpg": GONE}, REPLACED, logger)
    report.tell("train", {"b.jpg": GONE, "a.jpg": "is cut short"}, REPLACED, logger)
    report.tell("train", {"b.jpg": GONE, "a.jpg": GONE}, REPLACED, logger)
    report.tell("val", {f"v{i:02d}": GONE for i in range(12)}, NOTHING_FOUND, logger)
    *first, last = [record.message for record in log.records]
    assert first == [
        f"1 image of train could not be read and was replaced: b.jpg ({GONE})",
        "2 images of train could not be read and were replaced, 1 of them for the first time: a.jpg (is cut short)",
        "2 images of train could not be read and were replaced, as before",
    ]
    assert last.startswith(f"12 images of val could not be read and count as ones without detections: v00 ({GONE}), ")
    assert last.endswith(f", v09 ({GONE}), ... and 2 more")
    rows = report_rows(tmp_path)
    assert [(row["split"], row["file"], row["value"]) for row in rows[:3]] == [
        ("train", "b.jpg", GONE), ("train", "a.jpg", "is cut short"), ("val", "v00", GONE)
    ]  # fmt: skip
    assert len(rows) == 14
    assert {row["rule"] for row in rows[:2]} == {"could not be read in the run and was replaced"}


def test_a_report_that_cannot_be_written(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    UnreadableImages(tmp_path / "gone").tell("val", {"a": GONE}, NOTHING_FOUND, logging.getLogger("lockstep"))
    assert log.records[-1].message == f"{tmp_path}/gone/data_report.csv can't be written: {GONE}"


# --- Whole runs ------------------------------------------------------------------------------------------------------

ODD_NAMES = [
    "a b.png",
    "$(touch hacked).png",
    "new\nline.png",
    "q'u\"o te.png",
    "\udcff\udcfe.png",
    "\u00e9t\u00e9.png",
]


def renamed(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / f"images/{number}.png").rename(folder / "images" / name)
        (folder / f"labels/{number}.txt").rename(folder / "labels" / Path(name).with_suffix(".txt"))


def test_a_run_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Images go away after the first epoch, half of all, of any name that a file can have."""
    monkeypatch.chdir(tmp_path)
    data = draw_squares(tmp_path / "data")
    renamed(tmp_path / "data", ODD_NAMES)
    images = [str(tmp_path / "data/images" / name) for name in ODD_NAMES[1:5]]
    more = ("--noplots", "--cache", "off", "--epochs", 3, "--workers", 1)
    train_with([Losing(images)], *flags(data, tmp_path / "runs", *more))
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    trained = [line for line in said.out.splitlines() if " of train could not be read and " in line]
    assert re.match(r"WARNING: \d images of train could not be read and were replaced: /", trained[0])
    rows = report_rows(tmp_path / "runs/run")
    for split in ("train", "val"):
        assert {row["file"] for row in rows if row["split"] == split} <= set(images)
    assert sorted(row["file"] for row in rows if row["split"] == "val") == sorted(images)
    assert {row["value"] for row in rows} == {GONE}
    assert len(rows) == len({(row["split"], row["file"]) for row in rows})
    shown = [name.replace("\n", "\\n").encode("utf-8", "backslashreplace").decode() for name in ODD_NAMES[1:5]]
    validated = next(line for line in said.out.splitlines() if " of val could not" in line)
    assert all(f"/{name} ({GONE})" in validated for name in shown), validated
    assert "4 images of val could not be read and count as ones without detections: " in said.out
    assert not list(tmp_path.rglob("hacked"))
    results = (tmp_path / "runs/run/results.csv").read_text().splitlines()
    assert len(results) == 1 + 3


@pytest.mark.slow
def test_what_another_rank_met_is_told(tmp_path: Path) -> None:
    """The lost image is the second rank's to train on; rank 0 names it. In validation it is one of the first's."""
    data = draw_squares(tmp_path / "data")
    lost = tmp_path / f"data/images/{epoch_order(8, 0, 1)[2]}.png"  # batches of 4: 2 and 3 are the second rank's
    line = flags(data, tmp_path / "runs", "--noplots", "--cache", "off", "--epochs", 2, "--val-batch", 8)
    (tmp_path / "lost").write_text(str(lost))
    done = torchrun(["-m", "tests.callback_runs", "lose", tmp_path, *line], 2, port=free_port(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"1 image of train could not be read and was replaced: {lost} ({GONE})") == 1
    assert done.stdout.count(f"1 image of val could not be read and counts as one without detections: {lost} (") == 1
    assert [(row["split"], row["file"]) for row in report_rows(tmp_path / "runs/run")] == [
        ("train", str(lost)),
        ("val", str(lost)),
    ]


def test_strict_ends_a_run(tmp_path: Path) -> None:
    data = draw_squares(tmp_path / "data")
    lost = str(tmp_path / "data/images/3.png")
    more = ("--noplots", "--cache", "off", "--epochs", 3, "--strict", "--noval")
    with pytest.raises(UserError, match=rf"^{re.escape(lost)}: {GONE}, although .* \(--strict\); replace") as info:
        train_with([Losing([lost])], *flags(data, tmp_path / "runs", *more))
    assert type(info.value) is UserError
    assert len((tmp_path / "runs/run/results.csv").read_text().splitlines()) == 1 + 1  # in the second epoch


# --- A loader process that dies --------------------------------------------------------------------------------------


def reader_of(pipe: Path) -> int:
    """Wait until a process reads from a named pipe, and return its id."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with suppress(OSError):
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails as long as nobody reads
            try:
                for link in Path("/proc").glob("[0-9]*/fd/*"):
                    with suppress(OSError):
                        if int(link.parts[2]) != os.getpid() and os.readlink(link) == str(pipe):
                            return int(link.parts[2])
            finally:
                WRITERS.append(writer)  # else it would see the file's end
        time.sleep(0.02)
    raise AssertionError(f"nobody reads {pipe}")


WRITERS: list[int] = []


@pytest.fixture
def writers() -> Iterator[None]:
    yield
    for writer in WRITERS:
        os.close(writer)
    WRITERS.clear()


def blocked(index: LabelIndex, image: int) -> Path:
    """Put a pipe that nobody writes to in the place of an image: who reads it stays there."""
    path = Path(index.path(image))
    path.rename(path.with_name("kept"))
    os.mkfifo(path)
    return path


def said_of_killed(pid: int, number: signal.Signals, loader: TrainLoader) -> str:
    """The message only: an exception that is kept keeps PyTorch's iterator, and with it the other workers."""
    try:
        with deaths_explained():
            os.kill(pid, number)
            for _ in range(100):
                next(loader)
                time.sleep(0.01)
    except LostDataError as error:
        return str(error)
    raise AssertionError("nobody missed it")


# PyTorch's signal handler raises wherever this process is just then: in a finalizer nobody hears it, and the loader
# finds the dead process itself a little later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@linux_only
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"\(Killed\) while it was at {}; if nobody killed it, the machine ran out of memory"),
        (signal.SIGSEGV, r"\(Segmentation fault\) while it was at {}; if it does so again, remove the image"),
        (signal.SIGBUS, r"\(Bus error\) while it was at {}; shared memory or the disk may be full"),
    ],
)
def test_a_dead_worker_is_told_with_its_image(
    number: signal.Signals, words: str, index: LabelIndex, writers: None
) -> None:
    second = epoch_order(N, 0, 1)[:4].tolist()  # fetched ahead too: one worker is to meet the pipe, not both
    pipe = blocked(index, next(i for i in epoch_order(N, 0, 0)[:4].tolist() if i not in second))
    with closing(train_loader(DetectionDataset(index, OFF, STILL, 64), 4, DistEnv(), 2)) as loader:
        pid = reader_of(pipe)
        pipe.with_name("kept").replace(pipe)  # for the others, and for the time after
        assert (pid, str(pipe)) in being_read()
        end = time.monotonic() + 120
        while len({doing.pid for doing in being_read()} - {0}) < 2:
            assert time.monotonic() < end
        said = said_of_killed(pid, number, loader)
    assert re.match(f"a process that loads images died {words.format(re.escape(str(pipe)))}", said), said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@linux_only
def test_a_worker_that_dies_between_two_images(index: LabelIndex) -> None:
    with closing(train_loader(DetectionDataset(index, OFF, STILL, 64), 4, DistEnv(), 1)) as loader:
        next(loader)
        end = time.monotonic() + 120
        idle = 0
        while idle < 20:  # the prefetched batches are done
            assert time.monotonic() < end
            (doing,) = being_read()
            idle = idle + 1 if doing.path == "" else 0
            time.sleep(0.01)
        said = said_of_killed(doing.pid, signal.SIGKILL, loader)
    assert re.match(r"a process that loads images died \(.*\) while it was at no image; if nobody killed it,", said), (
        said
    )


def test_the_main_process_takes_notes_where_it_loads(index: LabelIndex) -> None:
    class Looking(DetectionDataset):
        def load(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            loaded = super().load(i)
            seen.append(being_read() == [(os.getpid(), index.path(i))])
            return loaded

    seen: list[bool] = []
    with closing(train_loader(Looking(index, OFF, Hyp(), 64), 4, DistEnv(), 0)) as batches:
        next(batches)
        assert seen == [True] * 16
        assert being_read() == [(os.getpid(), "")]
    with closing(val_loader(Looking(index, OFF, None, 64), 4, DistEnv(), 0)) as loader:
        seen.clear()
        list(loader)
        assert len(seen) == N


def test_other_errors_are_not_explained() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), deaths_explained():
        raise RuntimeError("shapes differ")


def killed_run(folder: Path, begin: Callable[[], subprocess.Popen[bytes]], said: Path) -> Path:
    """Run until the first epoch is over, then kill the loader process that is at the image that is returned."""
    run = begin()
    try:
        wait_for("1/60 ", run, said)
        pipe = folder / "data/images/3.png"
        pipe.unlink()
        os.mkfifo(pipe)
        pid = reader_of(pipe)
        assert pid in descendants(run.pid), said.read_text()
        os.kill(pid, signal.SIGKILL)
        run.wait(60)
    finally:
        left = [run.pid, *descendants(run.pid)] if run.poll() is None else []
        for pid in left:
            kill(pid)
        run.wait()
    wait_for_end([pid])
    return pipe


@linux_only
@pytest.mark.slow
def test_a_run_that_loses_a_worker(tmp_path: Path, writers: None) -> None:
    """One sentence, last, status 1, and no traceback."""
    data = draw_squares(tmp_path / "data")
    line = flags(data, tmp_path / "runs", "--noplots", "--cache", "off", "--epochs", 60, "--noval", "--workers", 2)
    said = tmp_path / "said"
    runs: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        runs.append(start(line, tmp_path / "here", said))
        return runs[0]

    pipe = killed_run(tmp_path, begin, said)
    text = said.read_text()
    assert runs[0].returncode == 1
    assert "Traceback" not in text
    last = text.strip().splitlines()[-1]
    assert last.startswith(f"error: a process that loads images died (Killed) while it was at {pipe}; if nobody"), text


@linux_only
@pytest.mark.gate
@pytest.mark.slow
def test_two_ranks_that_lose_a_worker(tmp_path: Path, writers: None) -> None:
    """Whichever rank it was of."""
    data = draw_squares(tmp_path / "data")
    line = flags(data, tmp_path / "runs", "--noplots", "--cache", "off", "--epochs", 60, "--noval", "--workers", 1)
    said = tmp_path / "said"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    launcher += ["--master_port", str(free_port()), str(PROJECT / "train.py")]

    def begin() -> subprocess.Popen[bytes]:
        with said.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, *launcher, *line], cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    pipe = killed_run(tmp_path, begin, said)
    text = said.read_text()
    assert text.count(f"error: a process that loads images died (Killed) while it was at {pipe}; ") == 1, text


# --- Caches that are damaged, and clocks that jump, while a run is on -------------------------------------------------


def test_a_disk_cache_that_is_damaged_in_the_run(index: LabelIndex) -> None:
    """A worker that has not seen an image yet finds out; who had checked it keeps what is in memory."""
    with closing(create_cache(index, 64, "disk", train=True)) as cache:
        dataset = DetectionDataset(index, cache, STILL, 64)
        expected = [dataset.load(i)[0].copy() for i in range(N)]
        (file,) = (Path(index.path(0)).parents[1] / ".lockstep").glob("*.images")
        data = bytearray(file.read_bytes())
        with file.open("r+b") as opened:
            opened.seek(len(data) - 6000)
            opened.write(b"\x55" * 4000)
        with closing(create_cache(index, 64, "disk", train=True)) as second:  # as another process
            fresh = DetectionDataset(index, second, STILL, 64)
            assert sum(second.get(i) is None for i in range(N)) >= 1
            for i in range(N):
                np.testing.assert_array_equal(fresh.load(i)[0], expected[i])
                assert second.get(i) is not None
        file.unlink()  # mapped: nobody needs the name any more
        for i in range(N):
            np.testing.assert_array_equal(dataset.load(i)[0], expected[i])


def test_an_index_that_is_replaced_in_the_run(tmp_path: Path) -> None:
    make_jpegs(tmp_path, mixed_shapes(N))
    index = build_index([tmp_path / "images"], 4)
    assert index.file is not None
    labels = [index.labels(i).copy() for i in range(N)]
    shutil.copy(index.file, tmp_path / "other")
    (tmp_path / "other").write_bytes(b"LSINDEX1 of somebody else")
    os.replace(tmp_path / "other", index.file)
    dataset = DetectionDataset(index, OFF, STILL, 64)
    with closing(train_loader(dataset, 4, DistEnv(), 1)) as batches:
        next(batches)
    for i in range(N):
        np.testing.assert_array_equal(index.labels(i), labels[i])
    again = build_index([tmp_path / "images"], 4)  # and by the next run it is made anew
    assert [again.labels(i).tolist() for i in range(N)] == [rows.tolist() for rows in labels]


@pytest.fixture(params=[-3600.0 * 24, 3600.0 * 24], ids=["back", "forward"])
def jumping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's clock jumps by a day every time that somebody looks."""
    real, jumps = time.time, [0.0]

    def jumped() -> float:
        jumps[0] += request.param
        return real() + jumps[0]

    monkeypatch.setattr(time, "time", jumped)


def test_clocks_that_jump(jumping: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No time that is left is negative or of days; caches and checkpoints do not ask for the time."""
    clock = RunClock(3, 0.0)
    assert 0 <= clock.left(1.0) < 60
    data = draw_squares(tmp_path / "data")
    line = flags(data, tmp_path / "runs", "--noplots", "--cache", "disk", "--epochs", 2, "--time-limit", "1h")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        train_with([], *line)
    said = capfd.readouterr()
    left = re.findall(r"(\S+) left$", said.err, re.MULTILINE)
    assert len(left) == 2
    assert all(re.fullmatch(r"\d:\d\d", time_left) for time_left in left), left
    assert re.search(r"^\d:\d\d of training", said.out, re.MULTILINE), said.out
    assert "stop" not in said.out
    assert duration(0.4) == "0:00"


def test_clocks_that_jump_and_files_of_others(jumping: None, tmp_path: Path) -> None:
    """What another process is writing is not taken for what a dead one has left; that is known by the disk's clock."""
    fresh, old = tmp_path / ".x.index.1.tmp", tmp_path / ".x.index.2.tmp"
    fresh.write_text("being written")
    old.write_text("left")
    past = fresh.stat().st_mtime - 7200
    os.utime(old, (past, past))
    write_whole(tmp_path / "x.index", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.index.1.tmp", "x.index"]


def test_times_of_files_that_jump_back(tmp_path: Path) -> None:
    """An edit is one whatever the clock said: the index is made anew for any other time, not for later ones only."""
    make_jpegs(tmp_path, mixed_shapes(N))
    build_index([tmp_path / "images"], 4)
    label = tmp_path / "labels/001.txt"
    label.write_text("3 0.5 0.5 0.25 0.25")
    os.utime(label, (1, 1))
    assert build_index([tmp_path / "images"], 4).labels(1).tolist() == [[3, 0.5, 0.5, 0.25, 0.25]]


def test_pixels_are_what_they_were(index: LabelIndex) -> None:
    """The checks at run time change nothing of an image that is as it was."""
    sample = DetectionDataset(index, OFF, STILL, 64)[SampleRequest(0, 0, 4, 64, 64)]
    picture = cv2.imread(index.path(4))
    assert picture is not None
    small = cv2.resize(picture, (58, 64), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(sample.image, letterbox(small, (64, 64))[0])
