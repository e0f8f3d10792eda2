"""Memory over epochs: flat in the training process and in every loader process, however many images there are.

Python objects per image in a loader process are copied page by page as they are touched (pytorch/pytorch#13246), which
has ended many a long run (ultralytics/yolov5#8240, ultralytics/ultralytics#14150, open-mmlab/mmdetection#7786).
"""

import csv
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.common import PROJECT
from tests.dist.launch import descendants, start
from tests.runs import flags, make_data

IMAGES = 10_000
EPOCHS = 20
LIMIT = 1.0  # MB per epoch
OWN_MEMORY = Path("/proc/self/smaps_rollup")

# The network does not matter here, so it is as small as a network can be.
NETWORK = """
nc: 1
depth_multiple: 1.0
width_multiple: 1.0
anchors: [[10,13, 16,30, 33,23]]
backbone:
  - [-1, 1, Conv, [8, 3, 8]]
head:
  - [-1, 1, Conv, [8, 3, 2]]
  - [[1], 1, Detect, [nc, anchors]]
"""


def memory_of_tree(root: int) -> dict[int, float]:
    """Return the MB of anonymous and shared memory of a process and its children, by process id.

    A page that several of them hold is divided among them, so a copy on write counts, and so do loaded batches. Pages
    of files don't: those of torch's libraries, hundreds of MB, become private or shared when some other program on the
    machine that uses the same files ends or starts.
    """
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        pid = int(status.parent.name)
        try:
            parent = next(line for line in status.read_text().splitlines() if line.startswith("PPid:")).split()[1]
            if root not in (pid, int(parent)):
                continue
            rollup = status.with_name("smaps_rollup").read_text()
        except OSError:
            continue
        held = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
        found[pid] = sum(held) / 1024
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not OWN_MEMORY.exists() or "Pss_Anon:" not in OWN_MEMORY.read_text(),
    reason="needs the memory figures of a process that Linux has from 5.4 on",
)
def test_memory_is_flat_over_epochs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for number in range(IMAGES):
        cv2.imwrite(str(tmp_path / f"images/{number}.jpg"), rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        (tmp_path / f"labels/{number}.txt").write_text("0 0.5 0.5 0.5 0.5\n0 0.3 0.3 0.2 0.2\n")
    (tmp_path / "some.txt").write_text("\n".join(f"./images/{number}.jpg" for number in range(8)))
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images\nval: some.txt\nnames: [thing]\n")
    (tmp_path / "tiny.yaml").write_text(NETWORK)
    arguments = ["--data", "data.yaml", "--cfg", "tiny.yaml", "--img", "64", "--batch", "64", "--epochs", str(EPOCHS)]
    run = subprocess.Popen(
        [sys.executable, str(PROJECT / "train.py"), *arguments, "--workers", "2", "--noplots", "--noautoanchor"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    results = tmp_path / "runs/train/exp/results.csv"
    samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    while run.poll() is None:
        memory = memory_of_tree(run.pid)
        if results.exists():
            with results.open() as file:  # read after measuring: the last epoch's figures are from before its end
                done = len(list(csv.reader(file))) - 1
            for pid, megabytes in memory.items():
                samples[done][pid].append(megabytes)
        time.sleep(0.2)
    assert run.returncode == 0
    # Caches and buffers fill in the first two; after the last the loader processes end.
    epochs = [epoch for epoch in sorted(samples) if 2 < epoch < EPOCHS]
    assert len(epochs) >= EPOCHS - 7
    lasting = set.intersection(*(set(samples[epoch]) for epoch in epochs))
    assert len(lasting) >= 3, "the training process and two loader processes"
    # Heaps breathe by some MB several times a second, so what counts is the peak of an epoch, but for outliers.
    peaks = {pid: [float(np.quantile(samples[epoch][pid], 0.9)) for epoch in epochs] for pid in sorted(lasting)}
    slopes = {pid: float(np.polyfit(epochs, peaks[pid], 1)[0]) for pid in peaks}
    lines = [f"process {pid} grows by {slopes[pid]:.2f} MB an epoch: {np.round(peaks[pid], 1)}" for pid in peaks]
    assert max(slopes.values()) < LIMIT, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.skipif(
    not OWN_MEMORY.exists() or "Pss_Shmem:" not in OWN_MEMORY.read_text(),
    reason="needs the memory figures of a process that Linux has from 5.4 on",
)
def test_a_second_rank_adds_no_copy_of_the_image_cache(tmp_path: Path) -> None:
    """Each page of it counts by its share in every process, so its sum over all ranks is its size."""
    images, side = 100, 320
    cached = images * side * side * 3 / 2**20  # MB
    data = make_data(tmp_path, images, 4)
    held = {}
    for devices in ("cpu", "cpu,cpu"):
        line = ["--img", str(side), "--cache", "ram", "--device", devices, "--epochs", "1", "--noval", "--noautoanchor"]
        run = start(flags(data, tmp_path / devices, "--batch 10", *line), tmp_path, tmp_path / f"{devices} said")
        found = [0.0]
        while run.poll() is None:
            found.append(sum(shared_memory(pid) for pid in [run.pid, *descendants(run.pid)]))
            time.sleep(0.02)
        assert run.returncode == 0, (tmp_path / f"{devices} said").read_text()
        held[devices] = max(found)
    assert held["cpu"] > 0.7 * cached  # images of 4 to 3
    assert held["cpu,cpu"] - held["cpu"] < 0.2 * cached, held


def shared_memory(pid: int) -> float:
    """MB of shared memory of a process, pages of several processes divided among them."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in rollup.splitlines() if line.startswith("Pss_Shmem:")), 0.0)
