"""One worker for each of several devices, started and watched by torch's elastic launcher.

A worker is the same script with the same command line; that it is one of several it reads from its environment, as
under a launcher that was typed by hand.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from utils.core.devices import parse_device
from utils.core.errors import (
    NO_PROGRESS,
    RESUMABLE,
    USER_ERROR,
    flush_output,
    say_on_stderr,
)
from utils.core.heartbeat import STALLED
from utils.core.signals import BEGAN, OURS, STARTED
from utils.dist.meeting import LOST, TIMED_OUT
from utils.dist.place import DistEnv
from utils.dist.worker import RUN, STOPPED, last_line, read_traceback

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")  # others kill the launcher, not its workers
GRACE = 60  # seconds that workers get to save and leave when they are told to stop, before they are killed
LOST_PEER = (*LOST, "NCCL error")
LOGS = "lockstep-launch-"


@dataclass(frozen=True)
class Failure:
    """How a launch ended that did not succeed.

    Attributes:
        status: exit status for the launcher.
        rank: of the process that failed first, None if it was the launcher that was told to stop.
        text: what to tell; "" if a worker has said it already: a mistake of the user, how to go on with a stopped run.
    """

    status: int
    rank: int | None
    text: str


def worker_devices(flag: str | int | Sequence[str | int], env: DistEnv, least: int = 2) -> list[torch.device]:
    """Return the devices that need a worker each: [] for fewer than that, and for a process that is a worker itself.

    Args:
        flag: see `utils.core.devices.parse_device`.
        env: this process's place.
        least: number of devices from which workers are started.

    Raises:
        UserError: the flag is wrong.
    """
    if env.launched:
        return []
    devices = parse_device(flag, torch.cuda.device_count(), torch.backends.mps.is_available())
    return devices if len(devices) >= least else []


def launch(
    command: Sequence[str],
    devices: Sequence[torch.device],
    folder: Path | None = None,
    max_restarts: int = 0,
    going_on: Callable[[Path, bool], list[str]] = lambda run_dir, stopped: [],
) -> Failure | None:
    """Run a Python script once for each device, and wait for the end of all. Takes over signals: main thread only.

    If one fails all others are ended, and maybe all are started again. The port is a free one, so that any number of
    runs share a machine.

    Args:
        command: script and arguments, as behind ``python``.
        devices: as many workers.
        folder: for small files, to be removed by the caller; None makes one and removes it.
        max_restarts: how often all workers are started again after one has failed; see `utils.run.restarts`.
        going_on: gives the lines that tell how to go on with the run of a folder, and notes there whether it was
            stopped.

    Returns:
        None if all succeeded in the end.
    """
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it is said better below
    logs = folder or _log_folder()
    try:
        with variables_kept(_worker_variables(devices, max_restarts > 0)):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=len(devices),
                logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="127.0.0.1",
                max_restarts=max_restarts,
                signals_to_handle=",".join(_heeded(SIGNALS)),
            )
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        failure = explain(error.failures, _note(logs), [last_line(text) for text in _tracebacks(_last_life(logs))])
        if failure.status == RESUMABLE and not any(
            _last_life(logs).rglob(STOPPED)
        ):  # before there was anything to save
            return replace(failure, text=f"rank {failure.rank} was told to stop; all other ranks were ended")
        return replace(failure, text="\n".join([failure.text, *_lines(logs, going_on)])) if failure.text else failure
    except SignalException as error:
        statuses = {int(path.read_text()) for path in _last_life(logs).rglob(STOPPED)}
        if statuses == {RESUMABLE}:  # its worker has said how to go on
            return Failure(RESUMABLE, None, "")
        if statuses:  # the error is said
            return Failure(min(statuses), None, "\n".join(_lines(logs, going_on)))
        name = signal.Signals(error.sigval).name
        said = f"stopped by {name}; so were the {len(devices)} workers"
        return Failure(128 + error.sigval, None, "\n".join([said, *_lines(logs, going_on, stopped=True)]))
    finally:
        if folder is None:
            shutil.rmtree(logs, ignore_errors=True)
    return None


def _heeded(names: Sequence[str]) -> list[str]:
    """Leave out signals that this system lacks, or that are ignored: nohup ignores SIGHUP."""
    found = [getattr(signal, name, None) for name in names]
    return [number.name for number in found if number and signal.getsignal(number) is not signal.SIG_IGN]


def _log_folder() -> Path:
    """Make a folder for the workers' error files; those of launchers that were killed are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{LOGS}*"):
        pid = old.name.removeprefix(LOGS).split("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists() and Path("/proc").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{LOGS}{os.getpid()}-"))


