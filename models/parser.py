"""Model YAML -> modules.

A model YAML lists rows ``[from, repeats, module, arguments]``. Each row is run once as soon as it is read, on
PyTorch's meta device (shapes without numbers), so that a mistake is reported with the row where it was made.

Shape letters: L levels of the head, A anchors of a level, C classes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.common import C3, SPP, SPPF, Bottleneck, Concat, Conv
from models.head import Detect
from utils.core.errors import UserError
from utils.core.wording import shown

PROBE_SIDE = 256
"""Side in pixels of the image that rows are tried on: a multiple of every stride up to 256."""

# A YAML from a stranger must not fill the memory; every known network stays far below these.
MOST_REPEATS, MOST_ROWS, MOST_ITEMS = 256, 1000, 256  # of a row, of a network, of a list among a row's arguments
LARGEST_NUMBER = 1 << 16  # any number of a row, channels of a map, classes
MOST_LEVELS = 5  # of the head: as many as the loss knows weights for
CHANNELS = 3  # of images, which are always read in color
MOST_PARAMETERS = 1 << 30
LONGEST_SHOWN = 200  # letters of a value in a message


Types = tuple[type, ...]


class Kind(NamedTuple):
    """What the parser knows about one module of the YAML.

    Attributes:
        build: makes the module from its arguments; a scaled one is given its input channels first.
        arguments: name and accepted types of each argument, in order.
        required: how many of these must be there.
        scaled: the first argument is a number of output channels, multiplied by ``width_multiple``.
        repeats: "stack" modules one after the other, "inside" the module itself (its third argument), or only "once".
        joins: the module reads a list of maps.
    """

    build: Callable[..., nn.Module]
    arguments: dict[str, Types]
    required: int = 1
    scaled: bool = True
    repeats: str = "stack"
    joins: bool = False


INT: Types = (int,)
NUMBER: Types = (int, float)
NONE = type(None)
BLOCK_ARGUMENTS: dict[str, Types] = {"channels": INT, "shortcut": (bool,), "groups": INT, "expansion": NUMBER}
CONV_ARGUMENTS: dict[str, Types] = {"channels": INT, "kernel": INT, "stride": INT, "padding": (int, NONE)}
UPSAMPLE_ARGUMENTS: dict[str, Types] = {"size": (int, NONE), "scale_factor": (*NUMBER, NONE), "mode": (str,)}
MAY_BE_ZERO = ("padding", "dimension")
POOL_ARGUMENTS: dict[str, Types] = {"kernel": INT, "stride": (int, NONE), "padding": INT}

KINDS = {
    "Conv": Kind(Conv, {**CONV_ARGUMENTS, "groups": INT}),
    "Bottleneck": Kind(Bottleneck, BLOCK_ARGUMENTS),
    "C3": Kind(C3, BLOCK_ARGUMENTS, repeats="inside"),
    "SPP": Kind(SPP, {"channels": INT, "kernels": (list,)}),
    "SPPF": Kind(SPPF, {"channels": INT, "kernel": INT}),
    "Concat": Kind(Concat, {"dimension": INT}, required=0, scaled=False, repeats="once", joins=True),
    "Detect": Kind(Detect, {"nc": INT, "anchors": (int, list)}, required=2, scaled=False, repeats="once", joins=True),
    "nn.Upsample": Kind(nn.Upsample, UPSAMPLE_ARGUMENTS, scaled=False),
    "nn.MaxPool2d": Kind(nn.MaxPool2d, POOL_ARGUMENTS, scaled=False),
    "nn.ZeroPad2d": Kind(nn.ZeroPad2d, {"padding": (int, list)}, scaled=False),
}
"""Every module that a model YAML can name. `Detect` stands last, and there only."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "nn.SiLU()": nn.SiLU,
    "nn.ReLU()": nn.ReLU,
    "nn.LeakyReLU(0.1)": partial(nn.LeakyReLU, 0.1),
    "nn.Hardswish()": nn.Hardswish,
    "nn.Mish()": nn.Mish,
    "nn.Identity()": nn.Identity,
}
"""What the YAML's key ``activation`` can say; without it SiLU."""

REQUIRED_KEYS = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")
# `inplace` is understood and has no effect: no layer here writes into its input.
OPTIONAL_KEYS = ("activation", "channel_multiple", "ch", "inplace", "family")


class Network(NamedTuple):
    """A parsed model YAML.

    Attributes:
        layers: one module per row, the head last.
        sources: what each row reads: the index of a row (-1: the image), or several for a module that joins maps.
    """

    layers: nn.Sequential
    sources: tuple[int | tuple[int, ...], ...]


