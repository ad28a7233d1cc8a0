"""Loading checkpoints of conditioned models."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule

from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery.checkpoint import RECORD_KEY, attach_record_, restore_tokens_
from lit_cond.surgery.weights import conditioned_weights

__all__ = ["load_checkpoint", "restore_corrections"]

M = TypeVar("M", bound=LightningModule)


def load_checkpoint(cls: type[M], path: str | Path, **kwargs: Any) -> M:
    """Load a checkpoint with everything it records: weights, corrected tokens, and the way back to raw weights.

    The model computes what it computed when it was saved. A `fit` with the callbacks that it was trained with goes on
    from the exact raw weights.

    Args:
        cls: The LightningModule class.
        path: The checkpoint; only tensors and plain values are unpickled unless `weights_only=False` is given.
        **kwargs: Arguments of `cls.load_from_checkpoint`, such as constructor arguments that were not saved.

    Raises:
        CheckpointMismatchError: If the checkpoint does not fit the class.
        RuntimeError: If names or shapes of weights differ.
    """
    weights_only = kwargs.get("weights_only", True)
    try:
        checkpoint = torch.load(path, map_location=kwargs.get("map_location", "cpu"), weights_only=weights_only)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointMismatchError(
            f"'{path}' holds more than tensors and plain values ({reason}); if you trust it, pass weights_only=False"
        ) from None
    with warnings.catch_warnings():
        # The first pass may not know corrected tokens; the second one is strict.
        warnings.filterwarnings("ignore", message="Found keys that are not in the model state dict")
        model = cls.load_from_checkpoint(path, **{**kwargs, "strict": False})
    record = checkpoint.get(RECORD_KEY, {})
    restore_tokens_(model, record, add=True)
    model.load_state_dict(checkpoint["state_dict"], strict=kwargs.get("strict", True))
    if not any(conditioned_weights(model)):
        attach_record_(model, record)
    return model


def restore_corrections(model: LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Give a model that is about to load a checkpoint the corrections that the checkpoint records.

    For `on_load_checkpoint` of a LightningModule: its `load_from_checkpoint` then computes what was saved.

    Args:
        model: The model, before its weights are loaded.
        checkpoint: The checkpoint.

    Raises:
        CheckpointMismatchError: If the model corrects tokens and the checkpoint does not.
    """
    record = checkpoint.get(RECORD_KEY, {})
    restore_tokens_(model, record, add=True)
    if "state_dict" in checkpoint and not any(conditioned_weights(model)):
        attach_record_(model, record)
