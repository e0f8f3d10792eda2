"""Where the fields of a dataclass become a command line: parser, help page, and checks of what was typed.

A class whose fields are flags has the class variables ``script`` (its file), ``examples`` (top of the help page) and
``not_yet`` (flags, or a flag and one of its values, of features that are not there, each with a sentence), of which
``not_planned`` names those that are not to come. It may have ``elsewhere``: what names are that are no flags.
"""

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field
from typing import Any, NoReturn, get_args

from utils.config.pasted import QUOTE, as_meant
from utils.core.errors import Problems, UserError, nearest, note_output, run_cli

TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[int]: "whole numbers",
    list[str]: "names",
    bool | None: "true, false or nothing",
    bool | str: "a text, true or false",
}


def flag(default: Any, group: str, text: str, *aliases: str, **metadata: Any) -> Any:
    """One flag as a dataclass field: its name with dashes, then the aliases.

    Args:
        default: value without the flag.
        group: section of the help page.
        text: what the flag does.
        *aliases: further spellings, with their dashes.
        **metadata: ``low``, ``high`` inclusive bounds; ``also`` a value outside of them with a meaning of its own;
            ``choices``; ``commas`` whether they separate the values of a list as spaces do (True); ``const`` the value
            of the bare flag (its own value is then optional); ``metavar``.
    """
    metadata |= {"group": group, "text": text, "aliases": aliases}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def given_flags(kind: type[Any], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what was typed, by field name, converted to the fields' types; a flag that was not typed is absent.

    Of a flag that is there twice the last value counts: scripts do that to override what they were given. Two spellings
    of a flag with different values are a mistake.

    Args:
        kind: dataclass whose fields are flags.
        argv: the command line without the script's name; None = this process's own.

    Raises:
        UserError: unknown, unavailable or malformed flags, and values out of range: all of them at once.
    """
    parser = _parser(kind)
    try:
        return _read(parser, kind, argv)
    except UserError as error:
        raise UserError(f"{error}\nsee {parser.prog} --help") from None


def check_values(kind: type[Any], given: Mapping[str, Any], problems: Problems) -> None:
    """Add a problem for each given value of a wrong type, out of its range or of a later feature.

    Args:
        kind: dataclass of flags, or of plain values with ``low`` and ``high`` in their metadata.
        given: values by field name; unknown names are left alone.
        problems: where to add.
    """
    not_yet = getattr(kind, "not_yet", {})
    for item in dataclasses.fields(kind):
        if item.name not in given:
            continue
        value = given[item.name]
        label = flag_name(item) if "aliases" in item.metadata else item.name
        if not _has_type(value, item.type):
            problems.add(f"{label} takes {TYPE_WORDS[item.type]}, not {value!r}")
        elif f"{label} {value}" in not_yet:
            problems.add(f"{label} {value} is not available yet: {not_yet[f'{label} {value}']}")
        elif label == "--device" and "--device A,B" in not_yet and ("," in value or value == "all"):
            problems.add(f"--device {value} is not available yet: {not_yet['--device A,B']}")
        else:
            _check_range(label, value, item.metadata, problems)


def flag_name(item: Field[Any]) -> str:
    """Return a field's first spelling on the command line."""
    return "--" + item.name.replace("_", "-")


def flags_page(kinds: Iterable[type[Any]]) -> str:
    """Return docs/flags.md: every flag of these classes with its default."""
    lines = [
        "# Flags",
        "",
        "Made by `python -m utils.config.flags > docs/flags.md`; edit `utils/config/flags.py` instead.",
    ]
    for kind in kinds:
        lines += ["", f"## {kind.script}"]
        for title, items in _groups(kind).items():
            lines += ["", f"### {title.capitalize()}", "", "| flag | default | what it does |", "| --- | --- | --- |"]
            for item in items:
                spellings = ", ".join(f"`{spelling}`" for spelling in _spellings(item))
                choices = ": " + ", ".join(f"`{choice}`" for choice in item.metadata.get("choices", ()))
                text = item.metadata["text"] + choices.rstrip(": ")
                lines.append(f"| {spellings} | `{_shown_default(item)}` | {text} |")
        for title, planned in (("Not available yet", True), ("Not available, and not planned", False)):
            names = [name for name in kind.not_yet if (name not in kind.not_planned) is planned]
            if names:
                lines += ["", f"{title}; an error, never ignored:", ""]
                lines += [f"- `{name}`: {kind.not_yet[name]}" for name in names]
    return "\n".join(lines) + "\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help page; argparse would not tell whether that was possible."""
        try:
            print(self.format_help(), end="", file=file, flush=True)
        except OSError as error:
            note_output(error)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End behind the help page, of which a pipe may have taken the first lines only."""
        run_cli(lambda: status)


class _Remembering(argparse.Action):
    """Keeps all values that a flag is given on a command line, each with its spelling: [(spelling, value), ...]."""

    def __call__(self, parser: object, namespace: Any, values: object, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), (option_string, values)])


class _RememberingSwitch(argparse.BooleanOptionalAction, _Remembering):
    """The same of a flag that can be turned off, as --no-NAME."""

    def __call__(self, parser: object, namespace: Any, values: object, option_string: str | None = None) -> None:
        _Remembering.__call__(self, parser, namespace, not str(option_string).startswith("--no-"), option_string)


class _NotYetAction(argparse.Action):
    """Swallows a flag of a later feature with its value, so that the other flags are still checked."""

    def __call__(self, parser: object, namespace: Any, values: object, option_string: str | None = None) -> None:
        namespace.not_yet = [*getattr(namespace, "not_yet", []), option_string]


def _parser(kind: type[Any]) -> _Parser:
    parser = _Parser(
        prog=f"python {kind.script}",
        usage="%(prog)s [flags]",
        description=kind.examples,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, items in _groups(kind).items():
        group = parser.add_argument_group(title)
        for item in items:
            text = f"{item.metadata['text']} (default: {_shown_default(item)})".replace("%", "%%")
            group.add_argument(*_spellings(item), dest=item.name, help=text, **_argument(item))
    for spelling in kind.not_yet:
        if " " not in spelling:
            parser.add_argument(spelling, nargs="?", dest="not_yet", action=_NotYetAction, help=argparse.SUPPRESS)
    text = "passed by old launchers and ignored: their environment says it too"
    parser.add_argument("--local-rank", "--local_rank", metavar="N", help=text)
    return parser


def _argument(item: Field[Any]) -> dict[str, Any]:
    """Return what argparse is told about a field; values stay text here, so that every wrong one can be reported."""
    if item.type is bool:
        return {"action": "store_true"}
    if item.type == bool | None:
        return {"action": _RememberingSwitch}
    if "choices" in item.metadata:
        metavar = "{" + ",".join(item.metadata["choices"]) + "}"
    else:
        letters: dict[Any, str] = {int: "N", float: "X"}
        metavar = item.metadata.get("metavar") or letters.get(_element(item), item.name.upper())
    argument: dict[str, Any] = {"metavar": metavar, "action": _Remembering}
    if item.type in (list[int], list[str]):
        return argument | {"nargs": "+"}
    if "const" in item.metadata:
        return argument | {"nargs": "?", "const": item.metadata["const"]}
    return argument


def _read(parser: _Parser, kind: type[Any], argv: Sequence[str] | None) -> dict[str, Any]:
    problems = Problems()
    namespace, unknown = parser.parse_known_args(_pasted(sys.argv[1:] if argv is None else argv, kind))
    typed = vars(namespace)
    for spelling in typed.get("not_yet", []):
        problems.add(f"{spelling} is not available yet: {kind.not_yet[spelling]}")
    _report_unknown(unknown, kind, problems)
    given = {}
    for item in dataclasses.fields(kind):
        if item.name in typed:
            try:
                values = {spelling: _convert(item, value) for spelling, value in _occurrences(typed[item.name])}
            except ValueError as error:
                problems.add(str(error))
                continue
            given[item.name] = _convert(item, _occurrences(typed[item.name])[-1][1])
            if item.type != bool | None:  # whose second spelling is its other value
                _check_spellings(values, problems)
    check_values(kind, given, problems)
    problems.raise_if_any()
    return given


def repeated_flags(kind: type[Any], argv: Sequence[str]) -> list[str]:
    """Return a sentence for each flag that stands on a command line with different values, of which the last counts.

    Args:
        kind: dataclass whose fields are flags.
        argv: a command line that `given_flags` takes.
    """
    typed = vars(_parser(kind).parse_known_args(_pasted(argv, kind))[0])
    said = []
    for item in dataclasses.fields(kind):
        *before, last = _occurrences(typed.get(item.name, True))
        others = [one for one in before if _convert(item, one[1]) != _convert(item, last[1])]
        if others:
            said.append(f"{_as_typed(*last)} counts, given after {', '.join(_as_typed(*one) for one in others)}")
    return said


def without_flags(kind: type[Any], argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a command line without some of its flags, by field name, and their values."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for item in dataclasses.fields(kind):
        if item.name in names:
            parser.add_argument(*_spellings(item), dest=item.name, **_argument(item))
    return parser.parse_known_args(_pasted(argv, kind))[1]


def _occurrences(typed: Any) -> list[tuple[str, Any]]:
    """Return spelling and value of each time that a flag was typed; switches that can't be turned off come as True."""
    return typed if isinstance(typed, list) else [("", typed)]


def _as_typed(spelling: str, value: Any) -> str:
    words = value if isinstance(value, list) else [] if isinstance(value, bool) else [value]
    return " ".join([spelling, *words])


def _check_spellings(values: Mapping[str, Any], problems: Problems) -> None:
    """Add a problem if spellings of the same flag, or keyword, have different values."""
    (first, value), *others = values.items()
    for spelling, other in others:
        if other != value:
            problems.add(f"{first} {value} and {spelling} {other} are the same setting; leave one of them out")


def given_keywords(kind: type[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that a call from Python names, by field name; every flag is a keyword under its spellings.

    Args:
        kind: dataclass whose fields are flags.
        keywords: such as ``batch=64, data="my.yaml"``; dashes are underscores, paths and lists may be objects.

    Raises:
        UserError: unknown or unavailable keywords, wrong types, values out of range, different values under two
            spellings: all of them at once.
    """
    fields = {_keyword(spelling): item for item in dataclasses.fields(kind) for spelling in _spellings(item)}
    later = {_keyword(spelling): spelling for spelling in kind.not_yet if " " not in spelling}
    problems, given = Problems(), {}
    spelled: dict[str, dict[str, Any]] = {}
    for name, value in keywords.items():
        if name in fields:
            given[fields[name].name] = _plain(value, fields[name].type)
            spelled.setdefault(fields[name].name, {})[name] = given[fields[name].name]
        elif name in later:
            problems.add(f"{name} is not available yet: {kind.not_yet[later[name]]}")
        else:
            problems.add(f"{name} is not a keyword{_hint(name, kind, fields)}")
    for values in spelled.values():
        _check_spellings(values, problems)
    check_values(kind, given, problems)
    problems.raise_if_any()
    return given


def _keyword(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


def _plain(value: Any, kind: Any) -> Any:
    """Return a keyword's value as a flag has it: a path or a list as a text, a number as a list of one."""
    if kind in (str, bool | str) and not isinstance(value, str | bool | None):
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if kind in (list[int], list[str]):
        return [value] if isinstance(value, get_args(kind)[0]) else list(value) if isinstance(value, tuple) else value
    return value


def _known(kind: type[Any]) -> list[str]:
    """Return all spellings of the flags of a class."""
    return [spelling for item in dataclasses.fields(kind) for spelling in _spellings(item)]


def _pasted(argv: Sequence[str], kind: type[Any]) -> list[str]:
    switches = ["--no-" + item.name.replace("_", "-") for item in dataclasses.fields(kind) if item.type == bool | None]
    later = [spelling for spelling in kind.not_yet if " " not in spelling]
    return as_meant(argv, (*_known(kind), *switches, *later, "--help"))


def _report_unknown(unknown: Sequence[str], kind: type[Any], problems: Problems) -> None:
    known = _known(kind)
    after_unknown_flag = False
    bare = [word for word in unknown if f"--{word.partition('=')[0]}" in known and "=" in word]  # epochs=3
    if bare:
        written = " ".join("--" + word.replace("=", " ", 1) for word in bare)
        problems.add(f"{' '.join(bare)}: flags begin with two dashes; write {written}")
    for word in unknown:
        is_flag = word.startswith("-")
        if is_flag:
            spelling = word.partition("=")[0]
            problems.add(f"{spelling} is not a flag{_hint(spelling, kind, known)}")
        elif not after_unknown_flag and word not in bare:  # otherwise it is the unknown flag's value
            hint = "; quotes that hold words together are ' or \"" if re.search(QUOTE, word) else ""
            problems.add(f"{word!r} belongs to no flag{hint}")
        after_unknown_flag = is_flag


def _hint(name: str, kind: type[Any], known: Iterable[str]) -> str:
    """Return what an unknown flag or keyword is instead, or the nearest one that is known; "" if there is none."""
    elsewhere: Mapping[str, str] = getattr(kind, "elsewhere", {})
    plain = _keyword(name)
    return f" but {elsewhere[plain]}" if plain in elsewhere else nearest(name, known)


def _convert(item: Field[Any], value: Any) -> Any:
    """Turn a flag's text into its field's type; switches and bare flags have it already."""
    convert = _element(item)
    try:
        if isinstance(value, list):
            words = value if not item.metadata.get("commas", True) else ",".join(value).split(",")
            words = [word for word in words if word.strip()]
            if not words and _default(item):
                raise ValueError("an empty list means something where it is the default only")
            return [convert(word) for word in words]
        return convert(value) if isinstance(value, str) else value
    except ValueError:
        text = " ".join(value) if isinstance(value, list) else value
        raise ValueError(f"{flag_name(item)} takes {TYPE_WORDS[item.type]}, not {text!r}") from None


def _element(item: Field[Any]) -> Callable[[str], Any]:
    """Return the type of one value of a field: int, float or str."""
    kinds: dict[Any, Callable[[str], Any]] = {int: int, list[int]: int, float: float}
    return kinds.get(item.type, str)


def _spellings(item: Field[Any]) -> list[str]:
    return [flag_name(item), *item.metadata["aliases"]]


def _groups(kind: type[Any]) -> dict[str, list[Field[Any]]]:
    groups: dict[str, list[Field[Any]]] = {}
    for item in dataclasses.fields(kind):
        groups.setdefault(item.metadata["group"], []).append(item)
    return groups


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _shown_default(item: Field[Any]) -> str:
    default = _default(item)
    if isinstance(default, list):
        return " ".join(map(str, default)) or "''"
    if default is None:
        return "automatic"
    return "off" if default is False else str(default) or "''"


def _has_type(value: Any, kind: Any) -> bool:
    if kind in (list[int], list[str]):
        return isinstance(value, list) and all(_has_type(element, get_args(kind)[0]) for element in value)
    if kind in (int, float):  # True is an int in Python, never a number for a user
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check_range(label: str, value: Any, metadata: Mapping[str, Any], problems: Problems) -> None:
    choices = metadata.get("choices")
    for word in value if isinstance(value, list) else [value]:
        if choices and word not in choices:
            problems.add(f"{label} is one of {', '.join(choices)}, not {word!r}{nearest(word, choices)}")
    if "low" not in metadata:
        return
    low, high = metadata["low"], metadata.get("high", math.inf)
    for number in value if isinstance(value, list) else [value]:
        if not low <= number <= high and number != metadata.get("also"):  # true for nan
            wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            wanted += f" or {metadata['also']}" if "also" in metadata else ""
            problems.add(f"{label} must be {wanted}, not {number}")
