"""Singular values: whole spectra of single layers, and histograms of all layers over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_cond.plots.names import format_number, short_names
from lit_cond.plots.style import FULL_WIDTH, log_limits, say_nothing_to_show, set_log_axis, styled

__all__ = ["Histogram", "histograms", "spectra"]

_BINS = 40


@dataclass(frozen=True)
class Histogram:
    """Counts of values between edges.

    Attributes:
        edges: Ascending edges of the bins, one more than counts.
        counts: How many values lie in each bin.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@styled
def spectra(values: Mapping[str, Iterable[float]], title: str) -> Any:
    """Draw the singular values of layers, the largest first, on a logarithmic axis.

    What can not stand there, zeros and what is not finite, is counted in the legend.

    Args:
        values: Singular values by layer, in any order; what is no float (a tensor's element) is converted.
        title: Title of the figure.

    Returns:
        A matplotlib figure.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    rows = {layer: [float(value) for value in row] for layer, row in values.items()}
    limits = log_limits([value for row in rows.values() for value in row])
    if limits is None:
        say_nothing_to_show(axes)
        return figure
    names, pattern = short_names(list(rows))
    scale = mpl.colormaps["viridis"]
    for position, (name, row) in enumerate(zip(names, rows.values(), strict=True)):
        shown = sorted((value for value in row if 0 < value < math.inf), reverse=True)
        label = _legend(name, row, shown)
        # From dark to light with depth; the lightest yellow is left out.
        shade = scale(0.9 * position / max(1, len(rows) - 1))
        axes.plot(
            range(1, len(shown) + 1), shown, color=shade, label=label, marker="o" if len(shown) < 40 else "", ms=3
        )
    axes.set_yscale("log")
    axes.set_ylim(limits[0] / 1.2, limits[1] * 1.2)
    set_log_axis(axes.yaxis, limits)
    axes.set_xlabel("index of the singular value, the largest first")
    axes.set_ylabel("singular value")
    figure.legend(loc="outside right upper", title=pattern or None, fontsize=8, title_fontsize=8)
    return figure


def _legend(name: str, row: list[float], shown: list[float]) -> str:
    label = f"{name}  κ {format_number(shown[0] / shown[-1])}" if shown and len(shown) == len(row) else name
    zeros = sum(value == 0 for value in row)
    others = len(row) - len(shown) - zeros
    if not row:
        label += "  empty"
    if zeros:
        label += f"  {zeros} of {len(row)} zero"
    if others:
        label += f"  {others} of {len(row)} not finite"
    return label


@styled
def histograms(panels: Mapping[str, Mapping[int, Histogram]], title: str, label: str) -> Any:
    """Draw histograms of a few steps over each other, one panel for each run, all with the same bins.

    Args:
        panels: Histograms by step, by the name of the run.
        title: Title of the figure.
        label: What the horizontal axis shows.

    Returns:
        A matplotlib figure; heights are shares of all values.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = min(3, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(FULL_WIDTH if columns > 1 else 5.4, 2.5 * rows + 0.4), layout="constrained")
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    edges = _common_edges([histogram for by_step in panels.values() for histogram in by_step.values()])
    for axes, (name, by_step) in zip(grid, panels.items(), strict=False):
        axes.set_title(name)
        usable = {step: h for step in sorted(by_step) if sum((h := by_step[step]).counts) > 0}
        if not usable:
            say_nothing_to_show(axes)
            continue
        for position, (step, histogram) in enumerate(usable.items()):
            heights = _rebinned(histogram, edges)
            shade = mpl.colormaps["viridis"](0.85 * position / max(1, len(usable) - 1))
            axes.stairs(heights, edges, color=shade, linewidth=1.5, label=f"step {step:,}")
            axes.stairs(heights, edges, color=shade, alpha=0.12, fill=True)
        axes.legend(loc="upper left", fontsize=8)
        axes.set_xlabel(label)
        axes.tick_params(labelbottom=True)
    grid[0].set_ylim(bottom=0)
    grid[0].set_ylabel("share of singular values")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _filled(histogram: Histogram) -> list[int]:
    return [i for i, count in enumerate(histogram.counts) if count > 0]


def _common_edges(all_histograms: Sequence[Histogram]) -> list[float]:
    """Return edges of equal width around all that was counted."""
    ends = [(h.edges[bins[0]], h.edges[bins[-1] + 1]) for h in all_histograms if (bins := _filled(h))]
    low, high = min((low for low, _ in ends), default=0.0), max((high for _, high in ends), default=1.0)
    width = max(high - low, 1e-6) / _BINS
    return [low + k * width for k in range(_BINS + 1)]


def _rebinned(histogram: Histogram, edges: Sequence[float]) -> list[float]:
    """Spread counts over bins of one width, as shares.

    TensorBoard's bins grow by 10 % from zero outwards: near zero they are a million times narrower than far from it.
    """
    low, width = edges[0], edges[1] - edges[0]
    heights = [0.0] * _BINS
    total = sum(histogram.counts)
    for i in _filled(histogram):
        left, right = histogram.edges[i], histogram.edges[i + 1]
        first, last = (min(_BINS - 1, max(0, int((end - low) / width))) for end in (left, right))
        for k in range(first, last + 1):
            overlap = max(0.0, min(right, edges[k + 1]) - max(left, edges[k]))
            part = overlap / (right - left) if last > first else 1.0
            heights[k] += histogram.counts[i] * part / total
    return heights
