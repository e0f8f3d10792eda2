"""How charts look: colors that everybody can tell apart, sizes that can be read, names that a font can write."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager, ft2font
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.core.wording import one_line, shorten

# Okabe and Ito 2008, "Color Universal Design": told apart with any kind of color vision. Black is kept for means, and
# what is too light for lines on white, yellow and grey, is darker here. In the order of the boxes on pictures.
COLORS = ("#E69F00", "#56B4E9", "#009E73", "#B3A400", "#0072B2", "#D55E00", "#CC79A7", "#777777")
DASHES = ("-", "--", "-.", ":")
MAIN_COLOR, OTHER_COLOR = "#0072B2", "#D55E00"
NEUTRAL = "#9A9A9A"  # where there are too many classes for colors to tell them apart
INK = "#222222"
DPI = 120

STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a class name is a dollar
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
}

# Common fonts with other scripts than DejaVu Sans, which comes with matplotlib; those that are not installed are
# passed over.
OTHER_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "SimHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Noto Sans Thai",
    "Noto Sans Devanagari",
)
UNKNOWN = "?"  # in the place of a character that no font has


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, ``width`` x ``height`` inches, that keeps its texts apart."""
    settings: Any = STYLE | {"font.family": [_family(path) for path in _fonts()]}
    matplotlib.rcParams.update(settings)
    figure = Figure((width, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr,call-arg]
    return figure


def say(axes: Axes, text: str) -> None:
    """Write into an empty chart why it is empty."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=NEUTRAL)


def line_style(number: int) -> dict[str, Any]:
    """Return color and dashes of a class's line; no two of the first 32 are the same."""
    dashes = DASHES[(number + number // len(COLORS)) % len(DASHES)]
    return {"color": COLORS[number % len(COLORS)], "linestyle": dashes}


def shown_names(names: Sequence[str], limit: int = 24) -> list[str]:
    """Return class names as charts write them: short, in one line, and with characters that a font here has.

    A name of which nothing can be written becomes its number: ``class 3``.
    """
    return [shorten(_writable(name) or f"class {number}", limit) for number, name in enumerate(names)]


def _writable(name: str) -> str:
    """Return a name in one line, unknown characters replaced; '' if nothing of it is left."""
    line = one_line(name)
    known = [any(ord(letter) in _characters(path) for path in _fonts()) for letter in line]
    if not any(has and not letter.isspace() for has, letter in zip(known, line, strict=True)):
        return ""
    return "".join(letter if has else UNKNOWN for has, letter in zip(known, line, strict=True))


@functools.cache
def _fonts() -> list[str]:
    """Font files in the order in which they are asked for a character; the first is always there."""
    own = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    installed = {
        font.name: font.fname
        for font in font_manager.fontManager.ttflist
        if font.name in OTHER_FONTS and font.style == "normal" and font.weight in (400, "normal", "regular")
    }
    return [str(own), *(installed[name] for name in OTHER_FONTS if name in installed)]


def _family(path: str) -> str:
    return ft2font.FT2Font(path).family_name


@functools.cache
def _characters(path: str) -> frozenset[int]:
    return frozenset(ft2font.FT2Font(path).get_charmap())
