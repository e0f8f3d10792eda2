"""The YAML of a data set: where its images are, what its classes are called, which settings suit it.

Imports the standard library and yaml only, like `utils.config.flags`.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.config.build import build_config
from utils.config.command_line import check_values
from utils.config.flags import SPLITS, TrainConfig
from utils.config.yaml_files import ROOT, find_yaml, load_yaml, yaml_word
from utils.core.caches import cache_folder, may_be_made
from utils.core.errors import Problems, UserError, nearest, nearest_file
from utils.core.wording import shown

GENERATORS = ("shapes",)
CONVERTERS = ("coco", "voc")  # of annotations in other formats, see `utils.data.conversion`
TEXT_KEYS = ("path", "train", "val", "test", "names", "download")  # a class may be called 1.10, and a folder 2024
BOX_COLUMNS = 5  # class cx cy w h
MOST_COLUMNS = 10_000
_DATA_KEYS = (
    "path", "train", "val", "test", "names", "nc", "download", "converter", "generator", "defaults", "columns",
    "kpt_shape",
)  # fmt: skip
# Of other programs and of authors, about the data set rather than about what is in it.
_NOTES = (
    "roboflow", "author", "authors", "contributor", "citation", "license", "licence", "url", "homepage", "source",
    "version", "date", "description", "info", "is_coco", "yaml_file", "flip_idx", "kpt_names",
)  # fmt: skip
_MISSING = {
    "train": "add a line train: FOLDER, the images to train on",
    "val": "add a line val: FOLDER, images to measure on, best none of those in train",
    "names": "add a line names: [cat, dog], the class names in the order of their ids",
}
# A data set comes from strangers: it may say how to train on it, not where to write or what to load.
_DEFAULT_FLAGS = (
    "imgsz",
    "epochs",
    "batch_size",
    "nbs",
    "optimizer",
    "hyp",
    "cos_lr",
    "rect",
    "multi_scale",
    "val_period",
)


@dataclass
class DataConfig:
    """A data set: where its images are and what its classes are called."""

    path: Path  # the YAML
    root: Path  # folder that relative split paths start from
    train: list[Path]  # folders and .txt lists, in the order given
    val: list[Path]
    names: list[str]  # index = class id
    test: list[Path] = field(default_factory=list)
    download: list[str] = field(default_factory=list)  # addresses of archives to fetch it from
    script: str = ""  # or what would do that, in bash or Python
    script_allowed: bool = False  # by the user
    converter: str | None = None  # what makes label files of the annotations in the archives
    generator: str | None = None  # the data set is drawn, not fetched
    defaults: dict[str, Any] = field(default_factory=dict)  # flags of train.py that suit it; what is typed wins
    merged: int = 0  # classes of the label files that count as one (--single-cls); 0 = each is its own
    columns: int = 0  # of the row of a box, whose first five are used; 0 = not said
    looked_in: list[Path] = field(default_factory=list)  # where the root might have been, if it is nowhere
    doubts: list[str] = field(default_factory=list)  # what may be a mistake, a sentence each

    @property
    def num_classes(self) -> int:
        """How many classes there are; class ids are below it."""
        return len(self.names)

    @property
    def label_classes(self) -> int:
        """How many classes the label files tell apart."""
        return self.merged or len(self.names)


def as_one_class(data: DataConfig) -> DataConfig:
    """Return a data set with all its classes as one, called ``item``; one with a single class as it is."""
    if data.num_classes == 1:
        return data
    return dataclasses.replace(data, names=["item"], merged=data.num_classes)


def load_data(name: str | Path, single_cls: bool = False, allow_script: bool = False) -> DataConfig:
    """Read a data set YAML, by path or shipped name. Nothing is fetched, drawn or looked for on disk yet.

    ``path`` is the root of the splits: absolute, else relative to the YAML's folder, the current folder or the
    project, the first in which it exists (the project if none: there it will be made; a drawn set in the user's caches
    where that is read-only). A split that is not there is
    taken from where its last folders are, beside the YAML, which is doubtful. An unknown key is a mistake if it is
    close to a known one, else a note of the author's, and doubtful unless many data sets have it. With ``single_cls``
    all classes count as one; with ``allow_script`` a script under ``download`` may run if needed.

    Raises:
        UserError: lists every problem with the file and the key.
    """
    path = find_yaml(name, "data")
    content = load_yaml(path, TEXT_KEYS)
    problems = Problems()
    _check_data_keys(content, problems)
    tried = _data_roots(path, content.get("path"))
    root = next((place for place in tried if os.path.exists(place)), tried[-1])
    if "generator" in content and not os.path.exists(root) and not may_be_made(root):  # the code is read-only
        root = cache_folder() / root.name
    splits = {split: _split_paths(split, content.get(split), root, problems) for split in SPLITS}
    fetched = any(content.get(key) for key in ("download", "generator"))
    near = {} if fetched else _near_paths(splits, root if os.path.exists(root) else path.parent)
    found = {split: [near.get(one, one) for one in paths] for split, paths in splits.items()}
    names = _class_names(content["names"], problems) if "names" in content else []
    defaults = _default_flags(content.get("defaults"), problems)
    download, script = _downloads(content.get("download"), problems)
    columns = _columns(content, problems)
    if type(content.get("nc", 0)) is not int:
        problems.add(f"nc takes a whole number, not {shown(content['nc'])}; it can be left out")
    elif "nc" in content and names and content["nc"] != len(names):
        problems.add(f"nc says {content['nc']} classes, names lists {len(names)}; nc can be left out")
    problems.raise_if_any(str(path))
    data = DataConfig(
        path,
        root,
        names=names,
        download=download,
        script=script,
        script_allowed=allow_script,
        converter=content.get("converter"),
        generator=content.get("generator"),
        defaults=defaults,
        columns=columns,
        looked_in=[] if os.path.exists(root) else list(dict.fromkeys(tried)),
        doubts=[f"{path}: {text}" for text in [*_doubts(content, names), *_moved(splits, near)]],
        train=found["train"],
        val=found["val"],
        test=found["test"],
    )
    return as_one_class(data) if single_cls else data


def missing_paths(data: DataConfig, splits: Sequence[str]) -> list[Path]:
    """Return the folders and lists of some splits that are not there."""
    return [path for split in splits for path in getattr(data, split) if not os.path.exists(path)]


def is_fetched(data: DataConfig, splits: Sequence[str]) -> bool:
    """Whether some of these splits are not there, and the YAML says how to get them."""
    return bool(data.download or data.script) and bool(missing_paths(data, splits))


def check_split_paths(data: DataConfig, splits: Sequence[str] = ("train", "val")) -> dict[str, list[Path]]:
    """Return the folders and lists of some splits; call it after a data set was drawn or fetched.

    Raises:
        UserError: lists every path that is missing, and each split that the file does not name.
    """
    problems = Problems()
    found: dict[str, list[Path]] = {split: getattr(data, split) for split in splits}
    lost_root = data.looked_in and not os.path.exists(data.root)
    for split, paths in found.items():
        if not paths:
            problems.add(f"there is no {split} split; add a line {split}: FOLDER")
        for path in paths:
            if lost_root and path.is_relative_to(data.root):
                places = " or ".join(map(str, data.looked_in))
                problems.add(f"path: there is no folder {places}{_way_out(data.root, data)}")
            elif not os.path.exists(path):  # also where a name is too long
                problems.add(f"{split}: {path} does not exist{_near_path(path, data)}")
    problems.raise_if_any(str(data.path))
    return found


def _check_data_keys(content: Mapping[Any, Any], problems: Problems) -> None:
    mistyped = set()
    for key in content:
        hint = "" if key in _DATA_KEYS else nearest(key, _DATA_KEYS, alike=0.7)
        if hint:
            problems.add(f"{key} is not a key{hint}")
            mistyped.add(hint)
    for key in ("train", "val", "names"):
        if content.get(key) is None and nearest(key, [key]) not in mistyped:
            problems.add(f"{key} is missing: {_MISSING[key]}")
    for key, known in (("generator", GENERATORS), ("converter", CONVERTERS)):
        if content.get(key) not in (None, *known):
            hint = nearest(content[key], known)
            problems.add(f"{key} is {' or '.join(known)}, not {shown(content[key])}{hint}")
    if content.get("converter") in CONVERTERS and not content.get("download"):
        problems.add("converter is for what download fetches, and there is no download: nothing would be converted")
    if not isinstance(content.get("path"), str | None):
        problems.add(f"path takes a text, not {yaml_word(content['path'])}")


def _downloads(value: Any, problems: Problems) -> tuple[list[str], str]:
    """Return the addresses that ``download`` names, or its script."""
    if value is None or value == "":
        return [], ""
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) and word.strip() for word in words):
        problems.add(f"download takes an address, a list of addresses, or a script, not {shown(value)}")
        return [], ""
    words = [word.strip() for word in words]
    if not isinstance(value, list) and not re.fullmatch(r"[A-Za-z][\w+.-]*://\S*", words[0]):
        return [], value
    for word in words:
        if not re.match(r"https?://[^/\s]+/\S*$", word, re.IGNORECASE) or not _has_host(word):
            problems.add(f"download: {shown(word)} is not an address of a file, https://HOST/FILE")
    return words, ""


def _has_host(address: str) -> bool:
    try:
        return bool(urlsplit(address).hostname)
    except ValueError:  # half an IPv6 address
        return False


def _columns(content: Mapping[Any, Any], problems: Problems) -> int:
    """Return how many columns the row of a box has by ``columns`` or ``kpt_shape``, 0 if neither is there."""
    keypoints, columns = content.get("kpt_shape"), content.get("columns")
    found = 0
    if keypoints is not None:
        if (
            not isinstance(keypoints, list)
            or [type(number) for number in keypoints] != [int, int]
            or keypoints[1] not in (2, 3)
            or not 0 < keypoints[0] < MOST_COLUMNS
        ):
            problems.add(f"kpt_shape takes the number of keypoints and 2 or 3, as in [17, 3], not {shown(keypoints)}")
            return 0
        found = BOX_COLUMNS + keypoints[0] * keypoints[1]
    if columns is not None:
        if type(columns) is not int or not BOX_COLUMNS <= columns <= MOST_COLUMNS:
            problems.add(f"columns takes the number of columns in the row of a box, 5 or more, not {shown(columns)}")
            return 0
        if found and columns != found:
            problems.add(f"columns says {columns}, kpt_shape means {found}; leave one of them out")
        found = columns
    return found


def _default_flags(value: Any, problems: Problems) -> dict[str, Any]:
    """Return the flags that the data set suggests, by field name."""
    if not isinstance(value, dict):
        if value is not None:
            problems.add(f"defaults takes flags of train.py and values, not {yaml_word(value)}")
        return {}
    given = {str(name).replace("-", "_"): wanted for name, wanted in value.items()}
    for name in given:
        if name not in _DEFAULT_FLAGS:
            problems.add(f"defaults: {name} is not one of {', '.join(_DEFAULT_FLAGS)}{nearest(name, _DEFAULT_FLAGS)}")
    found = Problems()
    check_values(TrainConfig, given, found)
    for message in found.messages:
        problems.add(f"defaults: {message}")
    return given


def _doubts(content: Mapping[Any, Any], names: Sequence[str]) -> list[str]:
    unknown = [str(key) for key in content if key not in _DATA_KEYS and key not in _NOTES]
    doubts = [f"unknown keys, not used: {', '.join(unknown)}"] if unknown else []
    if content.get("kpt_shape") is not None:
        doubts.append("kpt_shape: keypoints are not used, the boxes in front of them are")
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        ids = [str(class_id) for class_id, other in enumerate(names) if other == name]
        doubts.append(f"names: the classes {' and '.join(ids)} are all called {name!r}, and count as different ones")
    return doubts


def _data_roots(path: Path, value: Any) -> list[Path]:
    """Return where the root may be, best first; where it is made if it is nowhere, last."""
    if value is None or not isinstance(value, str):
        return [path.parent]
    return [_tidy(base / os.path.expanduser(value)) for base in (path.parent, Path.cwd(), ROOT)]


def _tidy(path: Path) -> Path:
    """Make absolute, without '..', but leave links alone: label folders are found by the name the user chose."""
    return Path(os.path.abspath(path))


def _split_paths(split: str, value: Any, root: Path, problems: Problems) -> list[Path]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(text, str) and text for text in values):
        problems.add(f"{split} takes a folder, a .txt list, or a list of these, not {shown(value)}")
        return []
    return [_tidy(root / os.path.expanduser(text)) for text in values]


def _near_paths(splits: Mapping[str, Sequence[Path]], folder: Path) -> dict[Path, Path]:
    """Return where splits are that are not where the YAML says, as it was written elsewhere, by their paths.

    That is the path with the most of the last folders that is there, below a folder. It must be more than ``images``,
    for that many have, and another one for each split.
    """
    paths = dict.fromkeys(path for paths in splits.values() for path in paths)
    near = {}
    for path in paths:
        parts = [part for part in re.split(r"[/\\]", str(path)) if part]
        tails = [Path(*parts[k:]) for k in range(len(parts)) if [part.lower() for part in parts[k:]] != ["images"]]
        found = next((folder / tail for tail in tails if os.path.exists(folder / tail)), None)
        if found is not None and not os.path.exists(path):
            near[path] = found
    return near if len({near.get(path, path) for path in paths}) == len(paths) else {}


def _moved(splits: Mapping[str, Sequence[Path]], near: Mapping[Path, Path]) -> list[str]:
    return [
        f"{split}: {path} does not exist; {near[path]} does and is used"
        for split, paths in splits.items()
        for path in paths
        if path in near
    ]


def _class_names(value: Any, problems: Problems) -> list[str]:
    """Return the class names by id from a list or an id -> name mapping; [] after a problem."""
    if isinstance(value, dict):
        wrong = _wrong_ids(value)
        if wrong:
            problems.add(f"names {wrong}")
            return []
        value = [value[class_id] for class_id in range(len(value))]
    if not isinstance(value, list) or not value:
        problems.add(
            f"names takes a list of class names or id: name lines, not {yaml_word(value) if value else 'nothing'}"
        )
        return []
    for class_id, name in enumerate(value):
        if not isinstance(name, str):
            problems.add(f"names: class {class_id} is {shown(name)}, not a text; put a name such as null in quotes")
        elif not name.strip():
            problems.add(f"names: class {class_id} has an empty name; give it one")
    return value


def _wrong_ids(value: Mapping[Any, Any]) -> str:
    """Return what is wrong with the ids of an id -> name mapping, '' if nothing is."""
    odd = [key for key in value if not isinstance(key, int) or isinstance(key, bool) or key < 0]
    missing = [class_id for class_id in range(len(value)) if class_id not in value]
    if odd:
        return f"has the class id {shown(odd[0])}, but ids are the numbers 0, 1, 2 and so on"
    if not missing:
        return ""
    if min(value) == 1:
        return "starts with the class id 1, but ids are counted from 0, as in the label files"
    return f"leaves out the class id {missing[0]}, but ids are counted from 0 without gaps"


def _way_out(path: Path, data: DataConfig) -> str:
    """Return what to do about a path that is missing, '' if there is nothing to say."""
    if os.sep == "/" and "\\" in str(path):
        return "; write paths with / in place of \\, which is right on Windows too"
    return ""


def _near_path(path: Path, data: DataConfig) -> str:
    """Return a hint for a split path that is missing, '' if there is none."""
    if path.is_relative_to(data.root.parent):
        inside = path.relative_to(data.root.parent)  # what `../train/images` would be without its two dots
        if not path.is_relative_to(data.root) and (data.root / inside).exists():
            return f"; did you mean {inside}?"
    if glob.has_magic(str(path)):
        return "; patterns are not taken: name a folder, whose subfolders count too, or a .txt list of images"
    if not os.path.isdir(path.parent):
        return _way_out(path, data) or nearest_file(path, ("",))
    return _way_out(path, data) or nearest(path.name, [entry.name for entry in path.parent.iterdir()])


def build_train_config(given: Mapping[str, Any]) -> TrainConfig:
    """Make the settings of a training: what was typed, else what the data set's YAML suggests, else the defaults.

    Raises:
        UserError: as `build_config`; mistakes in the data YAML are left to `load_data`.
    """
    try:
        data = load_data(given.get("data", TrainConfig.data))
    except UserError:
        return build_config(TrainConfig, given)  # whoever reads the data set next reports it, with what else is wrong
    return build_config(TrainConfig, {**data.defaults, **given, "data": str(data.path)})
