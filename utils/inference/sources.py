"""Where pictures to look at come from: image files, folders, patterns, lists, videos, streams, cameras."""

import contextlib
import glob
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
from numpy.typing import NDArray

from utils.config.yaml_files import ROOT
from utils.core.errors import Problems, UserError, nearest
from utils.core.image_files import IMAGE_SUFFIXES, ImageError, depth_doubts, read_image
from utils.core.logging import get_logger
from utils.data.image_lists import is_hidden

# Of what is taken from folders; a file that is named itself is tried whatever its suffix.
# fmt: off
VIDEO_SUFFIXES = frozenset(
    ["3g2", "3gp", "amv", "asf", "avi", "divx", "dv", "f4v", "flv", "gif", "h264", "h265", "hevc", "m1v", "m2ts",
     "m2v", "m4v", "mjpeg", "mjpg", "mkv", "mov", "mp4", "mpe", "mpeg", "mpg", "mts", "mxf", "ogm", "ogv", "qt",
     "rm", "rmvb", "ts", "vob", "webm", "wmv"]
)
# fmt: on
SCHEMES = ("http", "https", "rtsp", "rtmp")
WEB_PAGES = ("youtube.com", "www.youtube.com", "youtu.be")  # pages around a video, not the video

SHOWN_NAMES = 5  # in a message
LONGEST_GAP = 100_000  # frames one after the other that can't be read, after which a video is given up: 2 s of tries
DOUBTFUL_END = 0.01  # share of a video's frames by which its header may be wrong
MOST_FRAMES = 10**9  # a year
STREAM_FPS = 30.0  # of what is written from a stream that does not say
LAST_CAMERA = 2**31 - 1  # OpenCV takes a C int
CLOSE_WAIT = 2.0  # seconds for all threads to end; one that hangs in a driver or the network ends with the process
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between tries to reach a lost stream

# OpenCV opens one network stream at a time, however many threads want to; so it is known here whose turn it is.
OPENING = threading.Lock()

# Quiet, as utils.core.image_files has OpenCV itself: what goes wrong is said here, once and in words.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")


@dataclass(frozen=True)
class Source:
    """One thing to look at.

    Attributes:
        kind: "image", "video" or "stream"; cameras are streams.
        address: path, URL or number of a camera.
        name: what its results are called; no other source of the run has it.
    """

    kind: str
    address: str
    name: str

    @property
    def shown(self) -> str:
        """The address without user and password, for messages and files."""
        return without_login(self.address)


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


# What a text on the command line means --------------------------------------------------------------------------------


def find_sources(*texts: str) -> list[Source]:
    """Find what ``--source`` means; opens no stream, and of files only those whose suffix says nothing.

    What is left out of a folder, a pattern or a list is counted and named in a warning.

    Args:
        *texts: each an image or a video, a folder of them, a pattern such as ``photos/**/*.jpg``, a ``.txt`` file with
            one of these in each line, a ``.streams`` file with one address in each line, a URL, or the number of a
            camera. A path that is not there is looked for in the program's folder too.

    Returns:
        At least one source, folders and patterns in the order of their names; only streams, or none.

    Raises:
        UserError: there is no such file, or nothing to look at in it.
    """
    problems = Problems()
    found = [entry for text in texts for entry in problems.attempt(partial(_find, text)) or []]
    more = len(problems.messages) - SHOWN_NAMES
    if more > 1:  # what a shell made of a pattern may be thousands
        problems.messages[SHOWN_NAMES:] = [f"--source: the same with {more} more"]
    problems.raise_if_any()
    if len({kind == "stream" for kind, _, _ in found}) > 1:
        raise UserError("--source: streams and files don't go together; look at them in two runs")
    return _named(found)


def _find(text: str) -> list[tuple[str, str, str]]:
    """Return kind, address and stem of each source that a text means."""
    if _is_address(text):
        return [_stream(text, "--source")]
    try:
        path = Path(text).expanduser()
        if not path.exists() and (ROOT / path).exists():
            path = ROOT / path
        if path.suffix.lower() == ".streams" and path.is_file():
            return [_stream(line, str(path)) for line in _lines(path)]
        return _files(text, path)
    except OSError as error:  # a folder that may not be read, a name that is too long
        raise UserError(f"--source {text} cannot be read: {error.strerror}") from None
    except RuntimeError as error:  # ~NAME of a user that is not there
        raise UserError(f"--source {text} cannot be read: {error}") from None


