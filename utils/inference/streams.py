"""Streams and cameras: opened, read side by side, opened again when they are lost."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import cv2

from utils.core.errors import UserError
from utils.core.logging import get_logger
from utils.inference.frames import Frame, frame_rate, three_channels
from utils.inference.sources import Source

CLOSE_WAIT = 2.0  # seconds for all threads to end; one that hangs in a driver or the network ends with the process
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between tries to reach a lost stream
# OpenCV opens one network stream at a time, however many threads want to; so it is known here whose turn it is.
OPENING = threading.Lock()


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
        fps = frame_rate(capture) / self._vid_stride
        try:
            while not self._stopping and capture.grab():
                number += 1
                if (number - 1) % self._vid_stride:
                    self._skip()
                    continue
                done, image = capture.retrieve()
                self._decodes = done and image is not None
                if self._decodes:
                    self._keep(Frame(self.source, three_channels(image), number, fps), finite)
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
