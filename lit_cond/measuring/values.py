"""Nested arguments of modules, and leaving random numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["mapped", "random_numbers_kept", "where_decomposed"]

# Many small decompositions are far slower on a GPU than on a CPU (PyTorch issues 41306, 86234).
_SMALL = 1024


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


def where_decomposed(tensor: Tensor) -> Tensor:
    """Return a tensor where its decomposition is fast: small matrices on the CPU, large ones where they are."""
    return tensor.cpu() if max(tensor.shape[-2:], default=0) <= _SMALL else tensor


def random_numbers_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context that gives back the random numbers of the CPU and of the devices of tensors."""
    devices = {t.device for t in tensors if t.device.type == "cuda" and t.device.index is not None}
    return torch.random.fork_rng(devices=list(devices))
