"""A1, data sets that are not there: from a server to labels to train on, or one clear message and nothing left."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from models.families import YOLOV5
from tests import servers
from tests.common import PROJECT
from tests.data.test_conversion import voc_image, voc_object
from tests.runs import make_data
from tests.servers import Server, tar_of, zip_of
from utils.config.build import config_to_dict
from utils.config.data_yaml import load_data
from utils.config.flags import TrainConfig, ValConfig
from utils.config.recipe import Hyp
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import UserError
from utils.data.downloads import MIRROR, OFFLINE
from utils.data.fetch import ensure_data, main
from utils.data.splits import open_splits
from utils.dist.place import ALONE
from utils.run.inputs import read_inputs
from utils.run.val_inputs import read_val_inputs
from utils.torch_utils import save_checkpoint

YAML = "path: {root}\ntrain: images/train\nval: images/val\nnames: [blue, red]\ndownload: {download}\n"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OFFLINE, MIRROR, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site() -> Iterator[tuple[Server, str]]:
    with servers.serving() as (server, address):
        yield server, address


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small data set, by path."""
    folder = tmp_path_factory.mktemp("drawn")
    make_data(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("*/*/*"))}


def below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def write_yaml(folder: Path, download: str, root: str = "set") -> Path:
    path = folder / "my.yaml"
    path.write_text(YAML.format(root=folder / root, download=download))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# From an archive to a data set ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", ["set", "other-name-1.2", "", "set/"])
@pytest.mark.parametrize("kind", ["zip", "tar", "tgz"])
def test_an_archive_becomes_the_data_set(
    top: str, kind: str, files: dict[str, bytes], site: tuple[Server, str], tmp_path: Path
) -> None:
    """Whatever folder the archive keeps it in; once it is there nobody is asked again."""
    server, address = site
    packed = below(top.rstrip("/"), files) if top else files
    if top.endswith("/"):
        packed |= {"README.txt": b"about", "__MACOSX/._x": b"of a Mac", "set/.lockstep/x.index": b"somebody's cache"}
    make = zip_of if kind == "zip" else lambda some: tar_of(some, "w:gz" if kind == "tgz" else "w")
    server.answers[f"/d.{kind}"] = servers.whole(make(packed))
    path = write_yaml(tmp_path, f"{address}/d.{kind}")
    for _ in range(2):
        index = open_splits(load_data(path), ["train", "val"])
        assert (len(index["train"]), len(index["val"])) == (10, 4)
        assert index["train"].num_instances == sum(number % 3 for number in range(10))
    assert server.asked == [f"/d.{kind}"]
    found = contents(tmp_path / "set")
    assert {name: found[name] for name in files} == files
    assert ".lockstep/x.index" not in found
    assert sorted(os.listdir(tmp_path)) == ["my.yaml", "set"]


def test_several_archives_and_a_yaml_in_the_data_set(
    files: dict[str, bytes], site: tuple[Server, str], tmp_path: Path
) -> None:
    """Without `path` the data set is where its YAML is; what is there already stays as it is."""
    server, address = site
    for part in ("train", "val"):
        some = {name: content for name, content in files.items() if f"/{part}/" in name}
        server.answers[f"/{part}.zip"] = servers.whole(zip_of(below("top", some)))
    path = tmp_path / "own" / "data.yaml"
    (path.parent / "labels/train").mkdir(parents=True)
    (path.parent / "labels/train/1.txt").write_text("1 0.5 0.5 0.5 0.5\n")
    addresses = f"[{address}/train.zip, {address}/val.zip]"
    path.write_text(f"train: images/train\nval: images/val\nnames: [a, b]\ndownload: {addresses}\n")
    ensure_data(load_data(path))
    assert contents(path.parent) == {
        **files,
        "labels/train/1.txt": b"1 0.5 0.5 0.5 0.5\n",
        "data.yaml": path.read_bytes(),
    }
    assert os.listdir(tmp_path) == ["own"]


