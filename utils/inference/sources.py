"""What ``--source`` means: image files, folders, patterns, lists, videos, addresses of streams, numbers of cameras."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import cv2

from utils.config.yaml_files import ROOT
from utils.core.errors import Problems, UserError, nearest
from utils.core.image_files import IMAGE_SUFFIXES
from utils.core.logging import get_logger
from utils.core.text_files import as_utf8
from utils.core.wording import first_of
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
LAST_CAMERA = 2**31 - 1  # OpenCV takes a C int

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
    return f" ({first_of(names, SHOWN_NAMES)})" if names else ""


def _is_address(text: str) -> bool:
    return text.isdecimal() or "://" in text or text.split(maxsplit=1)[:1] == ["screen"]


def _kind(path: Path) -> str:
    suffix = path.suffix.lower().removeprefix(".")
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else ""


def _kind_by_content(path: str) -> str:
    """Return "image" or "video" for a file that OpenCV can open as one, else ""."""
    if not is_utf8(path) or not os.path.isfile(path) or not os.path.getsize(path):
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
        lines = [line.strip() for line in as_utf8(path.read_bytes()).decode().splitlines()]
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
    if not is_utf8(address):
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


def is_utf8(name: str) -> bool:
    """Whether a name is UTF-8; other bytes are surrogates in Python."""
    return name == name.encode("utf-8", "replace").decode()
