"""What a detector finds in pictures, for programs: one record per picture, with its boxes in several forms."""

import dataclasses
import functools
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from models.detector import Detector, build_detector
from models.families import Family
from models.yolo import DetectionModel
from utils.config.build import build_config
from utils.config.command_line import given_keywords
from utils.config.flags import DetectConfig
from utils.core.devices import check_half
from utils.core.errors import Problems, UserError, nearest
from utils.core.image_files import dark_doubts, looked_at
from utils.core.logging import get_logger
from utils.inference.detection_files import annotate, crop, write_image
from utils.inference.frames import Frame, in_batches, read_files, warn_of_depth
from utils.inference.sources import Source, find_sources
from utils.inference.streams import open_streams, read_streams
from utils.metrics.boxes import xyxy_to_cxcywh
from utils.plots.drawing import lettering_doubts

if TYPE_CHECKING:
    import pandas as pd

# Flags of detect.py that say what is found and how it is read; the others say what is written or shown.
KEYWORDS = (
    "imgsz",
    "batch_size",
    "vid_stride",
    "stream_timeout",
    "conf_thres",
    "iou_thres",
    "max_det",
    "classes",
    "augment",
    "agnostic_nms",
    "device",
    "half",
)
BATCH = 16  # the pictures of a folder or list are there at once; detect.py, which takes streams too, has 1
DEEP_PIL = "I;16"  # start of PIL's modes of 16 bits
UNNAMED = Source("image", "", "")  # arrays and PIL images
WANTED = "give a path, a URL, the number of a camera, an array (H, W, 3), a PIL image, or a list of these"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What was found in one picture. Its length is the number of boxes; printed it says how many of which class.

    Attributes:
        image: (H, W, 3) uint8 BGR, upright, as it was read; what was given as such an array is not copied.
        path: file or address (without user and password) it comes from, "" for arrays and PIL images.
        frame: number in its video or stream, from 1; None for an image.
        names: of the classes, index = class id.
        boxes: (N, 6) float32 [x1, y1, x2, y2, confidence, class], pixels of ``image``, best first; (0, 6) if nothing
            was found.
    """

    image: NDArray[np.uint8]
    path: str
    frame: int | None
    names: Sequence[str]
    boxes: NDArray[np.float32]

    @property
    def xyxy(self) -> NDArray[np.float32]:
        """Corners (N, 4) [x1, y1, x2, y2], pixels."""
        return self.boxes[:, :4]

    @property
    def cxcywh(self) -> NDArray[np.float32]:
        """Center and size (N, 4) [cx, cy, w, h], pixels."""
        return xyxy_to_cxcywh(self.xyxy)

    @property
    def xyxyn(self) -> NDArray[np.float32]:
        """Corners (N, 4), divided by the image's size."""
        return self.xyxy / self._size

    @property
    def cxcywhn(self) -> NDArray[np.float32]:
        """Center and size (N, 4), divided by the image's size: what label files have."""
        return self.cxcywh / self._size

    @property
    def conf(self) -> NDArray[np.float32]:
        """Confidences (N,), in [0, 1]."""
        return self.boxes[:, 4]

    @property
    def cls(self) -> NDArray[np.int64]:
        """Class ids (N,)."""
        return self.boxes[:, 5].astype(np.int64)

    def plot(
        self,
        line_thickness: int = DetectConfig.line_thickness,
        hide_labels: bool = DetectConfig.hide_labels,
        hide_conf: bool = DetectConfig.hide_conf,
    ) -> NDArray[np.uint8]:
        """Return a copy of the image (H, W, 3) BGR with the boxes drawn; the arguments are detect.py's flags."""
        if not hide_labels:
            _warn_of_lettering(tuple(self.names))
        return annotate(self.image, self.boxes, self.names, line_thickness, hide_labels, hide_conf)

    def save(self, path: str | Path) -> None:
        """Write the image with the boxes drawn; the suffix says the format.

        Raises:
            UserError: the file can't be written, or there is no such format.
        """
        write_image(Path(path), self.plot())

    def crops(self) -> list[NDArray[np.uint8]]:
        """Return what is in each box, (h, w, 3) BGR each: parts of ``image``, not copied."""
        return [crop(self.image, box) for box in self.xyxy.tolist()]

    def to_pandas(self) -> "pd.DataFrame":
        """Return a table of the boxes.

        Returns:
            N rows, pixels: xmin, ymin, xmax, ymax, confidence, class (a number), name.
        """
        import pandas as pd  # half a second, which only those pay who want a table

        table = pd.DataFrame(self.boxes[:, :5], columns=["xmin", "ymin", "xmax", "ymax", "confidence"], copy=True)
        table["class"] = self.cls
        table["name"] = pd.Series([self.names[class_id] for class_id in self.cls], dtype=object)
        return table

    def __len__(self) -> int:
        return len(self.boxes)

    def __str__(self) -> str:
        counts = Counter(self.names[class_id] for class_id in self.cls).most_common()
        return ", ".join(f"{count} {_counted(name, count)}" for name, count in counts) or "nothing found"

    def __repr__(self) -> str:
        height, width = self.image.shape[:2]
        where = f"{self.path}, " * bool(self.path) + (f"frame {self.frame}, " if self.frame else "")
        return f"Prediction({where}{width} x {height} pixels: {self})"

    @property
    def _size(self) -> NDArray[np.float32]:
        height, width = self.image.shape[:2]
        return np.array([width, height, width, height], np.float32)


