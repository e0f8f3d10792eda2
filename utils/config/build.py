"""Building configurations, of typed flags, keywords or a checkpoint: checked as a whole; and as plain values again."""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from utils.config.command_line import check_values, given_flags
from utils.config.flags import DetectConfig, TrainConfig, ValConfig
from utils.config.recipe import Hyp
from utils.config.yaml_files import LONGEST_NAME
from utils.core.errors import Problems, UserError, nearest, report

Config = TypeVar("Config")
SPEED_THRESHOLDS = (0.25, 0.45)  # confidence and IoU of val.py --task speed: those of detect.py


def parse(kind: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Read the command line of a script (sys.argv by default) whose flags are the fields of a class.

    With mistakes in it the process ends with status 2, and all of them on stderr.
    """
    try:
        return build_config(kind, given_flags(kind, argv))
    except UserError as error:
        sys.exit(report(error))


def seconds_of(time: str) -> float | None:
    """Read the value of ``--time-limit``.

    Args:
        time: numbers with units as in 1d12h, 3h30m, 90m, 45s, or as schedulers have it, [D-]HH:MM:SS.

    Returns:
        Seconds; None for "", no limit.

    Raises:
        UserError: it is neither, or nothing at all.
    """
    if not time:
        return None
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", time)
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", time)
    found = units or clock
    parts = found.groups() if found else ()
    seconds = sum(int(part or 0) * size for part, size in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not seconds:
        raise UserError(f"--time-limit is a time such as 90m, 3h30m or 1-12:00:00, not {time!r}")
    return float(seconds)


def build_config(kind: type[Config], given: Mapping[str, Any]) -> Config:
    """Make a configuration from typed values, by field name; the rest are defaults.

    Raises:
        UserError: unknown names, or values of a wrong type or out of range.
    """
    problems = Problems()
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            problems.add(f"{name} is not a setting{nearest(name, names)}")
    check_values(kind, given, problems)
    if isinstance(given.get("time_limit"), str):
        problems.attempt(lambda: seconds_of(given["time_limit"]))
    problems.raise_if_any()
    config = kind(**given)
    if isinstance(config, TrainConfig):
        if config.weights and "cfg" not in given:
            config.cfg = ""  # the checkpoint knows its network
        if config.name == "cfg":
            config.name = Path(config.cfg or config.weights).stem
    if isinstance(config, TrainConfig | ValConfig | DetectConfig):
        _check_run_folder(config.project, config.name, problems)
    if isinstance(config, ValConfig):
        _check_val(config, problems)
    if isinstance(config, DetectConfig):
        _check_detect(config, problems)
    problems.raise_if_any()
    if isinstance(config, ValConfig) and config.task == "speed":  # as objects are looked for, unless said otherwise
        config.conf_thres = given.get("conf_thres", SPEED_THRESHOLDS[0])
        config.iou_thres = given.get("iou_thres", SPEED_THRESHOLDS[1])
    return config


def _check_run_folder(project: str, name: str, problems: Problems) -> None:
    """Refuse a run folder that is not below its project, and names that no file system takes."""
    inside = os.path.normpath(os.path.join(project, name))
    if not name.strip() or inside == os.path.normpath(project):
        problems.add(f"--name {name!r} is no folder of the run's own; leave it out, or give one such as --name test")
    elif Path(name).is_absolute() or ".." in Path(name).parts:
        parent, own = os.path.split(inside)
        problems.add(f"--name {name} leads out of --project {project}; give --project {parent or '.'} --name {own}")
    for spelling, text in (("--project", project), ("--name", name)):
        longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
        if longest > LONGEST_NAME:
            problems.add(f"{spelling} {text[:20]}...: a name of {longest} bytes; give one of {LONGEST_NAME} at most")


def _check_val(config: ValConfig, problems: Problems) -> None:
    if not config.weights:
        problems.add("--weights is missing: name the checkpoint to measure")
    if config.save_conf and not config.save_txt:
        problems.add("--save-conf adds a column to --save-txt; give that too (--save-json has confidences anyway)")
    if config.task == "speed" and (config.save_txt or config.save_json):
        problems.add("--task speed writes no files; leave --save-txt and --save-json out, or use another --task")
    if config.task == "speed" and config.coco_metrics:
        problems.add("--task speed scores nothing; leave --coco-metrics out, or use another --task")


def _check_detect(config: DetectConfig, problems: Problems) -> None:
    if not config.weights:
        problems.add("--weights is missing: name the checkpoint to detect with")
    if len(config.imgsz) > 2:
        problems.add(f"--imgsz takes one number, or height and width, not {len(config.imgsz)} numbers")
    if config.save_conf and not config.save_txt:
        problems.add("--save-conf adds a column to --save-txt; give that too (--save-csv has confidences anyway)")


def config_to_dict(config: TrainConfig | ValConfig | Hyp) -> dict[str, Any]:
    """Return a configuration as JSON-able values, for checkpoints and for the run folder."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(element) for element in value]
    return str(value) if isinstance(value, Path) else value
