"""Frames of files: images and videos read one after the other."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from utils.core.image_files import ImageError, depth_doubts, read_image
from utils.core.logging import get_logger
from utils.inference.sources import Source, is_utf8

LONGEST_GAP = 100_000  # frames one after the other that can't be read, after which a video is given up: 2 s of tries
DOUBTFUL_END = 0.01  # share of a video's frames by which its header may be wrong
MOST_FRAMES = 10**9  # a year
STREAM_FPS = 30.0  # of what is written from a stream that does not say


@dataclass(frozen=True)
class Frame:
    """One picture of a source.

    Attributes:
        source: where it comes from.
        image: (H, W, 3) uint8 BGR, upright.
        number: of the frame in its video or stream, from 1; 0 for an image file.
        fps: frames per second of the source, after ``vid_stride``; 0 for an image file.
    """

    source: Source
    image: NDArray[np.uint8]
    number: int = 0
    fps: float = 0.0


@dataclass(frozen=True)
class Unread:
    """What of a file could not be read; a warning has said why.

    Attributes:
        source: the file.
        read: frames of a video that could be; 0 if nothing of the file could.
        frames: that there are, as far as that is known.
    """

    source: Source
    read: int = 0
    frames: int = 0


def count_pictures(sources: Sequence[Source], vid_stride: int = 1) -> int | None:
    """Return how many pictures there are as far as headers say, None with a stream among them."""
    total = 0
    for source in sources:
        if source.kind == "stream":
            return None
        frames = 1
        if source.kind == "video":
            capture = _open_video(source.address)
            frames = _frame_count(capture)
            capture.release()
        total += -(-frames // vid_stride)
    return total


def warn_of_depth(sources: Sequence[Source]) -> None:
    """Log a warning if images of 16 bits among some sources are almost black."""
    images = [source.address for source in sources if source.kind == "image"]
    for doubt in depth_doubts(images.__getitem__, len(images)):
        get_logger().warning(doubt)


def read_files(sources: Sequence[Source], vid_stride: int = 1) -> Iterator[Frame | Unread]:
    """Read images and videos one after the other.

    Args:
        sources: files.
        vid_stride: of a video every n-th frame is read, the first one included.

    Yields:
        The pictures; for a file that can't be read, and behind the frames of a video that can be read in part, what of
        it is missing, after a warning.
    """
    for source in sources:
        if source.kind == "image":
            try:
                yield Frame(source, read_image(source.address))
            except ImageError as error:
                get_logger().warning(f"{error}; left out")
                yield Unread(source)
        else:
            yield from _read_video(source, vid_stride)


def in_batches(frames: Iterable[Frame], size: int) -> Iterator[list[Frame]]:
    """Gather frames into lists of ``size``; the last one may be shorter, none is empty."""
    frames = iter(frames)
    while batch := list(itertools.islice(frames, size)):
        yield batch


def _read_video(source: Source, vid_stride: int) -> Iterator[Frame | Unread]:
    """Read a video, over frames that can't be read up to the end that its header names; they count in the numbers."""
    capture = _open_video(source.address)
    frames, fps = _frame_count(capture), frame_rate(capture) / vid_stride
    number = last = read = found = 0  # last: number of the last frame that could be read
    try:
        while (grabbed := capture.grab()) or (number < frames and number - last < LONGEST_GAP):
            wanted = number % vid_stride == 0
            number += 1
            done, image = capture.retrieve() if grabbed and wanted else (grabbed, None)
            if done:
                last, read = number, read + 1
            if done and image is not None:
                found += 1
                yield Frame(source, three_channels(image), number, fps)
    finally:
        capture.release()
    if found == 0:
        reason = "cannot be decoded as a video" if Path(source.address).is_file() else "there is no such file"
        reason = reason if is_utf8(source.address) else "its name is not UTF-8, which OpenCV can't open"
        get_logger().warning(f"{source.address}: {reason}; left out")
        yield Unread(source)
    elif last > read or frames - last > max(1, frames * DOUBTFUL_END):
        frames = max(frames, last)
        text = f"{source.address}: {read} of {frames} frames can be read; it is damaged or cut short"
        if last < frames:  # for some containers OpenCV passes over bad frames without a word, so they are not counted
            text += "; behind a gap, frames have lower numbers than in the whole video"
        get_logger().warning(text)
        yield Unread(source, read, frames)


def _frame_count(capture: cv2.VideoCapture) -> int:
    """Frames that a video has by its header, which may be an estimate; 0 if it says nothing, or nonsense."""
    count = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    return int(count) if 0 < count <= MOST_FRAMES else 0


def _open_video(path: str) -> cv2.VideoCapture:
    """Open a video file; one whose name is not UTF-8, which would end the process, stays closed."""
    return cv2.VideoCapture(path) if is_utf8(path) else cv2.VideoCapture()


def frame_rate(capture: cv2.VideoCapture) -> float:
    """Return the frames per second that an open video or stream states, if that can be true."""
    fps = float(capture.get(cv2.CAP_PROP_FPS))
    return fps if 0.1 <= fps <= 1000 else STREAM_FPS  # nan, 0 and fantasies of broken headers


def three_channels(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a decoded frame, (H, W) or (H, W, C), as (H, W, 3) BGR."""
    if image.ndim == 2 or image.shape[2] == 1:
        image = cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
    return np.ascontiguousarray(image[..., :3], np.uint8)
