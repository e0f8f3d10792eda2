"""Whether the classes of weights are those of a data set: told by their names, wherever weights have some.

Names that differ in upper and lower case, blanks or underscores only are the same.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from utils.core.errors import UserError
from utils.core.wording import first_of
from utils.data.report import Problem

SHOWN = 3  # classes in a message


class Match(NamedTuple):
    """Which class of some weights is which one of a data set with as many.

    Attributes:
        order: (C,) the class of the weights for each class of the data.
        by_name: whether all were found by name; of others those that are left are taken, at their own place if it is.
    """

    order: list[int]
    by_name: bool

    @property
    def moves(self) -> bool:
        """Whether a class has another place in the weights than in the data."""
        return self.order != sorted(self.order)


def same_names(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether these are the same classes in the same order."""
    return [_key(name) for name in names] == [_key(name) for name in others]


def is_unnamed(names: Sequence[str]) -> bool:
    """Whether classes are called by their numbers only, as those of weights without names are."""
    return list(names) == [str(class_id) for class_id in range(len(names))]


def match_names(weights: Sequence[str], data: Sequence[str]) -> Match:
    """Match the names of as many classes, index = class id."""
    own, wanted = [_key(name) for name in weights], [_key(name) for name in data]
    places: dict[str, list[int]] = defaultdict(list)
    for place in reversed(range(len(own))):
        places[own[place]].append(place)
    found = [places[key].pop() if places[key] else None for key in wanted]
    left = dict.fromkeys(place for others in places.values() for place in others)
    by_name = not left
    kept = [place if at is None and place in left else at for place, at in enumerate(found)]
    rest = iter(sorted(left.keys() - {at for at in kept if at is not None}))
    return Match([next(rest) if at is None else at for at in kept], by_name)


def check_names(
    weights: Sequence[str], data: Sequence[str], source: Path, shown: str, strict: bool
) -> tuple[Match, list[Problem]]:
    """Match the names of as many classes, and tell what differs.

    Args:
        weights: names of the classes in the weights; numbers, as weights without names have them, match any.
        data: those of the data set.
        source: YAML of the data set.
        shown: what messages call the weights.
        strict: whether a difference is an error.

    Returns:
        The match, and at most one finding.

    Raises:
        UserError: there is a difference, and ``strict``.
    """
    match = match_names(data if is_unnamed(weights) else weights, data)
    if match.by_name and not match.moves:
        return match, []
    differing = [
        f"class {i} is {here!r}, in {Path(shown).name} {there!r}"
        for i, (here, there) in enumerate(zip(data, weights, strict=True))
        if _key(here) != _key(there)
    ]
    value = first_of(differing, SHOWN, "; ")
    if match.by_name:
        rule = "the same classes in another order, taken by name"
    elif match.moves:
        rule = "other class names, and some in another order; those are taken by name, the others as they are left"
    else:
        rule = "other class names, taken for the same classes"
    finding = Problem(str(source), 0, value, rule)
    if strict:
        raise UserError(f"--strict: {finding}")
    return match, [finding]


def check_measurable(
    weights: Sequence[str], data: Sequence[str], source: Path, shown: str, strict: bool
) -> tuple[Match, list[Problem]]:
    """Match the names of classes that are to be measured; as `check_names`.

    Raises:
        UserError: they are not as many, or some are at other places and others are missing: nothing can be scored.
    """
    if len(weights) != len(data):
        merged = "; the weights are those of a training with --single-cls: give that here too"
        hint = merged if list(weights) == ["item"] else "; use the data set that the weights were trained on"
        raise UserError(f"--weights {shown} knows {len(weights)} classes, --data {source} has {len(data)}{hint}")
    match, findings = check_names(weights, data, source, shown, strict)
    if match.moves and not match.by_name:
        raise UserError(f"{findings[0].file}: {findings[0].value}: these are not the classes of the weights")
    return match, findings


def _key(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()
