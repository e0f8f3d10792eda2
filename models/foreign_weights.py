"""Weights from elsewhere: YOLOv5's checkpoints, state dicts and safetensors files, read without running their code.

What comes out has the keys of a checkpoint of this program: ``model`` (tensors by state-dict name) and, where the
network can be built here, ``spec``, ``names`` and ``config``; else ``why_no_spec`` says why it can't. ``origin`` says
for the log what the file is and what of it is not taken. A network from a file is first built without memory and
compared with the file, layer by layer: so it is no larger than its weights, and computes what the saved one did.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.parser import OPTIONAL_KEYS, REQUIRED_KEYS, check_keys
from models.yolo import DetectionModel
from utils.checkpoints.files import check_readable, checkpoint_content, is_own, non_finite, opened
from utils.checkpoints.inert_pickle import Record, RefusedError
from utils.checkpoints.torch_files import StoredTensor, TorchFile
from utils.config.yaml_files import SHIPPED, load_yaml
from utils.core.errors import UserError

MOST_MODULES = 20_000  # of a network with all its layers' parts; the largest YOLOv5 has about 1,000
MOST_LETTERS = 300  # of the path of such a part
MOST_TENSORS = 10_000
MOST_VALUES = 20_000  # of a YAML
LEAST_TENSORS = 5  # of a layer that a YAML repeats
LARGEST_VALUE = 1 << 31  # of numbers in a YAML
LARGEST_IMGSZ = 1 << 14
DEFAULT_IMGSZ = {32: 640, 64: 1280}  # by largest stride: what YOLOv5's networks are trained at
HALF = (torch.float16, torch.bfloat16)

SETTINGS = (
    *("kernel_size", "stride", "padding", "dilation", "groups", "eps", "negative_slope"),
    *("size", "scale_factor", "mode", "align_corners", "ceil_mode", "add"),
)
"""Attributes of layers that decide what they compute; those of a file's layers must be those of the built ones."""
SAME_KIND = {"SyncBatchNorm": "BatchNorm2d"}
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


def read_weights(path: Path, flag: str = "") -> dict[str, Any]:
    """Read a file of weights: of this program, of YOLOv5, a state dict, or safetensors.

    Args:
        path: of the file; what it is shows in its content, not in its name.
        flag: that named it, for messages.

    Returns:
        A checkpoint of this program as it is, else what the module's docstring says.

    Raises:
        UserError: the file is missing, damaged, holds no weights or such as are not finite, or wants code to be run;
            the sentence names it and the reason.
    """
    shown = f"{flag} {path}".lstrip()
    check_readable(path, shown)
    if _is_safetensors(path):
        found = _from_state(_read_safetensors(path, shown), ["a safetensors file"])
    else:
        with opened(path, flag) as file:
            if is_own(file.root):
                return checkpoint_content(file, shown)
            found = _from_elsewhere(file)
    spoiled = non_finite(found["model"], "weights")
    if spoiled:
        raise UserError(f"{shown} holds weights that are not finite, such as {spoiled[0]}; use an earlier checkpoint")
    return found


def _from_elsewhere(file: TorchFile) -> dict[str, Any]:
    root = file.root
    about = root if isinstance(root, dict) else {}
    averaged = about.get("ema")
    for network in (averaged, about.get("model"), root):
        if isinstance(network, Record) and _is_module(network):
            notes = ["a YOLOv5 checkpoint"] + ["EMA weights"] * (network is averaged)
            notes += ["optimizer state not taken"] * (about.get("optimizer") is not None)
            return _from_network(file, _unwrapped(network), about, notes)
    for weights in (averaged, about.get("model"), about.get("state_dict"), root):
        if isinstance(weights, dict) and weights and all(isinstance(one, StoredTensor) for one in weights.values()):
            return _from_state(_read_tensors(file, weights), ["a state dict"])
    raise RefusedError("it holds neither a network nor tensors by name")


# state dicts ----------------------------------------------------------------------------------------------------------


def _from_state(state: dict[str, Tensor], notes: list[str]) -> dict[str, Any]:
    """Look for the shipped network that weights by name belong to."""
    found = {"model": state, "origin": _origin([*notes, "class names not in it"], state)}
    built = _shipped_network(state)
    if built is None:
        return {**found, "why_no_spec": "holds tensors by name that fit none of the shipped networks"}
    return {**found, "spec": built.yaml, "names": built.names, "config": {"imgsz": _default_imgsz(built)}}


