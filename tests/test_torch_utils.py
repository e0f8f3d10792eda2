"""Devices, batch plan, seeds, precision, guarded steps and EMA."""

import copy
import math
import mmap
import os
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from utils.config.recipe import Hyp
from utils.core.devices import memory_usage, parse_device, time_on, to_device, upload
from utils.core.errors import UserError
from utils.core.seeds import rng_state, seed_everything, set_rng_state
from utils.dist.collectives import (
    all_gather_objects,
    all_gather_rows,
    all_reduce_sum,
    barrier,
    broadcast_object,
    gather_objects,
    gather_on_machine,
    once,
    once_per_machine,
    start_all_reduce_sum,
)
from utils.dist.place import LAUNCHER_VARIABLES, DistEnv, assign_device, dist_env, rank_device
from utils.torch_utils import (
    BatchPlan,
    ModelEMA,
    foreach_lerp,
    load_checkpoint,
    process_group,
    save_checkpoint,
    split_global_batch,
)
from utils.training import steps
from utils.training.optim import build_optimizer
from utils.training.steps import BufferSnapshot, Precision, choose_precision, guarded_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SLURM = (
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"),
)


def names(devices: list[torch.device]) -> list[str]:
    return [str(device) for device in devices]


# devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("", ["cuda:0"]),
        ("auto", ["cuda:0"]),
        ("cpu", ["cpu"]),
        (" CPU ", ["cpu"]),
        ("mps", ["mps"]),
        (0, ["cuda:0"]),
        ("3", ["cuda:3"]),
        ("cuda:0", ["cuda:0"]),
        ("10", ["cuda:10"]),  # ultralytics/ultralytics#8481: ids of two digits were refused
        ("0,11", ["cuda:0", "cuda:11"]),
        ("1, 0", ["cuda:1", "cuda:0"]),
        ([0, 1], ["cuda:0", "cuda:1"]),
        (["cuda:2", "cuda:1"], ["cuda:2", "cuda:1"]),
        ("cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("all", [f"cuda:{i}" for i in range(12)]),
    ],
)
def test_device_flags(flag: str | int | list[str | int], expected: list[str]) -> None:
    """L6: every way to name devices."""
    assert names(parse_device(flag, cuda_count=12, has_mps=True)) == expected


@pytest.mark.parametrize(
    ("cuda_count", "has_mps", "expected"), [(2, True, "cuda:0"), (0, True, "mps"), (0, False, "cpu")]
)
@pytest.mark.parametrize("flag", ["", "auto"])
def test_automatic_device(flag: str, cuda_count: int, has_mps: int, expected: str) -> None:
    """L6: the best one there is, never more than one."""
    assert names(parse_device(flag, cuda_count, bool(has_mps))) == [expected]


@pytest.mark.parametrize(
    "flag",
    [
        *("gpu", "cuda", "cuda:", "cuda:x", "None", "0;1", "01", "1.0", [], ["0", ""], "0,", ","),  # nonsense
        *("-1", -1, "2", "10", "mps"),  # not there
        *("0,0", "0,cuda:0", "0,cpu", "cpu,mps", "auto,0", "all,0"),  # twice, or mixed
    ],
)
def test_wrong_device_flags(flag: str | int | list[str | int]) -> None:
    """L6: one error each, and it names what exists."""
    with pytest.raises(UserError, match=r"--device .*; here are: cuda:0, cuda:1, cpu$") as info:
        parse_device(flag, cuda_count=2, has_mps=False)
    assert ("(a GPU is named by its number, as 0 or cuda:0)" in str(info.value)) == (flag in ("cuda", "gpu"))


def test_all_without_a_gpu() -> None:
    with pytest.raises(UserError, match=r"here are: cpu$"):
        parse_device("all", cuda_count=0, has_mps=False)


def test_devices_are_chosen_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the environment, nor by making one current, which stays so in the program that called (L5)."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"{device} is current"))
    assert rank_device("1", DistEnv()) == torch.device("cuda", 1)
    assert rank_device("cpu", DistEnv()) == CPU
    with pytest.raises(UserError, match=r"--device cpu,cpu names 2 devices, .* --nproc_per_node 2"):
        rank_device("cpu,cpu", DistEnv())
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