def _files(text: str, path: Path) -> list[tuple[str, str, str]]:
    if path.is_dir():
        nothing = (
            f"the folder holds no image and no video; for those in folders below it give a pattern: '{path}/**/*.*'"
        )
        return _pictures(text, sorted(path.iterdir()), nothing, typed=path.parts)
    if path.is_file() and path.suffix.lower() == ".txt":
        paths = [_listed(line, path) for line in _lines(path)]
        return _pictures(text, paths, "the list names no image and no video", by_content=True)
    if path.is_file():
        return _pictures(text, [path], "OpenCV finds neither an image nor a video in it", by_content=True)
    if glob.has_magic(str(path)):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        by_content = path.suffix != "" and not glob.has_magic(path.suffix)  # *.dat names what is wanted
        return _pictures(text, matches, "no image and no video matches this pattern", path.parts, by_content)
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"--source {text}: there is no such file or folder{nearest(path.name, beside)}")


def _pictures(
    text: str, paths: Sequence[Path], nothing: str, typed: Sequence[str] | None = None, by_content: bool = False
) -> list[tuple[str, str, str]]:
    """Take images and videos, and say what is left out.

    Args:
        text: what was typed, for messages.
        paths: where to look.
        nothing: says that there is no picture at all.
        typed: parts of ``paths`` that are not searched for hidden ones; None if the files were named, each of them.
        by_content: look into files whose suffix tells nothing; else they are left out.
    """
    found, hidden, others = [], [], []
    for path in paths:
        if typed is not None and not path.is_file():
            continue
        kind = _kind(path)
        if kind and typed is not None and any(is_hidden(part) for part in path.parts if part not in typed):
            hidden.append(path.name)
        elif kind := kind or (_kind_by_content(str(path)) if by_content else ""):
            found.append((kind, str(path), path.stem))
        else:
            others.append(path.name)
    if not found:
        raise UserError(f"--source {text}: {nothing}{_some([name for name in others if not text.endswith(name)])}")
    if hidden:
        get_logger().warning(f"--source {text}: hidden pictures left out: {len(hidden)}{_some(hidden)}")
    if others:
        why = "neither images nor videos" if by_content else "no pictures by their suffix"
        get_logger().warning(f"--source {text}: {why}, left out: {len(others)}{_some(others)}")
    return found


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > SHOWN_NAMES else ""
    return f" ({', '.join(names[:SHOWN_NAMES])}{more})" if names else ""


def _is_address(text: str) -> bool:
    return text.isdecimal() or "://" in text or text.split(maxsplit=1)[:1] == ["screen"]


def _kind(path: Path) -> str:
    suffix = path.suffix.lower().removeprefix(".")
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else ""


def _kind_by_content(path: str) -> str:
    """Return "image" or "video" for a file that OpenCV can open as one, else ""."""
    if not _is_text(path) or not os.path.isfile(path) or not os.path.getsize(path):
        return ""
    if cv2.haveImageReader(path):
        return "image"
    capture = cv2.VideoCapture(path)
    opened = capture.isOpened()
    capture.release()
    return "video" if opened else ""


def _lines(path: Path) -> list[str]:
    """The lines of a list, without empty ones and comments."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise UserError(f"--source {path} is not a text file in UTF-8") from None
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"--source {path}: the list is empty")
    return lines


def _listed(line: str, path: Path) -> Path:
    """A file of a list: a path as it is, or from the list's own folder."""
    entry = Path(line).expanduser()
    if not entry.exists() and (path.parent / entry).exists():
        entry = path.parent / entry
    return entry


def _stream(address: str, where: str) -> tuple[str, str, str]:
    if address.isdecimal():
        if len(address) > len(str(LAST_CAMERA)) or int(address) > LAST_CAMERA:
            raise UserError(f"{where}: there is no camera {address[:20]}; cameras are counted from 0")
        return "stream", address, f"camera{address}"
    if "://" not in address and (_kind(Path(address)) == "video" or Path(address).is_file()):  # of a .streams list
        return "stream", address, Path(address).stem
    shown = without_login(address)
    if not _is_text(address):
        raise UserError(f"{where}: {shown} is not UTF-8")
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        port = f"_{parts.port}" if parts.port else ""
    except ValueError as error:
        raise UserError(f"{where}: {shown} is not a URL ({error})") from None
    if address.split(maxsplit=1)[0] == "screen":
        raise UserError(f"{where}: {shown} is not available yet: give images, videos, streams or cameras")
    if parts.scheme.lower() not in SCHEMES or not host:
        raise UserError(
            f"{where}: {shown} is no stream; an address begins with {', '.join(SCHEMES)}, a camera is a number"
        )
    if host in WEB_PAGES:
        raise UserError(f"{where}: {shown} is not available yet: it is a page; give the address of the video itself")
    if _kind(Path(parts.path)) == "image":
        raise UserError(f"{where}: {shown} is an image on a server; download it and give the file")
    return "stream", address, f"{host}{port}{parts.path}"


