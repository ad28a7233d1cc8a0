"""Layers against steps, the value as a colour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from lit_cond.plots.names import describe, short_names
from lit_cond.plots.style import FULL_WIDTH, GREY, log_limits, say_nothing_to_show, set_log_axis, set_step_axis, styled

__all__ = ["HeatMap", "heat_map"]

Table = Mapping[str, Mapping[int, float]]
"""Layer -> optimizer step -> value."""

_MAX_COLUMNS = 512
_MAX_CROSSES = 600


class HeatMap:
    """Collects one quantity of all layers while it is measured: layers against steps.

    Memory is bounded: beyond `max_columns` steps neighbours are joined, and the worst value stays.

    Args:
        quantity: What is measured, for the title.
        max_columns: How many steps are kept apart.
    """

    def __init__(self, quantity: str, max_columns: int = _MAX_COLUMNS) -> None:
        self.quantity = quantity
        self.max_columns = max(2, max_columns)
        self.values: dict[str, dict[int, float]] = {}

    @property
    def columns(self) -> int:
        """How many steps are held."""
        return max((len(row) for row in self.values.values()), default=0)

    def add(self, layer: str, step: int, value: float) -> None:
        """Add one measurement; one that is not finite is shown as such."""
        row = self.values.setdefault(layer, {})
        row[step] = value
        if len(row) > self.max_columns:
            self.values = _joined(self.values, self.max_columns)

    def figure(self) -> Any:
        """Return a matplotlib figure, one row for each layer, first layer on top."""
        return heat_map({"": self.values}, f"Condition number of the {describe(self.quantity)}")


@styled
def heat_map(
    tables: Mapping[str, Table], title: str, *, log: bool = True, label: str = "condition number", rows: str = ""
) -> Any:
    """Draw tables of layers against steps, below each other, with one scale of colours.

    A column reaches from its step to the next one that was measured. What was not measured stays white, what is not
    finite (or not positive on a logarithmic scale) is grey with a cross.

    Args:
        tables: Layer -> step -> value, by the name of the run; a single one needs no name.
        title: Title of the figure.
        log: Whether the colours are logarithmic.
        label: What the colours mean, beside the colour bar.
        rows: What the rows are, instead of the pattern of the layers' names.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    tables = {name: _joined(table, _MAX_COLUMNS) for name, table in tables.items()}
    norm: Any = None
    values = [v for table in tables.values() for row in table.values() for v in row.values()]
    if log:
        limits = log_limits(values)
        norm = LogNorm(*limits) if limits else None
    else:
        finite = [v for v in values if math.isfinite(v)]
        limits = (min(finite), max(finite)) if finite else None
        norm = Normalize(*limits) if limits else None
    heights = [max(1.3, min(0.22 * len(table), 9.0)) for table in tables.values()]
    figure = Figure(figsize=(FULL_WIDTH, sum(heights) + 0.75 * len(heights) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(tables), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    crossed = False
    for axes, (name, table) in zip(all_axes[:, 0], tables.items(), strict=True):
        axes.set_title(name)
        axes.grid(visible=False)
        if norm is None or not table:
            say_nothing_to_show(axes)
            continue
        crossed |= _draw(axes, table, norm, log, rows)
    for axes in all_axes[:, 0]:
        axes.tick_params(labelbottom=True)
    all_axes[-1, 0].set_xlabel("optimizer step" + (";   grey with a cross: not finite" if crossed else ""))
    figure.suptitle(title, x=0.01, ha="left")
    if norm is not None and limits is not None:
        from matplotlib.cm import ScalarMappable

        aspect = max(12.0, 8 * figure.get_figheight())
        mappable, where = ScalarMappable(norm, "viridis"), list(all_axes[:, 0])
        bar = figure.colorbar(mappable, ax=where, label=label, aspect=aspect, fraction=0.05, pad=0.02)
        bar.outline.set_visible(False)
        if log:
            set_log_axis(bar.ax.yaxis, limits)
    return figure


def _draw(axes: Any, table: Table, norm: Any, log: bool, rows: str) -> bool:
    """Draw one table and return whether something in it is not finite."""
    from matplotlib.colors import ListedColormap

    steps = sorted({step for row in table.values() for step in row})
    widths = sorted(after - before for before, after in pairwise(steps))
    edges = [*steps, steps[-1] + (widths[len(widths) // 2] if widths else 1)]
    low = 0.0 if log else -math.inf
    shown = [
        [v if low < (v := row.get(step, math.nan)) < math.inf else math.nan for step in steps] for row in table.values()
    ]
    bad = [
        [1.0 if step in row and not low < row[step] < math.inf else math.nan for step in steps]
        for row in table.values()
    ]
    lines = list(range(len(table) + 1))
    axes.pcolormesh(edges, lines, shown, norm=norm, cmap="viridis", rasterized=True)
    crosses = [
        ((edges[j] + edges[j + 1]) / 2, i + 0.5) for i, row in enumerate(bad) for j, v in enumerate(row) if v == 1.0
    ]
    if crosses:
        axes.pcolormesh(edges, lines, bad, cmap=ListedColormap(["#d6d6d6"]), rasterized=True)
        if len(crosses) <= _MAX_CROSSES:
            axes.plot(*zip(*crosses, strict=True), linestyle="", marker="x", markersize=4, color=GREY)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(table), 0)
    set_step_axis(axes.xaxis)
    names, pattern = short_names(list(table))
    stride = max(1, math.ceil(len(names) * 0.16 / 9.0))  # 0.16 inches hold one line of text
    axes.set_yticks([i + 0.5 for i in range(0, len(names), stride)], [_cut(name) for name in names[::stride]])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(_cut(rows or pattern, 30), fontsize=8)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    return bool(crosses)


def _joined(table: Table, columns: int) -> dict[str, dict[int, float]]:
    """Join steps where there are more than `columns`, into half as many of equal width; the worst value stays."""
    steps = sorted({step for row in table.values() for step in row})
    if len(steps) <= columns:
        return {layer: dict(row) for layer, row in table.items()}
    width = (steps[-1] - steps[0]) / (columns // 2)
    place: dict[int, int] = {}
    starts = {step: place.setdefault(int((step - steps[0]) / width), step) for step in steps}
    result: dict[str, dict[int, float]] = {}
    for layer, row in table.items():
        joined = result.setdefault(layer, {})
        for step in sorted(row):
            start = starts[step]
            joined[start] = _worse(joined.get(start, -math.inf), row[step])
    return result


def _worse(first: float, second: float) -> float:
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


def _cut(name: str, length: int = 40) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"