@pytest.mark.parametrize(
    ("flag", "local_rank", "ranks", "cuda_count", "expected"),
    [
        ("0,1", 1, 2, 4, "cuda:1"),
        ("2,3", 0, 2, 4, "cuda:2"),
        ("2,3", 1, 2, 4, "cuda:3"),
        ([3, 1], 1, 2, 4, "cuda:1"),
        ("", 1, 2, 4, "cuda:1"),
        ("auto", 3, 4, 4, "cuda:3"),
        ("all", 1, 2, 2, "cuda:1"),
        ("1", 0, 1, 2, "cuda:1"),
        ("", 0, 1, 2, "cuda:0"),
        ("cpu", 1, 2, 4, "cpu"),
        ("cpu", 0, 1, 4, "cpu"),
        ("cpu,cpu", 1, 2, 0, "cpu"),
        ("", 1, 2, 0, "cpu"),
    ],
)
def test_device_of_a_rank(flag: str | list[int], local_rank: int, ranks: int, cuda_count: int, expected: str) -> None:
    """L2 and L7: a launcher's ranks take what the list says, or each its own GPU."""
    env = DistEnv(local_rank, local_rank, ranks, ranks, launched=True)
    assert str(assign_device(flag, env, cuda_count, has_mps=True)) == expected


@pytest.mark.parametrize(
    ("flag", "ranks", "cuda_count", "numbers"),
    [
        ("0,1,2", 2, 4, (3, 2)),
        ("0,1", 1, 4, (2, 1)),
        ("0", 2, 4, (1, 2)),  # one GPU for several ranks
        ("mps", 2, 0, (1, 2)),
        ("cpu,cpu,cpu", 2, 0, (3, 2)),
        ("all", 2, 4, (4, 2)),
        ("", 4, 2, (2, 4)),
    ],
)
def test_devices_that_do_not_fit_the_ranks(flag: str, ranks: int, cuda_count: int, numbers: tuple[int, int]) -> None:
    """L7: an error that says both numbers."""
    env = DistEnv(0, 0, ranks, ranks, launched=True)
    with pytest.raises(UserError, match=rf" {numbers[0]} devices?, but the launcher started {numbers[1]} process"):
        assign_device(flag, env, cuda_count, has_mps=True)


@pytest.mark.parametrize(
    ("flag", "ranks", "cuda_count", "expected"),
    [
        *(("", 4, 1, "cuda:0"), ("auto", 4, 1, "cuda:0"), ("all", 4, 1, "cuda:0"), ("0", 4, 1, "cuda:0")),
        *(("", 4, 4, "cuda:2"), ("cpu", 4, 1, "cpu"), ("", 4, 0, "cpu"), ("0,1,2,3", 4, 4, "cuda:2")),
    ],
)
def test_tasks_that_see_one_gpu_each(flag: str, ranks: int, cuda_count: int, expected: str) -> None:
    """``srun --gpus-per-task=1`` shows each task its own GPU, as number 0; so may ranks that are started by hand."""
    env = DistEnv(2, 2, ranks, ranks, launched=True, own_devices=True)
    assert str(assign_device(flag, env, cuda_count, has_mps=False)) == expected


@pytest.mark.parametrize(("flag", "cuda_count"), [("cpu,cpu,cpu", 1), ("0", 4), ("0,1", 4), ("", 2)])
def test_tasks_of_srun_may_be_wrong_too(flag: str, cuda_count: int) -> None:
    env = DistEnv(2, 2, 4, 4, launched=True, own_devices=True)
    with pytest.raises(UserError, match="but the launcher started 4 processes"):
        assign_device(flag, env, cuda_count, has_mps=False)


class Recorded(Tensor):
    """Says how it was asked to go to a device, and stays."""

    asked: ClassVar[list[tuple[str, bool]]] = []

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Recorded":  # type: ignore[override]
        self.asked.append((device.type, non_blocking))
        return self

    def pin_memory(self, device: object = None) -> "Recorded":
        return self