def _worker_variables(devices: Sequence[torch.device], restarts: bool) -> dict[str, str]:
    """Environment of the workers beside what the elastic launcher sets."""
    variables = {OURS: str(os.getpid()), STARTED: os.environ.get(STARTED, str(BEGAN))}
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE)  # read by LaunchConfig; torch 2.10 and 2.11 wait for 30 s
    variables["PYTHONUNBUFFERED"] = "1"  # what is said comes at once, also before a kill
    if restarts:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with a shared one they would wait for good
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = str(max(cores // len(devices), 1))
    if sys.platform == "win32":
        variables["USE_LIBUV"] = "0"  # torch for Windows is built without it
    return variables


@contextlib.contextmanager
def variables_kept(values: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set environment variables for a while, and take back what is set of others meanwhile.

    One by one, and only those that differ: other threads read them at any time.
    """
    before = dict(os.environ)
    os.environ.update(values or {})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _note(logs: Path) -> str:
    """Return what a watchdog has left for the launcher when it ended the workers' last life; "" if it did not."""
    return next((path.read_text() for path in sorted(_last_life(logs).glob(f"*/{STALLED}"))), "")


def _lines(logs: Path, going_on: Callable[[Path, bool], list[str]], stopped: bool = False) -> list[str]:
    """Return what `launch` is told to say of the workers' run, nothing where there is none."""
    return [line for run_dir in _run_dirs(logs) for line in going_on(run_dir, stopped)]


def _run_dirs(logs: Path) -> list[Path]:
    """Return the folder of the workers' run, [] where there is none or nothing of it is left to do."""
    newest = next(_last_life(logs).rglob(RUN), None)
    return [Path(os.fsdecode(newest.read_bytes()))] if newest else []


def _last_life(logs: Path) -> Path:
    """Return the folder of the workers' last life; ``logs`` if there was none."""
    lives = sorted(logs.rglob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    return [logs, *lives][-1]


def _tracebacks(life: Path) -> list[str]:
    """Return what the workers of a life have left of exceptions, by local rank; "" for one that left nothing."""
    return [read_traceback(path) for path in sorted(life.glob("*/error.json"))]


def explain(failures: Mapping[int, ProcessFailure], stalled: str = "", last_lines: Sequence[str] = ()) -> Failure:
    """Tell which worker failed first, and how.

    A worker that dies takes its connections along, so that others fail as well, sometimes before it is noticed itself:
    the first failure is looked for among those that are no lost connection.

    Args:
        failures: by rank, at least one.
        stalled: why a watchdog has killed all of them, if it did.
        last_lines: of the tracebacks of all workers, also of those that the launcher did not wait for.
    """
    in_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    causes = [item for item in in_time if not _lost_a_peer(item[1])] or in_time
    if _waited_in_vain(in_time[0][1]):  # one that does not answer is killed by the launcher in the end
        causes = in_time[:1]
    own = [item for item in causes if item[1].exitcode != -signal.SIGTERM] or causes  # ended by the launcher itself
    rank, failure = own[0]
    if failure.exitcode in (USER_ERROR, NO_PROGRESS, RESUMABLE):
        return Failure(failure.exitcode, rank, "")
    if stalled:
        return Failure(1, rank, stalled)
    if failure.exitcode < 0:
        killed = f"rank {rank} was killed by {failure.signal_name()}"
        hint = "; if nobody did that, the machine ran out of memory" if failure.exitcode == -9 else ""
        return Failure(128 - failure.exitcode, rank, f"{killed}{hint}; all other ranks were ended")
    text = _traceback(failure)
    if _lost_a_peer(failure) and not _waited_in_vain(failure):
        text += "another rank left in the middle of the run, without an error of its own\n"
    end = f"rank {rank} failed with status {failure.exitcode}; all other ranks were ended"
    alike = list(last_lines).count(last_line(text)) if text else 0
    if alike > 1:
        end = f"{alike} ranks failed with this error, rank {rank} with status {failure.exitcode}; all ranks were ended"
    return Failure(failure.exitcode, rank, f"{text}{end}")


def _traceback(failure: ProcessFailure) -> str:
    message: Any = failure.error_file_data.get("message", "")
    return str(message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else ""


def _lost_a_peer(failure: ProcessFailure) -> bool:
    text = _message(_traceback(failure))
    return any(words in text for words in LOST_PEER)


def _waited_in_vain(failure: ProcessFailure) -> bool:
    text = _message(_traceback(failure))
    return any(words in text for words in TIMED_OUT)


def _message(traceback_text: str) -> str:
    """Return what the last exception of a traceback says: NCCL's is in the first of several lines."""
    last = traceback_text.rpartition("Traceback (most recent call last):\n")[2]
    return "\n".join(line for line in last.splitlines() if not line.startswith("  "))  # those are places


def say(failure: Failure | None) -> int:
    """Print on stderr how a launch failed, if it did, and return the exit status for it."""
    flush_output()
    if failure and failure.text:
        say_on_stderr(f"\n{failure.text}")  # a progress bar may have left its line open
    return failure.status if failure else 0
