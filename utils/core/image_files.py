"""Image files: size from the header without decoding, pixels upright by EXIF orientation.

Headers are read here and not by Pillow, with which a label scan takes 1.3 to 1.9 times as long (55 microseconds a
header, not 25). Nor does it say what damage shows by: where a JPEG's picture starts and how often it restarts, which
checksums of a PNG decoders need. And it refuses pictures that OpenCV reads: of 179 megapixels, with texts of 1 MB, with
damage in chunks that nobody needs.
"""

import contextlib
import errno
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import cv2
import numpy as np

from utils.core.errors import UserError

T = TypeVar("T")

# What decoders have to say goes into our messages, which name the file. OpenCV 4.8 has the function in another place.
(getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel)(0)  # silent

JPEG_START, PNG_START = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}  # first bytes of TIFF files and of EXIF blocks
BIG_TIFF = (b"II+\0", b"MM\0+")
PFM_STARTS = (b"PF", b"Pf")
DECODING = {  # by how much smaller a JPEG file is decoded
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}

IMAGE_SUFFIXES = frozenset([
    "avif", "bmp", "dib", "dng", "jfif", "jp2", "jpe", "jpeg", "jpg", "mpo", "pbm", "pfm", "pgm", "png", "pnm", "ppm",
    "tif", "tiff", "webp",
])  # fmt: skip
RARE_IMAGE_SUFFIXES = frozenset(["avif", "jp2"])  # of these, what builds of OpenCV may lack
# Pictures as well, which OpenCV does not read, not everywhere, or not as they are seen.
OTHER_IMAGE_SUFFIXES = frozenset([
    "arw", "cr2", "cr3", "exr", "gif", "hdr", "heic", "heif", "ico", "j2k", "jpf", "jpx", "jxl", "nef", "orf", "psd",
    "raf", "rw2", "svg", "tga",
])  # fmt: skip

# Up to which brightest value of floats or signed numbers what is white. A picture from 0 to 1 may have highlights above
# 1, and lossy files more than 255 or 65535 by a little.
WHITES = ((16.0, 1.0), (512.0, 255.0), (131072.0, 65535.0))
DARK = 1 << 14  # of 65535: images of 10, 12 and 14 bits in 16
LOOKED_AT = 16  # images of a set, for its depth
MANY_DARK = 1 / 8  # share of them; a few may be pictures of the night
MOST_PAGES = 100  # that are counted

# What storage, above all storage elsewhere, says while it is in trouble that may pass.
TEMPORARY = frozenset(getattr(errno, name) for name in ("EIO", "ESTALE", "ETIMEDOUT") if hasattr(errno, name))
RETRY_AFTER = (0.1, 0.5)  # seconds before the second and the third try
HOPELESS = 10.0  # seconds after a file whose tries were all in vain, in which others have one: a dead disk fails fast


class ImageError(UserError):
    """An image file that cannot be used; the message names the file."""


class _Storage:
    """Tells whether it is worth trying again.

    Attributes:
        hopeless_until: a time of the monotonic clock.
    """

    hopeless_until = -math.inf


def retried(work: Callable[[], T]) -> T:
    """Do something with files, again after a short while if storage is in trouble that may pass (see TEMPORARY).

    Raises:
        OSError: of the last try, or another one than those.
    """
    for pause in RETRY_AFTER:
        try:
            return work()
        except OSError as error:
            if error.errno not in TEMPORARY or time.monotonic() < _Storage.hopeless_until:
                raise
        time.sleep(pause)
    try:
        return work()
    except OSError as error:
        if error.errno in TEMPORARY:
            _Storage.hopeless_until = time.monotonic() + HOPELESS
        raise


class _Header(NamedTuple):
    """What the first bytes of a file say.

    Attributes:
        height: as stored, pixels.
        width: as stored, pixels.
        orientation: of EXIF, 1 to 8.
        start: where the picture starts.
        end_mark: must follow it.
        least: bytes that the file must have.
        intact: says of the whole file whether the picture is undamaged, as far as that shows without decoding.
    """

    height: int
    width: int
    orientation: int = 1
    start: int = 0
    end_mark: bytes = b""
    least: int = 0
    intact: Callable[[bytes], bool] | None = None


