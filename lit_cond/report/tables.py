"""The tables of a report: what the runs ended with, and where they are worst."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_cond.plots import describe, format_number
from lit_cond.report.run import Run, known_quantities

__all__ = ["Row", "final_metrics", "worst_layers"]

_FIRST = ("test", "val", "valid", "validation", "train")


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        title: What it shows.
        cells: One text for each run.
        hints: A longer text for each run, shown on hovering.
    """

    title: str
    cells: Sequence[str]
    hints: Sequence[str] = ()


def final_metrics(runs: Sequence[Run]) -> list[Row]:
    """Return the last value of each metric: test, validation, training, then mean condition numbers and attention."""
    keys = dict.fromkeys(key for run in runs for key in run.scalars)
    groups: dict[str, list[str]] = {start: [] for start in _FIRST}
    for key in keys:
        start = key.replace("_", "/", 1).split("/")[0]
        if start in groups and not key.endswith("_step"):
            groups[start].append(key)
    rows = [_row(key, runs, key) for start in _FIRST for key in groups[start]]
    for quantity in known_quantities(list(runs), "cond"):
        rows.append(_over(runs, "cond", quantity, f"mean condition number, {describe(quantity)}"))
        raw = _over(runs, "cond_raw", quantity, f"… {describe(quantity)}, without the correction")
        if any(cell != "—" for cell in raw.cells):
            rows.append(raw)
    for statistic, title in (
        ("entropy_share", "mean entropy of attention, share"),
        ("saturated", "saturated rows, share"),
    ):
        for quantity in known_quantities(list(runs), statistic):
            rows.append(_over(runs, statistic, quantity, title))
    return rows


def worst_layers(runs: Sequence[Run]) -> list[Row]:
    """Return for each quantity the layer of the largest condition number at the last measurement."""
    rows = []
    for quantity in known_quantities(list(runs), "cond"):
        tables = [run.layers("cond", quantity) for run in runs]
        if max(map(len, tables)) < 2:
            continue
        cells = []
        for table in tables:
            last = {layer: points[max(points)] for layer, points in table.items() if points}
            # A layer that has no finite number is worse than all others.
            worst = max(last, key=lambda layer: (not math.isfinite(last[layer]), last[layer]), default=None)
            cells.append("—" if worst is None else f"{format_number(last[worst])} in {worst}")
        rows.append(Row(describe(quantity), cells))
    return rows


def _row(title: str, runs: Sequence[Run], key: str) -> Row:
    return _cells(title, [run.scalars.get(key, {}) for run in runs])


def _over(runs: Sequence[Run], statistic: str, quantity: str, title: str) -> Row:
    return _cells(title, [run.over_layers(statistic, quantity, "mean") for run in runs])


def _cells(title: str, columns: Sequence[dict[int, float]]) -> Row:
    cells = [format_number(points[max(points)]) if points else "—" for points in columns]
    return Row(title, cells, [f"step {max(points):,}" if points else "not logged" for points in columns])
