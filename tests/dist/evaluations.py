"""Validates on every rank, several cases one after another, and keeps every bit of the results.

    torchrun ... -m tests.dist.evaluations JOB.pkl

Beside the job every rank writes RANK.pkl.
"""

import dataclasses
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import val
from tests.dist.launch import free_port, torchrun
from utils.config.flags import ValConfig
from utils.config.recipe import Hyp
from utils.data.dataset import DetectionDataset
from utils.data.image_cache import ImageCache
from utils.data.loaders import val_loader
from utils.dist.place import DistEnv
from utils.dist.worker import as_worker
from utils.run.val_inputs import read_val_inputs
from utils.torch_utils import process_group


class Part(NamedTuple):
    """What one rank has of a case.

    Attributes:
        batches: images of each batch that it computed.
        metrics: None off rank 0, like all that follow.
        losses: [box, objectness, class].
        images: place, detections and labels of each image.
    """

    batches: list[int]
    metrics: Any
    losses: Any
    images: Any


@dataclass(frozen=True)
class Case:
    """A validation.

    Attributes:
        weights: checkpoint.
        data: YAML.
        batch: images of a batch.
        workers: loader processes of each rank.
    """

    weights: Path
    data: Path
    batch: int
    workers: int = 0


def evaluate_here(case: Case, env: DistEnv) -> Part:
    """Validate as a training run does, with its loss; every rank calls it."""
    config = ValConfig(weights=str(case.weights), data=str(case.data), batch_size=case.batch, workers=case.workers)
    inputs = read_val_inputs(config, env)
    dataset = DetectionDataset(inputs.index, ImageCache(), None, inputs.imgsz)
    loader = val_loader(dataset, case.batch, env, case.workers, stride=inputs.model.max_stride)
    criterion = inputs.family.criterion(inputs.model, Hyp(), inputs.imgsz, 0.0)
    batches = [len(batch.images) for batch in loader]  # of a pass of its own
    names = inputs.data.names
    found = val.evaluate(inputs.model, inputs.family, loader, inputs.index, names, env, criterion=criterion)
    loader.close()
    if found is None:
        return Part(batches, None, None, None)
    return Part(batches, found.metrics, found.losses, found.images)


def evaluate_on_ranks(cases: list[Case], nproc: int, folder: Path, timeout: float) -> list[list[Part]]:
    """Validate on some ranks; returns the parts of each case, by rank."""
    folder.mkdir()
    file = folder / "job.pkl"
    file.write_bytes(pickle.dumps(cases))
    done = torchrun(["-m", "tests.dist.evaluations", file], nproc, port=free_port(), timeout=timeout)
    assert done.returncode == 0, done.stderr
    ranks = [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(nproc)]
    return [list(parts) for parts in zip(*ranks, strict=True)]


def bits(value: Any) -> Any:
    """Everything that a value is made of, numbers as their bytes: equal only if every bit is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: bits(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [bits(one) for one in value]
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return np.float64(value).tobytes()
    assert isinstance(value, int | str | np.generic), type(value)
    return value.tobytes() if isinstance(value, np.generic) else value


def main() -> None:
    file = Path(sys.argv[1])
    with process_group("cpu") as env:
        parts = [evaluate_here(case, env) for case in pickle.loads(file.read_bytes())]
    file.with_name(f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(parts))


if __name__ == "__main__":
    from tests.dist import evaluations  # under the name that pickles have

    as_worker(evaluations.main)()
