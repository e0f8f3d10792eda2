"""What differs from one family of detectors to another: one record each, of values and plain functions.

The training loop and the validation ask the record and know nothing else about a family.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.foreign_weights import read_weights
from models.tta import augmented_anchors
from models.yolo import DetectionModel, load_state
from utils.config.recipe import Hyp
from utils.config.yaml_files import SHIPPED
from utils.core.errors import UserError
from utils.core.logging import get_logger
from utils.data.downloads import fetch_weights
from utils.data.index import LabelIndex
from utils.dist.collectives import once
from utils.dist.place import DistEnv
from utils.metrics.boxes import non_max_suppression
from utils.training import autoanchor
from utils.training.loss import DetectionLoss


@dataclass(frozen=True)
class InputConvention:
    """How a family wants its images.

    Attributes:
        scale: factor from 8-bit values to the network's input.
        channel_order: "RGB" or "BGR".
    """

    scale: float = 1 / 255
    channel_order: str = "RGB"

    def blank(self, model: DetectionModel, device: torch.device, batch: int = 2, side: int = 0) -> Tensor:
        """Return black images, (batch, 3, side, side) prepared; by default the smallest batch to train on."""
        side = side or 2 * model.max_stride
        return self.prepare(torch.zeros(batch, model.channels, side, side, dtype=torch.uint8, device=device))

    def prepare(self, images: Tensor) -> Tensor:
        """Turn a batch as the loader gives it into the network's input, on the device it is on.

        Args:
            images: (B, 3, H, W) uint8 RGB.

        Returns:
            (B, 3, H, W) in torch's default precision (float32), channels last in memory.
        """
        if self.channel_order == "BGR":
            images = images.flip(1)
        return images.to(torch.get_default_dtype(), memory_format=torch.channels_last).mul_(self.scale)


@dataclass(frozen=True)
class Family:
    """One family of detectors.

    Attributes:
        name: as the key ``family`` of a model YAML has it.
        build: (spec, num_classes, names) -> network.
        fit_labels: (raw_model, index, hyp, imgsz, seed, env): changes what should follow from the training labels,
            before anything is made of the network. Collective.
        criterion: (raw_model, hyp, imgsz, label_smoothing) -> loss.
        losses: names of its terms.
        decode: (raw_model, outputs) -> (B, N, 5 + C) boxes and scores, fp32.
        augmented: (raw_model, images) -> the same, of several looks at each image (test-time augmentation).
        postprocess: decoded predictions and thresholds -> detections; with the signature of `non_max_suppression`.
        inputs: how images are given to the network.
        sync_bn: whether BatchNorm statistics are shared over ranks by default.
        launchable: whether ``--device 0,1`` may start workers for it.
    """

    name: str
    build: Callable[[Mapping[str, Any], int, Sequence[str] | None], DetectionModel]
    fit_labels: Callable[[DetectionModel, LabelIndex, Hyp, int, int, DistEnv], None]
    criterion: Callable[[DetectionModel, Hyp, int, float], DetectionLoss]
    losses: tuple[str, ...]
    decode: Callable[[DetectionModel, Sequence[Tensor]], Tensor]
    augmented: Callable[[DetectionModel, Tensor], Tensor]
    postprocess: Callable[..., list[Tensor]]
    inputs: InputConvention
    sync_bn: bool
    launchable: bool


def fit_anchors(raw_model: DetectionModel, index: LabelIndex, hyp: Hyp, imgsz: int, seed: int, env: DistEnv) -> None:
    """Keep the anchors if they fit the labels of the training split, else find others. Collective.

    They are kept if at least 98 % of the labels match one of them, or if the head is frozen. Found ones are taken only
    if more labels match them; in place of generic ones (the YAML names a number of anchors) also if as many do and more
    closely.

    Args:
        raw_model: the network; its anchors may change.
        index: of the training split; has labels.
        hyp: ``anchor_t``.
        imgsz: of the training, pixels.
        seed: of the run.
        env: this rank's place; all ranks take what rank 0 found.
    """
    log, generic = get_logger(), not isinstance(raw_model.yaml["anchors"], list)
    sizes = autoanchor.label_sizes(index.shapes, index.offsets, index.rows, imgsz)
    tiny = int((sizes < autoanchor.TINY).any(axis=1).sum())
    if tiny:
        log.warning(
            f"{tiny} of {len(sizes)} labels are less than {autoanchor.TINY:g} pixels wide or high at --imgsz {imgsz}: "
            "hard to find; a larger --imgsz helps"
        )
    sizes = autoanchor.vary(sizes, index.offsets, seed)
    anchors = raw_model.anchors.numpy()
    before = autoanchor.measure(anchors, sizes, hyp.anchor_t)
    text = f"best possible recall {before.bpr:.4f}, {before.aat:.2f} anchors match a label: "
    frozen = len(raw_model.model) - 1 in raw_model.frozen
    if frozen or once(lambda: before.bpr >= autoanchor.GOOD_RECALL and not generic, env):
        log.info(f"anchors     {text}kept{', for the head is frozen' * frozen}")
        return
    found = once(lambda: autoanchor.search(sizes, anchors.shape[0], anchors.shape[1], hyp.anchor_t, seed), env)
    after = autoanchor.measure(found, sizes, hyp.anchor_t)
    better = (after.bpr, after.score) > (before.bpr, before.score) if generic else after.bpr > before.bpr
    if better:
        raw_model.set_anchors(found.tolist())
        text = f"best possible recall {before.bpr:.4f} -> {after.bpr:.4f}, {after.aat:.2f} anchors match a label: "
        log.info(f"anchors     {text}replaced by {', '.join(f'{w:g} x {h:g}' for w, h in found.reshape(-1, 2))}")
    else:
        log.info(f"anchors     {text}kept, a search found none that more labels match")


def anchor_loss(raw_model: DetectionModel, hyp: Hyp, imgsz: int, label_smoothing: float = 0.0) -> DetectionLoss:
    """Make the loss for a network's anchors as they are now."""
    head = raw_model.detect
    return DetectionLoss(head.anchors, head.strides, head.num_classes, hyp, imgsz, label_smoothing)


