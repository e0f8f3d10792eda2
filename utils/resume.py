"""Which run ``--resume`` means, what of it may change on the way, and what has changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.checkpoint_files import load_checkpoint
from utils.config import AUTOMATIC, TrainConfig, build_config
from utils.data_config import build_train_config
from utils.errors import UserError
from utils.run_folder import DESCRIPTION, find_resumable
from utils.torch_utils import load_newest

# These may differ from the run's own: where and how fast it runs, how long, and what it leaves besides its weights.
RESUMABLE_FLAGS = {
    "resume", "project", "device", "dp", "compile", "cuda_graph", "workers", "cache", "dist_timeout", "stall_warning",
    "stall_timeout", "max_restarts", "time_limit", "epochs", "patience", "save_period", "save_steps", "noplots",
    "loggers", "profile",
}  # fmt: skip
SILENT = {"resume", "project"}  # they name the run
GO_BEYOND = {"epochs", "patience"}  # with a new value of these a run that stopped early goes on
# What a checkpoint holds; see utils.run_state.
STATE_KEYS = {"state", "model", "ema", "optimizer", "scaler", "meters", "rank_buffers", "rng", "spec", "names"}
STATE_KEYS |= {"config", "precision", "data", "hyp", "versions"}


def resume(given: Mapping[str, Any], *, again: bool = False) -> tuple[TrainConfig, dict[str, Any]]:
    """Find the run to go on with, and its settings: its own, but for what may change.

    Args:
        given: flags of this command line.
        again: whether a launcher starts the same command line again: then no flag has changed, and a run whose epochs
            are done comes to its end once more.

    Returns:
        Settings and checkpoint; the checkpoint has besides ``run_dir`` and ``path`` where they are now, and ``said``:
        sentences on what changes, to be logged.

    Raises:
        UserError: no such run, flags that differ and may not, or a run that is finished.
    """
    named = "" if given["resume"] is True else given["resume"]
    project = given.get("project", TrainConfig.project)
    runs = find_resumable(named, project)
    for run_dir, newest in runs:
        saved, path = _read(newest, named)
        why_over = _over(run_dir, saved, given if named else {})  # a finished run is gone beyond by its name only
        if named or not why_over:
            break
    if again:
        why_over = ""
    if why_over and not named:
        raise UserError(
            f"--resume: no run under {project} is unfinished, the newest is {runs[0][0]}; start a new one, for example "
            f"with --weights {runs[0][0] / 'weights' / 'best.pt'}, or name the run and more --epochs"
        )
    if why_over:
        raise UserError(
            f"--resume {run_dir}: nothing is left to resume, {why_over}; start a new run with --weights {path}, or "
            "give more --epochs"
        )
    if not again:
        _refuse_changes(given, saved["config"], run_dir)
    # Other devices may be driven by other means.
    kept = {**saved["config"], "dp": False} if "device" in given else saved["config"]
    config = build_config(TrainConfig, {**kept, **{name: given[name] for name in given.keys() & RESUMABLE_FLAGS}})
    done = saved["state"]["epoch"]
    if config.epochs < done:
        raise UserError(f"--resume {run_dir}: --epochs {config.epochs} is less than the {done} that are done")
    if GO_BEYOND & given.keys() and not again:
        saved["state"]["stopped"] = False  # it goes on, as far as its new settings let it
    saved["said"] = _changes(given, saved["config"], config)
    saved["run_dir"], saved["path"] = str(run_dir), str(path)
    return config, saved


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


def _over(run_dir: Path, saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return why nothing is left to do in a run, '' if something is."""
    epochs = given.get("epochs", saved["config"]["epochs"])
    if saved["state"]["stopped"]:
        return "" if GO_BEYOND & given.keys() or _was_cut_short(run_dir) else "it stopped early"
    if saved["state"]["epoch"] < epochs or _was_cut_short(run_dir):
        return ""
    return "all its epochs are done"


def _was_cut_short(run_dir: Path) -> bool:
    """Whether a run that has no epoch left died before its end, whose last act is to strip best.pt."""
    try:
        return "optimizer" in load_checkpoint(run_dir / "weights" / "best.pt")
    except UserError:
        return False


def _refuse_changes(given: Mapping[str, Any], own: Mapping[str, Any], run_dir: Path) -> None:
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
        f"--resume {run_dir}: can't change {shown}; a run goes on with its own settings, those in "
        f"{run_dir / DESCRIPTION}: leave {them} out. What may change: "
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
