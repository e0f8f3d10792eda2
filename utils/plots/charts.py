"""Charts of a data set, of a validation and of a training run, from plain arrays.

Shape letters: C classes, L labels, n images, P points of a curve.
"""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from utils.plots.style import (
    COLORS,
    DASHES,
    INK,
    MAIN_COLOR,
    NEUTRAL,
    OTHER_COLOR,
    line_style,
    new_figure,
    say,
    shown_names,
)

Array = NDArray[Any]

MANY_LINES = 12  # with more classes than this their lines are grey
FEW_BARS = 5  # a chart has room for so many at least, lest one is as high as the page
MANY_BARS = 100  # with more classes than this bars have no names
SHOWN_BOXES = 500
FEW_CELLS, SOME_CELLS, NAMED_CELLS = 12, 26, 100  # cells of a matrix in a row that have room for counts, shares, names
SMOOTHED_FROM = 5  # points
MARGIN = 0.015  # of an axis from 0 to 1, so that lines along its ends are seen


# ---- data set ----


def labels_chart(names: Sequence[str], counts: Array, boxes: Array, classes: Array, per_image: Array) -> Figure:
    """Show what the labels of a split are like.

    Args:
        names: of the classes.
        counts: (C,) labels of each class.
        boxes: (L, 4) cxcywhn; all or a part of the labels.
        classes: (L,) their class ids.
        per_image: (n,) labels of each image.
    """
    named = len(names) if len(names) <= MANY_BARS else 0
    figure = new_figure(13, max(8.5, 0.14 * named + 0.8))
    grid = figure.add_gridspec(2, 3, width_ratios=(1.15, 1, 1))
    _class_bars(figure.add_subplot(grid[:, 0]), names, counts)
    centers, sizes = boxes[:, :2], boxes[:, 2:4]
    _density(figure.add_subplot(grid[0, 1]), centers, "Centers", ("x / image width", "y / image height"), downward=True)
    _density(figure.add_subplot(grid[0, 2]), sizes, "Sizes", ("width / image width", "height / image height"))
    _box_shapes(figure.add_subplot(grid[1, 1]), boxes, classes, len(names))
    _objects_per_image(figure.add_subplot(grid[1, 2]), per_image)
    return figure


def _class_bars(axes: Axes, names: Sequence[str], counts: Array) -> None:
    places = np.arange(len(counts))
    colors = [COLORS[i % len(COLORS)] for i in places] if len(names) <= len(COLORS) else NEUTRAL
    axes.barh(places, counts, color=colors, height=0.8)
    title = f"{counts.sum():,} labels of {len(names):,} class" + "es" * (len(names) != 1)
    axes.set(title=title, xlabel="labels", ylim=(max(len(counts), FEW_BARS) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if len(counts) > MANY_BARS:
        axes.set_ylabel("class")
        return
    size = float(np.clip(560 / max(len(counts), 1), 7, 10))
    axes.set_yticks(places, shown_names(names), fontsize=size)
    axes.set_xlim(0, 1.18 * max(counts.max(initial=0), 1))
    for place, count in zip(places, counts, strict=True):
        axes.annotate(f"{count:,}", (count, place), (3, 0), textcoords="offset points", va="center", fontsize=size)


def _density(axes: Axes, points: Array, title: str, labels: tuple[str, str], downward: bool = False) -> None:
    """Count points (L, 2) of the unit square in a grid; a field without points is white."""
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1], aspect="equal", xlim=(0, 1), ylim=(0, 1))
    if downward:
        axes.invert_yaxis()  # as in images
    if not len(points):
        return say(axes, "no labels")
    edges = np.linspace(0, 1, 1 + int(np.clip(math.sqrt(len(points)) / 2, 10, 50)))  # finer with more points
    histogram = np.histogram2d(points[:, 0], points[:, 1], bins=[edges, edges])[0]
    shown = np.ma.masked_equal(histogram.T, 0)  # colors start at 0, for all counts may be the same
    image = axes.pcolormesh(edges, edges, shown, cmap="viridis", vmin=0, vmax=shown.max(), rasterized=True)
    axes.figure.colorbar(image, ax=axes, shrink=0.8, ticks=MaxNLocator(5, integer=True), label="labels")


