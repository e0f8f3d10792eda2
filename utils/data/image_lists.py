"""Which images a split has, and which label file belongs to each."""

import errno
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from utils.core.errors import UserError
from utils.core.heartbeat import beating
from utils.core.image_files import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, RARE_IMAGE_SUFFIXES
from utils.core.text_files import as_utf8
from utils.data.labels import around_images, label_path
from utils.data.report import Problem, shortened

LARGEST_LIST = 1 << 28  # bytes; ten million lines
LIST_HEAD = 4096  # bytes of a text file that tell whether it is a label file
# Of programs, for themselves. In a folder all names with a dot in front are hidden, but a list may lead through some.
HIDDEN_FOLDERS = frozenset(
    [".ipynb_checkpoints", "@eadir", "@recycle", "#recycle", "$recycle.bin", "__macosx", "lost+found"]
)
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
HIDDEN = "hidden, not used"
OTHER_FORMAT = "picture in a format that is not read, not used; save it as JPEG or PNG"
NO_IMAGE = "label file without an image, not used"
SECOND = "second label file of an image, not used"
SHARED = "label file of several images, used for each"
BESIDE = "label file beside its image in a folder called images, used"
OTHER_CASE = "label file in other upper or lower case than its image or than .txt, used"
DANGLING = "link that leads nowhere, not used"
RARE_FORMAT = "picture in a format that not every OpenCV reads, used"


# --- 1. Images -------------------------------------------------------------------------------------------------------


def list_images(sources: Sequence[Path], problems: list[Problem]) -> list[str]:
    """Absolute paths of all images of a split, with forward slashes; an image named twice is kept once.

    A folder is searched with its subfolders, without hidden ones, and gives sorted paths; a ``.txt`` list keeps its
    order. Its lines starting with ``./`` are relative to its folder, other relative ones to it or, if nothing is there,
    to the working folder.

    Args:
        sources: folders and ``.txt`` lists.
        problems: where lines that name no image, images that are listed twice, and pictures that are passed over are
            added.

    Raises:
        UserError: a source does not exist or is of another kind, or there is no image at all.
    """
    paths: dict[str, None] = {}
    for source in sources:
        if source.is_dir():
            paths |= dict.fromkeys(sorted(_walk(os.path.abspath(source), (), problems)))
        elif source.suffix.lower() == ".txt" and source.is_file():
            _read_list(source, paths, problems)
        else:
            what = "is neither a folder nor a .txt list of images" if source.exists() else "does not exist"
            raise UserError(f"{source} {what}; check train, val and test in the data YAML")
    if not paths:
        places = ", ".join(map(str, sources)) or "an empty list of sources"
        others = "\n".join(["", *shortened([f"  {problem}" for problem in problems[:3]], len(problems))]).rstrip()
        raise UserError(f"no images in {places}; looked for the suffixes {', '.join(sorted(IMAGE_SUFFIXES))}{others}")
    problems += [Problem(path, 0, "", RARE_FORMAT) for path in paths if _suffix(path) in RARE_IMAGE_SUFFIXES]
    return list(paths)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name is none of the user's: hidden, or made by a program for itself."""
    return name.startswith(".") or name.lower() in HIDDEN_FOLDERS


def _walk(folder: str, above: tuple[str, ...], problems: list[Problem]) -> Iterator[str]:
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
            path = entry.path.replace(os.sep, "/")
            if is_hidden(entry.name):
                _pass_over(path, entry.is_dir(), problems)
            elif entry.is_dir():
                yield from _walk(entry.path, (*above, real), problems)
            elif _is_image(entry.name):
                yield path
            elif _suffix(entry.name) in OTHER_IMAGE_SUFFIXES:
                problems.append(Problem(path, 0, "", OTHER_FORMAT))
            elif entry.is_symlink() and not os.path.exists(path):
                problems.append(Problem(path, 0, os.readlink(path), DANGLING))


def _pass_over(path: str, is_folder: bool, problems: list[Problem]) -> None:
    """Name a hidden picture, or a hidden folder if there are pictures in it, with their number."""
    if is_folder:
        count = sum(_is_image(name) for _, _, names in os.walk(path) for name in names)
        if count:
            problems.append(Problem(path, 0, f"{count} image{'s' * (count > 1)}", HIDDEN))
    elif _is_image(path):
        problems.append(Problem(path, 0, "", HIDDEN))


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _is_image(name: str) -> bool:
    return _suffix(name) in IMAGE_SUFFIXES


