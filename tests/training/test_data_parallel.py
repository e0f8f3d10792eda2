"""Several devices in one process: L10 of the contract. DDP is tested with real ranks, in tests/dist."""

from pathlib import Path

import pytest
import torch
from torch import nn

import train
from lockstep import YOLO
from tests.runs import differences, flags, make_data, train_here
from tests.test_val import yolov5n
from utils.config.flags import TrainConfig
from utils.core.errors import UserError
from utils.dist.place import ALONE, DistEnv
from utils.run import settings as command
from utils.run.agreement import flags_of_all
from utils.run.resume import STATE_KEYS, resume
from utils.torch_utils import load_checkpoint, save_checkpoint
from utils.training.data_parallel import replica_devices, replicate
from utils.training.steps import Precision

RANK = DistEnv(1, 1, 2, 2, launched=True)


@pytest.mark.parametrize(("flag", "expected"), [("0,1", [0, 1]), ("cuda:2,cuda:0", [2, 0]), ("all", [0, 1, 2, 3])])
def test_devices(flag: str, expected: list[int]) -> None:
    """L10: the first one is the process's own; a rank of a launcher has one anyway."""
    devices = [torch.device("cuda", index) for index in expected]
    assert replica_devices(True, flag, ALONE, 4, False) == devices
    assert replica_devices(True, flag, RANK, 4, False) == replica_devices(False, flag, ALONE, 4, False) == []


@pytest.mark.parametrize(
    ("flag", "shown", "found"),
    [("0", "0", "cuda:0"), ("", "''", "cuda:0"), ("cpu", "cpu", "cpu"), ("cpu,cpu", "cpu,cpu", "cpu, cpu")],
)
def test_too_few_devices(flag: str, shown: str, found: str) -> None:
    """L10: the fix is named."""
    with pytest.raises(UserError) as error:
        replica_devices(True, flag, ALONE, 4, False)
    assert str(error.value) == (
        f"--dp shares batches among several CUDA devices, and --device {shown} is {found}; name several, as --device "
        "0,1, or leave --dp out"
    )


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L10: on the command line and from Python, before anything starts; under a launcher it has no meaning."""
    data = make_data(tmp_path / "data", count=1, val=1)
    with pytest.raises(UserError, match=r"--dp shares batches among several CUDA devices, and --device cpu,cpu is"):
        train.main(flags(data, tmp_path / "runs", "--dp --device cpu,cpu"))
    with pytest.raises(UserError, match=r"--dp shares batches among several CUDA devices, and --device cpu is"):
        YOLO("yolov5n.yaml").train(data=data, dp=True, device="cpu", project=tmp_path / "runs")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert command.places({}, TrainConfig(dp=True, device="1,0"), ALONE) == ("cuda:1", [])
    assert command.places({}, TrainConfig(device="1,0"), ALONE) == ("1,0", [torch.device("cuda", i) for i in (1, 0)])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "127.0.0.1" if name == "MASTER_ADDR" else str(int("SIZE" in name) * 2))
    with pytest.raises(UserError, match=r"^--dp is for several devices in one process, but a launcher started 2"):
        train.main(flags(data, tmp_path / "runs", "--dp --device 0,1"))
    assert not (tmp_path / "runs").exists()


def test_resumed_elsewhere(tmp_path: Path) -> None:
    """L10: a run on other devices is joined by other means, unless --dp is given again."""
    (tmp_path / "weights").mkdir()
    state = {"epoch": 1, "stopped": False}
    config = {"epochs": 3, "dp": True, "device": "0,1"}
    rest: dict[str, dict[str, int]] = {key: {} for key in STATE_KEYS}
    save_checkpoint({**rest, "state": state, "config": config}, tmp_path / "weights/last.pt")
    for more, expected in (({}, ("0,1", True)), ({"device": "cpu"}, ("cpu", False)),
                           ({"device": "1,2", "dp": True}, ("1,2", True))):  # fmt: skip
        resumed, _ = resume({"resume": str(tmp_path), **more})
        assert (resumed.device, resumed.dp) == expected


def test_replicated(capsys: pytest.CaptureFixture[str]) -> None:
    """L10: marked as not recommended; each copy computes in the run's precision, whatever that of its thread is."""
    raw_model = yolov5n(2, ["a", "b"])
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())][:2]
    raw_model.to(devices[0] if devices else "cpu")
    model = replicate(raw_model, Precision("bf16"), devices, 6)
    assert isinstance(model, nn.DataParallel)
    said = capsys.readouterr().out
    assert said.startswith("WARNING: --dp: DataParallel is slow and not recommended. BatchNorm sees the ")
    assert f" {6 // max(len(devices), 1)} images of its own device only" in said
    images = torch.rand(6, 3, 64, 64, device=next(raw_model.parameters()).device)
    outputs = model.train()(images)
    assert [level.shape[0] for level in outputs] == [6, 6, 6]
    assert {level.dtype for level in outputs} == {torch.bfloat16}
    sum(level.float().mean() for level in outputs).backward()
    assert all(parameter.grad is not None for parameter in raw_model.parameters())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run(tmp_path: Path) -> None:
    """L10: it trains in one process."""
    data = make_data(tmp_path / "data", count=8)
    train.main(flags(data, tmp_path / "runs", "--device 0,1 --dp --epochs 1"))
    assert (tmp_path / "runs/run/weights/best.pt").exists()


# Compressed gradients; what they are like is tested with real ranks, in tests/dist ------------------------------------


def test_one_rank_sends_no_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--grad-compress has no effect there, and a line says so."""
    data = make_data(tmp_path / "data", count=4)
    for value in ("off", "bf16"):
        train_here(*flags(data, tmp_path / "runs", f"--epochs 1 --name {value} --grad-compress {value}"))
        said = capsys.readouterr().out
        line = "gradients   --grad-compress bf16 has no effect: one rank sends none\n"
        assert said.count(line) == (value == "bf16")
    off, bf16 = (load_checkpoint(tmp_path / f"runs/{name}/weights/last.pt") for name in ("off", "bf16"))
    assert not differences(off["model"], bf16["model"])


def test_compression_belongs_to_the_run(tmp_path: Path) -> None:
    """It changes results: a run goes on with its own, and all ranks have to have the same."""
    (tmp_path / "weights").mkdir()
    rest: dict[str, dict[str, int]] = {key: {} for key in STATE_KEYS}
    state, config = {"epoch": 1, "stopped": False}, {"epochs": 3, "grad_compress": "bf16"}
    save_checkpoint({**rest, "state": state, "config": config}, tmp_path / "weights/last.pt")
    resumed, _ = resume({"resume": str(tmp_path)})
    assert resumed.grad_compress == "bf16"
    with pytest.raises(UserError, match=r"can't change --grad-compress off \(the run has bf16\)"):
        resume({"resume": str(tmp_path), "grad_compress": "off"})
    assert flags_of_all(TrainConfig(grad_compress="bf16"))["--grad-compress"] == "bf16"
