"""The splits of a data set: opened, with all that is wrong with them said at once, and compared between machines."""

from collections.abc import Mapping, Sequence
from functools import partial

from utils.config.data_yaml import DataConfig, check_split_paths
from utils.core.errors import Problems, UserError
from utils.data.fetch import ensure_data
from utils.data.index import LabelIndex, build_index, listed
from utils.data.label_rules import LEFT_OUT_ROW
from utils.data.labels import label_path
from utils.data.shapes import ensure_shapes
from utils.dist.collectives import all_gather_objects, once_per_machine
from utils.dist.place import ALONE, DistEnv


def open_splits(
    data: DataConfig,
    splits: Sequence[str],
    env: DistEnv = ALONE,
    *,
    strict: bool = False,
    labelled: Sequence[str] = ("train", "val"),
) -> dict[str, LabelIndex]:
    """Return the labels of some splits, drawing or fetching the data set first if it is not there. Collective.

    Args:
        data: where they are.
        splits: their names.
        env: this rank's place.
        strict: whether any problem of images and labels is a mistake.
        labelled: splits that must have a label.

    Raises:
        UserError: says of all splits together what is missing or not usable.
    """
    if data.generator is not None:
        once_per_machine(partial(ensure_shapes, data.root), env)
    else:
        once_per_machine(partial(ensure_data, data, splits), env)
    problems = Problems()
    found = {split: problems.attempt(partial(_open_split, data, split, split in labelled, env)) for split in splits}
    indexes = {split: index for split, index in found.items() if index is not None}
    wrong = {split: report.problems for split, index in indexes.items() if (report := index.report).problems}
    if strict and wrong:
        some = next(iter(indexes.values()))
        count = sum(map(len, wrong.values()))
        hints = "".join(f"; {hint}" for index in indexes.values() for hint in index.report.hints)
        problems.add(f"--strict: {count} problems in {' and '.join(wrong)}{hints}\n{listed(wrong, some.path(0))}")
    problems.raise_if_any()
    return indexes


def _open_split(data: DataConfig, split: str, labelled: bool, env: DistEnv) -> LabelIndex:
    check_split_paths(data, [split])
    sources = getattr(data, split)
    named_in = f"{data.path}: {split}"
    index = build_index(
        sources,
        data.label_classes,
        env,
        split=split,
        single_cls=data.merged > 0,
        columns=data.columns,
        named_in=named_in,
    )
    if labelled and not index.num_instances:
        raise UserError(f"{split}: no labels in {', '.join(map(str, sources))}: {_why_no_labels(index, split)}")
    return index


def _why_no_labels(index: LabelIndex, split: str) -> str:
    """What to do about a split without labels."""
    report = index.report
    lost = [problem for problem in report.problems if problem.line and problem.rule.endswith(LEFT_OUT_ROW)]
    if lost:
        files = len({problem.file for problem in lost})
        reasons = "; ".join([*report.rule_counts(lost), *report.hints])
        examples = listed({split: lost}, index.path(0))
        return f"all {len(lost)} rows of {files} label files were left out: {reasons}\n{examples}"
    if report.empty:
        return f"all label files that are there, {report.empty}, are empty; at least one label is needed"
    first = label_path(index.path(0))
    return f"at least one is needed; the label file of the first image would be {first}, or beside the image"


def check_same_data(indexes: Mapping[str, LabelIndex], env: DistEnv) -> None:
    """Compare the data of all machines: file names, shapes and labels, not where they are or when they were written.

    Collective: every rank must call it.

    Raises:
        UserError: some are not the same.
    """
    if env.local_world_size == env.world_size:
        return
    own = (env.node_rank, {split: (len(index), index.labels_digest()) for split, index in indexes.items()})
    found = dict(all_gather_objects(own, env))
    for split in indexes:
        if len({digests[split] for digests in found.values()}) > 1:
            counts = ", ".join(f"{digests[split][0]} on machine {node}" for node, digests in sorted(found.items()))
            raise UserError(
                f"{split}: the machines have different data ({counts} images, or other names, sizes or labels); copy "
                "the data set from one to the others"
            )
