"""From what was typed to a run: its settings, the processes that it needs, and where it goes on."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from models.build import check_launchable, trained_on
from models.families import load_weights
from utils.config.data_yaml import build_train_config
from utils.config.flags import AUTOMATIC, TrainConfig
from utils.core.errors import RESUMABLE, Stopped, UserError
from utils.core.logging import get_logger
from utils.dist.collectives import once
from utils.dist.launch import worker_devices
from utils.dist.place import ALONE, DistEnv
from utils.dist.worker import last_words
from utils.run.autobatch import automatic_batch
from utils.run.folder import has_checkpoint, how_to_go_on
from utils.run.restarts import find_own_run, this_life, was_stopped
from utils.run.resume import RESUMABLE_FLAGS, check_ranks, resume
from utils.torch_utils import split_global_batch
from utils.training.data_parallel import replica_devices


def settings(given: Mapping[str, Any], env: DistEnv) -> tuple[TrainConfig | None, dict[str, Any] | None]:
    """Return the settings of a run and the checkpoint that it goes on with, if any.

    Both are None under a launcher where a checkpoint has to be read for them, of a run that is resumed or weights whose
    data set is meant: rank 0 does that for all, in `of_all_ranks`.

    Raises:
        UserError: the flags are wrong, or do not fit together or to the run that is resumed.
    """
    if given.get("dp") and env.launched:
        raise UserError(
            f"--dp is for several devices in one process, but a launcher started {env.world_size}; leave it out: they "
            "share the batch anyway (DDP)"
        )
    if not given.get("resume"):
        return (None, None) if env.launched and _lacks_data(given) else (_settled(given, env), None)
    return (None, None) if env.launched else resume(given)


def _settled(given: Mapping[str, Any], env: DistEnv) -> TrainConfig:
    return build_train_config(with_data(given, env))


def _lacks_data(given: Mapping[str, Any]) -> bool:
    return bool(given.get("weights")) and not given.get("data")


def with_data(given: Mapping[str, Any], env: DistEnv) -> Mapping[str, Any]:
    """Return flags that name a data set wherever a training starts from weights: those were trained on one.

    Raises:
        UserError: the weights can't be read, or name no data set that is there.
    """
    if not _lacks_data(given):
        return given
    data = trained_on(load_weights(Path(given["weights"]), ALONE), given["weights"])
    if not env.launched:  # what a launcher started says it in its header only
        get_logger().info(f"data        {data}, what the weights were trained on (--data)")
    return {**given, "data": data}


def places(given: Mapping[str, Any], config: TrainConfig | None, env: DistEnv) -> tuple[str, list[torch.device]]:
    """Return the device flag for this process, and the devices that need a worker each, [] for a run in this process.

    Args:
        given: flags that were typed.
        config: of `settings`.
        env: this process's place.

    Raises:
        UserError: the flag is wrong.
    """
    device = config.device if config else given.get("device", "")
    copies = replica_devices(config.dp, device, env) if config else []
    if copies and config is not None:
        if config.max_restarts:
            raise UserError("--max-restarts starts processes again, --dp has a single one; leave one of them out")
        return str(copies[0]), []
    alone = config is not None and config.max_restarts > 0  # a single worker can be started again as well
    return device, worker_devices(device, env, least=1 if alone else 2)


def for_workers(
    given: Mapping[str, Any], config: TrainConfig, resumed: Mapping[str, Any] | None, devices: Sequence[torch.device]
) -> dict[str, Any]:
    """Return flags that several workers are to be given besides those that were typed.

    Args:
        given: flags that were typed.
        config: of `settings`.
        resumed: of `settings`.
        devices: one for each worker.

    Raises:
        UserError: the batch is not a multiple of the devices, or the network's family needs another launcher.
    """
    batch = config.batch_size
    if resumed is not None:
        check_ranks(config, len(devices))
    if batch != AUTOMATIC:
        split_global_batch(batch, len(devices), config.nbs)
    check_launchable(config, resumed, len(devices))
    if batch == AUTOMATIC:
        batch = automatic_batch(config, given, devices[0], len(devices))
    return {"device": config.device, "batch_size": batch, "max_restarts": config.max_restarts}


def of_all_ranks(
    given: Mapping[str, Any], config: TrainConfig | None, resumed: dict[str, Any] | None, env: DistEnv
) -> tuple[TrainConfig, dict[str, Any] | None]:
    """Complete what `settings` returned by what the ranks find out together. Collective: every rank must call it.

    That is the run that a launcher starts again, the one that ``--resume`` means, and the batch of ``--batch -1``.

    Raises:
        UserError: no such run, or one that does not fit the ranks.
        Stopped: the run was asked to stop before its launcher started it again.
    """
    if config is None and not given.get("resume"):
        data = once(lambda: with_data(given, env)["data"], env)
        config = build_train_config({**given, "data": data})  # other flags are each rank's own, to be compared later
    life, own = this_life(), None
    if life.restarts:
        project = given.get("project", TrainConfig.project)
        own = once(lambda: find_own_run(project, life), env)
    if own is not None:
        config, resumed = go_on(own, given, config, env)
    elif config is None:
        config, resumed = once(lambda: resume(given), env)
    settled = config
    if resumed is not None:
        check_ranks(settled, env.world_size)
        say_resumed(resumed)  # here, for a launcher has looked for it as well
    if settled.batch_size == AUTOMATIC:
        batch = once(lambda: automatic_batch(settled, given, env.device, env.world_size), env)
        settled = dataclasses.replace(settled, batch_size=batch)
    return settled, resumed


def go_on(
    run_dir: Path, given: Mapping[str, Any], config: TrainConfig | None, env: DistEnv
) -> tuple[TrainConfig, dict[str, Any] | None]:
    """Return settings and checkpoint of a run whose launcher starts it again. Collective.

    Args:
        run_dir: of its lives before.
        given: flags that were typed.
        config: of `settings`.
        env: this rank's place.

    Raises:
        Stopped: the life before was asked to stop.
    """
    log = get_logger()
    for line in last_words():
        log.info(line)
    log.info(f"restart {this_life().restarts}, in {run_dir}")
    if once(lambda: was_stopped(run_dir), env):
        raise Stopped("a signal before the restart", RESUMABLE, how_to_go_on(run_dir))
    if once(lambda: has_checkpoint(run_dir), env):
        flags = {name: given[name] for name in given.keys() & RESUMABLE_FLAGS} | {"resume": str(run_dir)}
        return once(lambda: resume(flags, again=True), env)
    assert config is not None  # else there is a checkpoint
    return dataclasses.replace(config, project=str(run_dir.parent), name=run_dir.name, exist_ok=True), None


def say_resumed(resumed: Mapping[str, Any]) -> None:
    """Say where a run goes on, and what is not as it was."""
    state = resumed["state"]
    where = f"epoch {state['epoch'] + 1}, batch {state['batch']}" if state["batch"] else f"epoch {state['epoch'] + 1}"
    get_logger().info(f"resuming from {resumed['path']}, {where}")
    for sentence in resumed["said"]:
        get_logger().info(sentence)
