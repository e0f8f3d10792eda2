"""What a run says on the terminal while it trains: its plan before it starts, and a progress bar."""

import platform
import time
from collections.abc import Iterable

import torch
from tqdm import tqdm

from utils.logging import DeviceMeter
from utils.torch_utils import memory_usage

LOOK_SECONDS = 1.0  # between two looks at losses that are still being computed; each look makes the host wait


def format_lines(lines: Iterable[tuple[str, str]]) -> str:
    """Return rows of a word and what there is to say of it, in two columns."""
    return "\n".join(f"{word:<11} {text}" for word, text in lines)


def machine(device: torch.device) -> str:
    """Return software and hardware in one line."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = f"{device} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        hardware = f"{device}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}, {hardware}"


def duration(seconds: float) -> str:
    """Return a time as people write it: 0:42, 12:03, 3:07:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RunClock:
    """Tells how long the rest of a run will take, from the epochs that this process has done."""

    def __init__(self, epochs: int, start_epoch: int) -> None:
        self.epochs, self.start_epoch = epochs, start_epoch
        self.start = time.perf_counter()

    def elapsed(self) -> float:
        """Return seconds since the first epoch of this process began."""
        return time.perf_counter() - self.start

    def left(self, done: float) -> float:
        """Return seconds to the end of the run.

        Args:
            done: epochs since the start of the run, in fractions.
        """
        done_here = max(done - self.start_epoch, 1e-6)
        return self.elapsed() / done_here * (self.epochs - done)


class EpochProgress:
    """One line that follows an epoch: losses, learning rate, images a second, memory, time left in the run."""

    def __init__(
        self, epoch: int, batches: int, done: int, clock: RunClock, meter: DeviceMeter, device: torch.device, show: bool
    ) -> None:
        """Start the line.

        Args:
            epoch: 0-based; printed 1-based.
            batches: micro-batches of an epoch.
            done: micro-batches of this one that were done before.
            clock: of the run.
            meter: box, objectness and class loss of the epoch so far.
            device: whose memory is shown.
            show: draw it; off on all ranks but the first.
        """
        self.epoch, self.batches, self.clock, self.meter, self.device = epoch, batches, clock, meter, device
        self.bar = tqdm(
            total=batches,
            initial=done,
            disable=not show,
            desc=f"{epoch + 1}/{clock.epochs}",
            bar_format="{desc} {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}",
        )
        self.images = self.looked_images = 0
        self.looked = time.perf_counter()

    def advance(self, images: int, lr: float, imgsz: int) -> None:
        """Count one micro-batch, and look at the losses if the last look is long enough ago.

        Args:
            images: in the global batch.
            lr: learning rate of the weights.
            imgsz: side of the images, pixels.
        """
        self.images += images
        self.bar.update(1)
        waited = time.perf_counter() - self.looked
        if not self.bar.disable and (waited > LOOK_SECONDS or self.bar.n == self.batches):
            box, objectness, category = self.meter.mean()
            rate = (self.images - self.looked_images) / waited
            left = duration(self.clock.left(self.epoch + self.bar.n / self.batches))
            self.bar.set_postfix_str(
                f"box {box:.4f}, obj {objectness:.4f}, cls {category:.4f}, lr {lr:.2g}, {imgsz} px, "
                f"{rate:.0f} images/s, {memory_usage(self.device):.1f} GB, {left} left",
                refresh=True,
            )
            self.looked, self.looked_images = time.perf_counter(), self.images

    def close(self) -> None:
        """End the line; it stays on the screen."""
        self.bar.close()
