"""What the exchange of gradients between two ranks costs: against what the ranks compute, and in bytes.

python -m benchmarks.ranks

Two ranks on two cores, one thread each, joined by Gloo, without SyncBN. Each trains on the same batch over and over, in
the loop of train.py; in turns, round after round:
  alone      each rank by itself, nothing is exchanged
  ours       together, an optimizer step for each batch
  exchange   as many bytes as the gradients have, summed over ranks in one piece
  windows    the first two with an optimizer step for four batches, and the second with an exchange for each batch
A step can't be faster than the slower one of alone and exchange, a window not than its batches and one exchange.

Bytes are counted, not timed: an epoch with its validation on two ranks in network namespaces of their own, with a cable
between them (Linux, root or user namespaces); the rows are left out where the system does not allow that.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import Options, Row, milliseconds, ratios, run_group
from benchmarks.rank_group import there
from benchmarks.ranks_worker import BATCHES, Counted
from benchmarks.scaling import MANY_EPOCHS, Settings, copy_data, make_labels
from benchmarks.scaling_rank import cores
from utils.config.yaml_files import ROOT
from utils.core.errors import UserError, run_cli
from utils.dist.place import LAUNCHER_VARIABLES

RANKS = 2
REACHED, WIRE = 0.9, 1.05  # the share of a limit; bytes over their limit
STEPS = 100  # of the epoch whose bytes are counted: the averaged weights that validation sends are 1 % of them
HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with timestamps, of each packet
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PATIENCE, TIMEOUT = 10, 300  # seconds


@dataclass(frozen=True)
class Size:
    """What is trained: network, pixels, images a rank and batch."""

    cfg: str
    imgsz: int
    local_batch: int

    def __str__(self) -> str:
        return f"{Path(self.cfg).stem}, {self.imgsz} px, {self.local_batch} images a rank"


USUAL = Size("yolov5n.yaml", 320, 4)
SENDING = Size("yolov5s.yaml", 64, 1)  # so small that the exchange takes about as long as a batch


def prepare(options: Options, size: Size, steps: int, folder: Path) -> list[Path]:
    """Make a data set of so many batches; returns YAMLs for the first rank, the second, and both together."""
    folder.mkdir()
    source = options.data
    if not source:
        images = make_labels(folder / "made", 16)
        source = str(folder / "made.yaml")
        Path(source).write_text(json.dumps({"train": str(images), "val": str(images), "names": ["thing"]}))
    what = Settings(source, size.cfg, size.imgsz, size.local_batch, "auto", steps, 0, 1, 1, 1)
    return copy_data(there(source), what, folder)


def flags(size: Size, folder: Path) -> dict[str, Any]:
    """Return what all runs have in common. With so low a learning rate no number of steps leads astray."""
    hyp = folder / "hyp.yaml"
    hyp.write_text("lr0: 1.0e-6\nwarmup_epochs: 0\nwarmup_bias_lr: 0\n")
    own = {"cfg": size.cfg, "imgsz": size.imgsz, "hyp": str(hyp), "weights": "", "epochs": MANY_EPOCHS, "workers": 0}
    return own | {"cache": "off", "device": "cpu", "noplots": True, "noautoanchor": True, "sync_bn": False}


# Processes -----------------------------------------------------------------------------------------------------------


def run_ranks(
    job: Mapping[str, Any], folder: Path, before: Sequence[Sequence[str]] = ((), ()), address: str = "127.0.0.1"
) -> list[Any]:
    """Give two ranks a job and return what each of them found.

    Args:
        job: for `benchmarks.ranks_worker`.
        folder: for job, answers and log.
        before: command that each rank is started by; ranks with one are a machine each.
        address: where they meet.

    Raises:
        UserError: one of them failed; with what they said.
    """
    file, machines = folder / "job.json", any(before)
    file.write_text(json.dumps(job))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with (folder / "log").open("w+b") as log, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            local_rank, local_ranks = (0, 1) if machines else (rank, RANKS)
            place = map(str, (rank, local_rank, RANKS, local_ranks, address, port))
            process = subprocess.Popen(
                [*before[rank], sys.executable, "-m", "benchmarks.ranks_worker", str(file)],
                cwd=ROOT,
                env=os.environ | dict(zip(LAUNCHER_VARIABLES, place, strict=True)) | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # systems share out cores by session
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        end = time.monotonic() + TIMEOUT
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        if any(process.poll() != 0 for process in processes):
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()[-20:]
            raise UserError("a rank of the benchmark ended or hangs; the ranks said:\n" + "\n".join(said))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@contextlib.contextmanager
def cable() -> Iterator[list[list[str]]]:
    """Lay a cable between two network namespaces; yields for each of them the command that runs others inside.

    Raises:
        OSError: the system does not allow or have that.
    """
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        raise OSError("no commands unshare, nsenter and ip here")
    root = os.geteuid() == 0
    inside: list[list[str]] = []
    with contextlib.ExitStack() as stack:
        for number in range(RANKS):
            alone = ["unshare", *([] if root or number else ["--map-root-user"]), "--net", "sleep", str(TIMEOUT * 2)]
            holder = subprocess.Popen([*(inside[0] if number and not root else []), *alone], stderr=subprocess.DEVNULL)
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            wait_for_namespace(holder, [os.readlink("/proc/self/ns/net"), *map(namespace, inside)])
            user = [] if root else ["--user", "--preserve-credentials"]
            inside.append(["nsenter", "--target", str(holder.pid), *user, "--net"])
        pid = inside[1][2]
        steps = [(0, f"link add rail0 type veth peer name rail0 netns {pid}")]
        for number, address in enumerate(ADDRESSES):
            steps += [(number, f"addr add {address}/24 dev rail0")]
            steps += [(number, f"link set {device} up") for device in ("lo", "rail0")]
        for number, step in steps:
            done = subprocess.run([*inside[number], "ip", *step.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"ip {step}: {done.stderr.strip()}")
        yield inside


def namespace(inside: Sequence[str]) -> str:
    """Return the network namespace that a command of `cable` enters."""
    return os.readlink(f"/proc/{inside[2]}/ns/net")


def wait_for_namespace(holder: "subprocess.Popen[bytes]", others: Sequence[str]) -> None:
    """Wait until a process is in a network namespace of its own.

    Raises:
        OSError: it ended, for that is not allowed, or does not come to it.
    """
    end = time.monotonic() + PATIENCE
    while os.readlink(f"/proc/{holder.pid}/ns/net") in others:
        if holder.poll() is not None or time.monotonic() > end:
            raise OSError("no network namespaces for this user")
        time.sleep(0.01)


# Rows ----------------------------------------------------------------------------------------------------------------


def measure_steps(options: Options, size: Size, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each contestant, of the slower rank, one figure a round."""
    data = prepare(options, size, BATCHES, folder)
    job = {"kind": "steps", "flags": flags(size, folder), "data": list(map(str, data)), "folder": str(folder)}
    said = run_ranks(job | {"local_batch": size.local_batch, "rounds": options.rounds}, folder)
    return {name: list(map(max, *(rank[name] for rank in said))) for name in said[0]}


