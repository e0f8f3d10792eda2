"""Files of weights that were made to harm: nothing of them is run, and neither memory nor time runs away."""

import builtins
import io
import json
import multiprocessing
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.foreign_weights import read_weights
from tests.common import PROJECT, SHARED, needs_shared
from utils.checkpoints import inert_pickle
from utils.checkpoints.files import load_checkpoint
from utils.checkpoints.inert_pickle import RefusedError, read_pickle
from utils.core.errors import UserError
from utils.torch_utils import save_checkpoint

REFUSED = "it wants {} to be called, which no weights need; nothing of it was run"
STORAGE_TYPES = {"torch FloatStorage": 4, "torch HalfStorage": 2, "torch ByteStorage": 1}


class Calls:
    """Pickled, a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def text(value: str) -> bytes:
    """The operation that puts a text on the stack."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def evil_pickles(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that make a file if they are loaded by Python, by name, and what is said about each."""
    command, expression = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    system, touch = f"{os.name}.system", text(command)
    calls = {
        "system": (Calls(os.system, command), REFUSED.format(system)),
        "eval": (Calls(builtins.eval, expression), REFUSED.format("builtins.eval")),
        "exec": (Calls(builtins.exec, expression), REFUSED.format("builtins.exec")),
        "popen": (Calls(subprocess.getoutput, command), "to be called"),
        "map": (OrderedDict(a=Calls(list, Calls(map, builtins.eval, [expression]))), "to be called"),
        "dict_key": ({Calls(os.system, command): 1}, REFUSED.format(system)),
    }
    made = {}
    for name, (value, said) in calls.items():
        for protocol in (2, 4):
            made[f"{name}_{protocol}"] = (pickle.dumps(value, protocol), said)
    ordered = b"ccollections\nOrderedDict\n)R"
    raw = {
        "getattr": b"cbuiltins\ngetattr\ncimportlib\nimport_module\n"
        + text("os")
        + b"\x85R"
        + text("system")
        + b"\x86R",
        "dotted_name": text("posixpath") + text("os.system") + b"\x93",
        "stack_global": text("os") + text("system") + b"\x93",
    }
    made["getattr"] = (b"\x80\x02" + raw["getattr"] + touch + b"\x85R.", REFUSED.format("importlib.import_module"))
    made["dotted_name"] = (b"\x80\x04" + raw["dotted_name"] + touch + b"\x85R.", REFUSED.format("posixpath.os.system"))
    made["stack_global"] = (b"\x80\x04" + raw["stack_global"] + touch + b"\x85R.", REFUSED.format("os.system"))
    # an object that may be made gets a __setstate__ of its own, and then its state
    setstate = b"}" + text("__setstate__") + b"cos\nsystem\nsb"
    made["setstate"] = (
        b"\x80\x02" + ordered + setstate + touch + b"b0" + raw["stack_global"] + touch + b"\x85R.",
        REFUSED.format("os.system"),
    )
    made["setstate_only"] = (b"\x80\x02" + ordered + setstate + touch + b"b.", "")
    made["inst"] = (b"(S'" + command.encode() + b"'\nios\nsystem\n.", "an operation ")
    made["obj"] = (b"\x80\x02(cos\nsystem\n" + touch + b"o.", "an operation OBJ")
    made["persistent"] = (b"\x80\x02cos\nsystem\n" + touch + b"\x85RQ.", REFUSED.format("os.system"))
    made["tensor"] = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(cos\nsystem\n" + touch + b"\x85RK\x00))tR.",
        REFUSED.format("os.system"),
    )
    return made


def torch_zip(path: Path, data: bytes, entries: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    """Write a file as torch.save does, around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in {"data.pkl": data, "byteorder": b"little", "version": b"3\n", **(entries or {})}.items():
            file.writestr(f"archive/{name}", content)
    return path


class Storage:
    """Pickled, the persistent id of a tensor's numbers."""

    def __init__(self, kind: Any = torch.FloatStorage, key: Any = "0", count: Any = 6) -> None:
        self.identity = ("storage", kind, key, "cpu", count)


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, Storage) else None


def tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> Calls:
    return Calls(torch._utils._rebuild_tensor_v2, storage, offset, shape, strides, False, OrderedDict())


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(value)
    return buffer.getvalue()


