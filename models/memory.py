"""Whether a batch fits into memory: an estimate for the CPU, one probing step on a GPU."""

import torch

from models.costs import saved_bytes
from models.yolo import DetectionModel
from utils.errors import UserError
from utils.image_cache import free_memory
from utils.steps import BufferSnapshot, Precision

COPIES = 4  # of the weights: raw, gradient, momentum, average


def check_batch(raw_model: DetectionModel, batch: int, imgsz: int, precision: Precision, device: torch.device) -> None:
    """Refuse a batch that one device can't hold. The network is left as it was.

    Args:
        raw_model: the network, on the device, in training mode.
        batch: images of one forward and backward pass on this device.
        imgsz: largest side of the images, pixels.
        precision: of the forward pass.
        device: where.

    Raises:
        UserError: names the batch, what it would take, and a batch that fits.
    """
    if device.type == "cpu":
        _check_estimate(raw_model, batch, imgsz, precision)
    elif device.type == "cuda":
        _probe(raw_model, batch, imgsz, precision, device)


def _check_estimate(raw_model: DetectionModel, batch: int, imgsz: int, precision: Precision) -> None:
    """Compare the least that a step takes with what is free; so close to it that no batch is refused that would fit."""
    width = 1.0 if precision.name == "off" else 0.5  # of what is kept, in fp32
    per_image = int(saved_bytes(raw_model, imgsz) * width)
    fixed = COPIES * sum(parameter.numel() * parameter.element_size() for parameter in raw_model.parameters())
    free = free_memory()
    needed = fixed + batch * per_image
    if needed > free:
        fitting = (free - fixed) // per_image
        raise UserError(
            f"--batch-size: a step of {batch} images at {imgsz} pixels takes at least {needed / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free; use "
            + (f"--batch-size {_round_down(fitting)}" if fitting > 0 else "a smaller network or --imgsz")
        )


def _probe(raw_model: DetectionModel, batch: int, imgsz: int, precision: Precision, device: torch.device) -> None:
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
            f"of {device}, of which {free / 2**30:.1f} are free; try --batch-size {_round_down(batch - 1)} "
            "or a smaller --imgsz"
        )


def _round_down(batch: int) -> int:
    """Return the largest power of two that is not above a batch, at least 1."""
    return 1 << max(batch, 1).bit_length() - 1
