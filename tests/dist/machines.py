"""Two machines on this one: network namespaces with a cable between them that can be cut, slow or lossy."""

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.common import PROJECT
from tests.dist.launch import descendants, kill

CABLE = "rail0"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
PACKET = 65_536  # bytes at most
# What the system's commands say where a right or a part of the kernel is missing; all else is a mistake of a test.
MISSING = (
    "not permitted",
    "ermission denied",
    "not supported",
    "nknown device type",
    "kind is unknown",
    "No such file",
)


@dataclass
class Machine:
    """One launcher.

    Attributes:
        rank: ``--node_rank``.
        before: command that starts it.
    """

    rank: int
    before: tuple[str, ...] = ()


class Network(NamedTuple):
    """Two machines with a cable between them; the first one's own name is loopback to itself, as Debian has it.

    Attributes:
        machines: both.
        name: of the first one, as the second one knows it; its address is 10.77.0.1.
        spaces: their network namespaces.
    """

    machines: list[Machine]
    name: str
    spaces: list[str]

    def cut(self) -> None:
        """Cut the cable: packets vanish, and nobody is told."""
        subprocess.run(["ip", "-n", self.spaces[0], "link", "set", CABLE, "down"], check=True)

    def mend(self) -> None:
        """Mend the cable."""
        subprocess.run(["ip", "-n", self.spaces[0], "link", "set", CABLE, "up"], check=True)


def run_or_skip(*command: str) -> str:
    """Run a command of the system and return what it says; where it can't work the test is skipped with the reason."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no command {command[0]} here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = f"{' '.join(command)}: {done.stderr.strip()}"
        assert any(words in done.stderr for words in MISSING), said
        pytest.skip(f"can't be done here: {said}")
    return done.stdout


@contextmanager
def network(folder: Path, relay: "Relay | None" = None) -> Iterator[Network]:
    """Two machines for as long as the context is open; skips the test where they can't be made.

    Args:
        folder: for small files.
        relay: takes the place of the cable.
    """
    spaces = [f"lockstep-{os.getpid()}-{number}" for number in (0, 1)]
    hosts = [("127.0.1.1 first\n", "10.77.0.2 second\n"), ("10.77.0.1 first\n", "127.0.1.1 second\n")]
    steps = [["netns", "add", space] for space in spaces]
    if relay is None:
        ends = ["netns", spaces[0], "type", "veth", "peer", "name", CABLE, "netns", spaces[1]]
        steps += [["link", "add", CABLE, *ends]]
    else:
        pairs = zip(relay.names, spaces, strict=True)
        steps += [["link", "set", name, "netns", space, "name", CABLE] for name, space in pairs]
    for number, space in enumerate(spaces, 1):
        steps += [["-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", CABLE]]
        steps += [["-n", space, "link", "set", device, "up"] for device in ("lo", CABLE)]
        steps += [["-n", space, "route", "add", "default", "via", f"10.77.0.{3 - number}"]]
    try:
        for step in steps:
            run_or_skip("ip", *step)
        machines = []
        for number, space in enumerate(spaces):
            file = folder / f"hosts{number}"
            file.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n" + "".join(hosts[number]))
            # Nobody answers questions for names in there, so nobody is asked.
            mount = f'mount --bind {file} /etc/hosts; mount --bind /dev/null /etc/resolv.conf; exec "$0" "$@"'
            machines.append(Machine(number, ("ip", "netns", "exec", space, "unshare", "-m", "sh", "-c", mount)))
        yield Network(machines, "first", spaces)
    finally:
        for space in spaces:
            with suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


class Relay:
    """A cable that is a program: it holds packets back, loses some, or lets them through one way only.

    A context manager; skips the test where the system has no TUN devices.

    Attributes:
        names: of its two ends, network devices.
        passed: packets that went through.
        lost: packets that did not.
        blocked: ends whose packets are lost, 0 or 1.

    Args:
        delay: seconds that a packet takes.
        loss: share of packets that are lost.
    """

    def __init__(self, delay: float = 0.0, loss: float = 0.0) -> None:
        self.delay, self.loss = delay, loss
        self.names = [f"relay{os.getpid() % 100_000}-{end}" for end in (0, 1)]
        self.passed = self.lost = 0
        self.blocked: set[int] = set()
        self._ends: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self) -> "Relay":
        for name in self.names:
            try:
                end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._ends.append(end)
                fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
            except OSError as error:
                self._close()
                pytest.skip(f"no TUN devices here: {error}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        chance, number = random.Random(0), 0
        waiting: list[tuple[float, int, int, bytes]] = []  # (when, number, from which end, packet)
        while not self._over.is_set():
            pause = min(max(waiting[0][0] - time.monotonic(), 0.0), 0.05) if waiting else 0.05
            for end in select.select(self._ends, [], [], pause)[0]:
                with suppress(OSError):  # not up yet
                    packet, source = os.read(end, PACKET), self._ends.index(end)
                    if source in self.blocked or chance.random() < self.loss:
                        self.lost += 1
                        continue
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + self.delay, number, source, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, source, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the other end is not up, or its queue is full
                    os.write(self._ends[1 - source], packet)
                    self.passed += 1


@dataclass
class Launched:
    """A process that was started on a machine.

    Attributes:
        process: of it.
        file: what it says, stdout and stderr.
    """

    process: "subprocess.Popen[bytes]"
    file: Path

    @property
    def said(self) -> str:
        """What it has said so far."""
        return self.file.read_text()

    def wait_for(self, words: str, limit: float = 240.0) -> None:
        """Wait until it says something."""
        end = time.monotonic() + limit
        while words not in self.said:
            assert self.process.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.02)


@contextmanager
def started(
    machine: Machine, command: Sequence[object], file: Path, env: Mapping[str, str] | None = None
) -> Iterator[Launched]:
    """Start a Python command on a machine; at the end of the context nothing is left of it."""
    with file.open("wb") as output:
        process = subprocess.Popen(
            [*machine.before, sys.executable, *map(str, command)],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield Launched(process, file)
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            kill(pid)
        process.wait()


def torchrun_line(machine: Machine, port: int, address: str, nnodes: int = 2, nproc: int = 1) -> list[str]:
    """What stands before the script's name on a machine."""
    line = f"-m torch.distributed.run --nproc_per_node {nproc} --nnodes {nnodes} --node_rank {machine.rank}"
    return [*line.split(), "--master_addr", address, "--master_port", str(port)]


def srun_environment(rank: int, address: str, port: int) -> dict[str, str]:
    """What srun and the user set for one of two tasks, each on a machine of its own."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": str(rank)}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_JOB_ID": "1"}
    step |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    return step | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def all_ended(launched: Sequence[Launched], limit: float) -> float:
    """Wait until all have ended; returns the seconds that it took."""
    began = time.monotonic()
    for one in launched:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(began + limit - time.monotonic(), 0.01))
    late = [one.said for one in launched if one.process.poll() is None]
    assert not late, "\n".join(late)
    return time.monotonic() - began