def in_all_places(folder: Path, data: bytes) -> Iterator[Path]:
    """Write a pickle where torch.save, or a version of it, would have one."""
    inner = data.removeprefix(b"\x80\x02").removeprefix(b"\x80\x04")
    inner = inner[9:] if inner.startswith(b"\x95") else inner  # a frame
    inner = inner[:-1]
    yield torch_zip(folder / "root.pt", data)
    yield torch_zip(folder / "model.pt", b"\x80\x02}" + text("model") + inner + b"s.")
    own = text("digest") + text("0") + text("checkpoint_format") + b"K\x01" + text("model") + inner
    yield torch_zip(folder / "own.pt", b"\x80\x02}(" + own + b"u.")
    module = b"cmodels.yolo\nModel\n)\x81}(" + text("_modules") + b"}" + text("hyp") + inner + b"ub"
    yield torch_zip(folder / "module.pt", b"\x80\x02}" + text("ema") + module + b"s.")
    magic, protocol = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    (folder / "legacy.pt").write_bytes(magic + protocol + pickle.dumps({}, 2) + data)
    yield folder / "legacy.pt"
    (folder / "bare.pt").write_bytes(data)
    yield folder / "bare.pt"
    with tarfile.open(folder / "tar.pt", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in {"sys_info": pickle.dumps({}, 2), "pickle": data, "tensors": b"", "storages": b""}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    yield folder / "tar.pt"


# code -----------------------------------------------------------------------------------------------------------------

EVIL = sorted(evil_pickles(Path("x")))


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a POSIX shell")
def test_evil_pickles_are_evil(tmp_path: Path) -> None:
    """Python itself runs what they hold, so that the tests below mean something."""
    code = "import pickle, sys\nclass U(pickle.Unpickler):\n    persistent_load = lambda s, i: i\n"
    code += "for p in sys.argv[1:]:\n    try: U(open(p, 'rb')).load()\n    except Exception: pass\n"
    for name in EVIL:
        marker = tmp_path / f"{name}.marker"
        (tmp_path / name).write_bytes(evil_pickles(marker)[name][0])
    subprocess.run([sys.executable, "-c", code, *(tmp_path / name for name in EVIL)], check=True, capture_output=True)
    assert [name for name in EVIL if not (tmp_path / f"{name}.marker").exists()] == []


@pytest.mark.parametrize("name", EVIL)
def test_nothing_is_run(tmp_path: Path, name: str) -> None:
    """faults.md, 79: in every place of every format; what is wanted is named where it is read at all."""
    marker = tmp_path / "marker"
    data, said = evil_pickles(marker)[name]
    for path in in_all_places(tmp_path, data):
        for read in (read_weights, load_checkpoint):
            with pytest.raises(UserError) as caught:
                read(path, "--weights")
            assert str(caught.value).startswith(f"--weights {path} ")
            if path.stem in ("root", "model", "own", "module"):
                assert said in str(caught.value)
            assert not marker.exists(), path


def test_nothing_is_run_from_tensors_and_other_entries(tmp_path: Path) -> None:
    """A pickle in a tensor's bytes stays bytes; a second data.pkl, or one deeper down, isn't taken for the first."""
    marker = tmp_path / "marker"
    evil = evil_pickles(marker)["system_2"][0]
    state = {"model": {"x": tensor(Storage(torch.ByteStorage, "0", len(evil)), 0, (len(evil),), (1,))}}
    path = torch_zip(tmp_path / "bytes.pt", pickled(state), {"data/0": evil, "data/data.pkl": evil, "code/x.py": evil})
    assert bytes(read_weights(path)["model"]["x"].tolist()) == evil
    with zipfile.ZipFile(path, "a") as twice, pytest.warns(UserWarning, match="Duplicate"):
        twice.writestr("archive/data.pkl", evil)
    with pytest.raises(UserError, match="its entries are not those of one file"):
        read_weights(path)
    with pytest.raises(UserError, match="it is a TorchScript file"):
        read_weights(torch_zip(tmp_path / "script.pt", pickled({}), {"constants.pkl": evil}))
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.gate
def test_nothing_is_run_by_the_scripts(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    evil = torch_zip(tmp_path / "evil.pt", evil_pickles(marker)["eval_2"][0])
    flags = ["--weights", str(evil), "--source", str(PROJECT / "data/images")]
    command = [sys.executable, str(PROJECT / "detect.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    said = REFUSED.format("builtins.eval")
    assert done.returncode == 2 and done.stderr == (f"error: --weights {evil} is damaged or not a checkpoint: {said}\n")
    assert not marker.exists()


def test_names_are_never_looked_up() -> None:
    """A class that is only named is not imported, whatever its module would do."""
    sys.modules.pop("this", None)
    found = read_pickle(b"\x80\x02cthis\ns\n)\x81}" + text("a") + b"cantigravity\nfly\nsb.", {}, lambda _: None)
    assert (found.kind.path, found.state["a"].path) == ("this.s", "antigravity.fly")
    assert "this" not in sys.modules and "antigravity" not in sys.modules


def test_what_a_terminal_would_act_upon_is_not_said() -> None:
    with pytest.raises(RefusedError, match=r"^it wants os\?\[31m\.system to be called"):
        read_pickle(b"\x80\x02cos\x1b[31m\nsystem\n)R.", {}, lambda _: None)


# sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "offset", "shape", "strides"),
    [
        (Storage(), 0, (10**12,), (1,)),
        (Storage(), 0, (10**9, 10**9), (0, 0)),
        (Storage(), 0, (2,) * 64, (0,) * 64),
        (Storage(), 0, (2**61, 2**61), (1, 1)),
        (Storage(), 0, (7,), (1,)),
        (Storage(), 5, (2,), (1,)),
        (Storage(), 0, (2, 2), (5, 1)),
        (Storage(), -1, (2,), (1,)),
        (Storage(), 0, (2,), (-1,)),
        (Storage(), 0, (-2,), (1,)),
        (Storage(), 0, (2,), (1, 1)),
        (Storage(), 0, (1,) * 65, (1,) * 65),
        (Storage(), 0.5, (2,), (1,)),
        (Storage(), True, (2,), (1,)),
        (Storage(), 0, ("2",), (1,)),
        (Storage(), 0, [2], [1]),
        (Storage(count=10**12), 0, (2,), (1,)),
        (Storage(count=5), 0, (2,), (1,)),
        (Storage(count=-6), 0, (2,), (1,)),
        (Storage(count="6"), 0, (2,), (1,)),
        (Storage(torch.DoubleStorage), 0, (2,), (1,)),
        (Storage(torch.ComplexFloatStorage), 0, (2,), (1,)),
        (Storage(torch.nn.Linear), 0, (2,), (1,)),
        (Storage("float"), 0, (2,), (1,)),
        (Storage(key="1"), 0, (2,), (1,)),
        (Storage(key="../data.pkl"), 0, (2,), (1,)),
        (Storage(key=0), 0, (2,), (1,)),
        ("storage", 0, (2,), (1,)),
        (None, 0, (2,), (1,)),
    ],
)
def test_tensors_stay_within_their_numbers(tmp_path: Path, storage: Any, offset: Any, shape: Any, strides: Any) -> None:
    entries = {"data/0": struct.pack("<6f", *range(6))}
    path = torch_zip(tmp_path / "x.pt", pickled({"model": {"x": tensor(storage, offset, shape, strides)}}), entries)
    with pytest.raises(UserError, match=r"it has a tensor|it has numbers of a type that is not read"):
        read_weights(path)
    good = {"model": {"x": tensor(Storage(), 1, (2, 2), (3, 1)), "none": tensor(Storage(), 0, (0, 3), (3, 1))}}
    found = read_weights(torch_zip(path, pickled(good), entries))["model"]
    assert found["x"].tolist() == [[1, 2], [4, 5]] and found["none"].shape == (0, 3)


def test_compressed_and_overlapping_entries(tmp_path: Path) -> None:
    """faults.md, 83: a small file that unpacks to much, by compression or by entries that lie on one another."""
    numbers = 50 << 20
    state = pickled({"model": {"x": tensor(Storage(torch.ByteStorage, "0", numbers), 0, (numbers,), (1,))}})
    path = torch_zip(tmp_path / "bomb.pt", state, {"data/0": bytes(numbers)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"it is compressed, which torch\.save never does"):
        read_weights(path)
    count = 1000
    shared = {f"x{key}": tensor(Storage(torch.ByteStorage, "0", 1 << 16), 0, (1 << 16,), (1,)) for key in range(count)}
    path = torch_zip(path, pickled({"model": shared}), {"data/0": bytes(1 << 16)})
    with pytest.raises(UserError, match="its tensors add up to far more than the file"):
        read_weights(path)
    path = torch_zip(path, pickled({}), {f"data/{number}": b"" for number in range(40_000)})
    with pytest.raises(UserError, match="its table of contents is too large"):
        read_weights(path)


DEEP = 100_000
LIMITS: dict[str, tuple[Callable[[], bytes], str]] = {
    "tuple_in_tuple": (lambda: b"\x80\x02)" + b"\x85" * DEEP + b".", "neither a network"),
    "list_in_list": (lambda: b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".", "neither a network"),
    "record_in_record": (
        lambda: b"\x80\x02" + b"ca\nb\n" * DEEP + b")\x81" + b"\x85\x81" * (DEEP - 1) + b".",
        "neither a network",
    ),
    "deep_key": (lambda: b"\x80\x02})" + b"\x85" * DEEP + b"K\x00s.", "it has a tuple as a key"),
    "deep_entry": (lambda: b"\x80\x04\x8f()" + b"\x85" * DEEP + b"\x90.", "it has a tuple as a key"),
    "clashing_keys": (
        lambda: b"\x80\x02}(" + b"".join(_long(n * (2**61 - 1)) + b"N" for n in range(1, 30_000)) + b"u.",
        "it has a int as a key",
    ),
    "memo": (lambda: b"\x80\x02Nr\xff\xff\xff\xff.", "neither a network"),
    "memo_unset": (lambda: b"\x80\x02j\xff\xff\xff\xff.", "damaged"),
    "long_text": (lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "damaged"),
    "long_bytes": (lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "damaged"),
    "long_frame": (lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.", "neither a network"),
    "large_number": (lambda: b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".", "large number"),
    "bytes_of_a_length": (lambda: b"\x80\x02c__builtin__\nbytes\n\x8a\x05\x00\x00\x00\x00\x10\x85R.", "damaged"),
    "many_steps": (lambda: b"\x80\x02" + b"N0" * 500_001 + b"N.", "takes more than 1000000 steps"),
    "large_pickle": (lambda: b"\x80\x02" + bytes(65 << 20), "data.pkl is too large"),
    "own_sharing": (lambda: _own(b"N" + b"\x86" * 0 + _doubling(b"\x86", 60)), "its content is nested too deeply"),
    "own_cycle": (lambda: _own(b"]q\x00h\x00a"), "its content is nested too deeply"),
    "own_number": (lambda: _own(_long(1 << 4000)), "not have the digest"),
    "own_strange": (lambda: _own(b"\x80\x04\x8f("[2:] + b"K\x01\x90"), "not have the digest"),
}


def _long(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


def _doubling(pair: bytes, times: int) -> bytes:
    """Operations that make a pair of the topmost value with itself, again and again."""
    return b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + pair for n in range(times))


def _own(value: bytes) -> bytes:
    keys = text("digest") + text("0") + text("checkpoint_format") + b"K\x01" + text("x")
    return b"\x80\x04}(" + keys + value + b"u."


LIMITED = """
import resource, sys, time
from pathlib import Path
from models.foreign_weights import read_weights
from utils.core.errors import UserError
def memory(): return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (memory() + (1 << 30),) * 2)
for path in map(Path, sys.argv[1:]):
    begin = time.monotonic()
    try: said = read_weights(path).get("why_no_spec", "a network")
    except UserError as error: said = str(error)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(path.stem, round(time.monotonic() - begin, 2), peak, said, sep="|", flush=True)
"""


def limited(paths: list[Path]) -> dict[str, str]:
    """Read files in a process that gets no more than 1 GB on top of what it starts with; what was said about each."""
    command = [sys.executable, "-c", LIMITED, *map(str, paths)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|", 3) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == [path.stem for path in paths]
    slow = [row for row in rows if float(row[1]) > 20]
    assert not slow
    return {row[0]: row[3] for row in rows}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said about files that would take all memory or time."""
    if not sys.platform.startswith("linux"):
        pytest.skip("limits memory as Linux does")
    folder = tmp_path_factory.mktemp("hostile")
    subprocess.run([sys.executable, PROJECT / "tests/yolov5_files.py", folder, "hostile"], check=True)
    for name, (make, _) in LIMITS.items():
        torch_zip(folder / f"{name}.pt", make())
    return limited(sorted(folder.glob("*.pt")))


@pytest.mark.slow
@pytest.mark.gate
def test_memory_and_time_are_bounded(said: dict[str, str]) -> None:
    """Deep, cyclic and endless values, and claims of sizes that are not there."""
    assert not [name for name, (_, words) in LIMITS.items() if not any(one in said[name] for one in words.split("|"))]


@pytest.mark.slow
@pytest.mark.gate
def test_networks_are_no_larger_than_their_weights(said: dict[str, str]) -> None:
    """The YAML in a file may ask for anything."""
    harmless = {"anchors", "anchor_counts"}  # those of the weights are taken
    assert {name for name, words in said.items() if words == "a network"} == harmless
    layers = (
        "holds a network that can't be built here: its YAML has another number of layers than there are weights for"
    )
    large = "holds a network that can't be built here: its YAML is too large"
    assert said["repeats"] == layers
    assert said["rows"] == said["nested"] == said["yaml_in_yaml"] == large
    assert all("its network has far too many layers" in said[name] for name in ("layer_in_itself", "layers_in_layers"))
    assert all("can't be built" in said[name] for name in ("depth", "width", "channels", "kernels", "scale", "names"))


# damage ---------------------------------------------------------------------------------------------------------------


def small_files(folder: Path) -> list[bytes]:
    """A state dict, a network and a checkpoint of our own, each of a few kilobytes."""
    layer = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
    torch.save({"model": layer.state_dict(), "epoch": 3}, folder / "state.pt")
    torch.save({"model": layer, "opt": {"imgsz": 64}, "ema": None}, folder / "network.pt")
    save_checkpoint({"model": layer.state_dict(), "spec": {"nc": 1}, "config": {"imgsz": 64}}, folder / "own.pt")
    return [(folder / f"{name}.pt").read_bytes() for name in ("state", "network", "own")]


def pickle_span(data: bytes) -> tuple[int, int]:
    """Where the pickle lies in a file."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        info = next(info for info in file.infolist() if info.filename.endswith("data.pkl"))
        start = data.index(file.read(info))
    return start, start + info.file_size


def survives(path: Path) -> bool:
    """Whether a file is read; anything but a UserError is a failure of the test."""
    try:
        read_weights(path, "--weights")
    except UserError as error:
        said = str(error)
    else:
        said = ""
    assert not said or str(path) in said
    return not said


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("small")
    return folder, small_files(folder)


QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@QUICK
@given(which=st.integers(0, 2), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits(small: tuple[Path, list[bytes]], which: int, flips: list[tuple[float, int]]) -> None:
    folder, files = small
    data = bytearray(files[which])
    for share, bit in flips:
        data[min(int(share * len(data)), len(data) - 1)] ^= 1 << bit
    (folder / "x.pt").write_bytes(data)
    survives(folder / "x.pt")


@QUICK
@given(which=st.integers(0, 2), start=st.floats(0, 1), length=st.integers(1, 4000), fill=st.sampled_from([b"", b"\0"]))
def test_missing_pieces(small: tuple[Path, list[bytes]], which: int, start: float, length: int, fill: bytes) -> None:
    """Cut off at the end, cut out of the middle, or overwritten with zeros."""
    folder, files = small
    data, at = files[which], int(start * len(files[which]))
    (folder / "x.pt").write_bytes(data[:at] + fill * length + data[at + length :])
    survives(folder / "x.pt")


OPERATIONS = [
    bytes([code]) for code in b"(.0123]})NKMJGUXcRb\x81\x85\x86\x87tesauqhjrQ\x8f\x90\x91\x93\x94\x8c\x89\x88"
]
PIECES = st.one_of(st.sampled_from(OPERATIONS), st.binary(max_size=6), st.just(b"ccollections\nOrderedDict\n"))


@QUICK
@given(
    which=st.integers(0, 2),
    edits=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 12), st.lists(PIECES, max_size=4)), min_size=1, max_size=3
    ),
)
def test_spliced_operations(
    small: tuple[Path, list[bytes]], which: int, edits: list[tuple[float, int, list[bytes]]]
) -> None:
    """Pickles with operations put in and taken out, in whole zip files."""
    folder, files = small
    start, end = pickle_span(files[which])
    data = files[which][start:end]
    for share, cut, pieces in edits:
        at = int(share * len(data))
        data = data[:at] + b"".join(pieces) + data[at + cut :]
    with zipfile.ZipFile(io.BytesIO(files[which])) as file:
        entries = {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}
    survives(torch_zip(folder / "x.pt", data, {**entries, "data.pkl": data}))


def mutate_for(folder: Path, seconds: float, seed: int, more: list[bytes] | None = None) -> dict[str, Any]:
    """Damage small files at random for a time, and count what becomes of them."""
    folder.mkdir(exist_ok=True)
    rng, files = random.Random(seed), small_files(folder) + (more or [])
    counts: dict[str, Any] = {"files": 0, "read": 0, "slowest": 0.0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        original = rng.choice(files)
        start, stop = pickle_span(original)
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            low, high = (start, stop) if rng.random() < 0.7 else (0, len(data))
            at, kind = rng.randrange(low, high), rng.randrange(4)
            piece = rng.choice(OPERATIONS) if rng.random() < 0.5 else rng.randbytes(rng.randint(1, 8))
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at : at + len(piece)] = piece
            elif kind == 2:
                other = rng.randrange(low, high)
                length = rng.randint(1, 40)
                data[at : at + length] = data[other : other + length]
            else:
                del data[at : at + rng.randint(1, 8)]
                data[at:at] = piece
            data = data[: max(len(data), 1)]
            stop = min(stop, len(data))
            if start >= stop:
                break
        if rng.random() < 0.8 and start < stop:  # with right sums, so that damage gets as far as the pickle
            inside = bytes(data[start:stop])
            with zipfile.ZipFile(io.BytesIO(original)) as file:
                entries = {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}
            torch_zip(folder / "x.pt", inside, {**entries, "data.pkl": inside})
        else:
            (folder / "x.pt").write_bytes(data)
        begin = time.monotonic()
        counts["read"] += survives(folder / "x.pt")
        counts["slowest"] = max(counts["slowest"], time.monotonic() - begin)
        counts["files"] += 1
    return counts


@pytest.mark.slow
def test_damage_at_random(tmp_path: Path) -> None:
    """Two minutes of it, on two cores; LOCKSTEP_FUZZ_SECONDS and LOCKSTEP_FUZZ_SEED say otherwise."""
    seconds, seed = float(os.environ.get("LOCKSTEP_FUZZ_SECONDS", 120)), int(os.environ.get("LOCKSTEP_FUZZ_SEED", 0))
    folders = [tmp_path / name for name in ("first", "second")]
    # Processes that are spawned would leave one of Python's own behind, and other tests look at who is left.
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")) as pool:
        found = [
            pool.submit(mutate_for, folder, seconds / 2, 2 * seed + number) for number, folder in enumerate(folders)
        ]
    for counts in (future.result() for future in found):
        print(json.dumps(counts))
        assert counts["files"] > 100 * seconds / 2 / 10 and counts["slowest"] < 20


# what honest files have -----------------------------------------------------------------------------------------------


def test_plain_values_come_back() -> None:
    """What pickle writes for plain values in each protocol, and what our reader makes of it."""
    values: list[Any] = [
        {"a": [1, -2, 3.5, None, True, False, 2**40, -(2**70)], 3: ("x", b"yz", b"", {4, 5}), "n": {}},
        [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), "\u00e9\u4e2d" * 200, "a" * 70_000, b"b" * 70_000],
        {"nested": [[{"deep": ((1,), [2, {"x": {1}}])}]]},
    ]
    values[0]["itself"] = values[1]
    for value in values:
        for protocol in (2, 3, 4, 5):
            assert read_pickle(pickle.dumps(value, protocol), {}, lambda _: None) == value, protocol


def test_makers_are_the_only_calls() -> None:
    assert set(inert_pickle.MAKERS) == {
        *("collections.OrderedDict", "builtins.set", "builtins.bytes", "_codecs.encode"),
        *("pathlib.PosixPath", "pathlib.WindowsPath"),
        *("numpy.dtype", "numpy.core.multiarray.scalar", "numpy.core.multiarray._reconstruct"),
    }


@needs_shared
def test_real_checkpoint_damaged(tmp_path: Path) -> None:
    """The recorded checkpoint with a flipped bit in its pickle, its weights, and cut short."""
    data = (SHARED / "golden/yolov5n_bccd.pt").read_bytes()
    start, end = pickle_span(data)
    path = tmp_path / "x.pt"
    for position in (start + 5000, end + 100_000, len(data) - 30_000):
        damaged = bytearray(data)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        survives(path)
    path.write_bytes(data[:-1000])
    with pytest.raises(UserError, match=r"it is cut short$"):
        read_weights(path)
