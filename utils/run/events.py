"""What of a run its callbacks are told: the events, made from the run."""

from collections import Counter
from collections.abc import Sequence

from utils.config.build import config_to_dict
from utils.metrics.evaluation import Evaluation, Metrics
from utils.run.callbacks import EpochEnd, Figures, TrainEnd, TrainStart
from utils.run.state import Run


def train_start(run: Run, resumed: bool) -> TrainStart:
    """Describe a run that is ready for its next batch.

    Args:
        run: with the state it starts from.
        resumed: whether it goes on with an earlier one.
    """
    return TrainStart(
        run_dir=run.run_dir,
        epochs=run.config.epochs,
        batches_per_epoch=run.schedule.batches_per_epoch,
        names=tuple(run.data.names),
        losses=run.family.losses,
        rates=tuple(rates(run, run.state.epoch)),
        flags=config_to_dict(run.config),
        hyp=config_to_dict(run.hyp),
        resumed_epoch=run.state.epoch + 1 if resumed else None,
    )


def epoch_end(
    run: Run, losses: Sequence[float], evaluation: Evaluation | None, better: bool, seconds: float
) -> EpochEnd:
    """Describe an epoch that was trained and maybe validated.

    Args:
        run: with the epoch and the best fitness in its state.
        losses: means of the epoch, of each term.
        evaluation: None without one.
        better: whether it is the best so far.
        seconds: that the epoch took.
    """
    names = run.family.losses
    return EpochEnd(
        epoch=run.state.epoch + 1,
        epochs=run.config.epochs,
        train_losses=dict(zip(names, losses, strict=True)),
        val_losses={} if evaluation is None else dict(zip(names, evaluation.losses, strict=True)),
        metrics=figures(run, evaluation),
        rates=rates(run, run.state.epoch),
        best_value=run.state.best_fitness,
        better=better,
        seconds=seconds,
    )


def train_end(run: Run, evaluation: Evaluation | None) -> TrainEnd:
    """Describe a finished run.

    Args:
        run: as it is.
        evaluation: of its best weights; None if there are none.
    """
    best = run.weights_dir / "best.pt"
    return TrainEnd(run.run_dir, best if evaluation is not None else None, figures(run, evaluation))


def rates(run: Run, epoch: int) -> dict[str, float]:
    """Return the learning rates of the parameter groups by name, at the last batch of an epoch."""
    last_batch = (epoch + 1) * run.schedule.batches_per_epoch - 1
    return {f"lr{group}": rate for group, rate in enumerate(run.schedule.lr(last_batch))}


def figures(run: Run, evaluation: Evaluation | None) -> Figures | None:
    """Return what of a validation callbacks are told; None without one."""
    if evaluation is None:
        return None
    metrics = evaluation.metrics
    return Figures(
        precision=metrics.p,
        recall=metrics.r,
        map50=metrics.map50,
        map=metrics.map,
        fitness=metrics.fitness,
        class_maps=class_maps(metrics, run.data.names),
    )


def class_maps(metrics: Metrics, names: Sequence[str]) -> dict[str, float]:
    """Return the AP over IoU 0.5 to 0.95 of each class by name, nan of one without labels.

    Args:
        metrics: of a validation.
        names: of the classes, index = class id; of those that several classes have, each is followed by the id.
    """
    uses = Counter(names)
    rows = metrics.rows(names)[1:]
    return {row.name if uses[row.name] == 1 else f"{row.name} ({i})": row.map for i, row in enumerate(rows)}
