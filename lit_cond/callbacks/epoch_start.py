"""What an epoch that goes on needs from its beginning: Lightning does not begin it a second time."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_cond.errors import LitCondWarning

__all__ = ["begin_again", "frozen", "load_frozen"]

_HOOK = "on_train_epoch_start"
# They have a state of their own for this, or would train in between.
_LEFT_OUT = (BaseFinetuning, BackboneFinetuning, StochasticWeightAveraging, LearningRateFinder, BatchSizeFinder)


def begin_again(trainer: Trainer, pl_module: LightningModule) -> None:
    """Call `on_train_epoch_start` of callbacks and module for what they set there and no checkpoint holds.

    What the hooks change in weights, buffers, groups of optimizers and the states of callbacks is put back, since the
    checkpoint was written after them, and loggers hear nothing. Random numbers, metrics and what was logged must be put
    back by the caller.
    """
    called = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if is_overridden(_HOOK, callback, Callback) and not isinstance(callback, _LEFT_OUT)
    ]
    own = is_overridden(_HOOK, pl_module, LightningModule)
    if not (called or own):
        return
    tensors = [*pl_module.parameters(), *pl_module.buffers()]
    # On the CPU: a second copy may not fit beside the model.
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]
    states = [deepcopy(callback.state_dict()) for callback in called]
    loggers, fx = trainer.loggers, pl_module._current_fx_name
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        for callback in called:
            # Lightning says in this way from where `log` is called; there is no public one.
            pl_module._current_fx_name = _HOOK
            callback.on_train_epoch_start(trainer, pl_module)
        if own:
            pl_module._current_fx_name = _HOOK
            pl_module.on_train_epoch_start()
    finally:
        trainer.loggers, pl_module._current_fx_name = loggers, fx
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            if tensor.shape == value.shape:
                tensor.copy_(value)
    for optimizer, values in zip(trainer.optimizers, groups, strict=True):
        for group, settings in zip(optimizer.param_groups, values, strict=False):
            group.update(settings)
    for callback, state in zip(called, states, strict=True):
        if state:
            callback.load_state_dict(state)


def frozen(pl_module: LightningModule) -> dict[str, list[str]]:
    """Return the names of parameters that do not train, and of batch norms that gather no statistics."""
    return {
        "parameters": [name for name, parameter in pl_module.named_parameters() if not parameter.requires_grad],
        "statistics": [name for name, norm in _norms(pl_module).items() if not norm.track_running_stats],
    }


def load_frozen(trainer: Trainer, pl_module: LightningModule, saved: dict[str, list[str]], known: set[str]) -> None:
    """Freeze and unfreeze as it was.

    Args:
        trainer: The trainer.
        pl_module: Its module.
        saved: What `frozen` has returned.
        known: Names in the checkpoint; other parameters stay as they are.
    """
    still = set(saved["parameters"])
    changed = {
        name: parameter
        for name, parameter in pl_module.named_parameters()
        if name in known and parameter.requires_grad == (name in still)
    }
    for name, parameter in changed.items():
        parameter.requires_grad_(name not in still)
    for name, norm in _norms(pl_module).items():
        if norm.running_mean is not None:
            norm.track_running_stats = name not in saved["statistics"]
    if changed and not any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        rank_zero_warn(
            f"{len(changed)} parameters, {next(iter(changed))!r} the first, were frozen or unfrozen otherwise when the "
            "checkpoint was written, and are so again: to train others, load the weights and begin a new training",
            category=LitCondWarning,
        )


def _norms(pl_module: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in pl_module.named_modules() if isinstance(module, _BatchNorm)}
