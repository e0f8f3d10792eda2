"""Checks of the machine before a run starts: OpenCV, the run folder, disk space.

Imports the standard library and `utils.core.errors` only, so that a missing system library is said before it is needed.
"""

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

if sys.platform != "win32":
    import resource

from utils.core.errors import UserError, report

FILES, FILES_PER_PROCESS = 16, 7  # of a run, and of it for each process that loads images; counted on Linux
HEADLESS = "opencv-python-headless"


def check_opencv() -> None:
    """Import OpenCV, which needs libraries that bare servers lack (libGL).

    Without it the process ends with status 2, and the package that needs no such library on stderr.
    """
    try:
        importlib.import_module("cv2")
    except ImportError as error:
        message = f"OpenCV is not installed; run: pip install {HEADLESS}"
        if error.name != "cv2" or not isinstance(error, ModuleNotFoundError):
            message = (
                f"OpenCV can't be loaded: {error}; the package {HEADLESS} needs no graphics libraries: "
                f"pip uninstall -y opencv-python && pip install --force-reinstall {HEADLESS}"
            )
        sys.exit(report(UserError(message)))


def check_run_folder(run_dir: Path, exist_ok: bool) -> None:
    """Check that a run folder can be made, or used if it is there, without making it.

    Args:
        run_dir: --project / --name.
        exist_ok: whether the folder is used if it is there; else a new one is made beside it.

    Raises:
        UserError: a file is in its place, or the folder it goes to can't be written.
    """
    if exist_ok and run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--project / --name: {run_dir} is a file, not a folder; choose another name")
    there = _nearest_existing(run_dir if exist_ok else run_dir.parent)
    if not there.is_dir() or not _may_write(there):
        why = "can't be written to" if there.is_dir() else "is a file"
        raise UserError(
            f"--project {run_dir.parent}: the run folder {run_dir} can't be made, for {there} {why}; choose a folder "
            "you can write to"
        )
    if exist_ok and not _may_write(run_dir / "weights"):
        raise UserError(f"--project / --name: {run_dir / 'weights'} can't be written to; choose another name")


def check_resumed_folder(run_dir: Path) -> None:
    """Check that a run that goes on can write to its folder.

    Raises:
        UserError: it can't.
    """
    for folder in (run_dir, run_dir / "weights"):
        if not _may_write(folder):
            raise UserError(
                f"--resume {run_dir}: {folder} can't be written to; go on in a new folder, under one that you can "
                "write to, with --project FOLDER"
            )


def _may_write(folder: Path) -> bool:
    if not folder.exists():
        return True
    return os.access(folder, os.W_OK | os.X_OK) and (shutil.disk_usage(folder).total > 0 or _takes_files(folder))


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made: root may write to /proc, which is no disk and takes none."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_disk(run_dir: Path, needed: int) -> None:
    """Check that there is room for the checkpoints of a run.

    Args:
        run_dir: of the run; need not be there yet.
        needed: bytes.

    Raises:
        UserError: says how much is needed and how much there is.
    """
    usage = shutil.disk_usage(_nearest_existing(run_dir.resolve()))
    if usage.total and needed > usage.free:  # 0: it does not tell
        raise UserError(
            f"--project {run_dir.parent}: the checkpoints of this run need about {needed / 1e6:,.0f} MB, "
            f"{usage.free / 1e6:,.0f} MB are free on that disk; free some, or choose a --project on another disk"
        )


def check_open_files(processes: int) -> None:
    """Check that a run may open as many files and pipes as it needs; not on Windows, which has no such limit.

    Args:
        processes: that are to load images.

    Raises:
        UserError: says how many are needed, and how many are allowed.
    """
    if sys.platform == "win32" or not os.path.isdir("/dev/fd"):
        return
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + FILES + FILES_PER_PROCESS * processes
    if allowed not in (resource.RLIM_INFINITY, -1) and needed > allowed:
        raise UserError(
            f"this run needs about {needed} open files, {allowed} are allowed; allow more, for example with ulimit -n "
            f"{max(1024, 2 * needed)}{', or use fewer --workers' if processes else ''}"
        )


def _nearest_existing(path: Path) -> Path:
    """Return a path, or the first folder above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())
