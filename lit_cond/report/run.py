"""What a log says of a run, whatever kind of log it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_cond.plots import QUANTITIES, Histogram, natural_key

__all__ = ["OVER_LAYERS", "Points", "Run", "known_quantities"]

Points = dict[int, float]
"""Values by optimizer step."""

OVER_LAYERS = ("mean", "max", "min", "nonfinite")
"""Ends of keys that hold a number over all layers instead of the name of one."""


@dataclass
class Run:
    """One training run as its log has it.

    Attributes:
        name: How it is called in the report.
        folder: Where the log lies.
        files: The files that were read, the oldest first.
        scalars: Values by step, by key.
        histograms: Histograms by step, by key; a selection of the steps with the first and the last.
        images: Step and PNG of the last picture, by key.
        texts: The last text, by key.
        settings: Configuration and hyperparameters, nested as in their file; empty when there is no file.
        notes: What the reader of the report should know about the reading.
    """

    name: str
    folder: Path
    files: list[Path] = field(default_factory=list)
    scalars: dict[str, Points] = field(default_factory=dict)
    histograms: dict[str, dict[int, Histogram]] = field(default_factory=dict)
    images: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step of which something was logged; 0 when there is nothing."""
        return max((max(points) for points in self.scalars.values() if points), default=0)

    def layers(self, statistic: str, quantity: str) -> dict[str, Points]:
        """Return the values of single layers, numbers in their names in order.

        Args:
            statistic: First part of the keys, such as `cond`.
            quantity: Second part, such as `query`.
        """
        start = f"{statistic}/{quantity}/"
        found = {key.removeprefix(start): points for key, points in self.scalars.items() if key.startswith(start)}
        names = sorted((name for name in found if name not in OVER_LAYERS), key=natural_key)
        return {name: found[name] for name in names}

    def over_layers(self, statistic: str, quantity: str, over: str) -> Points:
        """Return the mean, max, min or count of what is not finite over layers, as logged.

        Where no mean, max or min was logged, it is computed from the layers that have a finite number.
        """
        logged = self.scalars.get(f"{statistic}/{quantity}/{over}")
        if logged is not None or over == "nonfinite":
            return logged or {}
        by_step: dict[int, list[float]] = {}
        for points in self.layers(statistic, quantity).values():
            for step, value in points.items():
                by_step.setdefault(step, []).append(value)
        result: Points = {}
        for step, values in sorted(by_step.items()):
            finite = [value for value in values if math.isfinite(value)]
            joined = {
                "mean": sum(finite) / max(1, len(finite)),
                "max": max(finite, default=0),
                "min": min(finite, default=0),
            }
            result[step] = joined[over] if finite else math.inf
        return result

    def quantities(self, statistic: str) -> list[str]:
        """Return the quantities that have a statistic, in the order of `QUANTITIES`, others after them."""
        found = {key.split("/")[1] for key in self.scalars if key.startswith(f"{statistic}/") and key.count("/") > 1}
        return sorted(found, key=lambda q: (list(QUANTITIES).index(q) if q in QUANTITIES else len(QUANTITIES), q))


def known_quantities(runs: list[Run], statistic: str) -> list[str]:
    """Return the quantities that any of the runs has, in their order."""
    found = dict.fromkeys(quantity for run in runs for quantity in run.quantities(statistic))
    return sorted(found, key=lambda q: (list(QUANTITIES).index(q) if q in QUANTITIES else len(QUANTITIES), q))
