"""Weights from elsewhere, with the network that they are of: YOLOv5's checkpoints, state dicts and safetensors files.

What comes out has the keys of a checkpoint of this program: ``model`` (tensors by state-dict name) and, where the
network can be built here, ``spec``, ``names`` and ``config``; else ``why_no_spec`` says why it can't. ``origin`` says
for the log what the file is and what of it is not taken. A network from a file is first built without memory and
compared with the file, layer by layer: so it is no larger than its weights, and computes what the saved one did.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.foreign_specs import activation_of, plain_setting, spec_from_layers, spec_from_yaml
from models.parser import check_keys
from models.yolo import DetectionModel
from utils.checkpoints.files import check_readable, checkpoint_content, is_own, non_finite, opened
from utils.checkpoints.foreign_files import (
    MOST_LETTERS,
    is_module,
    is_safetensors,
    modules_of,
    read_safetensors,
    read_tensors,
    stored_state,
    unwrapped,
)
from utils.checkpoints.inert_pickle import Record, RefusedError
from utils.checkpoints.torch_files import StoredTensor, TorchFile
from utils.config.flags import LARGEST_IMGSZ
from utils.config.yaml_files import SHIPPED, load_yaml
from utils.core.errors import UserError

LEAST_TENSORS = 5  # of a layer that a YAML repeats
DEFAULT_IMGSZ = {32: 640, 64: 1280}  # by largest stride: what YOLOv5's networks are trained at
HALF = (torch.float16, torch.bfloat16)
SETTINGS = (
    *("kernel_size", "stride", "padding", "dilation", "groups", "eps", "negative_slope"),
    *("size", "scale_factor", "mode", "align_corners", "ceil_mode", "add"),
)
"""Attributes of layers that decide what they compute; those of a file's layers must be those of the built ones."""
SAME_KIND = {"SyncBatchNorm": "BatchNorm2d"}


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
    if is_safetensors(path):
        found = _from_state(read_safetensors(path, shown), ["a safetensors file"])
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
        if isinstance(network, Record) and is_module(network):
            notes = ["a YOLOv5 checkpoint"] + ["EMA weights"] * (network is averaged)
            notes += ["optimizer state not taken"] * (about.get("optimizer") is not None)
            return _from_network(file, unwrapped(network), about, notes)
    for weights in (averaged, about.get("model"), about.get("state_dict"), root):
        if isinstance(weights, dict) and weights and all(isinstance(one, StoredTensor) for one in weights.values()):
            return _from_state(read_tensors(file, weights), ["a state dict"])
    raise RefusedError("it holds neither a network nor tensors by name")


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


def _from_network(file: TorchFile, network: Record, about: Mapping[Any, Any], notes: list[str]) -> dict[str, Any]:
    """Take the weights of a pickled network, and see whether it can be built here.

    Args:
        file: the open file.
        network: its outermost module.
        about: what else the file holds.
        notes: for the log.
    """
    modules = modules_of(network)
    state = read_tensors(file, stored_state(modules))
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


def _rebuilt(
    file: TorchFile, network: Record, modules: Mapping[str, Record], state: Mapping[str, Tensor]
) -> DetectionModel:
    """Build a pickled network on the meta device.

    Raises:
        RefusedError, UserError: it can't be built, or would not compute the same.
    """
    last = _last_layer(state)
    yaml = network.state.get("yaml")
    spec = spec_from_yaml(yaml) if isinstance(yaml, dict) else spec_from_layers(modules, last)
    names = _names(network.state.get("names"), _num_classes(state, last))
    built = _build({**spec, **activation_of(modules)}, state, last, names)
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
                there, here = plain_setting(attributes[name]), plain_setting(getattr(own[path], name))
                if there != here:
                    return f"{path} has {name} {there} instead of {here}"
    return ""


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
