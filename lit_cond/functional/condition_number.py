"""Singular values and condition numbers that survive any data."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lit_cond.errors import ConfigurationError

__all__ = ["condition_number", "singular_values"]


def singular_values(a: Tensor) -> Tensor:
    """Return all singular values in float64, descending.

    Every matrix stands for itself: one with a NaN or an infinity yields NaN and leaves the rest of the batch
    alone. When LAPACK does not converge on a finite batch, its matrices are retried one by one, and one that
    still fails takes the route over the Gram matrix (blind below 1e-8 of the largest value). Not
    differentiable.

    Args:
        a: Matrices of shape (..., m, n) of any real type.

    Returns:
        Tensor of shape (..., min(m, n)).

    Raises:
        ConfigurationError: ``a`` has fewer than two dimensions or is complex.
    """
    work, finite = _prepare(a)
    if work.numel() == 0:
        return work.new_full((*a.shape[:-2], min(a.shape[-2:])), float("nan"))
    values = torch.where(finite.unsqueeze(-1), _svdvals(work), float("nan"))
    return values.reshape(*a.shape[:-2], values.shape[-1])


def condition_number(a: Tensor, rtol: float | None = None) -> Tensor:
    """Return the largest over the smallest singular value in float64.

    A matrix counts as singular, and gets ``inf``, when ``sigma_min <= rtol * sigma_max`` or ``sigma_max =
    0``. The default is ``rtol = max(max(m, n) * eps(float64), floor)``. The first term is the rounding of the
    computation; it lets ``diag(1, 1e-12)`` be 1e12 in float64. The floor is 0 for float64 and
    ``eps(float32)`` = 1.2e-7 for every other
    type: a rank-one matrix whose entries were rounded to float32 has ``sigma_2`` up to half of that, so
        larger
    condition numbers of a float32 matrix (above 8.4e6) can not be told from infinity. bfloat16 and float16
    matrices are judged as the exact numbers that they hold, not by their own coarse rounding.

    A non-zero 1 x n or n x 1 matrix has condition number 1. Non-finite and empty matrices give NaN. Not
    differentiable.

    Args:
        a: Matrices of shape (..., m, n) of any real type.
        rtol: Ratio of singular values up to which a matrix counts as singular.

    Returns:
        Tensor of shape (...).

    Raises:
        ConfigurationError: ``a`` has fewer than two dimensions or is complex, or ``rtol`` is not in [0, 1).
    """
    if rtol is not None and not 0 <= rtol < 1:
        raise ConfigurationError(
            f"rtol={rtol} is no ratio of singular values; give a number in [0, 1), such as 1e-12."
        )
    work, finite = _prepare(a)
    if work.numel() == 0:
        return work.new_full(a.shape[:-2], float("nan"))
    if rtol is None:
        floor = 0.0 if a.dtype == torch.float64 else torch.finfo(torch.float32).eps
        rtol = max(max(a.shape[-2:]) * torch.finfo(torch.float64).eps, floor)
    values = _svdvals(work)
    largest, smallest = values[:, 0], values[:, -1]
    singular = smallest <= rtol * largest
    ratio = torch.where(singular, float("inf"), largest / torch.where(singular, 1, smallest))
    return torch.where(finite, ratio, float("nan")).reshape(a.shape[:-2])


def _prepare(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 matrices of shape (batch, m, n), zero where not finite, and which ones are finite."""
    if a.ndim < 2 or a.is_complex():
        raise ConfigurationError(
            f"A tensor of shape {tuple(a.shape)} and type {a.dtype} is no real matrix; "
            "give (..., rows, columns)."
        )
    work = a.detach().to(torch.float64).reshape(math.prod(a.shape[:-2]), *a.shape[-2:])
    finite = work.isfinite().all(dim=-1).all(dim=-1)
    return torch.where(finite[:, None, None], work, 0), finite


def _svdvals(a: Tensor) -> Tensor:
    """Return the singular values of finite matrices of shape (batch, m, n)."""
    try:
        values: Tensor = torch.linalg.svdvals(a)
        return values
    except LinAlgError:
        if a.shape[0] > 1:
            return torch.cat([_svdvals(matrix.unsqueeze(0)) for matrix in a])
    return _svdvals_by_gram(a)


def _svdvals_by_gram(a: Tensor) -> Tensor:
    scale = a.abs().amax(dim=(-2, -1), keepdim=True)
    unit = a / torch.where(scale > 0, scale, 1)
    gram = unit @ unit.mT if a.shape[-2] <= a.shape[-1] else unit.mT @ unit
    try:
        eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    except LinAlgError:
        return a.new_full((a.shape[0], gram.shape[-1]), float("nan"))
    return eigenvalues.flip(-1).clamp_min(0).sqrt() * scale[..., 0]
