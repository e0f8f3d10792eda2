"""Memory over epochs: flat in the training process and in every loader process, however many images there are.

Python objects per image in a loader process are copied page by page as they are touched (pytorch/pytorch#13246), which
has ended many a long run (ultralytics/yolov5#8240, ultralytics/ultralytics#14150, open-mmlab/mmdetection#7786).
"""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.common import PROJECT

IMAGES = 20_000
EPOCHS = 10
LIMIT = 1.0  # MB per epoch

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
    """Return the private memory in MB of a process and its children, by process id."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
            rollup = status.with_name("smaps_rollup").read_text()
        except OSError:
            continue
        pid = int(status.parent.name)
        parent = int(next(line for line in text.splitlines() if line.startswith("PPid:")).split()[1])
        if root in (pid, parent):
            private = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")]
            found[pid] = sum(private) / 1024
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's memory figures of a process")
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
    at_epoch: dict[int, dict[int, float]] = {}
    while run.poll() is None:
        if results.exists():
            with results.open() as file:
                done = len(list(csv.reader(file))) - 1
            if done > 0 and done not in at_epoch:
                at_epoch[done] = memory_of_tree(run.pid)
        time.sleep(0.2)
    assert run.returncode == 0
    # Caches and buffers fill in the first two; after the last the loader processes end.
    epochs = [epoch for epoch in sorted(at_epoch) if 2 < epoch < EPOCHS]
    assert len(epochs) >= EPOCHS - 5
    lasting = set.intersection(*(set(at_epoch[epoch]) for epoch in epochs))
    assert len(lasting) >= 3, "the training process and two loader processes"
    for pid in lasting:
        slope = np.polyfit(epochs, [at_epoch[epoch][pid] for epoch in epochs], 1)[0]
        assert slope < LIMIT, f"process {pid} grows by {slope:.2f} MB an epoch"
