"""Files from servers: fetched when they are named and not there, each whole or not at all, once for all who ask.

No connection is opened for a file that is there. Two variables of the environment change where files come from:
``LOCKSTEP_OFFLINE=1`` forbids to fetch, ``LOCKSTEP_MIRROR=https://host/folder`` takes every file from one folder of a
server, by its name. Proxies are those of the environment (``https_proxy``, ``no_proxy``).
"""

import contextlib
import errno
import glob
import hashlib
import os
import re
import shutil
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tqdm import tqdm

from utils.config.published import WEIGHTS, Published
from utils.core.errors import UserError
from utils.core.heartbeat import beat, beating
from utils.core.logging import get_logger
from utils.core.whole_files import replacing

OFFLINE, MIRROR = "LOCKSTEP_OFFLINE", "LOCKSTEP_MIRROR"
STALL, LEAST = 30.0, 1 << 14  # a server that can't be reached or brings fewer bytes in so many seconds is given up
TRIES, PAUSE = 4, 1.0  # seconds before the second try, twice as long before each further one
PIECE = 1 << 18  # bytes read at a time
ROOM_EVERY = 64 << 20  # bytes after which the disk is looked at again
SPARE = 64 << 20  # bytes of a disk that are left free
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
LOCK_POLL = 0.1  # seconds


class _GiveUpError(Exception):
    """Trying again is of no use; the message says why."""


class _TryAgainError(Exception):
    """The next try may do better."""


class _UnreachableError(_TryAgainError):
    """There was no connection at all."""


# What is asked for ----------------------------------------------------------------------------------------------------


def fetch_weights(path: Path, flag: str = "--weights") -> None:
    """Fetch published weights if they are named and not there; else do nothing.

    Args:
        path: where the user wants them; its name says which they are.
        flag: that named it, for messages; may be "".

    Raises:
        UserError: they can't be fetched; it says what to get by hand, and where to put it.
    """
    if path.name in WEIGHTS:
        fetch({path: WEIGHTS[path.name]}, f"{flag} {path}".lstrip())


def fetch(files: Mapping[Path, Published], what: str) -> list[Path]:
    """Fetch files that are not there. Each is written beside its place and renamed when it is whole.

    Args:
        files: by where they go; folders are made.
        what: that they are needed for, for messages: "--weights yolov5s.pt".

    Returns:
        Those that this call has fetched.

    Raises:
        UserError: one can't be fetched, written, or is not what was published; it says what to get by hand and where
            to put it. Nothing of that file is left.
    """
    fetched = []
    for target, file in files.items():
        try:
            if _is_offline() and not os.path.exists(target):
                raise _GiveUpError(f"{OFFLINE} is set")
            with contextlib.ExitStack() as stack:
                if not os.path.exists(target):
                    stack.enter_context(locked(target))
                if not os.path.exists(target):  # else another process was faster
                    _fetch_one(file, target)
                    fetched.append(target)
        except (_GiveUpError, _TryAgainError) as error:
            missing = [(path, one) for path, one in files.items() if not os.path.exists(path)]
            lines = [f"  {shown(one.address)}  ->  {os.path.abspath(path)}" for path, one in missing]
            text = (
                f"{what} is not there and can't be fetched: {error}; get it by hand and put it where the arrow leads:"
            )
            raise UserError("\n".join([text, *lines])) from None
        except OSError as error:
            raise UserError(f"{what} can't be fetched to {os.path.abspath(target)}: {error.strerror}") from None
    return fetched


def file_name(address: str) -> str:
    """Return the name that the file of an address gets: the end of its path, fit for any file system."""
    name = re.sub(r"[^\w.-]+", "_", unquote(urlsplit(address).path).rpartition("/")[2]).strip("._-")
    return name[-100:] or "download"


