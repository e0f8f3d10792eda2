"""COCO's JSON and VOC's XML become label files: figures by hand, and files from strangers."""

import contextlib
import json
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.config.data_yaml import load_data
from utils.config.yaml_files import load_yaml
from utils.core.errors import UserError
from utils.data.conversion import convert_coco, convert_voc, label_row, read_coco, read_voc
from utils.inference.val_files import category_ids

NAMES = ["cat", "dog"]


def rows_of(text: str) -> list[list[float]]:
    return [[float(word) for word in line.split()] for line in text.splitlines()]


# COCO -----------------------------------------------------------------------------------------------------------------


def annotation(image: int, category: int, box: list[Any], **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": box, "iscrowd": 0, **more}


COCO: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "a.jpg", "width": 200, "height": 100},
        {"id": 3, "file_name": "b.c.png", "width": 64, "height": 64},
        {"id": 5, "file_name": "empty.jpg", "width": 10, "height": 10},
    ],
    "categories": [{"id": 90, "name": "dog"}, {"id": 17, "name": "cat"}],
    "annotations": [
        annotation(7, 90, [20, 10, 40, 30]),
        annotation(3, 17, [-16, 32, 32, 64]),  # reaches out at the left and below
        annotation(7, 17, [0, 0, 200, 100]),
        annotation(7, 17, [50, 50, 20, 20], iscrowd=1),
        annotation(5, 17, [2, 2, 0, 5]),  # without width
        annotation(5, 17, [20, 2, 5, 5]),  # outside
    ],
}


def write_coco(folder: Path, content: Any) -> Path:
    path = folder / "annotations" / "instances_val.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_coco(tmp_path: Path) -> None:
    """Category ids are found by name, boxes cut at the image, crowds left out; an image without objects has a file."""
    assert read_coco(write_coco(tmp_path, COCO), NAMES) == {
        "a.jpg": "1 0.200000 0.250000 0.200000 0.300000\n0 0.500000 0.500000 1.000000 1.000000\n",
        "b.c.png": "0 0.125000 0.750000 0.250000 0.500000\n",
        "empty.jpg": "",
    }


def test_the_layout_of_coco(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_coco(source, COCO)
    (source / "annotations" / "captions_val.json").write_text("{}")
    (source / "annotations" / "instances_train.json").write_text("this split's images are not there")
    (source / "val").mkdir()
    target.mkdir()
    for name in ("a.jpg", "b.c.png", "empty.jpg"):
        (source / "val" / name).write_bytes(b"image")
    convert_coco(source, target, NAMES)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == [
        "annotations/captions_val.json",
        "annotations/instances_train.json",
        "annotations/instances_val.json",
        "images/val/a.jpg",
        "images/val/b.c.png",
        "images/val/empty.jpg",
        "labels/val/a.txt",
        "labels/val/b.c.txt",
        "labels/val/empty.txt",
    ]


def test_the_eighty_classes_of_coco_are_found(tmp_path: Path) -> None:
    """By COCO's own ids, which leave ten numbers of 1 to 90 out."""
    names = load_data("coco.yaml").names
    ids = category_ids(names)
    content = {
        "images": COCO["images"],
        "categories": [{"id": number, "name": name} for number, name in zip(ids, names, strict=True)],
        "annotations": [annotation(7, number, [20, 10, 40, 30]) for number in ids],
    }
    found = rows_of(read_coco(write_coco(tmp_path, content), names)["a.jpg"])
    assert [row[0] for row in found] == list(range(80))
    assert load_yaml(load_data("coco_profile.yaml").path)["names"] == dict(enumerate(names))


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.floats(-300, 900, width=32)] * 2, *[st.floats(0, 900, width=32)] * 2),
    st.integers(1, 640),
    st.integers(1, 480),
)
def test_rows_against_exact_arithmetic(box: tuple[float, float, float, float], width: int, height: int) -> None:
    x, y, w, h = map(Fraction, box)
    x1, x2 = (min(max(value, Fraction(0)), Fraction(width)) / width for value in (x, x + w))
    y1, y2 = (min(max(value, Fraction(0)), Fraction(height)) / height for value in (y, y + h))
    wanted = [float(value) for value in ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)]
    corners = (box[0], box[1], box[0] + box[2], box[1] + box[3])
    row = label_row(3, corners, width, height)
    if min(wanted[2:]) > 1e-6:
        assert row.startswith("3 ") and row.endswith("\n")
        np.testing.assert_allclose(rows_of(row)[0][1:], wanted, atol=6e-7)
    if min(wanted[2:]) == 0:
        assert row == ""


