"""What must be the same: flags, files and code on all machines, the data of a run in all its lives."""

import hashlib
from collections.abc import Mapping
from typing import Any

from utils.config.build import config_to_dict
from utils.config.flags import TrainConfig, ValConfig
from utils.config.yaml_files import ROOT
from utils.core.errors import UserError
from utils.data.index import LabelIndex
from utils.dist.collectives import all_gather_objects
from utils.dist.place import DistEnv

LONGEST = 100  # letters of two values in a message
# These may be a machine's own. Of files their content has to be the same; weights are read by rank 0 for all.
MACHINE_FLAGS = {"weights", "data", "cfg", "hyp", "device", "workers", "cache", "project", "name", "dist_timeout"}


def flags_of_all(config: TrainConfig | ValConfig) -> dict[str, Any]:
    """Return the flags that all ranks have to agree on, as they are typed."""
    values = config_to_dict(config).items()
    return {f"--{name.replace('_', '-')}": value for name, value in values if name not in MACHINE_FLAGS}


def check_same_settings(settings: Mapping[str, Any], env: DistEnv) -> None:
    """Compare what the ranks were told; machines are started one by one. Collective: every rank must call it.

    Args:
        settings: plain values by name, the same names on all ranks.
        env: this rank's place.

    Raises:
        UserError: names those that differ.
    """
    told = all_gather_objects(dict(settings), env)
    differing = []
    for name, first in told[0].items():
        other, rank = next(((its[name], rank) for rank, its in enumerate(told) if its[name] != first), (first, 0))
        if rank:
            values = f"{first} on rank 0, {other} on rank {rank}"
            differing.append(f"{name} ({values if len(values) < LONGEST else f'rank {rank} has another'})")
    if differing:
        raise UserError(
            f"the machines were started with different settings: {', '.join(differing)}; start all with the same flags "
            "and files"
        )


def code_digest() -> str:
    """Digest of this program's own code, short enough to be read."""
    found = hashlib.sha256()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("models/**/*.py"), *ROOT.glob("utils/**/*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def data_facts(indexes: Mapping[str, LabelIndex]) -> dict[str, dict[str, Any]]:
    """Return what identifies the data of a run; other data would change the schedule and the order of the images.

    The digest is of these very files, that of the labels is the same wherever the data set is.
    """
    return {
        split: {
            "images": len(index),
            "instances": index.num_instances,
            "labels": index.labels_digest(),
            "digest": index.images_digest,
        }
        for split, index in indexes.items()
    }


def check_moved_data(named: str, indexes: Mapping[str, LabelIndex], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that a run may go on with the data set in another place: with the same labels, whatever else is new.

    Args:
        named: by --data.
        indexes: of that; {} if something is wrong with it.
        own: what `data_facts` said of the run's. Older runs lack the digest of the labels.

    Raises:
        UserError: says what differs.
    """
    differing = []
    for split, facts in data_facts(indexes).items():
        before = own[split]
        changed = [what for what in ("images", "instances") if facts[what] != before[what]]
        differing += [f"{facts[what]} {what} in {split} (the run has {before[what]})" for what in changed]
        if not changed and before.get("labels", facts["labels"]) != facts["labels"]:
            differing.append(f"other names, sizes or labels in {split}")
    if differing:
        raise UserError(
            f"--resume: --data {named} is not the data set of the run: {', '.join(differing)}; name a copy of that, or "
            "start a new run with --weights"
        )
