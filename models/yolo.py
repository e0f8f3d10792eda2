"""The network: what a model YAML describes, its forward pass, loading of weights.

Shape letters: B images, L levels of the head, A anchors of a level, N all anchors of all cells and levels, C classes,
H W rows and columns of a level's map.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.head import Detect
from models.parser import CHANNELS, parse_model
from utils.core.errors import UserError


class DetectionModel(nn.Module):
    """A detector built from a model YAML.

    Args:
        spec: the YAML's content.
        num_classes: C; takes the place of the YAML's ``nc``.
        names: of the classes, by class id; "0", "1"... if there are none.

    Attributes:
        model: the rows' modules, the head last; parameter names start with ``model.ROW``.
        yaml: the spec with ``nc`` = C: what is needed to build this network again.
        frozen: rows that are not trained.

    Raises:
        UserError: the YAML has a mistake (see `parse_model`), or the number of names is not C.
    """

    def __init__(self, spec: Mapping[str, Any], num_classes: int, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.channels = CHANNELS
        self.model, self.sources = parse_model(spec, num_classes)
        self.kept = _read_later(self.sources)
        self.num_classes = num_classes
        self.names = [str(i) for i in range(num_classes)] if names is None else list(names)
        if len(self.names) != num_classes:
            raise UserError(f"names lists {len(self.names)} classes, but the network has {num_classes}")
        self.yaml: dict[str, Any] = {**copy.deepcopy(dict(spec)), "nc": num_classes}
        self.frozen: frozenset[int] = frozenset()

    @property
    def detect(self) -> Detect:
        """The head."""
        head = self.model[-1]
        assert isinstance(head, Detect)
        return head

    @property
    def stride(self) -> Tensor:
        """(L,) strides of the levels, pixels, on the CPU whatever the device of the weights."""
        return torch.tensor(self.detect.strides, dtype=torch.float32, device="cpu")

    @property
    def max_stride(self) -> int:
        """Largest stride, pixels: sides of images are multiples of it."""
        return int(max(self.detect.strides))

    @property
    def anchors(self) -> Tensor:
        """(L, A, 2) widths and heights of the head's anchors, pixels, on the CPU."""
        return self.detect.anchors.detach().cpu().double() * self.stride.double().view(-1, 1, 1)

    def freeze(self, rows: Iterable[int]) -> None:
        """Keep rows as they are while others are trained, BatchNorm's statistics included."""
        self.frozen = frozenset(rows)
        for row in self.frozen:
            self.model[row].requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "DetectionModel":
        """Switch to training or evaluation; frozen rows compute as in evaluation, which changes no statistics."""
        super().train(mode)
        for row in self.frozen:
            self.model[row].eval()
        return self

    @torch.no_grad()
    def set_anchors(self, sizes: Sequence[Sequence[Sequence[float]]]) -> None:
        """Take other anchors, as many as before; `yaml` then names them too, so that they are built again with it.

        Args:
            sizes: (L, A, 2) widths and heights, pixels; the finest level first, and with the smallest areas.
        """
        grid = torch.tensor(sizes, dtype=torch.float32) / self.stride.view(-1, 1, 1)
        self.detect.anchors.copy_(grid)
        self.yaml["anchors"] = [[side for size in level for side in size] for level in sizes]
        self.yaml["head"][-1][3][1] = "anchors"  # in case the head's row listed its own

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return the head's raw outputs, L tensors (B, A, H, W, 5 + C).

        Args:
            images: (B, 3, height, width) RGB in [0, 1]; sides a multiple of the largest stride.
        """
        x: Any = images
        maps: dict[int, Tensor] = {}
        for index, (layer, source) in enumerate(zip(self.model, self.sources, strict=True)):
            if isinstance(source, int):
                x = layer(x if source == index - 1 else maps[source])
            else:
                x = layer([x if one == index - 1 else maps[one] for one in source])
            if index in self.kept:
                maps[index] = x
        return x

    def decode(self, outputs: Sequence[Tensor]) -> Tensor:
        """Turn raw outputs into (B, N, 5 + C) boxes and scores; see `Detect.decode`."""
        return self.detect.decode(outputs)


def _read_later(sources: Sequence[int | tuple[int, ...]]) -> frozenset[int]:
    """Return the rows whose maps are read by a row that is not the next one."""
    reads = [(index, (one,) if isinstance(one, int) else one) for index, one in enumerate(sources)]
    return frozenset(source for index, read in reads for source in read if source != index - 1)


@dataclass(frozen=True)
class LoadReport:
    """What `load_state` did.

    Attributes:
        taken: number of tensors that were loaded.
        left: why a tensor was not, by its name; of the weights' and of the network's tensors.
    """

    taken: int
    left: dict[str, str]


def load_state(model: DetectionModel, state: Mapping[str, Tensor], strict: bool | None = None) -> LoadReport:
    """Load weights by name into a network, in the network's own precision.

    Args:
        model: the network.
        state: tensors by state-dict name, in any floating precision.
        strict: every tensor must fit. False: what fits by name and shape is taken, the rest keeps its initialization.
            None: strict if the weights' head has the shape of the network's, and so its number of classes.

    Raises:
        UserError: strict and something differs, or nothing fits at all. The network is then unchanged.
    """
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
    left = {name: "not in the network" for name in state if name not in own}
    for name, tensor in own.items():
        if name not in state:
            left[name] = "not in the weights"
        elif name not in fitting:
            left[name] = f"shape {tuple(state[name].shape)} in the weights, {tuple(tensor.shape)} in the network"

    last_bias = f"model.{len(model.model) - 1}.m.0.bias"
    if strict is None:
        strict = last_bias in fitting
    if left and (strict or not fitting):
        examples = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3])
        raise UserError(f"the weights don't fit the network, {len(left)} tensors differ ({examples})")
    model.load_state_dict(fitting, strict=not left)
    return LoadReport(len(fitting), left)
