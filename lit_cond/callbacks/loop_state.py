"""What Lightning's training loop knows and does not store (written for 2.6); `loader_state` does so for its loaders.

A checkpoint of Lightning holds the counters of its loops. It does not hold what was logged since the epoch began, the
rows that it has still to write for the step of the checkpoint, or whether a validation follows that step. On a resume
the first are lost, and so is the validation: the counters are moved on to its end. The functions here read these things
and put them back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_cond.errors import LitCondWarning

__all__ = [
    "LIGHTNING",
    "Position",
    "accumulates",
    "around_first_epoch_start",
    "begin_epoch",
    "count_validation_once",
    "counters",
    "end_epoch",
    "epoch_is_over",
    "forget_epoch_start",
    "goes_on_within_epoch",
    "load_results",
    "note_saved",
    "plateau_step",
    "position",
    "put_averages_in",
    "put_scores",
    "put_validation_next",
    "reset_next",
    "results_of_epoch",
    "rows_to_come",
    "scores",
    "take_up_swa",
    "validation_follows",
]

LIGHTNING = "2.6"
"""The version of Lightning that this was written for."""

Position = Literal["batch end", "validation", "epoch end", "elsewhere"]
_AVERAGING: tuple[type[Callback], ...] = (StochasticWeightAveraging,)
if hasattr(callbacks, "WeightAveraging"):  # since Lightning 2.6
    _AVERAGING += (callbacks.WeightAveraging,)
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "dataloader_idx")


def position(trainer: Trainer) -> Position:
    """Say from which hook of the training a checkpoint is being written."""
    # Both count what is ready, started, processed and completed.
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if trainer.validating:
        return "validation"
    if batches.processed == batches.completed + 1:
        return "batch end"
    if epochs.processed == epochs.completed + 1:
        return "epoch end"
    return "elsewhere"


def accumulates(trainer: Trainer) -> bool:
    """Say whether gradients of earlier batches wait for an optimizer step."""
    return trainer.fit_loop._should_accumulate()


def validation_follows(trainer: Trainer) -> bool:
    """Say, at the end of a batch, whether Lightning runs the validation after it."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def rows_to_come(trainer: Trainer, where: Position) -> dict[str, Any] | None:
    """Return what Lightning logs after the hook that writes a checkpoint, and for which step; None for nothing."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    if where == "batch end":
        waits = accumulates(trainer) and trainer.lightning_module.automatic_optimization
        if waits or not connector.should_update_logs:
            return None
        step = loop._batches_that_stepped
    elif where == "epoch end":
        step = loop._batches_that_stepped - 1
    else:
        return None
    metrics = loop._results.metrics(where == "batch end")["log"]
    if not metrics:
        return None
    values = {name: float(value) for name, value in metrics.items()}
    return {"step": int(values.pop("step", step)), "metrics": {"epoch": float(trainer.current_epoch), **values}}


def results_of_epoch(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what `log` has gathered in the training since the epoch began, as tensors and plain values."""
    found = []
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.has_reset or metric.meta.sync.group is not None:
            continue
        entry = {name: getattr(metric.meta, name) for name in _META}
        entry["reduce_fx"] = metric.meta.reduce_fx.__name__
        entry["sync"] = {"should": metric.meta.sync.should, "rank_zero_only": metric.meta.sync.rank_zero_only}
        entry["metric_attribute"] = metric.meta.metric_attribute
        entry["last"] = _kept(metric._forward_cache)
        if metric.is_tensor:
            entry["value"] = _kept(metric.value)
            entry["samples"] = _kept(getattr(metric, "cumulated_batch_size", None))
        found.append({"key": key, **entry})
    return found


def load_results(trainer: Trainer, pl_module: LightningModule, saved: list[dict[str, Any]]) -> None:
    """Put back what `results_of_epoch` has returned; before the first batch, which then counts as a later one."""
    results = trainer.fit_loop.epoch_loop._results
    results.clear()  # of what was logged since the training began
    device = pl_module.device
    modules = dict(pl_module.named_modules())
    for entry in saved:
        if "value" not in entry and entry["metric_attribute"] not in modules:
            continue  # ExactResume tells of metrics that are gone
        meta = _Metadata(
            **{name: entry[name] for name in _META},
            reduce_fx=getattr(torch, entry["reduce_fx"]),
            metric_attribute=entry["metric_attribute"],
        )
        sync = entry["sync"]
        meta.sync = _Sync(
            fn=trainer.strategy.reduce, _should=sync["should"], rank_zero_only=sync["rank_zero_only"], _group=None
        )
        metric = _ResultMetric(meta, "value" in entry)
        if metric.is_tensor:
            metric.value = entry["value"].to(device)
            if entry["samples"] is not None:
                metric.cumulated_batch_size = entry["samples"].to(device)
            metric._update_count = 1
        else:
            metric.value = modules[entry["metric_attribute"]]
            metric._update_count = 1
        metric._forward_cache = None if entry["last"] is None else entry["last"].to(device)
        metric.has_reset = False
        results[entry["key"]] = metric
    # Else the first `log` of each hook would begin the epoch anew.
    trainer._logger_connector._first_loop_iter = True


