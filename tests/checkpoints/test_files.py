"""Checkpoint files: whole or absent under kill -9, full disks and damage; nothing but plain values inside."""

import contextlib
import copy
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.common import Conv
from tests.common import PROJECT, as_nobody, needs_root
from utils.checkpoints.files import NonFiniteError, checkpoint_bytes, digest_of, load_checkpoint, previous_path
from utils.checkpoints.writer import CheckpointWriter, Outcome, copy_state
from utils.core.errors import UserError
from utils.core.seeds import rng_state
from utils.torch_utils import ModelEMA, load_newest, save_checkpoint, strip_checkpoint

pytestmark = pytest.mark.lowest
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and limits")


def small_state(epoch: int = 0, size: int = 1000) -> dict[str, Any]:
    """A state with every kind of value that a run has; all of it follows from the epoch."""
    generator = torch.Generator().manual_seed(epoch)
    return {
        "epoch": epoch,
        "best_fitness": 0.25 + epoch,
        "done": False,
        "config": {"data": "shapes.yaml", "freeze": [0, 1], "hyp": {"lr0": 0.01}, "resume": None},
        "model": {"0.weight": torch.randn(size, generator=generator), "0.bn.num_batches_tracked": torch.tensor(epoch)},
        "ema": {"module": {"0.weight": torch.randn(size, generator=generator).half()}, "updates": epoch, "skipped": 0},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.999)}]},
        "empty": torch.zeros(0, 6),
    }


def assert_same(a: Any, b: Any) -> None:
    """Compare nested plain values, types and bits included."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert a == b


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


# what goes in comes out -----------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(3), path)
    assert_same(load_checkpoint(path), small_state(3))
    assert os.listdir(tmp_path) == ["last.pt"]


def test_file_is_plain_values(tmp_path: Path) -> None:
    """Torch's own safe loader reads it, and it holds no type of NumPy or ours."""
    path = tmp_path / "last.pt"
    state = small_state()
    state["fitness"] = np.float64(0.5)  # a float to isinstance, but NumPy's in a pickle
    state["model"] = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).state_dict()  # OrderedDict
    state["rng"] = rng_state(torch.device("cpu"))
    save_checkpoint(state, path)
    content = torch.load(path, weights_only=True)
    assert type(content["fitness"]) is float
    assert type(content["model"]) is dict
    assert len(content["digest"]) == 64


def test_refuses_what_is_not_plain(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['config'\]\['data'\] is of type \w*Path"):
        save_checkpoint({"config": {"data": Path("x.yaml")}}, tmp_path / "last.pt")
    assert os.listdir(tmp_path) == []


def test_slice_does_not_take_its_whole_along(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint({"a": torch.zeros(1_000_000)[:10]}, path)
    assert path.stat().st_size < 10_000


def test_size_estimate(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    state = small_state(size=200_000)
    state["model"].update({f"layer.{i}.weight": torch.randn(1000) for i in range(300)})
    save_checkpoint(state, path)
    assert path.stat().st_size <= checkpoint_bytes(state) < 1.2 * path.stat().st_size


def test_digest_sees_content_and_nothing_else() -> None:
    weight = torch.randn(4, 3, 2, 2)
    base = digest_of({"a": weight, "b": [1, 2]})
    assert base == digest_of({"b": [1, 2], "a": weight.to(memory_format=torch.channels_last)})
    changed = weight.clone()
    changed.view(torch.int32)[0, 0, 0, 0] ^= 1  # one bit
    for other in (
        {"a": changed, "b": [1, 2]},
        {"a": weight.reshape(3, 4, 2, 2), "b": [1, 2]},
        {"a": weight.view(torch.int32), "b": [1, 2]},
        {"a": weight, "b": (1, 2)},
        {"a": weight, "b": [1, 2.0]},
        {"a": weight, "b": [True, 2]},
        {"a": weight, "b": [1], "c": [2]},
        {"a": weight, "c": [1, 2]},
    ):
        assert digest_of(other) != base


# generations ----------------------------------------------------------------------------------------------------------


def test_keeps_two_generations(tmp_path: Path) -> None:
    path, best = tmp_path / "last.pt", tmp_path / "best.pt"
    for epoch in range(4):
        save_checkpoint(small_state(epoch), path, also=[best] if epoch == 1 else [])
    assert load_checkpoint(path)["epoch"] == 3
    assert load_checkpoint(tmp_path / "last.prev.pt")["epoch"] == 2
    assert load_checkpoint(best)["epoch"] == 1
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.prev.pt", "last.pt"]


def test_previous_that_is_last_already(tmp_path: Path) -> None:
    """A run that died between its two renames leaves both names on one file; renaming one to the other does nothing."""
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(0), path)
    os.link(path, previous_path(path))
    save_checkpoint(small_state(1), path)
    assert load_checkpoint(path)["epoch"] == 1
    assert load_checkpoint(previous_path(path))["epoch"] == 0
    assert temporaries(tmp_path) == []


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")  # what such file systems answer

    monkeypatch.setattr(os, "link", refuse)
    for epoch in range(2):
        save_checkpoint(small_state(epoch), tmp_path / "last.pt", also=[tmp_path / "best.pt"])
    epochs = [load_checkpoint(tmp_path / name)["epoch"] for name in ("last.pt", "best.pt", "last.prev.pt")]
    assert epochs == [1, 1, 0]
    assert temporaries(tmp_path) == []


def test_stale_temporaries_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = [f".last.pt.{dead.pid}.tmp", f".best.pt.{dead.pid}.tmp", f".last.prev.pt.{os.getpid()}.tmp"]
    others = [f".last.pt.{os.getppid()}.tmp", ".notes.tmp", "x.pt.1.tmp"]
    for name in stale + others:
        (tmp_path / name).write_text("half")
    save_checkpoint(small_state(), tmp_path / "last.pt")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "last.pt"])


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "reason"), [(0.0, "it is empty"), (0.1, "it is cut short"), (0.5, "it is cut short"), (0.99, "cut short")]
)
def test_truncated_file(tmp_path: Path, share: float, reason: str) -> None:
    """THU-MIG/yolov10#154: "failed finding central directory" does not tell a user what to do."""
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=rf"last\.pt is damaged or not a checkpoint: .*{reason}"):
        load_checkpoint(path)