def _shipped_network(state: Mapping[str, Tensor]) -> DetectionModel | None:
    """Return the shipped network that has just these weights, on the meta device."""
    try:
        last = _last_layer(state)
        num_classes = _num_classes(state, last)
    except RefusedError:
        return None
    for path in sorted(SHIPPED["model"].glob("*.yaml")):
        spec = load_yaml(path)
        width = spec["backbone"][0][3][0] * spec["width_multiple"]
        first = state.get("model.0.conv.weight")
        if len(spec["backbone"]) + len(spec["head"]) != last + 1 or first is None or abs(len(first) - width) >= 8:
            continue  # seen without building it
        built = _build(spec, state, last, [str(number) for number in range(num_classes)])
        if not _first_misfit(built, state):
            return built
    return None


def _is_safetensors(path: Path) -> bool:
    """Whether a file starts as such files do: the length of a header, and a header in JSON."""
    with path.open("rb") as file:
        start = file.read(9)
        size = file.seek(0, 2)
    return len(start) == 9 and start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= size - 8


def _read_safetensors(path: Path, shown: str) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(f"{shown} is a safetensors file; to read it: pip install safetensors") from None
    try:
        return _without_prefix(load_file(path))
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{shown} is damaged: {str(error).splitlines()[0][:200]}") from error


# pickled networks -----------------------------------------------------------------------------------------------------


def _from_network(file: TorchFile, network: Record, about: Mapping[Any, Any], notes: list[str]) -> dict[str, Any]:
    """Take the weights of a pickled network, and see whether it can be built here.

    Args:
        file: the open file.
        network: its outermost module.
        about: what else the file holds.
        notes: for the log.
    """
    modules = _modules(network)
    state = _read_tensors(file, _stored_state(modules))
    if not state:
        raise RefusedError("its network has no weights")
    try:
        built = _rebuilt(file, network, modules, state)
    except (RefusedError, UserError) as error:
        why = f"holds a network that can't be built here: {RefusedError(str(error))}"
        return {"model": state, "origin": _origin(notes, state), "why_no_spec": why}
    imgsz = _trained_at(about.get("opt"))
    if imgsz is None:
        imgsz = _default_imgsz(built)
        notes = [*notes, f"its image size is not in it, {imgsz} is taken"]
    found = {"model": state, "origin": _origin(notes, state), "config": {"imgsz": imgsz}}
    return {**found, "spec": built.yaml, "names": built.names}


def _is_module(value: Any) -> bool:
    return isinstance(value, Record) and isinstance(value.state, dict) and "_modules" in value.state


def _part(module: Record, name: str) -> dict[str, Any]:
    """Return one of a module's dicts; {} if it has none."""
    part = module.state.get(name, {})
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        raise RefusedError("it has a layer without the attributes of one")
    return part


def _unwrapped(network: Record) -> Record:
    """Return the network inside of DistributedDataParallel or DataParallel."""
    for _ in range(2):
        inner = _part(network, "_modules")
        if list(inner) == ["module"] and _is_module(inner["module"]):
            network = inner["module"]
    return network


def _modules(network: Record) -> dict[str, Record]:
    """Return a network's modules by path, itself as ''."""
    found = {"": network}
    waiting = [("", network)]
    while waiting:
        path, module = waiting.pop()
        for name, child in _part(module, "_modules").items():
            where = f"{path}.{name}".removeprefix(".")
            if child is None:
                continue
            if not _is_module(child):
                raise RefusedError("it has a layer without the attributes of one")
            if len(found) >= MOST_MODULES or len(where) > MOST_LETTERS:
                raise RefusedError("its network has far too many layers")
            found[where] = child
            waiting.append((where, child))
    return found


def _stored_state(modules: Mapping[str, Record]) -> dict[str, Any]:
    """Return what a network's state dict would hold, not checked so far."""
    state: dict[str, Any] = {}
    for path, module in modules.items():
        passing = module.state.get("_non_persistent_buffers_set")
        buffers = _part(module, "_buffers")
        kept = {name: buffers[name] for name in buffers if not (isinstance(passing, set) and name in passing)}
        for name, tensor in {**_part(module, "_parameters"), **kept}.items():
            if tensor is not None:
                state[f"{path}.{name}".removeprefix(".")] = tensor
    return state


