"""Which images a split has, and which label files have no image."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from utils.data_report import Problem
from utils.errors import UserError
from utils.heartbeat import beating
from utils.images import IMAGE_SUFFIXES
from utils.labels import label_path

LARGEST_LIST = 1 << 28  # bytes; ten million lines
LIST_HEAD = 4096  # bytes of a text file that tell whether it is a label file


def list_images(sources: Sequence[Path], problems: list[Problem]) -> list[str]:
    """Absolute paths of all images of a split, with forward slashes; an image named twice is kept once.

    A folder is searched with its subfolders and gives sorted paths; a ``.txt`` list keeps its order. Its lines starting
    with ``./`` are relative to its folder, other relative ones to it or, if nothing is there, to the working folder.

    Args:
        sources: folders and ``.txt`` lists.
        problems: where lines that name no image, and images that are listed twice, are added.

    Raises:
        UserError: a source does not exist or is of another kind, or there is no image at all.
    """
    paths: dict[str, None] = {}
    for source in sources:
        if source.is_dir():
            paths |= dict.fromkeys(sorted(_walk(os.path.abspath(source), ())))
        elif source.suffix == ".txt" and source.is_file():
            _read_list(source, paths, problems)
        else:
            what = "is neither a folder nor a .txt list of images" if source.exists() else "does not exist"
            raise UserError(f"{source} {what}; check train, val and test in the data YAML")
    if not paths:
        places = ", ".join(map(str, sources)) or "an empty list of sources"
        raise UserError(f"no images in {places}; looked for the suffixes {', '.join(sorted(IMAGE_SUFFIXES))}")
    return list(paths)


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """Image files below a folder; links to folders are followed unless they lead back to a folder above."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = os.scandir(folder)
    except OSError as error:
        raise UserError(f"the folder {folder} can't be read: {error.strerror}") from error
    with entries:
        for entry in beating(entries):
            if entry.is_dir():
                yield from _walk(entry.path, (*above, real))
            elif _is_image(entry.name):
                yield entry.path.replace(os.sep, "/")


def _is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


def _read_list(source: Path, paths: dict[str, None], problems: list[Problem]) -> None:
    """Add the images of a list file, in order; blank lines and those starting with # are skipped."""
    folder = os.path.abspath(source.parent)
    for number, raw in enumerate(beating(_text(source).splitlines()), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        path = os.path.join(folder, line)  # an absolute line stays as it is
        if not line.startswith("./") and not os.path.exists(path) and os.path.exists(line):
            path = os.path.abspath(line)
        path = os.path.normpath(path).replace(os.sep, "/")
        if not _is_image(path) or "\0" in path:
            problems.append(Problem(str(source), number, line[:200], "names no image, line left out"))
        elif path in paths:
            problems.append(Problem(str(source), number, line[:200], "image listed more than once, used once"))
        else:
            paths[path] = None


def _text(source: Path) -> str:
    try:
        if source.stat().st_size > LARGEST_LIST:
            raise UserError(f"the list {source} has more than {LARGEST_LIST} bytes")
        return source.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"the list {source} can't be read: {error.strerror}") from error


def labels_without_image(paths: Sequence[str], sources: Sequence[Path]) -> list[Problem]:
    """Label files in the folders of the images' labels for which no image is there, sorted.

    A label of an image that only this split does not list is none of them; nor is a text file that holds no label rows.

    Args:
        paths: images of the split.
        sources: where they were found; lists may lie among labels.
    """
    places = {os.path.dirname(label_path(path)): os.path.dirname(path) for path in paths}
    labels = {label_path(path) for path in paths}
    own = {str(source.absolute()).replace(os.sep, "/") for source in sources}
    found = []
    for folder, images in beating(places.items()):
        alone = [name for name in _names(folder) if name.endswith(".txt") and f"{folder}/{name}" not in labels]
        if alone:
            stems = {name.rpartition(".")[0] for name in _names(images) if _is_image(name)}
            alone = [f"{folder}/{name}" for name in alone if name.removesuffix(".txt") not in stems]
            found += [path for path in alone if path not in own and _holds_labels(path)]
    return [Problem(path, 0, "", "label file without an image, not used") for path in sorted(found)]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no label at all is told elsewhere
        return []


def _holds_labels(path: str) -> bool:
    """Whether the first line is a row of a label file, rather than of a list, a note or ``classes.txt``."""
    try:
        with open(path, "rb") as file:
            words = file.read(LIST_HEAD).lstrip().partition(b"\n")[0].split()
        return len([float(word) for word in words]) >= 5
    except (OSError, ValueError):
        return False
