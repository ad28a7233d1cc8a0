"""The look that all figures share: fonts, colours, ticks of logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

__all__ = [
    "COLOURS",
    "FULL_WIDTH",
    "GREY",
    "colour",
    "log_limits",
    "say_nothing_to_show",
    "set_log_axis",
    "set_step_axis",
    "styled",
]

# Okabe and Ito (2008), told apart with every common colour vision; yellow is left out, it is too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLOURS = len(_COLOURS)
GREY = "#555555"
FULL_WIDTH = 9.6
"""Width of a large figure in inches; narrower ones have text of the same size."""

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a8a8a",
    "axes.grid": True,
    "axes.labelcolor": GREY,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.dpi": 120,
    "figure.facecolor": "white",
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "xtick.color": GREY,
    "xtick.labelsize": 8,
    "ytick.color": GREY,
    "ytick.labelsize": 8,
    # What a name holds is text: no dollar sign of a layer or run begins a formula.
    "text.parse_math": False,
}

_F = TypeVar("_F", bound=Callable[..., Any])


def styled(draw: _F) -> _F:
    """Decorate a function that makes a figure: it draws in the common style, whatever the user has set elsewhere."""

    @wraps(draw)
    def inner(*args: Any, **kwargs: Any) -> Any:
        import matplotlib as mpl

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(_STYLE)
            return draw(*args, **kwargs)

    return inner  # type: ignore[return-value]


def colour(index: int) -> str:
    """Return the colour of a run by its position, as #rrggbb; they repeat after seven."""
    return _COLOURS[index % len(_COLOURS)]


def log_limits(values: Iterable[float], decades: float = 1.0) -> tuple[float, float] | None:
    """Return the limits of a logarithmic axis: at least some decades, so that noise is not blown up.

    Args:
        values: What is to be shown; what is not finite or not positive does not count.
        decades: The least distance of the limits.

    Returns:
        The limits; None when there is nothing to show.
    """
    shown = [math.log10(value) for value in values if 0 < value < math.inf]
    if not shown:
        return None
    low, high = min(shown), max(shown)
    missing = max(0.0, decades - (high - low)) / 2
    low, high = low - missing, high + missing
    # Condition numbers begin at one: no room for what can not be.
    if low < 0 <= min(shown):
        low, high = 0.0, max(high, decades)
    return float(10**low), float(10**high)


def set_log_axis(axis: Any, limits: tuple[float, float]) -> None:
    """Give a logarithmic axis (or colour bar) ticks that can be read: 10, 100, 1,000, 10⁴, with 2 and 5 on short ones.

    Args:
        axis: The matplotlib axis.
        limits: What it shows.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(limits[1] / limits[0])
    subdivisions = (1.0, 2.0, 5.0) if decades < 3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subdivisions, numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axis.set_minor_formatter(NullFormatter())


def set_step_axis(axis: Any) -> None:
    """Give an axis of optimizer steps whole numbers with their thousands separated."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def say_nothing_to_show(axes: Any) -> None:
    """Write into axes that no value can be drawn."""
    axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def _tick(value: float) -> str:
    from lit_cond.plots.names import format_number

    if value <= 0 or 1e-3 < value < 1e6:
        return f"{value:,.0f}" if value >= 1 else f"{value:g}"
    return format_number(value).removeprefix("1·")
