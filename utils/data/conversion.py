"""Annotations in other formats -> label files: COCO's JSON, PASCAL VOC's XML.

Each function takes what the archives of a data set held and makes the layout of a data set of it: ``images/SPLIT``,
``labels/SPLIT`` with a file of rows ``class cx cy w h`` (cxcywhn) for each image. Boxes are cut at the image; what lies
outside of it is dropped. The files are not trusted: sizes, types and names are checked.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from tqdm import tqdm

from utils.core.errors import UserError
from utils.core.heartbeat import beating

LARGEST_JSON = 1 << 30  # bytes; COCO's largest has 0.45 GB
LARGEST_XML, DEEPEST_XML = 1 << 20, 20
LARGEST_LIST = 64 << 20  # bytes
VOC_SETS = ("train", "val", "test")

Box = tuple[float, float, float, float]  # xyxy, pixels


def label_row(class_id: int, box: Box, width: float, height: float) -> str:
    """Return a line of a label file; "" if nothing of the box lies in the image.

    Args:
        class_id: of the object.
        box: xyxy, pixels, upper left corner of the image at (0, 0); may reach out.
        width: of the image, pixels.
        height: of the image, pixels.
    """
    x1, x2 = (min(max(x, 0.0), width) / width for x in (box[0], box[2]))
    y1, y2 = (min(max(y, 0.0), height) / height for y in (box[1], box[3]))
    row = f"{(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}"
    return f"{class_id} {row}\n" if min(map(float, row.split()[2:])) > 0 else ""


# COCO -----------------------------------------------------------------------------------------------------------------


def convert_coco(source: Path, target: Path, names: Sequence[str]) -> None:
    """Make a data set of COCO's archives.

    Args:
        source: holds ``annotations/instances_SPLIT.json`` and, of one split at least, a folder SPLIT of images.
        target: gets ``images/SPLIT``, ``labels/SPLIT`` and ``annotations``; is there, in the same file system.
        names: of the classes; categories are found by their names, whatever their ids.

    Raises:
        UserError: something is missing or malformed.
    """
    splits = {path.stem.removeprefix("instances_"): path for path in source.glob("annotations/instances_*.json")}
    splits = {split: path for split, path in splits.items() if (source / split).is_dir()}
    if not splits:
        raise UserError("converter coco: there is no annotations/instances_SPLIT.json with a folder SPLIT of images")
    for split, path in sorted(splits.items()):
        _write_labels(target / "labels" / split, read_coco(path, names))
        (target / "images").mkdir(exist_ok=True)
        (source / split).rename(target / "images" / split)
    (source / "annotations").rename(target / "annotations")


def read_coco(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the text of each image's label file by the image's file name; crowds are left out.

    An image without an object has "". The format is described at https://cocodataset.org/#format-data.

    Args:
        path: annotations of object detection.
        names: of the classes.

    Raises:
        UserError: the file is not of that format, or has a category that is none of the classes.
    """
    content = _json(path)
    try:
        categories = {category["id"]: category["name"] for category in content["categories"]}
    except (KeyError, TypeError):
        raise UserError(f"{path}: categories is not a list of ids and names") from None
    unknown = [name for name in categories.values() if name not in names]
    if unknown:
        raise UserError(f"{path}: the category {str(unknown[0])[:100]!r} is none of the names in the data YAML")
    ids = {category: names.index(name) for category, name in categories.items()}
    try:
        sizes = {image["id"]: _image_size(image) for image in content["images"]}
        files = {image["id"]: _plain_name(image["file_name"]) for image in content["images"]}
        rows: dict[Any, list[str]] = {image: [] for image in sizes}
        for annotation in beating(content["annotations"]):
            if annotation.get("iscrowd"):
                continue
            x, y, w, h = map(_number, annotation["bbox"])
            image = annotation["image_id"]
            rows[image].append(label_row(ids[annotation["category_id"]], (x, y, x + w, y + h), *sizes[image]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not of COCO's format: {str(error)[:200]} ({type(error).__name__})") from None
    return {files[image]: "".join(lines) for image, lines in rows.items()}


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST_JSON:
        raise UserError(f"{path} has more than {LARGEST_JSON} bytes")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise UserError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not of COCO's format: it holds no object")
    return content


def _image_size(image: Mapping[str, Any]) -> tuple[float, float]:
    width, height = _number(image["width"]), _number(image["height"])
    if not (width >= 1 and height >= 1):
        raise ValueError(f"an image of {width} x {height} pixels")
    return width, height


def _number(value: Any) -> float:
    """Return a number that is one and finite; JSON knows texts and Python's JSON infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise ValueError(f"{str(value)[:40]!r} in place of a number")
    return float(value)


def _plain_name(name: Any) -> str:
    """Return a file name that stays in its folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\x00-\x1f]{1,200}", name) or name.strip(". ") == "":
        raise ValueError(f"{str(name)[:100]!r} in place of a file name")
    return name


def _write_labels(folder: Path, labels: Mapping[str, str]) -> None:
    folder.mkdir(parents=True)
    shown = tqdm(labels.items(), f"labels of {folder.name}", unit="files", disable=None, leave=False)
    for name, text in beating(shown):
        path = folder / f"{os.path.splitext(name)[0]}.txt"
        path.write_text(text, encoding="utf-8", newline="\n")


# PASCAL VOC -----------------------------------------------------------------------------------------------------------


def convert_voc(source: Path, target: Path, names: Sequence[str]) -> None:
    """Make a data set of VOC's archives: splits ``train2007``, ``val2007``, ``test2007``, ``train2012`` and so on.

    Args:
        source: holds ``VOCdevkit/VOCYEAR`` with ``Annotations``, ``ImageSets/Main`` and ``JPEGImages``.
        target: gets ``images/SPLIT`` and ``labels/SPLIT``; is there, in the same file system.
        names: of the classes.

    Raises:
        UserError: something is missing or malformed.
    """
    lists = [
        (place, kind)
        for place in sorted(source.glob("VOCdevkit/VOC*"))
        for kind in VOC_SETS
        if (place / "ImageSets" / "Main" / f"{kind}.txt").is_file()
    ]
    if not lists:
        raise UserError("converter voc: there is no VOCdevkit/VOCYEAR/ImageSets/Main/train.txt, val.txt or test.txt")
    for place, kind in lists:
        split = kind + place.name.removeprefix("VOC")
        stems = [stem for stem in _stems(place / "ImageSets" / "Main" / f"{kind}.txt") if _is_there(place, stem)]
        if not stems:  # an archive may list images that are in another one
            continue
        _write_labels(target / "labels" / split, {stem: _voc_labels(place, stem, names) for stem in beating(stems)})
        (target / "images" / split).mkdir(parents=True)
        for stem in stems:
            (place / "JPEGImages" / f"{stem}.jpg").rename(target / "images" / split / f"{stem}.jpg")


def _is_there(place: Path, stem: str) -> bool:
    return (place / "JPEGImages" / f"{stem}.jpg").is_file()


def _stems(path: Path) -> list[str]:
    """Return the image names of a list, each once."""
    if path.stat().st_size > LARGEST_LIST:
        raise UserError(f"{path} has more than {LARGEST_LIST} bytes")
    words = path.read_text(encoding="utf-8", errors="replace").split()
    try:
        return list(dict.fromkeys(_plain_name(word) for word in words))
    except ValueError as error:
        raise UserError(f"{path} is not a list of images: {error}") from None


def _voc_labels(place: Path, stem: str, names: Sequence[str]) -> str:
    return read_voc(place / "Annotations" / f"{stem}.xml", names)


def read_voc(path: Path, names: Sequence[str]) -> str:
    """Return the text of a label file; objects marked as difficult are left out.

    VOC counts pixels from 1 and names the first and the last one of a box, so a box reaches from xmin - 1 to xmax
    (Everingham and Winn 2007, "The PASCAL VOC2007 Development Kit", section 2).

    Args:
        path: annotation of one image.
        names: of the classes.

    Raises:
        UserError: the file is not of that format, or has an object that is none of the classes.
    """
    root = _xml(path)
    rows = []
    try:
        width, height = (_xml_number(root, f"size/{side}") for side in ("width", "height"))
        if not (width >= 1 and height >= 1):
            raise ValueError(f"an image of {width:g} x {height:g} pixels")
        for thing in root.iter("object"):
            if (thing.findtext("difficult") or "0").strip() == "1":
                continue
            name = (thing.findtext("name") or "").strip()
            if name not in names:
                raise ValueError(f"the object {name[:100]!r} is none of the names in the data YAML")
            x1, y1, x2, y2 = (_xml_number(thing, f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax"))
            rows.append(label_row(names.index(name), (x1 - 1, y1 - 1, x2, y2), width, height))
    except ValueError as error:
        raise UserError(f"{path} is not of VOC's format: {error}") from None
    return "".join(rows)


def _xml_number(element: Element, place: str) -> float:
    text = element.findtext(place) or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return _number(value if math.isfinite(value) else f"{place}: {text[:40]}")


def _xml(path: Path) -> Element:
    """Parse a small XML file without declarations, so that no entity expands and no other file is read."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_XML + 1)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    builder, depth = TreeBuilder(), 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > DEEPEST_XML:
            raise ValueError("it is nested too deeply")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*_: object) -> None:
        raise ValueError("it has a document type declaration")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = builder.data, refuse
    try:
        if len(data) > LARGEST_XML:
            raise ValueError(f"it has more than {LARGEST_XML} bytes")
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        raise UserError(f"{path} is not read: {error}") from None
    return builder.close()
