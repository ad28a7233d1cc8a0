"""Histograms, heat maps and tables for the loggers that can show them."""

import math
import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_cond.errors import LitCondWarning

__all__ = ["HeatMap", "log_figure", "log_histogram", "log_text"]


class HeatMap:
    """log10 of a condition number, layers against steps.

    Args:
        quantity: What is measured, for the title.
    """

    def __init__(self, quantity: str) -> None:
        self.quantity = quantity
        self.values: dict[str, dict[int, float]] = {}

    @property
    def columns(self) -> int:
        """How many steps were measured."""
        return max((len(row) for row in self.values.values()), default=0)

    def add(self, layer: str, step: int, value: float) -> None:
        """Add one measurement; a non-finite one leaves a gap."""
        self.values.setdefault(layer, {})[step] = value

    def figure(self) -> Any:
        """Return a matplotlib figure, one row for each layer, first layer on top."""
        from matplotlib.figure import Figure

        steps = sorted({step for row in self.values.values() for step in row})
        table = [
            [math.log10(v) if math.isfinite(v := row.get(step, math.nan)) and v > 0 else math.nan for step in steps]
            for row in self.values.values()
        ]
        figure = Figure(figsize=(min(4.0 + 0.12 * len(steps), 12.0), 1.4 + 0.25 * len(table)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_yticks(range(len(table)), list(self.values), fontsize=7)
        shown = range(0, len(steps), max(1, len(steps) // 8))
        axes.set_xticks(list(shown), [str(steps[i]) for i in shown], fontsize=7)
        axes.set_xlabel("optimizer step")
        axes.set_title(f"condition number: {self.quantity}")
        figure.colorbar(image, ax=axes, label="log10")
        return figure


def _experiments(trainer: Trainer, method: str) -> list[Any]:
    """Return the loggers' experiments that have a method; on other ranks than the first there are none."""
    if not trainer.is_global_zero:
        return []
    found = (getattr(logger, "experiment", None) for logger in trainer.loggers)
    return [experiment for experiment in found if hasattr(experiment, method)]


def log_histogram(trainer: Trainer, name: str, values: Tensor, step: int) -> None:
    """Log log10 of the positive finite values relative to the largest; an empty rest is left out."""
    usable = values[values.isfinite() & (values > 0)]
    if not usable.numel():
        return
    for experiment in _experiments(trainer, "add_histogram"):
        experiment.add_histogram(name, torch.log10(usable / usable.max()), global_step=step)


def log_figure(trainer: Trainer, name: str, heat_map: HeatMap, step: int) -> None:
    """Log a heat map as a figure; without matplotlib it is left out with a warning."""
    experiments = _experiments(trainer, "add_figure")
    if not experiments:
        return
    try:
        figure = heat_map.figure()
    except ImportError:
        warnings.warn(
            "no heat maps without matplotlib: pip install matplotlib, or set heatmap=False",
            LitCondWarning,
            stacklevel=2,
        )
        return
    for experiment in experiments:
        experiment.add_figure(name, figure, global_step=step)


def log_text(trainer: Trainer, name: str, text: str) -> None:
    """Log a plain text, its columns kept, where a logger takes texts."""
    for experiment in _experiments(trainer, "add_text"):
        experiment.add_text(name, f"```\n{text}\n```", global_step=trainer.global_step)