def test_bit_flips(tmp_path: Path) -> None:
    """One flipped bit is either noticed or without effect; in a tensor's bytes it is always noticed."""
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(size=200), path)
    data = path.read_bytes()
    weight = small_state(size=200)["model"]["0.weight"].numpy().tobytes()
    inside = data.index(weight)
    rng = random.Random(0)
    noticed = named = 0
    positions = [(inside + rng.randrange(len(weight)), True) for _ in range(50)]
    positions += [(rng.randrange(len(data)), False) for _ in range(250)]
    for position, in_weight in positions:
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            state = load_checkpoint(path)
        except UserError as error:
            noticed += 1
            named += str(path) in str(error)
        else:
            assert not in_weight
            assert_same(state, small_state(size=200))
    assert named == noticed > 100


def test_foreign_files(tmp_path: Path) -> None:
    module, plain, text = tmp_path / "yolo.pt", tmp_path / "plain.pt", tmp_path / "text.pt"
    torch.save({"model": nn.Linear(2, 2)}, module)
    torch.save({"model": {}}, plain)
    text.write_text("hello")
    with pytest.raises(UserError, match=r"yolo\.pt is not a checkpoint of this program: it holds no digest"):
        load_checkpoint(module)
    with pytest.raises(UserError, match=r"plain\.pt is not a checkpoint of this program"):
        load_checkpoint(plain)
    with pytest.raises(UserError, match=r"text\.pt is damaged or not"):
        load_checkpoint(text)
    with pytest.raises(UserError, match=r"none\.pt is not there"):
        load_checkpoint(tmp_path / "none.pt")


def test_what_is_no_file_or_of_another_program(tmp_path: Path) -> None:
    """The flag stands first, the way out last, and torch says nothing of its own."""
    theirs, pickled = tmp_path / "theirs.pt", tmp_path / "pickled.pt"
    torch.save({"model": Conv(3, 4)}, theirs)
    pickled.write_bytes(pickle.dumps({"a": 1}, protocol=4))
    reasons = {
        tmp_path: rf"is a folder; name a file, such as {tmp_path}/weights/best\.pt of a run",
        tmp_path / ("x" * 300): "can't be read: File name too long",
        theirs / "x.pt": "can't be read: Not a directory",
        theirs: r"is not a checkpoint .*; weights from elsewhere can start a run \(--weights\), but not continue one",
        pickled: "is damaged or not a checkpoint: it is no file of torch.save",
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for path, reason in reasons.items():
            with pytest.raises(UserError, match=f"^--weights {path} {reason}$"):
                load_checkpoint(path, "--weights")
            with pytest.raises(UserError, match=f"^{path} {reason}$"):
                load_checkpoint(path)
    assert not said


@needs_root
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(), path)
    path.chmod(0o600)
    with as_nobody(tmp_path), pytest.raises(UserError, match=f"^--weights {path} can't be read: Permission denied$"):
        load_checkpoint(path, "--weights")


