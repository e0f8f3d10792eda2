"""Forward and backward pass as a CUDA graph (``--cuda-graph``): the host starts each with one call."""

import torch
from torch import Tensor, nn

from utils.config.flags import TrainConfig
from utils.run.progress import switched_on
from utils.torch_utils import DistEnv
from utils.training.steps import BufferSnapshot, Precision


def can_capture(config: TrainConfig, env: DistEnv) -> bool:
    """Whether ``--cuda-graph`` was asked for and works here; if only that it was asked for, a line says why not."""
    reasons = {
        f"{env.world_size} ranks exchange statistics and gradients in the middle of it": env.world_size > 1,
        f"it needs CUDA, and this run is on {env.device}": env.device.type != "cuda",
        "--dp makes new copies of the network for each batch": config.dp,
        "--multi-scale changes the size of the images": config.multi_scale,
        "--rect changes the size of the images": config.rect,
    }
    return switched_on(config.cuda_graph, "cuda graph", reasons)


def capture(raw_model: nn.Module, images: Tensor, precision: Precision) -> None:
    """Make a network's forward and backward pass in training mode replay a CUDA graph.

    Weights and statistics stay as they are. Afterwards no parameter or buffer may be replaced by another tensor.

    Args:
        raw_model: on its CUDA device.
        images: (B, 3, H, W) of the shape, dtype and memory format of all that follow; the graph's own input.
        precision: of the training.
    """
    raw_model.train()
    buffers = BufferSnapshot(raw_model)
    with precision.autocast(images.device.type, cache=False):  # a cached weight would be the same at every replay
        torch.cuda.make_graphed_callables(raw_model, (images,), allow_unused_input=True)
    buffers.restore(torch.ones((), device=images.device))  # PyTorch warms up with passes of its own
    own_gradients(raw_model)


def own_gradients(raw_model: nn.Module) -> None:
    """Give parameters gradients in memory of their own.

    A graph writes them to the same place at every replay. Autograd would take that place for ``.grad``, so that the
    second batch of a window would overwrite the sum that it is to be added to.
    """
    for parameter in raw_model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: None if gradient is None else gradient.clone())
