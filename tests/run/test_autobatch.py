"""The automatic batch: what is made of a meter's figures, and the step that is measured; B4, B5 of the contract."""

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.yolo import DetectionModel
from tests.runs import flags, make_data
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.core.errors import UserError
from utils.run import autobatch
from utils.run.autobatch import (
    CPU_BATCH,
    LARGEST,
    SIZES,
    Measurement,
    answer,
    automatic_batch,
    largest_batch,
    measure,
    measure_apart,
    training_step,
)

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def said_by(base: int, per_image: int, free: int) -> Measurement:
    """What a device says whose steps take so many bytes; sizes that are more than what is free do not fit."""

    def step(batch: int) -> int:
        used = base + per_image * batch
        if used > free:
            raise torch.OutOfMemoryError
        return used

    return Measurement(measure(step), free)


# --- from figures to a batch -----------------------------------------------------------------------------------------


def test_largest_batch_is_exactly_what_fits() -> None:
    """Of many made-up devices; where a size ran out of memory the answer is below it."""
    numbers = random.Random(0)
    seen = set()
    for _ in range(500):
        limits = ((1, 3000), (1, 900), (4, 20_000))
        base, per_image, free = (numbers.randint(low * MIB, high * MIB) for low, high in limits)
        measured = said_by(base, per_image, free)
        if not measured.used:
            continue
        batch = largest_batch(measured)
        failed = min((size for size in SIZES if size not in measured.used), default=LARGEST + 1)
        used, allowed = base + per_image * batch, 0.85 * free
        assert 1 <= batch < failed
        if len(measured.used) > 1:
            assert used <= allowed or batch == 1
            assert used + per_image > allowed or batch == failed - 1
        seen.add((failed > LARGEST, batch == failed - 1, batch == 1))
    assert len(seen) >= 6, "all kinds of devices were among them"


def test_constant_costs_do_not_count_as_images() -> None:
    """Small batches are mostly workspace: a line through all sizes would promise too much here."""
    used = {1: 1000, 2: 1001, 4: 1010, 8: 1090, 16: 1730}
    per_image = (1730 - 1010) // (16 - 4)
    assert largest_batch(Measurement(used, 10_000), share=0.5) == 16 + (5000 - 1730) // per_image


def test_one_size_only() -> None:
    assert largest_batch(said_by(10, 60, 100)) == 1
    with pytest.raises(UserError, match="not even one image fits into the device's memory; use a smaller --imgsz"):
        largest_batch(said_by(10, 60, 50))


