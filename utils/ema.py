"""The averaged copy of a network that is validated and kept, and a quick look at what a network holds."""

import copy
import math
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from utils.torch_utils import DistEnv, broadcast_tensors

M = TypeVar("M", bound=nn.Module)


class StateView:
    """The state dict of a network whose modules stay as they are, without the walk through them.

    That takes longer than it does to copy the weights of a small network.

    Args:
        model: with its final modules; what their parameters and buffers are is looked up each time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, dict[str, Any], str]] = [
            (f"{prefix}.{key}" if prefix else key, holder, key)
            for prefix, module in model.named_modules(remove_duplicate=False)
            for holder in (module._parameters, module._buffers)
            for key, tensor in holder.items()
            if tensor is not None and key not in module._non_persistent_buffers_set
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers themselves."""
        return {name: holder[key] for name, holder, key in self._places}


def foreach_lerp(tensors: list[Tensor], ends: list[Tensor], weight: float | Tensor) -> None:
    """Move tensors toward others in place; weight 0 leaves them, 1 takes the others.

    Torch has no fused kernel for a weight () that is on the device; three of them and a copy of the tensors stand in.
    """
    if isinstance(weight, float):
        torch._foreach_lerp_(tensors, ends, weight)
        return
    change = torch._foreach_sub(ends, tensors)
    torch._foreach_mul_(change, weight)
    torch._foreach_add_(tensors, change)


class ModelEMA(Generic[M]):
    """Exponential moving average of everything in a model's state dict, BatchNorm statistics included.

    After update t an entry is d e + (1 - d) m with d(t) = decay (1 - exp(-t / tau)): short memory first, long later.
    Entries that are not floating (counters) are copied.

    Attributes:
        module: the averaged copy, in eval mode, without gradients.
        updates: t, every call of `update` counted, on the host. Skipped ones count too, so that the host need not ask
            the device; they are rare, and d hardly differs.
        skipped: how many of them were skipped, () float32 on the device.

    Args:
        raw_model: on its final device and in its final memory format.
        decay: what d tends to.
        tau: updates after which d has reached 63 % of that.
        buffers_only: follow the buffers and leave the weights, for ranks other than 0: theirs come with `broadcast`.
    """

    def __init__(self, raw_model: M, decay: float = 0.9999, tau: float = 2000.0, *, buffers_only: bool = False) -> None:
        self.module: M = copy.deepcopy(raw_model).eval().requires_grad_(False)
        self.decay, self.tau = decay, tau
        self.updates = 0
        state = self.module.state_dict()
        distinct = {tensor.data_ptr(): name for name, tensor in state.items()}  # tied ones once
        if buffers_only:
            buffers = dict(self.module.named_buffers())
            distinct = {place: name for place, name in distinct.items() if name in buffers}
        self.floating = [name for name in distinct.values() if state[name].is_floating_point()]
        self.counters = [name for name in distinct.values() if name not in set(self.floating)]
        self.skipped = torch.zeros((), device=next(raw_model.parameters()).device)
        self._own = StateView(self.module)
        self._source: tuple[nn.Module, StateView] | None = None

    @torch.no_grad()
    def update(self, raw_model: nn.Module, found_inf: Tensor | None = None) -> None:
        """Move toward the model after an optimizer step; the host does not wait.

        Args:
            raw_model: as after the step; if the step was skipped, with its buffers restored. From the first update on
                its modules stay as they are.
            found_inf: () 1 leaves the average as it was.
        """
        self.updates += 1
        if self._source is None or self._source[0] is not raw_model:
            self._source = raw_model, StateView(raw_model)
        source, target = self._source[1].tensors(), self._own.tensors()
        weight: float | Tensor = 1.0 - self.decay * (1.0 - math.exp(-self.updates / self.tau))
        if found_inf is not None:
            self.skipped += found_inf
            weight = weight * (1.0 - found_inf)
            weight = weight.item() if found_inf.device.type == "cpu" else weight  # on the CPU there is no wait
        foreach_lerp([target[name] for name in self.floating], [source[name] for name in self.floating], weight)
        if self.counters:
            torch._foreach_copy_([target[name] for name in self.counters], [source[name] for name in self.counters])

    def broadcast(self, env: DistEnv) -> None:
        """Give rank 0's average to all ranks' copies. Collective: every rank must call it."""
        broadcast_tensors(list(self.module.state_dict().values()), env)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that moves; the very tensors, not copies."""
        return {"module": self._own.tensors(), "updates": self.updates, "skipped": int(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]
        self.skipped.fill_(state["skipped"])
