"""The network between two machines fails, or they do not find each other: clear words, an end in time, no wrong result.

pytest -m slow tests/dist/test_network_faults.py
"""

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.common import PROJECT
from tests.dist.launch import HEADER, free_port
from tests.dist.machines import (
    CABLE,
    Launched,
    Machine,
    Network,
    Relay,
    all_ended,
    network,
    run_or_skip,
    srun_environment,
    started,
    torchrun_line,
)
from tests.models.test_build import SPEC
from tests.runs import assert_same_run, flags, make_data
from utils.checkpoints.files import load_checkpoint

TRAIN = PROJECT / "train.py"
FIRST = "10.77.0.1"
DIST_TIMEOUT = 8
SOON = 120  # seconds from a failure to the end; measured 11 to 30 with this --dist-timeout, on busy cores
LIMIT = 400

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_data(tmp_path_factory.mktemp("data"), 12)
    (path.parent / "net.yaml").write_text(yaml.safe_dump(SPEC))
    return path


def line(data: Path, project: Path, more: str = "") -> list[str]:
    own = f"--cfg {data.parent}/net.yaml --weights '' --nbs 4 --save-steps 1 --patience 0 --epochs 2 {more}"
    return flags(data, project, own)


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


@contextlib.contextmanager
def both(made: Network, arguments: Sequence[str], folder: Path) -> Iterator[list[Launched]]:
    """train.py on both machines, by torchrun."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                started(one, [*torchrun_line(one, port, made.name), TRAIN, *arguments], folder / f"said{one.rank}")
            )
            for one in made.machines
        ]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of a run that nothing happens to."""
    project = tmp_path_factory.mktemp("runs")
    arguments = [*line(data, project), "--name", "whole", "--device", "cpu,cpu"]
    with started(Machine(0), [TRAIN, *arguments], project / "said") as run:
        all_ended([run], LIMIT)
        assert run.process.returncode == 0, run.said
    return project


def assert_lost(first: Launched, second: Launched) -> None:
    """Each side has said whom it lost, and which flag set the time; rank 0's machine is where all had met."""
    assert (first.process.returncode, second.process.returncode) == (1, 1)
    waited = f"; it waited {DIST_TIMEOUT} s (--dist-timeout): "
    assert f"error: rank 0 lost rank 1 on machine 1{waited}" in first.said, first.said
    assert f"error: rank 1 lost rank 0: {FIRST}" in second.said.replace("rank 0: first:", f"rank 0: {FIRST}:")
    assert waited in second.said


def assert_resumes(run_dir: Path, folder: Path) -> None:
    """The last checkpoint is whole, and the run goes on from it, here on one process."""
    state = load_checkpoint(run_dir / "weights/last.pt")["state"]
    epochs = state["epoch"] + 1
    arguments = [TRAIN, "--resume", run_dir, "--epochs", epochs, "--device", "cpu"]
    with started(Machine(0), arguments, folder / "resumed") as run:
        all_ended([run], LIMIT)
        assert run.process.returncode == 0, run.said
    assert load_checkpoint(run_dir / "weights/last.pt")["state"]["epoch"] == epochs


# --- the cable -------------------------------------------------------------------------------------------------------


@pytest.mark.gate
def test_cable_cut_for_good(cable: Network, data: Path, tmp_path: Path) -> None:
    """Row 31: nobody is told, so that --dist-timeout ends both sides."""
    arguments = line(data, tmp_path / "runs", f"--epochs 5000 --dist-timeout {DIST_TIMEOUT}")
    with both(cable, arguments, tmp_path) as (first, second):
        first.wait_for("1/5000 100%")
        cable.cut()
        assert all_ended([first, second], SOON) > DIST_TIMEOUT / 2
        assert_lost(first, second)
    assert_resumes(tmp_path / "runs/run", tmp_path)


def test_one_way_only(data: Path, tmp_path: Path) -> None:
    """Row 34: a connection that is half open, as after a firewall has forgotten it."""
    arguments = line(data, tmp_path / "runs", f"--epochs 5000 --dist-timeout {DIST_TIMEOUT}")
    with Relay() as relay, network(tmp_path, relay) as made, both(made, arguments, tmp_path) as (first, second):
        first.wait_for("1/5000 100%")
        relay.blocked = {1}  # what the second machine sends
        all_ended([first, second], SOON)
        assert_lost(first, second)
        assert relay.lost > 0
    assert load_checkpoint(tmp_path / "runs/run/weights/last.pt")


