"""What a pass of a network costs, without computing it: operations, and memory that the backward pass needs."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from models.yolo import DetectionModel


def count_flops(model: DetectionModel, imgsz: int) -> int:
    """Count the operations of one forward pass of one square image: 2 x multiply-adds of convolutions and products.

    The network is left as it is.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _pass(model, _state_on_meta(model), imgsz)
    return counter.get_total_flops()


def saved_bytes(model: DetectionModel, imgsz: int) -> int:
    """Bytes per image that a forward pass in fp32 keeps for the backward pass. The network is left as it is.

    Each map counts once, weights and statistics don't. The true need is higher: the loss, gradients of activations and
    buffers of the kernels come on top.
    """
    state = _state_on_meta(model)
    own = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in state.values()}
    kept = dict(own)  # holding a storage keeps its id from being given to another one

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dim() > 1:  # a map; the others are statistics of channels
            storage = tensor.untyped_storage()
            kept[id(storage)] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _pass(model, state, imgsz)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


def _state_on_meta(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers without numbers; what autograd follows it still follows."""
    return {name: tensor.to("meta") for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _pass(model: DetectionModel, state: dict[str, Tensor], imgsz: int) -> None:
    """Run one image through a network on the meta device, in evaluation mode: BatchNorm would count the pass."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        functional_call(model, state, (torch.empty(1, model.channels, imgsz, imgsz, device="meta"),))
    finally:
        for module in training:
            module.training = True
