"""Nested arguments of modules, and leaving random numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["mapped", "random_numbers_kept"]


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a value with a function applied to the tensors in its lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    return value


def random_numbers_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context that gives back the random numbers of the CPU and of the devices of tensors."""
    devices = {t.device for t in tensors if t.device.type == "cuda" and t.device.index is not None}
    return torch.random.fork_rng(devices=list(devices))