def _box_shapes(axes: Axes, boxes: Array, classes: Array, num_classes: int) -> None:
    step = max(math.ceil(len(boxes) / SHOWN_BOXES), 1)
    sample, ids = boxes[::step], classes[::step].astype(int)
    title = f"{len(sample)} boxes on one center" if len(sample) < len(boxes) else "All boxes on one center"
    axes.set(title=title, xlabel="width / image width", ylabel="height / image height", aspect="equal")
    if not len(sample):
        return say(axes, "no labels")
    half = sample[:, 2:4] / 2
    limit = min(1.05 * half.max(), 0.5)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit))
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]])
    colors = [COLORS[i % len(COLORS)] for i in ids] if num_classes <= len(COLORS) else INK
    axes.add_collection(LineCollection(list(half[:, None] * corners), colors=colors, linewidths=0.6, alpha=0.5))


def _objects_per_image(axes: Axes, per_image: Array) -> None:
    axes.set(title="Labels in an image", xlabel="labels", ylabel="images")
    if not len(per_image):
        return say(axes, "no images")
    limit = max(int(np.percentile(per_image, 99.5)), 1)
    counts = np.bincount(np.minimum(per_image, limit).astype(int), minlength=limit + 1)
    bins = max(math.ceil(limit / 60), 1)  # bars that are too many to see are joined
    joined = np.add.reduceat(counts[1:], np.arange(0, limit, bins))
    starts = 1 + bins * np.arange(len(joined))
    axes.bar(starts + (bins - 1) / 2, joined, width=0.85 * bins, color=MAIN_COLOR)
    axes.bar(0, counts[0], width=0.85, color=OTHER_COLOR)
    if counts[0]:
        axes.set_title(f"Labels in an image ({counts[0]:,} without)")
    axes.grid(axis="x", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if limit < per_image.max():
        axes.set_xlabel(f"labels (the last bar: up to {per_image.max():,})")


# ---- validation ----


def pr_chart(names: Sequence[str], curves: Array, ap50: Array) -> Figure:
    """Show precision over recall at IoU 0.5.

    Args:
        names: of the classes that have labels.
        curves: (C, P) precision at P recalls from 0 to 1.
        ap50: (C,) area under each curve.
    """
    values = [f"{value:.3f}" for value in ap50]
    mean = f"{ap50.mean():.3f}" if len(ap50) else ""
    return _curves("Precision and recall at IoU 0.5", ("recall", "precision"), names, curves, values, mean, "AP50")


def confidence_chart(word: str, names: Sequence[str], curves: Array, best: float) -> Figure:
    """Show precision, recall or F1 over confidence at IoU 0.5.

    Args:
        word: which of them.
        names: of the classes that have labels.
        curves: (C, P) at P confidences from 0 to 1.
        best: confidence with the best mean F1 after smoothing over confidence, where the values of the legend are
            read. The mean in the chart is not smoothed, and may be higher elsewhere.
    """
    at = round(best * (curves.shape[1] - 1))
    values = [f"{curve[at]:.3f}" for curve in curves]
    mean = f"{curves[:, at].mean():.3f}" if len(curves) else ""
    title, legend = f"{word.capitalize()} over confidence at IoU 0.5", f"{word} at confidence {best:.3f}"
    figure = _curves(title, ("confidence", word), names, curves, values, mean, legend)
    if len(curves):
        figure.axes[0].axvline(best, color=INK, linestyle=":", linewidth=1)
        side = "left" if best < 0.15 else "right" if best > 0.85 else "center"
        figure.axes[0].text(best, 1.01 + MARGIN, "best mean F1, smoothed", ha=side, va="bottom", fontsize=9)
    return figure


def _curves(
    title: str,
    labels: tuple[str, str],
    names: Sequence[str],
    curves: Array,
    values: Sequence[str],
    mean: str,
    legend: str,
) -> Figure:
    """Draw a line for each class and the mean, which is bold."""
    figure = new_figure(9, 6)
    axes = figure.add_subplot()
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, 1), ylim=(-MARGIN, 1 + MARGIN))
    axes.set_title(title, pad=20)
    if not len(curves):
        say(axes, "no labels")
        return figure
    x = np.linspace(0, 1, curves.shape[1])
    entries = []
    for number, (name, curve, value) in enumerate(zip(shown_names(names), curves, values, strict=True)):
        if len(curves) <= MANY_LINES:
            entries.append((axes.plot(x, curve, linewidth=1.5, **line_style(number))[0], f" {name} {value}"))
        else:
            line = axes.plot(x, curve, linewidth=0.7, color=NEUTRAL, alpha=0.6)[0]
            entries = [(line, f" each of {len(curves)} classes")]
    if len(curves) > 1:
        entries.append((axes.plot(x, curves.mean(0), linewidth=3, color=INK)[0], f" mean {mean}"))
    # The space before a class name: matplotlib leaves labels that start with an underscore out.
    lines, texts = zip(*entries, strict=True)
    figure.legend(lines, texts, loc="outside right upper", handlelength=3, title=legend, alignment="left")
    return figure


