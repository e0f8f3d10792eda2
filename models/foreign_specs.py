"""The model YAML of a network that was pickled elsewhere: as the file has it, or written from its layers.

What a file says of a network is plain values by now, of any size and kind, and is checked before it is used.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.parser import OPTIONAL_KEYS, REQUIRED_KEYS
from utils.checkpoints.foreign_files import MOST_LETTERS
from utils.checkpoints.inert_pickle import Record, RefusedError

ACTIVATIONS = {
    "SiLU": "nn.SiLU()",
    "ReLU": "nn.ReLU()",
    "LeakyReLU": "nn.LeakyReLU(0.1)",
    "Hardswish": "nn.Hardswish()",
    "Mish": "nn.Mish()",
    "Identity": "nn.Identity()",
}
"""Names of activation layers -> what a model YAML says for them."""
OF_TORCH = {name: f"nn.{name}" for name in ("Upsample", "MaxPool2d", "ZeroPad2d")}
MOST_VALUES = 20_000  # of a YAML
LARGEST_VALUE = 1 << 31  # of numbers in a YAML


def plain_setting(value: Any) -> tuple[Any, ...]:
    """Return a setting in one form: a length for each direction is the same as one for both."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) > 4 or not all(_is_short(one) for one in values):
        raise RefusedError("it has a layer with a setting of an unknown kind")
    return values[:1] if len(set(values)) == 1 else values


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) < MOST_LETTERS
    return value is None or (isinstance(value, (int, float)) and abs(value) < LARGEST_VALUE)  # not so for NaN


def activation_of(modules: Mapping[str, Record]) -> dict[str, str]:
    """Return what a YAML must say for a network's activations; they may have changed since it was written."""
    acts = [module for path, module in modules.items() if path.endswith(".act")]
    kinds = {act.kind.name for act in acts}
    if len(kinds) != 1 or not kinds <= ACTIVATIONS.keys():
        raise RefusedError(f"its activations are {', '.join(sorted(name[:50] for name in kinds)[:5]) or 'not there'}")
    return {"activation": ACTIVATIONS[kinds.pop()]}


def spec_from_yaml(yaml: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the model YAML that a network was built from, in plain values."""
    known = (*REQUIRED_KEYS, *OPTIONAL_KEYS)
    wanted = {key: yaml[key] for key in known if key in yaml and key != "family"}
    spec = _plain(wanted, [MOST_VALUES], 0)
    assert isinstance(spec, dict)
    return {**spec, "ch": spec.get("ch") or 3}


def _plain(value: Any, left: list[int], depth: int) -> Any:
    """Copy nested plain values, tuples as lists; `left` counts down the values that may still come."""
    left[0] -= 1
    if left[0] < 0 or depth > 8:
        raise RefusedError("its YAML is too large")
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, left, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, left, depth + 1) for item in value]
    if isinstance(value, bool) or _is_short(value):
        return value
    raise RefusedError("its YAML has something else than text and numbers")


def spec_from_layers(modules: Mapping[str, Record], last: int) -> dict[str, Any]:
    """Return a model YAML for the layers of a network that does not hold its own; everything in it is written out."""
    rows = []
    for number in range(last + 1):
        path = f"model.{number}"
        if path not in modules:
            raise RefusedError(f"its layer {number} is missing")
        source = _plain(modules[path].state.get("f"), [MOST_VALUES], 0)
        children = [name for name in modules if name.startswith(f"{path}.") and name[len(path) + 1 :].isdecimal()]
        repeats = len(children) if modules[path].kind.name == "Sequential" else 1
        if repeats > 1:
            path = f"{path}.0"
        name, count, args = _row_of_layer(modules, path)
        rows.append([source, max(repeats, count), name, args])
    return {
        **{"nc": 1, "depth_multiple": 1.0, "width_multiple": 1.0, "channel_multiple": 1, "ch": 3},
        **{"backbone": rows[:-1], "head": rows[-1:]},
    }


def _row_of_layer(modules: Mapping[str, Record], path: str) -> tuple[str, int, list[Any]]:
    """Return a layer's name in a model YAML, its repeats and its arguments."""

    def get(part: str, name: str) -> Any:
        """An attribute of a part of the layer, one number where it has one for each direction."""
        where = f"{path}.{part}".rstrip(".")
        if where not in modules or name not in modules[where].state:
            raise RefusedError(f"its layer {path} has no {part}.{name}")
        values = plain_setting(modules[where].state[name])
        return values[0] if len(values) == 1 else list(values)

    def bottleneck(at: str) -> list[Any]:
        return [get(at, "add"), get(f"{at}cv2.conv", "groups")]

    def share(part: str, whole: str) -> float:
        """Hidden channels as a share of all; half a channel more, so that rounding down gives them back."""
        hidden, channels = get(part, "out_channels"), get(whole, "out_channels")
        return (hidden + 0.5) / channels if hidden * 2 != channels else 0.5

    def count(part: str) -> int:
        return sum(name.startswith(f"{path}.{part}.") and name.count(".") == path.count(".") + 2 for name in modules)

    kind = modules[path].kind.name
    channels = "out_channels"
    arguments: dict[str, Callable[[], list[Any]]] = {
        "Conv": lambda: [get("conv", name) for name in (channels, "kernel_size", "stride", "padding", "groups")],
        "Bottleneck": lambda: [get("cv2.conv", channels), *bottleneck(""), share("cv1.conv", "cv2.conv")],
        "C3": lambda: [get("cv3.conv", channels), *bottleneck("m.0."), share("cv1.conv", "cv3.conv")],
        "SPP": lambda: [get("cv2.conv", channels), [get(f"m.{number}", "kernel_size") for number in range(count("m"))]],
        "SPPF": lambda: [get("cv2.conv", channels), get("m", "kernel_size")],
        "Concat": lambda: [get("", "d")],
        "Detect": lambda: ["nc", "anchors"],
        "Upsample": lambda: [get("", name) for name in ("size", "scale_factor", "mode")],
        "MaxPool2d": lambda: [get("", name) for name in ("kernel_size", "stride", "padding")],
        "ZeroPad2d": lambda: [get("", "padding")],
    }
    if kind not in arguments:
        raise RefusedError(f"its layer {path} is a {kind[:MOST_LETTERS]}, which is not known here")
    return OF_TORCH.get(kind, kind), count("m") if kind == "C3" else 1, arguments[kind]()
