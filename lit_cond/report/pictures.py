"""The pictures of a report, from the runs that it is about."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_cond.plots import Histogram, Line, Panel, curves, describe, format_number, heat_map, histograms
from lit_cond.report.run import Points, Run, known_quantities

__all__ = [
    "PIXELS_AN_INCH",
    "Picture",
    "draw_attention",
    "draw_metrics",
    "draw_overview",
    "draw_quantity",
    "draw_ranks",
]

PIXELS_AN_INCH = 104
"""How large figures are on the page."""

_WHERE = {"mean": "mean over layers", "max": "worst layer", "min": "lowest layer"}
_METRIC = re.compile(r"(train|val|valid|validation)[/_](?!.*_step$)(.+)")
_NO_METRICS = ("epoch", "hp_metric", "step")
_MAX_PANELS = 24
_RANKS = {
    "stable_rank": "Stable rank (squared Frobenius norm over squared largest singular value)",
    "effective_rank": "Effective rank (exponential of the entropy of the singular values)",
    "numerical_rank": "Numerical rank",
    "sigma_max": "Largest singular value",
    "sigma_min": "Smallest singular value",
    "bound": "Factors of the bound on the attention Jacobian (condition numbers)",
}


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        name: Name of its file, without the ending.
        figure: A matplotlib figure, or the bytes of a PNG.
        alt: What it shows, for those who do not see it.
        caption: What to know when looking at it.
        scale: Size on the page of a PNG, relative to its own.
    """

    name: str
    figure: Any
    alt: str
    caption: str = ""
    scale: float = 1.0


def draw_overview(runs: Sequence[Run]) -> Picture | None:
    """Draw the mean condition number of every quantity, all runs in each panel."""
    quantities = known_quantities(list(runs), "cond")
    panels = [Panel(describe(quantity), _condition_lines(runs, quantity, "mean"), log=True) for quantity in quantities]
    caption = "Mean over the layers (over the samples for tokens). Lower is better, 1 is the least." + _dashed(panels)
    if any(run.over_layers("cond", quantity, "nonfinite") for run in runs for quantity in quantities):
        caption += " Triangles at the upper edge: some layer is not finite there; such layers do not count in the mean."
    return _curves("overview", panels, "Mean condition numbers", caption, 3)


def draw_metrics(runs: Sequence[Run]) -> Picture | None:
    """Draw losses and metrics over steps: validation solid, training dashed."""
    panels: dict[str, list[Line]] = {}
    for index, run in enumerate(runs):
        for key, points in run.scalars.items():
            found = _METRIC.fullmatch(key)
            if found is None or len(points) < 2:
                continue
            training = found[1] == "train"
            label = f"{run.name}, training" if training else run.name
            panels.setdefault(found[2], []).append(Line(label, points, index, dashed=training))
    for index, run in enumerate(runs):
        for key, points in run.scalars.items():
            if "/" not in key and key not in _NO_METRICS and not _METRIC.match(key) and len(points) > 1:
                panels.setdefault(key, []).append(Line(run.name, points, index))
    shown = [Panel(title, lines) for title, lines in panels.items()][:_MAX_PANELS]
    left = f" {len(panels) - _MAX_PANELS} more are not shown." if len(panels) > _MAX_PANELS else ""
    return _curves("metrics", shown, "Losses and metrics", "Solid: validation, dashed: training." + left, 3)


def draw_quantity(runs: Sequence[Run], quantity: str) -> list[Picture]:
    """Draw all about the conditioning of one quantity: curves, heat map, spectra."""
    pictures = [_condition_curves(runs, quantity), _heat_map(runs, "cond", quantity), _histograms(runs, quantity)]
    for index, run in enumerate(runs):
        if image := run.images.get(f"spectra/{quantity}"):
            step, data = image
            alt = f"Singular values of chosen layers, {describe(quantity)}, {run.name}, step {step}"
            caption = f"{run.name}, step {step:,}: singular values of chosen layers, drawn while it ran."
            # Drawn by the monitor with 120 pixels an inch: text as large as that of the other pictures.
            pictures.append(Picture(f"spectra_{quantity}_{index}", data, alt, caption, PIXELS_AN_INCH / 120))
    return [picture for picture in pictures if picture is not None]


def draw_attention(runs: Sequence[Run]) -> list[Picture]:
    """Draw entropy of attention and share of saturated rows."""
    panels: list[Panel] = []
    for statistic, title, worst in (
        ("entropy", "entropy in nats", "min"),
        ("entropy_share", "entropy, share of the largest possible", "min"),
        ("saturated", "share of saturated rows", "max"),
    ):
        for quantity in known_quantities(list(runs), statistic):
            single = all(len(run.layers(statistic, quantity)) == 1 for run in runs if run.quantities(statistic))
            for over in ("mean",) if single else ("mean", worst):
                lines = _lines(runs, statistic, quantity, over)
                group = f"{statistic}/{quantity}"
                panels.append(Panel(f"{title}:\n{_WHERE[over]}" if not single else title, lines, group=group))
    caption = (
        "Entropy of the rows of the attention matrix: at zero a token looks at one token only, at the largest possible "
        "at all alike. Saturated: the largest probability of a row is at least 0.99, its gradient is almost nothing."
    )
    found = [_curves("attention", panels, "Attention", caption, 2)]
    found.append(_heat_map(runs, "entropy_share", "scores"))
    return [picture for picture in found if picture is not None]


