"""Curves over optimizer steps, several runs in each panel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_cond.plots.style import (
    COLOURS,
    FULL_WIDTH,
    colour,
    log_limits,
    say_nothing_to_show,
    set_log_axis,
    set_step_axis,
    styled,
)

__all__ = ["Line", "Panel", "curves"]

_MARKERS = ("", "s", "^", "x")
_MARKER_BELOW = 3  # a line of so few points can not be seen without markers


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: What it is; equal labels share one entry of the legend.
        points: Values by optimizer step; gaps and triangles at the upper edge stand for what is not finite.
        run: Position of the run, which chooses the colour.
        dashed: Whether the line is dashed.
    """

    label: str
    points: Mapping[int, float]
    run: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: Title of the panel.
        lines: What it shows.
        log: Whether the vertical axis is logarithmic.
        group: Panels of one group that stand in the same row share their vertical axis.
    """

    title: str
    lines: Sequence[Line]
    log: bool = False
    group: str = ""


@styled
def curves(panels: Sequence[Panel], title: str = "", columns: int = 3) -> Any:
    """Draw curves in panels of equal size with one legend below.

    Args:
        panels: What to draw.
        title: Title of the figure.
        columns: How many panels stand in a row at most; four stand two by two.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.figure import Figure

    columns = 2 if len(panels) == 4 and columns == 3 else max(1, min(columns, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width = FULL_WIDTH if columns > 1 else 5.4
    figure = Figure(figsize=(width, 2.35 * rows + (0.7 if title else 0.4)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    every = list(grid.flat)
    span = _span({step for panel in panels for line in panel.lines for step in line.points})
    for axes, panel in zip(every, panels, strict=False):
        _draw(axes, panel, _limits(panel, panels), span)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    for axes in every[columns * (rows - 1) : len(panels)]:
        axes.set_xlabel("optimizer step")
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    entries: dict[str, Any] = {}
    for axes in every[: len(panels)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        across = max(1, min(len(entries), int(figure.get_figwidth() / (0.55 + 0.075 * max(map(len, entries))))))
        figure.legend(entries.values(), entries.keys(), loc="outside lower left", ncols=across)
        # Many entries take no room from the panels.
        figure.set_figheight(figure.get_figheight() + 0.19 * (math.ceil(len(entries) / across) - 1))
    return figure


def _limits(panel: Panel, panels: Sequence[Panel]) -> tuple[float, float] | None:
    """Return the vertical limits: those of the whole group of the panel."""
    together = [other for other in panels if other.group == panel.group] if panel.group else [panel]
    values = [value for other in together for line in other.lines for value in line.points.values()]
    if panel.log:
        found = log_limits(values)
        if found is None:
            return None
        room = float((found[1] / found[0]) ** 0.05)
        return max(found[0] / room, 1e-307), min(found[1] * room, 1e307)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _span(steps: set[int]) -> tuple[float, float]:
    """Return the horizontal limits of all panels: quantities that are measured rarely stand under the others."""
    low, high = min(steps, default=0), max(steps, default=0)
    room = 0.03 * (high - low) or 1.0
    return low - room, high + room


def _draw(axes: Any, panel: Panel, limits: tuple[float, float] | None, span: tuple[float, float]) -> None:
    axes.set_title(panel.title)
    if limits is None:
        say_nothing_to_show(axes)
        return
    if panel.log:
        axes.set_yscale("log")
    axes.set_ylim(*limits)
    set_step_axis(axes.xaxis)
    axes.set_xlim(*span)
    if panel.log:
        set_log_axis(axes.yaxis, limits)
    low = 0.0 if panel.log else -math.inf
    for line in panel.lines:
        steps = sorted(line.points)
        values = [line.points[step] for step in steps]
        shown = [value if low < value < math.inf else math.nan for value in values]
        look = {"color": colour(line.run), "linestyle": (0, (4, 1.6)) if line.dashed else "-"}
        # Colours repeat: the later runs have markers.
        marker = _MARKERS[line.run // COLOURS % len(_MARKERS)]
        every: tuple[float, float] | None = (0.05, 0.12)
        if sum(map(math.isfinite, shown)) < _MARKER_BELOW:
            marker, every = marker or "o", None
        axes.plot(steps, shown, label=line.label, marker=marker, markersize=4, markevery=every, **look)
        if beyond := [step for step, value in zip(steps, values, strict=True) if value != value or value == math.inf]:
            edge = axes.get_xaxis_transform()
            axes.plot(
                beyond, [1.0] * len(beyond), "^", color=look["color"], markersize=4, transform=edge, clip_on=False
            )
