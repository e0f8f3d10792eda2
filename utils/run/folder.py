"""Run folders: where one is made, what describes it, and how it is found again and gone on with."""

import contextlib
import errno
import functools
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from utils.config.yaml_files import ROOT, dump_yaml
from utils.core.errors import NotWrittenError, UserError
from utils.core.signals import OURS
from utils.core.whole_files import copy_whole, write_whole
from utils.dist.place import dist_env

RESUME = "RESUME"  # left by a run that was stopped and can go on
LOCK = ".lock"
DESCRIPTION = "opt.yaml"  # every flag; a run writes it as it starts
FACTS = "environment.json"  # the rest of what describes a run
FINISHED = "finished"  # among the facts, of a run of which nothing is left to do: when it ended
TAKEN_ALONG = ("results.*", "events.out.tfevents.*", "*.jpg", "*.png")  # by a run that goes on in another folder
REPORTED_PACKAGES = ("torch", "torchvision", "numpy", "opencv-python", "opencv-python-headless", "pandas", "matplotlib")


def create_run_dir(project: str, name: str, exist_ok: bool = False) -> Path:
    """Make the folder of a new run.

    Args:
        project: parent folder, made if it is not there.
        name: of the run; with a number behind it if that is taken: exp, exp2, exp3.
        exist_ok: take the folder as it is, even if there is one.

    Returns:
        The folder. Two runs that start at once get two of them.

    Raises:
        UserError: the folder can't be made.
    """
    run_dir = first = Path(project) / name
    number = 1
    try:
        first.parent.mkdir(parents=True, exist_ok=True)  # by itself: a link to nowhere is not a run that is there
        while True:
            try:
                run_dir.mkdir(exist_ok=exist_ok)
                return run_dir
            except FileExistsError:
                if exist_ok:
                    raise
                number += 1
                run_dir = first.with_name(f"{first.name}{number}")
    except OSError as error:
        raise UserError(
            f"--project {project}: the run folder {run_dir} can't be made ({error.strerror}); "
            "choose a folder you can write to"
        ) from error


def write_description(
    run_dir: Path, config: Mapping[str, Any], hyp: Mapping[str, Any], plan: Mapping[str, Any]
) -> None:
    """Write what it takes to repeat a run: ``opt.yaml``, ``hyp.yaml`` and ``environment.json``.

    Args:
        run_dir: folder of the run.
        config: every flag with its value.
        hyp: every hyperparameter with its value.
        plan: what follows from them: batch per rank, accumulation and the like.
    """
    write_yaml(run_dir / DESCRIPTION, config)
    write_yaml(run_dir / "hyp.yaml", hyp)
    facts = {"command": command(), "versions": versions(), "platform": platform.platform(), "plan": dict(plan)}
    (run_dir / FACTS).write_text(json.dumps(facts, indent=2) + "\n")


def say_finished(run_dir: Path) -> None:
    """Note in the description of a run that nothing of it is left to do: a bare ``--resume`` passes over it."""
    _note_end(run_dir, {FINISHED: time.strftime("%Y-%m-%d %H:%M:%S")})


def is_finished(run_dir: Path) -> bool:
    """Whether the description of a run says that it is finished; older ones never do."""
    return FINISHED in _facts(run_dir)