def draw_ranks(runs: Sequence[Run]) -> list[Picture]:
    """Draw ranks and extreme singular values, one picture each."""
    found = []
    for statistic, title in _RANKS.items():
        over = "max" if statistic in ("sigma_max", "bound") else "min"
        log = statistic in ("sigma_max", "sigma_min", "bound")
        panels = [
            Panel(describe(quantity), _lines(runs, statistic, quantity, over), log=log)
            for quantity in known_quantities(list(runs), statistic)
        ]
        caption = f"Of all layers the {'highest' if over == 'max' else 'lowest'}."
        found.append(_curves(statistic, panels, title, caption, 3))
    return [picture for picture in found if picture is not None]


def _condition_curves(runs: Sequence[Run], quantity: str) -> Picture | None:
    single = all(len(run.layers("cond", quantity)) == 1 for run in runs if quantity in run.quantities("cond"))
    panels = [
        Panel(_WHERE[over] if not single else "", _condition_lines(runs, quantity, over), log=True, group="one")
        for over in (("mean",) if single else ("mean", "max"))
    ]
    caption = _dashed(panels).strip()
    lost = {run.name: points for run in runs if (points := run.over_layers("cond", quantity, "nonfinite"))}
    for name, points in lost.items():
        caption += f" {name}: not finite in up to {max(points.values()):.0f} layers, first at step {min(points):,}"
        caption += " (triangles at the upper edge); they do not count in mean and worst."
    title = f"Condition number of the {describe(quantity)}"
    return _curves(f"condition_{quantity}", panels, title, caption.strip(), 2)


def _condition_lines(runs: Sequence[Run], quantity: str, over: str) -> list[Line]:
    lines = []
    for index, run in enumerate(runs):
        if points := run.over_layers("cond", quantity, over):
            lines.append(Line(run.name, points, index))
        raw = run.over_layers("cond_raw", quantity, over)
        if raw and raw != points:
            lines.append(Line(f"{run.name}, without its correction", raw, index, dashed=True))
        if lost := [step for step, count in run.over_layers("cond", quantity, "nonfinite").items() if count > 0]:
            lines.append(Line(run.name, dict.fromkeys(lost, math.inf), index))
    return lines


def _lines(runs: Sequence[Run], statistic: str, quantity: str, over: str) -> list[Line]:
    every = ((index, run, run.over_layers(statistic, quantity, over)) for index, run in enumerate(runs))
    return [Line(run.name, points, index) for index, run, points in every if points]


def _dashed(panels: Sequence[Panel]) -> str:
    if any(line.dashed for panel in panels for line in panel.lines):
        return " Dashed: the same weights or tokens without the correction."
    return ""


def _curves(name: str, panels: Sequence[Panel], title: str, caption: str, columns: int) -> Picture | None:
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return None
    told = [f"{panel.title or title}: " + "; ".join(map(_told, panel.lines)) for panel in panels]
    return Picture(name, curves(panels, title, columns), f"{title} over optimizer steps. " + ". ".join(told), caption)


def _told(line: Line) -> str:
    finite = [step for step in sorted(line.points) if math.isfinite(line.points[step])]
    if not finite:
        return f"{line.label} not finite at {len(line.points)} steps"
    first, last = (format_number(line.points[step]) for step in (finite[0], finite[-1]))
    return f"{line.label} from {first} to {last}"


def _heat_map(runs: Sequence[Run], statistic: str, quantity: str) -> Picture | None:
    tables = {run.name: run.layers(statistic, quantity) for run in runs}
    tables = {name: table for name, table in tables.items() if len(table) > 1}
    if not tables:
        return None
    log = statistic == "cond"
    title = f"Condition number of the {describe(quantity)}, layer by layer" if log else "Entropy of attention, by layer"
    label = "condition number" if log else "share of the largest possible"
    told = "; ".join(f"{name}: {_told_extremes(table)}" for name, table in tables.items())
    figure = heat_map(tables if len(runs) > 1 else {"": next(iter(tables.values()))}, title, log=log, label=label)
    return Picture(
        f"heatmap_{statistic}_{quantity}", figure, f"Heat map, layers against optimizer steps. {title}. {told}"
    )


def _told_extremes(table: dict[str, Points]) -> str:
    last = {layer: points[max(points)] for layer, points in table.items() if points}
    finite = {layer: value for layer, value in last.items() if math.isfinite(value)}
    if not finite:
        return "no finite value at the end"
    key: Callable[[str], float] = finite.__getitem__
    low, high = min(finite, key=key), max(finite, key=key)
    return f"at the end from {format_number(finite[low])} ({low}) to {format_number(finite[high])} ({high})"


def _histograms(runs: Sequence[Run], quantity: str) -> Picture | None:
    panels = {run.name: _first_middle_last(run.histograms.get(f"spectrum/{quantity}", {})) for run in runs}
    panels = {name: by_step for name, by_step in panels.items() if by_step}
    if not panels:
        return None
    title = f"Singular values of the {describe(quantity)}"
    figure = histograms(
        panels if len(runs) > 1 else {"": next(iter(panels.values()))}, title, "log10 of singular value / largest"
    )
    steps = "; ".join(f"{name} at steps {', '.join(map(str, by_step))}" for name, by_step in panels.items())
    caption = "All layers together, each relative to its largest. The further left, the worse conditioned."
    return Picture(f"spectrum_{quantity}", figure, f"Histograms. {title}: {steps}", caption)


def _first_middle_last(by_step: dict[int, Histogram]) -> dict[int, Histogram]:
    steps = sorted(by_step)
    if not steps:
        return {}
    middle = min(steps, key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    return {step: by_step[step] for step in dict.fromkeys((steps[0], middle, steps[-1]))}
