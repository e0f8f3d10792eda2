"""Ways to start ranks, and what is said of wrong ones: L2, L3, L7, L11, B1, B2, B4, S1 to S3, R3, R4."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from models.build import choose_sync_bn
from models.families import YOLOV3, YOLOV5
from models.yolo import DetectionModel
from tests.common import PROJECT
from tests.dist.commands import Case, Seen, run_commands
from tests.dist.launch import free_port, torchrun
from tests.dist.machines import Machine, Network, network
from tests.models.test_build import SPEC
from tests.runs import differences, flags, make_data, train_here
from utils.checkpoints.files import load_checkpoint
from utils.dist.interfaces import interface_towards, ipv4_addresses
from utils.torch_utils import split_global_batch

TRAIN = PROJECT / "train.py"
LIMIT = 480.0  # seconds; on an idle machine ten are enough


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def line(data: Path, project: Path, name: str, more: str = "", *, device: str | None = "cpu") -> list[str]:
    """Command line of one short epoch, by default from scratch."""
    arguments = flags(data, project, f"--name {name} --epochs 1 {more}")
    at = arguments.index("--device")
    arguments[at : at + 2] = [] if device is None else ["--device", device]
    return arguments


def scratch(more: str = "") -> str:
    return f"--cfg yolov5n.yaml --weights '' {more}"


def weights(run_dir: Path) -> dict[str, Any]:
    """Everything that training moves; equal only if every bit is."""
    saved = load_checkpoint(run_dir / "weights/last.pt")
    return {key: saved[key] for key in ("model", "ema", "optimizer", "state", "meters")}


def assert_same_run(a: Path, b: Path) -> None:
    assert (a / "results.csv").read_bytes() == (b / "results.csv").read_bytes()
    assert differences(weights(a), weights(b)) == []


# --- one machine -----------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Runs of two ranks, and what each rank saw, by name."""

    project: Path
    seen: dict[str, list[Seen]]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    project = tmp_path_factory.mktemp("runs")
    cases = {
        "cpu": Case(line(data, project, "cpu", scratch())),
        "no_device": Case(line(data, project, "no_device", scratch(), device=None)),
        "a_list": Case(line(data, project, "a_list", scratch(), device="cpu,cpu")),
        "sync_bn": Case(line(data, project, "sync_bn", scratch("--sync-bn --dist-timeout 77"))),
        "no_sync_bn": Case(line(data, project, "no_sync_bn", scratch("--no-sync-bn")), {"GLOO_SOCKET_IFNAME": "lo"}),
        "own_weights": Case(line(data, project, "own_weights", f"--weights {project}/cpu/weights/best.pt")),
        "automatic": Case(line(data, project, "automatic", scratch("--batch -1 --nbs 5"))),
        "no_such_interface": Case(line(data, project, "none", scratch()), {"GLOO_SOCKET_IFNAME": "none7"}),
    }
    seen = run_commands(list(cases.values()), 2, tmp_path_factory.mktemp("seen"), LIMIT)
    return Trained(project, dict(zip(cases, seen, strict=True)))


