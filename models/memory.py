"""Whether a batch fits into memory: an estimate for the CPU, one probing step on a GPU."""

import torch

from models.costs import saved_bytes
from models.yolo import DetectionModel
from utils.core.errors import UserError
from utils.data.image_cache import free_memory
from utils.dist.place import DistEnv
from utils.training.steps import BufferSnapshot, Precision

TRAINED_COPIES = 2  # of the weights that are trained: gradient and momentum


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