YOLOV5 = Family(
    name="yolov5",
    build=DetectionModel,
    fit_labels=fit_anchors,
    criterion=anchor_loss,
    losses=("box", "obj", "cls"),
    decode=DetectionModel.decode,
    augmented=augmented_anchors,
    postprocess=non_max_suppression,
    inputs=InputConvention(),
    sync_bn=True,
    launchable=True,
)
# Redmon and Farhadi 2018, trained with YOLOv5's head, loss and recipe.
YOLOV3 = replace(YOLOV5, name="yolov3")

FAMILIES = {family.name: family for family in (YOLOV5, YOLOV3)}


def family_of(spec: Mapping[str, Any]) -> Family:
    """Return the family that a model YAML belongs to: its key ``family``, without one YOLOv5.

    Raises:
        UserError: there is no such family.
    """
    name = str(spec.get("family", YOLOV5.name))
    if name not in FAMILIES:
        near = get_close_matches(name.lower(), FAMILIES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FAMILIES)}"
        raise UserError(f"model YAML: unknown family {name!r}; {hint}")
    return FAMILIES[name]


def build_network(spec: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[DetectionModel, Family]:
    """Build the network of a model YAML for some classes.

    Args:
        spec: the YAML's content.
        names: of the classes.
        where: the flag and file that it is from, for messages.

    Raises:
        UserError: the YAML has a mistake.
    """
    try:
        family = family_of(spec)
        return family.build(spec, len(names), names), family
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def load_weights(path: Path, env: DistEnv, flag: str = "--weights") -> dict[str, Any]:
    """Read weights to start from or to use. Collective.

    Args:
        path: a checkpoint of this program or of YOLOv5, a state dict or a safetensors file, read by rank 0.
        env: this rank's place.
        flag: that named it, for messages; may be ''.

    Returns:
        A checkpoint of this program, or what `models.foreign_weights.read_weights` makes of weights from elsewhere.

    Raises:
        UserError: the file is damaged or holds no weights; where the name of a shipped network, such as yolov5s.pt, is
            not there, it says how to train that.
    """

    def read() -> dict[str, Any]:
        fetch_weights(path, flag)
        return read_weights(path, flag)

    try:
        return once(read, env)
    except UserError as error:
        if os.path.exists(path) or not any(path.stem == shipped.stem for shipped in SHIPPED["model"].glob("*.yaml")):
            raise
        raise UserError(
            f"{error}\nor train that network from scratch with train.py --weights '' --cfg {path.stem}.yaml"
        ) from error


def load_model(path: Path, env: DistEnv, flag: str = "") -> tuple[DetectionModel, Family, int]:
    """Build the network that a file of weights holds, with its averaged weights if it has any. Collective.

    Args:
        path: as in `load_weights`.
        env: this rank's place; the network goes to its device.
        flag: that named it, for messages.

    Returns:
        The network in evaluation mode, knowing its class names, its family, and the image size it was trained at.

    Raises:
        UserError: the file is damaged, holds no weights, or does not say for which network.
    """
    return build_model(load_weights(path, env, flag), path, env, flag)


def build_model(
    checkpoint: Mapping[str, Any], path: Path, env: DistEnv, flag: str = ""
) -> tuple[DetectionModel, Family, int]:
    """Build the network of weights that have been read; see `load_model`."""
    shown = f"{flag} {path}".lstrip()
    if "why_no_spec" in checkpoint:
        raise UserError(f"{shown} {checkpoint['why_no_spec']}")
    missing = {"spec", "names", "model", "config"} - checkpoint.keys()
    if missing:
        raise UserError(f"{shown} holds no network: {', '.join(sorted(missing))} is missing")
    model, family = build_network(checkpoint["spec"], checkpoint["names"], shown)
    load_state(model, weights_of(checkpoint), strict=True)
    if "origin" in checkpoint:
        get_logger().info(f"weights     {path}: from {checkpoint['origin']}")
    return model.to(env.device).to(memory_format=torch.channels_last).eval(), family, checkpoint["config"]["imgsz"]


def weights_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the weights that a checkpoint is used with: the averaged ones, where there are any."""
    averaged = checkpoint.get("ema")
    return averaged["module"] if averaged else checkpoint["model"]