def step_rows(taken: Mapping[str, Sequence[float]], size: Size) -> list[Row]:
    """Return the rows on steps and windows of the usual size."""
    step = [max(alone / BATCHES, exchange) for alone, exchange in zip(taken["alone"], taken["exchange"], strict=True)]
    ours = [seconds / BATCHES for seconds in taken["ours"]]
    window = [sum(pair) for pair in zip(taken["alone, window"], taken["exchange"], strict=True)]
    said = {"limit": step, "ours": ours, "exchange": taken["exchange"]}
    windows = {"limit": window, "ours": taken["window"]}
    return [
        Row("C11", "limit / step of two ranks", ratios(step, ours), REACHED, note=f"{size}: {milliseconds(said)}"),
        Row("C12", "limit / window of four batches", ratios(window, taken["window"]), REACHED,
            note=f"{size}: {milliseconds(windows)}"),
        saved_row("C12a", taken, size),
    ]  # fmt: skip


def saved_row(key: str, taken: Mapping[str, Sequence[float]], size: Size) -> Row:
    """Return the row on what it would cost to exchange gradients after every batch of a window."""
    figures = {"ours": taken["window"], "every batch": taken["every batch"], "exchange": taken["exchange"]}
    found = ratios(taken["every batch"], taken["window"])
    return Row(key, "exchange in every batch / window", found, note=f"{size}: {milliseconds(figures)}")


def count_bytes(data: Path, compress: str, folder: Path, inside: Sequence[Sequence[str]]) -> list[Counted]:
    """Train an epoch on two machines and return what each sent."""
    folder.mkdir()
    own = {"data": str(data), "batch_size": RANKS, "nbs": RANKS, "project": str(folder / "runs")}
    size = Size(USUAL.cfg, 64, 1)
    job = {"kind": "bytes", "flags": flags(size, folder) | own | {"grad_compress": compress}}
    return [Counted(**rank) for rank in run_ranks(job, folder, inside, ADDRESSES[0])]


def byte_row(key: str, compress: str, said: Sequence[Counted]) -> Row:
    """Return the row on the bytes of an epoch: those of all ranks against what a ring of them has to send."""
    one, width = said[0], {"off": 4, "bf16": 2}[compress]
    limit = 2 * (RANKS - 1) / RANKS * one.parameters * width * one.steps + one.buffer_bytes
    sent, packets = sum(rank.sent for rank in said), sum(rank.packets for rank in said)
    note = (
        f"{one.steps} steps: {sent / 1e6:.1f} MB, at least {RANKS * limit / 1e6:.1f}; with the averaged weights that "
        f"validation needs; headers {packets * HEADERS / sent:.2%} (4.4% in packets of 1,514 bytes)"
    )
    what = f"bytes / least, gradients in {'fp32' if compress == 'off' else compress}"
    return Row(key, what, (sent / RANKS / limit,), WIRE, at_least=False, note=note)


def byte_rows(options: Options, folder: Path) -> list[Row]:
    """Return the rows on bytes; none where there are no network namespaces."""
    data = prepare(options, Size(USUAL.cfg, 64, 1), STEPS, folder)[-1]
    try:
        with cable() as inside:
            return [
                byte_row(key, compress, count_bytes(data, compress, folder / compress, inside))
                for key, compress in (("C13", "off"), ("C13a", "bf16"))
            ]
    except OSError as error:
        print(f"C13 is left out: {error}", file=sys.stderr)
        return []


def measure(options: Options) -> list[Row]:
    """Return all rows.

    Raises:
        UserError: there are too few cores, or a rank failed.
    """
    if len(cores()) < RANKS:
        raise UserError(f"{RANKS} ranks need {RANKS} cores to themselves, and this process may use {len(cores())}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = step_rows(measure_steps(options, USUAL, folder / "usual"), USUAL)
        rows.append(saved_row("C12b", measure_steps(options, SENDING, folder / "sending"), SENDING))
        return rows + byte_rows(options, folder / "bytes")


if __name__ == "__main__":
    run_cli(lambda: run_group(measure, __doc__))
