"""The YAML of a data set: where its images are, what its classes are called, which settings suit it.

Imports the standard library and yaml only, like `utils.config`.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.config import ROOT, SPLITS, TrainConfig, build_config, find_yaml, load_yaml, yaml_word
from utils.errors import Problems, UserError, nearest
from utils.flags import check_values

GENERATORS = ("shapes",)
_DATA_KEYS = ("path", "train", "val", "test", "names", "nc", "download", "generator", "defaults")
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
    download: str | None = None
    generator: str | None = None  # the data set is drawn, not fetched
    defaults: dict[str, Any] = field(default_factory=dict)  # flags of train.py that suit it; what is typed wins
    merged: int = 0  # classes of the label files that count as one (--single-cls); 0 = each is its own

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


def load_data(name: str | Path, single_cls: bool = False) -> DataConfig:
    """Read a data set YAML, by path or shipped name. Nothing is fetched, drawn or looked for on disk yet.

    ``path`` is the root of the splits: absolute, else relative to the YAML's folder, the current folder or the
    project, the first in which it exists (the project if none: there it will be made). An unknown key is a mistake if
    it is close to a known one, else a note of the author's. With ``single_cls`` all classes count as one.

    Raises:
        UserError: lists every problem with the file and the key.
    """
    path = find_yaml(name, "data")
    content = load_yaml(path)
    problems = Problems()
    _check_data_keys(content, problems)
    root = _data_root(path, content.get("path"))
    splits = {split: _split_paths(split, content.get(split), root, problems) for split in SPLITS}
    names = _class_names(content["names"], problems) if "names" in content else []
    defaults = _default_flags(content.get("defaults"), problems)
    if "nc" in content and names and content["nc"] != len(names):
        problems.add(f"nc says {content['nc']} classes, names lists {len(names)}; nc can be left out")
    problems.raise_if_any(str(path))
    data = DataConfig(
        path,
        root,
        names=names,
        download=content.get("download"),
        generator=content.get("generator"),
        defaults=defaults,
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
    )
    return as_one_class(data) if single_cls else data


def check_split_paths(data: DataConfig, splits: Sequence[str] = ("train", "val")) -> dict[str, list[Path]]:
    """Return the folders and lists of some splits; call it after a built-in data set was drawn.

    Raises:
        UserError: lists every path that is missing, and each split that the file does not name.
    """
    problems = Problems()
    found: dict[str, list[Path]] = {split: getattr(data, split) for split in splits}
    for split, paths in found.items():
        if not paths:
            problems.add(f"there is no {split} split; add a line {split}: FOLDER")
        for path in paths:
            if not path.exists():
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
            problems.add(f"{key} is missing")
    if content.get("generator") not in (None, *GENERATORS):
        hint = nearest(content["generator"], GENERATORS)
        problems.add(f"generator is {' or '.join(GENERATORS)}, not {content['generator']!r}{hint}")
    for key in ("path", "download"):
        if not isinstance(content.get(key), str | None):
            problems.add(f"{key} takes a text, not {yaml_word(content[key])}")


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


def _data_root(path: Path, value: Any) -> Path:
    if value is None or not isinstance(value, str):
        return path.parent
    wanted = Path(value).expanduser()
    bases = (path.parent, Path.cwd(), ROOT)
    return _tidy(next((base / wanted for base in bases if (base / wanted).exists()), ROOT / wanted))


def _tidy(path: Path) -> Path:
    """Make absolute, without '..', but leave links alone: label folders are found by the name the user chose."""
    return Path(os.path.abspath(path))


def _split_paths(split: str, value: Any, root: Path, problems: Problems) -> list[Path]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(text, str) and text for text in values):
        problems.add(f"{split} takes a folder, a .txt list, or a list of these, not {value!r}")
        return []
    return [_tidy(root / Path(text).expanduser()) for text in values]


def _class_names(value: Any, problems: Problems) -> list[str]:
    """Return the class names by id from a list or an id -> name mapping; [] after a problem."""
    if isinstance(value, dict):
        ids = range(len(value))
        wrong = [key for key in value if isinstance(key, bool) or key not in ids]
        if wrong:
            problems.add(f"names has the class id {wrong[0]!r}, but ids run from 0 to {len(value) - 1} without gaps")
            return []
        value = [value[key] for key in ids]
    if not isinstance(value, list) or not value:
        problems.add(
            f"names takes a list of class names or id: name lines, not {yaml_word(value) if value else 'nothing'}"
        )
        return []
    for class_id, name in enumerate(value):
        if isinstance(name, bool) or not isinstance(name, str | int | float) or name == "":
            problems.add(f"names: class {class_id} is {name!r}, not a text; put words like yes, no, on, null in quotes")
    return [str(name) for name in value]


def _near_path(path: Path, data: DataConfig) -> str:
    """Return a hint for a split path that is missing, '' if there is none."""
    if path.is_relative_to(data.root.parent):
        inside = path.relative_to(data.root.parent)  # what `../train/images` would be without its two dots
        if not path.is_relative_to(data.root) and (data.root / inside).exists():
            return f"; did you mean {inside}?"
    if data.download:
        return "; its download line is not available yet: fetch the data yourself"
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return nearest(path.name, siblings)


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
