"""Hugging Face's `save_pretrained` on a conditioned model: effective weights, or a refusal.

`from_pretrained` takes what it is given: an entry that it does not know is reported and ignored, so a folder of a model
with corrected tokens would load and compute something else. And a model in training holds raw weights.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from lit_cond.errors import CheckpointMismatchError
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weight_state import SUFFIX, without_marks
from lit_cond.surgery.weights import conditioned_weights

__all__ = ["guard_saving", "release_saving"]

_METHOD = "save_pretrained"


class _SavePretrained:
    """An instance-level stand-in for `save_pretrained`; travels with deepcopy and pickle."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, _ in token_forwards(self.module):
            raise CheckpointMismatchError(
                f"save_pretrained can not store that the tokens at '{name}' are corrected, and from_pretrained would "
                "compute something else without an error; save with torch.save(model.state_dict()), or take the "
                "correction back with lit_cond.uncondition_"
            )
        corrected = next(conditioned_weights(self.module), None)
        if corrected is not None and any(kind.__name__ == "PeftModel" for kind in type(self.module).__mro__):
            raise CheckpointMismatchError(
                "save_pretrained of a PeftModel stores its adapters only, and they were trained with the correction of "
                f"'{corrected[0]}' in the base model; save what model.merge_and_unload() returns"
            )
        raw = next((name for name in kwargs.get("state_dict") or () if name.endswith(SUFFIX)), None)
        if raw is not None:
            raise CheckpointMismatchError(
                f"the state_dict given to save_pretrained holds '{raw.removesuffix(SUFFIX)}' without its correction, "
                "and from_pretrained would compute something else without an error; leave state_dict out, or give "
                "lit_cond.effective_state_dict(model)"
            )
        method = getattr(type(self.module), _METHOD)
        live = [(name, weight) for name, weight in conditioned_weights(self.module) if not weight.baked]
        if live and kwargs.get("state_dict") is None and "state_dict" in inspect.signature(method).parameters:
            state = self.module.state_dict()
            state.update({name: weight.current_effective for name, weight in live})
            without_marks(state, [name for name, _ in live])
            kwargs["state_dict"] = state
        return method(self.module, *args, **kwargs)


def guard_saving(model: nn.Module) -> None:
    """Let what a conditioned model saves by `save_pretrained` compute what the model computes.

    Args:
        model: A model that was just conditioned; it may hold or be a model of transformers, or know nothing of it.
    """
    for module in model.modules():
        if hasattr(type(module), _METHOD) and _METHOD not in module.__dict__ and _is_conditioned(module):
            module.__dict__[_METHOD] = _SavePretrained(module)


def release_saving(model: nn.Module) -> None:
    """Take away what `guard_saving` has put on modules without corrections."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_METHOD), _SavePretrained) and not _is_conditioned(module):
            del module.__dict__[_METHOD]


def _is_conditioned(module: nn.Module) -> bool:
    return any(conditioned_weights(module)) or any(token_forwards(module))
