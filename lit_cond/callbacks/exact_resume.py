"""The callback that makes a resumed run the one that would have been."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_cond.callbacks import loader_state, loop_state
from lit_cond.callbacks.epoch_start import begin_again, frozen, load_frozen
from lit_cond.callbacks.metric_state import (
    Plain,
    load_metric_states,
    metric_states,
    plain_values,
    tracked_steps,
)
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
    | torchmetrics of the module, and what `log` gathers over an epoch | metrics of an epoch, or of the whole run |
    | values that callbacks watch (`trainer.callback_metrics`) | ModelCheckpoint with `every_n_train_steps` |
    | the rows that the loggers get right after the checkpoint is written | a kill in between |
    | that a validation, or the end of the epoch, follows the step of the checkpoint | a kill in between |
    | gradients, in the middle of an accumulation | checkpoints by `train_time_interval` |
    | which parameters train | BackboneFinetuning |
    | generators of the training loaders, the place of stateful iterable data | order of the next epoch |

    Within an epoch, `on_train_epoch_start` of the module and of callbacks is called once more for what they set there;
    see `begin_again`. Loggers are told to write what they hold before a checkpoint is written. The run itself is the
    same with and without this callback. The batches go on where they were if the training loader has `state_dict` and
    `load_state_dict`, as those of `lit_cond.data` have. Checkpoints of weights alone carry nothing.

    Equal is equal bit for bit, as far as the operations of the device are deterministic.
    """

    def __init__(self) -> None:
        self._at_start: Plain = {}
        self._loaded: dict[str, Any] | None = None
        self._own: dict[str, Any] = {}
        self._known: set[str] = set()
        self._resumed = False
        self._waits_for_batch = False
        self._validates_again = False
        self._scores: dict[str, Any] = {}
        self._states_at_end: list[Any] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded, self._resumed, self._own = None, False, {}
        self._waits_for_batch, self._validates_again, self._scores = False, False, {}
        self._states_at_end = None
        loop_state.forget_epoch_start(trainer)
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
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._at_start = plain_values(pl_module)

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
        if self._states_at_end is not None:
            # The epoch had all its batches before this run.
            loop_state.counters(checkpoint)["state_dict"]["combined_loader"] = self._states_at_end
        state["frozen"] = frozen(pl_module)
        state["steps"] = tracked_steps(pl_module)
        state["last_reload"] = loader_state.last_reload(trainer)
        own: dict[str, Any] = {
            "random": random_state(pl_module.device),
            "sources": loader_state.sources(trainer),
            "metrics": metric_states(pl_module, self._at_start, loop_state.reset_next(trainer, where)),
        }
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
            loader_state.put_given_states(trainer, loop_state.counters(checkpoint))
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
        self._known = set(checkpoint.get("state_dict", ()))
        self._scores = loop_state.scores(checkpoint)
        self._load_random(pl_module)
        loops = loop_state.counters(checkpoint)
        if state["position"] in _WITHIN_EPOCH and loops["epoch_loop.batch_progress"]["is_last_batch"]:
            self._states_at_end = loader_state.drop_loader_states(loops)
        if state["position"] == "batch end":
            if state["validation_follows"]:
                loop_state.put_validation_next(loops)
                self._validates_again = True
            elif loops["epoch_loop.batch_progress"]["is_last_batch"]:
                loop_state.end_epoch(loops)
        elif state["position"] == "epoch end":
            loop_state.begin_epoch(loops)
            loader_state.drop_loader_states(loops)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make up for what Lightning did after the checkpoint was written; the rest follows after all such hooks."""
        loader_state.note_fetches(trainer)
        state = self._loaded
        if state is None:
            return
        _finish_step(trainer, pl_module, state)
        loop_state.put_scores(trainer, self._scores)
        if trainer.ckpt_path is not None:
            loop_state.note_saved(trainer, str(trainer.ckpt_path), trainer.global_step)
        if state["position"] in _WITHIN_EPOCH:
            loader_state.load_skipped_loader_states(trainer)
        loop_state.around_first_epoch_start(
            trainer,
            lambda: self._before_epoch_start(trainer, pl_module, state),
            lambda: self._after_epoch_start(trainer, pl_module, state),
        )
        self._loaded = None

    def _before_epoch_start(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
        if "last_reload" in state:
            loader_state.set_last_reload(trainer, state["last_reload"])
        self._load_model(trainer, pl_module, state)
        _load_gradients(pl_module, self._own.get("gradients", {}))
        if state["position"] == "epoch end":
            loader_state.load_sources(trainer, self._own.get("sources", []))
            self._load_random(pl_module)
            loader_state.make_iterators_anew(trainer)

    def _after_epoch_start(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
        if not loop_state.goes_on_within_epoch(trainer):
            return
        begin_again(trainer, pl_module)
        self._load_model(trainer, pl_module, state)
        _load_gradients(pl_module, self._own.get("gradients", {}))
        if state["position"] not in _WITHIN_EPOCH:
            return
        loop_state.load_results(trainer, pl_module, self._own.get("results", []))
        loop_state.take_up_swa(trainer, pl_module)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch:
            loader_state.load_sources(trainer, self._own.get("sources", []))
        self._waits_for_batch = not progress.is_last_batch
        self._load_random(pl_module)
        if state["position"] == "batch end" and not state["validation_follows"] and progress.is_last_batch:
            loader_state.give_no_more_batches(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validates_again:
            loop_state.count_validation_once(trainer)
            self._validates_again = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._states_at_end = None
        if self._waits_for_batch:
            # The loaders have drawn from them to find their place.
            loader_state.load_generators(trainer, self._own.get("sources", []))
            self._waits_for_batch = False

    def _load_model(self, trainer: Trainer, pl_module: LightningModule, state: dict[str, Any]) -> None:
        if "metrics" in self._own:
            load_metric_states(pl_module, self._own["metrics"], state.get("steps", {}))
        if "frozen" in state:
            load_frozen(trainer, pl_module, state["frozen"], self._known)

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
            self._load_model(trainer, pl_module, self._loaded)
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
        "numbers, and metrics that go on, are not those of the uninterrupted run",
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


def _kept(value: Tensor) -> Tensor:
    return value.detach().clone().cpu()


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
            parameter.grad = saved[name].to(parameter.device, parameter.dtype, copy=True)
