"""Which run ``--resume`` means, what of it may change on the way, and what has changed."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.checkpoints.files import load_checkpoint
from utils.config.build import build_config
from utils.config.data_yaml import build_train_config
from utils.config.flags import AUTOMATIC, TrainConfig
from utils.core.errors import UserError
from utils.run.folder import DESCRIPTION, find_resumable, is_finished
from utils.torch_utils import load_newest

RESUMABLE_FLAGS = {
    "resume", "project", "data", "device", "dp", "compile", "cuda_graph", "workers", "cache", "dist_timeout",
    "stall_warning", "stall_timeout", "max_restarts", "time_limit", "epochs", "patience", "save_period", "save_steps",
    "noplots", "loggers", "profile",
}  # fmt: skip
SILENT = {"resume", "project"}  # they name the run, and where it goes on
GO_BEYOND = {"epochs", "patience"}  # with a new value of these a run that stopped early goes on
# What a checkpoint holds; see utils.run.state.
STATE_KEYS = {"state", "model", "ema", "optimizer", "scaler", "meters", "rank_buffers", "rng", "spec", "names"}
STATE_KEYS |= {"config", "precision", "data", "hyp", "versions"}


def resume(given: Mapping[str, Any], *, again: bool = False) -> tuple[TrainConfig, dict[str, Any]]:
    """Find the run to go on with, and its settings: its own, but for what may change.

    Args:
        given: flags of this command line.
        again: whether a launcher starts the same command line again: then no flag has changed, and a run whose epochs
            are done comes to its end once more.

    Returns:
        Settings and checkpoint. The checkpoint has besides ``path``, where it is now; ``run_dir``, the folder that the
        run goes on in, "" for a new one; ``origin``, the folder of the run so far, "" if nobody knows; ``best``, the
        file of its best weights so far for a new folder, "" if there is none; and ``said``, sentences on what changes,
        to be logged.

    Raises:
        UserError: no such run, flags that differ and may not, or a run that is finished.
    """
    run_dir, saved, path = _find(given, again)
    elsewhere = not again and _goes_elsewhere(run_dir, path, given)
    if not again:
        own_name = {"name"} if elsewhere else set()
        _refuse_changes({name: given[name] for name in given.keys() - own_name}, saved["config"], run_dir or path)
    # Other devices may be driven by other means.
    kept = {**saved["config"], "dp": False} if "device" in given else dict(saved["config"])
    changeable = RESUMABLE_FLAGS
    if elsewhere:
        kept |= {"project": TrainConfig.project, "exist_ok": False}
        changeable = RESUMABLE_FLAGS | {"name"}
    config = build_config(TrainConfig, {**kept, **{name: given[name] for name in given.keys() & changeable}})
    done = saved["state"]["epoch"]
    if config.epochs < done:
        raise UserError(f"--resume {run_dir or path}: --epochs {config.epochs} is less than the {done} that are done")
    beyond = GO_BEYOND & given.keys()
    if beyond and not (again and all(given[name] == saved["config"][name] for name in beyond)):
        saved["state"]["stopped"] = False  # it goes on, as far as its new settings let it
    saved["said"] = _changes(given, saved["config"], config)
    saved["path"], saved["origin"] = str(path), str(run_dir or "")
    saved["run_dir"], saved["best"] = "" if elsewhere else str(run_dir), ""
    if elsewhere:
        saved["said"].append(f"the run goes on in a new folder under {config.project}; {path} stays as it is")
        _find_best(saved, path, run_dir)
    return config, saved


def _find(given: Mapping[str, Any], again: bool) -> tuple[Path | None, dict[str, Any], Path]:
    """Return the folder of the run that is meant, its checkpoint, and the file of that; see `resume`."""
    named = "" if given["resume"] is True else given["resume"]
    project = given.get("project", TrainConfig.project)
    runs = find_resumable(named, project)
    for run_dir, newest in runs:
        if not named and run_dir is not None and is_finished(run_dir):
            continue  # reading its checkpoint takes longer
        saved, path = _read(newest, named)
        why_over = _over(run_dir, saved, given if named else {})  # a finished run is gone beyond by its name only
        if again or not why_over:
            return run_dir, saved, path
        if named:
            raise UserError(
                f"--resume {run_dir or path}: nothing is left to resume, {why_over}; start a new run with --weights "
                f"{path}, or give more --epochs"
            )
    newest_run = runs[0][1].parent.parent
    raise UserError(
        f"--resume: no run under {project} is unfinished, the newest is {newest_run}; start a new one, for example "
        f"with --weights {newest_run / 'weights' / 'best.pt'}, or name the run and more --epochs"
    )


def _goes_elsewhere(run_dir: Path | None, path: Path, given: Mapping[str, Any]) -> bool:
    """Whether a run goes on in a new folder: from any file but the newest of its own, and to another ``--project``."""
    if run_dir is None:
        return True
    if given["resume"] is True:
        return False
    if Path(given["resume"]).is_file() and path.name != "last.pt":
        return True
    project = given.get("project")
    there = project is not None and os.path.isdir(project)
    return project is not None and not (there and any(os.path.samefile(project, above) for above in run_dir.parents))


def _find_best(saved: dict[str, Any], path: Path, run_dir: Path | None) -> None:
    """Note where the best weights of a run so far are; without them the best one is looked for anew."""
    state = saved["state"]
    if state["best_fitness"] < 0:
        return
    if (state["epoch"], state["batch"]) == (state["best_epoch"] + 1, 0):
        saved["best"] = str(path)
        return
    best = run_dir / "weights" / "best.pt" if run_dir else None
    with contextlib.suppress(UserError):
        if best and load_checkpoint(best).get("state", {}).get("epoch") == state["best_epoch"] + 1:
            saved["best"] = str(best)
            return
    saved["said"].append(
        f"the best weights up to there, of epoch {state['best_epoch'] + 1}, are not at hand: best.pt will be the best "
        "from here on"
    )
    state["best_fitness"], state["best_epoch"] = -1.0, state["epoch"]


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """Check that the batch of a run that goes on can be shared out.

    Args:
        config: its settings.
        ranks: that it goes on with.

    Raises:
        UserError: offers the nearest numbers of ranks.
    """
    batch = config.batch_size
    if batch % ranks == 0:
        return
    fewer = max(number for number in range(1, ranks) if batch % number == 0)
    more = [number for number in range(ranks, batch + 1) if batch % number == 0][:1]
    offered = " or ".join(map(str, [fewer, *more]))
    raise UserError(
        f"--resume: the run's batch of {batch} images can't be shared out over {ranks} ranks; go on with {offered}"
    )


def _read(newest: Path, named: str) -> tuple[dict[str, Any], Path]:
    """Read a checkpoint to go on from: of a run the one before if it is damaged, but of a file only itself."""
    is_file = bool(named) and Path(named).is_file()
    saved, path = (load_checkpoint(newest, "--resume"), newest) if is_file else load_newest(newest)
    if "optimizer" not in saved:
        raise UserError(f"--resume {path}: weights for use, not to go on from; name a last.pt, or use --weights")
    missing = STATE_KEYS - saved.keys() or {"epoch", "stopped"} - saved["state"].keys()
    if missing:
        raise UserError(f"--resume {path}: no state of a run, {', '.join(sorted(missing))} is missing")
    return saved, path


def _over(run_dir: Path | None, saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return why nothing is left to do in a run, '' if something is."""
    epochs = given.get("epochs", saved["config"]["epochs"])
    if saved["state"]["stopped"]:
        return "" if GO_BEYOND & given.keys() or _was_cut_short(run_dir) else "it stopped early"
    if saved["state"]["epoch"] < epochs or _was_cut_short(run_dir):
        return ""
    return "all its epochs are done"


