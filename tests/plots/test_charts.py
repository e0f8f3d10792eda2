"""Charts: they say what the numbers say, in texts that can be read, for any number of classes and any name."""

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from utils.plots.charts import (
    confidence_chart,
    confusion_chart,
    labels_chart,
    pr_chart,
    read_results,
    results_chart,
    smooth,
)

COLUMNS = [
    *("epoch", "train/box_loss", "train/obj_loss", "train/cls_loss"),
    *("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"),
    *("val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2"),
]
STRANGE = ["person", "word " * 30, "\u7ea2\u7ec6\u80de", "caf\u00e9", "_under", "$\\foo$", "cell \u7ea2", "a\nb", ""]


def class_names(count: int) -> list[str]:
    return STRANGE[:count] if count <= len(STRANGE) else [f"some class {i}" for i in range(count)]


def curves(count: int) -> np.ndarray:
    """Falling lines, each class lower than the one before it."""
    return np.linspace(1, 0, 1000) * np.linspace(1, 0.5, max(count, 1))[:count, None]


def matrix(count: int) -> np.ndarray:
    """Counts with all cells in use but the corner of the background with itself."""
    counts = np.random.default_rng(0).integers(1, 2000, (count + 1, count + 1))
    counts[-1, -1] = 0
    return counts


def labels_of(count: int, labels: int = 300) -> Figure:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, count, labels)
    counts = np.bincount(classes, minlength=count)
    return labels_chart(class_names(count), counts, rng.random((labels, 4)), classes, rng.integers(0, 9, 50))


def csv_file(folder: Path, epochs: int, noval: bool = False) -> str:
    """results.csv with a straight line in every column; with ``noval`` nan in all validations but the last."""
    lines = [",".join(f"{name:>20}" for name in COLUMNS)]
    for epoch in range(epochs):
        values = [float(column * epoch) for column in range(1, len(COLUMNS))]
        if noval and epoch + 1 < epochs:
            values[3:10] = [float("nan")] * 7
        lines.append(",".join(f"{value:>20.6g}" for value in [epoch, *values]))
    path = folder / "results.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def rendered(figure: Figure) -> Figure:
    """Draw a figure; any warning, such as that of a missing letter, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")
    return figure


def undrawn(figure: Figure) -> set[Text]:
    """Labels of ticks beyond the limits of their axis, which are there but not drawn."""
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        outside = [tick for tick in axis.get_major_ticks() if not low - 1e-9 <= tick.get_loc() <= high + 1e-9]
        hidden |= {label for tick in outside for label in (tick.label1, tick.label2)}
    return hidden


def check_texts(figure: Figure) -> None:
    """No text covers another one or leaves the picture, none is smaller than ten pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    hidden = undrawn(figure)
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    # Of slanted texts the rectangles around them say nothing.
    texts = [text for text in texts if text not in hidden and text.get_rotation() % 90 == 0]
    places = np.array([text.get_window_extent(renderer).extents for text in texts])
    assert (places[:, :2] >= -1).all() and (places[:, 2:] <= np.add(figure.canvas.get_width_height(), 1)).all()
    shared = np.minimum(places[:, None, 2:], places[None, :, 2:]) - np.maximum(places[:, None, :2], places[None, :, :2])
    pairs = [(texts[i].get_text(), texts[j].get_text()) for i, j in np.argwhere((shared > 1).all(2)) if i < j]
    assert not pairs
    assert min(float(text.get_fontsize()) for text in texts) * figure.dpi / 72 >= 10


@pytest.mark.parametrize("count", [1, 9, 80, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 25))])
def test_texts_can_be_read(count: int, tmp_path: Path) -> None:
    names = class_names(count)
    check_texts(rendered(labels_of(count)))
    check_texts(rendered(pr_chart(names, curves(count), curves(count).mean(1))))
    check_texts(rendered(confidence_chart("F1", names, curves(count), 0.4)))
    check_texts(rendered(confusion_chart(names, matrix(count))))


@pytest.mark.parametrize("best", [0.0, 0.007, 1.0])
def test_texts_at_the_ends_can_be_read(best: float) -> None:
    check_texts(rendered(confidence_chart("recall", ["a"], curves(1), best)))


def test_texts_of_results_can_be_read(tmp_path: Path) -> None:
    check_texts(rendered(results_chart(csv_file(tmp_path, 40), 30)))


