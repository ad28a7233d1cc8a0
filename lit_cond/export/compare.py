"""How far two outputs of a model are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["default_tolerance", "largest_difference", "others_in", "structural_difference", "tensors_in"]

# In parts of the largest output: a thousand roundings of float32 and more of float64, whose graphs may hold some
# operations of less accuracy; a few roundings of the half types.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def default_tolerance(dtype: torch.dtype) -> float:
    """Return how far outputs of a model of this type may differ, in parts of the largest one."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a model takes or returns, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def others_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a model returns besides tensors, with the key or position of each."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(str(index), part) for index, part in enumerate(value)]
    else:
        if not isinstance(value, Tensor):
            yield name, value
        return
    for key, part in parts:
        yield from others_in(part, f"{name}.{key}" if name else key)


def structural_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """Return in words why outputs can not be compared as numbers, None if they can."""
    if len(expected) != len(found):
        return f"it returns {len(found)} tensors and the model {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.shape != b.shape:
            return f"output {number} has the shape {tuple(b.shape)} and the model's {tuple(a.shape)}"
        if a.is_floating_point() and b.is_floating_point() and not torch.equal(a.isfinite(), b.isfinite()):
            return f"output {number} holds NaN or infinities where the model's has none, or the other way round"
    return None


def largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference of outputs, in parts of the largest expected one.

    Args:
        expected: The outputs of the model.
        found: Those to compare with them.

    Returns:
        The difference; infinity where number, shapes, infinities or NaN of the outputs differ. Zeros are compared with
        one.
    """
    if len(expected) != len(found):
        return math.inf
    largest = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape:
            return math.inf
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        if not bool((same | (a.isfinite() & b.isfinite())).all()):
            return math.inf
        finite = a[a.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        difference = torch.where(same, 0, a - b).abs()
        largest = max(largest, float(difference.max()) / (scale or 1.0) if difference.numel() else 0.0)
    return largest
