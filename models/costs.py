"""What a pass of a network costs: operations and memory, counted without computing it; whether a batch fits."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from models.yolo import DetectionModel
from utils.core.errors import UserError
from utils.data.image_cache import free_memory
from utils.dist.place import DistEnv
from utils.training.steps import BufferSnapshot, Precision

TRAINED_COPIES = 2  # of the weights that are trained: gradient and momentum


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


def check_batch(
    raw_model: DetectionModel, batch: int, imgsz: int, precision: Precision, env: DistEnv, shares: int = 1
) -> int:
    """Refuse a batch that one device can't hold. The network is left as it was.

    Args:
        raw_model: the network, on the device, in training mode.
        batch: images of one forward and backward pass on this device.
        imgsz: largest side of the images, pixels.
        precision: of the forward pass.
        env: this rank's place.
        shares: devices that a global batch is shared out over.

    Returns:
        Least bytes of the machine's memory that a step takes on all its ranks together; 0 where devices have their own.

    Raises:
        UserError: names the batch, what it would take, and a global batch that fits.
    """
    if env.device.type == "cpu":
        return _check_estimate(raw_model, batch, imgsz, precision, env.local_world_size, shares)
    if env.device.type == "cuda":
        _probe(raw_model, batch, imgsz, precision, env.device, shares)
    return 0


def _check_estimate(
    raw_model: DetectionModel, batch: int, imgsz: int, precision: Precision, ranks: int, shares: int
) -> int:
    """Compare the least that a step takes with what is free; so close to it that no batch is refused that would fit.

    All ranks of a machine live in the same memory, and ask before any of them has begun to fill it. The weights are in
    there already.
    """
    width = 1.0 if precision.name == "off" else 0.5  # of what is kept, in fp32
    per_image = int(saved_bytes(raw_model, imgsz) * width)
    average = sum(parameter.nbytes for parameter in raw_model.parameters())
    trained = sum(parameter.nbytes for parameter in raw_model.parameters() if parameter.requires_grad)
    fixed = average + TRAINED_COPIES * trained
    free = free_memory()
    needed = ranks * (fixed + batch * per_image)
    if needed > free:
        fitting = (free // ranks - fixed) // per_image
        raise UserError(
            f"--batch-size: a step of {batch} images at {imgsz} pixels{f' on each of {ranks} ranks' * (ranks > 1)} "
            f"takes at least {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; use "
            + (f"--batch-size {_round_down(fitting) * shares}" if fitting > 0 else "a smaller network or --imgsz")
            + " or fewer ranks" * (ranks > 1)
        )
    return needed


def _probe(
    raw_model: DetectionModel, batch: int, imgsz: int, precision: Precision, device: torch.device, shares: int
) -> None:
    """Run one step on grey images on a GPU, without changing weights or statistics."""
    buffers = BufferSnapshot(raw_model)
    buffers.take()
    images, failed = None, False
    try:
        images = torch.full((batch, raw_model.channels, imgsz, imgsz), 0.5, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        with precision.autocast(device.type):
            outputs = raw_model(images)
        torch.stack([level.float().square().mean() for level in outputs]).sum().backward()
    except torch.OutOfMemoryError:
        failed = True  # raised outside of this block, where the exception no longer holds the tensors
    finally:
        images = outputs = None
        raw_model.zero_grad(set_to_none=True)
        buffers.restore(torch.ones((), device=device))
        torch.cuda.empty_cache()
    if failed:
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(
            f"--batch-size: a step of {batch} images at {imgsz} pixels does not fit into the {total / 2**30:.0f} GiB "
            f"of {device}, of which {free / 2**30:.1f} are free; try --batch-size {_round_down(batch - 1) * shares} "
            "or a smaller --imgsz"
        )


def _round_down(batch: int) -> int:
    """Return the largest power of two that is not above a batch, at least 1."""
    return 1 << max(batch, 1).bit_length() - 1
