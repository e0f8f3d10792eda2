"""A call from Python, written down for worker processes, and what comes back: files in a folder that nobody else reads.

Nothing of the caller's script is run again in a worker, unless a callback is defined there.
"""

import contextlib
import hashlib
import json
import os
import pickle
import runpy
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.core.errors import UserError
from utils.core.whole_files import write_whole

DIGEST = "LOCKSTEP_JOB_SHA256"  # in the environment of those who may read the job
JOB, OUTCOME, MISTAKE = "job.pickle", "outcome.json", "mistake.json"
FOLDER = "lockstep-job-"  # how its name begins
WEIGHTS = "weights.txt"  # the file that the weights of a call are from
MAIN = "__mp_main__"  # the name that a script goes by where it is imported by another process
GUARD = """put it behind a guard

    if __name__ == "__main__":
        YOLO(...).train(..., device="0,1")

or move the callback's class to a module of its own"""


@dataclass(frozen=True)
class Job:
    """What a worker needs to know of a call.

    Attributes:
        method: of `YOLO`, "train" or "val".
        given: flags by field name.
        callbacks: a pickle of the caller's list of them.
        main: file or module (behind "-m ") of the caller's script if something in them is defined there, else "".
        search: the caller's ``sys.path``.
        argv: the caller's ``sys.argv``, which its script may read when it is imported.
        caller: process id.
    """

    method: str
    given: dict[str, Any]
    callbacks: bytes
    main: str
    search: list[str]
    argv: list[str]
    caller: int


def shown_weights(path: str) -> str:
    """Return what messages and files call weights: those that travel in the folder of a call as their own file."""
    name = Path(path).parent / WEIGHTS
    return name.read_text() if name.parent.name.startswith(FOLDER) and name.exists() else path


def name_weights(folder: Path, own: str) -> None:
    """Note, in the folder of a call, which file the weights are from that travel in it."""
    (folder / WEIGHTS).write_text(own)


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """A folder of this user's alone, removed at the end whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER))  # mode 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_job(folder: Path, method: str, given: Mapping[str, Any], callbacks: Sequence[object]) -> dict[str, str]:
    """Write a call into its folder.

    Args:
        folder: of `job_folder`.
        method: of `YOLO`, "train" or "val".
        given: flags by field name.
        callbacks: picklable ones.

    Returns:
        Environment variables for those who are to read it.

    Raises:
        UserError: a callback is defined where no other process can import it.
    """
    pickled = pickle.dumps(list(callbacks))
    main = _main_script() if b"__main__" in pickled else ""  # a class or function is pickled as its module and name
    data = pickle.dumps(Job(method, dict(given), pickled, main, list(sys.path), list(sys.argv), os.getpid()))
    (folder / JOB).write_bytes(data)
    return {DIGEST: hashlib.sha256(data).hexdigest()}


def read_job(folder: Path) -> Job:
    """Read a call; only what the process that started this one has written.

    Raises:
        UserError: the file is another one, or none.
    """
    try:
        data = (folder / JOB).read_bytes()
    except OSError as error:
        raise UserError(f"{folder / JOB} can't be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != os.environ.get(DIGEST):
        raise UserError(f"{folder / JOB} is not the job that this process was started for")
    job: Job = pickle.loads(data)
    return job


def load_callbacks(job: Job) -> list[Any]:
    """Make the caller's callbacks; imports the script that they are defined in, if it is the caller's own.

    Raises:
        UserError: the script trains as it is imported, or ends its process.
    """
    sys.path[:], sys.argv[:] = job.search, job.argv
    if job.main:
        module = types.ModuleType(MAIN)
        sys.modules[MAIN] = module
        try:
            content = (
                runpy.run_module(job.main.removeprefix("-m "), run_name=MAIN, alter_sys=True)
                if job.main.startswith("-m ")
                else runpy.run_path(job.main, run_name=MAIN)
            )
        except SystemExit as error:
            raise UserError(
                "a callback is defined in the script that trains, so every worker imports that script, and there it "
                f"ended the process (sys.exit({error.code!r})): {GUARD}"
            ) from None
        module.__dict__.update(content)
        sys.modules["__main__"] = module
    callbacks: list[Any] = pickle.loads(job.callbacks)
    return callbacks


def refuse_to_recurse() -> None:
    """Stop a script that trains again while a worker imports it.

    Raises:
        UserError: names the missing guard.
    """
    if MAIN in sys.modules and DIGEST in os.environ:
        raise UserError(
            "a callback is defined in the script that trains, so every worker imports that script, and the training "
            f"in it must not start again: {GUARD}"
        )


def _main_script() -> str:
    """Return where other processes find the caller's script."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return f"-m {spec.name}"
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise UserError(
            "callbacks: a class of theirs is defined in an interactive session, where workers can't find it; put it "
            "into a module (a .py file) and import it, or use a built-in logger by name"
        )
    return str(Path(file).resolve())


def write_outcome(folder: Path, name: str, content: Any) -> None:
    """Write what comes back, whole or not at all."""
    write_whole(folder / name, json.dumps(content), durable=False)


def read_outcome(folder: Path, name: str) -> Any:
    """Read what came back; None if nothing did."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None
