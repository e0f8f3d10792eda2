"""How a network gets ready to train: where its structure and weights come from, and what of it stays as it is."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.families import weights_of
from models.yolo import DetectionModel, load_state
from utils.config import find_yaml, load_yaml
from utils.errors import UserError
from utils.logging import get_logger
from utils.torch_utils import load_checkpoint


def network_spec(cfg: str, weights: str) -> Mapping[str, Any]:
    """Return the content of ``--cfg``, or without one the network that ``--weights`` were trained in.

    Raises:
        UserError: there is no such file, or the weights do not say.
    """
    if cfg:
        return load_yaml(find_yaml(cfg, "model"))
    spec = load_checkpoint(Path(weights)).get("spec")
    if spec is None:
        raise UserError(f"--weights {weights} does not say which network it is for; add --cfg")
    return spec


def start_from(raw_model: DetectionModel, weights: str, keep_anchors: bool) -> None:
    """Load ``--weights`` into a network; with another number of classes all but the head.

    Args:
        raw_model: the network.
        weights: checkpoint of this program.
        keep_anchors: keep those of the network's YAML, where one was named.
    """
    state = dict(weights_of(load_checkpoint(Path(weights))))
    anchors = f"model.{len(raw_model.model) - 1}.anchors"
    if keep_anchors:
        state[anchors] = raw_model.detect.anchors
    report = load_state(raw_model, state)
    left = f"; {len(report.left)} keep their initialization ({next(iter(report.left.values()))})" if report.left else ""
    get_logger().info(f"weights     {weights}: {report.taken} tensors taken{left}")


def freeze(raw_model: DetectionModel, layers: Sequence[int]) -> None:
    """Stop training some layers: one number N means the first N, several mean exactly these. BatchNorm still adapts."""
    frozen = set(range(layers[0]) if len(layers) == 1 else layers)
    outside = sorted(frozen - set(range(len(raw_model.model))))
    if outside:
        raise UserError(f"--freeze {outside[0]}: the network has layers 0 to {len(raw_model.model) - 1}")
    for layer in frozen:
        raw_model.model[layer].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in raw_model.parameters()):
        raise UserError(f"--freeze {' '.join(map(str, layers))} leaves nothing to train")


def fit_imgsz(imgsz: int, raw_model: DetectionModel) -> int:
    """Round an image size up to a multiple of the largest stride, twice the stride at least."""
    stride = raw_model.max_stride
    fitted = max(math.ceil(imgsz / stride), 2) * stride
    if fitted != imgsz:
        get_logger().warning(f"--imgsz {imgsz} is not a multiple of the network's stride {stride}; {fitted} is used")
    return fitted