def shown(address: str) -> str:
    """Return an address without what may be secret in it: user, password, query."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    text = f"{parts.scheme}://{host}{parts.path}" + ("?..." if parts.query else "")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def check_online(what: str) -> None:
    """Refuse to use the network where the environment forbids it.

    Raises:
        UserError: LOCKSTEP_OFFLINE is set.
    """
    if _is_offline():
        raise UserError(f"{what}: {OFFLINE} is set, so nothing is fetched")


def _is_offline() -> bool:
    return os.environ.get(OFFLINE, "") not in ("", "0")


# One file -------------------------------------------------------------------------------------------------------------


def _fetch_one(file: Published, target: Path) -> None:
    """Fetch a file that is not there; the caller holds its lock."""
    mirror = os.environ.get(MIRROR, "").rstrip("/")
    address = f"{mirror}/{file_name(file.address)}" if mirror else file.address
    try:
        usable = urlsplit(address).scheme.lower() in ("https", "http") and bool(urlsplit(address).hostname)
    except ValueError:  # half an IPv6 address
        usable = False
    if not usable:
        raise _GiveUpError(f"{shown(address)} is no https or http address")
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):  # of a process that is gone
        left.unlink(missing_ok=True)
    size = f"{file.size / 1e6:.1f} MB, " if file.size else ""
    get_logger().info(f"fetching    {shown(address)} to {target} ({size}{file.license})")
    with replacing(target) as opened:
        _receive(address, file, _Part(opened, file))


class _Part:
    """What has come of a file so far."""

    def __init__(self, opened: IO[bytes], file: Published) -> None:
        self._opened, self._file = opened, file
        self.tag = ""  # of this version of the file; with it a server may go on where it stopped
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self._opened.seek(0)
        self._opened.truncate()
        self.size, self.start, self._looked_at = 0, b"", 0
        kind, _, _ = self._file.digest.partition(":")
        self._sum = hashlib.new(kind, usedforsecurity=False) if kind else None

    def make_room(self, needed: int) -> None:
        """Check that so many further bytes find room, so that no disk is filled to its end."""
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(self._opened.name))).free
        if needed + SPARE > free:
            raise _GiveUpError(f"it needs {(needed + SPARE) / 1e6:.0f} MB of disk, {free / 1e6:.0f} MB are free")

    def write(self, piece: bytes) -> None:
        """Add what came; of a length that was not announced, no more than there is room for."""
        if self.size + len(piece) - self._looked_at > ROOM_EVERY:
            self.make_room(len(piece))
            self._looked_at = self.size
        try:
            self._opened.write(piece)
        except OSError as error:
            raise _GiveUpError(f"it can't be written: {error.strerror}") from None
        self.size += len(piece)
        self.start = self.start or piece[:20]
        if self._sum is not None:
            self._sum.update(piece)
        if self._file.size and self.size > self._file.size:
            raise _GiveUpError(f"the server sends more than the {self._file.size} bytes that were published")

    def check(self, total: int | None) -> None:
        """Check that all is there, and what was published."""
        total = self._file.size if total is None else total
        if total is not None and self.size != total:
            raise _TryAgainError(f"the connection ended after {self.size} of {total} bytes")
        if not self.start.startswith(self._file.start):
            raise _GiveUpError(f"the server sent something else, which begins with {self.start!r}")
        found = f"{self._sum.name}:{self._sum.hexdigest()}" if self._sum is not None else ""
        if found != self._file.digest:
            self.restart()
            self.tag = ""
            raise _TryAgainError(f"what came has the digest {found}, the published file {self._file.digest}")


def _receive(address: str, file: Published, part: _Part) -> None:
    """Fill a part; try again after what may be over soon."""
    for attempt in range(TRIES):
        try:
            with _network_errors():
                _try_once(address, file, part)
            return
        except _TryAgainError as error:
            if attempt == TRIES - 1 or (attempt == 0 and isinstance(error, _UnreachableError)):
                raise
            pause = PAUSE * 2**attempt
            get_logger().warning(f"{shown(address)}: {error}; trying again in {pause:g} s")
            time.sleep(pause)


def _try_once(address: str, file: Published, part: _Part) -> None:
    headers = {"User-Agent": "lockstep", "Accept-Encoding": "identity"}
    if part.size and part.tag:
        headers |= {"Range": f"bytes={part.size}-", "If-Range": part.tag}
    opener = build_opener(_Redirects(urlsplit(address).scheme.lower()))
    with opener.open(Request(address, headers=headers), timeout=STALL) as response:
        if response.status != 206 or f"bytes {part.size}-" not in response.headers.get("Content-Range", ""):
            part.restart()
            if response.status == 206:
                part.tag = ""
                raise _TryAgainError("the server sent another part than was asked for")
        tag = response.headers.get("ETag", "")
        part.tag = "" if tag.startswith("W/") else tag  # weak ones do not tell bytes apart
        length = response.headers.get("Content-Length", "")
        total = part.size + int(length) if length.isdecimal() else None
        if file.size and total not in (None, file.size):
            raise _GiveUpError(f"the server's file has {total} bytes, the published one {file.size}")
        if total is not None:
            part.make_room(total - part.size)
        name, kept = file_name(address), part.size
        with tqdm(None, name, total, initial=kept, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            for piece in beating(_pieces(response)):
                part.write(piece)
                bar.update(len(piece))
    part.check(total)


def _pieces(response: HTTPResponse) -> Iterator[bytes]:
    """Yield what comes as it comes; a trickle is as good as nothing."""
    since, came = time.monotonic(), 0
    while piece := response.read1(PIECE):
        yield piece
        came += len(piece)
        if came >= LEAST:
            since, came = time.monotonic(), 0
        elif time.monotonic() - since > STALL:
            raise TimeoutError


@contextlib.contextmanager
def _network_errors() -> Iterator[None]:
    """Turn what goes wrong on a network into our own words."""
    try:
        yield
    except HTTPError as error:
        error.close()
        text = f"the server answers {error.code} {' '.join(str(error.reason).split())}"
        raise (_TryAgainError if error.code in TRY_AGAIN else _GiveUpError)(text) from None
    except URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLError):
            raise _GiveUpError(f"no safe connection ({reason})") from None
        words = "no answer" if isinstance(reason, TimeoutError) else getattr(reason, "strerror", None) or reason
        raise _UnreachableError(f"no connection ({words})") from None
    except TimeoutError:
        raise _TryAgainError(f"hardly anything came for {STALL:g} seconds") from None
    except (HTTPException, OSError, ValueError) as error:
        raise _TryAgainError(f"the connection broke ({error or type(error).__name__})") from None


class _Redirects(HTTPRedirectHandler):
    """Follows to https, and to http from where http was asked for; never to a file of this machine."""

    def __init__(self, began: str) -> None:
        self.began = began

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if urlsplit(newurl).scheme not in {"https", self.began}:
            raise _GiveUpError(f"the server leads to {shown(newurl)}, which is no https address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# Taking turns ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Be the only process that makes a file or folder, waiting for others to end; the folder above it is made.

    The lock is a file beside it that the system releases with its process, and that is removed in the end.

    Raises:
        OSError: there is no place for the lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.with_name(f".{target.name}.lock")
    descriptor, held, told = -1, False, False
    try:
        while not held:
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
            held = _take(descriptor) and _is_at(descriptor, place)
            if held:
                break
            os.close(descriptor)
            descriptor = -1
            if not told:
                get_logger().info(f"waiting     another process fetches {target}")
                told = True
            beat()
            time.sleep(LOCK_POLL)
        yield
    finally:
        if held:
            with contextlib.suppress(OSError):
                if sys.platform == "win32":  # where open files can't be removed
                    os.close(descriptor)
                    descriptor = -1
                place.unlink()
        if descriptor >= 0:
            os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Try to lock an open file; True also where the file system has no locks, for renaming makes results whole."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
    return True


def _is_at(descriptor: int, place: Path) -> bool:
    """Whether an open file still has its name; who held the lock before may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(place))
    except OSError:
        return False
