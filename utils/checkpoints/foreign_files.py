"""What files of weights from elsewhere hold: pickled networks as records, tensors by name, safetensors files.

No code of a file runs: see `utils.checkpoints.inert_pickle`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from utils.checkpoints.inert_pickle import Record, RefusedError
from utils.checkpoints.torch_files import StoredTensor, TorchFile
from utils.core.errors import UserError

MOST_MODULES = 20_000  # of a network with all its layers' parts; the largest YOLOv5 has about 1,000
MOST_LETTERS = 300  # of the path of such a part
MOST_TENSORS = 10_000


def is_safetensors(path: Path) -> bool:
    """Whether a file starts as such files do: the length of a header, and a header in JSON."""
    with path.open("rb") as file:
        start = file.read(9)
        size = file.seek(0, 2)
    return len(start) == 9 and start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= size - 8


def read_safetensors(path: Path, shown: str) -> dict[str, Tensor]:
    """Read a safetensors file, called ``shown`` in messages."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(f"{shown} is a safetensors file; to read it: pip install safetensors") from None
    try:
        return _without_prefix(load_file(path))
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{shown} is damaged: {str(error).splitlines()[0][:200]}") from error


def is_module(value: Any) -> bool:
    """Whether a pickled value was a torch module."""
    return isinstance(value, Record) and isinstance(value.state, dict) and "_modules" in value.state


def _part(module: Record, name: str) -> dict[str, Any]:
    """Return one of a module's dicts; {} if it has none."""
    part = module.state.get(name, {})
    if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
        raise RefusedError("it has a layer without the attributes of one")
    return part


def unwrapped(network: Record) -> Record:
    """Return the network inside of DistributedDataParallel or DataParallel."""
    for _ in range(2):
        inner = _part(network, "_modules")
        if list(inner) == ["module"] and is_module(inner["module"]):
            network = inner["module"]
    return network


def modules_of(network: Record) -> dict[str, Record]:
    """Return a network's modules by path, itself as ''."""
    found = {"": network}
    waiting = [("", network)]
    while waiting:
        path, module = waiting.pop()
        for name, child in _part(module, "_modules").items():
            where = f"{path}.{name}".removeprefix(".")
            if child is None:
                continue
            if not is_module(child):
                raise RefusedError("it has a layer without the attributes of one")
            if len(found) >= MOST_MODULES or len(where) > MOST_LETTERS:
                raise RefusedError("its network has far too many layers")
            found[where] = child
            waiting.append((where, child))
    return found


def stored_state(modules: Mapping[str, Record]) -> dict[str, Any]:
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


def read_tensors(file: TorchFile, stored: Mapping[str, Any]) -> dict[str, Tensor]:
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
