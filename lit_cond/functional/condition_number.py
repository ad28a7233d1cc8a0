"""Singular values and condition numbers that survive any data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lit_cond.errors import ConfigurationError

__all__ = ["condition_number", "condition_of_spectrum", "singular_tolerance", "singular_values"]

# Up to this condition number the eigenvalues of the float64 Gram matrix are trusted: squaring costs sigma_min
# a relative error of about eps * kappa^2, here 2e-7 times a small factor. Measured on two cores in float64,
# they take 0.4 to 0.5 of the time of `svdvals` for square matrices of 192 to 768 and a tenth for 64 x 768.
_GRAM_LIMIT = 3e4
# Up to this condition number a float32 Gram matrix gives singular values to _QUICK_RTOL, in 0.6 of that time.
_QUICK_LIMIT = 4.0
_QUICK_RTOL = 1e-5


def singular_values(a: Tensor, rtol: float = 1e-6) -> Tensor:
    """Return all singular values in float64, descending.

    Every matrix stands for itself: one with a NaN or an infinity yields NaN and leaves the rest of the batch
    alone. A matrix of condition number up to 3e4 is measured through its Gram matrix (relative error below
    1e-6), any other by an SVD; where LAPACK does not converge on finite data, the matrices are retried one by
    one and by the other route. Not differentiable.

    Args:
        a: Matrices of shape (..., m, n) of any real type.
        rtol: Relative error that does no harm. From 1e-5 on, matrices up to float32 are measured in float32 if their
            condition number turns out to be at most 4, as that of a corrected weight.

    Returns:
        Tensor of shape (..., min(m, n)).

    Raises:
        ConfigurationError: ``a`` has fewer than two dimensions or is complex.
    """
    work, finite = _prepare(a)
    if work.numel() == 0:
        return work.new_full((*a.shape[:-2], min(a.shape[-2:])), float("nan"))
    quick = rtol >= _QUICK_RTOL and a.dtype in (torch.float32, torch.bfloat16, torch.float16)
    values = torch.where(finite.unsqueeze(-1), _quickly(work) if quick else _svdvals(work), float("nan"))
    return values.reshape(*a.shape[:-2], values.shape[-1])


def condition_number(a: Tensor, rtol: float | None = None) -> Tensor:
    """Return the largest over the smallest singular value in float64.

    A matrix counts as singular, and gets ``inf``, when ``sigma_min <= rtol * sigma_max``, so too when it is
    zero. The default is ``rtol = max(max(m, n) * eps(float64), floor)``. The first term is the rounding of
    the computation; it lets ``diag(1, 1e-12)`` be 1e12 in float64. The floor is ``eps(float32)`` = 1.2e-7 for
    a floating-point type narrower than float64, else 0: a rank-one matrix whose entries were rounded to
    float32 has ``sigma_2`` up to half of that times ``sigma_1``, so larger condition numbers of a float32
    matrix (above 8.4e6) can not be told from infinity. bfloat16 and float16 matrices are judged as the exact
    numbers that they hold, not by their own coarse rounding.

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
    return condition_of_spectrum(singular_values(a), a.shape, a.dtype, rtol)


def condition_of_spectrum(
    values: Tensor, shape: Sequence[int], dtype: torch.dtype, rtol: float | None = None
) -> Tensor:
    """Return the condition numbers of matrices whose singular values are known, by the rule of `condition_number`.

    Args:
        values: Singular values of shape (..., k), descending.
        shape: Shape of the matrices, (..., m, n).
        dtype: Type in which the matrices were given.
        rtol: As in `condition_number`.

    Returns:
        Tensor of shape (...).

    Raises:
        ConfigurationError: ``rtol`` is not in [0, 1).
    """
    rtol = singular_tolerance(shape, dtype, rtol)
    if values.shape[-1] == 0:
        return values.new_full(values.shape[:-1], float("nan"))
    largest, smallest = values[..., 0], values[..., -1]
    singular = smallest <= rtol * largest
    ratio = torch.where(singular, float("inf"), largest / torch.where(singular, 1, smallest))
    return torch.where(largest.isnan(), float("nan"), ratio)


def singular_tolerance(shape: Sequence[int], dtype: torch.dtype, rtol: float | None = None) -> float:
    """Return the part of the largest singular value up to which one counts as zero, as `condition_number` explains.

    Args:
        shape: Shape of the matrices, (..., m, n).
        dtype: Type in which the matrices were given.
        rtol: The caller's own choice, returned if it is usable.

    Returns:
        The ratio.

    Raises:
        ConfigurationError: ``rtol`` is not in [0, 1).
    """
    if rtol is not None:
        if not 0 <= rtol < 1:
            raise ConfigurationError(
                f"rtol={rtol} is no ratio of singular values; give a number in [0, 1), such as 1e-12."
            )
        return rtol
    floor = torch.finfo(torch.float32).eps if dtype.is_floating_point and dtype != torch.float64 else 0.0
    return max(max(shape[-2:]) * torch.finfo(torch.float64).eps, floor)


def _prepare(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 matrices of shape (batch, m, n), zero where not finite, and which ones are finite."""
    if a.ndim < 2 or a.is_complex():
        raise ConfigurationError(
            f"A tensor of shape {tuple(a.shape)} and type {a.dtype} is no real matrix; give (..., rows, columns)."
        )
    work = a.detach().to(torch.float64).reshape(math.prod(a.shape[:-2]), *a.shape[-2:])
    finite = work.isfinite().all(dim=-1).all(dim=-1)
    return torch.where(finite[:, None, None], work, 0), finite


def _svdvals(a: Tensor) -> Tensor:
    """Return the singular values of finite matrices of shape (batch, m, n) by the cheapest sound route."""
    try:
        values = _by_gram(a)
    except LinAlgError:
        return _by_svd(a)
    doubtful = ~(values[:, -1] * _GRAM_LIMIT > values[:, 0])
    if doubtful.any():
        values[doubtful] = _by_svd(a[doubtful])
    return values


def _quickly(a: Tensor) -> Tensor:
    """Return the same to a relative error of _QUICK_RTOL, in float32 as long as the matrices are well conditioned."""
    parts: list[Tensor] = []
    for index in range(len(a)):
        try:
            values = _by_gram(a[index : index + 1], torch.float32)
        except LinAlgError:
            break
        if not bool(values[0, -1] * _QUICK_LIMIT > values[0, 0]):
            break
        parts.append(values)
    if len(parts) < len(a):
        parts.append(_svdvals(a[len(parts) :]))
    return torch.cat(parts)


def _by_gram(a: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    scale = a.abs().amax(dim=(-2, -1), keepdim=True)
    unit = a / torch.where(scale > 0, scale, 1)
    # The product in float64 all the same: float32 products may have been set to TF32 or bfloat16.
    gram = unit @ unit.mT if a.shape[-2] <= a.shape[-1] else unit.mT @ unit
    eigenvalues: Tensor = torch.linalg.eigvalsh(gram.to(dtype)).double()
    return eigenvalues.flip(-1).clamp_min(0).sqrt() * scale[..., 0]


def _by_svd(a: Tensor) -> Tensor:
    """Return the same by the SVD; matrices on which it diverges fall back to the Gram matrix, one by one."""
    try:
        values: Tensor = torch.linalg.svdvals(a)
        return values
    except LinAlgError:
        if a.shape[0] > 1:
            return torch.cat([_by_svd(matrix.unsqueeze(0)) for matrix in a])
    try:
        return _by_gram(a)
    except LinAlgError:
        return a.new_full((1, min(a.shape[-2:])), float("nan"))
