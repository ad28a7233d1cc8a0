"""The states of the torchmetrics in a module, as tensors and plain values."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lit_cond.errors import LitCondWarning

__all__ = ["Plain", "load_metric_states", "metric_states", "plain_values", "tracked_steps"]

Plain = dict[str, dict[str, Any]]
"""By the names of metrics: what wrappers keep beside their states."""


class _Bare(Metric):
    def update(self) -> None: ...

    def compute(self) -> None: ...


_OF_EVERY_METRIC = vars(_Bare()).keys()


def plain_values(pl_module: LightningModule) -> Plain:
    """Return the numbers and tensors that metrics keep beside their states, as `MinMaxMetric` does."""
    return {name: _plain(module) for name, module in pl_module.named_modules() if isinstance(module, Metric)}


def tracked_steps(pl_module: LightningModule) -> dict[str, int]:
    """Return how many steps each `MetricTracker` has: it makes a copy of its metric for each."""
    return {
        name: module.n_steps
        for name, module in pl_module.named_modules()
        if isinstance(module, MetricTracker) and module.n_steps
    }


def metric_states(pl_module: LightningModule, at_start: Plain, reset_next: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the states of all metrics that have been updated.

    Args:
        pl_module: The module.
        at_start: What `plain_values` returned before the training: only what has changed is stored.
        reset_next: Metrics that Lightning resets before the training goes on. Of them only that is stored which a
            reset leaves.
    """
    found = dict(pl_module.named_modules())
    for module in found.values():
        if isinstance(module, MetricCollection) and any(metric.update_count for metric in module.values(False)):
            # In a collection one metric may do the work of others: they get the common state when they are asked for.
            module.items(keep_base=True, copy_state=False)
    soon = {id(inner) for metric in reset_next for inner in metric.modules()}
    states = {}
    for name, metric in found.items():
        if not isinstance(metric, Metric):
            continue
        before = at_start.get(name, {})
        more = {key: value for key, value in _plain(metric).items() if not _same(value, before.get(key))}
        state: dict[str, Any] = {"count": 0, "values": {}}
        if id(metric) not in soon:
            state = _state(metric)
        elif more:
            left = deepcopy(metric)
            left.reset()
            more = {key: _plain(left)[key] for key in more}
        if state["count"] or more:
            states[name] = {**state, "more": {key: _kept(value) for key, value in more.items()}}
    return states


def load_metric_states(pl_module: LightningModule, saved: dict[str, Any], steps: dict[str, int]) -> None:
    """Put back what `metric_states` and `tracked_steps` have returned; all other metrics begin anew."""
    for name, module in list(pl_module.named_modules()):
        if isinstance(module, MetricTracker):
            while module.n_steps < steps.get(name, 0):
                module.increment()
    metrics = {name: module for name, module in pl_module.named_modules() if isinstance(module, Metric)}
    lost = sorted(saved.keys() - metrics.keys())
    if lost:
        rank_zero_warn(
            f"the checkpoint holds the state of metrics that the model does not have: {', '.join(map(repr, lost))}: "
            "they are left out",
            category=LitCondWarning,
        )
    for name, metric in metrics.items():
        if metric.update_count and name not in saved:
            metric.reset()
    for name in saved.keys() & metrics.keys():
        _load(metrics[name], saved[name])


def _plain(metric: Metric) -> dict[str, Any]:
    other = vars(metric).keys() - _OF_EVERY_METRIC - metric.metric_state.keys()
    values = {name: vars(metric)[name] for name in sorted(other)}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if isinstance(value, (Tensor, bool, int, float))
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a.cpu() == b.cpu()).all())
    return type(a) is type(b) and bool(a == b)


def _state(metric: Metric) -> dict[str, Any]:
    values = {
        name: [_kept(item) for item in value] if isinstance(value, list) else _kept(value)
        for name, value in metric.metric_state.items()
    }
    return {"count": metric.update_count, "values": values}


def _kept(value: Any) -> Any:
    return value.detach().clone().cpu() if isinstance(value, Tensor) else value


def _load(metric: Metric, saved: dict[str, Any]) -> None:
    for name, value in (saved["values"] | saved.get("more", {})).items():
        on_device = [_on(item, metric) for item in value] if isinstance(value, list) else _on(value, metric)
        setattr(metric, name, on_device)
    # There is no public way to say that a metric with a state has one.
    metric._update_count = saved["count"]
    metric._computed = None


def _on(value: Any, metric: Metric) -> Any:
    # A copy: metrics add to it in place.
    return value.to(metric.device, copy=True) if isinstance(value, Tensor) else value