def points(line: Line2D) -> np.ndarray:
    """Return (P, 2) [x, y]."""
    return np.asarray(line.get_xydata(), np.float64)


def bars(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text().strip() for text in figure.legends[0].get_texts()]


def test_curves_say_their_values() -> None:
    """Read at the confidence with the best mean F1: 0.25 of a falling line is 0.75."""
    figure = confidence_chart("recall", ["a", "b"], curves(2), 0.25)
    assert legend_of(figure) == ["a 0.750", "b 0.375", "mean 0.562"]
    *lines, mean, marker = figure.axes[0].lines
    np.testing.assert_allclose(points(mean)[:, 1], curves(2).mean(0))
    assert mean.get_linewidth() > 1.5 * lines[0].get_linewidth()
    assert (points(marker)[:, 0] == 0.25).all()
    assert figure.axes[0].texts[0].get_text() == "best mean F1, smoothed"  # where the mean as drawn need not be best
    assert legend_of(pr_chart(["a", "b"], curves(2), np.array([0.5, 0.25]))) == ["a 0.500", "b 0.250", "mean 0.375"]


def test_few_lines_differ_and_many_are_grey() -> None:
    few, many = pr_chart(class_names(12), curves(12), np.ones(12)), pr_chart(class_names(80), curves(80), np.ones(80))
    looks = {(line.get_color(), line.get_linestyle()) for line in few.axes[0].lines[:-1]}
    assert len(looks) == 12 and len({style for _, style in looks}) == 4
    assert len({line.get_color() for line in many.axes[0].lines[:-1]}) == 1
    assert legend_of(many) == ["each of 80 classes", "mean 1.000"]


def test_one_class_has_no_mean() -> None:
    assert legend_of(pr_chart(["a"], curves(1), np.array([0.5]))) == ["a 0.500"]


def test_without_labels() -> None:
    nothing = np.zeros((0, 1000))
    for figure in (pr_chart([], nothing, np.zeros(0)), confidence_chart("F1", [], nothing, 0.0)):
        assert any(text.get_text() == "no labels" for text in rendered(figure).findobj(Text))
    empty = labels_chart(["a"], np.zeros(1, int), np.zeros((0, 4)), np.zeros(0), np.zeros(3, int))
    assert any("3 without" in text.get_text() for text in rendered(empty).findobj(Text))
    rendered(labels_chart(["a"], np.zeros(1, int), np.zeros((0, 4)), np.zeros(0), np.zeros(0, int)))


def test_counts_begin_at_zero() -> None:
    """Also where all places have as many labels: a color stands for a whole number."""
    boxes = np.array([[0.1, 0.1, 0.25, 0.25], [0.5, 0.5, 0.35, 0.35], [0.9, 0.2, 0.35, 0.35]])
    figure = rendered(labels_chart(["a"], np.array([3]), boxes, np.zeros(3), np.ones(3, int)))
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert [axes.get_ylim() for axes in bars] == [(0, 1), (0, 2)]
    assert all(tick == round(tick) for axes in bars for tick in axes.get_yticks())


def test_without_detections() -> None:
    """All misses: the background row holds everything, and lines along 0 are seen."""
    counts = np.array([[0, 0, 0], [0, 0, 0], [4, 6, 0]])
    cells = [text.get_text() for text in confusion_chart(["a", "b"], counts).axes[0].texts]
    assert cells == ["1.00\n4", "1.00\n6"]
    figure = rendered(pr_chart(["a"], np.zeros((1, 1000)), np.zeros(1)))
    assert figure.axes[0].get_ylim()[0] < 0 and figure.axes[0].get_ylim()[1] > 1


def test_confusion_columns_are_shares_of_the_true_class() -> None:
    figure = confusion_chart(["a", "b"], np.array([[8, 1, 3], [0, 3, 0], [2, 0, 0]]))
    (image,) = figure.axes[0].images
    np.testing.assert_allclose(np.asarray(image.get_array()), np.array([[0.8, 0.25, 1], [0, 0.75, 0], [0.2, 0, 0]]))
    cells = {text.get_position(): text.get_text() for text in figure.axes[0].texts}  # (column, row)
    assert cells == {(0, 0): "0.80\n8", (1, 0): "0.25\n1", (2, 0): "1.00\n3", (1, 1): "0.75\n3", (0, 2): "0.20\n2"}
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["a", "b", "background"]


