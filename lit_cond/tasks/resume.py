"""What a fit that goes on from a checkpoint must still have: the corrections that the checkpoint was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lit_cond.errors import CheckpointMismatchError, LitCondWarning
from lit_cond.surgery.checkpoint import read_record
from lit_cond.surgery.sites import clean_name
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights

__all__ = ["goes_on", "refuse_lost_tokens", "warn_of_lost_weights"]


def goes_on(model: LightningModule) -> bool:
    """Say whether a checkpoint is being loaded for training, not for an evaluation or by `load_from_checkpoint`."""
    try:
        return model.trainer.state.fn == TrainerFn.FITTING
    except RuntimeError:  # no Trainer
        return False


def refuse_lost_tokens(model: LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Refuse to train a model that lacks a correction of tokens: it would be another function.

    Args:
        model: The model, before the checkpoint is loaded.
        checkpoint: The checkpoint.

    Raises:
        CheckpointMismatchError: If the checkpoint corrects tokens at a block where the model does not.
    """
    present = {clean_name(name) for name, _ in token_forwards(model)}
    for name, entry in read_record(checkpoint)["tokens"].items():
        if clean_name(str(name)) not in present:
            rule = entry["rule"] if isinstance(entry, Mapping) and isinstance(entry.get("rule"), Mapping) else {}
            raise CheckpointMismatchError(
                f"the checkpoint was made with corrected tokens at '{name}', and this run has no ConditionedTokens for "
                f"them: add ConditionedTokens(correction={rule.get('correction')!r}, scale={rule.get('scale')!r}) to "
                "the callbacks (on the command line leave out `--tokens null`), or begin a new run without ckpt_path"
            )


def warn_of_lost_weights(model: LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Warn where the checkpoint corrects weights that this run does not correct.

    Args:
        model: The model.
        checkpoint: The checkpoint.
    """
    present = {clean_name(name) for name, _ in conditioned_weights(model)}
    lost = [name for name in read_record(checkpoint)["weights"] if clean_name(str(name)) not in present]
    if lost:
        rank_zero_warn(
            f"the checkpoint was made with a correction of {len(lost)} weights ('{lost[0]}', ...) that this run does "
            "not correct: they go on as plain parameters from their effective values; to go on with the correction, "
            "give SpectralConditioning as it was (on the command line leave out `--conditioning null`)",
            category=LitCondWarning,
        )