def confusion_chart(names: Sequence[str], matrix: Array) -> Figure:
    """Show which classes are taken for which; each column sums to 1.

    Args:
        names: of the classes.
        matrix: (C + 1, C + 1) counts [predicted, true], the background last.
    """
    size = len(matrix)
    shares = matrix / np.maximum(matrix.sum(0, keepdims=True), 1)
    side = float(np.clip(4 + 0.5 * size, 6, 15))
    figure = new_figure(side + 1, side)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.7, aspect=35, pad=0.02, label="share of the true class")
    axes.set(xlabel="true", ylabel="predicted")
    axes.set_title("Confusion matrix (confidence above 0.25, IoU above 0.45)", fontsize=10)
    axes.grid(visible=False)
    step = max(math.ceil(size / NAMED_CELLS), 1)
    ticks = sorted({*range(0, size - 1, step), size - 1})
    written = shown_names(names, 20 if size <= SOME_CELLS else 14)
    written = [written[tick] if tick < size - 1 else "background" for tick in ticks]
    fontsize = 9 if size <= SOME_CELLS else 7
    axes.set_xticks(ticks, written, rotation=45 if size <= FEW_CELLS else 90, fontsize=fontsize)
    axes.set_yticks(ticks, written, fontsize=fontsize)
    if size <= FEW_CELLS:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    if size <= SOME_CELLS:
        _cell_texts(axes, matrix, shares)
    return figure


def _cell_texts(axes: Axes, matrix: Array, shares: Array) -> None:
    with_counts = len(matrix) <= FEW_CELLS
    for row, column in np.argwhere(matrix):
        text = f"{shares[row, column]:.2f}" + (f"\n{matrix[row, column]:,}" if with_counts else "")
        color = "white" if shares[row, column] > 0.55 else INK
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8 if with_counts else 6.5)


# ---- training ----