def _facts(run_dir: Path) -> dict[str, Any]:
    try:
        facts = json.loads((run_dir / FACTS).read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _note_end(run_dir: Path, end: Mapping[str, str]) -> None:
    facts = {key: value for key, value in _facts(run_dir).items() if key != FINISHED} | dict(end)
    with contextlib.suppress(OSError):  # of a full disk: --resume reads the checkpoint then
        write_whole(run_dir / FACTS, json.dumps(facts, indent=2) + "\n")


def write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    """Write a mapping in the order it has."""
    path.write_text(dump_yaml(values), encoding="utf-8")


def command() -> str:
    """Return the command line of this process, as a shell would take it."""
    return shlex.join([Path(sys.executable).name, *sys.argv])


def versions() -> dict[str, str]:
    """Return the versions of Lockstep, Python and what it stands on; packages that are not there are left out."""
    return dict(_versions())


@functools.cache  # reading them takes longer than all else that a checkpoint costs
def _versions() -> dict[str, str]:
    found = {"lockstep": lockstep_version(), "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def lockstep_version() -> str:
    """Return the version that pyproject.toml states."""
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith("version"):
            return line.split('"')[1]
    return "unknown"


def prepare_weights_dir(weights_dir: Path) -> None:
    """Make the folder of the checkpoints, without those of another run that was there (``--exist-ok``).

    They would else pass for this run's: a best.pt of another network, a last.prev.pt to resume from.

    Raises:
        UserError: one of them can't be removed, or the folder can't be made.
    """
    path = weights_dir
    try:
        weights_dir.mkdir(exist_ok=True)
        for path in [*weights_dir.glob("last*.pt"), *weights_dir.glob("best.pt"), *weights_dir.glob("epoch*.pt")]:
            path.unlink()
    except OSError as error:
        what = "can't be made" if path == weights_dir else "of another run can't be removed"
        raise UserError(f"--name: {path} {what} ({error.strerror}); write elsewhere with another --name") from error


def find_resumable(resume: str, project: str) -> list[tuple[Path | None, Path]]:
    """Find the runs that ``--resume`` may mean.

    Args:
        resume: a run folder, a checkpoint file, or "" for the newest run.
        project: where runs are kept, searched for the newest.

    Returns:
        Run folder and checkpoint: the one that was named, or all, newest first. The folder is None for a file that
        lies in no run's ``weights``.

    Raises:
        UserError: there is none.
    """
    if resume:
        path = Path(resume).absolute()
        if os.path.isfile(path):
            run_dir = path.parent.parent
            return [(run_dir if path.parent.name == "weights" and (run_dir / DESCRIPTION).exists() else None, path)]
        if not _checkpoints(path):
            if os.path.isfile(path / DESCRIPTION):
                raise UserError(f"--resume {resume}: nothing was saved there yet; start the run again")
            raise UserError(f"--resume {resume}: no weights/last.pt there; name a run folder such as {project}/exp")
        return [(path, path / "weights" / "last.pt")]
    saved = {
        run: max(path.stat().st_mtime for path in found)
        for run in Path(project).glob("*")
        if (found := _checkpoints(run))
    }
    if not saved:
        raise UserError(f"--resume: no run with weights/last.pt under {project}; name a run folder: --resume FOLDER")
    return [(run, run / "weights" / "last.pt") for run in sorted(saved, key=saved.__getitem__, reverse=True)]


def how_to_go_on(run_dir: Path) -> list[str]:
    """Return the line that tells how to go on with a run, none where nothing was saved."""
    return [f"go on with: {resume_command(run_dir)}"] if has_checkpoint(run_dir) else []


def going_on(run_dir: Path, stopped: bool) -> list[str]:
    """For a launcher whose workers are gone: `how_to_go_on`; if they were stopped, RESUME is left as well."""
    if stopped:
        write_resume_file(run_dir)
    return how_to_go_on(run_dir)


def resume_command(run_dir: Path) -> str:
    """Return the command that goes on with a run as it was started: by itself, or by a launcher on as many ranks."""
    env, line = dist_env(), shlex.join([script("train.py"), "--resume", str(run_dir)])
    if not env.launched or OURS in os.environ:  # the devices are among the run's settings
        return f"python {line}"
    machines = env.world_size // env.local_world_size
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"python {line}  # by the launcher of before, on {env.world_size} ranks"
    if machines == 1:
        return f"torchrun --standalone --nproc_per_node {env.world_size} {line}"
    torchrun = f"torchrun --nnodes {machines} --nproc_per_node {env.local_world_size}"
    return f"{torchrun} {line}  # on each machine, with the --node_rank, --master_addr and --master_port of before"


def script(name: str) -> str:
    """Return the path of one of our scripts for a command to be typed: as the one that runs was, else in full."""
    beside = os.path.join(os.path.dirname(sys.argv[0]), name)
    return beside if Path(beside).resolve() == ROOT / name else str(ROOT / name)


def has_checkpoint(run_dir: Path) -> bool:
    """Whether there is something to resume from."""
    return bool(_checkpoints(run_dir))


def write_resume_file(run_dir: Path) -> None:
    """Leave the file RESUME, which tells a scheduler that the run was stopped and can go on, and how, if it can."""
    if not has_checkpoint(run_dir):
        return
    with contextlib.suppress(OSError):  # of a full disk; the exit status says the same
        (run_dir / RESUME).write_text(f"{resume_command(run_dir)}\n")


# Open files that hold this process's locks. The system keeps them for the process, and gives one up when any of its
# files on that path is closed: so there is one list of them for the process as well.
_claims: dict[Path, IO[str]] = {}


def claim(run_dir: Path) -> None:
    """Make a run folder this process's own until it is released or the process ends, however it ends.

    On a file system without locks nothing is claimed.

    Raises:
        UserError: another run writes there.
    """
    if fcntl is None:
        return
    release(run_dir)
    try:
        file = (run_dir / LOCK).open("a+")
    except OSError:  # what can't be written to is found where it is written
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a lock of the process: its children don't hold it
    except OSError as error:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(
                f"{run_dir} is in use by another run ({owner}); wait for its end, or give a new run another --name"
            ) from None
        return
    _claims[run_dir.resolve()] = file
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(f"{_owner()}\n")
        file.flush()


def _owner() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def check_claim(run_dir: Path) -> None:
    """Check that a folder which this process has claimed is still its own.

    A machine that stood still may have lost its lock on a file server meanwhile, and its run gone on elsewhere.

    Raises:
        NotWrittenError: another run has claimed it since.
    """
    file, place = _claims.get(run_dir.resolve()), run_dir / LOCK
    if file is None:
        return
    with contextlib.suppress(OSError):
        own = os.path.samestat(os.fstat(file.fileno()), place.stat())
        # To open its own file again, and close it, would give up the lock; see fcntl(2).
        owner = (os.pread(file.fileno(), 1000, 0).decode() if own else place.read_text()).strip()
        if owner not in ("", _owner()):
            raise NotWrittenError(f"{run_dir} was taken over by another run ({owner}); this one writes nothing more")


def release(run_dir: Path) -> None:
    """Let others have a run folder."""
    if run_dir.resolve() in _claims:
        with contextlib.suppress(OSError):  # a full disk did not take what is still to be written; it is closed anyway
            _claims.pop(run_dir.resolve()).close()


@contextlib.contextmanager
def claims_released() -> Iterator[None]:
    """Context at whose end all folders that were claimed in it are free, however it ends."""
    before = set(_claims)
    try:
        yield
    finally:
        for run_dir in set(_claims) - before:
            release(run_dir)


def forget_end(run_dir: Path) -> None:
    """Remove what says that a run was stopped, or is finished: it goes on."""
    with contextlib.suppress(OSError):
        (run_dir / RESUME).unlink(missing_ok=True)
    if is_finished(run_dir):
        _note_end(run_dir, {})


def take_along(origin: Path | None, checkpoint: Path, best: Path | None, run_dir: Path) -> None:
    """Copy what a run needs to go on in a new folder, which is removed again if that fails.

    Args:
        origin: folder of the run so far, None if nobody knows.
        checkpoint: to go on from; becomes last.pt.
        best: its best weights so far, if there are any.
        run_dir: the new folder; has a folder for weights.

    Raises:
        UserError: the disk did not take it.
    """
    kept = [path for pattern in TAKEN_ALONG for path in origin.glob(pattern)] if origin else []
    copies = [(path, run_dir / path.name) for path in kept]
    if best is not None:
        copies.append((best, run_dir / "weights" / "best.pt"))
    try:
        for source, target in [*copies, (checkpoint, run_dir / "weights" / "last.pt")]:
            copy_whole(source, target)
    except OSError as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise UserError(
            f"--resume {checkpoint}: it can't be copied to {run_dir} ({error.strerror}); go on elsewhere with --project"
        ) from error


def _checkpoints(run_dir: Path) -> list[Path]:
    places = [run_dir / "weights" / name for name in ("last.pt", "last.prev.pt")]
    return [place for place in places if os.path.isfile(place)]  # not where a name is too long
