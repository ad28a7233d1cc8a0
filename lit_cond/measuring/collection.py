"""The numbers of one measurement by log key, and what is said of all layers together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lit_cond.measuring.quantities import Spectrum, finite_mean, statistics_of

__all__ = ["OVER_LAYERS", "Collection", "layer_key", "over_layers"]

# What is logged over layers: the mean, and the end of the range that says something is wrong.
OVER_LAYERS: dict[str, tuple[str, ...]] = {
    "cond": ("mean", "max"),
    "cond_raw": ("mean", "max"),
    "bound": ("mean", "max"),
    "sigma_max": ("mean", "max"),
    "sigma_min": ("mean", "min"),
    "stable_rank": ("mean", "min"),
    "effective_rank": ("mean", "min"),
    "numerical_rank": ("mean", "min"),
    "entropy": ("mean", "min"),
    "entropy_share": ("mean", "min"),
    "saturated": ("mean", "max"),
}
_COUNTED = ("cond", "cond_raw")


def layer_key(layer: str) -> str:
    """Return a layer's name as a part of a key: without slashes, and told apart from what is said over layers."""
    name = layer.replace("/", ":")
    return f"{name}_" if name in ("mean", "max", "min", "nonfinite") else name


class Collection:
    """What one measurement has found, layer by layer.

    Args:
        per_head: Whether numbers of single heads are kept as well.
    """

    def __init__(self, per_head: bool = False) -> None:
        self.per_head = per_head
        self.values: dict[str, float] = {}
        self.spectra: dict[str, dict[str, list[Tensor]]] = {}
        self.skipped: dict[str, float] = {}

    def add(self, statistic: str, quantity: str, layer: str, value: float) -> None:
        """Add one number of a layer."""
        self.values[f"{statistic}/{quantity}/{layer_key(layer)}"] = value

    def heads(self, statistic: str, quantity: str, layer: str, values: Sequence[Sequence[float]]) -> None:
        """Add numbers of heads and samples: their mean over those that are finite.

        Args:
            statistic: What the number says.
            quantity: Of what.
            layer: Of which layer.
            values: For each head one number a sample.
        """
        self.add(statistic, quantity, layer, finite_mean(v for head in values for v in head))
        if self.per_head and len(values) > 1:
            for index, head in enumerate(values):
                self.values[f"{statistic}/{quantity}/{layer_key(layer)}/head_{index}"] = finite_mean(head)

    def matrices(
        self, quantity: str, layer: str, samples: Sequence[Sequence[Spectrum]], statistics: Iterable[str]
    ) -> None:
        """Add the matrices of a layer: those of the heads of each sample.

        The condition number of a layer is the mean over samples and heads that have a finite one.
        """
        every = [spectrum for heads in samples for spectrum in heads]
        if not every:
            return
        self.heads("cond", quantity, layer, [[s.condition for s in head] for head in zip(*samples, strict=True)])
        for name, value in statistics_of(every, statistics).items():
            self.add(name, quantity, layer, value)
        self.spectra.setdefault(quantity, {}).setdefault(layer, []).extend(s.values for s in every)


def over_layers(values: Mapping[str, float]) -> dict[str, float]:
    """Return numbers by layer with what is said of all of them: mean, maximum or minimum, and how many have none.

    Args:
        values: Numbers by `<statistic>/<quantity>/<layer>`; keys of single heads are passed on.
    """
    groups: dict[str, list[float]] = {}
    for key, value in values.items():
        statistic, quantity, *rest = key.split("/")
        if len(rest) == 1:
            groups.setdefault(f"{statistic}/{quantity}", []).append(value)
    result = dict(values)
    for group, members in groups.items():
        statistic = group.partition("/")[0]
        finite = [v for v in members if math.isfinite(v)]
        for name in OVER_LAYERS[statistic]:
            if name == "mean":
                result[f"{group}/mean"] = finite_mean(members)
            else:
                ends = [v for v in members if not math.isnan(v)]
                result[f"{group}/{name}"] = (max if name == "max" else min)(ends, default=math.nan)
        if statistic in _COUNTED and len(finite) < len(members):
            result[f"{group}/nonfinite"] = float(len(members) - len(finite))
    return result
