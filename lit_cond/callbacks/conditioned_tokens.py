"""The callback that conditions the embedded tokens."""

import warnings
from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from typing_extensions import override

from lit_cond.callbacks.attach import ConditioningCallback
from lit_cond.errors import ConfigurationError, LitCondWarning
from lit_cond.surgery.rules import TokenRule
from lit_cond.surgery.tokens import TokenForward, token_forwards

__all__ = ["ConditionedTokens"]


class ConditionedTokens(ConditioningCallback):
    """Conditions the token matrix of each sample where it enters the first block of a tower: `X + strength * C(X)`.

    C is computed from X at every forward pass, in training and in evaluation, so it belongs to the model: it stays
    after `fit`, and its checkpoints refuse to load into a plain model. Load them with `lit_cond.load_checkpoint`.
    Padding is left out where the block gets a mask that says what is padding.

    Source: Saratchandran & Lucey, Conditioned Embedded Tokens, ICCV 2025.

    Args:
        correction: "exact": every singular value of X grows by `scale` (condition number at most 2 with scale
            "spectral"); it mixes all tokens and is refused for causal attention. "identity": the rectangular identity
            times `scale`.
        scale: Size of C: a number, or "spectral" for the largest singular value of X.
        strength: Multiplier of C, >= 0, dimensionless; a `StrengthSchedule` moves it.
        detach: Whether C is a constant for the backward pass.
        backend: How the exact correction is computed; "auto" takes the cheapest for the device.
        include: Names of the blocks whose input is corrected, as a regular expression matched in full or a list of
            names or dotted endings. When omitted, the first block of every tower in which embedded tokens enter:
            encoder and decoder, text and vision tower. A causal tower takes only `correction="identity"` with a numeric
            `scale`; name the others here to use more.
        channel_axis: Axis of the channels in the block's input; found when omitted.
        prefix_tokens: How many leading tokens (class token, registers) stay out of the token matrix and uncorrected;
            "auto" for as many learned ones as a forward pass shows before those of the input. Padding in front does
            not count. "identity" counts the tokens behind them from the first.

    Raises:
        ConfigurationError: If an argument can not be used.

    Example::

        Trainer(callbacks=[ConditionedTokens()])
    """

    rule: TokenRule

    def __init__(
        self,
        correction: Literal["exact", "identity"] = "exact",
        scale: float | Literal["spectral"] = "spectral",
        strength: float = 1.0,
        detach: bool = True,
        backend: Literal["auto", "gram", "svd", "products"] = "auto",
        include: str | list[str] | None = None,
        channel_axis: int | None = None,
        prefix_tokens: int | Literal["auto"] = 0,
    ) -> None:
        super().__init__(TokenRule(correction, scale, strength, detach, backend, include, channel_axis, prefix_tokens))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the module's methods.

        Raises:
            ConfigurationError: If an averaging callback copies the model before this one can change it.
        """
        before = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        averaging = next((c for c in before if isinstance(c, WeightAveraging)), None)
        if averaging is not None and stage == "fit":
            raise ConfigurationError(
                f"{type(averaging).__name__} stands before ConditionedTokens in the list of callbacks and would "
                "average a copy of the model without it; list ConditionedTokens first"
            )
        super().setup(trainer, pl_module, stage)

    @override
    def describe(self, pl_module: LightningModule) -> str:
        """Return which blocks get corrected tokens."""
        rule = self.rule
        head = f"ConditionedTokens: correction={rule.correction}, scale={rule.scale}, detach={rule.detach}"
        mine = [(n, f) for n, f in token_forwards(pl_module) if f.rule.settings() == rule.settings()]
        return "\n".join([head, *(f"  input of '{name}', {_spell(forward)}" for name, forward in mine)])

    def _say_if_plain(self, pl_module: LightningModule) -> None:
        if not any(token_forwards(pl_module)):
            warnings.warn(
                "ConditionedTokens changes nothing in this evaluation: the model was not trained with it and no "
                "checkpoint says otherwise",
                LitCondWarning,
                stacklevel=2,
            )

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._say_if_plain(pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._say_if_plain(pl_module)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._say_if_plain(pl_module)


def _spell(forward: TokenForward) -> str:
    behind = f", behind the first {forward.prefix} tokens" if forward.prefix else ""
    return f"{forward.width} channels{behind}"
