"""How a network gets ready to train: where its structure and weights come from, and what of it stays as it is."""

import math
import os
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from torch import nn

from models.families import Family, family_of, load_weights, weights_of
from models.yolo import DetectionModel, load_state
from utils.config.flags import LARGEST_IMGSZ, TrainConfig
from utils.config.yaml_files import find_yaml, load_yaml
from utils.core.errors import UserError
from utils.core.logging import get_logger
from utils.dist.job_files import shown_weights
from utils.dist.place import ALONE
from utils.torch_utils import BatchPlan

SMALL_BATCH = 16  # images, below which BatchNorm's statistics get noisy


def network_spec(cfg: str, weights: str, checkpoint: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the content of ``--cfg``, or without one the network that ``--weights`` were trained in.

    Args:
        cfg: the flag.
        weights: the flag, for messages.
        checkpoint: content of ``--weights``, needed without ``--cfg``.

    Raises:
        UserError: there is no such file, or the weights do not say.
    """
    if cfg:
        return load_yaml(find_yaml(cfg, "model"))
    assert checkpoint is not None
    spec = checkpoint.get("spec")
    if spec is None:
        why = checkpoint.get("why_no_spec", "does not say which network it is for")
        raise UserError(f"--weights {weights} {why}; add --cfg")
    return spec


def trained_on(checkpoint: Mapping[str, Any], weights: str) -> str:
    """Return the data set YAML that weights were trained on, if it is there.

    Args:
        checkpoint: content of ``--weights``, as `load_weights` gives it.
        weights: the flag, for messages.

    Raises:
        UserError: it is not there, or the weights don't say.
    """
    config = checkpoint.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    if isinstance(data, str) and os.path.isfile(data):
        return data
    why = f"were trained on {data}, which is not there" if data else "don't say what they were trained on"
    raise UserError(f"--data is missing: name the data set; the weights {shown_weights(weights)} {why}")


def with_anchor_count(spec: Mapping[str, Any], per_level: int) -> Mapping[str, Any]:
    """Return a network with so many anchors per level; its own sizes are kept if it has as many already, or at 0.

    Without sizes the number stands in the spec alone, and the network starts from generic ones.
    """
    own = spec.get("anchors")
    own_count = len(own[0]) // 2 if isinstance(own, list) and own and isinstance(own[0], list) else own
    return spec if per_level in (0, own_count) else {**spec, "anchors": per_level}


def start_from(raw_model: DetectionModel, weights: str, checkpoint: Mapping[str, Any], keep_anchors: bool) -> None:
    """Load ``--weights`` into a network; with another number of classes all but the head.

    Args:
        raw_model: the network.
        weights: the flag, for messages.
        checkpoint: its content, as `load_weights` gives it.
        keep_anchors: keep those of the network's YAML, where one was named.

    Raises:
        UserError: no weight of the checkpoint has a place in the network, or only some though the classes agree.
    """
    if not checkpoint.get("ema") and "model" not in checkpoint:
        raise UserError(f"--weights {weights} holds no weights")
    state = dict(weights_of(checkpoint))
    kernels = {name: tensor.shape for name, tensor in raw_model.named_parameters() if tensor.dim() > 1}
    if not any(name in state and state[name].shape == shape for name, shape in kernels.items()):
        raise UserError(
            f"--weights {weights}: the weights don't fit the network, not one tensor has a place in it; name the --cfg "
            "that they were trained in, or none"
        )
    anchors = f"model.{len(raw_model.model) - 1}.anchors"
    if keep_anchors:
        state[anchors] = raw_model.detect.anchors
    try:
        report = load_state(raw_model, state)
    except UserError as error:
        raise UserError(f"--weights {weights}: {error}; name the --cfg that they were trained in, or none") from error
    own = raw_model.state_dict().keys()
    kept = [why for name, why in report.left.items() if name in own]
    text = f"{report.taken - keep_anchors} tensors taken{', anchors of --cfg kept' * keep_anchors}"
    if kept:
        text += f"; {len(kept)} keep their initialization ({kept[0]})"
    if len(report.left) > len(kept):
        text += f"; {len(report.left) - len(kept)} are not in the network"
    origin = f"from {checkpoint['origin']}: " if "origin" in checkpoint else ""
    few = 2 * report.taken < len(own)
    get_logger().log(WARNING if few else INFO, f"weights     {weights}: {origin}{text}")


def freeze(raw_model: DetectionModel, layers: Sequence[int]) -> None:
    """Stop training some layers: one number N means the first N, several mean exactly these.

    Raises:
        UserError: there is no such layer, or nothing is left to train.
    """
    typed = " ".join(map(str, layers))
    frozen = set(range(layers[0]) if len(layers) == 1 else layers)
    outside = sorted(frozen - set(range(len(raw_model.model))))
    if outside:
        last = len(raw_model.model) - 1
        raise UserError(f"--freeze {typed}: there is no layer {outside[0]}, the network has layers 0 to {last}")
    raw_model.freeze(frozen)
    if not any(parameter.requires_grad for parameter in raw_model.parameters()):
        raise UserError(f"--freeze {typed} leaves nothing to train")


def check_launchable(config: TrainConfig, resumed: Mapping[str, Any] | None, devices: int) -> None:
    """Refuse several devices for a family whose workers can't be started by train.py or `YOLO.train` themselves.

    Args:
        config: every flag. What is wrong with its network is left to whoever reads that, with all else that is wrong.
        resumed: checkpoint of the run to go on with.
        devices: that were named.

    Raises:
        UserError: shows how else they are started.
    """
    try:
        weights = load_weights(Path(config.weights), ALONE) if config.weights and not config.cfg else None
        spec = network_spec(config.cfg, config.weights, weights) if resumed is None else resumed["spec"]
        family = family_of(spec)
    except UserError:
        return
    if not family.launchable:
        launcher = f"python -m torch.distributed.run --nproc_per_node {devices}"
        raise UserError(
            f"--device {config.device} names {devices} devices, but no workers can be started for networks of the "
            f"family {family.name} from here; start them with a launcher, on the command line or from Python:\n"
            f"  {launcher} train.py ...\n"
            f"  {launcher} my_script.py    which calls YOLO(...).train(...) without a device"
        )


def choose_sync_bn(wanted: bool | None, family: Family, raw_model: DetectionModel, plan: BatchPlan) -> bool:
    """Decide whether BatchNorm sees the global batch; alone it does anyway.

    Args:
        wanted: ``--sync-bn`` or ``--no-sync-bn``; None leaves it to the family.
        family: of the network.
        raw_model: the network.
        plan: how the batch is shared out.
    """
    if plan.world_size == 1:
        return False
    sync_bn = family.sync_bn if wanted is None else wanted
    has_norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in raw_model.modules())
    if has_norms and not sync_bn and plan.local_batch < SMALL_BATCH:
        get_logger().warning(
            f"BatchNorm sees only the {plan.local_batch} images of its own rank, fewer than {SMALL_BATCH}: results "
            "will differ from those of one device; --sync-bn makes it see all, a larger --batch-size helps as well"
        )
    return sync_bn


def check_imgsz(imgsz: int, raw_model: DetectionModel) -> None:
    """Refuse an image size below the largest stride: nobody wants that rounded up. And a huge one, as weights may have.

    Raises:
        UserError: names both.
    """
    if imgsz > LARGEST_IMGSZ:
        raise UserError(f"--imgsz: the weights were trained at {imgsz} pixels; give {LARGEST_IMGSZ} at most")
    if imgsz < raw_model.max_stride:
        raise UserError(f"--imgsz {imgsz} is below the network's stride; give at least {raw_model.max_stride}")


def fit_imgsz(imgsz: int, raw_model: DetectionModel) -> int:
    """Round an image size up to a multiple of the largest stride, twice the stride at least."""
    stride = raw_model.max_stride
    fitted = max(math.ceil(imgsz / stride), 2) * stride
    if imgsz % stride:
        get_logger().warning(f"--imgsz {imgsz} is not a multiple of the network's stride {stride}; {fitted} is used")
    elif fitted != imgsz:
        get_logger().warning(f"--imgsz {imgsz} is a single stride of the network, two are needed; {fitted} is used")
    return fitted