def without_login(address: str) -> str:
    """Return an address without user and password."""
    # Passwords may hold @ and /: everything up to the last @ goes, which costs no more than an @ in a path.
    return re.sub(r"(://).*@", r"\1", address)


def safe_name(text: str) -> str:
    """Return a text as a file name can have it on any system; letters of every script stay."""
    text = text.encode("utf-8", "replace").decode()  # bytes of a name that are no UTF-8, which OpenCV does not survive
    name = re.sub(r'[\x00-\x1f<>:"/\\|?*]+', "_", text).strip(" ._")
    return name[:100] or "_"


def _named(found: Sequence[tuple[str, str, str]]) -> list[Source]:
    """Give each source a name of its own, so that results don't overwrite each other: a, a-2, a-3.

    Frames of a video are NAME_FRAME, so no image beside a video v may be called v_1; videos choose first. Upper and
    lower case are the same to many file systems.
    """
    taken: set[str] = set()
    videos: set[str] = set()
    tried: dict[str, int] = {}  # numbers up to which a name's copies are taken, so that thousands take no time
    sources = {}
    for place, (kind, address, stem) in sorted(enumerate(found), key=lambda entry: entry[1][0] == "image"):
        name = base = safe_name(stem)
        number = tried.get(base.casefold(), 1)
        while (key := name.casefold()) in taken or re.sub(r"_\d+$", "", key) in videos:
            number += 1
            name = f"{base}-{number}"
        taken.add(key)
        tried[base.casefold()] = number
        if kind != "image":
            videos.add(key)
        sources[place] = Source(kind, address, name)
    return [sources[place] for place in range(len(found))]


