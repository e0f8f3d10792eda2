"""The YAML of a data set: paths, class names, suggested flags, and what a mistake costs."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.common import PROJECT
from utils.config.data_yaml import DataConfig, build_train_config, check_split_paths, load_data
from utils.config.flags import TrainConfig
from utils.config.recipe import load_hyp
from utils.core.errors import UserError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


DATA = "path: set\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n"


def test_data(tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", DATA + "test: [images/a, lists/b.txt]\nnc: 2\ndownload: https://x/y.zip\n")
    (tmp_path / "set").mkdir()
    root = tmp_path / "set"
    assert load_data(path) == DataConfig(
        path=path,
        root=root,
        train=[root / "images" / "train"],
        val=[root / "images" / "val"],
        test=[root / "images" / "a", root / "lists" / "b.txt"],
        names=["cat", "dog"],
        download=["https://x/y.zip"],
    )
    assert load_data(path).num_classes == 2


def test_the_root_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML's folder, then the current folder, then the project; absolute paths as they are."""
    yaml_folder, cwd = tmp_path / "yamls", tmp_path / "cwd"
    path = write(yaml_folder / "d.yaml", DATA)
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    assert load_data(path).root == PROJECT / "set"
    (cwd / "set").mkdir()
    assert load_data(path).root == cwd / "set"
    (yaml_folder / "set").mkdir()
    assert load_data(path).root == yaml_folder / "set"
    absolute = write(yaml_folder / "e.yaml", DATA.replace("path: set", f"path: {tmp_path}/far"))
    assert load_data(absolute).root == tmp_path / "far"
    without = write(yaml_folder / "f.yaml", DATA.replace("path: set\n", ""))
    assert load_data(without).train == [yaml_folder / "images" / "train"]
    outside = write(yaml_folder / "g.yaml", DATA.replace("images/train", f"{tmp_path}/t").replace("images/val", "../v"))
    assert load_data(outside).train + load_data(outside).val == [tmp_path / "t", yaml_folder / "v"]


def test_names_by_id(tmp_path: Path) -> None:
    text = DATA.replace("[cat, dog]", "{1: dog, 0: cat}")
    assert load_data(write(tmp_path / "d.yaml", text)).names == ["cat", "dog"]
    numbers = DATA.replace("[cat, dog]", "[0, 1]")
    assert load_data(write(tmp_path / "e.yaml", numbers)).names == ["0", "1"]


ODD_NAMES = [
    "02146",
    "12:30",
    "1.10",
    "1e3",
    "0x1F",
    "0o17",
    "1_000",
    "+5",
    "yes",
    "No",
    "on",
    "y",
    "true",
    "2024-01-01",
]
ODD_NAMES += [".5", "5.", ".inf", "1:2:3.5", "2001-12-14 21:59:43", "=", "10 %"]


def test_names_are_what_is_written(tmp_path: Path) -> None:
    """ultralytics/yolov5#11439: without quotes, YAML 1.1 calls 02146 1126, 12:30 750 and 1.10 1.1."""
    bare = ", ".join(ODD_NAMES)
    by_id = "".join(f"\n  {number}: {name}" for number, name in enumerate(ODD_NAMES))
    shared = f"names: &names [{bare}]\n"
    for number, text in enumerate([DATA.replace("[cat, dog]", f"[{bare}]"), DATA.replace("[cat, dog]", by_id)]):
        assert load_data(write(tmp_path / f"{number}.yaml", text)).names == ODD_NAMES
    merged = f"base: &base\n  {shared}<<: *base\n" + DATA.replace("names: [cat, dog]\n", "")
    assert load_data(write(tmp_path / "m.yaml", merged)).names == ODD_NAMES


