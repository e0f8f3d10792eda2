"""What detections leave behind: annotated images and videos, label files, a table, crops."""

import csv
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from utils.config.flags import VIDEO_CODECS, DetectConfig
from utils.core.errors import Problems, UserError
from utils.core.logging import get_logger
from utils.inference.frames import STREAM_FPS, Frame
from utils.inference.sources import Source, safe_name
from utils.plots.drawing import draw_detections, written_name

CSV_COLUMNS = ("Image Name", "Prediction", "Confidence", "Class", "X1", "Y1", "X2", "Y2", "Frame", "Source")
KEPT_SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"])  # others become .jpg
MAX_VIDEO_FPS = 240.0


def label_rows(detections: NDArray[np.float32], height: int, width: int, corners: bool, confidence: bool) -> str:
    """Return the label file of an image.

    Args:
        detections: (K, 6) [x1, y1, x2, y2, confidence, class], pixels.
        height: of the image, pixels.
        width: of the image, pixels.
        corners: rows [class, x1, y1, x2, y2] instead of [class, cx, cy, w, h].
        confidence: add it as the last column.

    Returns:
        One line per detection, coordinates divided by the image's size; '' without any.
    """
    lines = []
    for x1, y1, x2, y2, conf, class_id in detections.astype(np.float64).tolist():
        if corners:
            box = (x1 / width, y1 / height, x2 / width, y2 / height)
        else:
            box = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        numbers = [*box, conf] if confidence else box
        lines.append(f"{int(class_id)} " + " ".join(f"{number:.6g}" for number in numbers) + "\n")
    return "".join(lines)


def annotate(
    image: NDArray[np.uint8],
    detections: NDArray[np.float32],
    names: Sequence[str],
    line_thickness: int = DetectConfig.line_thickness,
    hide_labels: bool = DetectConfig.hide_labels,
    hide_conf: bool = DetectConfig.hide_conf,
) -> NDArray[np.uint8]:
    """Return a copy of an image with its detections drawn.

    Args:
        image: (H, W, 3) uint8 BGR.
        detections: (K, 6) [x1, y1, x2, y2, confidence, class], pixels.
        names: of the classes.
        line_thickness: of the boxes in pixels; 0 = in proportion to the image.
        hide_labels: boxes only.
        hide_conf: class names without confidences.
    """
    classes = detections[:, 5].astype(int).tolist()
    shown = {class_id: written_name(names[class_id], class_id) for class_id in set(classes)}
    labels = [
        "" if hide_labels else shown[class_id] if hide_conf else f"{shown[class_id]} {conf:.2f}"
        for class_id, conf in zip(classes, detections[:, 4].tolist(), strict=True)
    ]
    return draw_detections(image, detections[:, :4], labels, classes, line_thickness)


def crop(image: NDArray[np.uint8], box: Sequence[float]) -> NDArray[np.uint8]:
    """Return the pixels that a box xyxy touches, one at least."""
    height, width = image.shape[:2]
    left, top = min(max(math.floor(box[0]), 0), width - 1), min(max(math.floor(box[1]), 0), height - 1)
    right, bottom = max(math.ceil(box[2]), left + 1), max(math.ceil(box[3]), top + 1)
    return image[top:bottom, left:right]


def write_image(path: Path, image: NDArray[np.uint8]) -> None:
    """Write an image whose suffix says its format.

    Raises:
        UserError: the file can't be written.
    """
    limit = 16383 if path.suffix == ".webp" else 65535 if path.suffix in (".jpg", ".jpeg") else 2**31
    if max(image.shape) > limit:
        path = path.with_suffix(".png")
    try:
        encoded, data = cv2.imencode(path.suffix, image)  # OpenCV itself can't write to every name
        if not encoded:
            raise UserError(f"{path} can't be written: OpenCV can't encode this image as {path.suffix}")
        path.write_bytes(data.tobytes())
    except (OSError, cv2.error) as error:
        raise UserError(f"{path} can't be written: {getattr(error, 'strerror', None) or error}") from error


