"""The callback that makes a resumed run the one that would have been."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lit_cond.callbacks import loop_state
from lit_cond.callbacks.random_state import random_state, set_random_state
from lit_cond.errors import LitCondWarning

__all__ = ["ExactResume"]

_WITHIN_EPOCH = ("batch end", "validation")


class ExactResume(Callback):
    """Adds to a checkpoint what Lightning leaves out, so that a run resumed from it equals the uninterrupted one.

    A checkpoint of Lightning holds no random number state, no state of torchmetrics, nothing of what was logged since
    the epoch began, no gradients of an accumulation that is under way, and does not say that a validation is still to
    come. This callback stores them and puts them back:

    | what | when it matters |
    | --- | --- |
    | random numbers of Python, NumPy (where imported), torch and CUDA, of each process | dropout, augmentation |
    | torchmetrics that the training steps update, and what `log` gathers over an epoch | metrics of that epoch |
    | values that callbacks watch (`trainer.callback_metrics`) | ModelCheckpoint with `every_n_train_steps` |
    | the rows that the loggers get right after the checkpoint is written | a kill in between |
    | that a validation, or the end of the epoch, follows the step of the checkpoint | a kill in between |
    | gradients, in the middle of an accumulation | checkpoints by `train_time_interval` |

    Loggers are told to write what they hold before a checkpoint is written. The run itself is the same with and without
    this callback. The batches go on where they were if the training loader has `state_dict` and `load_state_dict`, as
    those of `lit_cond.data` have. Checkpoints of weights alone carry nothing.

    Equal is equal bit for bit, as far as the operations of the device are deterministic.
    """

    def __init__(self) -> None:
        self._trained: set[str] = set()
        self._counts: dict[str, int] = {}
        self._loaded: dict[str, Any] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trained, self._counts, self._loaded = set(), {}, None

    @override
    def state_dict(self) -> dict[str, Any]:
        # What is stored needs the trainer: `on_save_checkpoint` fills it in.
        return {"format": 1}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._counts = {name: metric.update_count for name, metric in _metrics(pl_module)}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._trained |= {n for n, metric in _metrics(pl_module) if metric.update_count != self._counts.get(n, 0)}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state; every process takes part."""
        for logger in trainer.loggers:
            logger.save()
        where = loop_state.position(trainer)
        state: dict[str, Any] = {"format": 1, "position": where, "epoch": trainer.current_epoch}
        # With them the log goes on in its place.
        versions = [getattr(logger, "version", None) for logger in trainer.loggers]
        state["versions"] = [version if isinstance(version, (int, str)) else None for version in versions]
        own: dict[str, Any] = {"random": random_state(pl_module.device)}
        if where != "elsewhere":
            # Metrics may be reduced over the processes here, so every one of them asks for the rows.
            state["rows"] = loop_state.rows_to_come(trainer, where)
            state["watched"] = {
                name: _kept(value) for name, value in trainer.callback_metrics.items() if isinstance(value, Tensor)
            }
        if where == "epoch end":
            state["epoch_is_over"] = loop_state.epoch_is_over(trainer)
        if where in _WITHIN_EPOCH:
            state["validation_follows"] = where == "batch end" and loop_state.validation_follows(trainer)
            state["accumulates"] = loop_state.accumulates(trainer)
            own["results"] = loop_state.results_of_epoch(trainer)
            own["metrics"] = {name: _state(metric) for name, metric in _metrics(pl_module) if name in self._trained}
            if state["accumulates"]:
                own["gradients"] = _gradients(pl_module)
        state["processes"] = _gathered(own)
        checkpoint["callbacks"][self.state_key] = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put back what must be in place before the loops begin."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if state is None:
            rank_zero_info(
                "ExactResume: the checkpoint was written without this callback: random numbers start anew, and metrics "
                "of an epoch that goes on count from here"
            )
            return
        self._loaded = state
        set_random_state(self._own(trainer)["random"], pl_module.device)
        if state["position"] == "batch end":
            loops = loop_state.counters(checkpoint)
            if state["validation_follows"]:
                loop_state.put_validation_next(loops)
            elif loops["epoch_loop.batch_progress"]["is_last_batch"]:
                loop_state.end_epoch(loops)
        elif state["position"] == "epoch end":
            loop_state.begin_epoch(loop_state.counters(checkpoint))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back what belongs to the epoch that goes on."""
        state = self._loaded
        if state is None:
            return
        own = self._own(trainer)
        _finish_step(trainer, pl_module, state)
        if trainer.ckpt_path is not None:
            loop_state.note_saved(trainer, str(trainer.ckpt_path), trainer.global_step)
        if state["position"] in _WITHIN_EPOCH:
            loop_state.load_skipped_loader_states(trainer)
            loop_state.load_results(trainer, pl_module, own["results"])
            metrics = dict(_metrics(pl_module))
            self._trained = set(own["metrics"])
            for name, saved in own["metrics"].items():
                if name in metrics:
                    _load(metrics[name], saved)
            _load_gradients(pl_module, own.get("gradients", {}))
            loop_state.take_up_swa(trainer, pl_module)
            set_random_state(own["random"], pl_module.device)
            progress = trainer.fit_loop.epoch_loop.batch_progress
            if state["position"] == "batch end" and not state["validation_follows"] and progress.is_last_batch:
                loop_state.give_no_more_batches(trainer)
        else:
            trainer.fit_loop.epoch_loop.restarting = False
        self._loaded = None

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning does so after this hook, and leaves out schedulers that watch a metric until then.
        trainer.fit_loop.on_iteration_done()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish a run that had ended, or nearly so, when the checkpoint was written: such a run does not start."""
        if self._loaded is not None:
            _finish_step(trainer, pl_module, self._loaded)
            loop_state.put_averages_in(trainer, pl_module)
            self._loaded = None

    def _own(self, trainer: Trainer) -> dict[str, Any]:
        assert self._loaded is not None
        processes: list[dict[str, Any]] = self._loaded["processes"]
        if len(processes) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint was written by {len(processes)} processes, now there are {trainer.world_size}: random "
                "numbers, and metrics of an epoch that goes on, are not those of the uninterrupted run",
                category=LitCondWarning,
            )
        return processes[trainer.global_rank % len(processes)]


