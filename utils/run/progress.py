"""What a run says on the terminal while it trains: its plan before it starts, and a progress bar."""

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

import torch
from tqdm import tqdm

from utils.core.devices import memory_usage
from utils.core.errors import say_on_stderr
from utils.core.wording import duration
from utils.dist.place import DistEnv
from utils.dist.stalls import WORTH_SAYING

PLAIN_EVERY = 60.0  # seconds between two lines of an epoch where there is no terminal
COLUMNS = 80  # of a terminal that does not say how wide it is
BAR = "{desc} {percentage:3.0f}%|{bar:12}| {n_fmt}/{total_fmt}{postfix}"
NO_BAR = "{desc} {percentage:3.0f}% {n_fmt}/{total_fmt}{postfix}"
BAR_COLUMNS = len("|            |")
LOOK_EVERY = 10  # micro-batches between two looks at the losses: each look makes the host wait for the device


def machine(device: torch.device) -> str:
    """Return software and hardware in one line."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware = f"{device} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        hardware = f"{device}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}, {hardware}"


class RunClock:
    """Tells how long the rest of a run will take, from the epochs that this process has done."""

    def __init__(self, epochs: int, start: float) -> None:
        self.epochs, self.start_epoch = epochs, start
        self.start = self.lap_start = time.perf_counter()

    def lap(self) -> float:
        """Return seconds since the last call, or since the start."""
        before, self.lap_start = self.lap_start, time.perf_counter()
        return self.lap_start - before

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


def columns_of(stream: TextIO) -> int:
    """Return the width of a terminal; `COLUMNS` where it is no terminal or does not say (ssh, containers)."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError, AttributeError):
        return COLUMNS


def fit(parts: Sequence[tuple[int, str]], columns: int) -> str:
    """Join as many parts of a line as there is room for, with commas.

    Args:
        parts: in their order; what has the highest number is left out first.
        columns: of the line.
    """
    kept = list(parts)
    while len(kept) > 1 and len(", ".join(text for _, text in kept)) > columns:
        kept.remove(max(kept, key=lambda part: part[0]))
    return ", ".join(text for _, text in kept)


class EpochProgress:
    """One line that follows an epoch: losses, learning rate, images a second, memory, time left in the run.

    Where stderr is no terminal nothing can be written over: there is a line at the end of the epoch, and in a long one
    some in between. On a narrow terminal what matters least is left out. A context manager: the line ends with it,
    however that is left.
    """

    def __init__(self, epoch: int, batches: int, done: int, clock: RunClock, env: DistEnv, waited: float = 0.0) -> None:
        """Start the line.

        Args:
            epoch: 0-based; printed 1-based.
            batches: micro-batches of an epoch.
            done: micro-batches of this one that were done before.
            clock: of the run.
            env: only rank 0 draws; its device's memory is shown.
            waited: as of `show`, before the epoch.
        """
        self.epoch, self.batches, self.clock, self.device = epoch, batches, clock, env.device
        self.title = f"{epoch + 1}/{clock.epochs}"
        self.bar = tqdm(
            total=batches,
            initial=done,
            disable=None if env.is_main_process else True,  # None: on a terminal only
            desc=self.title,
            bar_format=BAR,
            ncols=columns_of(sys.stderr),
        )
        self.plain = env.is_main_process and self.bar.disable
        self.done, self.images, self.shown_images, self.waited = done, 0, 0, waited
        self.shown = self.printed = time.perf_counter()

    def advance(self, images: int) -> bool:
        """Count one micro-batch of so many images over all ranks.

        Returns:
            Whether it is time to look at the losses: at the same batches on all ranks, for that may take all of them.
        """
        self.images += images
        self.done += 1
        self.bar.update(1)
        return self.done % LOOK_EVERY == 0 or self.done == self.batches

    def show(self, losses: Mapping[str, float], lr: float, imgsz: int, waited: float = 0.0) -> None:
        """Write new figures.

        Args:
            losses: means of the epoch so far, by name.
            lr: learning rate of the weights.
            imgsz: height of the images, pixels.
            waited: seconds of the run so far for which training waited for images.
        """
        now = time.perf_counter()
        rate = (self.images - self.shown_images) / (now - self.shown)
        waiting = (waited - self.waited) / (now - self.shown)
        limit = f" (waiting for images: {waiting:.0%})" if waiting > WORTH_SAYING else ""
        left = duration(self.clock.left(self.epoch + self.done / self.batches))
        parts = [
            *((1 + place, f"{name} {loss:.4f}") for place, (name, loss) in enumerate(losses.items())),
            (len(losses) + 1, f"lr {lr:.2g}"),
            (len(losses) + 3, f"{imgsz} px"),
            (0, f"{rate:.0f} images/s{limit}"),
            (len(losses) + 2, f"{memory_usage(self.device):.1f} GB"),
            (0, f"{left} left"),
        ]
        self._draw(parts)
        if self.plain and (self.done == self.batches or now - self.printed >= PLAIN_EVERY):
            share = f"{self.done / self.batches:4.0%} {self.done}/{self.batches}"
            say_on_stderr(f"{self.title} {share}, {fit(parts, sys.maxsize)}")
            self.printed = now
        self.shown, self.shown_images, self.waited = now, self.images, waited

    def _draw(self, parts: Sequence[tuple[int, str]]) -> None:
        """Show figures behind the bar, or without a bar where they fit then only."""
        columns = columns_of(sys.stderr) - 1  # a line that fills the last column would be wrapped by some
        share = len(f"{self.title} 100% {self.done}/{self.batches}, ")
        whole = len(fit(parts, sys.maxsize))
        has_room = share + BAR_COLUMNS + whole <= columns
        self.bar.ncols, self.bar.bar_format = columns, BAR if has_room else NO_BAR
        self.bar.set_postfix_str(fit(parts, columns - share), refresh=True)

    def __enter__(self) -> "EpochProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the line; it stays on the screen."""
        self.bar.close()
