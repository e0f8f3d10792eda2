"""Find objects in images, videos and streams.

python detect.py --weights runs/train/exp/weights/best.pt                           the pictures in data/images
python detect.py --weights best.pt --source 'photos/**/*.jpg' --save-txt            a pattern, with label files
python detect.py --weights best.pt --source rtsp://host/stream --view-img           a stream, in a window
"""

import sys

from own_packages import check_packages

check_packages()

from utils.config import DetectConfig, parse_detect
from utils.preflight import check_opencv

if __name__ == "__main__":
    parse_detect(sys.argv[1:])  # --help and mistyped flags end here, before torch is imported
    check_opencv()

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from models.families import Family, load_model
from models.start import check_imgsz, fit_imgsz
from models.yolo import DetectionModel
from utils.augmentations import letterbox
from utils.boxes import scale_boxes
from utils.detection_files import DetectionFiles
from utils.drawing import draw_detections
from utils.errors import Problems, UserError, run_cli
from utils.logging import get_logger
from utils.preflight import check_run_folder
from utils.run_folder import create_run_dir
from utils.sources import Frame, Source, count_pictures, find_sources, open_streams, read_files, read_streams
from utils.torch_utils import DistEnv, process_group

END_KEYS = (ord("q"), 27)  # 27: escape
IMAGE_SHOWN = 1000  # milliseconds that an image stays in the window unless a key is pressed


@dataclass
class Summary:
    """What a run did.

    Attributes:
        pictures: images and frames that were looked at.
        hits: of them, those with a detection.
        unread: files that could not be read.
        found: detections by class name.
        seconds: (3,) [preparing, inference, NMS], summed.
        run_dir: where results are; None without any.
    """

    pictures: int = 0
    hits: int = 0
    unread: int = 0
    found: Counter[str] = field(default_factory=Counter)
    seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    run_dir: Path | None = None

    def lines(self) -> list[str]:
        """Return what the user is told at the end."""
        total = self.found.total()
        counts = ": " + ", ".join(f"{count} {name}" for name, count in self.found.most_common()) if total else ""
        speed = zip(("prepare", "inference", "nms"), self.seconds / self.pictures * 1e3, strict=True)
        return [
            f"found {total} objects in {self.hits} of {self.pictures} pictures{counts}",
            "speed per image: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in speed),
            f"results in {self.run_dir}" if self.run_dir else "nothing was written",
        ]


class Detector:
    """A network with everything between pictures and boxes.

    Args:
        model: the raw network, in evaluation mode, on its device.
        family: how its inputs are prepared, its outputs decoded and post-processed.
        imgsz: (height, width) that a picture is fitted into, multiples of the network's stride.
        config: thresholds, classes and precision.
        device: where the network is.
    """

    def __init__(
        self, model: DetectionModel, family: Family, imgsz: tuple[int, int], config: DetectConfig, device: torch.device
    ) -> None:
        self.model = model.half() if config.half else model
        self.seconds = np.zeros(3)  # [preparing, inference, NMS], summed
        self._family, self._imgsz, self._config, self._device = family, imgsz, config, device

    @torch.inference_mode()
    def __call__(self, images: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.float32]]:
        """Detect objects; pictures that have one shape as network inputs share a forward pass.

        Args:
            images: (H, W, 3) uint8 BGR each, of any sizes.

        Returns:
            For each (K, 6) [x1, y1, x2, y2, confidence, class], xyxy, pixels of the picture, best first.
        """
        start = self._now()
        inputs = [fit(image, self._imgsz, self.model.max_stride) for image in images]
        shapes: dict[tuple[int, ...], list[int]] = {}
        for number, entry in enumerate(inputs):
            shapes.setdefault(entry.pixels.shape, []).append(number)
        self.seconds[0] += self._now() - start
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
        start = self._now()
        pixels = np.stack(inputs)[..., ::-1].transpose(0, 3, 1, 2)  # (B, 3, H, W) RGB
        images = self._family.inputs.prepare(torch.from_numpy(np.ascontiguousarray(pixels)).to(self._device))
        prepared = self._now()
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
        inferred = self._now()
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
        self.seconds += np.diff([start, prepared, inferred, self._now()])
        return detections

    def warm_up(self) -> None:
        """Let a GPU choose and load its kernels, so that the first picture is as fast as the others."""
        if self._device.type == "cuda":
            self([np.zeros((*self._imgsz, 3), np.uint8)])
            self.seconds[:] = 0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


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


def read_inputs(config: DetectConfig, env: DistEnv) -> tuple[list[Source], Detector]:
    """Read and check everything that detection starts from; writes nothing, opens no stream.

    Raises:
        UserError: lists what is wrong with sources, weights, flags and the run folder.
    """
    problems = Problems()
    sources = problems.attempt(lambda: find_sources(config.source))
    problems.attempt(lambda: check_run_folder(Path(config.project, config.name), config.exist_ok))
    if config.half and env.device.type != "cuda":
        problems.add(f"--half computes on a CUDA GPU only, not on {env.device.type}; leave it out")
    if config.view_img:
        problems.attempt(check_display)
    loaded = problems.attempt(lambda: load_model(Path(config.weights), env))
    sides = []
    if loaded is not None:
        model, family, trained_at = loaded
        sides = [side or trained_at for side in config.imgsz]
        for side in sides:
            problems.attempt(lambda: check_imgsz(side, model))  # noqa: B023
        if max(config.classes, default=0) >= model.num_classes:
            last = model.num_classes - 1
            problems.add(f"--classes {max(config.classes)}: {config.weights} knows the classes 0 to {last}")
    problems.raise_if_any()
    assert sources is not None and loaded is not None
    height, width = ([fit_imgsz(side, model) for side in sides] * 2)[:2]
    return sources, Detector(model, family, (height, width), config, env.device)


