"""The pictures of a run: what they show, handed to a process that draws them while training goes on.

Nothing here imports matplotlib. A run hands over plain arrays; a short-lived process (``utils.plots.worker``) takes
what has gathered, draws it and ends. There is never more than one, it is the run's to wait for at its end, and
whatever goes wrong with it is a warning.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from utils.config.yaml_files import ROOT
from utils.core.heartbeat import beating
from utils.core.logging import get_logger
from utils.data.index import LabelIndex
from utils.data.loaders import Batch
from utils.metrics.boxes import cxcywh_to_xyxy
from utils.metrics.confusion import ConfusionMatrix
from utils.metrics.evaluation import ImageResult, Metrics
from utils.plots.drawing import lettering_doubts

BATCHES = 3  # training and validation batches that are shown
IMAGES = 16  # of a batch that are shown
LABELS = 200_000  # in charts of where labels are; of a larger set every second one, third one ...
SHOWN_FROM = 0.25  # confidence of the detections on pictures
RESULTS_EVERY = 10  # epochs
NICENESS = 10  # while the run goes on
PATIENCE = 300  # seconds for drawing, at the end of a run


class Plots:
    """Gathers what is to be drawn and has it drawn; a context manager, whose end waits for the pictures.

    Args:
        run_dir: where the pictures go.
        names: of the classes.
        enabled: False draws nothing: off rank 0, and with ``--noplots``.
    """

    def __init__(self, run_dir: Path, names: Sequence[str], enabled: bool = True) -> None:
        self.run_dir = run_dir.absolute()
        self.names = list(names)
        self.enabled = enabled
        for doubt in lettering_doubts(names) if enabled else ():
            get_logger().warning(doubt)
        self._jobs: list[tuple[str, str, dict[str, Any]]] = []  # path, kind, values: see utils/plots/worker.py
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None  # what the process writes

    def __enter__(self) -> "Plots":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the run failed or was interrupted: nobody wants to wait
            self._kill()

    def add_labels(self, index: LabelIndex) -> None:
        """Show the labels of the training split in ``labels.jpg``."""
        if not self.enabled:
            return
        sample = index.rows[:: -(-len(index.rows) // LABELS) or 1]
        self._add(
            "labels.jpg",
            "labels",
            names=self.names,
            counts=np.bincount(index.rows[:, 0].astype(np.int64), minlength=len(self.names)),
            boxes=np.array(sample[:, 1:5]),
            classes=np.array(sample[:, 0]),
            per_image=np.diff(index.offsets),
        )

    def add_train_batch(self, batch: Batch, index: LabelIndex) -> None:
        """Show a training batch as the network sees it, if it is one of the first of the run."""
        if not self.enabled or batch.epoch > 0 or batch.k >= BATCHES:
            return
        height, width = batch.images.shape[2:]
        targets = batch.targets.numpy()
        corners = cxcywh_to_xyxy(targets[:, 2:6]) * np.array([width, height, width, height], np.float32)
        shown = range(min(len(batch.images), IMAGES))
        self._add_page(
            f"train_batch{batch.k}.jpg",
            # Copies: a view would keep the whole batch in the loader's shared memory.
            [batch.images[i].permute(1, 2, 0).numpy().copy() for i in shown],
            [Path(index.path(i)).name for i in batch.indices[:IMAGES].tolist()],
            [_rows(corners[targets[:, 0] == i], targets[targets[:, 0] == i, 1]) for i in shown],
            f"training batch {batch.k}, {_of(len(shown), len(batch.images))}: augmented, with their labels",
        )
        if batch.k == BATCHES - 1:
            self.draw()

    def add_evaluation(self, metrics: Metrics, images: Sequence[ImageResult], index: LabelIndex) -> None:
        """Show what a validation found: its first batches, the curves and the confusion matrix."""
        if not self.enabled:
            return
        for number in range(BATCHES):
            if batch := [image for image in images if image.batch == number]:
                self._add_validation_batch(number, batch, index)
        figures, names = metrics.per_class, [self.names[i] for i in metrics.per_class.classes]
        pr = figures.curves.precision_at_recall
        self._add("PR_curve.png", "pr", names=names, curves=pr.astype(np.float32), ap50=figures.ap[:, 0])
        words = {"P": "precision", "R": "recall", "F1": "f1"}
        for short, word in words.items():
            self._add(
                f"{short}_curve.png",
                "confidence",
                word=word.replace("f1", "F1"),
                names=names,
                curves=getattr(figures.curves, word).astype(np.float32),
                best=figures.confidence,
            )
        if not len(names):  # nothing was measured
            return
        confusion = ConfusionMatrix(len(self.names))
        for image in images:
            confusion.update(image.detections, image.labels)
        self._add("confusion_matrix.png", "confusion", names=self.names, matrix=confusion.matrix)

    def end_epoch(self, epoch: int, best_epoch: int | None, final: bool) -> None:
        """Show results.csv in ``results.png`` now and then, and have drawn what waits.

        Args:
            epoch: that ended, from 1.
            best_epoch: of best.pt, from 1; None if there is none.
            final: whether it was the last one.
        """
        if not self.enabled:
            return
        if final or epoch % RESULTS_EVERY == 0:
            path = str(self.run_dir / "results.csv")
            self._add("results.png", "results", path=path, best_epoch=best_epoch)
        self.draw()

    def draw(self) -> None:
        """Start to draw what has gathered, if the process before has ended; else it goes on gathering."""
        if self._jobs and not self._running():
            self._start(NICENESS)

    def close(self) -> None:
        """Have the rest drawn and wait for it."""
        self._wait()
        if self._jobs:
            self._start(0)  # at full priority: the run waits for nothing else now
        self._wait()

    def _add(self, name: str, kind: str, **values: Any) -> None:
        path = str(self.run_dir / name)
        self._jobs = [job for job in self._jobs if job[0] != path]  # only its latest state
        self._jobs.append((path, kind, values))

    def _add_page(
        self,
        name: str,
        images: Sequence[str | NDArray[np.uint8]],
        titles: Sequence[str],
        boxes: Sequence[NDArray[np.float32]],
        caption: str,
    ) -> None:
        self._add(name, "page", images=images, titles=titles, boxes=boxes, names=self.names, caption=caption)

    def _add_validation_batch(self, number: int, batch: Sequence[ImageResult], index: LabelIndex) -> None:
        shown = batch[:IMAGES]
        paths = [os.path.abspath(index.path(image.index)) for image in shown]
        titles = [Path(path).name for path in paths]
        labels = [_rows(image.labels[:, 1:5], image.labels[:, 0]) for image in shown]
        sure = [image.detections[image.detections[:, 4] > SHOWN_FROM] for image in shown]
        what = f"validation batch {number}, {_of(len(shown), len(batch))}"
        self._add_page(f"val_batch{number}_labels.jpg", paths, titles, labels, f"{what}: labels")
        caption = f"{what}: detections with confidence above {SHOWN_FROM}"
        self._add_page(f"val_batch{number}_pred.jpg", paths, titles, sure, caption)

    def _start(self, niceness: int) -> None:
        jobs, self._jobs = self._jobs, []
        try:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - a file: no pipe to run full
            with tempfile.TemporaryFile() as work:
                pickle.dump((os.getpid(), niceness, jobs), work)
                work.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "utils.plots.worker"],
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                    stdin=work,
                    stdout=self._said,
                    stderr=self._said,
                )
        except OSError as error:  # no memory, no room, no process
            get_logger().warning(f"pictures of the run are missing: {error}")

    def _running(self) -> bool:
        """Return whether a process is drawing; say what it had to say if it just ended."""
        if self._process is None or self._said is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        if status != 0:
            reason = lines[-1] if lines else f"the process that draws them ended with status {status}"
            get_logger().warning(f"pictures of the run are missing: {reason}")
        self._said.close()
        self._process = self._said = None
        return False

    def _wait(self) -> None:
        if self._process is None:
            return
        try:
            for _ in beating(range(PATIENCE)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                    break
        finally:
            self._kill()
        self._running()

    def _kill(self) -> None:
        """End the process if there is one; drawing never outlives the run."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _rows(corners: NDArray[np.float32], classes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return labels in the form of detections, (n, 6) [x1, y1, x2, y2, nan, class]."""
    return np.column_stack([corners, np.full(len(corners), np.nan), classes]).astype(np.float32)


def _of(shown: int, there: int) -> str:
    return f"{there} images" if shown == there else f"{shown} of {there} images"