def test_measure_stops_where_memory_ends() -> None:
    """Other failures are not taken for a lack of memory."""
    asked: list[int] = []

    def step(batch: int) -> int:
        asked.append(batch)
        if batch == 4:
            raise torch.OutOfMemoryError
        return 10 * batch

    assert measure(step) == {1: 10, 2: 20}
    assert asked == [1, 2, 4]
    with pytest.raises(ZeroDivisionError):
        measure(lambda batch: batch // 0)


@pytest.mark.parametrize(
    ("line", "ranks", "expected"),
    [
        ("", 1, 37),  # what fits on one
        ("", 4, 148),  # measured on one, times the ranks
        ("--nbs 64", 4, 64),  # typed, though it is the default
        ("--nbs 30", 4, 28),  # rounded down to a multiple of the ranks
        ("--nbs 30", 1, 30),
        ("--nbs 3", 4, 4),  # one image each at least
        ("--nbs 1000", 4, 148),  # a cap is no target
    ],
)
def test_ranks_and_cap(line: str, ranks: int, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    """B4, B5, and what the user reads of it."""
    asked: list[Any] = []

    def measured(config: TrainConfig, device: torch.device) -> Measurement:
        asked.append((config, device))
        return said_by(100 * MIB, 20 * MIB, 990 * MIB)  # 37 of 20 MiB and 100 are 840 of 841

    config, given = settings(f"--batch -1 {line}")
    assert automatic_batch(config, given, CUDA, ranks, measured) == expected
    assert asked == [(config, CUDA)]
    assert re.fullmatch(
        r"batch       --batch-size -1: 37 images fit into 85% of the 1\.0 GiB free on cuda:0; "
        rf"{expected} images over {ranks} ranks?\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(("line", "ranks", "expected"), [("", 1, 16), ("", 3, 15), ("--nbs 8", 3, 6), ("", 32, 32)])
def test_on_a_cpu(line: str, ranks: int, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    """B4: nothing is measured, and it is said; the data set's own nbs (16 of the built-in one) caps it as well."""
    assert CPU_BATCH == 16
    config, given = settings(f"--batch -1 {line}")
    assert automatic_batch(config, given, CPU, ranks) == expected
    assert capsys.readouterr().out == (
        f"batch       --batch-size -1 on cpu is not measured: {expected} images over all ranks\n"
    )


def test_nbs_of_a_data_set(tmp_path: Path) -> None:
    """B5: what the data set suggests is as good as typed."""
    data = make_data(tmp_path / "data", count=1, val=1)
    data.write_text(data.read_text() + "defaults: {nbs: 10}\n")
    config, given = settings(f"--batch -1 --data {data}")
    assert automatic_batch(config, given, CPU, 4) == 8


def settings(line: str) -> tuple[TrainConfig, dict[str, Any]]:
    """Flags as train.py reads them, and those that were typed; no data set is there unless one is named."""
    given = given_flags(TrainConfig, ["--data", "none.yaml", *line.split()])
    return build_train_config(given), given


# --- the step that is measured ---------------------------------------------------------------------------------------


class FakeMeter:
    """Counts what it is asked, and says that a step of all images so far took 100 bytes each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.images = 0

    def free(self) -> int:
        self.calls.append("free")
        return 5000

    def reset(self) -> None:
        self.calls.append("reset")
        self.images = 0

    def peak(self) -> int:
        self.calls.append("peak")
        return 100 * self.images


class Watched:
    """The networks that are trained meanwhile: shapes of their batches, and what they looked like at first."""

    def __init__(self, meter: FakeMeter, fits: int) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.before: dict[str, torch.Tensor] = {}
        self.model: DetectionModel | None = None
        self.meter, self.fits = meter, fits

    def look(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not (isinstance(module, DetectionModel) and module.training and isinstance(inputs[0], torch.Tensor)):
            return
        if self.model is None:
            self.model, self.before = module, {key: value.clone() for key, value in module.state_dict().items()}
        if not self.shapes or self.shapes[-1] != tuple(inputs[0].shape):
            self.shapes.append(tuple(inputs[0].shape))
        self.meter.images = len(inputs[0])
        if len(inputs[0]) > self.fits:
            raise torch.OutOfMemoryError("made up")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    line = flags(make_data(tmp_path / "data", count=1, val=1), tmp_path / "runs", "--batch -1")
    return build_train_config(given_flags(TrainConfig, line))


@pytest.mark.parametrize("fits", [3, 100])
def test_a_real_step(config: TrainConfig, fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains: weights, BatchNorm and gradients; it runs in a rank's environment without its process group."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    meter = FakeMeter()
    watched = Watched(meter, fits)
    handle = nn.modules.module.register_module_forward_pre_hook(watched.look)
    try:
        said = answer(config, CPU, meter)
    finally:
        handle.remove()
    sizes = [size for size in SIZES if size <= fits]
    assert said == {"used": {size: 100 * size for size in sizes}, "free": 5000}
    tried = SIZES[: len(sizes) + 1]
    assert [shape for shape in watched.shapes if shape[0] in SIZES] == [(size, 3, 64, 64) for size in tried]
    assert meter.calls == ["free", *["reset", "peak"] * len(sizes), *["reset"] * (len(tried) - len(sizes))]
    assert watched.model is not None
    after = watched.model.state_dict()
    same = [key for key, value in watched.before.items() if torch.equal(value, after[key])]
    assert [key for key in same if not key.endswith("anchors")] == [], "every weight and statistic has moved"
    assert all(parameter.grad is None for parameter in watched.model.parameters())


def test_mistakes_are_said_as_such(tmp_path: Path) -> None:
    """All of them, as a run says them; not as a failure of the measuring."""
    line = flags(tmp_path / "none.yaml", tmp_path, "--batch -1 --hyp none.yaml --weights none.pt")
    said = answer(build_train_config(given_flags(TrainConfig, line)), CPU, FakeMeter())
    assert said.keys() == {"mistake", "mistakes"}
    assert [text.split(" ")[0] for text in said["mistakes"]] == ["--hyp", "--data", "--weights"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would be measured")
@pytest.mark.slow
def test_measuring_that_fails(config: TrainConfig) -> None:
    """In a process of its own; where there is no GPU that says so."""
    with pytest.raises(
        UserError, match=r"--batch-size -1: measuring on cuda:0 failed; give a number \(\w+Error: .+\)$"
    ):
        measure_apart(config, CUDA)


ANSWERS = {
    "figures": """import sys; sys.stdin.read(); print("a warning"); print('{"used": {"1": 5, "16": 80}, "free": 7}')""",
    "mistake": """print('{"mistake": "2 problems", "mistakes": ["--cfg x", "--hyp y"]}')""",
    "killed": "import os; os.kill(os.getpid(), 9)",
}


def test_what_the_other_process_says(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its last line counts; a process that was killed, for want of memory for one, is no mystery."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$ANSWER"\n')
    python.chmod(0o755)
    monkeypatch.setattr(autobatch.sys, "executable", str(python))
    monkeypatch.setenv("ANSWER", ANSWERS["figures"])
    assert measure_apart(config, CUDA) == Measurement({1: 5, 16: 80}, 7)
    monkeypatch.setenv("ANSWER", ANSWERS["mistake"])
    with pytest.raises(UserError, match=r"^2 problems$") as error:
        measure_apart(config, CUDA)
    assert error.value.messages == ["--cfg x", "--hyp y"]
    monkeypatch.setenv("ANSWER", ANSWERS["killed"])
    with pytest.raises(
        UserError, match=r"measuring on cuda:0 failed; give a number \(the process ended with status -9\)"
    ):
        measure_apart(config, CUDA)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(config: TrainConfig) -> None:
    """More images take more memory, and nothing of it stays on the device."""
    torch.zeros(1, device=CUDA)
    before = torch.cuda.mem_get_info(CUDA)[0]
    measured = measure_apart(config, CUDA)
    assert sorted(measured.used) == list(SIZES)
    assert 0 < measured.used[1] < measured.used[SIZES[-1]] < measured.free
    assert abs(torch.cuda.mem_get_info(CUDA)[0] - before) < 64 * MIB
    assert 1 <= largest_batch(measured) <= LARGEST


def test_step_needs_a_network(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--cfg nothing\.yaml"):
        training_step(build_train_config({"cfg": "nothing.yaml"}), CPU, FakeMeter())
