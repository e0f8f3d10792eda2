"""Files from strangers: whatever is in them, a reader ends soon, runs nothing of it, and says what is wrong.

The readers of checkpoints and archives have tests of their own.
"""

import contextlib
import json
import logging
import os
import pickle
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from models.yolo import DetectionModel
from tests.runs import make_data
from utils.config.data_yaml import load_data
from utils.config.flags import DetectConfig
from utils.config.recipe import load_hyp
from utils.config.yaml_files import LARGEST_YAML, find_yaml, load_yaml
from utils.core.errors import UserError
from utils.core.logging import CsvLog
from utils.data.image_cache import HEADER_BYTES, ImageCache
from utils.data.image_cache import MAGIC as IMAGES_MAGIC
from utils.data.image_lists import list_images
from utils.data.index import build_index, open_index
from utils.data.index_file import MAGIC
from utils.data.report import Problem
from utils.dist.job_files import DIGEST, JOB, job_folder, read_job
from utils.inference.detection_files import DetectionFiles
from utils.inference.frames import Frame
from utils.inference.sources import Source

LOG = logging.getLogger("test")
SECONDS = 20.0  # on a busy machine
DATA = "path: set\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n"
READERS: dict[str, Callable[[Path], Any]] = {
    "data": load_data,
    "hyp": load_hyp,
    "model": lambda path: DetectionModel(load_yaml(path), 2, ["a", "b"]),
}