def test_copies_to_mps_are_waited_for() -> None:
    """pytorch/pytorch#189690: PyTorch before 2.13 may read a source that is gone. CUDA copies from pinned memory."""
    tensor, counts = (torch.ones(3, 1).as_subclass(Recorded) for _ in range(2))
    Recorded.asked.clear()
    for device in (torch.device("mps"), CPU, CUDA):
        to_device(tensor, device)
    for device in (torch.device("mps"), CPU):
        upload(counts, device)
    assert Recorded.asked == [("mps", False), ("cpu", False), ("cuda", True), ("mps", False), ("cpu", False)]


def test_time_is_taken_when_a_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS runs behind the host as CUDA does."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append(device.type))
    assert time_on(CPU) < time_on(CUDA) < time_on(torch.device("mps")) < time.perf_counter()
    assert waited == ["cuda", "mps"]


def test_memory_usage() -> None:
    """A hundred megabytes more are seen as such."""
    if not Path("/proc/self/statm").exists():
        assert memory_usage(CPU) == 0.0
        return
    before = memory_usage(CPU)
    # Pages of its own: a tensor might be put where earlier tests left freed memory that the process still has.
    with mmap.mmap(-1, 100_000_000) as block:
        block.write(b"1" * len(block))
        assert memory_usage(CPU) - before == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    "device",
    [CPU, pytest.param(CUDA, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_images_arrive_whole(device: torch.device) -> None:
    """Also while the device is busy, and into memory that a batch before them has left."""
    batches = [torch.full((4, 3, 320, 320), value, dtype=torch.uint8) for value in range(20)]
    batches = [batch.pin_memory() for batch in batches] if device.type == "cuda" else batches
    busy, sums = torch.rand(1000, 1000, device=device), []
    for batch in batches:
        images = upload(batch, device)
        for _ in range(1 if device.type == "cpu" else 200):  # so that copies overtake what is computed
            busy = (busy @ busy).clamp(0, 1)
        sums.append(images.sum() + 0 * busy.sum().long())
    assert torch.stack(sums).tolist() == [value * 4 * 3 * 320 * 320 for value in range(20)]


# ranks ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*LAUNCHER_VARIABLES, "GROUP_RANK", "TORCHELASTIC_RUN_ID", *SLURM):
        monkeypatch.setenv(name, "")  # so that what dist_env sets is taken back as well
        monkeypatch.delenv(name)
    return monkeypatch


def set_all(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], values: str) -> None:
    for name, value in zip(names, values.split(), strict=True):
        monkeypatch.setenv(name, value)


def test_world_of_one(no_launcher: pytest.MonkeyPatch) -> None:
    assert dist_env() == DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, device=CPU)
    with process_group("cpu") as env:
        assert env.is_main_process
        assert env.device == CPU
        tensor = torch.ones(3)
        assert all_reduce_sum(tensor, env) is tensor
        assert start_all_reduce_sum(tensor, env)() is tensor
        assert all_gather_rows(tensor, env).tolist() == [[1, 1, 1]]
        assert broadcast_object("x", env) == "x"
        assert all_gather_objects({"a": 1}, env) == [{"a": 1}]
        assert gather_objects(1, env) == gather_on_machine(1, env) == [1]
        assert once(lambda: 5, env) == once_per_machine(lambda: 5, env) == 5
        barrier(env)


def test_launcher_environment(no_launcher: pytest.MonkeyPatch) -> None:
    set_all(no_launcher, LAUNCHER_VARIABLES, "3 1 4 2 host 29500")
    env = dist_env()
    expected = DistEnv(rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1, launched=True)
    assert env == replace(expected, own_devices=True)
    assert not env.is_main_process
    no_launcher.setenv("TORCHELASTIC_RUN_ID", "1")
    assert dist_env() == expected
    no_launcher.setenv("GROUP_RANK", "7")
    assert dist_env().node_rank == 7
    no_launcher.setenv("RANK", "4")
    with pytest.raises(UserError, match=r"RANK=4 .*WORLD_SIZE=4"):
        dist_env()
    no_launcher.setenv("RANK", "x")
    with pytest.raises(UserError, match="RANK=x"):
        dist_env()


