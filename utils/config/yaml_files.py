"""YAML files, read strictly and found by name: words are what they look like, and nothing in a file runs."""

import itertools
import re
import stat
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from utils.core.errors import UserError, nearest_file
from utils.core.text_files import as_utf8

ROOT = Path(__file__).resolve().parents[2]


SHIPPED = {"data": ROOT / "data", "hyp": ROOT / "data" / "hyps", "model": ROOT / "models"}


LARGEST_YAML = 1 << 21  # bytes; the names of the 21,841 classes of ImageNet have half a million


LONGEST_NAME = 250  # bytes; file systems take 255, and a run's number comes behind its name


NULL, BOOL, INT, FLOAT, STR, MERGE = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "merge")
)


# What a word without quotes may be besides a text, with the characters that it may start with: as in YAML 1.2 (10.2 and
# 10.3), numbers in decimal and without leading zeros only. YAML 1.1 also reads no as False, 010 as 8 and 12:30 as 750.
RESOLVERS = {
    NULL: (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    BOOL: (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    INT: (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    FLOAT: (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    MERGE: (r"<<", ["<"]),
}


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key may stand once, and a word is what it looks like (see RESOLVERS).

    Plain YAML keeps the last of several keys and says nothing. Aliases that would make a small file large are refused:
    whoever walks through the values would never come to an end.
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012
    texts: Sequence[str] = ()  # keys of the file whose values are texts, as they are written

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _expanded_size(node, {})
            _keep_texts(node, self.texts)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # what that means is said by whoever goes on
            if key in seen:
                text = str(key)[:LONGEST_NAME]
                raise yaml.constructor.ConstructorError(None, None, f"key {text} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _expanded_size(node: Any, sizes: dict[int, int]) -> int:
    """Return about how many characters a part of a YAML has with its aliases written out.

    Args:
        node: the part.
        sizes: of the parts seen so far, by identity; 0 while one is being looked at.

    Raises:
        yaml.MarkedYAMLError: it is too large, or contains itself.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise yaml.MarkedYAMLError(problem="an alias stands for what it is in", problem_mark=node.start_mark)
        return sizes[id(node)]
    sizes[id(node)] = 0
    if isinstance(node, yaml.ScalarNode):
        size = len(node.value) + 1
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else itertools.chain.from_iterable(node.value)
        size = 1 + sum(_expanded_size(child, sizes) for child in children)
    if size > LARGEST_YAML * 4:
        raise yaml.MarkedYAMLError(problem="aliases make it too large", problem_mark=node.start_mark)
    sizes[id(node)] = size
    return size


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that any of the two versions of YAML would read as something else."""


for _tag, (_pattern, _starts) in RESOLVERS.items():
    _StrictLoader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _starts)
    _Dumper.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _starts)


def _keep_texts(node: Any, keys: Sequence[str]) -> None:
    """Make texts of the numbers and truth values below some keys of a mapping; an empty value stays none."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag == MERGE:
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                _keep_texts(merged, keys)
        elif key.value in keys:
            _make_text(value, set())


def _make_text(node: Any, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        node.tag = STR if node.tag in (BOOL, INT, FLOAT) else node.tag
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _make_text(value, seen)
    else:
        for _, value in node.value:
            _make_text(value, seen)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in the order it has; `load_yaml` reads the same from it."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def load_yaml(path: Path, texts: Sequence[str] = ()) -> dict[Any, Any]:
    """Read a YAML file that holds a mapping; no code runs, and a key that appears twice is an error.

    Args:
        path: the file.
        texts: its keys whose values are texts as they are written, also where they look like numbers.

    Raises:
        UserError: names the file, and the line where the text is not YAML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_YAML + 1)
        if len(data) > LARGEST_YAML:
            raise UserError(f"{path} has more than {LARGEST_YAML} bytes, too many for settings")
        loader = _StrictLoader(as_utf8(data).decode())
        loader.texts = texts
        content = loader.get_single_data()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # a date or a number that is none
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: {str(error)[:LONGEST_NAME]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold keys and values (key: value), not {yaml_word(content)}")
    return content


def yaml_word(value: object) -> str:
    """Return what people call a kind of YAML value."""
    words = {type(None): "nothing", list: "a list", str: "a text", dict: "keys and values"}
    return words.get(type(value), repr(value)[:LONGEST_NAME])


def find_yaml(name: str | Path, kind: str) -> Path:
    """Find a YAML: as given, else under the project root, else a shipped one by its name; '.yaml' may be left out.

    Args:
        name: path or name, for example ``my.yaml``, ``data/shapes.yaml`` or ``hyp.scratch-low``.
        kind: ``data``, ``hyp`` or ``model``.

    Raises:
        UserError: there is no such file; names the nearest shipped one.
    """
    folder = SHIPPED[kind]
    spelling = {"data": "--data", "hyp": "--hyp", "model": "--cfg"}[kind]
    shown = str(name) if len(str(name)) <= LONGEST_NAME else f"{str(name)[:20]}..."
    try:
        wanted = Path(name).expanduser()
    except RuntimeError as error:  # ~NAME of a user that is not there
        raise UserError(f"{spelling} {shown}: {error}") from None
    reason = ""
    for base in (Path(), ROOT, folder):
        for candidate in (base / wanted, base / f"{wanted}.yaml"):
            try:
                mode = candidate.stat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:  # a name that is too long, a folder that may not be entered
                reason = reason or f"can't be read: {error.strerror}"
                continue
            if stat.S_ISREG(mode):
                return candidate.absolute()
            reason = reason or "is not a file; name the YAML itself"
    if reason:
        raise UserError(f"{spelling} {shown} {reason}")
    shipped = sorted(path.name for path in folder.glob("*.yaml"))
    hint = nearest_file(wanted, (".yaml", ".yml"), shipped) or f"; shipped are {', '.join(shipped)}"
    raise UserError(f"{spelling} {shown}: there is no such file{hint}")
