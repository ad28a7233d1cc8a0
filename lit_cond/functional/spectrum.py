"""Ranks of matrices, graded and counted, from their singular values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_cond.functional.condition_number import singular_tolerance

__all__ = ["effective_rank", "numerical_rank", "stable_rank"]


def stable_rank(values: Tensor) -> Tensor:
    """Return ``||A||_F^2 / sigma_max^2``, at most the rank and hardly moved by small singular values.

    See Rudelson and Vershynin, *Sampling from large matrices* (2007).

    Args:
        values: Singular values of shape (..., k), in any order.

    Returns:
        Tensor of shape (...) in float64: between 1 and k, 0 for a zero matrix, NaN if a value is not finite or there is
        none.
    """
    ratios, zero, known = _ratios(values)
    return torch.where(known, torch.where(zero, 0, ratios.square().sum(dim=-1)), math.nan)


def effective_rank(values: Tensor) -> Tensor:
    """Return ``exp(-sum p log p)`` of ``p = sigma / sum(sigma)``: the number of equal values of the same entropy.

    See Roy and Vetterli, *The effective rank* (EUSIPCO 2007).

    Args:
        values: Singular values of shape (..., k), in any order.

    Returns:
        Tensor of shape (...) in float64: between 1 and k, 0 for a zero matrix, NaN if a value is not finite or there is
        none.
    """
    ratios, zero, known = _ratios(values)
    p = ratios / torch.where(zero, 1, ratios.sum(dim=-1)).unsqueeze(-1)
    # Rounding must not lower a rank of one below one.
    rank = torch.special.entr(p).sum(dim=-1).clamp_min(0).exp()
    return torch.where(known, torch.where(zero, 0, rank), math.nan)


def numerical_rank(values: Tensor, shape: Sequence[int], dtype: torch.dtype, rtol: float | None = None) -> Tensor:
    """Return how many singular values count, by the rule by which `condition_number` calls a matrix singular.

    A value counts if it exceeds ``rtol * sigma_max``; so the rank is full exactly where the condition number is finite.

    Args:
        values: Singular values of shape (..., k), in any order.
        shape: Shape of the matrices, (..., m, n).
        dtype: Type in which the matrices were given.
        rtol: As in `condition_number`.

    Returns:
        Tensor of shape (...) in float64: between 0 and k; NaN if a value is not finite or there is none.

    Raises:
        ConfigurationError: ``rtol`` is not in [0, 1).
    """
    tolerance = singular_tolerance(shape, dtype, rtol)
    values = values.detach().double()
    known = values.isfinite().all(dim=-1)
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], math.nan)
    count = (values > tolerance * values.amax(dim=-1, keepdim=True)).sum(dim=-1).double()
    return torch.where(known, count, math.nan)


def _ratios(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values in units of the largest, which matrices are zero, and which have finite values."""
    values = values.detach().double()
    if values.shape[-1] == 0:
        none = torch.zeros(values.shape[:-1], dtype=torch.bool, device=values.device)
        return values, none, none
    known = values.isfinite().all(dim=-1)
    values = torch.where(known.unsqueeze(-1), values, 0)
    largest = values.amax(dim=-1)
    zero = largest <= 0
    return values / torch.where(zero, 1, largest).unsqueeze(-1), zero, known
