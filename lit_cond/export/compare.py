"""How far two outputs of a model are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["default_tolerance", "largest_difference", "tensors_in"]

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