def _counted(name: str, count: int) -> str:
    return f"{name}s" if count > 1 and re.search("[a-rt-zA-RT-Z]$", name) else name


@functools.cache  # said once, not for every picture
def _warn_of_lettering(names: tuple[str, ...]) -> None:
    for doubt in lettering_doubts(names):
        get_logger().warning(doubt)


def predict_config(keywords: Mapping[str, Any], weights: str) -> DetectConfig:
    """Make a configuration of what a call from Python names.

    Args:
        keywords: flags of detect.py as keywords; None is the default.
        weights: what messages call the network.

    Raises:
        UserError: unknown keywords, wrong types, values out of range: all of them at once.
    """
    kept = [item for item in dataclasses.fields(DetectConfig) if item.name in KEYWORDS]
    known = {
        spelling.lstrip("-").replace("-", "_") for item in kept for spelling in (item.name, *item.metadata["aliases"])
    }
    problems = Problems()
    for name in keywords:
        if name not in known:
            longer = [word for word in known if word.startswith(name)]  # how people shorten them
            hint = f"; did you mean {longer[0]}?" if len(longer) == 1 else nearest(name, known)
            problems.add(f"{name} is not a keyword of predict(){hint}")
    given = {name: value for name, value in keywords.items() if name in known and value is not None}
    typed = problems.attempt(lambda: given_keywords(DetectConfig, given)) or {}
    config = problems.attempt(lambda: build_config(DetectConfig, {"batch_size": BATCH, **typed, "weights": weights}))
    problems.raise_if_any()
    assert config is not None
    return config


def predict(
    source: Any,
    model: DetectionModel,
    family: Family,
    trained_at: int,
    config: DetectConfig,
    device: torch.device,
    stream: bool = False,
) -> Generator[Prediction, None, None]:
    """Find objects in pictures, batch after batch as they are asked for.

    Args:
        source: what `find_sources` takes, the number of a camera, an array as OpenCV reads it (uint8, (H, W, 3) BGR,
            (H, W, 4) BGRA or (H, W) gray), a PIL image, or a list of these. A PIL image is taken as its pixels lie,
            without its EXIF orientation; files are turned upright.
        model: the raw network, in evaluation mode, on ``device``.
        family: of the network.
        trained_at: the image size in pixels that ``imgsz=0`` means.
        config: see `predict_config`.
        device: where the network is.
        stream: whether the caller takes pictures as they come; streams, which may have no end, need it.

    Returns:
        A generator of a prediction for each picture, in the order of the sources; of none for an empty list. Closing it
        closes streams. Unreadable files in a folder, pattern or list file are left out with a warning.

    Raises:
        UserError: lists what is wrong with source and flags, before anything is read; while reading: nothing of an
            entry can be read, or a stream gives no picture.
    """
    problems = Problems()
    problems.attempt(lambda: check_half(config.half, device))
    detector = problems.attempt(lambda: build_detector(model, family, trained_at, config, device))
    streams, files = _look_at(source, config.vid_stride, problems)
    if streams and not stream:
        problems.add("a stream may have no end; take its pictures as they come: for found in predict(..., stream=True)")
    if streams and files:
        problems.add("streams and other sources don't go into one list; call predict() for each kind")
    problems.raise_if_any()
    assert detector is not None
    return _predictions(detector, streams, itertools.chain.from_iterable(files), config)