def test_a_yaml_in_the_data_set_keeps_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder above, maybe of all users, may not be ours to write."""
    monkeypatch.setenv(OFFLINE, "1")
    path = tmp_path / "own" / "data.yaml"
    path.parent.mkdir()
    text = "train: images/train\nval: images/val\nnames: [a, b]\n"
    path.write_text(text + "download: https://nowhere.invalid/d.zip\n")
    with pytest.raises(UserError) as info:
        ensure_data(load_data(path))
    assert str(info.value).endswith(f"  ->  {path.parent}/d.zip")


def test_splits_that_nobody_wants_need_not_be_there(
    files: dict[str, bytes], site: tuple[Server, str], tmp_path: Path
) -> None:
    server, address = site
    path = write_yaml(tmp_path, f"{address}/d.zip")
    (tmp_path / "set/images/val").mkdir(parents=True)
    ensure_data(load_data(path), ["val"])
    assert server.asked == []


def test_archives_that_were_put_there_by_hand(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message without a network tells to do works, also without a network."""
    monkeypatch.setenv(OFFLINE, "1")
    path = write_yaml(tmp_path, "https://nowhere.invalid/files/d.zip?key=1")
    with pytest.raises(UserError) as info:
        ensure_data(load_data(path))
    assert f"{path}: the data set is not there and can't be fetched: LOCKSTEP_OFFLINE is set" in str(info.value)
    assert sorted(os.listdir(tmp_path)) == ["my.yaml"]
    place = Path(str(info.value).rpartition("->  ")[2])
    place.write_bytes(zip_of(below("set", files)))
    ensure_data(load_data(path))
    assert contents(tmp_path / "set") == files
    assert place.exists()  # it is the user's


def test_an_archive_by_hand_is_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFFLINE, "1")
    text = (PROJECT / "data/VOC.yaml").read_text().replace("path: datasets/VOC", f"path: {tmp_path}/VOC")
    (tmp_path / "VOC.yaml").write_text(text)
    (tmp_path / "VOCtest_06-Nov-2007.tar").write_bytes(tar_of({}))
    with pytest.raises(UserError, match=r"VOCtest_06-Nov-2007.tar is damaged or not the published file: its md5 is"):
        ensure_data(load_data(tmp_path / "VOC.yaml"))


