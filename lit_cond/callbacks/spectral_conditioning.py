"""The callback that conditions query, key and value weights."""

import math
import warnings
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lit_cond.callbacks.attach import ConditioningCallback
from lit_cond.errors import AlreadyConditionedError, ConfigurationError, LitCondWarning
from lit_cond.functional.attention import predicted_attention_entropy
from lit_cond.surgery.apply import effective_matrix, refresh_, targeted_sites, uncondition_
from lit_cond.surgery.report import WeightReport, format_table, is_plain, measure_weights, well_conditioned
from lit_cond.surgery.rounding import rounded_away
from lit_cond.surgery.rules import WeightRule
from lit_cond.surgery.sharding import whole_parameters
from lit_cond.surgery.survey import survey_attention
from lit_cond.surgery.table import format_remarks

__all__ = ["SpectralConditioning"]

# Below this part of the entropy of uniform attention the softmax hardly looks beyond one token.
_COLLAPSED = 0.25
_PROBE_TOKENS = 64
# Rounding leaves some entries as they were in any 16-bit weight; from here on the correction is another one.
_LOST = 0.1


class SpectralConditioning(ConditioningCallback):
    """Conditions the query, key and value weights of attention.

    The forward pass reads `W + strength * C`, and W is trained.
    C is computed once, when `fit` starts. Checkpoints, and the model when `fit` has ended, hold the effective weight
    under its plain name, so a plain model loads them and computes the same; resuming is exact. While `fit` runs, the
    module's own `state_dict` holds the raw weight and an entry that says so, by which a strict load into a plain model
    fails; `lit_cond.effective_state_dict(module)` gives the effective one.

    Source: Saratchandran & Lucey, Spectral Conditioning of Attention, NeurIPS 2025.

    Args:
        correction: "spectral": every singular value of W grows by `scale` (Theorem 3.5: condition number at most 2 with
            scale "spectral"). "identity": the rectangular identity times `scale`, the paper's practical variant (its
            scale is 10, at which the softmax is saturated at initialisation; you are warned).
        scale: Size of C: a number, or "spectral" for the largest singular value of W.
        strength: Multiplier of C, >= 0, dimensionless; a `StrengthSchedule` moves it.
        granularity: One C for the whole matrix or one for each head's rows.
        roles: Which of query, key and value to correct; all when omitted.
        include: Which attention layers: a regular expression matched in full, or a list of names or dotted endings; all
            when omitted.
        exclude: Which attention layers to leave out.
        layers: Which attention layers by position, from 0; negative ones count from the end; all when omitted.
        kinds: Which kinds of attention ("self", "cross", "channel", "latent", "approximate"); all when omitted.
        refresh_every_n_steps: Compute C anew from the current W every so many optimizer steps; never when omitted.
        allow_conditioned: Go on although the weights look conditioned already.

    Raises:
        ConfigurationError: If an argument can not be used.

    Example::

        Trainer(callbacks=[SpectralConditioning()])
    """

    rule: WeightRule

    def __init__(
        self,
        correction: Literal["spectral", "identity"] = "spectral",
        scale: float | Literal["spectral"] = "spectral",
        strength: float = 1.0,
        granularity: Literal["matrix", "head"] = "matrix",
        roles: list[Literal["query", "key", "value"]] | None = None,
        include: str | list[str] | None = None,
        exclude: str | list[str] | None = None,
        layers: list[int] | None = None,
        kinds: list[Literal["self", "cross", "channel", "latent", "approximate"]] | None = None,
        refresh_every_n_steps: int | None = None,
        allow_conditioned: bool = False,
    ) -> None:
        super().__init__(WeightRule(correction, scale, strength, granularity, roles, include, exclude, layers, kinds))
        if refresh_every_n_steps is not None and refresh_every_n_steps < 1:
            raise ConfigurationError(f"`refresh_every_n_steps` must be >= 1 or omitted, got {refresh_every_n_steps}")
        self.refresh_every_n_steps = refresh_every_n_steps
        self.allow_conditioned = allow_conditioned
        self._refreshed_at = 0
        self._reports: list[WeightReport] | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse weights that carry a correction already, warn of a saturated softmax, show what was done.

        Raises:
            AlreadyConditionedError: If the raw weights are better conditioned than chance allows.
        """
        try:
            if self._fresh and not self.was_loaded(pl_module):
                with whole_parameters(trainer.model):
                    self._reports = self._measure(pl_module)
                self._refuse_conditioned(pl_module, self._reports)
            super().on_fit_start(trainer, pl_module)
        finally:
            self._reports = None
        if self._fresh:
            with whole_parameters(trainer.model):
                self._warn_if_saturated(pl_module)
                self._warn_if_rounded_away(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the rhythm of refreshes where the training begins or goes on."""
        super().on_train_start(trainer, pl_module)
        self._refreshed_at = max(trainer.global_step - 1, 0)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Compute the corrections anew where the interval asks for it."""
        step, every = trainer.global_step, self.refresh_every_n_steps
        if every is not None and step // every != self._refreshed_at // every:
            with whole_parameters(trainer.model):
                refresh_(pl_module, self.rule)
            self._refreshed_at = step

    @override
    def describe(self, pl_module: LightningModule) -> str:
        """Return the table of the query, key and value weights: changed or left alone and why, condition numbers."""
        rule = self.rule
        head = f"SpectralConditioning: correction={rule.correction}, scale={rule.scale}, granularity={rule.granularity}"
        reports = self._reports or self._measure(pl_module)
        selected = {site.name for site in targeted_sites(pl_module, rule)}
        reasons = {r.name: "not in roles" if r.name in selected else "not selected" for r in reports}
        remarks = format_remarks(survey_attention(pl_module), roles=True)
        return "\n".join([head, format_table(reports, reasons), *(["", *remarks] if remarks else [])])

    def _measure(self, pl_module: LightningModule) -> list[WeightReport]:
        """Measure the selected layers, and all others that can be measured."""
        selected = {site.name for site in targeted_sites(pl_module, self.rule)}
        sites = [s for s in survey_attention(pl_module).sites if s.name in selected or is_plain(s)]
        return measure_weights(pl_module, sites=sites)

    def _refuse_conditioned(self, pl_module: LightningModule, reports: list[WeightReport]) -> None:
        rule = self.rule
        names = {site.name for site in targeted_sites(pl_module, rule)}
        median = well_conditioned(r for r in reports if r.name in names and r.role in (rule.roles or ()))
        if median is None or self.allow_conditioned:
            return
        uncondition_(pl_module, rule)
        raise AlreadyConditionedError(
            f"the weights are well conditioned before any correction (median condition number {median:.3g}): a "
            "conditioned checkpoint loaded as a plain one? Resume with fit(ckpt_path=...) or "
            "lit_cond.load_checkpoint, or set allow_conditioned=True to correct them all the same"
        )

    def _warn_if_rounded_away(self, pl_module: LightningModule) -> None:
        lost, total = rounded_away(pl_module, self.rule)
        if total and lost / total > _LOST:
            warnings.warn(
                f"{lost / total:.0%} of the {total} corrected entries stay as they were: the correction is smaller "
                "than what the dtype of the weights can hold; raise `scale` or `strength`, or use "
                "precision='bf16-mixed' or '16-mixed', which keep float32 weights",
                LitCondWarning,
                stacklevel=2,
            )

    def _warn_if_saturated(self, pl_module: LightningModule) -> None:
        parts = []
        for site in targeted_sites(pl_module, self.rule):
            views = [site.matrix_view(role) for role in ("query", "key")]
            if site.kind != "self" or not site.num_heads or None in views:
                continue
            query, key = (effective_matrix(view).float() for view in views if view is not None)
            entropy = predicted_attention_entropy(query, key, site.num_heads, num_tokens=_PROBE_TOKENS)
            parts.append(entropy / math.log(_PROBE_TOKENS))
        if parts and min(parts) < _COLLAPSED:
            warnings.warn(
                f"the softmax will be saturated: predicted attention entropy {min(parts):.2f} of uniform at "
                "initialisation (LayerNorm'd Gaussian tokens); lower `scale` or `strength`, or ramp it up with "
                "StrengthSchedule",
                LitCondWarning,
                stacklevel=2,
            )