def _was_cut_short(run_dir: Path | None) -> bool:
    """Whether a run that has no epoch left died before its end, whose last act is to make or strip best.pt."""
    if run_dir is None:
        return False
    best = run_dir / "weights" / "best.pt"
    if not best.exists():  # --nosave
        return not is_finished(run_dir)
    try:
        return "optimizer" in load_checkpoint(best)
    except UserError:
        return False


def _refuse_changes(given: Mapping[str, Any], own: Mapping[str, Any], run: Path) -> None:
    typed = build_train_config(given)
    names = sorted(name for name in given.keys() - RESUMABLE_FLAGS if getattr(typed, name) != own.get(name))
    names = [name for name in names if (name, given[name]) != ("batch_size", AUTOMATIC)]  # found already
    if not names:
        return
    shown = ", ".join(
        f"{_flag(name)} {_value(getattr(typed, name))} (the run has {_value(own.get(name))})" for name in names
    )
    them = "them" if len(names) > 1 else "it"
    raise UserError(
        f"--resume {run}: can't change {shown}; a run goes on with its own settings, those in its {DESCRIPTION}: leave "
        f"{them} out. What may change: "
        f"{', '.join(sorted(map(_flag, RESUMABLE_FLAGS - SILENT)))}"
    )


def _changes(given: Mapping[str, Any], own: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Say what is not as it was in the run."""
    names = sorted(name for name in given.keys() & RESUMABLE_FLAGS - SILENT if getattr(config, name) != own.get(name))
    said = [f"{_flag(name)} {_value(own.get(name))} becomes {_value(getattr(config, name))}" for name in names]
    if "epochs" in names:
        said.append(
            f"the learning rate goes on along the schedule of {config.epochs} epochs, as if the run had been that long "
            "from its start"
        )
    return said


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(value: Any) -> str:
    return "''" if value == "" else str(value)
