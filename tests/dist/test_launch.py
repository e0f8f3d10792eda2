"""Where a run goes, before any process is started: L1, L4, L6, L7, B2, B4, R3 of the contract.

The processes themselves are in tests/dist.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.common import PROJECT
from tests.runs import flags, make_data, train_here
from tests.test_detect import checkpoint
from utils.config.command_line import given_flags
from utils.config.flags import TrainConfig
from utils.config.yaml_files import find_yaml
from utils.core.errors import UserError
from utils.dist.launch import _last_life, explain, variables_kept, worker_devices
from utils.dist.meeting import backend
from utils.dist.place import ALONE, DistEnv, assign_device
from utils.dist.worker import last_words
from utils.run import settings as command

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
RANK = DistEnv(1, 1, 2, 2, launched=True)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch says there is; nothing touches them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: from any folder; what ships is found by its name."""
    monkeypatch.chdir(tmp_path)
    line = "--batch 64 --data coco.yaml --weights yolov5s.pt --hyp hyp.scratch-med.yaml --device 0"
    given = given_flags(TrainConfig, line.split())
    config, resumed = command.settings(given, ALONE)
    assert config is not None and resumed is None
    assert (config.batch_size, config.data, config.cfg) == (64, str(PROJECT / "data/coco.yaml"), "")
    assert find_yaml(config.hyp, "hyp") == PROJECT / "data/hyps/hyp.scratch-med.yaml"
    assert find_yaml("yolov5s.yaml", "model") == PROJECT / "models/yolov5s.yaml"
    device, workers = command.places(given, config, ALONE)
    assert workers == []
    assert assign_device(device, ALONE, 4, has_mps=False) == CUDA


def test_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L1: it trains from weights, in this process."""
    weights = checkpoint(tmp_path / "net.pt", None, ["blue", "red"], 64)
    train_here(*flags(make_data(tmp_path / "data", count=4), tmp_path / "runs", f"--epochs 1 --weights {weights}"))
    said = capsys.readouterr().out
    assert f"weights     {weights}: 349 tensors taken\n" in said
    assert "\nranks " not in said
    assert (tmp_path / "runs/run/weights/best.pt").exists()


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("flag", "workers"),
    [
        *(("0,1", 2), ([2, 0], 2), (["cuda:0", "cuda:1", "cuda:3"], 3), ("all", 4), ("cpu,cpu", 2), (["cpu"] * 3, 3)),
        *(("", 0), ("auto", 0), ("0", 0), (3, 0), ("cuda:1", 0), ([1], 0), ("cpu", 0)),
    ],
)
def test_who_needs_workers(flag: str | int | list[str | int], workers: int) -> None:
    """L4, L6: only a list of several devices; L7: never a process that a launcher has started."""
    assert len(worker_devices(flag, ALONE)) == workers
    assert worker_devices(flag, RANK) == []


def test_what_workers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """B4: the automatic batch is found before any of them exists, they get a plain number. B2: so is a wrong one."""
    config = TrainConfig(batch_size=-1, nbs=5, device="cpu,cpu", data="none.yaml")
    told = command.for_workers({"nbs": 5}, config, None, [CPU, CPU])
    assert told == {"device": "cpu,cpu", "batch_size": 4, "max_restarts": 0}
    assert capsys.readouterr().out.count("--batch-size -1 on cpu is not measured: 4 images over all ranks") == 1
    with pytest.raises(UserError, match="must be a positive multiple of their number, 4; use 4 or 8"):
        command.for_workers({}, TrainConfig(batch_size=6, data="none.yaml"), None, [CPU] * 4)


def test_backend() -> None:
    """R3: NCCL between CUDA devices where PyTorch has it, Gloo for all others."""
    assert backend(DistEnv(device=CUDA)) == ("NCCL" if dist.is_nccl_available() else "Gloo")
    assert backend(DistEnv(device=CPU)) == backend(DistEnv(device=torch.device("mps"))) == "Gloo"


PLACES = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    main()  # NCCL error\n'
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/c10d/ProcessGroupNCCL.cpp:1, remote process exited or "
    "there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or "
    "a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"
)


def failed(rank: int, timestamp: int, said: str, folder: Path) -> ProcessFailure:
    """A rank that has failed with an exception, as `record` of torch leaves it."""
    path = folder / f"{rank}.json"
    message = {"message": said, "extraInfo": {"py_callstack": PLACES + said, "timestamp": str(timestamp)}}
    path.write_text(json.dumps({"message": message}))
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=1, error_file=str(path))


@pytest.mark.parametrize("lost", [NCCL, "RuntimeError: [x/pair.cc:1] Connection closed by peer [127.0.0.1]:1"])
def test_the_rank_that_failed_is_named(lost: str, tmp_path: Path) -> None:
    """Not one that lost it and was quicker to say so; NCCL does in the first of several lines."""
    cause = "torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 2 GiB"
    failure = explain({0: failed(0, 1, lost, tmp_path), 1: failed(1, 2, cause, tmp_path)})
    assert failure.rank == 1
    assert failure.text.endswith("Tried to allocate 2 GiB" + "rank 1 failed with status 1; all other ranks were ended")
    alone = explain({0: failed(0, 1, lost, tmp_path)})
    assert "another rank left in the middle of the run, without an error of its own" in alone.text
    assert "another rank left" not in explain({1: failed(1, 2, cause, tmp_path)}).text, "a line of code is no error"


def test_the_last_life_is_the_one_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier lives of a launch left says nothing about its end; lives are counted, not spelled."""
    assert _last_life(tmp_path) == tmp_path  # no worker was started
    for life in (0, 9, 10):
        folder = tmp_path / f"x/attempt_{life}/0"
        folder.mkdir(parents=True)
        callstack = {"message": {"extraInfo": {"py_callstack": f"Traceback\nValueError: of life {life}"}}}
        (folder / "error.json").write_text(json.dumps(callstack))
    assert _last_life(tmp_path) == tmp_path / "x/attempt_10"
    for life, said in ((11, ["local rank 0 failed: ValueError: of life 10"]), (0, [])):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"x/attempt_{life}/0/error.json"))
        assert last_words() == said


def test_variables_are_put_back_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads read them meanwhile, and found none at all; nor are those touched that are as they were."""
    touched: list[str] = []
    done = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.putenv", "os.unsetenv") and not done:
            touched.append(os.fsdecode(arguments[0]))

    for name, value in (("KEPT", "a"), ("CHANGED", "b"), ("REMOVED", "c")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ADDED", raising=False)
    before = dict(os.environ)
    with variables_kept({"CHANGED": "d"}):
        os.environ["ADDED"] = "e"
        del os.environ["REMOVED"]
        sys.addaudithook(note)  # stays; hence `done`
    done = True
    assert dict(os.environ) == before
    assert sorted(touched) == ["ADDED", "CHANGED", "REMOVED"]