def _finish_step(trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
    """Do what Lightning does between the hook that wrote the checkpoint and the next batch."""
    trainer.callback_metrics.update({k: v.to(pl_module.device) for k, v in state.get("watched", {}).items()})
    if state.get("rows"):
        for logger in trainer.loggers:
            logger.log_metrics(state["rows"]["metrics"], step=state["rows"]["step"])
            logger.save()
    if state["position"] == "epoch end" and state["epoch_is_over"]:
        loop_state.plateau_step(trainer, pl_module, "epoch", state["epoch"] + 1)
    elif state["position"] == "batch end" and not (state["validation_follows"] or state["accumulates"]):
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        loop_state.plateau_step(trainer, pl_module, "step", ready)


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of all processes, in their order."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed:
        return [own]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, own)
    return states


def _metrics(pl_module: LightningModule) -> list[tuple[str, Metric]]:
    for module in pl_module.modules():
        if isinstance(module, MetricCollection):
            # Metrics that share a state get it from the first of their group, and only when they are asked for.
            module.items(keep_base=True, copy_state=False)
    return [(name, module) for name, module in pl_module.named_modules() if isinstance(module, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    values = {
        name: [_kept(item) for item in value] if isinstance(value, list) else _kept(value)
        for name, value in metric.metric_state.items()
    }
    return {"count": metric.update_count, "values": values}


def _kept(value: Tensor) -> Tensor:
    return value.detach().clone().cpu()


def _load(metric: Metric, saved: dict[str, Any]) -> None:
    for name, value in saved["values"].items():
        on_device = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, on_device)
    # There is no public way to say that a metric with a state has one.
    metric._update_count = saved["count"]
    metric._computed = None


def _gradients(pl_module: LightningModule) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
    if any(type(gradient) is not Tensor for gradient in gradients.values()):
        rank_zero_warn(
            "the checkpoint is written in the middle of an accumulation of gradients, and those of sharded parameters "
            "are not stored: a run resumed from it makes one step with fewer batches; write checkpoints by "
            "every_n_train_steps",
            category=LitCondWarning,
        )
        return {}
    return {name: _kept(gradient) for name, gradient in gradients.items()}


def _load_gradients(pl_module: LightningModule, saved: dict[str, Tensor]) -> None:
    for name, parameter in pl_module.named_parameters():
        if name in saved:
            parameter.grad = saved[name].to(parameter.device, parameter.dtype)