class Row(NamedTuple):
    """One checked row of a model YAML; `where` names it in messages."""

    where: str
    sources: tuple[int, ...]
    repeats: int
    kind: Kind
    args: list[Any]


def parse_model(spec: Mapping[str, Any], num_classes: int) -> Network:
    """Build the modules that a model YAML describes. Nothing in it is evaluated: words stand for themselves.

    Args:
        spec: the YAML's content; its ``nc`` gives way to `num_classes`.
        num_classes: C.

    Raises:
        UserError: names the key or the row, and what is wrong with it.
    """
    check_keys(spec)
    maps = {-1: torch.empty(1, CHANNELS, PROBE_SIDE, PROBE_SIDE, device="meta")}
    rows: list[tuple[Row, list[Tensor]]] = []
    parameters, total = 0, len(spec["backbone"]) + len(spec["head"])
    if total > MOST_ROWS:
        raise UserError(f"model YAML: {total} rows, more than {MOST_ROWS}")
    for index, (where, content) in enumerate(_numbered(spec)):
        row = read_row(where, content, index, spec, num_classes)
        if (row.kind.build is Detect) != (index == total - 1):
            raise UserError(f"{row.where}: Detect is the last row of the head, and no other")
        inputs = [maps[source] for source in row.sources]
        with torch.device("meta"):  # without numbers, which might find no room
            layer = _build(row, inputs)
        parameters += sum(tensor.numel() for tensor in layer.parameters())
        if parameters > MOST_PARAMETERS:
            raise UserError(
                f"{row.where}: with it the network has {parameters} parameters, more than {MOST_PARAMETERS}"
            )
        maps[index] = _probe(row, layer, inputs)
        rows.append((row, inputs))

    network = nn.Sequential(*(_build(row, inputs) for row, inputs in rows))
    sources = tuple(row.sources if row.kind.joins else row.sources[0] for row, _ in rows)
    if "activation" in spec:
        _set_activation(network, spec["activation"])
    return Network(network, sources)


def check_keys(spec: Mapping[str, Any]) -> None:
    """Check the YAML's top-level keys and the values that are not rows.

    Raises:
        UserError: a key is missing or unknown, or its value is of the wrong kind.
    """
    known = REQUIRED_KEYS + OPTIONAL_KEYS
    for key in REQUIRED_KEYS:
        if key not in spec:
            raise UserError(f"model YAML: the key '{key}' is missing")
    for key in spec:
        if key not in known:
            raise UserError(f"model YAML: unknown key {shown(str(key))}{_nearest(str(key), known)}")
    for key in ("depth_multiple", "width_multiple"):
        if not _is_positive(spec[key]):
            raise UserError(f"model YAML: '{key}' is {shown(spec[key])}; give a positive number")
    for key in ("nc", "channel_multiple"):
        if key in spec and not (type(spec[key]) is int and 0 < spec[key] <= LARGEST_NUMBER):
            wanted = f"a positive whole number up to {LARGEST_NUMBER}"
            raise UserError(f"model YAML: '{key}' is {shown(spec[key])}; give {wanted}")
    for key in ("backbone", "head"):
        if not isinstance(spec[key], list) or not spec[key]:
            raise UserError(f"model YAML: '{key}' must be a list of rows [from, repeats, module, arguments]")
    _check_anchors(spec["anchors"])
    _check_channels(spec.get("ch", CHANNELS))


def read_row(where: str, content: Any, index: int, spec: Mapping[str, Any], num_classes: int) -> Row:
    """Check one row and resolve its words and scales.

    Args:
        where: the row's name for messages.
        content: the row as the YAML has it.
        index: its number, counted over backbone and head.
        spec: the YAML's content.
        num_classes: C, what the word ``nc`` stands for.

    Raises:
        UserError: names the row.
    """
    if not (isinstance(content, list) and [type(one) for one in content[2:]] == [str, list]):
        raise UserError(f"{where}: {shown(content)} is not of the form [from, repeats, module, [arguments]]")
    source, repeats, name, given = content
    where = f"{where} ({name[:LONGEST_SHOWN]})"
    if name not in KINDS:
        raise UserError(f"{where}: unknown module{_nearest(name, tuple(KINDS)) or '; known: ' + ', '.join(KINDS)}")
    kind = KINDS[name]
    if type(repeats) is not int or repeats < 1 or (repeats > 1 and kind.repeats == "once"):
        wanted = "1" if kind.repeats == "once" else "a whole number from 1"
        raise UserError(f"{where}: repeats is {shown(repeats)}; it must be {wanted}")
    if repeats > 1:
        repeats = max(round(min(repeats, LARGEST_NUMBER) * min(spec["depth_multiple"], LARGEST_NUMBER)), 1)
    if repeats > MOST_REPEATS:
        raise UserError(f"{where}: it would be repeated {repeats} times, more than {MOST_REPEATS}")

    words = {"nc": num_classes, "anchors": spec["anchors"], "None": None}
    args = [_plain(value, words) for value in given]
    _check_arguments(where, kind, args)
    if kind.build is Detect and args[0] != num_classes:
        raise UserError(f"{where}: its first argument is {args[0]}, but there are {num_classes} classes; write nc")
    if kind.scaled:
        args[0] = _round_up(args[0] * min(spec["width_multiple"], LARGEST_NUMBER), spec.get("channel_multiple", 8))
        if args[0] > LARGEST_NUMBER:
            raise UserError(f"{where}: it would have {args[0]} channels, more than {LARGEST_NUMBER}")
    return Row(where, _resolve(where, source, index, kind), repeats, kind, args)


