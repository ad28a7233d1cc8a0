"""The base of the callbacks that condition a model; `module_hooks` has the order of Lightning's hooks."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lit_cond.callbacks.charts import log_text
from lit_cond.callbacks.confirm import FirstBatch
from lit_cond.callbacks.module_hooks import (
    ConfigureModel,
    LoadCheckpoint,
    SaveCheckpoint,
    end_loading,
    outermost,
    restores_after_setup,
)
from lit_cond.callbacks.reduction import await_end_of_epoch, refuse_unequal_batches
from lit_cond.callbacks.strength_schedule import StrengthSchedule
from lit_cond.errors import ConfigurationError, LitCondWarning, LostTargetError
from lit_cond.surgery.apply import (
    bake_,
    condition_,
    set_strength_,
    strengths,
    targeted_sites,
    unbake_,
    uncondition_,
)
from lit_cond.surgery.rules import Rule, WeightRule
from lit_cond.surgery.saving import guard_saving
from lit_cond.surgery.sharding import is_flat_sharded, whole_parameters
from lit_cond.surgery.sites import clean_name
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights, is_attached

__all__ = ["ConditioningCallback"]


class ConditioningCallback(Callback):
    """Base of the callbacks that condition a model at the start of `fit` and leave effective weights at its end.

    Args:
        rule: What to do to the model.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._fresh = False
        self._names: list[str] = []
        self._first_batch: FirstBatch | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the module's methods; nothing is conditioned before the model is built.

        Raises:
            ConfigurationError: If another callback of the same class has the same settings, or the strategy can not
            work.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        twins = [c for c in callbacks if isinstance(c, type(self)) and c.rule.settings() == self.rule.settings()]
        if len(twins) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} with the settings {self.rule.settings()} is in the list of callbacks twice; "
                "remove one"
            )
        # By name: deepspeed itself, and the class of Lightning's other package, may not be there.
        if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
            raise ConfigurationError(
                f"{type(self).__name__} does not work with DeepSpeed: its engine writes and reads weights past the "
                "hooks that put corrected ones into a checkpoint; use strategy='fsdp', ModelParallelStrategy or 'ddp'"
            )
        if not isinstance(pl_module.__dict__.get("on_save_checkpoint"), SaveCheckpoint):
            SaveCheckpoint(pl_module)
        load = pl_module.__dict__.get("on_load_checkpoint")
        if not isinstance(load, LoadCheckpoint):
            load = LoadCheckpoint(pl_module)
        load.fitting, load.loaded, load.saved = stage == "fit", False, False
        self._fresh = False
        if stage == "fit":
            ConfigureModel(pl_module, self.condition)

    def condition(self, pl_module: LightningModule) -> None:
        """Condition a model that was just built, or take up where an earlier fit ended.

        Raises:
            AlreadyConditionedError: If the model carries corrections of other settings.
        """
        if isinstance(self.rule, WeightRule):
            with whole_parameters(outermost(pl_module), writeback=True):
                unbake_(pl_module, self.rule)
        self._fresh = not self.present(pl_module)
        if self._fresh and is_flat_sharded(pl_module):
            raise ConfigurationError(
                "the model is wrapped in FullyShardedDataParallel before it is conditioned; let the strategy wrap it "
                "afterwards: FSDPStrategy(auto_wrap_policy=...)"
            )
        if self._fresh:
            condition_(pl_module, self.rule)
        # Adapters may have been put around a model that was conditioned before.
        guard_saving(pl_module)
        self._names = self.present(pl_module)
        load = pl_module.__dict__.get("on_load_checkpoint")
        if isinstance(load, LoadCheckpoint):
            load.expect("hidden" if restores_after_setup(pl_module) else "lenient")

    def present(self, pl_module: LightningModule) -> list[str]:
        """Return the names of what carries this callback's rule, without the parts that wrappers put in."""
        settings = self.rule.settings()
        weights = [n for n, w in conditioned_weights(pl_module) if any(t.rule.settings() == settings for t in w.terms)]
        tokens = [n for n, forward in token_forwards(pl_module) if forward.rule.settings() == settings]
        return [clean_name(name) for name in weights + tokens]

    def was_loaded(self, pl_module: LightningModule) -> bool:
        """Say whether this stage has loaded a checkpoint that it has not saved itself."""
        load = pl_module.__dict__.get("on_load_checkpoint")
        return isinstance(load, LoadCheckpoint) and load.loaded

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the corrections are still in place and show what was done.

        Raises:
            LostTargetError: If a conditioned module was replaced on the way (by a precision plugin, say).
            ConfigurationError: If a callback prunes a conditioned weight.
        """
        self._refuse_pruning(trainer, pl_module)
        lost = sorted(set(self._names) - set(self.present(pl_module))) or [
            name
            for name, weight in conditioned_weights(pl_module)
            if not (weight.baked or is_attached(weight, pl_module))
        ]
        if lost or not self._names:
            raise LostTargetError(
                f"the correction of '{(lost or ['the model'])[0]}' was lost between setup and fit: the module was "
                "replaced by the strategy, the precision plugin or another callback"
            )
        for _, weight in conditioned_weights(pl_module):
            for term in weight.terms:
                term.to_(weight.parameter.device)
        for _, forward in token_forwards(pl_module):
            forward.to_(pl_module.device)
        with whole_parameters(trainer.model):
            text = self.describe(pl_module)
        rank_zero_info(text)
        log_text(trainer, f"lit_cond/{type(self).__name__}", text)

    def _refuse_pruning(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to correct weights whose zeros the correction would fill."""
        pruned = {
            (module, name)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, ModelPruning)
            for module, name in callback._parameters_to_prune  # Lightning 2.6 has no public way to ask
        }
        for name, weight in conditioned_weights(pl_module):
            if (weight.owner, weight.tensor_name) in pruned:
                raise ConfigurationError(
                    f"ModelPruning prunes '{name}', and the correction would fill its zeros again; give it "
                    "`parameters_to_prune` without that weight, or leave the layer out of the correction with `exclude`"
                )

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end_loading(pl_module)
        self._use_own_strength(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take this callback's strength, and prepare to confirm what no forward pass has shown.

        Raises:
            ConfigurationError: If the processes have different numbers of batches.
        """
        refuse_unequal_batches(trainer)
        end_loading(pl_module)
        self._use_own_strength(trainer, pl_module)
        with whole_parameters(trainer.model):
            untraced = [site for site in targeted_sites(pl_module, self.rule) if not site.traced]
        if untraced and is_flat_sharded(trainer.model or pl_module):
            rank_zero_info("attention: not confirmed at the first batch, its weights are sharded")
            untraced = []
        self._first_batch = FirstBatch(pl_module, untraced) if untraced else None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Confirm what was found without running the model.

        Raises:
            UnknownAttentionError: If the model computes something else.
        """
        end_loading(pl_module)  # a learning rate finder may have loaded in the middle of training
        if self._first_batch is not None:
            first_batch, self._first_batch = self._first_batch, None
            with trainer.precision_plugin.forward_context():
                first_batch.confirm()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the other processes where the numbers of their batches are not known."""
        await_end_of_epoch(trainer)

    def _use_own_strength(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Use this callback's strength, not that of a checkpoint or an earlier fit, unless a schedule moves it."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        kind = "weights" if isinstance(self.rule, WeightRule) else "tokens"
        if any(isinstance(c, StrengthSchedule) and c.applies_to in ("all", kind) for c in callbacks):
            return
        own = self.rule.strength
        # Strengths are held in float32.
        saved = {value for value in strengths(pl_module, self.rule) if not math.isclose(value, own, rel_tol=1e-6)}
        if saved:
            set_strength_(pl_module, own, self.rule)
            before = ", ".join(f"{value:g}" for value in sorted(saved))
            rank_zero_warn(
                f"{type(self).__name__} was at strength {before} and goes on with {own:g}",
                category=LitCondWarning,
            )

    def _forget_first_batch(self) -> None:
        if self._first_batch is not None:
            self._first_batch.close()
            self._first_batch = None

    def describe(self, pl_module: LightningModule) -> str:
        """Return a table of what this callback has changed and left alone, and why; also logged as a text."""
        raise NotImplementedError

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave effective weights in the parameters when `fit` has ended."""
        self._fresh = False
        self._forget_first_batch()
        end_loading(pl_module)
        if stage == "fit":
            self._bake(pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave effective weights in the parameters when `fit` was interrupted."""
        self._forget_first_batch()
        configure = pl_module.__dict__.get("configure_model")
        while isinstance(configure, ConfigureModel):
            configure.uninstall()
            configure = pl_module.__dict__.get("configure_model")
        if self._fresh and trainer.global_step == 0:
            # Nothing was trained: leave the model as it came.
            uncondition_(pl_module, self.rule)
        self._fresh = False
        if not is_flat_sharded(outermost(pl_module) or pl_module):
            # There it takes all processes, of which some may not be here.
            self._bake(pl_module)

    def _bake(self, pl_module: LightningModule) -> None:
        live = any(not weight.baked for _, weight in conditioned_weights(pl_module))
        with whole_parameters(outermost(pl_module) if live else None, writeback=True):
            bake_(pl_module)