def test_paths_are_what_is_written(tmp_path: Path) -> None:
    """ultralytics/yolov5#11439: folders of digits, with leading zeros, and dates, as people call what they record."""
    for folder in ("0123/010", "2024-01-01/12:30"):
        (tmp_path / folder).mkdir(parents=True)
    text = "path: 0123\ntrain: 010\nval: [1.10, 2024-01-01]\ntest:\nnames: [a]\n"
    data = load_data(write(tmp_path / "d.yaml", text))
    root = tmp_path / "0123"
    assert (data.root, data.train, data.val, data.test) == (
        root,
        [root / "010"],
        [root / "1.10", root / "2024-01-01"],
        [],
    )
    data = load_data(write(tmp_path / "e.yaml", text.replace("path: 0123", "path: 2024-01-01").replace("010", "12:30")))
    assert data.train == [tmp_path / "2024-01-01" / "12:30"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("train:", "tarin:", "tarin is not a key; did you mean train?"),
        ("val:", "valid:", "valid is not a key; did you mean val?"),
        ("names:", "name:", "name is not a key; did you mean names?"),
        ("val: images/val\n", "", "val is missing: add a line val: FOLDER, images to measure on"),
        ("names: [cat, dog]", "nc: 2", "names is missing: add a line names: [cat, dog]"),
        ("[cat, dog]", "[]", "names takes a list of class names"),
        ("[cat, dog]", "cat", "names takes a list of class names"),
        ("[cat, dog]", "{0: cat, 2: dog}", "names leaves out the class id 1, but ids are counted from 0 without gaps"),
        ("[cat, dog]", "{5: cat, 2000000000: dog}", "names leaves out the class id 0, but"),
        ("[cat, dog]", "{1: cat, 2: dog}", "names starts with the class id 1, but ids are counted from 0"),
        ("[cat, dog]", "{true: cat, 0: dog}", "names has the class id True, but ids are the numbers 0, 1, 2"),
        ("[cat, dog]", "{'0': cat, 1: dog}", "names has the class id '0', but"),
        ("[cat, dog]", "[cat, '']", "names: class 1 has an empty name; give it one"),
        ("[cat, dog]", "[' ', cat]", "names: class 0 has an empty name; give it one"),
        ("[cat, dog]", "[cat, null]", "names: class 1 is None, not a text"),
        ("path: set", "nc: 3", "nc says 3 classes, names lists 2"),
        ("path: set", "path: [a]", "path takes a text, not a list"),
        ("path: set", "download: {a: b}", "download takes an address, a list of addresses, or a script, not"),
        ("path: set", "download: file:///etc/x.zip", "download: 'file:///etc/x.zip' is not an address of a file"),
        ("path: set", "download: [https://x/y.zip, rm -r /]", "download: 'rm -r /' is not an address of a file"),
        ("path: set", "columns: 4", "columns takes the number of columns in the row of a box, 5 or more, not 4"),
        ("path: set", "kpt_shape: 17", "kpt_shape takes the number of keypoints and 2 or 3, as in [17, 3], not 17"),
        (
            "path: set",
            "kpt_shape: [3, 2]\ncolumns: 6",
            "columns says 6, kpt_shape means 11; leave one of them out",
        ),
        ("path: set", "converter: coca", "converter is coco or voc, not 'coca'; did you mean coco?"),
        ("path: set", "path: set\nconverter: coco", "converter is for what download fetches, and there is no download"),
        ("path: set", "generator: shape", "generator is shapes, not 'shape'; did you mean shapes?"),
        ("images/train", "{a: b}", "train takes a folder, a .txt list, or a list of these, not {'a': 'b'}"),
        ("images/train", "[a, null]", "train takes a folder, a .txt list, or a list of these, not ['a', None]"),
        ("path: set", "nc: '2'", "nc takes a whole number, not '2'; it can be left out"),
        ("path: set", "nc: 02", "nc takes a whole number, not '02'; it can be left out"),
    ],
)
def test_mistakes_in_data(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in DATA
    path = write(tmp_path / "d.yaml", DATA.replace(old, new))
    with pytest.raises(UserError) as info:
        load_data(path)
    assert str(info.value).startswith(f"{path}: {words}"), str(info.value)


def test_all_mistakes_in_data_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", "tarin: a\nnames: {0: a, 5: b}\n")
    with pytest.raises(UserError) as info:
        load_data(path)
    assert str(info.value).splitlines()[0] == "3 problems"
    assert str(info.value).count(str(path)) == 3


def test_notes_in_data_are_welcome(tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", DATA + "roboflow: {license: MIT, version: 1}\nauthor: me\ngenerator: shapes\n")
    assert load_data(path).generator == "shapes"
    assert load_data(path).doubts == []


def test_what_may_be_a_mistake(tmp_path: Path) -> None:
    """Keys that nobody reads, and names that several classes have."""
    text = DATA.replace("[cat, dog]", "[cat, dog, cat, owl, dog, cat]")
    path = write(tmp_path / "d.yaml", text + "url: https://x/y\nkpt_shape: [17, 3]\nchannels: 1\n")
    assert load_data(path).doubts == [
        f"{path}: unknown keys, not used: channels",
        f"{path}: kpt_shape: keypoints are not used, the boxes in front of them are",
        f"{path}: names: the classes 0 and 2 and 5 are all called 'cat', and count as different ones",
        f"{path}: names: the classes 1 and 4 are all called 'dog', and count as different ones",
    ]
    assert load_data(path, single_cls=True).doubts == load_data(path).doubts


def test_missing_split_folders(tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", DATA)
    (tmp_path / "set" / "images" / "tarin").mkdir(parents=True)
    (tmp_path / "set" / "images" / "val").mkdir()
    data = load_data(path)
    with pytest.raises(UserError) as info:
        check_split_paths(data)
    assert str(info.value) == f"{path}: train: {data.train[0]} does not exist; did you mean tarin?"
    with pytest.raises(UserError, match="there is no test split; add a line test: FOLDER"):
        check_split_paths(data, ["test"])
    assert check_split_paths(data, ["val"]) == {"val": data.val}


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("Images/Val", "; did you mean {root}/images/val?"),
        ("image/vall", "; did you mean {root}/images/val?"),
        ("images/VAL", "; did you mean val?"),
        ("zzz/val", ""),
        ("images/val/*.jpg", "; patterns are not taken: name a folder, whose subfolders count too, or a .txt list of "),
        ("images/va[l]", "; patterns are not taken: name a folder"),
    ],
)
def test_split_folders_that_are_written_otherwise(written: str, hint: str, tmp_path: Path) -> None:
    """In other case, which Windows and macOS take, mistyped in two places, or as a pattern."""
    path = write(tmp_path / "d.yaml", DATA.replace("val: images/val", f"val: {written}"))
    for name in ("train", "val"):
        (tmp_path / "set/images" / name).mkdir(parents=True)
    with pytest.raises(UserError) as info:
        check_split_paths(load_data(path), ["val"])
    start = f"{path}: val: {tmp_path}/set/{written} does not exist"
    assert str(info.value).startswith(start + hint.format(root=tmp_path / "set")) and (hint or str(info.value) == start)


def test_a_root_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places where it was looked for are named, each once, and no split below it is."""
    path = write(tmp_path / "yamls/d.yaml", DATA)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    for folder, places in (("cwd", ["yamls/set", "cwd/set"]), ("yamls", ["yamls/set"])):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(UserError) as info:
            check_split_paths(load_data(path))
        shown = " or ".join([*(f"{tmp_path}/{place}" for place in places), str(PROJECT / "set")])
        assert str(info.value) == f"{path}: path: there is no folder {shown}"
    data = load_data(path)
    (tmp_path / "yamls/set/images").mkdir(parents=True)  # made since, as the built-in data set is
    with pytest.raises(UserError, match=r"path: there is no folder"):
        check_split_paths(data)
    with pytest.raises(UserError, match=r"train: .*yamls/set/images/train does not exist"):
        check_split_paths(load_data(path))
    absolute = write(tmp_path / "e.yaml", DATA.replace("path: set", "path: /no/such/folder\ndownload: https://x/y.zip"))
    with pytest.raises(UserError, match=r"no folder /no/such/folder$"):
        check_split_paths(load_data(absolute))


@pytest.mark.parametrize("text", ["a" * 300, "~nobody_of_this_name/x", "images\\tr"])
def test_odd_paths_do_not_exist(text: str, tmp_path: Path) -> None:
    (tmp_path / "set/images/train").mkdir(parents=True)
    (tmp_path / "set/images/val").mkdir()
    data = load_data(write(tmp_path / "d.yaml", DATA.replace("images/train", text)))
    with pytest.raises(UserError, match=rf"^{tmp_path}/d.yaml: train: .* does not exist") as info:
        check_split_paths(data)
    assert ("write paths with / in place of \\" in str(info.value)) == ("\\" in text)
    root = load_data(write(tmp_path / "e.yaml", DATA.replace("path: set", f"path: {text}")))
    with pytest.raises(UserError, match=r"e.yaml: path: there is no folder "):
        check_split_paths(root)


def folders(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("../train/images", "../valid/images"),
        ("/content/pets-1/train/images", "/content/pets-1/valid/images"),
        ("C:\\Users\\me\\pets\\train\\images", "D:/pets/valid/images"),
        ("..\\train\\images", "valid\\images"),
        ("train/images", "../../elsewhere/valid/images"),
    ],
)
def test_paths_of_another_place(train: str, val: str, tmp_path: Path) -> None:
    """ultralytics/yolov5#5107: exported YAMLs say ../train/images, or paths of the machine they were written on."""
    folders(tmp_path, "set/train/images", "set/valid/images", "images")
    data = load_data(write(tmp_path / "set/d.yaml", f"train: {train}\nval: {val}\nnames: [a]\n"))
    check_split_paths(data)
    assert (data.train, data.val) == ([tmp_path / "set/train/images"], [tmp_path / "set/valid/images"])
    said = [f"val: {Path(os.path.abspath(tmp_path / 'set' / val))} does not exist; {data.val[0]} does and is used"]
    assert data.doubts[-1:] == [f"{data.path}: {text}" for text in said]
    assert len(data.doubts) == 1 + (train != "train/images")


def test_root_of_another_machine(tmp_path: Path) -> None:
    """ultralytics/yolov5#5107: the splits are beside the YAML, whatever its path says."""
    folders(tmp_path, "images/train", "images/val")
    data = load_data(write(tmp_path / "d.yaml", DATA.replace("path: set", "path: /home/her/set")))
    check_split_paths(data)
    assert (data.train, data.val) == ([tmp_path / "images/train"], [tmp_path / "images/val"])
    assert len(data.doubts) == 2


@pytest.mark.parametrize(
    "text",
    [
        "train: ../a/images\nval: ../b/images",  # a folder called images is no sign
        "train: ../a/photos\nval: ../b/photos",  # one folder for two splits
        "path: set\ntrain: images/train\nval: photos",  # the root is there: a split is not looked for elsewhere
        "train: ../a/photos\nval: images\ndownload: https://x/y.zip",  # what is not there will be fetched
    ],
)
def test_near_paths_that_are_not_taken(text: str, tmp_path: Path) -> None:
    folders(tmp_path, "d/images", "d/photos", "d/set/images/train")
    data = load_data(write(tmp_path / "d/d.yaml", f"{text}\nnames: [a]\n"))
    assert data.doubts == []
    with pytest.raises(UserError, match="does not exist"):
        check_split_paths(data)


def test_columns_of_a_box(tmp_path: Path) -> None:
    """ultralytics/yolov5#12330: said directly, or by the shape of the keypoints behind the box."""
    assert load_data(write(tmp_path / "a.yaml", DATA)).columns == 0
    assert load_data(write(tmp_path / "b.yaml", DATA + "kpt_shape: [17, 3]\n")).columns == 56
    assert load_data(write(tmp_path / "c.yaml", DATA + "columns: 6\n")).columns == 6


# Suggested flags ------------------------------------------------------------------------------------------------------

SUGGESTED = "defaults: {imgsz: 96, batch-size: 8, optimizer: AdamW, cos_lr: true, hyp: hyp.scratch-high.yaml}\n"


def given(path: Path, **typed: Any) -> dict[str, Any]:
    return {"data": str(path), **typed}


def test_suggested_flags_stand_in_for_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", DATA + SUGGESTED)
    config = build_train_config(given(path))
    expected = TrainConfig(
        data=str(path), imgsz=96, batch_size=8, optimizer="AdamW", cos_lr=True, hyp="hyp.scratch-high.yaml"
    )
    assert config == expected
    assert load_data(path).defaults["batch_size"] == 8
    assert load_data(write(tmp_path / "e.yaml", DATA)).defaults == {}


def test_what_was_typed_wins(tmp_path: Path) -> None:
    """Also where it is the program's own default."""
    path = write(tmp_path / "d.yaml", DATA + SUGGESTED)
    config = build_train_config(given(path, imgsz=TrainConfig.imgsz, optimizer="SGD", epochs=3))
    assert (config.imgsz, config.optimizer, config.epochs, config.batch_size) == (TrainConfig.imgsz, "SGD", 3, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{imgsz: big}", "defaults: --imgsz takes a whole number, not 'big'"),
        ("{imgsz: 8}", "defaults: --imgsz must be between 32 and 16384, not 8"),
        ("{optimizer: adamw}", "defaults: --optimizer is one of SGD, Adam, AdamW, not 'adamw'; did you mean AdamW?"),
        ("{imgsz: 0640}", "defaults: --imgsz takes a whole number, not '0640'"),
        ("{epochs: 1:40}", "defaults: --epochs takes a whole number, not '1:40'"),
        ("{rect: yes}", "defaults: --rect takes true or false, not 'yes'"),
        ("{img: 64}", "defaults: img is not one of imgsz, "),
        ("{epoch: 64}", "defaults: epoch is not one of imgsz, epochs, batch_size, "),
        ("[1]", "defaults takes flags of train.py and values, not a list"),
        ("64", "defaults takes flags of train.py and values, not 64"),
    ],
)
def test_mistakes_in_suggested_flags(text: str, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", f"{DATA}defaults: {text}\n")
    with pytest.raises(UserError) as info:
        load_data(path)
    assert str(info.value).startswith(f"{path}: {words}"), str(info.value)
    # a run reports it with what else is wrong, so the settings alone do not fail
    assert build_train_config(given(path)).imgsz == TrainConfig.imgsz


@pytest.mark.parametrize("name", ["project", "weights", "device", "exist_ok", "resume", "cfg", "workers", "seed"])
def test_a_data_set_may_not_say_where_to_write_or_what_to_load(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d.yaml", f"{DATA}defaults: {{{name}: x}}\n")
    with pytest.raises(UserError, match=f"defaults: {name} is not one of imgsz"):
        load_data(path)


def test_the_built_in_data_set() -> None:
    """What a bare train.py uses."""
    config = build_train_config({})
    data = load_data(config.data)
    assert (data.path, data.generator) == (PROJECT / "data/shapes.yaml", "shapes")
    assert data.root == PROJECT / "datasets" / "shapes"
    assert {name: getattr(config, name) for name in data.defaults} == data.defaults
    assert data.defaults["imgsz"] < TrainConfig.imgsz
    load_hyp(config.hyp)
