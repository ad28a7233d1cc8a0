"""Telling the first call of a block from later ones on its own output, while the module around them runs."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Passes"]


class Passes:
    """Counts the calls of a block in each pass of a module around it.

    Args:
        name: Name of the module around.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.open = False
        self.entered = False

    def enter(self) -> bool:
        """Say whether the block was called before in this pass, and note this call."""
        before, self.entered = self.entered, True
        return before

    def follow(self, module: nn.Module) -> list[Any]:
        """Note when the module around runs from now on; return the handles of its hooks."""
        return [module.register_forward_pre_hook(_Open(self)), module.register_forward_hook(_Close(self))]


class _Open:
    """Forward pre-hook: a new pass begins."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.passes.open, self.passes.entered = True, False


class _Close:
    """Forward hook: the pass is over."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.passes.open = False
