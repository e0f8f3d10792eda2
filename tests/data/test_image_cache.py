import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.common import PROJECT
from utils.data import image_cache
from utils.data.image_cache import ImageCache, free_memory
from utils.data.index import LabelIndex, build_index

LINUX = sys.platform == "linux"
needs_linux = pytest.mark.skipif(not LINUX, reason="forked processes, /proc and tmpfs are Linux's")
FORK: Any = multiprocessing.get_context("fork" if LINUX else None)
LOGGER = logging.getLogger("lockstep")
SIZES = [(30, 40), (40, 23), (1, 40), (40, 40), (33, 40), (40, 40)]


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


def make_index(root: Path, n: int = len(SIZES)) -> LabelIndex:
    images = root / "images"
    images.mkdir(parents=True)
    for i in range(n):
        cv2.imwrite(str(images / f"{i:04d}.png"), np.full((20, 30, 3), i % 256, np.uint8))
    return build_index([images], 1, split="val")


@pytest.fixture
def index(tmp_path: Path) -> LabelIndex:
    return make_index(tmp_path)


def create(index: LabelIndex, mode: str, shapes: Any = SIZES, **changes: Any) -> ImageCache:
    return ImageCache.create(index, 40, mode, shapes=np.array(shapes), **changes)


def picture(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (*SIZES[i % len(SIZES)], 3), np.uint8)