def results_chart(path: str, best_epoch: int | None) -> Figure:
    """Show all columns of results.csv over the epochs: as they are in thin lines, smoothed in bold ones.

    Losses of training and validation share a chart, as do the learning rates.

    Args:
        path: of results.csv; values may be missing or nan.
        best_epoch: of best.pt.
    """
    epochs, columns = read_results(Path(path))
    charts: dict[str, list[str]] = {}
    for name in columns:
        charts.setdefault(_chart_of(name), []).append(name)
    rows = 2 if len(charts) > 3 else 1
    wide = max(-(-len(charts) // rows), 1)
    figure = new_figure(3.6 * wide, 3.4 * rows + 0.4)
    for place, (title, members) in enumerate(charts.items()):
        axes = figure.add_subplot(rows, wide, place + 1)
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        if len(epochs):
            room = 0.02 * np.ptp(epochs) or 0.5
            axes.set_xlim(epochs[0] - room, epochs[-1] + room)
        for number, name in enumerate(members):
            _trend(axes, epochs, columns[name], name, number)
        if members[0].startswith("metrics/"):
            _from_zero(axes, np.concatenate([columns[name] for name in members]))
        if best_epoch is not None:
            axes.axvline(best_epoch, color=NEUTRAL, linestyle=":", linewidth=1.2)
        if len(members) > 1:
            axes.legend()
        if place >= len(charts) - wide:
            axes.set_xlabel("epoch")
    best = f"; dotted: best.pt, epoch {best_epoch}" if best_epoch is not None else ""
    figure.supxlabel(f"thin: as measured, bold: smoothed{best}", fontsize=10, color=INK)
    return figure


def read_results(path: Path) -> tuple[Array, dict[str, Array]]:
    """Read results.csv; a row that is being written is left out.

    Returns:
        (n,) epochs, and the other columns (n,) by name, nan where there is no value.
    """
    with path.open(encoding="utf-8", newline="") as file:
        table = [[cell.strip() for cell in row] for row in csv.reader(file)]
    header, *rows = table or [["epoch"]]
    whole = [[_number(cell) for cell in row] for row in rows if len(row) == len(header)]
    values = np.array(whole, np.float64).reshape(-1, len(header)).T
    return values[0], dict(zip(header[1:], values[1:], strict=True))


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _chart_of(column: str) -> str:
    """Return the title of the chart that a column belongs to."""
    name = column.split("/")[-1]
    return "learning rate" if name.startswith("lr") else name.replace("mAP_", "mAP@").replace("_", " ")


def _trend(axes: Axes, epochs: Array, values: Array, name: str, number: int) -> None:
    known = np.isfinite(epochs) & np.isfinite(values)
    x, y = epochs[known], values[known]
    place, _, short = name.rpartition("/")
    computed = short.startswith("lr")  # not measured: there is nothing to smooth
    style: dict[str, Any] = {"color": (MAIN_COLOR, OTHER_COLOR, COLORS[2])[number % 3]}
    bold = style | {"linestyle": DASHES[number % len(DASHES)], "linewidth": 2, "label": short if computed else place}
    if len(x) < SMOOTHED_FROM or computed:
        axes.plot(x, y, marker="o" if len(x) < SMOOTHED_FROM else None, markersize=4, **bold)
    else:
        axes.plot(x, y, linewidth=0.8, alpha=0.5, **style)
        axes.plot(x, smooth(x, y), **bold)


def _from_zero(axes: Axes, values: Array) -> None:
    """Let an axis begin at 0, so that its height says how good a share is; up to 1 where it is 0 throughout."""
    top = np.max(values, where=np.isfinite(values), initial=0) or 1.0
    axes.set_ylim(-MARGIN * top, 1.05 * top)


def smooth(x: Array, y: Array) -> Array:
    """Fit a line around each point, neighbors with Gaussian weights (LOESS, Cleveland 1979), which does not bend ends.

    The weights' standard deviation is a thirtieth of the range, at least one epoch.
    """
    width = max(np.ptp(x) / 30, 1.0)
    offsets = x - x[:, None]
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    weights /= weights.sum(1, keepdims=True)
    mean_x, mean_y = (weights * offsets).sum(1), weights @ y
    spread = (weights * offsets**2).sum(1) - mean_x**2
    slope = ((weights * offsets) @ y - mean_x * mean_y) / spread
    return mean_y - slope * mean_x