def put_validation_next(loops: dict[str, Any]) -> None:
    """Change the counters in a checkpoint from the end of a batch so that the validation that follows it is run.

    Lightning repeats a validation that was interrupted, and takes one that had not begun for one that has ended.

    Args:
        loops: The state of the fit loop.
    """
    batches = loops["epoch_loop.batch_progress"]
    for counters in (batches["total"], batches["current"]):
        counters["completed"] = counters["processed"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    done = validation["total"]["completed"]
    validation["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    validation["current"] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}


def count_validation_once(trainer: Trainer) -> None:
    """Take back what `put_validation_next` has counted, when that validation begins and counts for itself."""
    total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    total.ready = total.started = total.completed


def scores(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last score of each callback that writes checkpoints, by its key; Lightning stores and forgets it."""
    states = checkpoint.get("callbacks", {}).items()
    return {
        key: state["current_score"] for key, state in states if isinstance(state, dict) and "current_score" in state
    }


def put_scores(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Put back what `scores` has returned."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and saved.get(callback.state_key) is not None:
            callback.current_score = saved[callback.state_key].to(trainer.strategy.root_device)


def end_epoch(loops: dict[str, Any]) -> None:
    """Change the counters in a checkpoint from the end of an epoch's last batch, which no validation follows.

    Lightning would go on with the next epoch, and leave out all that ends this one.

    Args:
        loops: The state of the fit loop.
    """
    batches = loops["epoch_loop.batch_progress"]
    for counters in (batches["total"], batches["current"]):
        counters["completed"] = counters["processed"]
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def begin_epoch(loops: dict[str, Any]) -> None:
    """Change the counters in a checkpoint from the end of an epoch so that the next one begins.

    Lightning would end the epoch a second time in a training limited by `max_steps`.

    Args:
        loops: The state of the fit loop.
    """
    epochs = loops["epoch_progress"]
    for counters in (epochs["total"], epochs["current"]):
        counters["completed"] = counters["processed"]


def plateau_step(trainer: Trainer, pl_module: LightningModule, interval: str, number: int) -> None:
    """Make the step of the schedulers that watch a metric, which follows the hook that wrote the checkpoint.

    Args:
        trainer: The trainer, with the watched values in place.
        pl_module: Its module.
        interval: "epoch" or "step".
        number: How many of them have passed.
    """
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == interval and number % config.frequency == 0:
            value = trainer.callback_metrics.get(config.monitor or "")
            if value is not None:
                progress = trainer.fit_loop.epoch_loop.scheduler_progress
                progress.increment_ready()
                pl_module.lr_scheduler_step(config.scheduler, value)
                progress.increment_completed()


def take_up_swa(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let Lightning's SWA go on within an epoch: it takes up what it has loaded when an epoch begins."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        kept = [{key: value for key, value in g.items() if key != "params"} for g in trainer.optimizers[0].param_groups]
        callback.on_train_epoch_start(trainer, pl_module)
        # Its schedule begins with a step.
        for group, values in zip(trainer.optimizers[0].param_groups, kept, strict=True):
            group.update(values)
        if trainer.current_epoch == callback.swa_end + 1:
            rank_zero_warn(
                "the checkpoint was written within the epoch in which SWA computes the statistics of batch norm: they "
                "are those of the batches that are left; for all of them resume from an earlier checkpoint",
                category=LitCondWarning,
            )


def put_averages_in(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let Lightning's averaging callbacks do what they do at the end of a training, for one that had ended before."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _AVERAGING):
            callback.on_train_end(trainer, pl_module)


def epoch_is_over(trainer: Trainer) -> bool:
    """Say whether the epoch has had all its batches."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def note_saved(trainer: Trainer, path: str, step: int) -> None:
    """Tell the callback that has written the checkpoint which this run goes on from that it has done so.

    It would write it again under another name: it does not store that.
    """
    real = os.path.realpath(path)
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        written = (callback.best_model_path, callback.last_model_path, *callback.best_k_models)
        if any(one and os.path.realpath(one) == real for one in written):
            callback._last_global_step_saved = step
            callback._last_checkpoint_saved = path


def around_first_epoch_start(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call something right before and after Lightning begins the next epoch, or goes on with one; once.

    All hooks `on_train_start` have been called by then, those of the module too.
    """
    loop = trainer.fit_loop
    begin = type(loop).on_advance_start

    def once() -> None:
        forget_epoch_start(trainer)
        before()
        begin(loop)
        after()

    loop.__dict__["on_advance_start"] = once


def forget_epoch_start(trainer: Trainer) -> None:
    """Take back `around_first_epoch_start` where the training did not get there."""
    trainer.fit_loop.__dict__.pop("on_advance_start", None)


def goes_on_within_epoch(trainer: Trainer) -> bool:
    """Say whether Lightning goes on with an epoch that has begun before: it calls no hooks for its beginning."""
    return trainer.fit_loop.restarted_mid_epoch


def reset_next(trainer: Trainer, where: Position) -> list[nn.Module]:
    """Return the metrics that Lightning resets right after the hook that writes a checkpoint."""
    loop = trainer.fit_loop.epoch_loop
    results: Mapping[str, Any] = {"validation": loop.val_loop._results, "epoch end": loop._results}.get(where, {})
    return [metric.value for metric in results.values() if isinstance(metric.value, nn.Module)]


def _kept(value: Any) -> Tensor | None:
    return value.detach().clone().cpu() if isinstance(value, Tensor) else None


def counters(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the fit loop in a checkpoint."""
    return checkpoint["loops"]["fit_loop"]  # type: ignore[no-any-return]