def test_fetched_ahead_of_time(
    files: dict[str, bytes], site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = site
    server.answers |= {"/d.zip": servers.whole(zip_of(files)), "/yolov5n.pt": servers.whole(b"PK weights")}
    monkeypatch.setenv(MIRROR, address)
    monkeypatch.chdir(tmp_path)
    main([str(write_yaml(tmp_path, "https://nowhere.invalid/d.zip")), "yolov5n.pt"])
    assert sorted(os.listdir(tmp_path)) == ["my.yaml", "set", "yolov5n.pt"]
    with pytest.raises(UserError, match="neither a data set's YAML nor the name of published weights"):
        main(["best.pt"])


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (zip_of({"set/images/train/a.jpg": b"1", "../../escaped": b"2"}), "the path '../../escaped' leads out"),
        (b"<html>no such file</html>", "is neither zip nor tar nor tar.gz; it begins with b'<html>"),
        (zip_of({"set/a": b"1"})[:-30], "is damaged or cut short"),
        (zip_of({"set/images/train/a.jpg": b"1"}), "what download gave does not hold"),
    ],
    ids=["leads out", "no archive", "cut short", "another set"],
)
def test_archives_that_are_no_data_set(content: bytes, words: str, site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/d.zip"] = servers.whole(content)
    path = write_yaml(tmp_path, f"{address}/d.zip")
    with pytest.raises(UserError) as info:
        ensure_data(load_data(path))
    assert words in str(info.value), str(info.value)
    assert str(info.value).startswith(str(path))
    left = [name for name in os.listdir(tmp_path) if name != "my.yaml"]
    assert left == (["set"] if "does not hold" in words else [])


def test_archives_of_the_same_name(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "[https://a.invalid/d.zip, https://b.invalid/d.zip]")
    with pytest.raises(UserError, match="download names two archives of the same name"):
        ensure_data(load_data(path))


def test_coco_has_to_be_the_published_one(
    site: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses are plain http: whatever comes must have the size and the digest that are known."""
    server, address = site
    server.answers["/train2017.zip"] = servers.whole(zip_of({"train2017/1.jpg": b"another"}))
    monkeypatch.setenv(MIRROR, address)
    text = (PROJECT / "data/coco.yaml").read_text().replace("path: datasets/coco", f"path: {tmp_path}/coco")
    (tmp_path / "coco.yaml").write_text(text)
    with pytest.raises(UserError) as info:
        ensure_data(load_data(tmp_path / "coco.yaml"))
    assert "the published one 19336861798" in str(info.value)
    for name in ("zips/train2017", "zips/val2017", "annotations/annotations_trainval2017"):
        line = f"http://images.cocodataset.org/{name}.zip  ->  {tmp_path}/{name.rpartition('/')[2]}.zip"
        assert line in str(info.value), str(info.value)
    assert os.listdir(tmp_path) == ["coco.yaml"]


# Scripts --------------------------------------------------------------------------------------------------------------

PYTHON = "|\n  import os, pathlib\n  for split in ('train', 'val'):\n"
PYTHON += "    pathlib.Path(os.environ['LOCKSTEP_DATA'], 'images', split).mkdir(parents=True)\n"
BASH = 'bash -c \'mkdir -p "$LOCKSTEP_DATA"/images/train "$LOCKSTEP_DATA"/images/val\''


@pytest.mark.parametrize("script", [PYTHON, BASH], ids=["python", "bash"])
def test_scripts_run_only_when_allowed(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, script)
    with pytest.raises(UserError) as info:
        ensure_data(load_data(path))
    assert "--allow-download-script (in Python allow_download_script=True)" in str(info.value)
    assert "LOCKSTEP_DATA" in str(info.value)  # the script is shown
    monkeypatch.setenv(OFFLINE, "1")
    with pytest.raises(UserError, match="LOCKSTEP_OFFLINE is set"):
        ensure_data(load_data(path, allow_script=True))
    monkeypatch.delenv(OFFLINE)
    assert os.listdir(tmp_path) == ["my.yaml"]
    ensure_data(load_data(path, allow_script=True))
    assert sorted(os.listdir(tmp_path / "set/images")) == ["train", "val"]
    assert "running     the script of" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("bash exit 3", "the script of download ended with status"),
        ("print(1)", "what download gave does not hold"),
        ('"print(1)\\e[2J\\r # good"', "print(1)?[2J\n   # good"),  # no letters that a terminal obeys
    ],
)
def test_scripts_that_do_not_help(script: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_yaml(tmp_path, script)
    with pytest.raises(UserError) as info:
        ensure_data(load_data(path, allow_script="status" in words or "hold" in words))
    assert words in str(info.value)


SCRIPT = "|\n  import os, pathlib\n  pathlib.Path(os.environ['LOCKSTEP_DATA'], 'ran').mkdir(parents=True)\n"


def resumable(folder: Path, names: list[str]) -> dict[str, Any]:
    """What of a checkpoint a run is set up from."""
    network = YOLOV5.build(load_yaml(find_yaml("yolov5n", "model")), 2, names)
    (folder / "run/weights").mkdir(parents=True)
    content = {"model": network.state_dict(), "spec": network.yaml, "names": names, "config": {"imgsz": 64}}
    save_checkpoint(content, folder / "weights.pt", keep_previous=False)
    place = {"run_dir": str(folder / "run"), "path": str(folder / "run/weights/last.pt")}
    return {**content, "hyp": config_to_dict(Hyp()), "data": {}, **place}


def test_the_flag_is_what_allows_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a training and of a validation; never what a checkpoint, which may be a stranger's, says was allowed once."""
    monkeypatch.chdir(tmp_path)
    path = write_yaml(tmp_path, SCRIPT)
    saved = resumable(tmp_path, ["blue", "red"])
    saved["config"]["data"] = str(path)
    train: dict[str, Any] = {"data": str(path), "cfg": "yolov5n.yaml", "imgsz": 64}
    val: dict[str, Any] = {"data": str(path), "weights": "weights.pt"}
    calls: list[tuple[bool, Callable[[bool], object]]] = [
        (True, lambda allowed: read_inputs(TrainConfig(**train, allow_download_script=allowed), ALONE)),
        (False, lambda allowed: read_inputs(TrainConfig(**train, allow_download_script=allowed), ALONE, saved)),
        (True, lambda allowed: read_val_inputs(ValConfig(**val, allow_download_script=allowed), ALONE)),
    ]
    for runs, call in calls:
        for allowed in (False, True):
            words = "what download gave does not hold" if allowed and runs else "allow it with --allow-download-script"
            with pytest.raises(UserError, match=words):
                call(allowed)
            assert (tmp_path / "set/ran").exists() == (allowed and runs)
        shutil.rmtree(tmp_path / "set", ignore_errors=True)


def test_a_data_set_does_not_allow_its_own_script(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, SCRIPT + "defaults: {allow_download_script: true}")
    with pytest.raises(UserError, match="defaults: allow_download_script is not one of"):
        load_data(path)


# COCO and VOC, small --------------------------------------------------------------------------------------------------


def image(width: int, height: int) -> bytes:
    return cv2.imencode(".jpg", np.zeros((height, width, 3), np.uint8))[1].tobytes()


def test_coco_from_its_archives(site: tuple[Server, str], tmp_path: Path) -> None:
    """The shipped YAML with other addresses: three archives, JSON to label files, annotations for COCO's own code."""
    server, address = site
    text = (PROJECT / "data/coco.yaml").read_text().replace("path: datasets/coco", f"path: {tmp_path}/coco")
    (tmp_path / "coco.yaml").write_text(text.replace("http://images.cocodataset.org", address))
    documents = {}
    for split, number in (("train2017", 9), ("val2017", 139)):
        name = f"{number:012d}.jpg"
        documents[f"annotations/instances_{split}.json"] = json.dumps(
            {
                "images": [{"id": number, "file_name": name, "width": 80, "height": 40}],
                "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}],
                "annotations": [{"image_id": number, "category_id": 90, "bbox": [20, 10, 40, 20], "iscrowd": 0}],
            }
        ).encode()
        server.answers[f"/zips/{split}.zip"] = servers.whole(zip_of({f"{split}/{name}": image(80, 40)}))
    server.answers["/annotations/annotations_trainval2017.zip"] = servers.whole(zip_of(documents))
    data = load_data(tmp_path / "coco.yaml")
    index = open_splits(data, ["train", "val"])
    assert index["val"].path(0) == f"{tmp_path}/coco/images/val2017/000000000139.jpg"
    np.testing.assert_allclose(index["train"].labels(0), [[79, 0.5, 0.5, 0.5, 0.5]], atol=1e-6)
    assert (tmp_path / "coco/annotations/instances_val2017.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["coco", "coco.yaml"]


def test_voc_from_its_archives(site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    base = "https://thor.robots.ox.ac.uk/pascal/VOC"
    text = (PROJECT / "data/VOC.yaml").read_text().replace("path: datasets/VOC", f"path: {tmp_path}/VOC")
    (tmp_path / "VOC.yaml").write_text(text.replace(base, address))

    def archive(year: int, **sets: str) -> bytes:
        made: dict[str, bytes] = {}
        for kind, stem in sets.items():
            made[f"ImageSets/Main/{kind}.txt"] = f"{stem}\n".encode()
            made[f"JPEGImages/{stem}.jpg"] = image(100, 50)
            made[f"Annotations/{stem}.xml"] = voc_image(voc_object("dog", 11, 6, 20, 15)).encode()
        return tar_of(below(f"VOCdevkit/VOC{year}", made))

    server.answers["/voc2007/VOCtrainval_06-Nov-2007.tar"] = servers.whole(archive(2007, train="1", val="2"))
    server.answers["/voc2007/VOCtest_06-Nov-2007.tar"] = servers.whole(archive(2007, test="3"))
    server.answers["/voc2012/VOCtrainval_11-May-2012.tar"] = servers.whole(archive(2012, train="4", val="5"))
    index = open_splits(load_data(tmp_path / "VOC.yaml"), ["train", "val"])
    assert [len(index["train"]), len(index["val"])] == [4, 1]
    np.testing.assert_allclose(index["val"].labels(0), [[11, 0.15, 0.2, 0.1, 0.2]], atol=1e-6)
    assert sorted(os.listdir(tmp_path)) == ["VOC", "VOC.yaml"]


# Several at once ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_runs_fetch_once(files: dict[str, bytes], site: tuple[Server, str], tmp_path: Path) -> None:
    server, address = site
    server.answers["/d.zip"] = servers.slowly(zip_of(files), 2.0)
    path = write_yaml(tmp_path, f"{address}/d.zip")
    command = [sys.executable, "-m", "utils.data.fetch", str(path)]
    runs = [subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]
    assert server.asked == ["/d.zip"]
    assert contents(tmp_path / "set") == files
    assert sorted(os.listdir(tmp_path)) == ["my.yaml", "set"]


def test_a_damaged_archive_is_unpacked_by_nobody_twice(
    files: dict[str, bytes], site: tuple[Server, str], tmp_path: Path
) -> None:
    """One that was fetched and can't be used is fetched anew the next time."""
    server, address = site
    good = zip_of(files)
    server.answers["/d.zip"] = servers.in_turn(servers.whole(good[:-40]), servers.whole(good))
    path = write_yaml(tmp_path, f"{address}/d.zip")
    with pytest.raises(UserError):
        ensure_data(load_data(path))
    ensure_data(load_data(path))
    assert contents(tmp_path / "set") == files
