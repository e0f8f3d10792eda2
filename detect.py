"""Find objects in images, videos and streams.

python detect.py --weights runs/train/exp/weights/best.pt                           the pictures in data/images
python detect.py --weights best.pt --source 'photos/**/*.jpg' --save-txt            a pattern, with label files
python detect.py --weights best.pt --source rtsp://host/stream --view-img           a stream, in a window
"""

import sys

from own_packages import check_packages

check_packages()

from utils.config.build import parse
from utils.config.flags import DetectConfig
from utils.core.errors import end_quietly_by_ctrl_c
from utils.run.preflight import check_opencv

if __name__ == "__main__":
    end_quietly_by_ctrl_c()
    parse(DetectConfig, sys.argv[1:])  # --help and mistyped flags end here, before torch is imported
    check_opencv()

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.detector import Detector, build_detector
from models.families import load_model
from utils.config.command_line import repeated_flags
from utils.core.devices import check_half
from utils.core.errors import Problems, UserError, run_cli
from utils.core.logging import get_logger
from utils.dist.place import DistEnv, dist_env
from utils.inference.detection_files import DetectionFiles, annotate, check_codec
from utils.inference.frames import Frame, Unread, count_pictures, in_batches, read_files, warn_of_depth
from utils.inference.sources import Source, find_sources
from utils.inference.streams import open_streams, read_streams
from utils.plots.drawing import lettering_doubts
from utils.run.folder import create_run_dir
from utils.run.preflight import check_run_folder
from utils.torch_utils import process_group

END_KEYS = (ord("q"), 27)  # 27: escape
IMAGE_SHOWN = 1000  # milliseconds that an image stays in the window unless a key is pressed


@dataclass
class Summary:
    """What a run did.

    Attributes:
        pictures: images and frames that were looked at.
        hits: of them, those with a detection.
        unread: files that could not be read.
        damaged: videos of which only some frames could be read.
        found: detections by class name.
        seconds: (3,) [preparing, inference, NMS], summed.
        run_dir: where results are; None without any.
    """

    pictures: int = 0
    hits: int = 0
    unread: int = 0
    damaged: list[Unread] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)
    seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))
    run_dir: Path | None = None

    def lines(self) -> list[str]:
        """Return what the user is told at the end."""
        total = self.found.total()
        counts = ": " + ", ".join(f"{count} {name}" for name, count in self.found.most_common()) if total else ""
        speed = zip(("prepare", "inference", "nms"), self.seconds / self.pictures * 1e3, strict=True)
        parts = [f"{video.read} of {video.frames} frames of {video.source.shown} were read" for video in self.damaged]
        return [
            *parts,
            f"found {total} objects in {self.hits} of {self.pictures} pictures{counts}",
            "speed per image: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in speed),
            f"results in {self.run_dir}" if self.run_dir else "nothing was written",
        ]


def read_inputs(config: DetectConfig, env: DistEnv) -> tuple[list[Source], Detector]:
    """Read and check everything that detection starts from; writes nothing, opens no stream.

    Raises:
        UserError: lists what is wrong with sources, weights, flags and the run folder.
    """
    problems = Problems()
    sources = problems.attempt(lambda: find_sources(*config.source))
    problems.attempt(lambda: check_run_folder(Path(config.project, config.name), config.exist_ok))
    problems.attempt(lambda: check_half(config.half, env.device))
    if config.view_img:
        problems.attempt(check_display)
    if config.video_codec != "auto" and not config.nosave:
        problems.attempt(lambda: check_codec(config.video_codec))
    loaded = problems.attempt(lambda: load_model(Path(config.weights), env, "--weights"))
    detector = problems.attempt(lambda: build_detector(*loaded, config, env.device)) if loaded else None
    problems.raise_if_any()
    assert sources is not None and detector is not None
    warn_of_depth(sources)
    if not config.hide_labels and (config.view_img or not config.nosave):
        for doubt in lettering_doubts(detector.model.names):
            get_logger().warning(doubt)
    return sources, detector


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
        bar = stack.enter_context(tqdm(None, "detecting", total, leave=False, unit="image", disable=None))
        try:
            detect_all(batches, detector, config, summary, bar)
        finally:
            bar.close()
            if summary.pictures:
                for line in summary.lines():
                    log.info(line)
    if not summary.pictures:
        more = " ..." if len(config.source) > 1 else ""
        raise UserError(f"--source {config.source[0]}{more}: nothing in it can be read")
    if summary.unread:
        log.warning(f"{summary.unread} of {len(sources)} files could not be read")
    return summary


def read_batches(sources: Sequence[Source], config: DetectConfig, summary: Summary) -> Iterator[list[Frame]]:
    """Gather the pictures of files into batches of ``--batch-size``; files that can't be read are counted."""

    def readable() -> Iterator[Frame]:
        for item in read_files(sources, config.vid_stride):
            if isinstance(item, Frame):
                yield item
            elif item.read:
                summary.damaged.append(item)
            else:
                summary.unread += 1

    return in_batches(readable(), config.batch_size)


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
    return annotate(frame.image, detections, names, config.line_thickness, config.hide_labels, config.hide_conf)


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
    argv = sys.argv[1:] if argv is None else argv
    config, env = parse(DetectConfig, argv), dist_env()
    if env.world_size > 1:
        raise UserError(
            f"detection runs in one process, but a launcher started {env.world_size}, which would all do the same; "
            "start detect.py without it, once for each part of the pictures"
        )
    with process_group(config.device, env) as env:
        for sentence in repeated_flags(DetectConfig, argv):
            get_logger().info(sentence)
        run(config, env)


if __name__ == "__main__":
    run_cli(main)
