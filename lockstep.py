"""Lockstep from Python: train, validate and use a detector.

from lockstep import YOLO

model = YOLO("runs/train/exp/weights/best.pt")                  # or a network's YAML: YOLO("yolov5s.yaml")
results = model.train(data="my.yaml", epochs=100, batch=64, device="0,1")
model.val(data="my.yaml")
for found in model.predict("photos"): print(found.to_pandas())
"""

import sys

from own_packages import check_packages

check_packages()

import shutil
import signal
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import torch

import train
import val
from models.families import Family, build_model, family_of, load_weights
from models.yolo import DetectionModel
from utils.config.build import build_config
from utils.config.command_line import given_keywords
from utils.config.flags import TrainConfig, ValConfig
from utils.config.yaml_files import ROOT, find_yaml, load_yaml
from utils.core.errors import RESUMABLE, USER_ERROR, Stopped, UserError, await_turn, run_cli
from utils.core.seeds import choices_kept
from utils.core.signals import CTRL_C
from utils.dist.collectives import broadcast_object
from utils.dist.job_files import (
    MISTAKE,
    OUTCOME,
    Job,
    job_folder,
    load_callbacks,
    name_weights,
    read_job,
    read_outcome,
    refuse_to_recurse,
    write_job,
    write_outcome,
)
from utils.dist.job_launcher import wait_for_workers
from utils.dist.launch import launch, variables_kept, worker_devices
from utils.dist.place import ALONE, DistEnv, dist_env, rank_device
from utils.dist.worker import as_worker, end_with_parent, orphaned
from utils.inference.predictions import Prediction, predict, predict_config
from utils.metrics.evaluation import fitness
from utils.run import settings as command
from utils.run.callback_checks import check_callbacks, check_picklable
from utils.run.callbacks import STOP, Callback
from utils.run.folder import going_on
from utils.run.val_inputs import check_classes
from utils.torch_utils import process_group, save_checkpoint

__all__ = ["STOP", "YOLO", "Callback", "Results", "Stopped", "TrainingError", "UserError"]

RESULTS = "results.json"
# How other processes get here; not as a script, for in a worker the caller's may have to be __main__.
START = ("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from lockstep import work; work()")
STOPPED = "stopped.json"


class TrainingError(RuntimeError):
    """A worker failed; the message has its rank and traceback."""


@dataclass(frozen=True)
class Results:
    """What a training or a validation hands back.

    Attributes:
        run_dir: folder with everything that was written.
        rows: the table of the validation (of the best weights, after a training): ``all`` first, then every class, each
            with name, images, instances, p, r, map50 and map, nan without labels. Empty if nothing was validated.
    """

    run_dir: Path
    rows: list[dict[str, Any]]

    @property
    def best(self) -> Path:
        """The best weights of a training."""
        return self.run_dir / "weights" / "best.pt"

    @property
    def last(self) -> Path:
        """The last state of a training, to resume from."""
        return self.run_dir / "weights" / "last.pt"

    @property
    def map50(self) -> float:
        """MAP at IoU 0.5 over all classes; nan if nothing was validated."""
        return self._overall("map50")

    @property
    def map(self) -> float:
        """MAP over IoU 0.5 to 0.95 and all classes; nan if nothing was validated."""
        return self._overall("map")

    @property
    def fitness(self) -> float:
        """0.1 mAP50 + 0.9 mAP50-95 over all classes; nan if nothing was measured."""
        return fitness(self.map50, self.map)

    def _overall(self, figure: str) -> float:
        return float(self.rows[0][figure]) if self.rows else float("nan")


