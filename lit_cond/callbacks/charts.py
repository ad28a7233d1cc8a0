"""Histograms, pictures, tables and a layout for the loggers that can show them."""

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_cond.errors import LitCondWarning
from lit_cond.plots import QUANTITIES, HeatMap, describe, spectra

__all__ = ["HeatMap", "log_figure", "log_histogram", "log_layout", "log_spectra", "log_text"]

_FLOOR = 1e-16
"""Where zeros stand in a histogram of relative singular values: below what float64 can tell from zero."""

# Category of the layout -> statistics, in their order. Of each the lines of its chart.
_STATISTICS = {
    "cond": "condition number",
    "entropy": "entropy",
    "entropy_share": "entropy, share of the largest possible",
    "saturated": "share of saturated rows",
    "stable_rank": "stable rank",
    "effective_rank": "effective rank",
    "numerical_rank": "numerical rank",
    "sigma_max": "largest singular value",
    "sigma_min": "smallest singular value",
    "bound": "factor of the Jacobian's bound",
}
_CATEGORIES = {
    "condition numbers": ("cond",),
    "attention": ("entropy", "entropy_share", "saturated"),
    "ranks and singular values": ("stable_rank", "effective_rank", "numerical_rank", "sigma_max", "sigma_min"),
    "factors of the bound on the Jacobian": ("bound",),
}
_OVER_LAYERS = ("mean", "max", "min")


def _experiments(trainer: Trainer, method: str) -> list[Any]:
    """Return the loggers' experiments that have a method; on other ranks than the first there are none."""
    if not trainer.is_global_zero:
        return []
    found = (getattr(logger, "experiment", None) for logger in trainer.loggers)
    return [experiment for experiment in found if hasattr(experiment, method)]


def log_histogram(trainer: Trainer, name: str, values: Tensor | Iterable[Tensor], step: int) -> int:
    """Log a histogram of log10(sigma / sigma_max) of the singular values of one or several matrices.

    Each matrix is taken relative to its own largest value; zeros, and what is smaller than 1e-16 of the largest, stand
    at -16. What is not finite is left out and counted: where there is some, the scalar `<name>/nonfinite` is logged
    beside. A histogram without any value is not logged.

    Args:
        trainer: Its loggers that take histograms are used.
        name: Key of the histogram.
        values: Singular values of one matrix, or of each matrix; of any shape, type and device.
        step: The optimizer step.

    Returns:
        How many values were not finite.
    """
    # bfloat16 has no numpy type, and its logarithms are coarse.
    matrices = [m.detach().double().cpu().flatten() for m in ([values] if isinstance(values, Tensor) else values)]
    finite = [matrix[matrix.isfinite()] for matrix in matrices]
    lost = sum(map(torch.numel, matrices)) - sum(map(torch.numel, finite))
    relative = [matrix / matrix.max().clamp(min=torch.finfo(matrix.dtype).tiny) for matrix in finite if matrix.numel()]
    for experiment in _experiments(trainer, "add_histogram"):
        if relative:
            experiment.add_histogram(name, torch.cat(relative).clamp(min=_FLOOR).log10(), global_step=step)
        if lost and hasattr(experiment, "add_scalar"):
            experiment.add_scalar(f"{name}/nonfinite", float(lost), global_step=step)
    return lost


def log_figure(trainer: Trainer, name: str, figure: Any, step: int) -> None:
    """Log a figure where a logger takes figures; nothing is drawn where none does.

    A drawing that fails does not end a training: it is left out with a warning, also where matplotlib is missing.

    Args:
        trainer: Its loggers that take figures are used.
        name: Key of the figure.
        figure: A matplotlib figure, something with a method `figure` that makes one, such as a `HeatMap`, or a function
            without arguments.
        step: The optimizer step.
    """
    experiments = _experiments(trainer, "add_figure")
    if not experiments:
        return
    make = getattr(figure, "figure", figure) if isinstance(figure, HeatMap) else figure
    try:
        drawn = make() if callable(make) else make
        for experiment in experiments:
            experiment.add_figure(name, drawn, global_step=step)
    except ImportError:
        warnings.warn(
            "no heat maps without matplotlib: pip install matplotlib, or set heatmap=False",
            LitCondWarning,
            stacklevel=2,
        )
    except Exception as error:
        warnings.warn(
            f"the picture {name!r} is left out: {type(error).__name__}: {error}", LitCondWarning, stacklevel=2
        )


def log_spectra(trainer: Trainer, quantity: str, values: Mapping[str, Tensor | Sequence[float]], step: int) -> None:
    """Log the figure `spectra/<quantity>`: singular values of some layers, descending, on a logarithmic axis.

    Args:
        trainer: Its loggers that take figures are used.
        quantity: What was measured.
        values: Singular values by layer; zeros and what is not finite is counted in the legend.
        step: The optimizer step.
    """

    def draw() -> Any:
        rows = {layer: torch.as_tensor(row).detach().double().flatten().tolist() for layer, row in values.items()}
        return spectra(rows, f"Singular values of the {describe(quantity)}, step {step:,}")

    if values:
        log_figure(trainer, f"spectra/{quantity}", draw, step)


def log_layout(trainer: Trainer, keys: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Log a layout for TensorBoard's tab "Custom Scalars": one chart for each quantity, its mean and worst layer.

    Where there are raw values (`cond_raw`), they stand in the chart of the corrected ones. TensorBoard shows one
    layout of a run only: call this once, with all keys that will be logged.

    Args:
        trainer: Its loggers that take layouts are used.
        keys: Keys that are or will be logged: `<statistic>/<quantity>/<mean|max|min>`; others are left out.

    Returns:
        The layout: charts by category, each `["Multiline", [regular expressions of keys]]`.
    """
    layout = _layout(keys)
    if layout:
        for experiment in _experiments(trainer, "add_custom_scalars"):
            experiment.add_custom_scalars(layout)
    return layout


def _layout(keys: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    lines: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        statistic, _, rest = key.partition("/")
        quantity, _, over = rest.partition("/")
        if over in _OVER_LAYERS:
            lines.setdefault((statistic.removesuffix("_raw"), quantity), []).append(key)
    order = {quantity: position for position, quantity in enumerate(QUANTITIES)}
    layout: dict[str, dict[str, list[Any]]] = {}
    for category, statistics in _CATEGORIES.items():
        for statistic in statistics:
            quantities = sorted((q for s, q in lines if s == statistic), key=lambda q: order.get(q, math.inf))
            for quantity in quantities:
                # TensorBoard matches from the beginning only: without $ `mean` would also take what begins with it.
                tags = [f"^{re.escape(key)}$" for key in dict.fromkeys(lines[statistic, quantity])]
                title = f"{_STATISTICS[statistic]}: {describe(quantity)}"
                layout.setdefault(category, {})[title] = ["Multiline", tags]
    return layout


def log_text(trainer: Trainer, name: str, text: str) -> None:
    """Log a plain text, its columns kept, where a logger takes texts."""
    for experiment in _experiments(trainer, "add_text"):
        experiment.add_text(name, f"```\n{text}\n```", global_step=trainer.global_step)
