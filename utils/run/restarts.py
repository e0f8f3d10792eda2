"""Runs whose launcher starts them again: which run a new life goes on with, and when to give up.

A launcher that restarts its workers (``--max-restarts``, torchrun's own too) gives them the same command line. The
first life of a run notes in its folder which launcher it belongs to, so that the next ones find it.
"""

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from utils.config.flags import TrainConfig
from utils.core.errors import DivergedError
from utils.core.whole_files import write_whole
from utils.run.folder import RESUME, claim, create_run_dir, forget_end, prepare_weights_dir, take_along

RECORD = ".launch.json"
NO_ID = "none"  # torchrun's run id where nobody gave one
PATIENCE = 3  # restarts in a row without a single step before a run is given up


@dataclass
class Life:
    """A process of a run, as its launcher started it.

    Attributes:
        run_id: of the launch, the same on all machines and in all lives; "" if it has none of its own.
        agent: the launcher's process on this machine, which outlives the workers; "" where it can't be told.
        restarts: lives before this one.
    """

    run_id: str
    agent: str
    restarts: int


def this_life() -> Life:
    """Read this process's place among the lives of its run from what the elastic launcher sets."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", NO_ID)
    return Life("" if run_id == NO_ID else run_id, _agent(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def _agent() -> str:
    """Name the parent process so that no other one, at any time, has the same name."""
    with contextlib.suppress(OSError, IndexError):
        pid = os.getppid()
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{platform.node()} {pid} {started}"
    return ""


@dataclass
class Record:
    """What a run folder knows of the launcher that its run belongs to.

    Attributes:
        run_id: see `Life`.
        agent: see `Life`; of the first rank's machine.
        steps: optimizer steps that were done at the start of each life.
    """

    run_id: str
    agent: str
    steps: list[int] = field(default_factory=list)


def find_own_run(project: str, life: Life) -> Path | None:
    """Return the folder that the life before wrote to; None if it did not get as far."""
    if life.restarts == 0:
        return None
    records = {folder: record for folder in Path(project).glob("*") if (record := _read(folder))}
    own = [folder for folder, record in records.items() if life.agent and record.agent == life.agent]
    if not own:  # the first rank may have moved to another machine; there launches have their ids only, maybe old ones
        own = [
            folder
            for folder, record in records.items()
            if life.run_id == record.run_id != "" and (not life.agent or _machine(record.agent) != _machine(life.agent))
        ]
    return max(own, key=lambda folder: (folder / RECORD).stat().st_mtime, default=None)


def _machine(agent: str) -> str:
    return agent.split(" ")[0]


def begin_life(run_dir: Path, life: Life, step: int) -> None:
    """Note that a life of a run begins; rank 0's work.

    Args:
        run_dir: of the run.
        life: of this process.
        step: optimizer steps that are done.

    Raises:
        DivergedError: the last lives did not get a single step further.
    """
    record = _read(run_dir) if life.restarts else None
    record = Record(life.run_id, life.agent, record.steps if record else [])
    record.steps.append(step)
    with contextlib.suppress(OSError):  # of a full disk: the run is not found again, but runs
        write_whole(run_dir / RECORD, json.dumps(asdict(record)))
    last = record.steps[-PATIENCE - 1 :]
    if len(last) > PATIENCE and len(set(last)) == 1:
        raise DivergedError(
            f"{run_dir}: {PATIENCE} restarts did not get beyond optimizer step {step}; it would fail again. The errors "
            "above say why"
        )


def open_run_dir(config: TrainConfig, resumed: Mapping[str, Any] | None) -> Path:
    """Return the run's folder, a new one unless a run goes on in its own; it is this process's own from here on."""
    own = Path(resumed["run_dir"]) if resumed is not None and resumed["run_dir"] else None
    run_dir = own or create_run_dir(config.project, config.name, config.exist_ok)
    claim(run_dir)
    if own is None:
        forget_end(run_dir)
        prepare_weights_dir(run_dir / "weights")
    if own is None and resumed is not None:
        origin, best = (Path(resumed[key]) if resumed[key] else None for key in ("origin", "best"))
        take_along(origin, Path(resumed["path"]), best, run_dir)
    begin_life(run_dir, this_life(), 0 if resumed is None else resumed["state"]["step"])
    return run_dir


def was_stopped(run_dir: Path) -> bool:
    """Whether the life before was asked to stop: it left the file RESUME, which is newer than its beginning."""
    try:
        return (run_dir / RESUME).stat().st_mtime_ns >= (run_dir / RECORD).stat().st_mtime_ns
    except OSError:
        return False


def _read(run_dir: Path) -> Record | None:
    try:
        content: Any = json.loads((run_dir / RECORD).read_text())
    except (OSError, ValueError):
        return None
    expected: Mapping[str, type] = {"run_id": str, "agent": str, "steps": list}
    if not isinstance(content, dict) or content.keys() != expected.keys():
        return None
    if not all(isinstance(content[name], kind) for name, kind in expected.items()):
        return None
    return Record(**content) if all(isinstance(step, int) for step in content["steps"]) else None