def _predictions(
    detector: Detector, streams: Sequence[Source], frames: Iterable[Frame], config: DetectConfig
) -> Generator[Prediction, None, None]:
    """Read streams, or else frames, and yield what is found in them."""
    names = detector.model.names
    with ExitStack() as stack:
        if streams:
            batches = read_streams(stack.enter_context(open_streams(streams, config.vid_stride, config.stream_timeout)))
        else:
            batches = in_batches(frames, config.batch_size)
        for batch in batches:
            for frame, boxes in zip(batch, detector([frame.image for frame in batch]), strict=True):
                yield Prediction(frame.image, frame.source.shown, frame.number or None, names, boxes)


def _look_at(source: Any, vid_stride: int, problems: Problems) -> tuple[list[Source], list[Iterable[Frame]]]:
    """Sort entries into streams, and all others in their order; arrays are looked at, files are not opened yet."""
    streams: list[Source] = []
    files: list[Iterable[Frame]] = []
    named: list[Source] = []
    deep: list[tuple[str, Any]] = []
    for number, entry in enumerate(source if isinstance(source, list | tuple) else [source]):
        label = f"source[{number}]" if isinstance(source, list | tuple) else "source"
        if isinstance(entry, str | os.PathLike) or (isinstance(entry, int) and not isinstance(entry, bool)):
            text = str(entry)
            found = problems.attempt(partial(find_sources, text)) or []
            if found and found[0].kind == "stream":
                streams += found
            else:
                named += found
                files.append(_read(text, found, vid_stride))
        elif isinstance(entry, np.ndarray):
            problems.attempt(partial(_check_array, label, entry))
            files.append(_read_array(entry))
        elif _is_pil(entry):
            problems.attempt(partial(_check_pil, label, entry))
            files.append(_read_pil(label, entry))
            if entry.mode.startswith(DEEP_PIL):
                deep.append((label, entry))
        else:
            problems.add(f"{label} is of type {type(entry).__name__}; {WANTED}")
    if not problems:
        warn_of_depth(named)
        _warn_of_dark(deep)
    return streams, files


def _read(text: str, sources: Sequence[Source], vid_stride: int) -> Iterator[Frame]:
    """Read the images and videos that a text means."""
    nothing = True
    for item in read_files(sources, vid_stride):
        if isinstance(item, Frame):
            nothing = False
            yield item
    if nothing:
        raise UserError(f"--source {text}: nothing in it can be read")


def _check_array(label: str, array: NDArray[Any]) -> None:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4) or array.size == 0:
        raise UserError(
            f"{label} is an array of {array.dtype} with shape {array.shape}; images are uint8 as OpenCV reads them: "
            "(H, W, 3) BGR, (H, W, 4) BGRA or (H, W) gray, several of them a list"
        )


def _read_array(array: NDArray[np.uint8]) -> Iterator[Frame]:
    if array.ndim == 2 or array.shape[2] == 1:
        array = np.asarray(cv2.cvtColor(array, cv2.COLOR_GRAY2BGR), np.uint8)
    yield Frame(UNNAMED, np.ascontiguousarray(array[..., :3]))


def _is_pil(entry: Any) -> bool:
    """Whether this is a PIL image; without that package there is none."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(entry, module.Image)


def _check_pil(label: str, image: Any) -> None:
    if image.mode in ("I", "F") or 0 in image.size:
        raise UserError(
            f"{label} is a PIL image of mode {image.mode} with {image.width} x {image.height} pixels; "
            "give one with 8 bits a channel"
        )


def _warn_of_dark(images: Sequence[tuple[str, Any]]) -> None:
    """Log a warning if PIL images of 16 bits, each with its name, are almost black."""
    brightest = {}
    for label, image in (images[i] for i in looked_at(len(images))):
        with suppress(OSError, SyntaxError):  # said when it is its turn
            brightest[label] = int(np.asarray(image).max())
    for doubt in dark_doubts(brightest):
        get_logger().warning(doubt)


def _read_pil(label: str, image: Any) -> Iterator[Frame]:
    try:
        if image.mode.startswith(DEEP_PIL):  # PIL would clip to 255 what is scaled when files of 16 bits are read
            yield from _read_array((np.asarray(image) >> 8).astype(np.uint8))
        else:
            yield Frame(UNNAMED, np.ascontiguousarray(np.asarray(image.convert("RGB"), np.uint8)[..., ::-1]))
    except (OSError, SyntaxError) as error:  # what PIL raises for files that are cut short or damaged
        raise UserError(f"{label} can't be read: {error}") from error
