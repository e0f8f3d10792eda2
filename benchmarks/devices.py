"""How much faster an epoch is on more devices, beside what was published for YOLOv5.

python -m benchmarks.scaling --devices 1,2,4,8 --data coco_profile.yaml --cfg yolov5l.yaml --imgsz 640 --local-batch 16
python -m benchmarks.scaling --devices 1,2 --device cpu                      ranks on the CPU, one thread each

An epoch of the training loop and a validation, for each number of devices; it starts the ranks itself. The first
command has the settings of the published figures: one epoch of COCO, about 40 minutes in all on such GPUs. Numbers that
this machine has no devices for are in the table, too: not measured.
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rank_group import Figures, Group, there
from utils.core.devices import parse_device
from utils.core.errors import UserError
from utils.core.wording import duration

MANY_EPOCHS = 10_000  # so that none is the last one
# Seconds of an epoch of COCO's 118,287 images by the number of devices: YOLOv5l on A100, 16 images of 640 pixels each.
# https://docs.ultralytics.com/yolov5/tutorials/multi-gpu-training/
PUBLISHED = {1: 20 * 60 + 39, 2: 11 * 60 + 43, 4: 5 * 60 + 57, 8: 3 * 60 + 9}
PUBLISHED_IMAGES = 118_287
SAME = {"cfg": "yolov5l.yaml", "imgsz": 640, "local_batch": 16}  # of the published figures
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class DeviceSettings:
    """What is measured; see the command line of `benchmarks.scaling`."""

    data: str
    cfg: str
    imgsz: int
    local_batch: int
    amp: str
    devices: str
    device: str
    workers: int

    @property
    def counts(self) -> list[int]:
        """Numbers of devices.

        Raises:
            UserError: they are not numbers, or less than 1.
        """
        words = self.devices.split(",")
        if not all(word.strip().isdecimal() and int(word) for word in words):
            raise UserError(f"--devices {self.devices}: takes numbers of devices, separated by commas, such as 1,2,4,8")
        return [int(word) for word in words]


@dataclass(frozen=True)
class Epoch:
    """What an epoch took on some devices.

    Attributes:
        images: that were trained on.
        seconds: of the slowest rank.
        memory: GB (1e9 bytes) of the rank that has most.
        val_images: that were validated.
        val_seconds: of the slowest rank.
    """

    images: int
    seconds: float
    memory: float
    val_images: int
    val_seconds: float

    @classmethod
    def of(cls, trained: Sequence[Figures], validated: Sequence[Figures]) -> "Epoch":
        """Join what the ranks said."""
        return cls(
            sum(rank["images"] for rank in trained),
            max(rank["seconds"] for rank in trained),
            max(rank["memory"] for rank in trained),
            validated[0]["images"],
            max(rank["seconds"] for rank in validated),
        )


def device_flag(count: int, flag: str) -> str | None:
    """Return what ``--device`` of so many ranks is; None if there are not so many devices.

    Args:
        count: of the ranks.
        flag: devices to take, the first ones of them; CPU ranks are as many as one likes.

    Raises:
        UserError: it does not name devices of this machine.
    """
    flag = flag or ("all" if torch.cuda.is_available() else "cpu")
    devices = parse_device(flag, torch.cuda.device_count(), torch.backends.mps.is_available())
    if devices[0].type == "cpu":
        return "cpu"
    return ",".join(map(str, devices[:count])) if count <= len(devices) else None


def measure(count: int, device: str, settings: DeviceSettings, folder: Path) -> Epoch:
    """Train an epoch and validate.

    Args:
        count: of the ranks.
        device: their ``--device``.
        settings: of the training.
        folder: for what it leaves.
    """
    flags = {
        "labels": folder,  # none are scanned
        "skip": 0,
        "data": settings.data,
        "cfg": settings.cfg,
        "imgsz": settings.imgsz,
        "batch-size": count * settings.local_batch,
        "amp": settings.amp,
        "epochs": MANY_EPOCHS,
        "workers": settings.workers,
        "device": device,
        "project": folder / "runs",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with contextlib.closing(Group(count, None, [*words, "--noplots"], folder)) as group:
        said = []
        for command in ("train", "validate"):
            group.ask(command)
            said.append(group.answers())
    return Epoch.of(*said)


def table(epochs: Mapping[int, Epoch]) -> list[str]:
    """Return lines: what was measured beside what is published, one for each number of devices of either."""
    columns = ("devices", "epoch", "speed-up", "images/s", "GB each", "validation", "YOLOv5:", "epoch", "speed-up")
    lines = ["".join(f"{word:>14}" for word in columns)]
    for count in sorted({*epochs, *PUBLISHED}):
        if count in epochs:
            epoch = epochs[count]
            rate = epoch.images / epoch.seconds
            gain = f"{rate / (epochs[1].images / epochs[1].seconds):.2f}" if 1 in epochs else NOT_MEASURED
            own = [time(epoch.seconds), gain, f"{rate:.1f}", f"{epoch.memory:.1f}"]
            own += [time(epoch.val_seconds)]
        else:
            own = [NOT_MEASURED, "", "", "", ""]
        theirs = [NOT_MEASURED, ""]
        if count in PUBLISHED:
            theirs = [time(PUBLISHED[count]), f"{PUBLISHED[1] / PUBLISHED[count]:.2f}"]
        lines.append("".join(f"{word:>14}" for word in (str(count), *own, "", *theirs)))
    return lines


def time(seconds: float) -> str:
    """Return minutes, of less than two minutes seconds."""
    return duration(seconds) if seconds >= 120 else f"{seconds:.1f} s"


def measure_devices(settings: DeviceSettings, target: Path | None) -> None:
    """Measure on each number of devices, and print the table.

    Args:
        settings: what is measured.
        target: for the figures, as JSON; may be None.

    Raises:
        UserError: there is no such device, or a rank ended; with what it said.
    """
    flags = {count: device_flag(count, settings.device) for count in settings.counts}
    there(settings.data)
    epochs = {}
    with tempfile.TemporaryDirectory() as folder:
        for count, flag in flags.items():
            if flag is None:
                print(f"{count} devices: this machine has fewer", flush=True)
                continue
            epochs[count] = epoch = measure(count, flag, settings, Path(folder))
            print(f"{count} x {settings.local_batch} images, --device {flag}: {time(epoch.seconds)}", flush=True)
    print(f"\n{settings.cfg}, {settings.data}, {settings.imgsz} pixels, {settings.local_batch} images a device")
    print("\n".join(table(epochs)))
    print(
        f"\nYOLOv5, published: YOLOv5l, an epoch of COCO ({PUBLISHED_IMAGES:,} images) on A100 GPUs, 640 pixels, 16 "
        "images a device,\nat the same memory on each; its validation took 0:55 to 0:57 on any number: one does it all"
    )
    if any(getattr(settings, name) != value for name, value in SAME.items()):
        print("these settings are others: compare speed-ups only")
    if target:
        figures = {count: dataclasses.asdict(epoch) for count, epoch in epochs.items()}
        written = {"settings": dataclasses.asdict(settings), "epochs": figures, "published": PUBLISHED}
        target.write_text(json.dumps(written, indent=2) + "\n")