def _numbered(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section in ("backbone", "head"):
        for number, content in enumerate(spec[section]):
            yield f"model YAML, {section} row {number}", content


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" for a name that resembles a known one, else nothing."""
    name, spelled = name[:LONGEST_SHOWN], {word.lower(): word for word in known}
    spelled |= {word.lower().removeprefix("nn."): word for word in known}
    found = get_close_matches(name.lower(), spelled, 1)
    return f"; did you mean {spelled[found[0]]}?" if found else ""


def _plain(value: Any, words: Mapping[str, Any]) -> Any:
    """Look up a word of the YAML; others stay what they are, without the quotes they may carry twice."""
    if not isinstance(value, str):
        return value
    return words[value] if value in words else value.strip("'\"")


def _round_up(channels: float, multiple: int) -> int:
    return math.ceil(channels / multiple) * multiple


def _is_positive(value: Any) -> bool:
    return type(value) in NUMBER and 0 < value < 1e9


def _check_anchors(levels: Any) -> None:
    """Raise a UserError unless anchors are a number per level, or lists of one length of widths and heights."""
    if type(levels) is int and 0 < levels <= MOST_ITEMS:
        return
    if not isinstance(levels, list) or not levels or not all(isinstance(level, list) for level in levels):
        raise UserError(
            "model YAML: 'anchors' must be a list of levels, each a list of widths and heights in pixels, or a number "
            "of anchors per level"
        )
    for number, level in enumerate(levels):
        if not level or len(level) % 2 or not all(_is_positive(side) for side in level):
            text = shown(level)
            raise UserError(f"model YAML, anchors row {number}: {text} is not a list of widths and heights in pixels")
        if len(level) > MOST_ITEMS:
            raise UserError(f"model YAML, anchors row {number}: {len(level)} numbers, more than {MOST_ITEMS}")
        if len(level) != len(levels[0]):
            raise UserError(f"model YAML, anchors row {number}: all levels must have as many anchors as the first")


def _check_channels(channels: Any) -> None:
    if channels != CHANNELS:
        raise UserError(
            f"model YAML: 'ch' is {shown(channels)}, but images are read with {CHANNELS} channels, gray ones too; "
            "leave the key out"
        )


def _check_arguments(where: str, kind: Kind, args: Sequence[Any]) -> None:
    if not kind.required <= len(args) <= len(kind.arguments):
        count = (
            f"{kind.required} to {len(kind.arguments)}" if kind.required < len(kind.arguments) else f"{kind.required}"
        )
        raise UserError(f"{where}: {len(args)} arguments where it takes {count} [{', '.join(kind.arguments)}]")
    for (name, types), value in zip(kind.arguments.items(), args, strict=False):
        if type(value) not in types:
            wanted = " or ".join("None" if one is NONE else one.__name__ for one in types)
            raise UserError(f"{where}: its argument '{name}' is {shown(value)}; it must be {wanted}")
        lowest = 0 if name in MAY_BE_ZERO else 1
        if type(value) is int and value < lowest:
            raise UserError(f"{where}: its argument '{name}' is {value}; it must be at least {lowest}")
        _check_sizes(where, name, value)


def _check_sizes(where: str, name: str, value: Any) -> None:
    """Raise a UserError for numbers that no network has, also in lists."""
    values = value if isinstance(value, list) else [value]
    if name == "anchors" and isinstance(value, list):
        return  # checked before
    if len(values) > MOST_ITEMS:
        raise UserError(f"{where}: its argument '{name}' has {len(values)} items, more than {MOST_ITEMS}")
    if isinstance(value, list) and any(type(one) is not int for one in values):
        raise UserError(f"{where}: its argument '{name}' is {shown(value)}; it must be a list of whole numbers")
    if any(type(one) in NUMBER and not abs(one) <= LARGEST_NUMBER for one in values):
        raise UserError(f"{where}: its argument '{name}' is {shown(value)}; it must be at most {LARGEST_NUMBER}")


def _resolve(where: str, source: Any, index: int, kind: Kind) -> tuple[int, ...]:
    """Turn "from" into absolute row numbers; -1 is the image, read by the first row."""
    given = source if isinstance(source, list) else [source]
    if not given or any(type(one) is not int for one in given):
        text = shown(source)
        raise UserError(f"{where}: from is {text}; it must be the number of a row, or a list of such numbers")
    if len(given) > 1 and not kind.joins:
        raise UserError(f"{where}: it reads one row, but from lists {len(given)}")
    for one in given:
        if one >= index:
            raise UserError(f"{where}: from points at row {one}, which is not there yet; this one is row {index}")
        if one < -1 and index + one < 0:
            raise UserError(f"{where}: from {one} points before the first row; this one is row {index}")
    return tuple(one if one >= 0 else index + one for one in given)


def _build(row: Row, inputs: Sequence[Tensor]) -> nn.Module:
    """Make a row's module; `inputs` are the maps it reads."""
    if row.kind.build is Detect:
        return _build_head(row, inputs)
    c_in = inputs[0].shape[1]
    try:
        if row.kind.repeats == "inside":
            return row.kind.build(c_in, row.args[0], row.repeats, *row.args[1:])
        if not row.kind.scaled:
            stack = [row.kind.build(*row.args) for _ in range(row.repeats)]
        else:
            widths = [c_in] + [row.args[0]] * (row.repeats - 1)
            stack = [row.kind.build(width, *row.args) for width in widths]
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise _cannot_be_built(row, error) from error
    return stack[0] if len(stack) == 1 else nn.Sequential(*stack)


def _build_head(row: Row, inputs: Sequence[Tensor]) -> Detect:
    """Make the head; strides come from the sizes of the maps, and anchors follow the order of the strides."""
    num_classes, anchors = row.args
    _check_anchors(anchors)
    if len(inputs) > MOST_LEVELS:
        raise UserError(f"{row.where}: it reads {len(inputs)} maps, more than {MOST_LEVELS}")
    if isinstance(anchors, list) and len(anchors) != len(inputs):
        raise UserError(f"{row.where}: 'anchors' has {len(anchors)} levels, but the row reads {len(inputs)} maps")
    for x in inputs:
        if PROBE_SIDE % x.shape[-1]:
            raise UserError(
                f"{row.where}: it reads a map whose side is {x.shape[-1]} at {PROBE_SIDE} px: no whole stride"
            )
    strides = [PROBE_SIDE // x.shape[-1] for x in inputs]
    if strides != sorted(set(strides)):
        raise UserError(f"{row.where}: its maps have strides {strides}; list them from the finest to the coarsest")
    if isinstance(anchors, int):
        anchors = generic_anchors(strides, anchors)
    if _area(anchors[-1]) < _area(anchors[0]):
        anchors = anchors[::-1]
    return Detect(num_classes, anchors, [x.shape[1] for x in inputs], strides)


def generic_anchors(strides: Sequence[int], per_level: int) -> list[list[float]]:
    """Make squares of 4 strides and up to twice that, in even ratios (Lin et al. 2017, "Focal Loss ...", section 4).

    Args:
        strides: of the L levels, pixels.
        per_level: A.

    Returns:
        L lists of A times [w, h], pixels: for networks whose YAML names no sizes.
    """
    sides = [[4.0 * stride * 2 ** (number / per_level) for number in range(per_level)] for stride in strides]
    return [[side for side in level for _ in ("width", "height")] for level in sides]


def _area(sizes: Sequence[float]) -> float:
    """Return the sum of the areas of flat [w0, h0, w1, h1...]."""
    return sum(width * height for width, height in zip(sizes[::2], sizes[1::2], strict=True))


def _probe(row: Row, layer: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Return the map that a row makes, or the outputs of the head."""
    try:
        with torch.no_grad():
            return layer.eval()(list(inputs) if row.kind.joins else inputs[0])
    except (TypeError, ValueError, RuntimeError, IndexError, ArithmeticError) as error:
        raise _cannot_be_built(row, error) from error


def _cannot_be_built(row: Row, error: Exception) -> UserError:
    reason = (str(error) or type(error).__name__).splitlines()[0][:300]
    return UserError(f"{row.where}: it can't be built with the arguments {shown(row.args)}: {reason}")


def _set_activation(network: nn.Module, name: Any) -> None:
    if str(name) not in ACTIVATIONS:
        raise UserError(f"model YAML: 'activation' is {shown(name)}; known: {', '.join(ACTIVATIONS)}")
    for module in network.modules():
        if isinstance(module, Conv):
            module.act = ACTIVATIONS[name]()
