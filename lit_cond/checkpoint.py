"""Loading checkpoints of conditioned models."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from torch import nn

from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery.checkpoint import attach_record_, read_record, restore_tokens_
from lit_cond.surgery.strength_state import STATE_KEY
from lit_cond.surgery.weight_state import SUFFIX
from lit_cond.surgery.weights import conditioned_weights

__all__ = ["load_checkpoint", "load_weights_", "restore_corrections", "state_mismatch"]

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
        CheckpointFileError: If the file is no checkpoint that can be read.
        CheckpointMismatchError: If the checkpoint does not fit the class; names of weights that differ are given.
    """
    weights_only = kwargs.get("weights_only") is not False
    checkpoint = read_checkpoint(path, weights_only=weights_only, map_location=kwargs.get("map_location") or "cpu")
    read_record(checkpoint)  # a damaged one is told before a model is built
    if "weights_only" in inspect.signature(cls.load_from_checkpoint).parameters:
        kwargs["weights_only"] = weights_only  # Lightning unpickles what a URL gives without restrictions
    with _mismatches_named(), warnings.catch_warnings():
        if kwargs.get("strict") is not False:
            # The first pass may not know corrected tokens; the second one is strict.
            warnings.filterwarnings("ignore", message="Found keys that are")
        model = cls.load_from_checkpoint(path, **{**kwargs, "strict": False})
    load_weights_(model, checkpoint, strict=kwargs.get("strict") is not False)
    return model


def load_weights_(model: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a checkpoint into a model that is built, with everything that the checkpoint records.

    Args:
        model: The model, with the names that the checkpoint has.
        checkpoint: What `read_checkpoint` returns.
        strict: Whether every weight must be there.

    Raises:
        CheckpointMismatchError: If the checkpoint does not fit the model; names of weights that differ are given.
    """
    restore_tokens_(model, read_record(checkpoint), add=True)
    with _mismatches_named():
        model.load_state_dict(checkpoint["state_dict"], strict=strict)
    if not any(conditioned_weights(model)):
        attach_record_(model, checkpoint)


@contextmanager
def _mismatches_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        mismatch = state_mismatch(error)
        if mismatch is None:
            raise
        raise mismatch from error


def state_mismatch(error: BaseException) -> CheckpointMismatchError | None:
    """Return one line for the page in which `load_state_dict` lists what does not fit.

    Args:
        error: Any error.

    Returns:
        The error to raise instead; None for an error of another kind.
    """
    text = str(error)
    head = re.match(r"Error\(s\) in loading state_dict for (\S+):\n", text)
    if head is None or not isinstance(error, RuntimeError) or isinstance(error, CheckpointMismatchError):
        return None
    missing, unexpected = (
        re.findall(r'"([^"]+)"', found[1])
        if (found := re.search(rf"{kind} key\(s\) in state_dict: (.+)", text))
        else []
        for kind in ("Missing", "Unexpected")
    )
    shapes = re.findall(r"size mismatch for (\S+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)", text)
    parts = [
        f"{_some(names)} {verb}"
        for names, verb in ((missing, "missing in the checkpoint"), (unexpected, "unknown to the model"))
        if names
    ]
    if shapes:
        name, saved, own = shapes[0]
        more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        parts.append(f"shapes differ: '{name}' ({saved} in the checkpoint, {own} in the model){more}")
    advice = "build the model with the arguments that it was trained with, or give its own checkpoint"
    if unexpected and all(name.rpartition(".")[2] == STATE_KEY for name in unexpected):
        advice = "its tokens were corrected: load it with lit_cond.load_checkpoint"
    elif any(name.endswith(SUFFIX) for name in missing):
        advice = "the model corrects weights already: call lit_cond.uncondition_ on it first, or correct it afterwards"
    elif any(name.endswith(SUFFIX) for name in unexpected):
        advice = (
            "its weights were saved without their correction: save lit_cond.effective_state_dict(model), or train with "
            "the callback SpectralConditioning, which does"
        )
    reason = "; ".join(parts) or " ".join(text[head.end() :].split())
    return CheckpointMismatchError(f"the checkpoint does not fit {head[1]}: {reason}; {advice}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"'{names[0]}'{more}"


def restore_corrections(model: LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Give a model that is about to load a checkpoint the corrections that the checkpoint records.

    For `on_load_checkpoint` of a LightningModule: its `load_from_checkpoint` then computes what was saved.

    Args:
        model: The model, before its weights are loaded.
        checkpoint: The checkpoint.

    Raises:
        CheckpointMismatchError: If the model corrects tokens and the checkpoint does not.
    """
    restore_tokens_(model, read_record(checkpoint), add=True)
    if "state_dict" in checkpoint and not any(conditioned_weights(model)):
        attach_record_(model, checkpoint)