def test_newer_format(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.save({"checkpoint_format": 99, "digest": ""}, path)
    with pytest.raises(UserError, match=r"format 99.*newer version"):
        load_checkpoint(path)


def test_newest_falls_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "last.pt"
    for epoch in range(2):
        save_checkpoint(small_state(epoch), path)
    assert load_newest(tmp_path)[0]["epoch"] == 1
    assert load_newest(path)[1] == path
    path.write_bytes(path.read_bytes()[:-100])
    capfd.readouterr()
    state, source = load_newest(tmp_path)
    assert (state["epoch"], source.name) == (0, "last.prev.pt")
    captured = capfd.readouterr()
    assert "last.pt is damaged" in captured.out + captured.err
    path.unlink()
    assert load_newest(tmp_path)[0]["epoch"] == 0
    previous_path(path).write_bytes(b"")
    with pytest.raises(UserError, match=r"last\.pt is not there; .*last\.prev\.pt is damaged"):
        load_newest(tmp_path)


def test_damage_anywhere_falls_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """200 flipped bits and 20 ends cut off: never is anything else loaded than what was saved.

    A bit that means nothing (a time in the archive, what fills it up) may be flipped: the content is as it was.
    """
    path = tmp_path / "last.pt"
    states = [small_state(epoch, 50_000) for epoch in range(2)]
    for state in states:
        save_checkpoint(state, path)
    data = path.read_bytes()
    rng = random.Random(0)
    spoiled: list[tuple[bytes, bool]] = [(data[: rng.randrange(len(data))], True) for _ in range(20)]
    for _ in range(200):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        spoiled.append((bytes(flipped), False))
    fell_back = 0
    capfd.readouterr()
    for content, cut in spoiled:
        path.write_bytes(content)
        state, source = load_newest(tmp_path)
        said = capfd.readouterr().out
        if source == path:
            assert not cut
            assert_same(state, states[1])
            continue
        fell_back += 1
        assert_same(state, states[0])
        assert said.startswith(f"WARNING: {path} is damaged")
        assert said.endswith(f"going on from {previous_path(path)}\n")
        with pytest.raises(UserError, match=r"^--resume .*last\.pt is damaged"):
            load_checkpoint(path, "--resume")
    assert fell_back >= 215


def test_content_that_is_not_what_was_saved(tmp_path: Path) -> None:
    """In a file that is whole by itself: its archive's own sums are right."""
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(), path)
    content = torch.load(path, weights_only=True)
    content["model"]["0.weight"].view(torch.int32)[7] ^= 1
    torch.save(content, path)
    with pytest.raises(UserError, match=r"last\.pt is damaged: its content does not have the digest"):
        load_checkpoint(path)


# what must not be saved -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["model", "ema"])
def test_non_finite_weights_never_replace_finite_ones(tmp_path: Path, part: str, value: float) -> None:
    """ultralytics/ultralytics#24170: the first epoch saved a file of NaN."""
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(0), path)
    before = path.read_bytes()
    state = small_state(1)
    weights = state["ema"]["module"] if part == "ema" else state["model"]
    weights["0.weight"][5] = value
    with pytest.raises(NonFiniteError, match=rf"{part}.*0\.weight"):
        save_checkpoint(state, path, also=[tmp_path / "best.pt"])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


def test_strip(tmp_path: Path) -> None:
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    model = nn.Linear(3, 2)
    ema = ModelEMA(model)
    with torch.no_grad():
        model.weight.add_(1)
    state = {"epoch": 4, "model": model.state_dict(), "ema": ema.state_dict(), "optimizer": {"a": torch.zeros(3)}}
    save_checkpoint(state, last, also=[best])
    strip_checkpoint(best, best)
    stripped = load_checkpoint(best)
    assert sorted(stripped) == ["epoch", "model"]
    assert torch.equal(stripped["model"]["weight"], ema.module.state_dict()["weight"])
    assert "optimizer" in load_checkpoint(last)  # both names were one file before
    assert not previous_path(best).exists()


# faults ---------------------------------------------------------------------------------------------------------------