def test_short_outage(cable: Network, data: Path, whole: Path, tmp_path: Path) -> None:
    """Row 32: two seconds without a cable cost two seconds."""
    with both(cable, [*line(data, whole), "--name", "outage"], tmp_path) as (first, second):
        first.wait_for(HEADER)
        cable.cut()
        time.sleep(2)
        assert "2/2 100%" not in first.said
        cable.mend()
        all_ended([first, second], LIMIT)
        assert (first.process.returncode, second.process.returncode) == (0, 0), first.said + second.said
    assert_same_run(whole / "whole", whole / "outage")


def test_delay_and_loss(data: Path, whole: Path, tmp_path: Path) -> None:
    """Row 34: every packet takes 10 ms, every twentieth is lost."""
    arguments = [*line(data, whole), "--name", "lossy"]
    with (
        Relay(delay=0.01, loss=0.05) as relay,
        network(tmp_path, relay) as made,
        both(made, arguments, tmp_path) as (first, second),
    ):
        all_ended([first, second], LIMIT)
        assert (first.process.returncode, second.process.returncode) == (0, 0), first.said + second.said
        assert relay.passed > 100
        assert relay.lost > 0
    assert_same_run(whole / "whole", whole / "lossy")


def test_slow_cable(cable: Network, data: Path, tmp_path: Path) -> None:
    """Row 33: 80 Mbit/s, and a network whose gradients take most of a second on it; it takes long and is right."""
    arguments = flags(data, tmp_path / "runs", "--cfg yolov5n.yaml --weights '' --nbs 4 --epochs 1 --no-sync-bn")
    with started(Machine(0), [TRAIN, *arguments, "--name", "fast", "--device", "cpu,cpu"], tmp_path / "fast") as fast:
        all_ended([fast], LIMIT)
        assert fast.process.returncode == 0, fast.said
    for space in cable.spaces:
        shape = ["root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "1s"]
        run_or_skip("tc", "-n", space, "qdisc", "add", "dev", CABLE, *shape)
    began = time.monotonic()
    with both(cable, [*arguments, "--name", "slow"], tmp_path) as (first, second):
        all_ended([first, second], LIMIT)
        assert (first.process.returncode, second.process.returncode) == (0, 0), first.said + second.said
    sent = [int(run_or_skip("tc", "-n", space, "-s", "qdisc", "show", "dev", CABLE).split("Sent ")[1].split()[0])
            for space in cable.spaces]  # fmt: skip
    assert min(sent) > 3 * 7e6, "at least the gradients of three steps, 7 MB each"
    assert time.monotonic() - began > max(sent) / 10e6
    assert_same_run(tmp_path / "runs/fast", tmp_path / "runs/slow")


# --- machines that do not meet ---------------------------------------------------------------------------------------


def test_machines_that_do_not_find_each_other(cable: Network, data: Path, tmp_path: Path) -> None:
    """Rows 36 and 37 under torchrun, which waits by itself, for 900 s or what --rdzv_conf says; all at once here."""
    first, second = cable.machines
    silent, unreachable, unknown = "10.77.0.9", "10.99.0.9", "nobody.invalid"
    run_or_skip("ip", "-n", cable.spaces[1], "route", "add", "unreachable", "10.99.0.0/24")
    cases = [(first, FIRST), (second, silent), (second, unreachable), (second, unknown)]
    with contextlib.ExitStack() as stack:
        runs = []
        for number, (machine, address) in enumerate(cases):
            port = free_port()
            command = [*torchrun_line(machine, port, address), "--rdzv_conf", "timeout=5", TRAIN]
            command += line(data, tmp_path / "runs")
            runs.append((address, port, stack.enter_context(started(machine, command, tmp_path / f"said{number}"))))
        all_ended([run for *_, run in runs], 3 * SOON)
        assert [run.process.returncode for *_, run in runs] == [1] * len(runs)
        none_came = r"DistStoreError: Timed out after \d+ seconds waiting for clients\. 1/2 clients joined"
        assert re.search(none_came, runs[0][2].said), runs[0][2].said
        for address, port, run in runs[1:]:
            assert "DistNetworkError: The client socket has " in run.said
            assert f"({address}, {port})" in run.said, "the address that can't be reached is named"
    assert not (tmp_path / "runs").exists()
    page = " ".join((PROJECT / "docs/multi_gpu.md").read_text().split())
    assert "1/2 clients joined" in page
    assert "--rdzv_conf timeout=60" in page


def test_srun_waits_and_says_so(cable: Network, data: Path, whole: Path, tmp_path: Path) -> None:
    """Rows 36 and 37 without another launcher: a machine that comes late, one that never does, a wrong address."""
    port, nobodys = free_port(), free_port()
    run_or_skip("ip", "-n", cable.spaces[1], "route", "add", "unreachable", "10.99.0.0/24")
    waits = r"rank 0 of 2 has waited 1\d s for the others at 10\.77\.0\.1:"
    with contextlib.ExitStack() as stack:

        def task(rank: int, address: str, port: int, name: str, more: str = "") -> Launched:
            command = [TRAIN, *line(data, whole, more), "--name", name]
            environment = srun_environment(rank, address, port)
            return stack.enter_context(started(cable.machines[rank], command, tmp_path / f"{name}{rank}", environment))

        early = task(0, FIRST, port, "late")
        alone = task(0, FIRST, nobodys, "never", "--dist-timeout 12")
        lost = task(1, "10.99.0.9", nobodys, "wrong", "--dist-timeout 12")
        early.wait_for("rank 0 of 2 has waited")
        late = task(1, FIRST, port, "late")
        all_ended([early, late, alone, lost], LIMIT)
        assert (early.process.returncode, late.process.returncode) == (0, 0), early.said + late.said
        assert (alone.process.returncode, lost.process.returncode) == (2, 2)
    assert_same_run(whole / "whole", whole / "late")
    assert "has waited" not in late.said
    assert re.search(f"{waits}{port}\n", early.said), early.said
    assert re.search(f"{waits}{nobodys}\n", alone.said), alone.said
    assert f"error: rank 0 of 2 can't join the others at {FIRST}:{nobodys}" in alone.said
    assert "1/2 clients joined" in alone.said
    assert f"error: rank 1 of 2 can't join the others at 10.99.0.9:{nobodys}" in lost.said
    assert "check that every machine reaches that address" in lost.said
    for run in (alone, lost):
        assert "Traceback" not in run.said
    assert not (whole / "never").exists() and not (whole / "wrong").exists()


def test_machines_that_count_differently(cable: Network, data: Path, tmp_path: Path) -> None:
    """Row 38: three ranks do not share four images, and a machine that is not counted is told in the end."""
    first, second = cable.machines
    port, other = free_port(), free_port()
    own = line(data, tmp_path / "runs", "--epochs 1")
    with contextlib.ExitStack() as stack:

        def machine(which: Machine, nnodes: int, nproc: int, port: int, name: str) -> Launched:
            command = [*torchrun_line(which, port, FIRST, nnodes, nproc), "--rdzv_conf", "timeout=20", TRAIN]
            return stack.enter_context(
                started(which, [*command, *own, "--name", name], tmp_path / f"{name}{which.rank}")
            )

        two, one = machine(first, 2, 2, port, "nproc"), machine(second, 2, 1, port, "nproc")
        alone, other_one = machine(first, 1, 2, other, "nnodes"), machine(second, 2, 1, other, "nnodes")
        all_ended([two, one, alone, other_one], LIMIT)
        assert (two.process.returncode, one.process.returncode) == (1, 1)
        for run in (two, one):
            assert run.said.count("must be a positive multiple of their number, 3; use 3 or 6\n") == 1
        assert (alone.process.returncode, other_one.process.returncode) == (0, 1)
        assert "ranks       2 on this machine" in alone.said
        assert re.search("Dist(Store|Network)Error: ", other_one.said), other_one.said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["nnodes"]