@pytest.fixture(params=["ram", "disk"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def test_holds_what_was_put(index: LabelIndex, mode: str) -> None:
    cache = create(index, mode)
    assert cache.count == 6
    assert [cache.get(i) for i in range(7)] == [None] * 7
    order = [3, 0, 5, 2, 1, 4]
    for k, i in enumerate(order):
        cache.put(i, picture(i))
        for j in order[: k + 1]:
            image = cache.get(j)
            assert image is not None
            np.testing.assert_array_equal(image, picture(j))
            assert not image.flags.writeable
        assert all(cache.get(j) is None for j in order[k + 1 :])
    cache.put(6, picture(0))  # beyond the room: ignored
    with pytest.raises(AssertionError, match="image 0 is"):
        create(index, mode, SIZES[::-1]).put(0, picture(0))


def test_off(index: LabelIndex) -> None:
    for cache in (create(index, "off"), ImageCache(), pickle.loads(pickle.dumps(ImageCache()))):
        cache.put(0, picture(0))
        assert cache.get(0) is None
        assert cache.count == 0
        cache.close()
    with pytest.raises(ValueError, match="--cache rma: use ram, disk or off"):
        create(index, "rma")


def test_memory_is_gone_and_disk_stays(index: LabelIndex, tmp_path: Path) -> None:
    before = set(image_cache._memory_folder().glob("lockstep-*"))
    memory, disk = create(index, "ram"), create(index, "disk")
    memory.put(0, picture(0))
    disk.put(0, picture(0))
    view = memory.get(0)
    if LINUX:  # without a name from the start, so also a killed run leaves nothing
        assert set(image_cache._memory_folder().glob("lockstep-*")) == before
    memory.close()
    disk.close()
    assert memory.get(0) is None
    assert set(image_cache._memory_folder().glob("lockstep-*")) == before
    assert view is not None
    np.testing.assert_array_equal(view, picture(0))
    kept = create(index, "disk").get(0)
    assert kept is not None
    np.testing.assert_array_equal(kept, picture(0))
    names = sorted(path.name for path in (tmp_path / ".lockstep").iterdir())
    assert names == sorted([f"{index.name}.index", f"{index.name}-40-linear.images"])


def test_disk_cache_of_other_images_is_not_used(
    index: LabelIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(index, "disk").put(0, picture(0))
    assert create(index, "disk").get(0) is not None
    assert create(index, "disk", interpolation="area").get(0) is None
    assert create(index, "disk", [(40, 40), *SIZES[1:]]).get(0) is None
    create(index, "disk").put(0, picture(0))
    with monkeypatch.context() as changed:  # an older version, which decoded and resized otherwise
        changed.setattr(image_cache, "PIXELS_VERSION", image_cache.PIXELS_VERSION - 1)
        assert create(index, "disk").get(0) is None
    create(index, "disk").put(0, picture(0))
    image = Path(index.path(3))
    cv2.imwrite(str(image), np.full((20, 30, 3), 99, np.uint8))
    os.utime(image, (5, 5))
    assert create(build_index([tmp_path / "images"], 1, split="val"), "disk").get(0) is None
    assert len(list((tmp_path / ".lockstep").glob("*.images"))) == 2  # one per interpolation, none left over


def test_edited_labels_keep_the_images(index: LabelIndex, tmp_path: Path) -> None:
    create(index, "disk").put(0, picture(0))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/0000.txt").write_text("0 0.5 0.5 0.1 0.1")
    again = build_index([tmp_path / "images"], 1, split="val")
    assert again.num_instances == 1
    assert create(again, "disk").get(0) is not None


def test_damaged_entry_is_decoded_again(index: LabelIndex, tmp_path: Path) -> None:
    """One wrong byte in the pixels of one image (ultralytics#2672, PR #5712): that image alone is put again."""
    cache = create(index, "disk")
    for i in range(3):
        cache.put(i, picture(i))
    (file,) = (tmp_path / ".lockstep").glob("*.images")
    data = bytearray(file.read_bytes())
    at = data.index(picture(1).tobytes()) + 100
    data[at] ^= 4
    file.write_bytes(data)
    cache = create(index, "disk")
    assert [cache.get(i) is None for i in range(3)] == [False, True, False]
    for reader in (cache, create(index, "disk")):  # in the process that mends it, and in a later one
        if reader is cache:
            reader.put(1, picture(1))
        image = reader.get(1)
        assert image is not None
        np.testing.assert_array_equal(image, picture(1))


def test_damaged_file_is_replaced(index: LabelIndex, tmp_path: Path) -> None:
    """Cut short, empty or overwritten (ultralytics#269)."""
    create(index, "disk").put(0, picture(0))
    (file,) = (tmp_path / ".lockstep").glob("*.images")
    data = file.read_bytes()
    for wrong in (
        b"",
        data[:100],
        data[:5000],
        data[:-1],
        data + b"\0",
        b"\0" * len(data),
        data[:20] + b"x" + data[21:],
    ):
        file.unlink()
        file.write_bytes(wrong)
        cache = create(index, "disk")
        assert cache.get(0) is None
        cache.put(0, picture(0))
        assert create(index, "disk").get(0) is not None
    assert len(file.read_bytes()) == len(data)


# --- processes -------------------------------------------------------------------------------------------------------


def fill(cache: ImageCache, n: int, decoded: Any, lock: Any, start: Any) -> None:
    """A worker that goes through all images as a loader does."""
    start.wait()
    for i in range(n):
        with lock:  # so that two do not decode one at the same moment, which is allowed but would be counted twice
            if cache.get(i) is None:
                with decoded.get_lock():
                    decoded.value += 1
                cache.put(i, picture(i))
        image = cache.get(i)
        assert image is not None
        assert np.array_equal(image, picture(i))


@needs_linux
def test_each_image_is_decoded_once_per_machine(index: LabelIndex, mode: str) -> None:
    """Forked workers inherit the map (yolov5#3818: a copy per process)."""
    cache = create(index, mode)
    decoded, lock, start = FORK.Value("i", 0), FORK.Lock(), FORK.Barrier(3)
    workers = [FORK.Process(target=fill, args=(cache, 6, decoded, lock, start)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 3
    assert decoded.value == 6
    assert all(np.array_equal(cache.get(i), picture(i)) for i in range(6))  # type: ignore[arg-type]


SPAWNED = """
import pickle, sys
for cache in pickle.load(sys.stdin.buffer):
    assert cache.get(0)[0, 0, 0] == 7
    assert cache.get(1) is None
    cache.put(1, cache.get(0) + 1)
"""


@needs_linux
def test_other_processes_get_it_by_pickle(index: LabelIndex) -> None:
    """As spawned workers do, and other ranks of the machine; also when the file has no name any more."""
    caches = [create(index, mode, [(30, 40)] * 6) for mode in ("ram", "disk")]
    for cache in caches:
        cache.put(0, np.full((30, 40, 3), 7, np.uint8))
    data = pickle.dumps(caches)
    assert len(data) < 1000
    subprocess.run([sys.executable, "-c", SPAWNED], input=data, cwd=PROJECT, check=True, timeout=300)
    for cache in caches:
        image = cache.get(1)
        assert image is not None
        assert (image == 8).all()


def hammer(cache: ImageCache, seconds: float) -> None:
    until = time.time() + seconds
    while time.time() < until:
        for i in range(6):
            cache.put(i, picture(i))
            image = cache.get(i)
            assert image is not None
            assert np.array_equal(image, picture(i))


@needs_linux
def test_two_may_put_the_same_image(index: LabelIndex, mode: str) -> None:
    cache = create(index, mode)
    workers = [FORK.Process(target=hammer, args=(cache, 0.5)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 3


def pss_kb(pid: int | str) -> int:
    """Proportional set size of shared memory: shared pages count by their share, whoever else runs Python meanwhile."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss_Shmem:")))


def read_all(cache: ImageCache, n: int, ready: Any, done: Any) -> None:
    total = 0
    for i in range(n):
        image = cache.get(i)
        assert image is not None
        total += int(image.sum())
    ready.put(total)
    done.wait(60)


@needs_linux
def test_memory_is_shared_between_workers(tmp_path: Path) -> None:
    """Three readers of 48 MB use it once, not three times (yolov5#3818)."""
    n, size = 16, 1000
    index = make_index(tmp_path, n)
    cache = create(index, "ram", np.full((n, 2), size))
    for i in range(n):
        cache.put(i, np.full((size, size, 3), i, np.uint8))
    alone = pss_kb("self")
    ready, done = FORK.Queue(), FORK.Event()
    workers = [FORK.Process(target=read_all, args=(cache, n, ready, done)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.get(timeout=120)
    together = sum(pss_kb(worker.pid) for worker in workers) + pss_kb("self")
    done.set()
    for worker in workers:
        worker.join(120)
    assert together - alone < 0.2 * n * size * size * 3 / 1024  # far below three copies


def fill_until_killed(index: LabelIndex, n: int, progress: Any) -> None:
    cache = create(index, "disk", [SIZES[i % len(SIZES)] for i in range(n)])
    for i in range(n):
        cache.put(i, picture(i))
        progress.value = i + 1
        time.sleep(0.001)


@needs_linux
def test_killed_while_filling(tmp_path: Path) -> None:
    n = 300
    index = make_index(tmp_path, n)
    progress = FORK.Value("i", 0)
    worker = FORK.Process(target=fill_until_killed, args=(index, n, progress))
    worker.start()
    while progress.value < 20:
        time.sleep(0.001)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    put = progress.value
    assert 20 <= put < n
    cache = create(index, "disk", [SIZES[i % len(SIZES)] for i in range(n)])
    for i in range(n):
        image = cache.get(i)
        if image is None:  # the one it was killed in, and those behind it
            assert i >= put
            cache.put(i, picture(i))
        assert np.array_equal(cache.get(i), picture(i))  # type: ignore[arg-type]
    assert len(list((tmp_path / ".lockstep").iterdir())) == 2


def make_at_once(index: LabelIndex, barrier: Any) -> None:
    barrier.wait()
    cache = create(index, "disk")
    for i in range(6):
        if cache.get(i) is None:
            cache.put(i, picture(i))
        assert np.array_equal(cache.get(i), picture(i))  # type: ignore[arg-type]


@needs_linux
def test_concurrent_creation(index: LabelIndex, tmp_path: Path) -> None:
    barrier = FORK.Barrier(4)
    workers = [FORK.Process(target=make_at_once, args=(index, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(list((tmp_path / ".lockstep").iterdir())) == 2


@needs_linux
def test_pickle_without_its_maker(index: LabelIndex, log: pytest.LogCaptureFixture) -> None:
    cache = create(index, "ram")
    data = pickle.dumps(cache)
    cache.close()
    orphan = pickle.loads(data)
    assert orphan.count == 0
    assert "image cache is off in process" in log.text


# --- room ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of 1 MB, as containers with too little of it have."""
    folder = tmp_path_factory.mktemp("shm")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs here")
    monkeypatch.setattr(image_cache, "SHARED_MEMORY", folder)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_only_the_first_images_fit(tiny: Path, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    index = make_index(tmp_path, 10)
    cache = create(index, "ram", [(200, 200)] * 10)  # 120,000 bytes each; 40 % of 1 MiB less the header hold three
    assert cache.count == 3
    assert "the first 3 of 10 images" in log.text
    for i in range(10):
        cache.put(i, np.full((200, 200, 3), i, np.uint8))
    assert [cache.get(i) is not None for i in range(10)] == [True] * 3 + [False] * 7


def test_no_room_at_all(tiny: Path, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Off with one line, where workers elsewhere die of a bus error (ultralytics/yolov3#1151)."""
    index = make_index(tmp_path, 2)
    cache = create(index, "ram", [(2000, 2000)] * 2)
    assert (cache.count, cache.get(0)) == (0, None)
    assert log.text.count("image cache is off") == 1
    assert list(tiny.iterdir()) == []


def test_reserving_more_than_there_is(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may vanish between the look at it and the reservation."""
    monkeypatch.setattr(image_cache, "RAM_SHARE", 5)
    index = make_index(tmp_path, 10)
    assert create(index, "ram", [(200, 200)] * 10).count == 0
    assert shutil.disk_usage(tiny).used < 100_000
    with pytest.raises(OSError, match="space"), open(tiny / "x", "wb") as file:
        image_cache._reserve(file.fileno(), 2 << 20)


def test_platform_without_fallocate(index: LabelIndex, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    cache = create(index, mode)
    cache.put(5, picture(5))
    assert np.array_equal(cache.get(5), picture(5))  # type: ignore[arg-type]
    assert cache.get(0) is None


def test_disk_cache_goes_elsewhere_when_the_data_is_read_only(tmp_path: Path, user_cache: Path) -> None:
    index = make_index(tmp_path / "data")
    shutil.rmtree(tmp_path / "data/.lockstep")
    (tmp_path / "data/.lockstep").touch()  # a file where the folder should be: nobody can write there, not even root
    create(index, "disk").put(0, picture(0))
    assert create(index, "disk").get(0) is not None
    assert len(list(user_cache.glob("*.images"))) == 1


@needs_linux
def test_what_a_step_takes_is_left_free(index: LabelIndex, log: pytest.LogCaptureFixture) -> None:
    """The cache took 40 % of the free memory also where the ranks' training steps needed more than the rest."""
    assert create(index, "ram", spare=0).count == len(SIZES)
    assert create(index, "ram", spare=2 * free_memory()).count == 0
    assert log.messages[-1].startswith("image cache is off, images are decoded every time (")
    assert log.messages[-1].endswith("0.0 MB free for it are too little)")
    assert create(index, "disk", spare=2 * free_memory()).count == len(SIZES)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"


def test_free_memory(tmp_path: Path) -> None:
    root = write(tmp_path / "plain", {"proc/meminfo": MEMINFO})
    assert free_memory(root) == 8000 * 1024
    assert free_memory(tmp_path / "nothing") == sys.maxsize
    stat = "anon 5\ninactive_file 1000\n"
    root = write(tmp_path / "v2", {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    top = "sys/fs/cgroup/"
    write(root, {f"{top}a/b/{name}": text for name, text in [("memory.max", "max"), ("memory.current", "7")]})
    assert free_memory(root) == 8000 * 1024
    write(root, {f"{top}a/memory.max": "500000", f"{top}a/memory.current": "400000", f"{top}a/memory.stat": stat})
    assert free_memory(root) == 101_000  # the group above limits it
    root = write(tmp_path / "v1", {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:cpu,memory:/docker/x\n0::/\n"})
    names = {"memory.limit_in_bytes": "600000", "memory.usage_in_bytes": "590000", "memory.stat": f"total_{stat[7:]}"}
    write(root, {f"{top}memory/{name}": text for name, text in names.items()})
    assert free_memory(root) == 11_000  # the group's own path is not visible in a container, its limit is at the top
