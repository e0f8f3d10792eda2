"""A look at where the time of a few training steps goes (``--profile``), by PyTorch's profiler."""

import contextlib
import gzip
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile, schedule

from utils.core.logging import get_logger
from utils.dist.place import DistEnv

WAIT, WARMUP, ACTIVE = 2, 2, 4  # batches: the first ones are slow; the profiler's own first ones as well; these count
HEAVIEST = 10  # rows of the table
LARGE = 32 * 2**20  # bytes of a trace that is better compressed


def no_step() -> None:
    """Do nothing, after a batch that nobody looks at."""


@contextlib.contextmanager
def profiling(wanted: bool, env: DistEnv, run_dir: Path, batches: int) -> Iterator[Callable[[], None]]:
    """Look at some batches of the first epoch of a run in one process; the training is the same with it.

    Writes ``profile/trace.json`` (with ``.gz`` behind it if it is large), for Perfetto or chrome://tracing, and
    ``profile/operators.txt``, which is printed too; where a life of the run before has left these, ``profile2/``.

    Args:
        wanted: ``--profile``.
        env: this rank's place.
        run_dir: of the run.
        batches: of the epoch that comes, at least one; if they are few the profiler waits for less.

    Yields:
        What is to be called after each batch, of later epochs too.
    """
    if wanted and env.world_size > 1:
        get_logger().warning(f"--profile is ignored: it looks at one process, and {env.world_size} train together")
    if not wanted or env.world_size > 1:
        yield no_step
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of its stages, and on a CPU that there is no GPU
    active = min(ACTIVE, max(batches - 1, 1))
    warmup = min(WARMUP, batches - active)
    wait = min(WAIT, batches - active - warmup)

    def written(profiler: profile) -> None:
        folder = _new_folder(run_dir)
        trace = _write_trace(profiler, folder)
        table = operator_table(profiler.key_averages(), env.device.type == "cuda", HEAVIEST)
        (folder / "operators.txt").write_text(table + "\n")
        first, last = wait + warmup + 1, wait + warmup + active
        shown = f"batches {first} to {last}" if last > first else f"batch {last}"
        get_logger().info(f"profile     {shown} of this run, in {trace}\n{table}")

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (env.device.type == "cuda")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single batch PyTorch warns that it was not warmed up
        plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    # acc_events: the events of all cycles, of which there is one; without it PyTorch 2.10 warns that there may be more.
    with profile(activities=activities, schedule=plan, on_trace_ready=written, acc_events=True) as profiler:
        yield profiler.step


def _new_folder(run_dir: Path) -> Path:
    """Make the folder ``profile``; ``profile2`` and so on where a run was resumed and looked at again."""
    folder, number = run_dir / "profile", 1
    while folder.exists():
        number += 1
        folder = run_dir / f"profile{number}"
    folder.mkdir()
    return folder


def _write_trace(profiler: profile, folder: Path) -> Path:
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    if path.stat().st_size < LARGE:
        return path
    packed = path.with_name("trace.json.gz")
    with path.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    path.unlink()
    return packed


def operator_table(events: EventList, on_cuda: bool, rows: int) -> str:
    """Return the heaviest operators with their own time, without that of the operators they call.

    Args:
        events: averaged by name.
        on_cuda: count the time of the kernels that an operator starts, not the host's.
        rows: most lines below the heading.
    """
    time = "self_device_time_total" if on_cuda else "self_cpu_time_total"  # microseconds
    # The profiler's marks of whole steps are no operators; kernels are counted by the operators that start them.
    operators = [
        event for event in events
        if event.device_type == torch.autograd.DeviceType.CPU and not event.is_user_annotation
    ]  # fmt: skip
    total = sum(getattr(event, time) for event in operators) or 1.0
    heaviest = sorted(operators, key=lambda event: getattr(event, time), reverse=True)[:rows]
    lines = [f"{'operator':<50} {'CUDA' if on_cuda else 'CPU'} time, ms   share   calls"]
    for event in heaviest:
        own = getattr(event, time)
        lines.append(
            f"{event.key[:50]:<50} {own / 1e3:>{len('CPU time, ms') + on_cuda}.1f} {own / total:>7.1%} {event.count:>7}"
        )
    return "\n".join(lines)
