"""Trains as train.py does, and sends this process a signal when a checkpoint was written.

    torchrun ... -m tests.dist.stopping SIGNAL NUMBER DTYPE FLAGS...

Rank 0 gets the signal (SIGKILL, SIGTERM ...) with its checkpoint NUMBER, counted from 1; 0 sends none, -1 sends it
before the first batch. DTYPE is what the network computes in.
"""

import os
import signal
import sys

import torch

import train
from utils.config.command_line import given_flags
from utils.config.flags import TrainConfig
from utils.core.errors import run_cli
from utils.core.signals import stops_end_the_process
from utils.dist.place import dist_env
from utils.dist.worker import as_worker
from utils.run import settings as command
from utils.run.callbacks import Callback, CheckpointSaved, TrainStart
from utils.torch_utils import process_group


class Stopper(Callback):
    """Sends a signal with one of the checkpoints."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.left = name, number

    def on_train_start(self, event: TrainStart) -> None:
        if self.left < 0:
            os.kill(os.getpid(), signal.Signals[self.name])

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.Signals[self.name])


def main() -> None:
    _, name, number, dtype, *line = sys.argv
    torch.set_default_dtype(getattr(torch, dtype))
    given, env = given_flags(TrainConfig, line), dist_env()
    config, resumed = command.settings(given, env)
    with stops_end_the_process(), process_group("cpu", env) as env:
        train.train(given, config, resumed, env, [Stopper(name, int(number))])


if __name__ == "__main__":
    run_cli(as_worker(main))