def test_half_of_an_environment(no_launcher: pytest.MonkeyPatch) -> None:
    """What is missing is named; a master's address alone is no launcher."""
    no_launcher.setenv("MASTER_ADDR", "host")
    assert not dist_env().launched
    no_launcher.setenv("RANK", "0")
    no_launcher.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"RANK=0 WORLD_SIZE=2 .*but LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT not"):
        dist_env()


def test_place_in_a_slurm_step(no_launcher: pytest.MonkeyPatch) -> None:
    """Names and formats as SLURM documents them for srun (OUTPUT ENVIRONMENT VARIABLES)."""
    set_all(no_launcher, SLURM, "0 5 5 3 1 1 2(x2),1 gpu[07-09] 123456")
    env = dist_env()
    expected = DistEnv(rank=3, local_rank=1, world_size=5, local_world_size=2, node_rank=1, launched=True)
    assert env == replace(expected, own_devices=True)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu07", "23456")
    assert os.environ["RANK"] == "3"


def test_slurm_does_not_override_what_is_set(no_launcher: pytest.MonkeyPatch) -> None:
    set_all(no_launcher, SLURM, "0 2 2 1 0 1 1(x2) a,b 1")
    no_launcher.setenv("MASTER_ADDR", "10.0.0.1")
    no_launcher.setenv("MASTER_PORT", "1234")
    assert dist_env().world_size == 2
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "1234")


def test_torchrun_inside_slurm(no_launcher: pytest.MonkeyPatch) -> None:
    set_all(no_launcher, SLURM, "0 2 2 1 0 1 1(x2) a,b 1")
    set_all(no_launcher, LAUNCHER_VARIABLES, "0 0 8 4 host 29500")
    assert (dist_env().world_size, dist_env().local_world_size) == (8, 4)


def test_a_launcher_in_each_of_several_tasks(no_launcher: pytest.MonkeyPatch) -> None:
    """ultralytics/yolov5#12429: two on a machine wanted one port, and with a port each would train alone."""
    set_all(no_launcher, SLURM, "0 4 4 1 1 0 2(x2) a,b 1")
    set_all(no_launcher, LAUNCHER_VARIABLES, "0 0 2 2 host 29500")
    no_launcher.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match=r"this SLURM step has 2 tasks on this machine, .*--ntasks-per-node=1"):
        dist_env()
    no_launcher.setenv("SLURM_PTY_PORT", "40000")  # typed in a shell, which is one of the tasks
    assert dist_env().world_size == 2
    no_launcher.delenv("SLURM_PTY_PORT")
    set_all(no_launcher, SLURM, "0 2 2 1 0 1 1(x2) a,b 1")  # one on each machine
    assert dist_env().world_size == 2


def test_a_batch_script_is_one_process(no_launcher: pytest.MonkeyPatch) -> None:
    """Outside a step SLURM's variables describe the job, not this process; a step of one task is one process."""
    set_all(no_launcher, SLURM, "0 4 4 0 0 0 4 a 1")
    no_launcher.delenv("SLURM_STEP_ID")
    assert not dist_env().launched
    set_all(no_launcher, SLURM, "0 1 4 0 0 0 1 a 1")
    assert not dist_env().launched


def test_half_of_a_slurm_step(no_launcher: pytest.MonkeyPatch) -> None:
    set_all(no_launcher, SLURM, "0 2 2 1 0 1 1(x2) a,b 1")
    no_launcher.delenv("SLURM_LOCALID")
    no_launcher.delenv("SLURM_JOB_ID")
    with pytest.raises(UserError, match=r"SLURM step of 2 tasks, but SLURM_LOCALID, SLURM_JOB_ID is not set"):
        dist_env()
    set_all(no_launcher, SLURM, "0 2 2 1 0 1 1(y2) a,b 1")
    with pytest.raises(UserError, match=r"tasks per node: '1\(y2\)'"):
        dist_env()


