"""Runs several command lines of train.py in every rank, one after another, which saves the start of processes.

    torchrun ... -m tests.dist.commands CASES.json

Beside the list of cases every rank writes RANK.json: what it saw of each.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import train
from models.yolo import DetectionModel
from tests.dist.launch import free_port, torchrun
from tests.runs import torch_settings_kept
from utils.core.errors import UserError
from utils.dist.worker import as_worker
from utils.run import settings


@dataclass
class Case:
    """A command line.

    Attributes:
        line: its arguments.
        env: variables that are set meanwhile.
        others: what ranks other than 0 have behind it.
    """

    line: list[str]
    env: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """What a rank saw of one case.

    Attributes:
        batches: digests of the images of every training batch that went through this rank's network.
        said: on stdout.
        error: message of the mistake that ended it.
        norms: kinds of normalization layers.
        device: of the images.
        backend: of the process group; "" without one.
        timeout: seconds that a collective waits.
        interface: GLOO_SOCKET_IFNAME afterwards, None if it is not set.
        measured: how often this rank looked for the automatic batch.
    """

    batches: list[list[str]] = field(default_factory=list)
    said: str = ""
    error: str = ""
    norms: list[str] = field(default_factory=list)
    device: str = ""
    backend: str = ""
    timeout: float = 0
    interface: str | None = None
    measured: int = 0

    def look(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take notes of a forward pass in training; black images are not from the data."""
        if not (isinstance(module, DetectionModel) and module.training and torch.is_grad_enabled()):
            return
        images = inputs[0]
        if not isinstance(images, torch.Tensor) or not images.any():
            return
        self.batches.append([digest(image) for image in images])
        norms = (layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._NormBase))
        self.norms = sorted({type(layer).__name__ for layer in norms})
        self.device = str(images.device)
        if dist.is_initialized():
            self.backend = dist.get_backend()
            group = dist.distributed_c10d._get_default_group()
            self.timeout = group._get_backend(images.device).options._timeout.total_seconds()


def digest(image: Tensor) -> str:
    """Of an image as the network gets it."""
    return hashlib.sha256((image * 255).round().byte().contiguous().numpy().tobytes()).hexdigest()


def run_commands(cases: list[Case], nproc: int, folder: Path, timeout: float) -> list[list[Seen]]:
    """Run cases on some ranks; returns what was seen of each case, by rank."""
    folder.mkdir(exist_ok=True)
    file = folder / "cases.json"
    file.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    done = torchrun(["-m", "tests.dist.commands", file], nproc, port=free_port(), timeout=timeout)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]
    return [[Seen(**one) for one in of_case] for of_case in zip(*ranks, strict=True)]


def see(case: Case) -> Seen:
    """Run a case in this rank."""
    seen = Seen()
    handle = nn.modules.module.register_module_forward_pre_hook(seen.look)
    os.environ.update(case.env)
    spy = mock.patch.object(settings, "automatic_batch", wraps=settings.automatic_batch)
    with contextlib.redirect_stdout(io.StringIO()) as said, torch_settings_kept(), spy as measured:
        try:
            train.main(case.line + case.others * (os.environ.get("RANK", "0") != "0"))
        except UserError as error:
            seen.error = str(error)
    handle.remove()
    seen.said, seen.measured = said.getvalue(), measured.call_count
    seen.interface = os.environ.get("GLOO_SOCKET_IFNAME")
    for name in case.env:
        del os.environ[name]
    return seen


def main() -> None:
    file = Path(sys.argv[1])
    seen = [dataclasses.asdict(see(Case(**case))) for case in json.loads(file.read_text())]
    file.with_name(f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    as_worker(main)()