def run(config: DetectConfig, env: DistEnv) -> Summary:
    """Detect objects in ``--source``, write what the flags want, and say what was found.

    Raises:
        UserError: flags, weights and sources do not fit together, or no picture could be read.
    """
    log = get_logger()
    sources, detector = read_inputs(config, env)
    summary = Summary(seconds=detector.seconds)
    with ExitStack() as stack:
        if sources[0].kind == "stream":
            streams = stack.enter_context(open_streams(sources, config.vid_stride, config.stream_timeout))
            batches: Iterator[list[Frame]] = read_streams(streams)
        else:
            batches = read_batches(sources, config, summary)
        detector.warm_up()
        total = count_pictures(sources, config.vid_stride)
        bar = stack.enter_context(tqdm(None, "detecting", total, leave=False, unit="image"))
        try:
            detect_all(batches, detector, config, summary, bar)
        finally:
            bar.close()
            if summary.pictures:
                for line in summary.lines():
                    log.info(line)
    if not summary.pictures:
        raise UserError(f"--source {config.source}: nothing in it can be read")
    if summary.unread:
        log.warning(f"{summary.unread} of {len(sources)} files could not be read")
    return summary


def read_batches(sources: Sequence[Source], config: DetectConfig, summary: Summary) -> Iterator[list[Frame]]:
    """Gather the pictures of files into batches of ``--batch-size``; files that can't be read are counted."""
    batch: list[Frame] = []
    for item in read_files(sources, config.vid_stride):
        if isinstance(item, Source):
            summary.unread += 1
            continue
        batch.append(item)
        if len(batch) == config.batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def detect_all(
    batches: Iterator[list[Frame]], detector: Detector, config: DetectConfig, summary: Summary, bar: "tqdm[NoReturn]"
) -> None:
    """Take batch after batch from the sources to the files and the window, until there are no more or a key ends it.

    The run folder is made when the first picture was read. Videos can be played also when this is stopped in between.
    """
    names = detector.model.names
    writes = not config.nosave or config.save_txt or config.save_csv or config.save_crop
    files: DetectionFiles | None = None
    previous: Source | None = None
    try:
        for batch in batches:
            for frame, detections in zip(batch, detector([frame.image for frame in batch]), strict=True):
                if files is None and writes:
                    summary.run_dir = create_run_dir(config.project, config.name, config.exist_ok)
                    files = DetectionFiles(summary.run_dir, config, names)
                if files is not None and previous not in (None, frame.source) and frame.source.kind != "stream":
                    files.finish(previous)
                previous = frame.source
                picture = draw(frame, detections, names, config) if config.view_img or not config.nosave else None
                if files is not None:
                    files.write(frame, detections, picture)
                counts = Counter(names[int(class_id)] for class_id in detections[:, 5])
                summary.pictures += 1
                summary.hits += bool(counts)
                summary.found += counts
                if config.view_img and picture is not None and show(frame, picture):
                    return
            bar.update(len(batch))
    finally:
        if files is not None:
            files.close()


def draw(
    frame: Frame, detections: NDArray[np.float32], names: Sequence[str], config: DetectConfig
) -> NDArray[np.uint8]:
    """Return a picture with its detections (K, 6) drawn, as the flags want them."""
    classes = detections[:, 5].astype(int).tolist()
    labels = [
        "" if config.hide_labels else names[class_id] if config.hide_conf else f"{names[class_id]} {conf:.2f}"
        for class_id, conf in zip(classes, detections[:, 4].tolist(), strict=True)
    ]
    return draw_detections(frame.image, detections[:, :4], labels, classes, config.line_thickness)


def check_display() -> None:
    """Raise a UserError where no window can be opened."""
    window_system = re.search(r"GUI:\s+(\S+)", cv2.getBuildInformation())
    if window_system and window_system.group(1) == "NONE":
        raise UserError("--view-img: this OpenCV can't open windows; install opencv-python without -headless")
    variables = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    if sys.platform == "linux" and not any(os.environ.get(name) for name in variables):
        raise UserError("--view-img: there is no display here (DISPLAY is not set); leave it out and look at the files")


def show(frame: Frame, picture: NDArray[np.uint8]) -> bool:
    """Show a picture in its source's window; whether a key was pressed that ends the run."""
    try:
        cv2.imshow(frame.source.name, picture)
        return cv2.waitKey(1 if frame.number else IMAGE_SHOWN) & 0xFF in END_KEYS
    except cv2.error as error:
        raise UserError(f"--view-img: no window can be opened ({error.err}); leave it out") from None


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and detect."""
    config = parse_detect(sys.argv[1:] if argv is None else argv)
    with process_group(config.device) as env:
        run(config, env)


if __name__ == "__main__":
    run_cli(main)