def changed(**changes: Any) -> dict[str, Any]:
    return {**COCO, **changes}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "it holds no object"),
        ("{", "is not JSON"),
        ('{"a": ' * 100_000, "is not JSON"),
        ("\x00", "is not JSON"),
        ({}, "categories is not a list of ids and names"),
        (changed(categories=[{"id": 1, "name": "cow"}]), "the category 'cow' is none of the names in the data YAML"),
        (changed(categories=[{"id": [1], "name": "cat"}]), "categories is not a list of ids and names"),
        (changed(images=None), "is not of COCO's format"),
        (changed(images=[{"id": 1, "file_name": "a.jpg", "width": 0, "height": 5}]), "an image of 0.0 x 5.0 pixels"),
        (changed(annotations=[annotation(99, 17, [0, 0, 1, 1])]), "99 (KeyError)"),
        (changed(annotations=[annotation(7, 1, [0, 0, 1, 1])]), "1 (KeyError)"),
        (changed(annotations=[annotation(7, 17, [0, 0, 1])]), "not enough values"),
        (changed(annotations=[annotation(7, 17, [0, 0, 1, "1"])]), "'1' in place of a number"),
        (changed(annotations=[annotation(7, 17, [0, 0, 1, float("nan")])]), "'nan' in place of a number"),
        (changed(annotations=[annotation(7, 17, [0, 0, 1, 10**400])]), "is not"),
        (changed(annotations=["x"]), "is not of COCO's format"),
        (changed(annotations={"a": 1}), "is not of COCO's format"),
    ],
)
def test_json_that_is_not_cocos(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as info:
        read_coco(write_coco(tmp_path, content), NAMES)
    assert words in str(info.value), str(info.value)
    assert "instances_val.json" in str(info.value) and len(str(info.value)) < 1000


@pytest.mark.parametrize(
    "name", ["../x.jpg", "/tmp/x.jpg", "a/../../x.jpg", "..", "c:\\x.jpg", "a\0.jpg", "", 7, "x" * 300]
)
def test_file_names_that_lead_out(name: Any, tmp_path: Path) -> None:
    path = write_coco(tmp_path, changed(images=[{"id": 1, "file_name": name, "width": 9, "height": 9}], annotations=[]))
    with pytest.raises(UserError, match="in place of a file name"):
        read_coco(path, NAMES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("cat"),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["id", "name", "file_name", "width", "height", "image_id", "category_id", "bbox", "iscrowd"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({"images": JSON, "categories": JSON, "annotations": JSON}))
def test_any_json_is_a_mistake_or_labels(content: Any) -> None:
    with tempfile.NamedTemporaryFile("w") as file, contextlib.suppress(UserError):
        json.dump(content, file)
        file.flush()
        read_coco(Path(file.name), NAMES)


# VOC ------------------------------------------------------------------------------------------------------------------


def voc_object(name: str, *box: object, difficult: int = 0) -> str:
    sides = "".join(f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    part = "<part><name>head</name><bndbox><xmin>9</xmin><ymin>9</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></part>"
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{sides}</bndbox>{part}</object>"


def voc_image(*objects: str, width: object = 100, height: object = 50) -> str:
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><filename>x.jpg</filename>{size}{''.join(objects)}</annotation>"


def write_voc(folder: Path, year: int, sets: dict[str, list[str]], there: Callable[[str], bool] = bool) -> Path:
    """A VOCdevkit with one cat in each image."""
    root = folder / "VOCdevkit" / f"VOC{year}"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for kind, stems in sets.items():
        (root / f"ImageSets/Main/{kind}.txt").write_text("\n".join(stems) + "\n")
        for stem in filter(there, stems):
            (root / f"JPEGImages/{stem}.jpg").write_bytes(stem.encode())
            (root / f"Annotations/{stem}.xml").write_text(voc_image(voc_object("cat", 1, 1, 100, 50)))
    return root


def test_voc(tmp_path: Path) -> None:
    """Pixels are counted from 1 and both ends belong to a box: 11 to 20 are ten pixels, from 10.0 to 20.0."""
    path = tmp_path / "x.xml"
    things = [
        voc_object("dog", 11, 6, 20, 15),
        voc_object("cat", 1, 1, 100, 50),
        voc_object("cat", 1, 1, 9, 9, difficult=1),
        voc_object("dog", "45.5", "10.5", "54.5", 60),  # VOC2011 has fractions; one that reaches out
    ]
    path.write_text(voc_image(*things))
    assert rows_of(read_voc(path, NAMES)) == [
        [1, 0.15, 0.2, 0.1, 0.2],
        [0, 0.5, 0.5, 1, 1],
        [1, 0.495, 0.595, 0.1, 0.81],
    ]


def test_the_layout_of_voc(tmp_path: Path) -> None:
    """Images in no list stay out; a list of images that are in an archive that is not there makes no split."""
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    write_voc(source, 2007, {"train": ["000001"], "val": ["000003"], "test": ["000002", "000004"]})
    root = write_voc(source, 2012, {"train": ["2008_1"], "test": ["2008_9"]}, lambda stem: stem != "2008_9")
    (root / "JPEGImages/2008_7.jpg").write_bytes(b"of another task")
    (root / "ImageSets/Main/cat_train.txt").write_text("2008_1  1\n")
    convert_voc(source, target, NAMES)
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.jpg")) == [
        "images/test2007/000002.jpg",
        "images/test2007/000004.jpg",
        "images/train2007/000001.jpg",
        "images/train2012/2008_1.jpg",
        "images/val2007/000003.jpg",
    ]
    labels = {str(path.relative_to(target / "labels")): path.read_text() for path in target.rglob("*.txt")}
    assert set(labels.values()) == {"0 0.500000 0.500000 1.000000 1.000000\n"}
    images = {str(path.relative_to(target / "images")) for path in target.rglob("*.jpg")}
    assert set(labels) == {name.replace(".jpg", ".txt") for name in images}


def test_the_twenty_classes_of_voc() -> None:
    """In VOC's order, which is the alphabet's."""
    names = load_data("VOC.yaml").names
    assert len(names) == 20 and names == sorted(names)


LAUGHS = "".join(f'<!ENTITY l{k} "{f"&l{k - 1};" * 10}">' for k in range(1, 10))
DECLARED = f'<!DOCTYPE a [<!ENTITY l0 "lol">{LAUGHS}]>'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DECLARED + voc_image(voc_object("&l9;", 1, 1, 2, 2)), "it has a document type declaration"),
        ('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + voc_image(), "document type declaration"),
        (voc_image(voc_object("&x;", 1, 1, 2, 2)), "undefined entity"),
        ("<a>" * 100_000, "nested too deeply"),
        ("<a>" + " " * (1 << 20) + "</a>", "has more than 1048576 bytes"),
        ("no xml", "is not read"),
        ("", "is not read"),
        ("<annotation/>", "'size/width: ' in place of a number"),
        (voc_image(width="nan"), "'size/width: nan' in place of a number"),
        (voc_image(width=0), "an image of 0 x 50 pixels"),
        (voc_image(voc_object("cow", 1, 1, 2, 2)), "the object 'cow' is none of the names in the data YAML"),
        (voc_image(voc_object("cat", 1, 1, "x", 2)), "'bndbox/xmax: x' in place of a number"),
        (voc_image(voc_object("cat", 1, 1, "1e999", 2)), "in place of a number"),
    ],
)
def test_xml_that_is_not_vocs(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(text)
    with pytest.raises(UserError) as info:
        read_voc(path, NAMES)
    assert words in str(info.value), str(info.value)
    assert str(path) in str(info.value)


def test_lists_of_voc_that_lead_out(tmp_path: Path) -> None:
    root = write_voc(tmp_path, 2007, {"train": ["000001"]})
    (root / "ImageSets/Main/train.txt").write_text("../../../../x\n")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"train.txt is not a list of images: '../../../../x'"):
        convert_voc(tmp_path, tmp_path / "out", NAMES)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(0))
def test_any_xml_is_a_mistake_or_labels(junk: bytes, place: int) -> None:
    text = voc_image(voc_object("cat", 1, 1, 9, 9)).encode()
    at = place % len(text)
    with tempfile.NamedTemporaryFile() as file, contextlib.suppress(UserError):
        file.write(text[:at] + junk + text[at + len(junk) :])
        file.flush()
        read_voc(Path(file.name), NAMES)


@pytest.mark.parametrize("convert", [convert_coco, convert_voc])
def test_archives_of_something_else(convert: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no"):
        convert(tmp_path, tmp_path, NAMES)