# Files ----------------------------------------------------------------------------------------------------------------


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
    frames, fps = _frame_count(capture), _fps(capture) / vid_stride
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
                yield Frame(source, _three_channels(image), number, fps)
    finally:
        capture.release()
    if found == 0:
        reason = "cannot be decoded as a video" if Path(source.address).is_file() else "there is no such file"
        reason = reason if _is_text(source.address) else "its name is not UTF-8, which OpenCV can't open"
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
    return cv2.VideoCapture(path) if _is_text(path) else cv2.VideoCapture()


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8; other bytes are surrogates in Python."""
    return name == name.encode("utf-8", "replace").decode()


def _fps(capture: cv2.VideoCapture) -> float:
    fps = float(capture.get(cv2.CAP_PROP_FPS))
    return fps if 0.1 <= fps <= 1000 else STREAM_FPS  # nan, 0 and fantasies of broken headers


def _three_channels(image: NDArray[Any]) -> NDArray[np.uint8]:
    if image.ndim == 2 or image.shape[2] == 1:
        image = cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
    return np.ascontiguousarray(image[..., :3], np.uint8)


# Streams --------------------------------------------------------------------------------------------------------------


class Stream:
    """A stream or camera, read by a thread of its own that keeps the newest frame only.

    A live stream that is lost is opened again, with growing pauses, until it is given up. One that says how many frames
    it has (a video on a server) is read whole, at the speed of whoever takes the frames. That one, by ``alive``, also
    finds out that a stream is dead, since the thread may hang in a driver or in the network for good.

    Args:
        source: what to open.
        vid_stride: every n-th frame is kept.
        timeout: seconds without a frame after which a stream counts as dead.

    Attributes:
        tried: whether it was its turn to be opened.
        opened: whether there was a frame.
        ended: whether there will be no other one.
    """

    def __init__(self, source: Source, vid_stride: int = 1, timeout: float = 10.0) -> None:
        self.source = source
        self._vid_stride, self._timeout = vid_stride, timeout
        self._frame: Frame | None = None
        self._last_sign = time.monotonic()  # when a frame was taken or passed over
        self._decodes = True  # the last frame that was to be kept
        self.tried = self.opened = self.ended = False
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name=f"stream {source.name}", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Return whether a frame is there or may still come; a stream that is silent for too long is given up."""
        with self._changed:
            if self._frame is not None:
                return True
            if self.ended:
                return False
            if time.monotonic() - self._last_sign <= self._timeout:
                return True
            self.ended = self._stopping = True
            self._changed.notify_all()
        get_logger().warning(f"{self.source.shown}: no frame for {self._timeout:g} s; the stream has ended")
        return False

    def wait_opened(self, wait: float) -> None:
        """Wait for the first frame or the failure, ``wait`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.opened or self.ended, wait)

    def take(self, wait: float) -> Frame | None:
        """Return the newest frame if it was not taken yet, after ``wait`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self.ended, wait)
            frame, self._frame = self._frame, None
            if frame is not None:
                self._last_sign = time.monotonic()
            self._changed.notify_all()
            return frame

    def stop(self) -> None:
        """Tell the thread to end as soon as it can."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, wait: float) -> None:
        """Wait for the end of the thread, ``wait`` seconds at most."""
        self._thread.join(max(wait, 0))

    def _read(self) -> None:
        """Read until the stream ends or is to stop; only this thread touches the capture."""
        try:
            number, finite = self._read_connection(0)
            pause = FIRST_PAUSE
            while self.opened and not finite and not self._stopping:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause)
                before = number
                number, _ = self._read_connection(number)
                pause = FIRST_PAUSE if number > before else min(2 * pause, LONGEST_PAUSE)
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _read_connection(self, number: int) -> tuple[int, bool]:
        """Read one connection to its end.

        Args:
            number: of the last frame before it.

        Returns:
            The number of the last frame, and whether the stream is one with an end.
        """
        capture = self._open()
        finite = capture.get(cv2.CAP_PROP_FRAME_COUNT) > 0
        fps = _fps(capture) / self._vid_stride
        try:
            while not self._stopping and capture.grab():
                number += 1
                if (number - 1) % self._vid_stride:
                    self._skip()
                    continue
                done, image = capture.retrieve()
                self._decodes = done and image is not None
                if self._decodes:
                    self._keep(Frame(self.source, _three_channels(image), number, fps), finite)
        finally:
            capture.release()
        return number, finite

    def _open(self) -> cv2.VideoCapture:
        """Open the source anew; what is returned may be closed."""
        if self.source.address.isdecimal():
            self.tried = True
            return cv2.VideoCapture(int(self.source.address))
        limit = max(2, round(self._timeout * 1000))
        # Half the time for a frame, so that a connection that fell silent is tried anew before the stream is given up;
        # half the time to open it then, so that others have their turn.
        opening = limit // 2 if self.opened else limit
        limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, opening, cv2.CAP_PROP_READ_TIMEOUT_MSEC, limit // 2]
        with OPENING:
            if self._stopping:
                return cv2.VideoCapture()
            self.tried = True
            return cv2.VideoCapture(self.source.address, cv2.CAP_FFMPEG, limits)

    def _keep(self, frame: Frame, finite: bool) -> None:
        with self._changed:
            if finite:
                self._changed.wait_for(lambda: self._frame is None or self._stopping)
            self.opened, self._frame = True, frame
            self._changed.notify_all()

    def _skip(self) -> None:
        """Count a frame between those that are kept as a sign of life, if these can be decoded."""
        if self._decodes:
            with self._changed:
                self._last_sign = time.monotonic()


@contextlib.contextmanager
def open_streams(sources: Sequence[Source], vid_stride: int = 1, timeout: float = 10.0) -> Iterator[list[Stream]]:
    """Hold streams open.

    Raises:
        UserError: lists those that give no picture; ``timeout`` seconds after the last one that did at the latest.
    """
    streams = [Stream(source, vid_stride, timeout) for source in sources]
    try:
        _wait_for_pictures(streams, timeout)
        silent = [stream for stream in streams if not stream.opened]
        # Where one takes all the time the others, whose turn did not come, may be well.
        ended = [stream for stream in silent if stream.ended]
        dead = ended or [stream for stream in silent if stream.tried] or silent
        if dead:
            names = ", ".join(_described(stream.source.shown) for stream in dead)
            raise UserError(
                f"--source: no picture comes from {names} (waited {timeout:g} s at most); "
                "is it running, and is that its right address?"
            )
        yield streams
    finally:
        for stream in streams:
            stream.stop()
        end = time.monotonic() + CLOSE_WAIT
        for stream in streams:
            stream.join(end - time.monotonic())


def _wait_for_pictures(streams: Sequence[Stream], timeout: float) -> None:
    """Wait until each stream has given a picture or failed, or until there was no first picture for some seconds."""
    end, opened = time.monotonic() + timeout, 0
    while time.monotonic() < end and (open_still := [s for s in streams if not s.opened and not s.ended]):
        open_still[0].wait_opened(0.05)
        if sum(stream.opened for stream in streams) > opened:
            end, opened = time.monotonic() + timeout, sum(stream.opened for stream in streams)


def _described(address: str) -> str:
    return f"camera {address}" if address.isdecimal() else address


def read_streams(streams: Sequence[Stream]) -> Iterator[list[Frame]]:
    """Read streams side by side until all have ended.

    Yields:
        The new frames of the moment, one at most of each stream, at least one. A slow stream holds up no other.
    """
    alive = list(streams)
    while alive:
        frames = []
        for stream in alive:
            frame = stream.take(0.02)
            if frame is not None:
                frames.append(frame)
        if frames:
            yield frames
        alive = [stream for stream in alive if stream.alive()]
