"""Recipes: the hyperparameters of a training, and the learning rates that suit an optimizer."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from utils.config.command_line import check_values
from utils.config.yaml_files import SHIPPED, find_yaml, load_yaml
from utils.core.errors import Problems, nearest

# Shipped recipes and the optimizer that their learning rates are for; see `load_recipe`.
SHIPPED_RECIPES = {
    "hyp.scratch-low.yaml": "SGD",
    "hyp.scratch-med.yaml": "SGD",
    "hyp.scratch-high.yaml": "SGD",
    "hyp.no-augmentation.yaml": "SGD",
    "hyp.VOC.yaml": "SGD",
    "hyp.Objects365.yaml": "SGD",
    "hyp.shapes.yaml": "AdamW",
}


ADAM_LR0 = 0.001  # where Adam and AdamW usually start, PyTorch's default; at SGD's 0.01 they learn little or nothing


def _gain(default: float, low: float, high: float) -> float:
    """One hyperparameter as a dataclass field with its inclusive range."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass
class Hyp:
    """Hyperparameters of a recipe; the defaults are the recipe scratch-low, also for keys that a file leaves out."""

    lr0: float = _gain(0.01, 0, 10)  # initial learning rate
    lrf: float = _gain(0.01, 0, 1)  # final learning rate as a share of lr0
    momentum: float = _gain(0.937, 0, 0.9999)  # of SGD; beta 1 of Adam
    weight_decay: float = _gain(0.0005, 0, 1)
    warmup_epochs: float = _gain(3.0, 0, 1000)
    warmup_momentum: float = _gain(0.8, 0, 0.9999)
    warmup_bias_lr: float = _gain(0.1, 0, 10)
    box: float = _gain(0.05, 0, 1000)  # loss gains
    cls: float = _gain(0.5, 0, 1000)
    cls_pw: float = _gain(1.0, 0, 1000)  # weight of positives in the class loss
    obj: float = _gain(1.0, 0, 1000)
    obj_pw: float = _gain(1.0, 0, 1000)
    iou_t: float = _gain(0.2, 0, 1)  # read for YOLOv5's sake; no loss uses it
    anchor_t: float = _gain(4.0, 1, 100)  # largest side ratio at which a target matches an anchor
    fl_gamma: float = _gain(0.0, 0, 10)  # focal loss; 0 = off
    hsv_h: float = _gain(0.015, 0, 1)
    hsv_s: float = _gain(0.7, 0, 1)
    hsv_v: float = _gain(0.4, 0, 1)
    degrees: float = _gain(0.0, 0, 180)
    translate: float = _gain(0.1, 0, 1)
    scale: float = _gain(0.5, 0, 0.99)  # factor uniform in 1 +- scale; at 1 an image could vanish
    shear: float = _gain(0.0, 0, 89)  # degrees
    perspective: float = _gain(0.0, 0, 0.01)
    flipud: float = _gain(0.0, 0, 1)  # from here on probabilities
    fliplr: float = _gain(0.5, 0, 1)
    mosaic: float = _gain(1.0, 0, 1)
    mixup: float = _gain(0.0, 0, 1)
    copy_paste: float = _gain(0.0, 0, 1)  # share of the objects with polygon labels
    anchors: float = _gain(0.0, 0, 10)  # per level, rounded; 0 = as many as the network's YAML says


def load_hyp(name: str | Path) -> Hyp:
    """Read a hyperparameter file as it is, by path or shipped name. Keys that it leaves out have scratch-low's values.

    Raises:
        UserError: lists unknown keys, values that are not numbers or out of range.
    """
    return Hyp(**_read_hyp(find_yaml(name, "hyp")))


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters for an optimizer.

    Attributes:
        hyp: with learning rates that suit it.
        note: what is not as the file has it, "" if nothing.
        doubts: what may be a mistake, a sentence each.
    """

    hyp: Hyp
    note: str = ""
    doubts: tuple[str, ...] = ()


def load_recipe(name: str | Path, optimizer: str) -> Recipe:
    """Read a hyperparameter file for an optimizer, by path or shipped name.

    Learning rates (``lr0``, ``warmup_bias_lr``) are chosen by hand where a file that is not a shipped recipe names
    them; these are taken as they are. So are a shipped recipe's with the optimizer that it is for, Adam and AdamW
    alike. All others are the usual ones: scratch-low's for SGD, 0.001 for Adam and AdamW, whose ``warmup_bias_lr`` is
    ``lr0``: they need no push.

    Raises:
        UserError: lists unknown keys, values that are not numbers or out of range.
    """
    path = find_yaml(name, "hyp")
    given = _read_hyp(path)
    shipped = path.resolve().parent == SHIPPED["hyp"] and path.name in SHIPPED_RECIPES
    meant_for = SHIPPED_RECIPES[path.name] if shipped else "SGD"
    adaptive = optimizer != "SGD"
    chosen = {} if shipped and (meant_for != "SGD") != adaptive else given
    lr0 = chosen.get("lr0", ADAM_LR0 if adaptive else Hyp.lr0)
    rates = {"lr0": lr0, "warmup_bias_lr": chosen.get("warmup_bias_lr", lr0 if adaptive else Hyp.warmup_bias_lr)}

    before, hyp = Hyp(**given), Hyp(**{**given, **rates})
    changed = [rate for rate in rates if rates[rate] != getattr(before, rate)]
    note = " and ".join(f"{rate} {rates[rate]:g}" for rate in changed)
    if note:
        others = " and ".join(f"{getattr(before, rate):g}" for rate in changed)
        note += f" for {optimizer} in place of {others}, for {meant_for}"
    high = [rate for rate in rates if adaptive and rates[rate] >= getattr(Hyp, rate)]
    doubts = [
        f"{path}: {rate} {rates[rate]:g} is a learning rate for SGD; {optimizer} usually starts from {ADAM_LR0:g}, and "
        "does so here without that line"
        for rate in high
    ]
    return Recipe(hyp, note, tuple(doubts))


def _read_hyp(path: Path) -> dict[str, float]:
    content = load_yaml(path)
    known = [item.name for item in dataclasses.fields(Hyp)]
    problems, given = Problems(), {}
    for key, value in content.items():
        if key not in known:
            problems.add(f"{key} is not a hyperparameter{nearest(key, known)}")
        else:
            given[key] = value
    check_values(Hyp, given, problems)
    problems.raise_if_any(str(path))
    return {key: float(value) for key, value in given.items()}