def test_labels_counts() -> None:
    figure = labels_chart(["a", "b"], np.array([5, 7]), np.full((12, 4), 0.5), np.zeros(12), np.array([6, 6, 0]))
    assert [bar.get_width() for bar in bars(figure.axes[0])] == [5, 7]
    images = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in bars(figure.axes[-1])}
    assert images[0] == 1 and images[6] == 2


def test_results_show_every_column(tmp_path: Path) -> None:
    figure = results_chart(csv_file(tmp_path, 20), 5)
    charts = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(charts) == [
        *("box loss", "obj loss", "cls loss", "precision", "recall", "mAP@0.5", "mAP@0.5:0.95", "learning rate")
    ]
    train = next(line for line in charts["box loss"].lines if line.get_label() == "train")
    np.testing.assert_allclose(points(train)[:, 1], np.arange(20.0), atol=1e-9)  # a straight line stays one


def test_results_of_noval(tmp_path: Path) -> None:
    """Epochs without validation leave gaps, not zeros."""
    figure = rendered(results_chart(csv_file(tmp_path, 20, noval=True), 19))
    (recall,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "recall"]
    assert points(recall.lines[0]).tolist() == [[19, 5 * 19]]


@pytest.mark.parametrize("epochs", [0, 1, 2, 4])
def test_short_results(tmp_path: Path, epochs: int) -> None:
    """A few values are points, which are seen also where there is one; each column has its own, and nothing is bold."""
    figure = rendered(results_chart(csv_file(tmp_path, epochs), None))
    shown = {}
    for axes in figure.axes:
        low, high = axes.get_xlim()
        for line in axes.lines:
            shown[axes.get_title(loc="left"), line.get_label()] = points(line).tolist()
            assert line.get_marker() == "o" and float(line.get_markersize()) * figure.dpi / 72 > 5
            assert all(low < x < high for x, _ in points(line))
    columns = {("box loss", "train"): 1, ("obj loss", "train"): 2, ("cls loss", "train"): 3}
    columns |= {("precision", "metrics"): 4, ("recall", "metrics"): 5}
    columns |= {("mAP@0.5", "metrics"): 6, ("mAP@0.5:0.95", "metrics"): 7}
    columns |= {("box loss", "val"): 8, ("obj loss", "val"): 9, ("cls loss", "val"): 10}
    columns |= {("learning rate", "lr0"): 11, ("learning rate", "lr1"): 12, ("learning rate", "lr2"): 13}
    assert shown == {key: [[epoch, column * epoch] for epoch in range(epochs)] for key, column in columns.items()}
    check_texts(figure)


@pytest.mark.parametrize("epochs", [1, 2, 8])
@pytest.mark.parametrize("value", [0.0, 0.4])
def test_axes_of_results(tmp_path: Path, epochs: int, value: float) -> None:
    """Epochs are whole numbers; figures of a validation are told from 0 on, which a line of zeros does not hide."""
    row = ",".join(["", *[str(value)] * (len(COLUMNS) - 1)])
    path = tmp_path / "results.csv"
    path.write_text("\n".join([",".join(COLUMNS), *(f"{epoch}{row}" for epoch in range(epochs))]) + "\n")
    figure = rendered(results_chart(str(path), 0))
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == round(tick) for tick in ticks) and (epochs > 1 or ticks == [0])
    for axes in figure.axes[3:7]:
        bottom, top = axes.get_ylim()
        assert -0.05 * top < bottom < 0 and top == pytest.approx(1.05 * (value or 1))


def test_results_that_are_being_written(tmp_path: Path) -> None:
    path = Path(csv_file(tmp_path, 3))
    path.write_text(path.read_text() + "   3,  0.5")
    epochs, columns = read_results(path)
    assert epochs.tolist() == [0, 1, 2] and columns["x/lr2"].tolist() == [0, 13, 26]


def test_smoothing_takes_noise_and_leaves_the_trend() -> None:
    x = np.arange(200.0)
    noise = np.random.default_rng(0).normal(0, 1, 200)
    smoothed = smooth(x, 3 - 0.1 * x + noise)
    assert np.abs(smoothed - (3 - 0.1 * x)).std() < 0.4