def _orientation(exif: bytes) -> int:
    """Orientation 1 to 8 of an EXIF block (TIFF 6.0 layout); 1 where it has none or makes no sense."""
    order = TIFF_ORDERS.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, entry)
            if tag == 0x0112 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _jpeg(data: bytes) -> _Header:
    """Walk the segments (ITU T.81, B) to the start of the picture; EXIF and the frame header come before it."""
    at, orientation, interval, frame = 2, 1, 0, b""
    while True:
        while data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):  # fill bytes, and stray ones that decoders skip too
            at += 1
        marker = data[at + 1]
        if marker == 0xD9 or (marker == 0xDA and not frame):
            raise ImageError("has no picture" if frame else "has no frame header")
        if marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers that stand alone
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker == 0xDA:
            height, width = struct.unpack_from(">HH", frame, 5)
            intact = None  # without restart markers damage shows in the decoded picture only
            if interval:
                intact = partial(_restarts_complete, start=at, least=-(-_jpeg_units(frame) // interval) - 1)
            return _Header(height, width, orientation, at, b"\xff\xd9", intact=intact)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = data[at : at + 2 + length]
        if marker == 0xDD:
            (interval,) = struct.unpack_from(">H", data, at + 4)
        if marker == 0xE1 and data[at + 4 : at + 10] == b"Exif\0\0" and orientation == 1:
            orientation = _orientation(data[at + 10 : at + 2 + length])
        at += 2 + length


def _jpeg_units(frame: bytes) -> int:
    """Minimum coded units of a scan of all components of a frame, given as its header (ITU T.81, A.2).

    A scan of one component has as many or more.
    """
    height, width, components = struct.unpack_from(">HHB", frame, 5)
    samplings = [frame[11 + 3 * k] for k in range(components)]
    across, down = max([1, *(one >> 4 for one in samplings)]), max([1, *(one & 15 for one in samplings)])
    return -(-width // (8 * across)) * -(-height // (8 * down))


def _restarts_complete(data: bytes, start: int, least: int) -> bool:
    """Whether the markers from ``start`` on count RST0 to RST7 in turn, as many as the first scan has at least."""
    marks = b"".join(re.findall(rb"\xff([\xd0-\xd7])", data[start:]))
    return marks[:least] == (bytes(range(0xD0, 0xD8)) * (least // 8 + 1))[:least]


def _png(data: bytes) -> _Header:
    """Size from IHDR, orientation from an eXIf chunk before the pixels."""
    width, height = struct.unpack_from(">II", data, 16)
    at, orientation = 8, 1
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind in (b"IDAT", b"IEND"):
            return _Header(height, width, orientation, at, b"IEND", intact=_png_intact)
        if kind == b"eXIf":
            orientation = _orientation(data[at + 8 : at + 8 + length])
        at += 12 + length


def _png_intact(data: bytes) -> bool:
    """Whether the chunks lead to the end, and those that the pixels need have the checksums they say."""
    needed = (b"IHDR", b"PLTE", b"IDAT") if data[25] == 3 else (b"IHDR", b"IDAT")  # 3: colors from a palette
    view, at = memoryview(data), 8
    try:
        while True:
            length, kind = struct.unpack_from(">I4s", data, at)
            if kind == b"IEND":
                return True
            (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
            if kind in needed and zlib.crc32(view[at + 4 : at + 8 + length]) != checksum:
                return False
            at += 12 + length
    except struct.error:
        return False


def _webp(data: bytes) -> _Header | None:
    """Size from the first chunk (RFC 9649), orientation from EXIF behind the pixels; None for animations."""
    kind = data[12:16]
    least = 7 + struct.unpack_from("<I", data, 4)[0]  # the last byte may be padding, which some writers forget
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return _Header(height & 0x3FFF, width & 0x3FFF, least=least)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return _Header((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, least=least)
    if kind != b"VP8X" or data[20] & 0x02:
        return None
    width = 1 + int.from_bytes(data[24:27], "little")
    height = 1 + int.from_bytes(data[27:30], "little")
    at = 12
    while data[20] & 0x08:
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            exif = data[at + 8 : at + 8 + length]
            return _Header(height, width, _orientation(exif.removeprefix(b"Exif\0\0")), least=least)
        at += 8 + length + length % 2
    return _Header(height, width, least=least)


def _bmp(data: bytes) -> _Header:
    """Size from the info header; a negative height means rows from the top."""
    if struct.unpack_from("<I", data, 14)[0] == 12:  # the old OS/2 header
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        packing = 0
    else:
        width, height, _, bits, packing = struct.unpack_from("<iiHHI", data, 18)
    rows = (abs(width) * bits + 31) // 32 * 4 * abs(height) if packing in (0, 3) else 0  # run-length coded: unknown
    return _Header(abs(height), abs(width), least=struct.unpack_from("<I", data, 10)[0] + rows)


def _parse_header(data: bytes) -> _Header | None:
    """Header from the first bytes; None for formats that only decoders know; IndexError or struct.error: too few."""
    if data[:3] == JPEG_START:
        return _jpeg(data)
    if data[:8] == PNG_START:
        return _png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    if data[:2] == b"BM":
        return _bmp(data)
    return None


def _read_header(read: Callable[[int], bytes]) -> _Header | None:
    """Header from as few bytes as will do; ``read(limit)`` gives the file's first bytes, all of them for -1."""
    for limit in (4096, 1 << 18, -1):
        with contextlib.suppress(IndexError, struct.error):
            return _parse_header(read(limit))
    raise ImageError("ends inside its header")


def _cut_short(header: _Header, length: int, read_end: Callable[[], bytes], read_all: Callable[[], bytes]) -> bool:
    """Whether a file of so many bytes lacks its end; ``read_end`` gives its last bytes."""
    if length < header.least:
        return True
    # Some writers pad behind the end, so only without it close to the end the whole file is searched.
    mark = header.end_mark
    return bool(mark) and mark not in read_end() and read_all().rfind(mark, header.start) < 0


def _upright_size(header: _Header) -> tuple[int, int]:
    """Height and width of the picture as people see it."""
    return (header.height, header.width) if header.orientation < 5 else (header.width, header.height)


def image_size(path: str) -> tuple[int, int]:
    """Height and width in pixels as ``read_image`` returns them, read from the header where the format allows it.

    Also looks for damage behind the header, where that shows without decoding: the end of the file; the checksums of
    PNG files, which are read whole for it; the restart markers of the JPEG files that have some.

    Raises:
        ImageError: no image, an incomplete header, a file that was cut short or is damaged.
    """
    try:
        header = retried(partial(_checked_header, path))
    except (OSError, ImageError) as error:
        raise ImageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if header is None:
        height, width = read_image(path).shape[:2]
        return height, width
    return _upright_size(header)


def _checked_header(path: str) -> _Header | None:
    """Header of a file that is whole, as far as that shows without decoding."""
    with open(path, "rb", buffering=0) as file:

        def read(limit: int) -> bytes:
            file.seek(0)
            return file.read(limit)

        def read_end() -> bytes:
            file.seek(-min(16, length), os.SEEK_END)
            return file.read()

        header = _read_header(read)
        length = file.seek(0, os.SEEK_END)
        if header is not None and _cut_short(header, length, read_end, partial(read, -1)):
            raise ImageError("is cut short")
        if header is not None and header.intact is not None and not header.intact(read(-1)):
            raise ImageError("is damaged")
        return header


def read_image(path: str, size: tuple[int, int] | None = None, reduction: int = 1) -> np.ndarray:
    """Decode an image to (H, W, 3) BGR uint8, upright by its EXIF orientation, whatever its depth and channels.

    Of 16 bits the upper eight are taken. Values of other kinds (floats, signed numbers) are scaled so that white is 1,
    255 or 65535, as the brightest value in the file has it (see ``WHITES``), and clipped.

    Args:
        path: the file.
        size: height and width that it had before. A file that has other ones now, or was cut short meanwhile, is an
            error then; else the picture is as far as OpenCV sees it.
        reduction: 1, 2, 4 or 8. JPEG files are decoded at this fraction of their sides, rounded up, for which a part
            of the work suffices (ITU T.81: blocks of 8 x 8 frequencies); files of other formats as they are.

    Raises:
        ImageError: the file is missing, or no image.
    """
    try:
        data = retried(partial(_contents, path))
        header = _read_header(lambda limit: data[: limit if limit > 0 else None])
        if size is not None and header is not None:  # before decoding: pictures may be larger than the memory
            _check_size(_upright_size(header), size)
            if _cut_short(header, len(data), lambda: data[-16:], lambda: data):
                raise ImageError("is cut short")
        reduction = reduction if data[:3] == JPEG_START else 1
        image = _upright(_eight_bits(_decoded(data, reduction)), header.orientation if header else 1)
        if size is not None and image.shape[:2] != (-(-size[0] // reduction), -(-size[1] // reduction)):
            _check_size((image.shape[0], image.shape[1]), size)  # in which the kinds of JPEG come that can't be reduced
    except (OSError, ImageError) as error:
        raise ImageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return image


def _decoded(data: bytes, reduction: int = 1) -> np.ndarray:
    """Pixels (H, W, 3) BGR of a file, as it is oriented, in its own kind of numbers."""
    # Orientation is applied later, since OpenCV's versions differ in the formats for which they do it.
    flags = DECODING[reduction] | cv2.IMREAD_IGNORE_ORIENTATION
    if data[:3] != JPEG_START:
        flags |= cv2.IMREAD_ANYDEPTH
    values = np.frombuffer(data, np.uint8)
    try:
        image = cv2.imdecode(values, flags) if data else None
        if image is None and data[:4] in TIFF_ORDERS:  # floats that are grey or have an alpha channel
            image = cv2.imdecode(values, cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise ImageError(f"cannot be decoded: {error.err}") from error
    if image is None:
        raise ImageError(f"cannot be decoded{_why(data)}")
    if image.ndim == 2:  # grey PFM files stay grey in spite of the flag
        return cv2.merge([image] * 3)
    if image.shape[2] < 3:
        raise ImageError(f"cannot be decoded: it has {image.shape[2]} channels")
    return image[..., :3]


def _why(data: bytes) -> str:
    """Return why a file may not be one that can be decoded, '' if its first bytes are right."""
    with contextlib.suppress(ImageError, IndexError, struct.error):
        if _parse_header(data) or data[:4] in (*TIFF_ORDERS, *BIG_TIFF) or data[:2] in PFM_STARTS:
            return ""
    return f": it is no image, but starts with {data[:12]!r}" if data else ": it is empty"


def _eight_bits(image: np.ndarray) -> np.ndarray:
    """Scale pixels to 0 to 255; see `read_image`."""
    if image.dtype == np.uint8:
        return image
    if image.dtype == np.uint16:
        return (image >> 8).astype(np.uint8)
    white = _white(image)
    return np.rint(np.nan_to_num(image.astype(np.float32)).clip(0, white) * (255 / white)).astype(np.uint8)


def _white(image: np.ndarray) -> float:
    """Return which value of a picture of floats or signed numbers is white."""
    brightest = float(image.max(initial=0, where=np.isfinite(image)))
    for most, white in WHITES:
        if brightest <= most:
            return white
    raise ImageError(f"has values up to {brightest:g}; scale them to 0 to 1, 0 to 255 or 0 to 65535")


def depth_doubts(path: Callable[[int], str], count: int) -> list[str]:
    """Return a sentence if images of more than 8 bits use so little of 16 that they are seen as almost black.

    Args:
        path: gives the file of image i; some of them are read.
        count: of the images.
    """
    found = {path(i): _brightest(path(i)) for i in looked_at(count)}
    return dark_doubts({name: value for name, value in found.items() if value is not None})


def looked_at(count: int) -> range:
    """Return which of so many images are looked at, for their depth."""
    return range(0, count, -(-count // LOOKED_AT) or 1)


def dark_doubts(brightest: Mapping[str, int]) -> list[str]:
    """Return a sentence if too many images are almost black.

    Args:
        brightest: largest value of each image, by its name; white is 65535. One that is black all over says nothing.
    """
    dark = {name: value for name, value in brightest.items() if 0 < value < DARK}
    if not dark or len(dark) < MANY_DARK * len(brightest):
        return []
    most, such = max(dark.values()), f"{len(dark)} of the {len(brightest)} that were looked at, such as {min(dark)}"
    return [
        f"images of more than 8 bits look almost black: the brightest value in {such}, is {most} of 65535; multiply "
        f"their values, for example by {65535 // most}"
    ]


def _brightest(path: str) -> int | None:
    """Largest value in a file in which white is 65535; None for other files, and those that can't be read."""
    if not path.lower().endswith((".png", ".tif", ".tiff", ".pfm", ".pgm", ".pnm", ".ppm", ".jp2")):
        return None
    try:
        data = _contents(path)
        if data[:8] == PNG_START and data[24:25] != b"\x10":  # bits of a channel
            return None
        image = _decoded(data)
        deep = image.dtype == np.uint16 or (image.dtype != np.uint8 and _white(image) == WHITES[-1][1])
        return int(image.max(initial=0, where=np.isfinite(image))) if deep else None
    except (OSError, ImageError):
        return None


def page_count(path: str) -> int:
    """Pages of a TIFF file, without thumbnails and masks (TIFF 6.0, NewSubfileType); 1 for other files."""
    pages, seen = 0, set[int]()
    with contextlib.suppress(OSError, struct.error), open(path, "rb") as file:  # what is wrong is said elsewhere
        order = TIFF_ORDERS.get(file.read(4))
        while order and len(seen) < MOST_PAGES:
            (start,) = struct.unpack(order + "I", file.read(4))
            if start == 0 or start in seen:
                break
            seen.add(start)
            file.seek(start)
            (count,) = struct.unpack(order + "H", file.read(2))
            entries = [struct.unpack(order + "HHII", file.read(12)) for _ in range(count)]
            pages += not any(tag == 254 and value & 0b101 for tag, _, _, value in entries)
    return max(pages, 1)


def _contents(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _check_size(found: tuple[int, int], before: tuple[int, int]) -> None:
    if found != before:
        raise ImageError(f"was {before[1]} x {before[0]} pixels when it was checked, now {found[1]} x {found[0]}")


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation: 5 to 8 swap the axes, then the picture is mirrored in x, y or both."""
    if orientation >= 5:
        image = cv2.transpose(image)
    flip = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}.get(orientation)
    return image if flip is None else cv2.flip(image, flip)
