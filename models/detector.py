"""A network with everything between pictures and boxes: fitting, inference, suppression, scaling back."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.build import check_imgsz, fit_imgsz
from models.families import Family
from models.yolo import DetectionModel
from utils.config.data_yaml import load_data
from utils.config.flags import DetectConfig
from utils.core.devices import time_on
from utils.core.errors import Problems, UserError
from utils.core.logging import get_logger
from utils.core.wording import first_of
from utils.data.class_names import is_unnamed, same_names
from utils.data.resizing import letterbox
from utils.metrics.boxes import scale_boxes

SHOWN_NAMES = 4  # in a message


class Detector:
    """A network that takes pictures and gives boxes.

    Args:
        model: the raw network, in evaluation mode, on its device; left as it is.
        family: how its inputs are prepared, its outputs decoded and post-processed.
        imgsz: (height, width) that a picture is fitted into, multiples of the network's stride.
        config: thresholds, classes and precision.
        device: where the network is.
    """

    def __init__(
        self, model: DetectionModel, family: Family, imgsz: tuple[int, int], config: DetectConfig, device: torch.device
    ) -> None:
        self.model = copy.deepcopy(model).half() if config.half else model
        self.seconds = np.zeros(3)  # [preparing, inference, NMS], summed
        self._told = False  # that a picture is full of detections
        self._family, self._imgsz, self._config, self._device = family, imgsz, config, device

    @torch.inference_mode()
    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.float32]]:
        """Detect objects; pictures that have one shape as network inputs share a forward pass.

        Args:
            images: (H, W, 3) uint8 BGR each, of any sizes.

        Returns:
            For each (K, 6) [x1, y1, x2, y2, confidence, class], xyxy, pixels of the picture, best first.
        """
        start = time_on(self._device)
        inputs = [fit(image, self._imgsz, self.model.max_stride) for image in images]
        shapes: dict[tuple[int, ...], list[int]] = {}
        for number, entry in enumerate(inputs):
            shapes.setdefault(entry.pixels.shape, []).append(number)
        self.seconds[0] += time_on(self._device) - start
        detections: list[NDArray[np.float32]] = [np.zeros((0, 6), np.float32)] * len(images)
        for numbers in shapes.values():
            together = self._forward([inputs[number].pixels for number in numbers])
            for number, found in zip(numbers, together, strict=True):
                entry = inputs[number]
                height, width = images[number].shape[:2]
                found[:, :4] = scale_boxes(found[:, :4], entry.ratio, entry.left, entry.top, (height, width))
                detections[number] = found.cpu().numpy()
        return detections

    def _forward(self, inputs: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """Run the network on (H, W, 3) BGR pictures of one shape; (K, 6) in pixels of these for each."""
        start = time_on(self._device)
        pixels = np.stack(inputs)[..., ::-1].transpose(0, 3, 1, 2)  # (B, 3, H, W) RGB
        images = self._family.inputs.prepare(torch.from_numpy(np.ascontiguousarray(pixels)).to(self._device))
        prepared = time_on(self._device)
        images = images.half() if self._config.half else images
        try:
            if self._config.augment:
                decoded = self._family.augmented(self.model, images)
            else:
                decoded = self._family.decode(self.model, self.model(images))
        except torch.OutOfMemoryError:
            raise UserError(
                f"--batch-size {self._config.batch_size}: {len(inputs)} pictures of {pixels.shape[2]} x "
                f"{pixels.shape[3]} don't fit into the memory of {self._device}; use a smaller one, or --imgsz"
            ) from None
        inferred = time_on(self._device)
        config = self._config
        detections = self._family.postprocess(
            decoded,
            config.conf_thres,
            config.iou_thres,
            multi_label=False,
            max_det=config.max_det,
            agnostic=config.agnostic_nms,
            classes=config.classes or None,
        )
        self.seconds += np.diff([start, prepared, inferred, time_on(self._device)])
        if not self._told and config.max_det == DetectConfig.max_det and max(map(len, detections)) == config.max_det:
            self._told = True
            get_logger().warning(
                f"a picture has {config.max_det} detections, and maybe more: --max-det lets them through"
            )
        return detections

    def warm_up(self) -> None:
        """Let a GPU choose and load its kernels, so that the first picture is as fast as the others."""
        if self._device.type == "cuda":
            self([np.zeros((*self._imgsz, 3), np.uint8)])
            self.seconds[:] = 0


@dataclass(frozen=True)
class NetworkInput:
    """A picture as the network takes it: ``pixels`` (H, W, 3) uint8 BGR, and where the original is in there."""

    pixels: NDArray[np.uint8]
    ratio: float
    left: int
    top: int


def fit(image: NDArray[np.uint8], imgsz: tuple[int, int], stride: int) -> NetworkInput:
    """Resize a picture into ``imgsz`` in proportion, and pad each side to the next multiple of the stride.

    Args:
        image: (H, W, 3) uint8 BGR.
        imgsz: (height, width), multiples of the stride.
        stride: the network's largest.
    """
    height, width = image.shape[:2]
    ratio = min(imgsz[0] / height, imgsz[1] / width)
    h, w = max(round(height * ratio), 1), max(round(width * ratio), 1)
    if (h, w) != (height, width):
        image = np.asarray(cv2.resize(image, (w, h), interpolation=cv2.INTER_LINEAR), np.uint8)
    pixels, left, top = letterbox(image, (-(-h // stride) * stride, -(-w // stride) * stride))
    return NetworkInput(pixels, ratio, left, top)


def build_detector(
    model: DetectionModel, family: Family, trained_at: int, config: DetectConfig, device: torch.device
) -> Detector:
    """Make a detector of a network and flags that fit it.

    Args:
        model: the raw network, in evaluation mode, on its device.
        family: of the network.
        trained_at: the image size in pixels that ``--imgsz 0`` means.
        config: what is wanted.
        device: where the network is.

    Raises:
        UserError: lists image sizes below the network's stride and classes that it does not know; with ``data`` also
            what is wrong with that.
    """
    problems = Problems()
    sides = [side or trained_at for side in config.imgsz]
    for side in sides:
        problems.attempt(lambda: check_imgsz(side, model))  # noqa: B023
    if max(config.classes, default=0) >= model.num_classes:
        last = model.num_classes - 1
        problems.add(f"--classes {max(config.classes)}: {config.weights} knows the classes 0 to {last}")
    if config.data:
        problems.attempt(lambda: take_names(model, config))
    problems.raise_if_any()
    height, width = ([fit_imgsz(side, model) for side in sides] * 2)[:2]
    return Detector(model, family, (height, width), config, device)


def take_names(model: DetectionModel, config: DetectConfig) -> None:
    """Give a network whose weights name no classes the names of ``--data``; say if the two differ.

    Raises:
        UserError: the data set can't be read, or has another number of classes than weights without names.
    """
    names = load_data(config.data).names
    if same_names(names, model.names):
        return
    nameless = is_unnamed(model.names)
    if nameless and len(names) != model.num_classes:
        raise UserError(
            f"--data {config.data} names {len(names)} classes, but {config.weights} knows {model.num_classes}; "
            "name the data set that the weights were trained on, or leave --data out"
        )
    if nameless:
        model.names = names
    else:
        get_logger().warning(
            f"--data {config.data} has other class names than {config.weights}: {first_of(names, SHOWN_NAMES)} in "
            f"place of {first_of(model.names, SHOWN_NAMES)}; those of the weights are used"
        )
