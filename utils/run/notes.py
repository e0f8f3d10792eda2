"""What a run notes of its batches and says of them: mean losses, skipped steps, losses that leapt, images lost."""

import itertools
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from utils.core.heartbeat import waiting
from utils.core.logging import DeviceMeter, get_logger, mean_of
from utils.core.wording import first_of
from utils.data.index import LabelIndex
from utils.data.loaders import Batch
from utils.data.report import NOTHING_FOUND, REPLACED, UnreadableImages
from utils.dist.collectives import all_gather_objects, all_reduce_sum, gather_objects
from utils.dist.place import DistEnv
from utils.training.bad_batches import SkipLog, SpikeLog

SHOWN_IMAGES = 8  # names in a warning
SHOWN_SPIKES = 3  # warnings of an epoch


class Notes:
    """Notes are taken at every micro-batch and read at a few only: reading makes the host wait for the device.

    Args:
        env: this rank's place.
        index: of the training split.
        run_dir: its data_report.csv gets the images that could not be read.
        terms: of the loss.
    """

    def __init__(self, env: DistEnv, index: LabelIndex, run_dir: Path, terms: int) -> None:
        self.meter = DeviceMeter(terms, env.device)
        self.skips = SkipLog(env.device)
        self._env, self._index = env, index
        self._spikes = SpikeLog(env.device)
        self._unreadable = UnreadableImages(run_dir)

    def add(self, step: int, batch: Batch, losses: Tensor) -> None:
        """Note a micro-batch.

        Args:
            step: optimizer steps before it.
            batch: of this rank.
            losses: (terms,) of it; all ranks' add up to the mean over the global batch.
        """
        images = batch.indices.tolist()
        self.meter.update(losses)
        self.skips.add_batch(step, images, losses)
        self._spikes.add(step, images, losses * self._env.world_size)

    def mean_losses(self) -> list[float]:
        """Return the mean of each term over the epoch so far, over all ranks. Collective."""
        sums = all_reduce_sum(self.meter.sums(), self._env)
        with waiting:  # where the device does
            return mean_of(sums, self._env.world_size)

    def look(self) -> None:
        """Read what was noted, and name the images of steps that were skipped. Collective: every rank must call it."""
        skipped = self.skips.read()
        self._spikes.read()
        if not skipped:  # the same on all ranks
            return
        own = [self._index.path(i) for window in skipped for i in window.images]
        paths = sorted({path for paths in all_gather_objects(own, self._env) for path in paths})
        if paths:
            steps = ", ".join(str(window.step) for window in skipped)
            get_logger().warning(
                f"the loss was not finite in optimizer step {steps}, with these images: {first_of(paths, SHOWN_IMAGES)}"
            )

    def say_spikes(self) -> None:
        """Name batches whose loss leapt since the last call. Collective: every rank must call it."""
        own = [(spike, [self._index.path(i) for i in spike.images]) for spike in self._spikes.take()]
        found = sorted(itertools.chain(*gather_objects(own, self._env)), key=lambda pair: pair[0].step)
        for _, of_step in itertools.islice(itertools.groupby(found, lambda pair: pair[0].step), SHOWN_SPIKES):
            spikes, images = zip(*of_step, strict=True)
            spike, paths = max(spikes, key=lambda spike: spike.loss), [path for own in images for path in own]
            get_logger().warning(
                f"the loss leapt to {spike.loss:.3g} in optimizer step {spike.step}, {spike.before:.3g} at most "
                f"before, with these images: {first_of(paths, SHOWN_IMAGES)}; look at them and their labels. Weights "
                "of before are kept with --save-period, to start from (--weights)"
            )

    def say_unreadable(self, own: Mapping[int, str]) -> None:
        """Say which images others had to stand for in an epoch. Collective: every rank must call it.

        Args:
            own: those that this rank could not read, reason by place in the label index.
        """
        shares = gather_objects({self._index.path(i): reason for i, reason in own.items()}, self._env)
        found = {path: reason for share in shares for path, reason in share.items()}
        self._unreadable.tell("train", found, REPLACED, get_logger())

    def say_unreadable_in_val(self, found: Mapping[str, str]) -> None:
        """Say which images of a validation could not be read; rank 0's work."""
        self._unreadable.tell("val", found, NOTHING_FOUND, get_logger())


def say_skipped(count: int, finding_scale: bool) -> None:
    """Say how many steps of an epoch were skipped, nothing if none was.

    Args:
        count: of them.
        finding_scale: whether the loss scale of fp16 is a likely reason.
    """
    if count and finding_scale:
        get_logger().info(f"optimizer steps skipped in this epoch: {count}, to find a loss scale that suits fp16")
    elif count:
        get_logger().warning(
            f"optimizer steps skipped in this epoch: {count}, for their gradients were not finite; weights and "
            "BatchNorm are as if those batches had not been there. If it goes on, lower lr0 in --hyp"
        )