@pytest.mark.slow
@pytest.mark.gate
def test_train_py_under_torchrun(data: Path, trained: Trained, tmp_path: Path) -> None:
    """L2, B1: the line as users type it, from a folder of their own (ultralytics/yolov5#2405)."""
    done = torchrun(
        [TRAIN, *line(data, Path("runs"), "exp", scratch())], 2, port=free_port(), cwd=tmp_path, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert "batch       4 images = 2 x 2, accumulated over 16: 64 images an optimizer step" in done.stdout
    assert "ranks       2 on this machine, joined by Gloo; BatchNorm over the global batch (SyncBN)" in done.stdout
    assert done.stdout.count("images to train on") == 1, "only one rank speaks (ultralytics/yolov5#463)"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["exp"]
    assert_same_run(tmp_path / "runs/exp", trained.project / "cpu")


@pytest.mark.parametrize("name", ["no_device", "a_list", "sync_bn"])
@pytest.mark.slow
@pytest.mark.gate
def test_other_ways_to_say_the_same(trained: Trained, name: str) -> None:
    """L2, S2, R4: ranks take their device from the launcher (ultralytics/yolov5#2375); SyncBN is on by default."""
    assert [seen.error for seen in trained.seen[name]] == ["", ""]
    assert_same_run(trained.project / name, trained.project / "cpu")


@pytest.mark.slow
@pytest.mark.gate
def test_own_weights(trained: Trained) -> None:
    """L2: without --cfg the network is the one that the weights are of; all ranks start from them."""
    main, other = trained.seen["own_weights"]
    assert main.error == other.error == ""
    assert re.search(r"weights     .*cpu/weights/best\.pt: 349 tensors taken", main.said), main.said
    assert len(other.batches) == 3


@pytest.mark.parametrize(("name", "kind"), [("cpu", "SyncBatchNorm"), ("no_sync_bn", "BatchNorm2d")])
@pytest.mark.slow
@pytest.mark.gate
def test_sync_bn_on_and_off(trained: Trained, name: str, kind: str) -> None:
    """S1 to S3: which layers are there, and the warning of small shares."""
    for seen in trained.seen[name]:
        assert seen.error == ""
        assert seen.norms == [kind]
    said = trained.seen[name][0].said
    warned = "BatchNorm sees only the 2 images of its own rank, fewer than 16" in said
    assert warned == (kind == "BatchNorm2d"), said
    same = differences(weights(trained.project / name)["model"], weights(trained.project / "cpu")["model"]) == []
    assert same == (kind == "SyncBatchNorm")


@pytest.mark.slow
@pytest.mark.gate
def test_each_rank_loads_its_share(trained: Trained) -> None:
    """B1: 4 images of a batch are 2 on each rank, and none on both (LibreYOLO/libreyolo#604)."""
    for seen in trained.seen.values():
        if seen[0].error == "":
            assert [[len(batch) for batch in rank.batches] for rank in seen] == [[2, 2, 2]] * 2
    shares = [{image for batch in rank.batches for image in batch} for rank in trained.seen["cpu"]]
    assert len(shares[0] | shares[1]) == 12


@pytest.mark.slow
@pytest.mark.gate
def test_automatic_batch(trained: Trained) -> None:
    """B4: rank 0 finds it, all have it; a multiple of the ranks."""
    assert [seen.measured for seen in trained.seen["automatic"]] == [1, 0]
    assert "batch       4 images = 2 x 2" in trained.seen["automatic"][0].said


@pytest.mark.slow
@pytest.mark.gate
def test_backend_and_timeout(trained: Trained) -> None:
    """R3, R4: as torch itself reports them; three hours, or --dist-timeout (ultralytics/yolov5#4409)."""
    for name, timeout in (("cpu", 10_800.0), ("sync_bn", 77.0)):
        assert [(seen.backend, seen.timeout, seen.device) for seen in trained.seen[name]] == [
            ("gloo", timeout, "cpu")
        ] * 2


@pytest.mark.lowest
def test_a_group_of_nccl() -> None:
    """pytorch/pytorch#189070, #180611: how ranks meet in one, and how one leaves that has failed.

    PyTorch before 2.14 refuses a monitored barrier there. NCCL leaves when all ranks of the machine do, and these may
    be waiting for the one that failed.
    """
    done = torchrun(["-m", "tests.dist.like_nccl"], 2, port=free_port(), timeout=LIMIT)
    assert done.returncode == 1
    assert "LookupError: of one rank\n" in done.stderr
    assert "waited in vain" not in done.stdout


@pytest.mark.slow
@pytest.mark.gate
def test_the_interface_that_was_named(trained: Trained) -> None:
    """L3: GLOO_SOCKET_IFNAME wins, and stays; one that is not there is named. What we set ourselves is taken back."""
    for seen in trained.seen["no_such_interface"]:
        assert re.search(r"rank \d of 2 can't join the others at .* \(interface none7\): ", seen.error), seen
        assert "name the interface in GLOO_SOCKET_IFNAME" in seen.error
    assert not (trained.project / "none").exists()
    assert [seen.interface for seen in trained.seen["no_sync_bn"]] == ["lo", "lo"]
    assert [seen.interface for seen in trained.seen["cpu"]] == [None, None]


@pytest.mark.slow
def test_sync_bn_of_one_rank(data: Path, tmp_path: Path) -> None:
    """S1: on one device the flag changes nothing, not a bit; L2 with a single rank."""
    done = torchrun([TRAIN, *line(data, tmp_path, "with", scratch("--sync-bn"))], 1, port=free_port(), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    train_here(*line(data, tmp_path, "without", scratch()))
    assert_same_run(tmp_path / "with", tmp_path / "without")


# --- SyncBN by family ------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A network without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)


PLAIN = replace(YOLOV5, name="plain", sync_bn=False)


@pytest.mark.parametrize("family", [YOLOV5, YOLOV3, PLAIN], ids=lambda family: family.name)
@pytest.mark.parametrize("wanted", [None, True, False])
def test_default_of_a_family(family: Any, wanted: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    """S2, S3 (ultralytics/yolov5#2843): on for networks of convolution and BatchNorm, off for others; flags win."""
    model: Any = Plain() if family is PLAIN else DetectionModel(SPEC, 2)
    expected = family is not PLAIN if wanted is None else wanted
    assert choose_sync_bn(wanted, family, model, split_global_batch(30, 2)) == expected
    warned = "WARNING: BatchNorm sees only the 15 images of its own rank, fewer than 16" in capsys.readouterr().out
    assert warned == (wanted is False and family is not PLAIN)
    assert choose_sync_bn(wanted, family, model, split_global_batch(32, 2)) == expected
    assert choose_sync_bn(wanted, family, model, split_global_batch(2, 1)) is False
    assert capsys.readouterr().out == "", "16 images are enough, and alone a rank sees all there are"


# --- mistakes --------------------------------------------------------------------------------------------------------


def assert_said_once(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert [text for text in lines if text.startswith("error: ")] == [f"error: {message}"], done.stderr
    assert lines[0].startswith("error: "), "what follows is the launcher's"


@pytest.mark.slow
def test_list_of_devices_and_ranks_differ(data: Path, tmp_path: Path) -> None:
    """L7: both numbers, once (ultralytics/ultralytics#22878)."""
    start = time.monotonic()
    arguments = line(data, tmp_path / "runs", "exp", device="cpu,cpu,cpu")
    done = torchrun([TRAIN, *arguments], 2, port=free_port(), timeout=LIMIT)
    assert_said_once(
        done,
        "--device cpu,cpu,cpu names 3 devices, but the launcher started 2 processes on this machine "
        "(--nproc_per_node 2), each of which needs one; make the two numbers equal",
    )
    assert time.monotonic() - start < LIMIT / 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_batch_that_cannot_be_shared(tmp_path: Path) -> None:
    """B2: before any data is read."""
    data = make_data(tmp_path / "data", count=4)
    done = torchrun([TRAIN, *line(data, tmp_path / "runs", "exp", "--batch 5")], 2, port=free_port(), timeout=LIMIT)
    assert_said_once(
        done,
        "--batch-size 5 is the batch of all processes together and must be a positive multiple of their number, 2; use "
        "4 or 6",
    )
    assert "images" not in done.stdout
    assert sorted(path.name for path in data.parent.iterdir()) == ["data.yaml", "images", "labels"]
    assert not (tmp_path / "runs").exists()


def test_port_that_is_in_use() -> None:
    """L11: what torchrun says is on our page, with the way out."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = torchrun([TRAIN, "--help"], 1, port=port, timeout=LIMIT)
    assert done.returncode != 0
    said = re.search(r"torch\.distributed\.DistNetworkError: [^,]+, .*name: EADDRINUSE, message: [a-z ]+", done.stderr)
    assert said, done.stderr
    page = " ".join((PROJECT / "docs/multi_gpu.md").read_text().split())
    for part in re.split(r", .*(?=name: )", said[0].replace(str(port), "29500")):
        assert part in page
    assert "--master_port 29501" in page


def by_hand(arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start one process without a launcher."""
    return subprocess.run(
        [sys.executable, str(TRAIN), *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_half_an_environment(data: Path, tmp_path: Path) -> None:
    """It is said what is missing; nothing waits for ranks that nobody started."""
    done = by_hand(line(data, tmp_path / "runs", "exp"), {"RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert done.stderr == (
        "error: a launcher's environment is set by halves: RANK=0 WORLD_SIZE=2, but LOCAL_RANK, LOCAL_WORLD_SIZE, "
        "MASTER_ADDR, MASTER_PORT not; start the run with python -m torch.distributed.run, or unset these variables "
        "for a run of one process\n"
    )
    assert list(tmp_path.iterdir()) == []


# --- SLURM -----------------------------------------------------------------------------------------------------------


def job_with_a_free_port() -> int:
    """A job id; its port is 20,000 and its last four digits."""
    for job in range(os.getpid(), os.getpid() + 1000):
        with socket.socket() as listener:
            if listener.connect_ex(("127.0.0.1", 20_000 + job % 10_000)):
                return job
    raise AssertionError("a thousand ports are taken")


@pytest.mark.slow
@pytest.mark.gate
def test_two_tasks_of_a_slurm_step(data: Path, trained: Trained, tmp_path: Path) -> None:
    """No torchrun: what srun sets is enough (ultralytics/yolov5#12429, #16892 of ultralytics/ultralytics)."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    step |= {"SLURM_JOB_ID": str(job_with_a_free_port())}
    arguments = line(data, tmp_path, "exp", scratch())
    with ThreadPoolExecutor() as pool:
        tasks = [
            pool.submit(by_hand, arguments, {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
            for rank in (1, 0)
        ]
    assert [task.result().returncode for task in tasks] == [0, 0], [task.result().stderr for task in tasks]
    assert_same_run(tmp_path / "exp", trained.project / "cpu")


# --- several machines ------------------------------------------------------------------------------------------------


def on_machines(
    machines: list[Machine], arguments: list[str], nproc: int, address: str = "127.0.0.1"
) -> list[subprocess.CompletedProcess[str]]:
    """Run train.py on machines that are started in this order, a second apart; the results are in it as well."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        launched = []
        for machine in machines:
            launched.append(
                pool.submit(
                    torchrun, [TRAIN, *arguments], nproc, nnodes=len(machines), node_rank=machine.rank, port=port,
                    address=address, before=machine.before, timeout=LIMIT,
                )
            )  # fmt: skip
            time.sleep(1)
    return [one.result() for one in launched]


@pytest.mark.slow
@pytest.mark.gate
def test_two_machines(data: Path, trained: Trained, tmp_path: Path) -> None:
    """L3: the machine of rank 0 is not the first to start; the figures are those of two ranks on one machine."""
    second, first = on_machines([Machine(1), Machine(0)], line(data, tmp_path, "exp", scratch()), 1)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "ranks       2 on 2 machines, joined by Gloo" in first.stdout
    assert "images to train on" not in second.stdout
    assert_same_run(tmp_path / "exp", trained.project / "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "nproc"), [(2, 2), (3, 1), (3, 2)])
def test_more_ranks_and_machines(data: Path, tmp_path: Path, count: int, nproc: int) -> None:
    """L3 (ultralytics/ultralytics#16892, #20283, #22878): ranks share the work of their machine, whichever it is."""
    machines = [Machine(rank) for rank in reversed(range(count))]
    batch = count * nproc
    done = on_machines(machines, line(data, tmp_path, "exp", scratch(f"--batch {batch} --cache ram")), nproc)
    assert [one.returncode for one in done] == [0] * count, done
    assert f"ranks       {batch} on {count} machines, joined by Gloo" in done[-1].stdout
    assert len((tmp_path / "exp/results.csv").read_text().splitlines()) == 2


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_two_machines_with_addresses_of_their_own(cable: Network, data: Path, trained: Trained, tmp_path: Path) -> None:
    """L3: no rank may listen where only its own machine reaches it, though its name leads there."""
    arguments = line(data, tmp_path / "runs", "exp", scratch("--dist-timeout 100"))
    second, first = on_machines(cable.machines[::-1], arguments, 1, address=cable.name)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert_same_run(tmp_path / "runs/exp", trained.project / "cpu")


# --- which interface -------------------------------------------------------------------------------------------------


def default_interface() -> str | None:
    """As the routing table of the system has it."""
    table = Path("/proc/net/route")
    rows = [row.split() for row in table.read_text().splitlines()[1:]] if table.exists() else []
    return next((row[0] for row in rows if row[1] == row[7] == "00000000"), None)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux")
def test_interface_towards_an_address() -> None:
    addresses = ipv4_addresses()
    assert ("lo", "127.0.0.1") in addresses
    for interface, address in addresses:
        if not address.startswith("127."):  # to one's own address the way is short, but others take the interface
            assert interface_towards(address, several_machines=True) == interface
    for name in ("127.0.0.1", "localhost"):  # loopback that was asked for stays loopback
        assert interface_towards(name, several_machines=True) == "lo"
    assert interface_towards("no.such.host.invalid", several_machines=True) is None


@pytest.mark.skipif(default_interface() is None, reason="no way out of this machine")
def test_a_hostname_that_means_loopback() -> None:
    """L3: Gloo left to itself takes what the hostname resolves to, which no other machine reaches."""
    for name in ("127.1", socket.gethostname()):  # the first one is another way to write it, on every system
        if socket.gethostbyname(name).startswith("127."):
            assert interface_towards(name, several_machines=True) == default_interface()
            assert interface_towards(name, several_machines=False) == "lo"
