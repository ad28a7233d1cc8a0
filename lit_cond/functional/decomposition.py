"""The polar factor and the singular values of a matrix from one decomposition."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

__all__ = ["polar_and_spectrum"]

# Measured on two cores for a 768 x 768 matrix in milliseconds, one thread / two: eigh of the Gram matrix in float32
# 42 / 29, in float64 76 / 50, SVD in float32 100 / 70, in float64 152 / 121; 24 product steps 850 / over 1000.

# Rows or columns from which the float32 route pays; below, batches in float64 cost less than a loop.
_GRADED_SIZE = 256
# Parts of the largest singular value. Left vectors W v / s miss orthogonality by some c (s_1 / s_i) (s_1 / s_j), c
# about 1e-8 where v comes from a float32 Gram matrix and 1e-17 from a float64 one: nothing to mind above _MIDDLE, small
# enough to correct to first order above _LOW. Below, directions are taken from the Gram matrix of what is left.
_MIDDLE = 0.5
_LOW = {torch.float32: 0.08, torch.float64: 1e-4}
# Condition number up to which the float64 Gram matrix gives orthonormal vectors: eps * kappa^2 is 2e-7 here.
_GRAM_LIMIT = 3e4
# Below this part of the largest singular value a direction is missing; only an SVD of the whole matrix completes it.
_MISSING = 1e-8
# Change of a probe vector under P^T P that float32 explains: some 2e-6 is usual, TF32 and bfloat16 give 1e-3 and more.
_DEFECT = 2e-5


@torch.no_grad()
def polar_and_spectrum(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the orthogonal polar factor and the singular values, without gradient.

    float32 goes through the eigenvectors of Gram matrices, deflated in float64, and through an SVD where
    directions are missing or LAPACK does not converge; float64 always through an SVD. The polar factor is about
    as close to orthonormal as that of a float32 SVD (some 2e-6), and small singular values are far more accurate:
    every one has a relative error of some 1e-6, where a float32 SVD has one of some 1e-7 sigma_max.

    Args:
        w: Finite tensor of shape (..., m, n), float32 or float64, with no empty dimension.

    Returns:
        The polar factor, like ``w``, and the singular values (..., min(m, n)), descending, float64.
    """
    if w.dtype == torch.float64:
        return _by_svd(w)
    wide = w.shape[-2] < w.shape[-1]
    tall = (w.mT if wide else w).reshape(math.prod(w.shape[:-2]), max(w.shape[-2:]), min(w.shape[-2:]))
    # A power of two: rounding W would already move its smallest singular values.
    exponent = torch.frexp(tall.abs().amax(dim=(-2, -1), keepdim=True)).exponent.clamp(-126, 126)
    unit = torch.ldexp(tall, -exponent)
    if unit.shape[-1] < _GRADED_SIZE:
        polar, values = _batch(unit)
    else:
        parts = [_single(matrix) for matrix in unit]
        polar, values = (torch.stack(part) for part in zip(*parts, strict=True))
    values = torch.ldexp(values, exponent[..., 0].to(torch.float64))
    polar = (polar.mT if wide else polar).reshape(w.shape)
    return polar, values.reshape(*w.shape[:-2], -1)


def _by_svd(a: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return (u.double() @ vh.double()).to(a.dtype), s.double()


def _batch(a: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose float32 matrices of shape (batch, m, n), m >= n, in one go."""
    try:
        polar, values = _by_gram(a.double())
    except LinAlgError:
        return _by_svd(a)
    polar = polar.to(a.dtype)
    for index in (values[:, -1] * _GRAM_LIMIT <= values[:, 0]).nonzero()[:, 0].tolist():
        polar[index], values[index] = _single(a[index])
    return polar, values


def _single(a: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose one float32 matrix (m, n), m >= n, with as much of the work in float32 as its spectrum allows."""
    try:
        found = _deflate(a)
        if found is not None and not _is_orthonormal(found[0]):
            found = _deflate(a.double())
    except LinAlgError:
        found = None
    if found is None:
        return _by_svd(a)
    return found[0].to(a.dtype), found[1].sort(descending=True).values


def _is_orthonormal(polar: Tensor) -> bool:
    """Probe a polar factor (m, n), m >= n: float32 products may have been set to TF32 or bfloat16."""
    probe = torch.cos(torch.arange(polar.shape[1], dtype=torch.float64, device=polar.device) ** 2)
    exact = polar.double()
    return bool((exact.mT @ (exact @ probe) - probe).norm() <= _DEFECT * probe.norm())


def _deflate(a: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor] | None:
    """Decompose a matrix (m, n), m >= n: the directions that its Gram matrix resolves, then in float64 what is left.

    None where a direction is missing: its singular value is `floor` or less, or below _MISSING of the largest.
    """
    eigenvalues, v = torch.linalg.eigh(a.mT @ a)
    low = int((eigenvalues < _LOW[a.dtype] ** 2 * eigenvalues[-1]).sum())
    u = a @ v[:, low:]
    # Norms of columns are more accurate than roots of eigenvalues.
    values = torch.linalg.vector_norm(u, dim=0, dtype=torch.float64)
    largest, smallest = float(values.amax()), float(values.amin())
    floor = max(floor, _MISSING * largest)
    if not smallest > floor:
        return None
    u /= values.to(u.dtype)
    middle = u[:, : int((values < _MIDDLE * largest).sum())]
    defect = middle.mT @ middle
    defect.diagonal().sub_(1)
    middle -= middle @ (defect / 2)
    if low:
        rest = a.double() @ v[:, :low].double()
        basis = u.double()
        for _ in range(2):
            rest -= basis @ (basis.mT @ rest)
        found = _deflate(rest, floor)
        if found is None:
            return None
        u = torch.cat([found[0].to(u.dtype), u], dim=1)
        values = torch.cat([found[1], values])
    return u @ v.mT, values


def _by_gram(a: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose float64 matrices of shape (..., m, n), m >= n, by the eigenvectors of their Gram matrix."""
    v = torch.linalg.eigh(a.mT @ a).eigenvectors.flip(-1)
    u = a @ v
    values = torch.linalg.vector_norm(u, dim=-2)
    u = u / torch.where(values > 0, values, 1).unsqueeze(-2)
    return u @ v.mT, values