@pytest.mark.parametrize(
    ("batch", "world_size", "local", "accumulate"),
    [(16, 1, 16, 4), (64, 2, 32, 1), (128, 8, 16, 1), (24, 3, 8, 3), (1, 1, 1, 64), (40, 1, 40, 2), (48, 1, 48, 1)],
)
def test_batch_plan(batch: int, world_size: int, local: int, accumulate: int) -> None:
    assert split_global_batch(batch, world_size, 64) == BatchPlan(batch, local, world_size, 64, accumulate)


@pytest.mark.parametrize(
    ("batch", "world_size", "valid"), [(6, 4, "4 or 8"), (3, 4, "4"), (9, 2, "8 or 10"), (0, 1, "1"), (-1, 3, "3")]
)
def test_batch_that_does_not_divide(batch: int, world_size: int, valid: str) -> None:
    with pytest.raises(UserError, match=rf"--batch-size {batch} .* {world_size}; use {valid}$"):
        split_global_batch(batch, world_size, 64)


# seeds ----------------------------------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.rand(3).tolist()]


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """Through a checkpoint, with both kinds of cached gaussians pending."""
    seed_everything(3, deterministic=True)
    random.gauss(0, 1)
    np.random.randn()
    save_checkpoint({"rng": rng_state(torch.device("cpu"))}, tmp_path / "last.pt")
    expected = draws()
    seed_everything(4, deterministic=True)
    assert draws() != expected
    set_rng_state(load_checkpoint(tmp_path / "last.pt")["rng"])
    assert draws() == expected
    seed_everything(4, deterministic=True)
    first = draws()
    seed_everything(4, deterministic=True)
    assert draws() == first


def test_deterministic_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seed_everything(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # a user's choice stays
    seed_everything(0, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


# precision ------------------------------------------------------------------------------------------------------------


def test_precision_of_this_cpu() -> None:
    flags = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    assert choose_precision("auto", CPU) == Precision("bf16" if has_bf16 else "off")
    assert choose_precision("off", CPU) == Precision("off")
    with pytest.raises(UserError, match=r"--amp fp16 does not work on this cpu device; use --amp auto or .*off"):
        choose_precision("fp16", CPU)


def test_precision_of_a_cpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "cpu_has_bf16", lambda: False)
    assert choose_precision("auto", CPU) == Precision("off")
    with pytest.raises(UserError, match="use --amp auto or off"):
        choose_precision("bf16", CPU)


@pytest.mark.parametrize(("major", "automatic", "usable"), [(9, "bf16", "bf16 fp16 off"), (7, "fp16", "fp16 off")])
def test_precision_of_gpus(monkeypatch: pytest.MonkeyPatch, major: int, automatic: str, usable: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    gpu = torch.device("cuda", 0)
    assert choose_precision("auto", gpu).name == automatic
    for name in usable.split():
        assert choose_precision(name, gpu).name == name
    if "bf16" not in usable:
        with pytest.raises(UserError, match=r"--amp bf16 .*use --amp auto or fp16 or off"):
            choose_precision("bf16", gpu)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("off", torch.float32)])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    precision = Precision(name)
    with precision.autocast("cpu"):
        assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype
    assert not precision.make_scaler(CPU).is_enabled()
    assert Precision("fp16").make_scaler(CPU).is_enabled()