@posix_only
def test_kill_at_any_moment(tmp_path: Path) -> None:
    """ultralytics/ultralytics#5793: an interrupted save left no file that loads.

    Twenty times a process that saves 10 MB without pause is killed, at moments spread over its saves, and more often on
    a machine that is too busy for a save to come through; whatever was reported as saved must be there.
    """
    start = time.perf_counter()
    save_checkpoint(small_state(0, 1_600_000), tmp_path / "last.pt")
    duration = time.perf_counter() - start
    assert (tmp_path / "last.pt").stat().st_size > 9_000_000
    rng = random.Random(1)
    epoch, kills, interrupted, half_written = 0, 0, 0, 0
    # one import of torch serves all kills: the parent only forks
    code = "import sys; from tests.checkpoints.test_files import save_in_child; save_in_child(sys.argv[1])"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        while kills < 20 or ((epoch <= 2 or interrupted <= 10) and kills < 100):
            kills += 1
            server.stdin.write(f"{epoch}\n")
            pid = int(server.stdout.readline())
            time.sleep(rng.uniform(0.0, 1.5 * duration))  # the first save has begun
            os.kill(pid, signal.SIGKILL)
            *_, reported, doing = server.stdout.readline().split()
            state = load_checkpoint(tmp_path / "last.pt")  # last.pt itself, not its predecessor
            assert state["epoch"] in (int(reported), int(reported) + 1)
            assert_same(state, small_state(state["epoch"], 1_600_000))
            for name in ("last.prev.pt", "best.pt"):
                if (tmp_path / name).exists():
                    load_checkpoint(tmp_path / name)
            interrupted += doing == "saving"
            half_written += bool(temporaries(tmp_path))
            epoch = state["epoch"]
        server.stdin.close()
    assert interrupted > 10  # kills that hit a save
    assert half_written > 0
    assert epoch > 2  # some saves came through
    save_checkpoint(small_state(epoch + 1, 10), tmp_path / "last.pt")
    assert temporaries(tmp_path) == []


def save_in_child(folder: str) -> None:
    """For every epoch read from stdin: fork, and save from that epoch on until killed.

    Prints the process to kill once it saves, and when it is dead the last epoch that was saved, and whether it was
    ``saving`` another one or ``drawing`` what to save.
    """
    for line in sys.stdin:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            epoch = int(line)
            while True:
                state = small_state(epoch + 1, 1_600_000)
                os.write(write_end, f"{epoch} saving ".encode())
                epoch += 1
                save_checkpoint(state, Path(folder) / "last.pt", [Path(folder) / "best.pt"] if epoch % 2 else [])
                os.write(write_end, f"{epoch} drawing ".encode())
        os.close(write_end)
        begun = os.read(read_end, 1000).decode()
        print(pid, flush=True)
        os.waitpid(pid, 0)
        with os.fdopen(read_end) as pipe:
            print(begun + pipe.read(), flush=True)


@posix_only
def test_write_that_fails(tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: the error has the reason and the size, the old file stays."""
    path = tmp_path / "last.pt"
    save_checkpoint(small_state(0, 100_000), path)
    before = path.read_bytes()
    code = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from tests.checkpoints.test_files import small_state
        from utils.torch_utils import save_checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            save_checkpoint(small_state(1, 100_000), Path(sys.argv[1]))
        except OSError as error:
            print(error)
    """)
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=PROJECT, capture_output=True, text=True, timeout=300, check=True
    )
    assert "File too large: the checkpoint needs 1 MB" in result.stdout
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pt"]


