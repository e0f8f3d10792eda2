"""Starts real ranks, as a user would by hand."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.common import PROJECT


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(
    script_args: Sequence[object],
    nproc: int,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    port: int,
    address: str = "127.0.0.1",
    before: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path = PROJECT,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run a script (or ``-m module``) on several ranks of this machine, one thread each, and wait for all of them.

    Args:
        script_args: the script and its arguments.
        nproc: ranks that this launcher starts.
        nnodes: launchers that meet at the port; each plays a machine.
        node_rank: which of them this one is.
        port: where the ranks meet, from `free_port`.
        address: of the first machine, as the others see it.
        before: a command that starts the launcher, ``ip netns exec`` for one.
        env: variables to set besides those of this process.
        cwd: where they run.
        timeout: seconds after which everything is killed.

    Raises:
        subprocess.TimeoutExpired: with the output so far. Neither the launcher nor any rank is left.
    """
    command = [*before, sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]
    command += ["--nnodes", str(nnodes), "--node_rank", str(node_rank)]
    command += ["--master_addr", address, "--master_port", str(port), *map(str, script_args)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Some shells start their background jobs with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException as error:
        for pid in [process.pid, *descendants(process.pid)]:
            kill(pid)
        stdout, stderr = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise subprocess.TimeoutExpired(command, timeout, stdout, stderr) from None
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


HEADER = "precision "  # begins the last line of a run's header


def start(arguments: Sequence[str], folder: Path, said: Path, **options: Any) -> "subprocess.Popen[bytes]":
    """Start train.py in a folder, which is made; its output goes to a file."""
    folder.mkdir(exist_ok=True)
    with said.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, str(PROJECT / "train.py"), *arguments],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **{
                "env": {**os.environ, "OMP_NUM_THREADS": "1"},
                "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                **options,
            },
        )


def wait_for(words: str, run: "subprocess.Popen[bytes]", said: Path) -> float:
    """Wait until a run has said something, or has ended; returns the time."""
    while run.poll() is None and words not in said.read_text():
        time.sleep(0.02)
    return time.monotonic()


def wait_for_end(pids: Sequence[int], limit: float = 60.0) -> None:
    """Wait until no process is left."""
    end = time.monotonic() + limit
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.02)


def ranks_of(pid: int) -> list[int]:
    """Process ids of the ranks that a launcher started, in their order."""
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return sorted(map(int, listing.stdout.split()))


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, also those that made a session of their own."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listing.splitlines()]
    found = [pid]
    for ancestor in found:  # grows while it is walked through
        found += [child for child, parent in parents if parent == ancestor]
    return found[1:]


def kill(pid: int) -> None:
    """End a process at once; it may be gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