class DetectionFiles:
    """The files of one run of detect.py. Those of a run before are overwritten, never added to.

    Args:
        run_dir: an existing folder.
        config: says what is written.
        names: of the classes.
    """

    def __init__(self, run_dir: Path, config: DetectConfig, names: Sequence[str]) -> None:
        self.run_dir, self._config, self._names = run_dir, config, names
        self._videos: dict[Source, _Video] = {}
        self._crops: set[str] = set()
        self._said_codec = False
        if config.save_txt:
            self._make("labels")
        self._csv_path = run_dir / "predictions.csv"
        if config.save_csv:
            self._csv_rows([CSV_COLUMNS], "w")

    def write(self, frame: Frame, detections: NDArray[np.float32], picture: NDArray[np.uint8] | None) -> None:
        """Write everything about one picture.

        Args:
            frame: the picture.
            detections: (K, 6) [x1, y1, x2, y2, confidence, class], pixels of the picture, best first.
            picture: the same with the detections drawn; not needed with ``--nosave``.

        Raises:
            UserError: a file can't be written.
        """
        config = self._config
        stem = f"{frame.source.name}_{frame.number}" if frame.number else frame.source.name
        if config.save_txt:
            height, width = frame.image.shape[:2]
            rows = label_rows(detections, height, width, config.save_format == 1, config.save_conf)
            _write_text(self.run_dir / "labels" / f"{stem}.txt", rows)
        if config.save_csv:
            self._csv_rows(self._table(frame, detections), "a")
        if config.save_crop:
            for detection in detections.tolist():
                self._write_crop(frame, stem, detection)
        if not config.nosave:
            assert picture is not None
            self._write_picture(frame, picture)

    def finish(self, source: Source) -> None:
        """Close the video of a source, if it has one, so that it can be played.

        Raises:
            UserError: it could not be written.
        """
        video = self._videos.pop(source, None)
        if video is not None:
            video.close()

    def close(self) -> None:
        """Close all videos, also when some could not be written.

        Raises:
            UserError: lists these.
        """
        problems = Problems()
        for source in list(self._videos):
            problems.attempt(partial(self.finish, source))
        problems.raise_if_any()

    def _write_picture(self, frame: Frame, picture: NDArray[np.uint8]) -> None:
        if frame.number == 0:
            suffix = Path(frame.source.address).suffix.lower()
            suffix = suffix if suffix in KEPT_SUFFIXES else ".jpg"
            write_image(self.run_dir / f"{frame.source.name}{suffix}", picture)
            return
        if frame.source not in self._videos:
            path = self.run_dir / f"{frame.source.name}.mp4"
            codec = self._config.video_codec
            if codec == "auto" and frame.source.kind == "stream":
                codec = VIDEO_CODECS[-1]  # others would miss most of the frames while they write one
            video = self._videos[frame.source] = _Video(path, frame.fps, picture.shape[:2], codec)
            if codec == "auto":
                self._say_codec(path, video.codec)
        self._videos[frame.source].write(picture)

    def _say_codec(self, path: Path, codec: str) -> None:
        """Say once what is written where it is not H.264, which browsers play and which is quick to write."""
        others = f"{path.name} and other videos are written as {codec}"
        if codec == "mp4v" and not self._said_codec:
            get_logger().warning(f"{others}, which browsers don't play: this OpenCV can't write avc1 or vp09")
        elif codec == "vp09" and not self._said_codec:
            get_logger().info(f"{others}, which browsers play; --video-codec mp4v is many times as fast to write")
        self._said_codec = True

    def _table(self, frame: Frame, detections: NDArray[np.float32]) -> list[tuple[Any, ...]]:
        source = frame.source
        name = f"{source.name}{Path(source.address).suffix}" if frame.number == 0 else f"{source.name}.mp4"
        rows = []
        for *box, conf, class_id in detections.tolist():
            numbers = [f"{conf:.4f}", int(class_id), *(f"{value:.2f}" for value in box), frame.number]
            rows.append((name, self._names[int(class_id)], *numbers, source.shown))
        return rows

    def _csv_rows(self, rows: Sequence[Sequence[Any]], mode: str) -> None:
        try:
            with self._csv_path.open(mode, encoding="utf-8", errors="surrogateescape", newline="") as file:
                csv.writer(file).writerows(rows)
        except OSError as error:
            raise UserError(f"{self._csv_path} can't be written: {error.strerror}") from error

    def _write_crop(self, frame: Frame, stem: str, detection: Sequence[float]) -> None:
        """Write a crop under a name that no other crop of this run has: NAME.jpg, NAME-2.jpg."""
        folder = self._make(f"crops/{safe_name(self._names[int(detection[5])])}")
        number, path = 1, folder / f"{stem}.jpg"
        while str(path).casefold() in self._crops:
            number += 1
            path = folder / f"{stem}-{number}.jpg"
        self._crops.add(str(path).casefold())
        write_image(path, crop(frame.image, detection[:4]))

    def _make(self, name: str) -> Path:
        folder = self.run_dir / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} can't be made: {error.strerror}") from error
        return folder


def _write_text(path: Path, text: str) -> None:
    """Write a label file; without rows there is none, also none of an earlier run."""
    try:
        if text:
            path.write_text(text, encoding="utf-8", newline="\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def check_codec(codec: str) -> None:
    """Raise a UserError if this OpenCV can't write videos of a ``--video-codec``."""
    with tempfile.TemporaryDirectory() as folder:
        writer = _writer(Path(folder, "test.mp4"), codec, STREAM_FPS, (64, 64))
        opened = writer.isOpened()
        writer.release()
    if not opened:
        raise UserError(f"--video-codec {codec}: this OpenCV can't write it; leave the flag out, or choose mp4v")


def _writer(path: Path, codec: str, fps: float, shape: tuple[int, int]) -> cv2.VideoWriter:
    return cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, shape[::-1])


class _Video:
    """An mp4 file that is being written; all its frames have the size of the first one."""

    def __init__(self, path: Path, fps: float, shape: tuple[int, ...], codec: str) -> None:
        self.path, self.shape = path, shape
        self.even = (shape[0] // 2 * 2, shape[1] // 2 * 2)  # the format has no others
        fps = round(min(fps, MAX_VIDEO_FPS), 3) or STREAM_FPS
        for self.codec in VIDEO_CODECS if codec == "auto" else (codec,):
            self.writer = _writer(path, self.codec, fps, self.even)
            if self.writer.isOpened():
                return
        raise UserError(
            f"{path} can't be written as an mp4 video of {shape[1]} x {shape[0]} pixels: the folder or this "
            "OpenCV (2 to 8191 pixels a side) does not allow it; --nosave goes without, --save-txt writes the boxes"
        )

    def write(self, picture: NDArray[np.uint8]) -> None:
        if picture.shape[:2] != self.shape:
            picture = np.asarray(cv2.resize(picture, (self.shape[1], self.shape[0])), np.uint8)
        self.writer.write(np.ascontiguousarray(picture[: self.even[0], : self.even[1]]))

    def close(self) -> None:
        self.writer.release()
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"{self.path} could not be written: {error.strerror}") from error
        if size == 0:
            raise UserError(f"{self.path} could not be written; is the disk full?")
