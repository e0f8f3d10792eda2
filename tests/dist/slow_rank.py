"""Ranks of which the last is late in a known place, as watched by the benchmark of scaling.

python -m torch.distributed.run --nproc_per_node 2 -m tests.dist.slow_rank DELAY OUT flags of train.py

Every rank writes to OUT/RANK.json what it measured, by the place of the delay.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import train
from benchmarks.scaling_rank import WARMED_UP, Rank, cores
from utils.config.command_line import given_flags
from utils.config.data_yaml import build_train_config
from utils.config.flags import TrainConfig
from utils.data.loaders import Batch
from utils.dist.worker import as_worker
from utils.run.loading import open_loaders
from utils.torch_utils import process_group

PLACES = ("nowhere", "loader", "forward", "backward", "step")


class LateBatches(Iterator[Batch]):
    """Waits before it passes a batch on."""

    def __init__(self, batches: Iterator[Batch], delay: Callable[[str], None]) -> None:
        self.batches, self.delay = batches, delay

    def __next__(self) -> Batch:
        batch = next(self.batches)
        self.delay("loader")
        return batch


def main() -> None:
    delay, out, flags = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    config = build_train_config(given_flags(TrainConfig, flags))
    here = "nowhere"

    def maybe_late(place: str) -> None:
        if place == here and run.env.rank == run.env.world_size - 1:
            time.sleep(delay)

    with process_group("cpu") as env, contextlib.ExitStack() as stack:
        run = train.set_up(config, env)
        run.state.epoch = WARMED_UP
        batches, val_batches = open_loaders(run, stack)
        own_cores = sorted(cores())
        core = own_cores[env.rank % len(own_cores)]
        rank = Rank(run, LateBatches(batches, maybe_late), val_batches, core, Path(), skip=1)
        middle = run.raw_model.model[4]
        middle.register_forward_hook(lambda *_: maybe_late("forward"))
        middle.register_full_backward_hook(lambda *_: maybe_late("backward"))
        run.optimizer.register_step_post_hook(lambda *_: maybe_late("step"))
        figures = {}
        for here in PLACES:
            figures[here] = rank.train()
        (out / f"{env.rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    as_worker(main)()