class YOLO:
    """A detector: a network with its weights and the names of its classes.

    Attributes:
        model: the network, in evaluation mode; None until there are weights.
        names: of its classes; empty until there are weights.
    """

    def __init__(self, weights_or_cfg: str | Path = "yolov5n.yaml", device: str | int = "") -> None:
        """Load weights, or name a network to train from scratch.

        Args:
            weights_or_cfg: a checkpoint, or the YAML of a network: a path or the name of a shipped one.
            device: where `predict` computes; "" is the first GPU, else the CPU.

        Raises:
            UserError: there is no such file, or it is none of both.
        """
        self.device = device
        self.cfg, self.weights_name = "", ""
        self._weights_file = ""  # that a run from here names as its --weights
        self.model: DetectionModel | None = None
        self.family: Family | None = None
        self.imgsz, self.data = TrainConfig.imgsz, ""  # data: what the weights were trained on
        name = str(weights_or_cfg)
        if name.endswith((".yaml", ".yml")):
            self.cfg = str(find_yaml(name, "model"))
            self.family = family_of(load_yaml(Path(self.cfg)))
        else:
            self._load(Path(name), ALONE)

    @property
    def names(self) -> list[str]:
        """Names of the classes, index = class id."""
        return list(self.model.names) if self.model is not None else []

    def train(self, *, callbacks: Sequence[Callback] = (), **flags: Any) -> Results:
        """Train, starting from this object's weights; it holds the best ones of the run afterwards.

        Args:
            callbacks: told what happens; see `utils.run.callbacks`.
            **flags: every flag of train.py, under the same name: ``data="my.yaml"``, ``batch=64``, ``sync_bn=True``.
                ``device="0,1"`` trains in a process for each device. ``resume=True`` goes on with the run of the
                checkpoint that this object was made of, without one with the newest that is not over.

        Returns:
            Where the run is and what its best weights reach; the same on all ranks under a launcher.

        Raises:
            UserError: something is wrong with flags, data or weights; nothing was trained then.
            TrainingError: a worker process failed.
            Stopped: a KeyboardInterrupt; the run was told to stop by a signal or ``time_limit`` and was saved. Its
                arguments say how to go on.
        """
        refuse_to_recurse()
        check_callbacks(callbacks)
        given = given_keywords(TrainConfig, flags)
        with job_folder() as folder, variables_kept(), choices_kept():
            weights = Path(self._weights_file)
            if given.get("resume") is True and (weights.parent.name == "weights" or weights.name == "last.pt"):
                given["resume"] = self._weights_file  # the run of these weights, not the newest one
            if not given.get("resume"):
                given = {**self._start(folder, given), **given}
            env = dist_env()
            config, resumed = command.settings(given, env)
            device, devices = command.places(given, config, env)
            if config and devices:
                check_picklable(callbacks)
                more = command.for_workers(given, config, resumed, devices)
                results = _in_workers(folder, "train", {**given, **more}, callbacks)
                self._load(results.best, ALONE)
                return results
            with process_group(device, env, given.get("dist_timeout", TrainConfig.dist_timeout)) as env:
                results = _train_here(given, config, resumed, callbacks, env)
                self._load(results.best, env)
                return results

    def val(self, **flags: Any) -> Results:
        """Measure this object's weights.

        Args:
            **flags: every flag of val.py, under the same name. ``device="0,1"`` measures in a process for each device.

        Returns:
            The table of the validation; under a launcher the same on all ranks.

        Raises:
            UserError: something is wrong with flags, data or weights.
            TrainingError: a worker process failed.
        """
        given = given_keywords(ValConfig, flags)
        with job_folder() as folder, variables_kept(), choices_kept():
            given = {**self._start(folder, given), **given}
            given.pop("cfg", None)
            config, env = build_config(ValConfig, given), dist_env()
            if worker_devices(config.device, env):
                check_classes(config)
                return _in_workers(folder, "val", given, ())
            with process_group(config.device, env, config.dist_timeout) as env:
                return _val_here(config, env)

    @overload
    def predict(self, source: Any, *, stream: Literal[False] = False, **flags: Any) -> list[Prediction]: ...
    @overload
    def predict(self, source: Any, *, stream: Literal[True], **flags: Any) -> Generator[Prediction, None, None]: ...
    def predict(
        self, source: Any, *, stream: bool = False, **flags: Any
    ) -> list[Prediction] | Generator[Prediction, None, None]:
        """Find objects in pictures with this object's weights.

        Args:
            source: path of an image or video, folder, pattern, list file, URL, number of a camera, array as OpenCV
                reads it (uint8, (H, W, 3) BGR, (H, W, 4) BGRA or (H, W) gray), PIL image, or a list of these.
            stream: whether to return a generator that takes pictures as they are asked for: for long videos, and for
                streams, which may have no end.
            **flags: detect.py's flags of its input, detection and device, under the same names: ``conf_thres=0.5``,
                ``imgsz=1280``, ``classes=[0, 2]``; ``batch_size`` is 16. None is the default.

        Returns:
            A `Prediction` for each picture, in the order of the source; [] for an empty list.

        Raises:
            UserError: something is wrong with source or flags; while reading: an entry can't be read at all.
        """
        if self.model is None or self.family is None:
            raise UserError(f"{self.cfg} has no weights yet; train it first")
        config = predict_config({"device": self.device, **flags}, self.weights_name)
        device = rank_device(config.device, dist_env())
        found = predict(source, self.model.to(device), self.family, self.imgsz, config, device, stream)
        return found if stream else list(found)

    def save(self, path: str | Path) -> None:
        """Write the weights as a checkpoint for ``--weights``, val.py and detect.py.

        Raises:
            UserError: there are no weights yet.
        """
        if self.model is None:
            raise UserError(f"{self.cfg} has no weights yet; train it first")
        config = {"imgsz": self.imgsz, "data": self.data}
        content = {"model": self.model.state_dict(), "spec": self.model.yaml, "names": self.names, "config": config}
        save_checkpoint(content, Path(path), keep_previous=False)

    def _start(self, folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
        """Write the weights for a run to start from, and return the flags that name them or the network."""
        if self.model is None:
            return {"cfg": self.cfg}
        if "weights" in given:
            return {}
        path = folder / self.weights_name
        self.save(path)
        name_weights(folder, self._weights_file)
        return {"weights": str(path)}

    def _load(self, path: Path, env: DistEnv) -> None:
        """Take the weights of a checkpoint. Collective."""
        with torch.random.fork_rng(devices=[]):  # a new network draws weights before it gets its own
            checkpoint = load_weights(path, env)
            self.model, self.family, self.imgsz = build_model(checkpoint, path, env)
        self.data = str(checkpoint["config"].get("data", ""))
        self.weights_name, self._weights_file = path.name, str(path)


def _train_here(
    given: Mapping[str, Any],
    config: TrainConfig | None,
    resumed: dict[str, Any] | None,
    callbacks: Sequence[Callback],
    env: DistEnv,
) -> Results:
    """Train as one of the ranks, maybe the only one. Collective."""
    return _shared(train.train(given, config, resumed, env, callbacks, may_be_ended=env.launched), env)


def _val_here(config: ValConfig, env: DistEnv) -> Results:
    """Validate as one of the ranks, maybe the only one. Collective."""
    return _shared(val.run(config, env), env)


def _shared(done: train.Results | val.Results, env: DistEnv) -> Results:
    """Hand rank 0's results to all ranks. Collective."""
    plain = Results(done.run_dir, [row._asdict() for row in done.rows]) if env.is_main_process else None
    shared = broadcast_object(plain, env)
    assert shared is not None
    return shared


def _in_workers(folder: Path, method: str, given: Mapping[str, Any], callbacks: Sequence[Callback]) -> Results:
    """Run a method in worker processes, started by a child of this one: a launcher takes over a process's signals."""
    variables = write_job(folder, method, given, callbacks)
    try:
        status = wait_for_workers([*START, str(folder)], variables)
    except KeyboardInterrupt:
        if stopped := read_outcome(folder, STOPPED):
            raise Stopped(CTRL_C, RESUMABLE, stopped["lines"]) from None
        raise
    mistake, outcome = read_outcome(folder, MISTAKE), read_outcome(folder, OUTCOME)
    if mistake:
        raise UserError(mistake["message"], mistake["messages"])
    stopped = read_outcome(folder, STOPPED)
    if status == RESUMABLE and stopped:
        raise Stopped(stopped["by"], RESUMABLE, stopped["lines"])
    found = read_outcome(folder, RESULTS)
    if status or found is None:
        text = outcome["text"] if outcome else ""
        raise TrainingError(text or f"the launcher of the workers ended with status {status}")
    return Results(Path(found["run_dir"]), found["rows"])


def work() -> NoReturn:
    """Be the launcher of a job or, as its child, one of its workers: what `START` calls."""
    run_cli(as_worker(_work))


def _work() -> int:
    folder, env = Path(sys.argv[1]), dist_env()
    try:
        job = read_job(folder)
        if not env.launched:
            return _launch(folder, job, env)
        callbacks = load_callbacks(job)
        with process_group(job.given["device"], env, job.given.get("dist_timeout", TrainConfig.dist_timeout)) as env:
            if job.method == "val":
                results = _val_here(build_config(ValConfig, job.given), env)
            else:
                results = _train_here(job.given, *command.settings(job.given, env), callbacks, env)
        if env.is_main_process:
            write_outcome(folder, RESULTS, {"run_dir": str(results.run_dir.resolve()), "rows": results.rows})
    except Stopped as stop:
        if stop.args:  # how to go on; rank 0 knows
            write_outcome(folder, STOPPED, {"by": stop.by, "lines": list(stop.args)})
        raise
    except UserError as error:  # the caller says it, in its own terminal
        await_turn()
        write_outcome(folder, MISTAKE, {"message": str(error), "messages": error.messages})
        return USER_ERROR
    return 0


def _launch(folder: Path, job: Job, env: DistEnv) -> int:
    """Start the workers of a job and return the exit status; without its caller all end, and the folder is removed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until the launcher has its own handler
    try:
        end_with_parent(signal.SIGTERM, job.caller)
        restarts = job.given.get("max_restarts", 0)
        devices = worker_devices(job.given["device"], env, least=1)
        failure = launch([*START, str(folder)], devices, folder, restarts, going_on)
        if failure:
            write_outcome(folder, OUTCOME, {"text": failure.text})
        return failure.status if failure else 0
    finally:
        if orphaned(job.caller):
            shutil.rmtree(folder, ignore_errors=True)