@contextlib.contextmanager
def soon_and_small(megabytes: int = 300) -> Iterator[None]:
    """What is done inside takes neither long nor much memory."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - start < SECONDS
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < megabytes * 1024, f"{grown} KB more"


def refused(read: Callable[[], Any], *words: str) -> str:
    with pytest.raises(UserError) as info, soon_and_small():
        read()
    for word in words:
        assert word in str(info.value), str(info.value)[:2000]
    assert len(str(info.value)) < 20_000
    return str(info.value)


# YAML -----------------------------------------------------------------------------------------------------------------

EVIL = [
    "!!python/object/apply:os.system ['touch {marker}']",
    "!!python/object/new:os.system ['touch {marker}']",
    "!!python/object:os.system {{}}",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/tuple [1]",
]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("value", EVIL)
def test_tags_of_python_are_refused(kind: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"names: {value.format(marker=tmp_path / 'marker')}\n")
    refused(lambda: READERS[kind](path), str(path), "line 1: could not determine a constructor for the tag")
    assert not (tmp_path / "marker").exists()


def laughs(levels: int, start: str = "[lol, lol]") -> str:
    lines = [f"l0: &l0 {start}"]
    lines += [f"l{k}: &l{k} [{', '.join([f'*l{k - 1}'] * 10)}]" for k in range(1, levels)]
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    lines = ["m0: &m0 {k: 1}"]
    lines += [f"m{k}: &m{k} {{<<: [{', '.join([f'*m{k - 1}'] * 9)}]}}" for k in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (laughs(12) + "names: *l11\ntrain: *l11\nval: *l11\n", "aliases make it too large"),
        (f"a: &a {'x' * 100_000}\nnames: [{', '.join(['*a'] * 1000)}]\n", "aliases make it too large"),
        (merges(20), "aliases make it too large"),
        ("names: &a [*a]\n", "an alias stands for what it is in"),
        ("names: &a {x: *a}\n", "an alias stands for what it is in"),
        ("names: " + "[" * 5000, ""),
        ("names: " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("names: " + "{a: " * 5000 + "}" * 5000, "is nested too deeply"),
        ("nc: " + "9" * 5000, "Exceeds the limit"),
        ("nc: !!timestamp 2001-99-99", "month must be in 1..12"),
        ("? [a, b]\n: 1\n", "found unhashable key"),
        ("a: 1\na: 2\n", "key a appears twice"),
        ("\x00", "special characters are not allowed"),
        ("- a\n- b\n", "must hold keys and values"),
        ("", "must hold keys and values"),
        ("!!binary 'AAAA'", "must hold keys and values"),
    ],
    ids=range(16),
)
def test_yaml_bombs_and_nonsense(kind: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    refused(lambda: READERS[kind](path), str(path), words)


def test_aliases_as_people_use_them(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {a: 1, b: [1, 2]}\nmore: {<<: *base, c: 3}\nagain: *base\n")
    assert load_yaml(path)["more"] == {"a": 1, "b": [1, 2], "c": 3}


def test_large_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many names as ImageNet has classes are fine; what is larger than any settings is not read at all."""
    names = [f"class number {number}" for number in range(21_841)]
    path = tmp_path / "x.yaml"
    path.write_text(DATA.replace("[cat, dog]", json.dumps(names)))
    assert path.stat().st_size < LARGEST_YAML / 4
    with path.open("ab") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    refused(lambda: load_data(path), "has more than 2097152 bytes")


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
KEYS = {
    "data": ["path", "train", "val", "test", "names", "nc", "download", "converter", "generator", "defaults"],
    "hyp": ["lr0", "momentum", "mosaic", "anchors", "degrees"],
    "model": ["nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head", "activation", "family", "ch"],
}


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=30, deadline=None)
@given(values=st.data())
def test_any_values_in_yaml(kind: str, values: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    good: dict[Any, Any] = load_yaml(find_yaml("yolov5n", "model")) if kind == "model" else {}
    good = yaml.safe_load(DATA) if kind == "data" else good
    content = good | values.draw(st.dictionaries(st.sampled_from(KEYS[kind]), ODD, max_size=3))
    path = tmp_path_factory.getbasetemp() / f"any-{kind}.yaml"
    path.write_text(yaml.safe_dump(content))
    with contextlib.suppress(UserError):
        READERS[kind](path)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab:-?[]{}&*!|>'\"#%@,~ \n\t0.<="), max_size=60))
def test_any_text_as_yaml(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text)
    for read in (load_data, load_hyp):
        with contextlib.suppress(UserError):
            read(path)


# Networks -------------------------------------------------------------------------------------------------------------


def network(row: Any, **changes: Any) -> dict[str, Any]:
    spec = load_yaml(find_yaml("yolov5n", "model"))
    return {**spec, "backbone": [*spec["backbone"][:1], row, *spec["backbone"][2:]], **changes}


@pytest.mark.parametrize(
    "row",
    [
        [-1, 1, "__import__('os').system('touch marker')", [128, 3, 2]],
        [-1, 1, "nn.Sequential", [128]],
        [-1, 1, "os.system", ["touch marker"]],
        [-1, 1, "Conv", ["__import__('os').system('touch marker')", 3, 2]],
        [-1, 1, "Conv", ["64 * 2", 3, 2]],
        [-1, "eval('1')", "Conv", [128, 3, 2]],
        [[-1, "x"], 1, "Conv", [128, 3, 2]],
        [-1, 10**9, "Conv", [128, 3, 1]],
        [-1, 10**9, "C3", [128]],
        [-1, 10**30, "nn.MaxPool2d", [1, 1]],
        [-1, 1, "Conv", [10**9, 3, 2]],
        [-1, 1, "Conv", [10**30, 3, 2]],
        [-1, 1, "Conv", [128, 10**5, 2]],
        [-1, 1, "Conv", [128, 3, 10**30]],
        [-1, 1, "Conv", [128, 3, 2, 10**7]],
        [-1, 1, "C3", [80_000]],
        [-1, 1, "SPP", [128, [5] * 100_000]],
        [-1, 1, "SPP", [128, ["x"]]],
        [-1, 1, "nn.ZeroPad2d", [10**9]],
        [-1, 1, "nn.ZeroPad2d", [["x"] * 4]],
        [-1, 1, "nn.Upsample", ["None", 10**6, "nearest"]],
        [-1, 1, "nn.Upsample", ["None", float("inf"), "nearest"]],
        [-1, 1, "nn.Upsample", ["None", float("nan"), "nearest"]],
        [-1, 1, "nn.Upsample", ["None", 2, "x" * 9]],
    ],
)
def test_expressions_and_giants_in_networks(row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YOLOv5 evaluates the words of a network's YAML; here words stand for themselves, and numbers have limits."""
    monkeypatch.chdir(tmp_path)
    message = refused(lambda: DetectionModel(network(row), 2, ["a", "b"]), "model YAML")
    assert "backbone row" in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"depth_multiple": 1e6},
        {"width_multiple": 1e6},
        {"width_multiple": float("inf")},
        {"channel_multiple": 10**9},
        {"anchors": 10**9},
        {"anchors": [[10**400, 1]] * 3},
        {"activation": "__import__('os').system('touch marker')"},
        {"activation": ["nn.SiLU()"]},
        {"ch": 10**9},
        {"family": "x" * 100_000},
        {"family": ["yolov5"]},
    ],
    ids=str,
)
def test_giants_in_a_networks_settings(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = {**load_yaml(find_yaml("yolov5n", "model")), **changes}
    with soon_and_small(), contextlib.suppress(UserError):
        DetectionModel(spec, 2, ["a", "b"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ([-1, 1, "C3", [50_000]], {"width_multiple": 0.4}, "parameters, more than 1073741824"),
        ([-1, 1, "Conv", [64, 3, 2]], {"width_multiple": 1e6}, "channels, more than 65536"),
        ([-1, 2, "C3", [64]], {"depth_multiple": 1e6}, "times, more than 256"),
        ([-1, 1, "SPP", [128, [5] * 300]], {}, "has 300 items, more than 256"),
        ([-1, 1, "Conv", [128, 70_000, 2]], {}, "it must be at most 65536"),
    ],
    ids=["parameters", "channels", "repeats", "items", "numbers"],
)
def test_limits_of_networks(row: Any, changes: dict[str, Any], words: str) -> None:
    refused(lambda: DetectionModel(network(row, **changes), 2, ["a", "b"]), words)


# Lists of images ------------------------------------------------------------------------------------------------------


def test_odd_lines_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    odd = [
        b"a\0b.jpg",
        b"x" * 5000 + b".jpg",
        b"\xff\xfe.jpg",
        b"$(touch marker).jpg",
        b"~/y.jpg",
        b";rm -r x.jpg\r",
        b"",
    ]
    path.write_bytes(b"\n".join(odd))
    found = list_images([path], [])
    assert f"{tmp_path}/$(touch marker).jpg" in found
    refused(lambda: build_index([path], 1, cache=False))
    assert os.listdir(tmp_path) == ["list.txt"]


def test_a_list_larger_than_any(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    refused(lambda: list_images([path], []), str(path), "more than")


def test_a_label_file_larger_than_any(tmp_path: Path) -> None:
    """It is one image less, with its reason in the report."""
    data = load_data(make_data(tmp_path / "set"))
    with (tmp_path / "set/labels/train/3.txt").open("ab") as file:
        file.truncate(1 << 40)
    with soon_and_small():
        index = build_index(data.train, 2, cache=False)
    assert len(index) == 9
    assert [p.file.rpartition("/")[2] for p in index.report.problems] == ["3.txt"]
    assert "more than" in index.report.problems[0].value


WORDS = st.lists(st.sampled_from([b"0", b"1", b" ", b".5", b"\n", b"nan", b"1e999", b"-", b"\0", b"_"])).map(b"".join)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=200) | WORDS)
def test_any_bytes_as_list_or_label(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-list"
    if not folder.exists():
        make_data(folder, 2)
    (folder / "labels/train/0.txt").write_bytes(content)
    (folder / "list.txt").write_bytes(content)
    for source in (folder / "list.txt", folder / "images/train"):
        with contextlib.suppress(UserError):
            build_index([source], 2, cache=False)


# The label index ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    data = load_data(make_data(tmp_path_factory.mktemp("indexed") / "set"))
    index = build_index(data.train, 2)
    assert index.file is not None
    return index.file, index._meta["key"]


def sealed(header: Any, body: bytes) -> bytes:
    """An index file whose checksums are right, as whoever wants to do harm can make one."""
    if isinstance(header, dict):
        header = {**header, "crc": zlib.crc32(body), "bytes": len(body)}
    text = json.dumps(header).encode()
    front = MAGIC + struct.pack("<II", zlib.crc32(text), len(text)) + text
    return front + b"\0" * (-len(front) % 64) + body


def parts_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    length = struct.unpack_from("<II", data, len(MAGIC))[1]
    start = len(MAGIC) + 8
    header = json.loads(data[start : start + length])
    start += length + -(start + length) % 64
    return header, data[start:]


def array_change(name: str, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header["arrays"][name][place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        array_change("rows", 0, "|O"),
        array_change("rows", 0, "<f8"),
        array_change("rows", 0, [["a", "O"]]),
        array_change("rows", 1, [10**9, 5]),
        array_change("rows", 1, [-1, 5]),
        array_change("rows", 1, [2, 2, 5]),
        array_change("rows", 1, None),
        array_change("rows", 2, -64),
        array_change("rows", 2, 10**18),
        array_change("rows", 2, "0"),
        array_change("offsets", 1, [3]),
        array_change("shapes", 1, [3, 2]),
        array_change("name_offsets", 1, [3]),
        lambda header: header.update(arrays=[]),
        lambda header: header["arrays"].pop("rows"),
        lambda header: header["arrays"].update(more=["|u1", [1], 0]),
        lambda header: header.pop("num_classes"),
        lambda header: header.update(num_classes="2"),
        lambda header: header.update(name=7),
        lambda header: header.update(name="../../x"),
        lambda header: header.update(images_digest=None),
    ],
    ids=range(21),
)
def test_an_index_with_other_headers(
    change: Callable[[dict[str, Any]], None], index_file: tuple[Path, str], tmp_path: Path
) -> None:
    header, body = parts_of(index_file[0])
    assert open_index(index_file[0], index_file[1], LOG) is not None
    change(header)
    path = tmp_path / "x.index"
    path.write_bytes(sealed(header, body))
    with soon_and_small():
        assert open_index(path, index_file[1], LOG) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offsets", [-1]),
        ("offsets", [0, 10**9]),
        ("offsets", [1]),
        ("name_offsets", [0, 10**9]),
        ("name_offsets", [-(10**6)]),
        ("rows", [5]),
        ("rows", [-1]),
        ("rows", [float("nan")]),
        ("rows", [0, 2.5]),
        ("shapes", [-5]),
        ("shapes", [0]),
    ],
)
def test_an_index_with_other_numbers(
    name: str, values: list[float], index_file: tuple[Path, str], tmp_path: Path
) -> None:
    """Offsets that leave the file would be read from memory that is not ours."""
    header, body = parts_of(index_file[0])
    kind, _, at = header["arrays"][name]
    array = np.array(values, kind).tobytes()
    path = tmp_path / "x.index"
    path.write_bytes(sealed(header, body[:at] + array + body[at + len(array) :]))
    assert open_index(path, index_file[1], LOG) is None


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_any_bytes_in_an_index(
    changes: list[tuple[int, bytes]], index_file: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(index_file[0].read_bytes())
    for place, value in changes:
        at = place % len(content)
        content[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "any.index"
    path.write_bytes(content)
    found = open_index(path, index_file[1], LOG)
    if found is not None:
        assert isinstance(found.report.problems, list)
        assert all(isinstance(problem, Problem) for problem in found.report.problems)


@pytest.mark.parametrize("header", ["[" * 100_000, [], 7, None, {"key": {}}])
def test_an_index_without_a_header(header: Any, index_file: tuple[Path, str], tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    content = sealed(header, b"")
    if isinstance(header, str):
        text = header.encode()
        content = MAGIC + struct.pack("<II", zlib.crc32(text), len(text)) + text
    path.write_bytes(content)
    assert open_index(path, index_file[1], LOG) is None


@pytest.mark.parametrize(
    "change",
    [
        {"count": -1},
        {"count": 10**12},
        {"count": "3"},
        {"count": None},
        {"key": 7},
        [],
        "[" * 2000,
        {"shapes": [-40, 60]},
        {"shapes": [0, 60]},
        {"shapes": [-48, -64]},
        {"shapes": [2**31 - 1, 2**31 - 1]},
    ],
    ids=range(11),
)
def test_an_image_cache_of_somebody_else(change: Any, tmp_path: Path) -> None:
    """It is replaced by one of our own, as a damaged one is."""
    index = build_index(load_data(make_data(tmp_path / "set", 3)).train, 2)
    first = ImageCache.create(index, 64, "disk", shapes=index.shapes, logger=LOG)
    first.close()
    path = next((tmp_path / "set/.lockstep").glob("*.images"))
    content = bytearray(path.read_bytes())
    start = len(IMAGES_MAGIC) + 8
    header = json.loads(content[start : start + struct.unpack_from("<II", content, len(IMAGES_MAGIC))[1]])
    if isinstance(change, dict) and "shapes" in change:
        struct.pack_into("<ii", content, HEADER_BYTES, *change["shapes"])
    else:
        text = change if isinstance(change, str) else json.dumps({**header, **change} if change else change)
        struct.pack_into("<II", content, len(IMAGES_MAGIC), zlib.crc32(text.encode()), len(text))
        content[start : start + len(text)] = text.encode()
    path.write_bytes(content)
    with soon_and_small():
        cache = ImageCache.create(index, 64, "disk", shapes=index.shapes, logger=LOG)
    assert cache.count == 3
    cache.put(0, np.full((48, 64, 3), 7, np.uint8))
    found = cache.get(0)
    assert found is not None and (found == 7).all()
    cache.close()


# Jobs and run folders -------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_job_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that the starting process did not announce is never opened."""
    marker = tmp_path / "marker"
    with job_folder() as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / JOB).write_bytes(pickle.dumps(Evil(marker)))
        for digest in (None, "", "0" * 64):
            monkeypatch.delenv(DIGEST, raising=False)
            if digest is not None:
                monkeypatch.setenv(DIGEST, digest)
            refused(lambda: read_job(folder), "is not the job that this process was started for")
        (folder / JOB).unlink()
        refused(lambda: read_job(folder), JOB)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\0",
        b"epoch,x\n" + b"9" * 5000 + b",1\n",
        b"epoch,x\n\0\0,\0\n",
        b'epoch,"' + b"x" * 300_000 + b'"\n1,2\n',
        "epoch,x\n\u0663,1\n".encode(),
        b"epoch\n" * 3,
    ],
    ids=range(6),
)
def test_results_of_a_run_that_is_gone_on_with(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    log = CsvLog(path, ["epoch", "x"], keep_epochs=5)
    log.append({"epoch": 5, "x": 1.0})
    rows = [line.replace(" ", "") for line in path.read_text().splitlines()]
    assert (rows[0], rows[-1]) == ("epoch,x", "5,1")


# Names ----------------------------------------------------------------------------------------------------------------

NAMES = ["../../x", "/etc/x", "a/b\\c:d", "..", "$(touch m)", "a\nb", "\x1b[2J", "con", "x" * 500, " ", "\udcff"]


def test_class_names_never_leave_a_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "b" / "run"
    run_dir.mkdir(parents=True)
    config = DetectConfig(weights="x", save_crop=True, nosave=True, save_txt=True, save_csv=True)
    files = DetectionFiles(run_dir, config, NAMES)
    picture = np.zeros((40, 40, 3), np.uint8)
    detections = np.array([[4, 4, 30, 30, 0.9, k] for k in range(len(NAMES))], np.float32)
    files.write(Frame(Source("image", "../../e vil.jpg", "e vil"), picture, 0), detections, None)
    files.close()
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(run_dir)]
    assert outside == []
    crops = [path for path in (run_dir / "crops").rglob("*") if path.is_file()]
    assert len(crops) == len(NAMES)
    assert all(len(path.relative_to(run_dir / "crops").parts) == 2 for path in crops)