def _read_tensors(file: TorchFile, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read tensors by name, without the prefix that DistributedDataParallel gives them."""
    tensors: dict[str, Tensor] = {}
    if len(stored) > MOST_TENSORS:
        raise RefusedError("it has far too many tensors")
    for name, tensor in stored.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise RefusedError("it has a weight that is no tensor")
        if not name.endswith(".anchor_grid"):  # old heads' anchors once more, in another unit
            tensors[name] = file.tensor(tensor)
    return _without_prefix(tensors)


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    wrapped = all(name.startswith("module.") for name in tensors)
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()} if wrapped else tensors


# building what a file holds -------------------------------------------------------------------------------------------


def _rebuilt(
    file: TorchFile, network: Record, modules: Mapping[str, Record], state: Mapping[str, Tensor]
) -> DetectionModel:
    """Build a pickled network on the meta device.

    Raises:
        RefusedError, UserError: it can't be built, or would not compute the same.
    """
    last = _last_layer(state)
    yaml = network.state.get("yaml")
    spec = _spec_from_yaml(yaml) if isinstance(yaml, dict) else _spec_from_layers(modules, last)
    names = _names(network.state.get("names"), _num_classes(state, last))
    built = _build({**spec, **_activation(modules)}, state, last, names)
    misfit = _first_difference(built, modules) or _first_misfit(built, state)
    if misfit:
        raise RefusedError(f"it is not the one that its own YAML describes, {misfit}")
    strides = network.state.get("stride")
    if isinstance(strides, StoredTensor) and file.tensor(strides).tolist() != built.stride.tolist():
        raise RefusedError("its strides are not those that its own YAML describes")
    return built


def _last_layer(state: Mapping[str, Tensor]) -> int:
    """Return the number of the head's row, the last one that has weights."""
    rows = [name.split(".")[1] for name in state if name.startswith("model.") and name.count(".") > 1]
    numbers = [int(row) for row in rows if row.isascii() and row.isdecimal() and len(row) < 4]
    if not numbers:
        raise RefusedError("its weights have other names than those of a YOLOv5 network")
    return max(numbers)


def _num_classes(state: Mapping[str, Tensor], last: int) -> int:
    anchors, bias = state.get(f"model.{last}.anchors"), state.get(f"model.{last}.m.0.bias")
    if anchors is None or bias is None or anchors.dim() != 3 or anchors.shape[2] != 2 or not anchors.numel():
        raise RefusedError("its last layer is not a head with anchors")
    num_classes = len(bias) // anchors.shape[1] - 5 if bias.dim() == 1 else 0
    if num_classes < 1:
        raise RefusedError("its last layer has no classes")
    return num_classes


def _build(spec: Mapping[str, Any], state: Mapping[str, Tensor], last: int, names: Sequence[str]) -> DetectionModel:
    """Build a network without memory, with the anchors that the weights hold.

    Raises:
        RefusedError, UserError: the spec has a mistake, or another number of layers than there are weights for.
    """
    grid = state[f"model.{last}.anchors"].double()
    if not (torch.isfinite(grid).all() and (grid > 0).all()):
        raise RefusedError("its anchors have no size")
    levels, per_level = grid.shape[:2]
    spec = {**spec, "anchors": [[1.0, 1.0] * per_level] * levels}  # until the strides are known
    check_keys(spec)
    rows = [*spec["backbone"], *spec["head"]]
    if not all(isinstance(row, list) and len(row) == 4 and isinstance(row[3], list) for row in rows):
        raise RefusedError("its YAML has a row that is not [from, repeats, module, arguments]")
    spec["head"] = [*spec["head"][:-1], [*rows[-1][:3], ["nc", "anchors"]]]
    repeats = sum(round(row[1] * spec["depth_multiple"]) for row in rows if isinstance(row[1], int) and row[1] > 1)
    if len(rows) != last + 1 or repeats * LEAST_TENSORS > len(state):
        raise RefusedError("its YAML has another number of layers than there are weights for")
    with torch.device("meta"):
        built = DetectionModel(spec, len(names), names)
    if len(built.stride) != levels:
        raise RefusedError("it has anchors for another number of levels than its head")
    built.set_anchors((grid * built.stride.double().view(-1, 1, 1)).tolist())
    return built


def _first_misfit(built: DetectionModel, state: Mapping[str, Tensor]) -> str:
    """Return where names or shapes of weights differ from a network's, '' if nowhere."""
    own = built.state_dict()
    for name in [*own, *state]:
        if name not in own or name not in state:
            return f"{name} is only in {'the weights' if name in state else 'the YAML'}"
        if own[name].shape != state[name].shape or own[name].is_floating_point() != state[name].is_floating_point():
            return f"{name} is {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
    return ""


def _first_difference(built: DetectionModel, modules: Mapping[str, Record]) -> str:
    """Return where layers differ from a network's, '' if nowhere: kinds, and settings that a YAML does not tell."""
    own = dict(built.named_modules())
    for path in [*own, *modules]:
        if path not in own or path not in modules:
            return f"{path} is only in {'the network' if path in modules else 'the YAML'}"
        kind, wanted = modules[path].kind.name[:MOST_LETTERS], type(own[path]).__name__
        if not path:  # the network itself has names of its own
            continue
        if SAME_KIND.get(kind, kind) != wanted:
            return f"{path} is a {kind} instead of a {wanted}"
        attributes = modules[path].state
        for name in SETTINGS:
            if name in attributes and hasattr(own[path], name):
                there, here = _setting(attributes[name]), _setting(getattr(own[path], name))
                if there != here:
                    return f"{path} has {name} {there} instead of {here}"
    return ""


def _setting(value: Any) -> tuple[Any, ...]:
    """Return a setting in one form: a length for each direction is the same as one for both."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) > 4 or not all(_is_short(one) for one in values):
        raise RefusedError("it has a layer with a setting of an unknown kind")
    return values[:1] if len(set(values)) == 1 else values


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) < MOST_LETTERS
    return value is None or (isinstance(value, (int, float)) and abs(value) < LARGEST_VALUE)  # not so for NaN


def _activation(modules: Mapping[str, Record]) -> dict[str, str]:
    """Return what a YAML must say for a network's activations; they may have changed since it was written."""
    acts = [module for path, module in modules.items() if path.endswith(".act")]
    kinds = {act.kind.name for act in acts}
    if len(kinds) != 1 or not kinds <= ACTIVATIONS.keys():
        raise RefusedError(f"its activations are {', '.join(sorted(name[:50] for name in kinds)[:5]) or 'not there'}")
    return {"activation": ACTIVATIONS[kinds.pop()]}


def _spec_from_yaml(yaml: Mapping[Any, Any]) -> dict[str, Any]:
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


def _spec_from_layers(modules: Mapping[str, Record], last: int) -> dict[str, Any]:
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
        values = _setting(modules[where].state[name])
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


# what else a file says ------------------------------------------------------------------------------------------------


def _names(names: Any, num_classes: int) -> list[str]:
    """Return the names of classes from a list, or a dict by class id; their numbers if there are none."""
    if names is None:
        return [str(number) for number in range(num_classes)]
    if isinstance(names, dict) and names.keys() == set(range(len(names))):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, (str, int, float)) for name in names):
        raise RefusedError("the names of its classes are no list")
    if len(names) != num_classes:
        raise RefusedError(f"it names {len(names)} classes, but its head has {num_classes}")
    return [name[:MOST_LETTERS] if isinstance(name, str) else f"{name:g}" for name in names]


def _trained_at(options: Any) -> int | None:
    """Return the image size in the options of a training, a dict or argparse's namespace; None if it is not there."""
    options = options.state if isinstance(options, Record) else options
    imgsz = options.get("imgsz") if isinstance(options, dict) else None
    if isinstance(imgsz, (list, tuple)) and imgsz:
        imgsz = imgsz[0]
    return imgsz if type(imgsz) is int and 0 < imgsz <= LARGEST_IMGSZ else None


def _default_imgsz(built: DetectionModel) -> int:
    return DEFAULT_IMGSZ.get(built.max_stride, 640)


def _origin(notes: Sequence[str], state: Mapping[str, Tensor]) -> str:
    """Return what a file is and, in brackets, what is to be known about it."""
    notes = [*notes, *(["fp16 in the file"] if any(tensor.dtype in HALF for tensor in state.values()) else [])]
    return notes[0] if len(notes) == 1 else f"{notes[0]} ({', '.join(notes[1:])})"
