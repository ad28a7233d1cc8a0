"""The strength of a token correction as an entry of the block's `state_dict`."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["STATE_KEY", "Named", "keep_in_state"]

STATE_KEY = "conditioned_tokens"


class HasStrength(Protocol):
    """What carries a strength: a tensor without axes."""

    strength: Tensor


class _SaveStrength:
    """State-dict hook: writes the strength under the block's prefix."""

    def __init__(self, target: HasStrength) -> None:
        self.target = target

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        state[prefix + STATE_KEY] = self.target.strength.detach().clone()


class _LoadStrength:
    """Load hook: takes the strength out of the incoming state, or reports it missing."""

    def __init__(self, target: HasStrength) -> None:
        self.target = target

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        value = state.pop(prefix + STATE_KEY, None)
        if value is not None:
            with torch.no_grad():
                self.target.strength.copy_(value)  # also of a tensor that Lightning has not read from the file yet
        elif strict:
            missing.append(prefix + STATE_KEY)


class Named:
    """Makes an entry of the state dict an attribute of the module, by which distributed checkpoints look it up.

    Args:
        module: The module.
        name: The name of the entry.
        target: The attribute's value.
    """

    def __init__(self, module: nn.Module, name: str, target: object) -> None:
        self.module = module
        self.name = name
        module.__dict__[name] = target

    def remove(self) -> None:
        """Take the attribute away."""
        self.module.__dict__.pop(self.name, None)


def keep_in_state(module: nn.Module, target: HasStrength) -> list[Any]:
    """Save and load a strength with a module; return the handles of the hooks."""
    return [
        Named(module, STATE_KEY, target),
        module.register_state_dict_post_hook(_SaveStrength(target)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_LoadStrength(target)),  # type: ignore[no-untyped-call]
    ]
