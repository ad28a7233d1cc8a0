"""The arguments of one forward pass, made or recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["Sample"]


@dataclass(frozen=True, eq=False)
class Sample:
    """What a module is called with.

    Args:
        args: Positional arguments.
        kwargs: Arguments by name.
        method: Name of the method to call instead of the module itself, as in `get_image_features`; None calls it.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None

    def run(self, module: nn.Module) -> Any:
        """Call the module and return what it returns."""
        function = module if self.method is None else getattr(module, self.method)
        return function(*self.args, **self.kwargs)