def _read_list(source: Path, paths: dict[str, None], problems: list[Problem]) -> None:
    """Add the images of a list file, in order; blank lines and those starting with # are skipped."""
    folder = os.path.abspath(source.parent)
    for number, raw in enumerate(beating(_text(source).splitlines()), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        path = os.path.join(folder, line)  # an absolute line stays as it is
        if "\\" in line and not os.path.exists(path):  # written on Windows
            line = line.replace("\\", "/")
            path = os.path.join(folder, line)
        if not line.startswith("./") and not os.path.exists(path) and os.path.exists(line):
            path = os.path.abspath(line)
        path = os.path.normpath(path).replace(os.sep, "/")
        above, name = os.path.split(path)
        if not _is_image(path) or "\0" in path:
            problems.append(Problem(str(source), number, line[:200], "names no image, line left out"))
        elif name.startswith(".") or os.path.basename(above).lower() in HIDDEN_FOLDERS:
            problems.append(Problem(str(source), number, line[:200], HIDDEN))
        elif path in paths:
            problems.append(Problem(str(source), number, line[:200], "image listed more than once, used once"))
        else:
            paths[path] = None


def _text(source: Path) -> str:
    try:
        if source.stat().st_size > LARGEST_LIST:
            raise UserError(f"the list {source} has more than {LARGEST_LIST} bytes")
        return as_utf8(source.read_bytes()).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UserError(f"the list {source} can't be read: {error.strerror}") from error


# --- 2. Their labels -------------------------------------------------------------------------------------------------


class _LabelFiles(NamedTuple):
    """Label files that images of a folder may have.

    Attributes:
        by_stem: the one that counts, by its name without suffix.
        second: others of the same names, and these.
    """

    by_stem: dict[str, str]
    second: list[tuple[str, str]]


def find_labels(paths: Sequence[str], sources: Sequence[Path]) -> tuple[list[str], list[Problem]]:
    """Label file of each image, '' where there is none; and label files that are not used, or used more than once.

    The label file of ``images/a/1.jpg`` is ``labels/a/1.txt``, else ``1.txt`` beside the image; folders and files are
    known in upper and lower case. Where there is neither, links are followed: of the folder, or of the image itself.
    Folders are listed, for that is quicker than to ask for each file.

    Args:
        paths: images of the split.
        sources: where they were found; lists may lie among labels.

    Raises:
        UserError: a folder can't be read.
    """
    files_of = _label_files_by_folder()
    groups: dict[str, list[int]] = {}
    for i, path in enumerate(beating(paths)):
        groups.setdefault(path.rpartition("/")[0], []).append(i)
    labels = [""] * len(paths)
    unused: dict[str, str] = {}
    for folder, members in beating(groups.items()):
        files = files_of(folder)
        stems = {i: paths[i][len(folder) + 1 :].rpartition(".")[0] for i in members}
        for i, stem in stems.items():
            labels[i] = files.by_stem.get(stem, "")
        unused |= {file: SECOND for stem, file in files.second}
        alone = files.by_stem.keys() - stems.values()
        if alone:  # but for the images of another split
            alone -= {name.rpartition(".")[0] for name in _names(folder) if _is_image(name)}
            like = {_alike(stem): files.by_stem[stem] for stem in alone}
            for i in (i for i in members if not labels[i]):
                labels[i] = like.get(_alike(stems[i]), "")
            unused |= {files.by_stem[stem]: NO_IMAGE for stem in alone}
    for i, path in enumerate(paths):
        if not labels[i] and os.path.islink(path):
            folder, _, name = os.path.realpath(path).replace(os.sep, "/").rpartition("/")
            labels[i] = files_of(folder).by_stem.get(name.rpartition(".")[0], "")
    return labels, _odd_labels(paths, labels, unused, sources)


def _alike(stem: str) -> str:
    """What names have in common that some file systems hold to be the same."""
    return unicodedata.normalize("NFC", stem).casefold()


def _label_files_by_folder() -> Callable[[str], _LabelFiles]:
    """A function that finds the label files for a folder of images, and asks for each folder once."""
    subfolders = cache(_subfolders)

    @cache
    def files_of(folder: str) -> _LabelFiles:
        real = os.path.realpath(folder).replace(os.sep, "/")
        places = dict.fromkeys([*_label_folders(folder, subfolders), *_label_folders(real, subfolders)])
        seen: set[str] = set()
        found = _LabelFiles({}, [])
        for place in places:
            if os.path.realpath(place) in seen:
                continue
            seen.add(os.path.realpath(place))
            if not found.by_stem:
                _refuse_dangling(place)
            names = [name for name in _names(place) if name[-4:].lower() == ".txt"]
            if not all(name.endswith(".txt") for name in names):
                names.sort(reverse=True)  # small letters first
            for name in names:
                stem, file = name[:-4], f"{place}/{name}"
                if found.by_stem.setdefault(stem, file) != file:
                    found.second.append((stem, file))
        return found

    return files_of


def _label_folders(folder: str, subfolders: Callable[[str], Mapping[str, list[str]]]) -> list[str]:
    """Where labels of the images of a folder may lie, best first."""
    found = []
    for before, behind in around_images(folder):
        places = [before]
        for part in ("labels", *behind.split("/")[1:]):
            places = [f"{place}/{name}" for place in places for name in _in_any_case(part, subfolders(place or "/"))]
        found += places
    return [*found, folder]


def _in_any_case(name: str, folders: Mapping[str, list[str]]) -> list[str]:
    """Names that are alike, the same one first; the name itself if there are none."""
    return sorted(folders.get(name.lower(), [name]), key=lambda other: (other != name, other))


def _subfolders(folder: str) -> Mapping[str, list[str]]:
    """Names of the folders in a folder, by what they are in small letters; none where it can't be listed."""
    found: dict[str, list[str]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    found.setdefault(entry.name.lower(), []).append(entry.name)
    except OSError:
        return {}
    return found


def _names(folder: str) -> list[str]:
    """Names of all that is in a folder, none if it is not there."""
    try:
        return os.listdir(folder or "/")
    except OSError as error:
        if error.errno in NOT_THERE:
            return []
        raise UserError(f"the folder {folder} can't be read: {error.strerror}") from error


def _refuse_dangling(folder: str) -> None:
    """Raise a UserError if a link on the way to a folder of labels leads nowhere: they would count as missing."""
    if os.path.isdir(folder):
        return
    for place in (Path(folder), *Path(folder).parents):
        if os.path.islink(place) and not os.path.exists(place):  # pathlib's raise where a folder can't be searched
            raise UserError(f"the folder of labels {place} is a link to {os.readlink(place)}, which is not there")


def _odd_labels(
    paths: Sequence[str], labels: Sequence[str], unused: Mapping[str, str], sources: Sequence[Path]
) -> list[Problem]:
    """Findings about label files that no image has, or several, or that lie or are called otherwise; sorted.

    Args:
        paths: images of the split.
        labels: their label files, '' where there is none.
        unused: rule by label file, of those that no image of the folder has; another one may.
        sources: lists, which are text files too.
    """
    used = set(labels)
    own = {str(source.absolute()).replace(os.sep, "/") for source in sources}
    found = [
        Problem(path, 0, "", rule)
        for path, rule in beating(unused.items())
        if path not in used and path not in own and _holds_labels(path)
    ]
    if len(used - {""}) < sum(map(bool, labels)):
        images: dict[str, list[str]] = {}
        for path, label in zip(paths, labels, strict=True):
            if label:
                images.setdefault(label, []).append(path.rpartition("/")[2])
        found += [Problem(label, 0, " and ".join(names), SHARED) for label, names in images.items() if len(names) > 1]
    for path, label in beating(zip(paths, labels, strict=True)):
        if label and label != (usual := label_path(path)):
            if label.casefold() == usual.casefold():
                found.append(Problem(label, 0, "", OTHER_CASE))
            elif label.rpartition("/")[0] == path.rpartition("/")[0]:
                found.append(Problem(label, 0, "", BESIDE))
    return sorted(set(found))


def _holds_labels(path: str) -> bool:
    """Whether the first line is a row of a label file, rather than of a list, a note or ``classes.txt``."""
    try:
        with open(path, "rb") as file:
            words = as_utf8(file.read(LIST_HEAD)).lstrip().partition(b"\n")[0].split()
        return len([float(word) for word in words]) >= 5
    except (OSError, ValueError):
        return False