@posix_only
def test_full_disk(tmp_path: Path) -> None:
    """ultralytics/ultralytics#5793 on a real full file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a small file system")
    try:
        path = disk / "last.pt"
        save_checkpoint(small_state(0, 100_000), path)
        before = path.read_bytes()
        with pytest.raises(OSError, match=r"No space left on device: the checkpoint needs 1 MB, 0 MB are free"):
            save_checkpoint(small_state(1, 100_000), path)
        assert path.read_bytes() == before
        assert os.listdir(disk) == ["last.pt"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# the writer -----------------------------------------------------------------------------------------------------------


class Held(str):
    """A text that is not written before it may be: a slow disk."""

    def __new__(cls, may: threading.Event) -> "Held":
        made = super().__new__(cls, "held")
        made.may = may
        return made

    may: threading.Event

    def __str__(self) -> str:
        assert self.may.wait(120)
        return "held"


def goal(folder: Path, epoch: int = 0, better: bool = False) -> Outcome:
    return Outcome(folder / "last.pt", (folder / "best.pt",) if better else (), epoch, 0.5, better)


def test_training_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    """But for the write before, so that there is never more than one on the way."""
    may = [threading.Event(), threading.Event()]
    with contextlib.closing(CheckpointWriter()) as writer:
        writer.write({"epoch": 0, "text": Held(may[0])}, goal(tmp_path), tmp_path / "best.pt")
        assert writer.outcomes() == []
        assert not (tmp_path / "last.pt").exists()
        second = threading.Thread(
            target=writer.write, args=({"epoch": 1, "text": Held(may[1])}, goal(tmp_path, 1), tmp_path / "best.pt")
        )
        second.start()
        second.join(0.1)
        assert second.is_alive()
        may[0].set()
        second.join(60)
        assert [outcome.epoch for outcome in writer.outcomes()] == [0]
        assert load_checkpoint(tmp_path / "last.pt") == {"epoch": 0, "text": "held"}
        may[1].set()
    assert load_checkpoint(tmp_path / "last.pt") == {"epoch": 1, "text": "held"}
    assert [outcome.epoch for outcome in writer.outcomes()] == [1]


def test_what_is_saved_is_the_state_of_the_call(tmp_path: Path) -> None:
    """Whatever training does to it while it is written; over saves whose parts come, go and change their shape."""
    shapes: list[Any] = [None, (3, 4), (4, 3), None, (3, 4), (3, 4)]
    with contextlib.closing(CheckpointWriter()) as writer:
        for epoch, shape in enumerate(shapes):
            may = threading.Event()
            state = {"text": Held(may), **small_state(epoch)}
            state["meters"] = (
                None if shape is None else torch.full(shape, epoch, dtype=(torch.float64, torch.int64)[epoch % 2])
            )
            state["model"]["last"] = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
            expected = copy.deepcopy({**state, "text": "held"})
            writer.write(state, goal(tmp_path, epoch), tmp_path / "best.pt")
            with torch.no_grad():
                for tensor in (*state["model"].values(), state["ema"]["module"]["0.weight"]):
                    tensor.fill_(7)
            if state["meters"] is not None:
                state["meters"].zero_()
            state["optimizer"]["state"][0]["step"] += 1
            state["optimizer"]["param_groups"][0]["lr"] = 0.1
            state["config"]["freeze"].append(2)
            state["epoch"] = -1
            may.set()
            writer.wait()
            assert_same(load_checkpoint(tmp_path / "last.pt"), expected)


def test_an_error_in_the_thread_is_raised_at_the_next_look(tmp_path: Path) -> None:
    save_checkpoint(small_state(0), tmp_path / "last.pt")
    writer = CheckpointWriter()

    def fail() -> None:
        writer.write({"epoch": 1, "config": {"data": Path("x")}}, goal(tmp_path), tmp_path / "best.pt")

    def look() -> None:
        while not writer.outcomes():
            time.sleep(0.001)

    for notice in (writer.wait, look, lambda: writer.write(small_state(2), goal(tmp_path), tmp_path / "best.pt")):
        fail()
        with pytest.raises(TypeError, match=r"state\['config'\]\['data'\] is of type \w*Path"):
            notice()
        writer.wait()  # it is raised once
        assert writer.failed
    assert load_checkpoint(tmp_path / "last.pt")["epoch"] == 0
    writer.write(small_state(3), goal(tmp_path), tmp_path / "best.pt")
    writer.wait()
    assert not writer.failed
    assert load_checkpoint(tmp_path / "last.pt")["epoch"] == 3
    fail()
    writer.close()  # where a run ends by another error, that one counts
    assert temporaries(tmp_path) == []


def test_copies_of_a_state() -> None:
    """Each is equal to its original, laid out as it is, and in a storage of its own, as files are to have."""
    weight = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).weight
    turned, counter, empty = torch.randn(5, 2).T, torch.tensor(7), torch.zeros(0)
    state: dict[str, Any] = {
        "a": weight,
        "b": [turned, (counter, 1.5)],
        "c": empty,
        "again": weight,
        "half": torch.ones(3).bfloat16(),
    }
    copied = copy_state(state)
    expected = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    assert copied["a"] is copied["again"]
    assert torch.equal(copied["a"], expected)
    assert copied["a"].stride() == weight.stride()
    for one, original in [
        (copied["b"][0], turned),
        (copied["b"][1][0], counter),
        (copied["c"], empty),
        (copied["half"], state["half"]),
    ]:
        assert torch.equal(one, original)
        assert not one.requires_grad
        assert one.untyped_storage().nbytes() == original.nbytes
    assert copied["b"][1][1] == 1.5


@pytest.mark.skipif(sys.platform != "linux", reason="looks at what a process has open")
def test_a_checkpoint_is_closed_before_it_gets_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows lets no name of an open file be replaced: best.pt would never be written there."""
    named: list[Path] = []

    def none_open(_: Path, target: Path) -> None:
        named.append(target)
        assert not [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link).endswith(".tmp")]

    monkeypatch.setattr("utils.checkpoints.files._place", none_open)
    save_checkpoint({"epoch": 1}, tmp_path / "last.pt", [tmp_path / "best.pt"])
    assert named == [tmp_path / "best.pt"]
