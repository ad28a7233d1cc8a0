"""The callback that makes a resumed run the one that would have been."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lit_cond.callbacks import loop_state
from lit_cond.callbacks.random_state import random_state, set_random_state
from lit_cond.errors import CheckpointMismatchError, LitCondWarning

__all__ = ["ExactResume"]

_FORMAT = 1
_ALWAYS = {"position", "epoch", "processes"}
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

    Put it last in the list of callbacks: random numbers that others draw in `on_train_start` are then none of those
    that it restores. Equal is equal bit for bit, as far as the operations of the device are deterministic.
    """

    def __init__(self) -> None:
        self._trained: set[str] = set()
        self._metrics: list[tuple[str, Metric]] = []
        self._counts: list[int] = []
        self._loaded: dict[str, Any] | None = None
        self._own: dict[str, Any] = {}
        self._resumed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trained, self._metrics, self._counts = set(), [], []
        self._loaded, self._resumed, self._own = None, False, {}
        if stage == "fit" and not lightning.__version__.startswith(f"{loop_state.LIGHTNING}."):
            rank_zero_warn(
                f"ExactResume looks into Lightning's loops as they are in {loop_state.LIGHTNING}, and this is "
                f"{lightning.__version__}: compare a resumed run with an uninterrupted one before you rely on it",
                category=LitCondWarning,
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        # What is stored needs the trainer: `on_save_checkpoint` fills it in.
        return {"format": _FORMAT}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._counts = [metric.update_count for _, metric in self._metrics]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        counted = zip(self._metrics, self._counts, strict=True)
        self._trained |= {name for (name, metric), count in counted if metric.update_count != count}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state; every process takes part."""
        for logger in trainer.loggers:
            logger.save()
        where = loop_state.position(trainer)
        state: dict[str, Any] = {"format": _FORMAT, "position": where, "epoch": trainer.current_epoch}
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
            trained = self._trained | _groups_of(pl_module, self._trained)
            own["metrics"] = {name: _state(metric) for name, metric in _metrics(pl_module) if name in trained}
        # With manual optimization nobody but the module knows which of them it still needs.
        if state.get("accumulates") or not pl_module.automatic_optimization:
            own["gradients"] = _gradients(pl_module)
        state["processes"] = _gathered(own)
        checkpoint["callbacks"][self.state_key] = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put back what must be in place before the loops begin."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        # Lightning's finders load checkpoints of their own, without a path, while they try things out.
        if trainer.state.fn != TrainerFn.FITTING or trainer.ckpt_path is None or self._loaded is not None:
            return
        if state is None:
            rank_zero_info(
                "ExactResume: the checkpoint was written without this callback: random numbers start anew, and metrics "
                "of an epoch that goes on count from here"
            )
            return
        if state.get("format") != _FORMAT or not state.keys() >= _ALWAYS:
            raise CheckpointMismatchError(
                f"the checkpoint's state of ExactResume is damaged or of another version ({sorted(state)[:9]}): take "
                "another checkpoint, or resume without the callback"
            )
        self._loaded, self._resumed, self._own = state, True, _own_part(trainer, state)
        self._load_random(pl_module)
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
        self._metrics = _metrics(pl_module)
        state = self._loaded
        if state is None:
            return
        own = self._own
        _load_gradients(pl_module, own.get("gradients", {}))
        _finish_step(trainer, pl_module, state)
        if trainer.ckpt_path is not None:
            loop_state.note_saved(trainer, str(trainer.ckpt_path), trainer.global_step)
        if state["position"] in _WITHIN_EPOCH:
            loop_state.load_skipped_loader_states(trainer)
            loop_state.load_results(trainer, pl_module, own.get("results", []))
            self._trained = set(own.get("metrics", {}))
            _load_metrics(dict(self._metrics), own.get("metrics", {}))
            loop_state.take_up_swa(trainer, pl_module)
            self._load_random(pl_module)
            progress = trainer.fit_loop.epoch_loop.batch_progress
            if state["position"] == "batch end" and not state["validation_follows"] and progress.is_last_batch:
                loop_state.give_no_more_batches(trainer)
        elif state["position"] == "epoch end":
            trainer.fit_loop.epoch_loop.restarting = False
        self._loaded = None

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resumed:
            # Lightning does so after this hook, and leaves out schedulers that watch a metric until then.
            trainer.fit_loop.on_iteration_done()
            self._resumed = False

    def _load_random(self, pl_module: LightningModule) -> None:
        if "random" in self._own:
            set_random_state(self._own["random"], pl_module.device)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish a run that had ended, or nearly so, when the checkpoint was written: such a run does not start."""
        if self._loaded is not None:
            _finish_step(trainer, pl_module, self._loaded)
            loop_state.put_averages_in(trainer, pl_module)
            self._loaded = None


def _own_part(trainer: Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Return what belongs to this process; of another number of processes the random numbers alone."""
    processes: list[dict[str, Any]] = state["processes"]
    rank = trainer.global_rank
    if len(processes) == trainer.world_size:
        return processes[rank]
    rank_zero_warn(
        f"the checkpoint was written by {len(processes)} processes, now there are {trainer.world_size}: random "
        "numbers, and metrics of an epoch that goes on, are not those of the uninterrupted run",
        category=LitCondWarning,
    )
    return {"random": processes[rank]["random"]} if rank < len(processes) else {}


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
    return [(name, module) for name, module in pl_module.named_modules() if isinstance(module, Metric)]


def _groups_of(pl_module: LightningModule, names: set[str]) -> set[str]:
    """Return the names of all metrics in the collections of some; in a collection one may do the work of others."""
    found: set[str] = set()
    for prefix, module in pl_module.named_modules():
        if isinstance(module, MetricCollection):
            members = {f"{prefix}.{name}" for name, inner in module.named_modules() if isinstance(inner, Metric)}
            if members & names:
                # They get the common state when they are asked for.
                module.items(keep_base=True, copy_state=False)
                found |= members
    return found


def _load_metrics(metrics: dict[str, Metric], saved: dict[str, dict[str, Any]]) -> None:
    lost = sorted(saved.keys() - metrics.keys())
    if lost:
        rank_zero_warn(
            f"the checkpoint holds the state of metrics that the model does not have: {', '.join(map(repr, lost))}: "
            "they are left out of the epoch that goes on",
            category=LitCondWarning,
        )
    for name in saved.keys() & metrics.keys():
        _load(metrics[name], saved[name])


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