# guarded steps --------------------------------------------------------------------------------------------------------


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.03), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return net.to(memory_format=torch.channels_last)


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer, ema: ModelEMA) -> dict[str, Tensor]:
    values = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    values |= {f"ema.{name}": tensor for name, tensor in ema.module.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        values |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
    return {name: tensor.clone() for name, tensor in values.items()}


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


class Loop:
    """The part of a training loop that a skipped window goes through."""

    def __init__(self, optimizer: str, scaled: bool) -> None:
        self.net = small_net()
        self.optimizer = build_optimizer(self.net, optimizer, Hyp(), split_global_batch(64, 1, 64))
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        self.ema = ModelEMA(self.net)
        self.buffers = BufferSnapshot(self.net)

    def window(self, seed: int, poison: float | None = None) -> Tensor:
        """Two micro-batches and a step; the poison is one pixel of the first."""
        self.buffers.take()
        generator = torch.Generator().manual_seed(seed)
        for micro in range(2):
            images = torch.randn(4, 3, 6, 6, generator=generator)
            if poison is not None and micro == 0:
                images[1, 2, 3, 4] = poison
            loss = self.net(images).square().sum()
            self.scaler.scale(loss).backward()
        found_inf = guarded_step(self.optimizer, list(self.net.parameters()), 10.0, self.scaler)
        self.buffers.restore(found_inf)
        self.ema.update(self.net, found_inf)
        self.optimizer.zero_grad(set_to_none=True)
        return found_inf

    def values(self) -> dict[str, Tensor]:
        return snapshot(self.net, self.optimizer, self.ema)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_skipped_window_leaves_no_trace(name: str, poison: float, scaled: bool) -> None:
    """ultralytics/ultralytics#24615: one NaN spoiled EMA and BatchNorm for good."""
    loop = Loop(name, scaled)
    assert loop.window(0).item() == 0
    before = loop.values()
    assert loop.window(1, poison).item() == 1
    after = loop.values()
    assert before.keys() == after.keys()
    for key in before:
        assert bits(before[key]) == bits(after[key]), key
    assert int(loop.ema.skipped) == 1
    assert loop.scaler.get_scale() == (512.0 if scaled else 1.0)

    other = Loop(name, scaled)  # which never saw the bad window
    other.window(0)
    assert loop.window(2).item() == other.window(2).item() == 0
    changed = False
    for key, value in loop.values().items():
        assert bool(torch.isfinite(value).all()), key
        if not key.startswith("ema"):  # its decay counts the skipped window
            assert torch.allclose(value, other.values()[key], rtol=1e-5, atol=1e-7), key  # another loss scale
            changed |= not torch.equal(value, before[key])
    assert changed


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Make torch fill every uninitialized tensor with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_first_window_skipped(name: str, nan_in_new_memory: None) -> None:
    """Torch's fused SGD makes its momentum uninitialized at the first step and would use it after a skipped one."""
    loop, other = Loop(name, scaled=False), Loop(name, scaled=False)
    assert loop.window(0, float("nan")).item() == 1
    loop.window(1)
    other.window(1)
    for key, value in other.values().items():
        if not key.startswith("ema"):
            assert torch.equal(loop.values()[key], value), key


def test_optimizer_without_gate() -> None:
    """An optimizer that knows no found_inf is asked to step only if all is finite."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=False)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = copy.deepcopy(net.state_dict())
    for value, expected in ((float("nan"), 1.0), (0.5, 0.0)):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, value)
        assert guarded_step(optimizer, net.parameters(), 10.0, scaler).item() == expected
        same = all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))
        assert same == bool(expected)


@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.float32), (True, torch.float64), (False, torch.float32)])
def test_clip(fused: bool, dtype: torch.dtype) -> None:
    """Gradients of 3 and 4 have the norm 5; clipped to 1 they keep their direction."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    epsilon = {torch.float32: 1e-6, torch.float64: 1e-15}[dtype]

    def step(a: float, b: float, max_norm: float) -> tuple[list[float], float]:
        """Return how far a step of plain gradient descent at the rate 1 goes, and found_inf."""
        weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(3)]
        weights[0].grad, weights[1].grad = torch.tensor([a], dtype=dtype), torch.tensor([b], dtype=dtype)
        optimizer = torch.optim.SGD(weights, lr=1.0, fused=fused)
        found_inf = guarded_step(optimizer, iter(weights), max_norm, scaler)
        assert found_inf.dtype == torch.float32
        return [-weight.item() for weight in weights], found_inf.item()

    scale = 1 / (5 + 1e-6)
    assert step(3.0, 4.0, 1.0) == (pytest.approx([3 * scale, 4 * scale, 0.0], rel=epsilon), 0.0)
    assert step(3.0, 4.0, 10.0) == ([3.0, 4.0, 0.0], 0.0)
    largest = torch.finfo(dtype).max  # finite, its square is not
    assert step(largest, 4.0, 1.0) == ([0.0, 0.0, 0.0], 1.0)


