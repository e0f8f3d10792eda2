"""The cache file of a label index: written, mapped, and checked before it is used, for it may be of somebody else.

It holds MAGIC, crc32 of the header, its length, a JSON header, then the arrays, each 64-byte aligned.

Shape letters: n images, M boxes, P corners of polygons.
"""

import json
import logging
import math
import mmap
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from utils.core.whole_files import replacing
from utils.data.report import ScanReport

MAGIC = b"LSINDEX1"
LAYOUT: dict[str, tuple[type, tuple[int, ...]]] = {  # kind, and shape behind the number of rows
    "names": (np.uint8, ()),
    "name_offsets": (np.int64, ()),
    "shapes": (np.int32, (2,)),
    "offsets": (np.int64, ()),
    "rows": (np.float32, (5,)),
    "report": (np.uint8, ()),
    "polygon_offsets": (np.int64, ()),
    "points": (np.float32, (2,)),
}
POLYGONS = {"polygon_offsets", "points"}  # there are both or none

Arrays = dict[str, np.ndarray]


def write_index(arrays: Arrays, meta: Mapping[str, Any], files: Sequence[Path], logger: logging.Logger) -> Path | None:
    """Write an index to the first place that takes it, and return that; None if there is no such place."""
    header, at, crc, body = {**meta, "arrays": {}}, 0, 0, []
    for name, array in arrays.items():
        header["arrays"][name] = [array.dtype.str, array.shape, at]
        body.append(array.tobytes() + b"\0" * (-array.nbytes % 64))
        crc, at = zlib.crc32(body[-1], crc), at + len(body[-1])
    text = json.dumps({**header, "crc": crc, "bytes": at}).encode()
    front = MAGIC + struct.pack("<II", zlib.crc32(text), len(text)) + text
    errors = []
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, durable=False) as out:
                out.writelines([front, b"\0" * (-len(front) % 64), *body])
        except OSError as error:
            errors.append(f"{file.parent}: {error.strerror}")
        else:
            return file
    if errors:
        logger.warning(f"the label index is not kept for the next run ({'; '.join(errors)})")
    return None


def map_index(file: Path, key: str, logger: logging.Logger | None = None) -> tuple[Arrays, dict[str, Any]] | None:
    """Map the arrays of a cache file and read its header; None if there is none, or one of another state of the data.

    A damaged file is None too, with a warning. Without a logger the arrays' checksum is not computed, and what they say
    is not checked: for another process of the same run.
    """
    try:
        with open(file, "rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    try:
        crc, length = struct.unpack_from("<II", data, len(MAGIC))
        start = len(MAGIC) + 8
        if data[: len(MAGIC)] != MAGIC or zlib.crc32(data[start : start + length]) != crc:
            raise ValueError("damaged header")
        header = json.loads(data[start : start + length])
        start += length + -(start + length) % 64
        body = np.ndarray(header["bytes"], np.uint8, data, start)
        if header["key"] != key:
            return None
        arrays = _arrays_of(header, body)
        if logger is not None:
            if zlib.crc32(body.data) != header["crc"]:
                raise ValueError("damaged arrays")
            _check_numbers(arrays, header["num_classes"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error):
        if logger is not None:
            logger.warning(f"the label index {file} is damaged and is built again")
        return None
    return arrays, header


def _arrays_of(header: Mapping[str, Any], body: np.ndarray) -> Arrays:
    """Return the arrays of an index, views of its bytes.

    Args:
        header: of the file: ``arrays`` has kind, shape and place of each.
        body: what follows, uint8.

    Raises:
        ValueError: they are not those of an index, lie outside of the body, or their lengths do not fit together.
        KeyError, TypeError: likewise.
    """
    places = header["arrays"]
    if LAYOUT.keys() - set(places) not in (set(), POLYGONS) or set(places) - LAYOUT.keys():
        raise ValueError("other arrays")
    if type(header["num_classes"]) is not int or header["num_classes"] < 1:
        raise ValueError("num_classes is no number")
    words = [header["name"], header["images_digest"]]
    if not all(isinstance(word, str) and not set(word) & set("/\\\0") for word in words):
        raise ValueError("a name that is none")
    arrays = {}
    for name, (kind, shape, at) in places.items():
        wanted, inner = LAYOUT[name]
        whole = all(type(number) is int and number >= 0 for number in (*shape, at))
        if kind != np.dtype(wanted).str or not whole or not shape or tuple(shape[1:]) != inner:
            raise ValueError(f"{name} is of another kind")
        size = math.prod(shape) * np.dtype(wanted).itemsize
        if at + size > len(body) or at % 64:
            raise ValueError(f"{name} leaves the file")
        arrays[name] = np.ndarray(tuple(shape), wanted, body.data, at)
    n, M = len(arrays["shapes"]), len(arrays["rows"])
    lengths = {"offsets": n, "name_offsets": n, "polygon_offsets": M}
    if any(len(arrays[name]) != length + 1 for name, length in lengths.items() if name in arrays):
        raise ValueError("lengths do not fit")
    return arrays


def _check_numbers(arrays: Mapping[str, np.ndarray], num_classes: int) -> None:
    """Check what the arrays of an index say.

    Raises:
        ValueError: it contradicts itself, or breaks a rule that the labels of every index keep.
    """
    ends = {"offsets": "rows", "name_offsets": "names", "polygon_offsets": "points"}
    for name, target in ends.items():
        offsets = arrays.get(name)
        if offsets is not None and not (
            offsets[0] == 0 and offsets[-1] == len(arrays[target]) and (np.diff(offsets) >= 0).all()
        ):
            raise ValueError(f"{name} do not lead through {target}")
    ids, boxes = arrays["rows"][:, 0], arrays["rows"][:, 1:]
    if not ((ids >= 0) & (ids < num_classes) & (ids == np.floor(ids))).all():
        raise ValueError("class ids outside the names")
    for name, numbers in (("rows", boxes), ("points", arrays.get("points", boxes))):
        if not ((numbers >= 0) & (numbers <= 1)).all():  # False for nan
            raise ValueError(f"{name} outside the images")
    if not (arrays["shapes"] > 0).all():
        raise ValueError("images without pixels")
    _check_report(json.loads(arrays["report"].tobytes()))


def _check_report(fields: Any) -> None:
    counts = asdict(ScanReport())
    problems = fields.get("problems") if isinstance(fields, dict) else None
    if not isinstance(problems, list) or fields.keys() != counts.keys():
        raise ValueError("a report that is none")
    if any(type(fields[name]) is not int for name in counts if name not in ("problems", "hints")):
        raise ValueError("a report without counts")
    if any(not isinstance(problem, list) or list(map(type, problem)) != [str, int, str, str] for problem in problems):
        raise ValueError("a report of something else")
    if not isinstance(fields["hints"], list) or not all(isinstance(hint, str) for hint in fields["hints"]):
        raise ValueError("hints that are none")
