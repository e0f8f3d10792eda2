"""Data sets that are not there: fetched, unpacked, converted, and put in their place whole.

    python -m utils.data.fetch coco128.yaml yolov5s.pt      fetch now, for later without network

Archives lie beside the folder of the data set while they are fetched; one that was put there by hand is used as it is.
"""

import contextlib
import glob
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from utils.config.data_yaml import DataConfig, is_fetched, load_data, missing_paths
from utils.config.flags import SPLITS
from utils.config.published import Published, archive_at
from utils.core.errors import UserError, run_cli
from utils.core.heartbeat import beat
from utils.core.logging import get_logger
from utils.core.whole_files import temporary_path
from utils.data.archives import unpack
from utils.data.conversion import convert_coco, convert_voc
from utils.data.downloads import check_online, fetch, fetch_weights, file_name, locked

CONVERTERS = {"coco": convert_coco, "voc": convert_voc}
PIECE = 1 << 20


def ensure_data(data: DataConfig, splits: Sequence[str] = SPLITS) -> None:
    """Fetch a data set if some of its splits are not there and its YAML says from where; else do nothing.

    Args:
        data: of `load_data`.
        splits: that are needed.

    Raises:
        UserError: it can't be fetched, is not what its YAML says, or a script would have to run that nobody allowed.
    """
    if not is_fetched(data, splits):
        return
    home, lock = data.root.parent, data.root
    if data.path.is_relative_to(data.root):  # the YAML lies in the data set, whose folder is there already
        home, lock = data.root, data.root / "download"
    try:
        with locked(lock):
            if not missing_paths(data, splits):  # another process was faster
                return
            if data.script:
                _run_script(data)
            else:
                _fetch_all(data, home)
    except OSError as error:
        raise UserError(f"{data.path}: the data set can't be put into {data.root} ({error.strerror})") from error
    missing = missing_paths(data, splits)
    if missing:
        raise UserError(f"{data.path}: what download gave does not hold {missing[0]}; correct path, train, val or test")


def _fetch_all(data: DataConfig, home: Path) -> None:
    """Fetch the archives of a data set, and make it of them; the caller holds its lock."""
    for left in home.glob(f".{glob.escape(data.root.name)}.*.tmp"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    files: dict[Path, Published] = {home / file_name(address): archive_at(address) for address in data.download}
    if len(files) < len(data.download):
        raise UserError(f"{data.path}: download names two archives of the same name; put them into one")
    for path, file in files.items():
        if os.path.exists(path):
            get_logger().info(f"unpacking   {path}, which is there already")
            _check_digest(path, file)
    fetched = fetch(files, f"{data.path}: the data set")
    scratch = temporary_path(home / data.root.name)
    try:
        scratch.mkdir()
        for number, path in enumerate(files):
            unpack(path, scratch / str(number))
            _merge(scratch / str(number), scratch / "all")
        made = scratch / "all"
        for caches in list(made.rglob(".lockstep")):  # of whoever packed the archive, never used
            shutil.rmtree(caches, ignore_errors=True)
        if data.converter:
            made = scratch / "made"
            made.mkdir()
            CONVERTERS[data.converter](scratch / "all", made, data.names)
        _merge(made if data.converter else _top(made, data), data.root)
    except UserError as error:
        raise UserError(f"{data.path}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in fetched:
            path.unlink(missing_ok=True)


def _top(folder: Path, data: DataConfig) -> Path:
    """Return the folder of an archive that is the root of the data set: the one with its splits, or of its name."""
    below = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "__MACOSX")
    places = [folder / data.root.name, folder, *below]
    inside = [path.relative_to(data.root) for path in data.val if path.is_relative_to(data.root)]
    holds = [place for place in places if inside and all((place / path).exists() for path in inside)]
    return next(iter(holds), places[0] if places[0].is_dir() else folder)


def _merge(source: Path, target: Path) -> None:
    """Move a folder's content into another, made if it is not there; what is there stays as it is.

    Images come last: a data set whose images are there is taken to be whole.
    """
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return
    for path in sorted(source.iterdir(), key=lambda path: (path.name == "images", path.name)):
        if path.is_dir() and (target / path.name).is_dir():
            _merge(path, target / path.name)
        elif not os.path.lexists(target / path.name):
            path.rename(target / path.name)


def _check_digest(path: Path, file: Published) -> None:
    """Refuse an archive, put there by hand, that is not the published one."""
    kind, _, wanted = file.digest.partition(":")
    if not kind:
        return
    found = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as opened:
        while piece := opened.read(PIECE):
            beat()
            found.update(piece)
    if found.hexdigest() != wanted:
        raise UserError(f"{path} is damaged or not the published file: its {kind} is {found.hexdigest()}; remove it")


def _run_script(data: DataConfig) -> None:
    """Run the script of a data YAML, if the user has allowed that; shows it in any case."""
    lines = ["".join(c if c.isprintable() else "?" for c in line.expandtabs()) for line in data.script.splitlines()]
    text = "\n".join(f"  {line}" for line in lines)
    if not data.script_allowed:
        raise UserError(
            f"{data.path}: the data set is not there, and download is a script. Read it; if it does no harm, allow it "
            f"with --allow-download-script (in Python allow_download_script=True):\n{text}"
        )
    check_online(f"{data.path}: the script of download does not run")
    get_logger().info(f"running     the script of {data.path}:\n{text}")
    shell = data.script.split()[0] in ("bash", "sh")
    command = ["bash", "-c", data.script] if shell else [sys.executable, "-c", data.script]
    variables = {"LOCKSTEP_DATA": str(data.root), "LOCKSTEP_DATA_YAML": str(data.path)}
    with contextlib.suppress(FileNotFoundError):
        status = _run_patiently(command, variables)
        if status:
            raise UserError(f"{data.path}: the script of download ended with status {status}")
        return
    raise UserError(f"{data.path}: the script of download needs {command[0]}, which is not there")


def _run_patiently(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a program that may take long, and return its status; it ends with what ends the wait for it."""
    process = subprocess.Popen(command, env=os.environ | dict(variables), stdin=subprocess.DEVNULL)
    try:
        while True:
            beat()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(1.0)
    except BaseException:
        process.kill()
        process.wait()
        raise


def main(argv: Sequence[str]) -> int:
    """Fetch data sets and weights by name."""
    if not argv:
        raise UserError("name data sets (coco128.yaml) and weights (yolov5s.pt) to fetch")
    for name in argv:
        if name.endswith((".yaml", ".yml")):
            data = load_data(name)
            ensure_data(data, [split for split in SPLITS if getattr(data, split)])
            get_logger().info(f"{data.path}: {data.root}")
        else:
            fetch_weights(Path(name), "")
            if not os.path.exists(name):
                raise UserError(f"{name} is neither a data set's YAML nor the name of published weights")
    return 0


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