# EMA ------------------------------------------------------------------------------------------------------------------


def test_ema_against_a_float64_loop() -> None:
    """E <- d e + (1 - d) m with d(t) = 0.9999 (1 - exp(-t / 2000)), over every floating entry, buffers included."""
    net = small_net()
    ema = ModelEMA(net)
    expected = {name: tensor.double() for name, tensor in net.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 31):
        with torch.no_grad():
            for tensor in net.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        net(torch.randn(2, 3, 5, 5, generator=generator))  # moves BatchNorm's statistics and counter
        ema.update(net, torch.zeros(()) if t % 2 else None)
        d = 0.9999 * (1 - math.exp(-t / 2000))
        for name, tensor in net.state_dict().items():
            expected[name] = d * expected[name] + (1 - d) * tensor.double()
    assert ema.updates == 30
    found = ema.module.state_dict()
    assert found["1.num_batches_tracked"].item() == 30
    for name in expected:
        if found[name].is_floating_point():
            assert torch.allclose(found[name].double(), expected[name], rtol=1e-6, atol=1e-6), name


def test_ema_at_full_decay() -> None:
    """After many updates a step moves the average by the 10,000th part: no less in float32."""
    net = nn.Linear(4, 4)
    ema = ModelEMA(net)
    ema.updates = 1_000_000
    before = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.add_(1.0)
    ema.update(net)
    assert torch.allclose(ema.module.state_dict()["weight"] - before, torch.full((4, 4), 1e-4), rtol=2e-3)


@pytest.mark.parametrize("weight", [0.0, 1e-4, 0.3, 1.0])
def test_lerp_by_a_number_or_a_tensor(weight: float) -> None:
    """The weight of a step may be known to the host or not; both mean the same."""
    starts, ends = [torch.randn(3, 2), torch.randn(4)], [torch.randn(3, 2), torch.randn(4)]
    by_number, by_tensor = copy.deepcopy(starts), copy.deepcopy(starts)
    foreach_lerp(by_number, ends, weight)
    foreach_lerp(by_tensor, ends, torch.tensor(weight))
    for start, end, one, other in zip(starts, ends, by_number, by_tensor, strict=True):
        assert torch.allclose(one, start + weight * (end - start), rtol=1e-6, atol=1e-7)
        assert torch.allclose(other, one, rtol=1e-6, atol=1e-7)
        if weight == 0:
            assert torch.equal(other, start)


def test_ema_copy_is_for_evaluation() -> None:
    net = small_net().train()
    ema = ModelEMA(net)
    assert not ema.module.training
    assert net.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert ema.module.state_dict()["0.weight"].stride() == net.state_dict()["0.weight"].stride()


def test_ema_of_tied_weights() -> None:
    """A tensor with two names moves once per update."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    net = nn.Sequential(first, second)
    ema = ModelEMA(net, decay=0.5, tau=1e-9)
    before = first.weight.detach().clone()
    with torch.no_grad():
        first.weight.add_(1.0)
    ema.update(net)
    assert torch.allclose(ema.module.state_dict()["1.weight"], before + 0.5)


def test_ema_resumes(tmp_path: Path) -> None:
    """Saved and loaded in the middle, the average ends on the same bits."""

    def move(net: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))

    net = small_net()
    ema = ModelEMA(net)
    for seed in range(3):
        move(net, seed)
        ema.update(net, torch.tensor(float(seed == 1)))
    save_checkpoint({"ema": ema.state_dict()}, tmp_path / "last.pt")
    resumed = ModelEMA(small_net())
    resumed.load_state_dict(load_checkpoint(tmp_path / "last.pt")["ema"])
    move(net, 4)
    for average in (ema, resumed):
        average.update(net, torch.zeros(()))
    assert (resumed.updates, int(resumed.skipped)) == (4, 1)
    for name, tensor in ema.module.state_dict().items():
        assert torch.equal(tensor, resumed.module.state_dict()[name]), name
