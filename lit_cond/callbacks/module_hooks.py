"""The methods of a LightningModule that a conditioning callback wraps.

Order of Lightning 2.6: `Callback.setup`, the module's `setup` and `configure_model`, its `on_load_checkpoint`, the
load of the weights, `configure_optimizers`, `Callback.on_fit_start`, training, `Callback.teardown`; strategies that
shard load after `on_fit_start`. No callback hook lies between the building of the model and the load of its weights,
and none can change a saved state dict last; so the callback's `setup` wraps three methods of the module on the
instance: `configure_model` (once, to condition what was built), `on_save_checkpoint` and `on_load_checkpoint` (to
convert between raw and effective weights).
"""

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.checkpoint import RECORD_KEY, raw_state, read_record, restore_tokens_, to_effective, to_raw_
from lit_cond.surgery.sharding import whole_parameters
from lit_cond.surgery.weight_state import Marking
from lit_cond.surgery.weights import conditioned_weights, mark_

__all__ = [
    "ConfigureModel",
    "LoadCheckpoint",
    "SaveCheckpoint",
    "end_loading",
    "outermost",
    "restores_after_setup",
]


class Wrapped:
    """An instance-level stand-in for one method of a LightningModule; travels with deepcopy and pickle."""

    method: str

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get(self.method)
        module.__dict__[self.method] = self

    @property
    def __code__(self) -> CodeType:
        # Lightning tells overridden methods by comparing code objects.
        return type(self).__call__.__code__

    def __call__(self, *args: Any) -> None:
        self.call_inner(*args)

    def call_inner(self, *args: Any) -> None:
        if self.inner is not None:
            self.inner(*args)
        else:
            getattr(type(self.module), self.method)(self.module, *args)

    def uninstall(self) -> None:
        if self.module.__dict__.get(self.method) is self:
            if self.inner is None:
                del self.module.__dict__[self.method]
            else:
                self.module.__dict__[self.method] = self.inner


class ConfigureModel(Wrapped):
    """Builds the model as its author wrote it, then conditions it, once."""

    method = "configure_model"

    def __init__(self, module: LightningModule, condition: Callable[[LightningModule], None]) -> None:
        super().__init__(module)
        self.condition = condition

    def __call__(self) -> None:
        """Build and condition."""
        self.uninstall()
        self.call_inner()
        # Lightning builds models under its own default device and dtype; what is made here is no part of the model.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                self.condition(self.module)
        finally:
            torch.set_default_dtype(default)


class SaveCheckpoint(Wrapped):
    """Writes effective weights under plain names and the record that undoes them."""

    method = "on_save_checkpoint"

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        """Convert what was collected, after the module's own hook.

        Raises:
            ConfigurationError: If the strategy has collected no weights.
        """
        self.call_inner(checkpoint)
        if "state_dict" not in checkpoint:
            raise ConfigurationError(
                "the strategy writes the weights on its own, which would store uncorrected weights in silence; use "
                "another strategy with conditioning callbacks"
            )
        # Lightning's averaging callbacks put the average into the state dict and the model's own state beside it.
        current = checkpoint.get("current_model_state")
        if current is not None:
            checkpoint["current_model_state"] = raw_state(self.module, current)
        baked = any(weight.baked for _, weight in conditioned_weights(self.module))
        with whole_parameters(outermost(self.module) if baked else None):
            checkpoint["state_dict"], record = to_effective(
                self.module,
                checkpoint["state_dict"],
                resumable="optimizer_states" in checkpoint,
                averaged=current is not None,
            )
        if record["weights"] or record["tokens"]:
            checkpoint[RECORD_KEY] = record
        load = self.module.__dict__.get("on_load_checkpoint")
        if isinstance(load, LoadCheckpoint):
            load.saved = True


class LoadCheckpoint(Wrapped):
    """Turns a checkpoint into what the conditioned model loads, before Lightning loads it."""

    method = "on_load_checkpoint"

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        self.fitting = False
        self.loading = False
        self.loaded = False
        self.saved = False

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        """Convert what is about to be loaded."""
        # First the module's own hook, which may rename what the checkpoint holds.
        self.call_inner(checkpoint)
        # An evaluation takes the corrections of tokens from the checkpoint; a fit takes them from its callbacks.
        restore_tokens_(self.module, read_record(checkpoint), add=not self.fitting)
        # Without weights in the checkpoint, the strategy has loaded them already: into the parameters.
        loaded = "state_dict" not in checkpoint
        with whole_parameters(outermost(self.module) if loaded else None, writeback=True):
            to_raw_(self.module, checkpoint)
        # The finders of learning rates and batch sizes save this very model, try, and load it again.
        self.loaded = self.loaded or not self.saved
        self.expect()

    def expect(self, marking: Marking = "lenient") -> None:
        """Let the model take raw weights from a state that does not say so, until `done`."""
        self.loading = True
        mark_(self.module, marking)

    def done(self) -> None:
        """Let a state that is loaded say again that its weights are raw."""
        if self.loading:
            self.loading = False
            mark_(self.module, "strict")


def outermost(module: LightningModule) -> nn.Module | None:
    """Return what the strategy has made of a module: the module itself, or a wrapper around it."""
    try:
        return module.trainer.model
    except RuntimeError:
        return None  # no Trainer: `load_from_checkpoint`


def restores_after_setup(module: LightningModule) -> bool:
    """Say whether the strategy looks up in a checkpoint what the state of the model, already conditioned, has."""
    try:
        return bool(module.trainer.strategy.restore_checkpoint_after_setup)
    except RuntimeError:
        return False


def end_loading(module: LightningModule) -> None:
    """Let states that are loaded say again whether their weights are raw: what a checkpoint holds is in place."""
    load = module.__dict__.get("on_load_checkpoint")
    if isinstance(load, LoadCheckpoint):
        load.done()
