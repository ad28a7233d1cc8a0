"""The largest and the smallest singular value of a matrix, without those in between."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lit_cond.errors import ConfigurationError
from lit_cond.functional.condition_number import singular_values

__all__ = ["extreme_singular_values"]

# Below this size a decomposition of the whole matrix costs less than the steps of two iterations.
_SMALL = 320
# Tolerances below this one are for a decomposition: the iterations run in float32.
_TIGHT = 1e-3
# Probability, over the random start, that an end is missed by more than the tolerance: the same for every matrix.
_FAILURE = 1e-4
# Starts that go side by side where a pass over the matrix costs more than the arithmetic: six need 16 steps for the
# largest singular value of a 768 x 768 weight, one needs 34.
_STARTS = 6
_MAX_STEPS = 64
# Numbers of a float32 matrix that stay in a cache between two products: 1 MB.
_CACHED = 2**18
# Eigenvalues of A^T A no further apart than by this factor are cheaper to settle together than through an inverse.
_NARROW = 9.0
# Corrections of a float32 solution, and the size of the last, in parts of the solution and of the tolerance, that is
# small enough: what is left after it is smaller by the same factor, at most a tenth.
_CORRECTIONS = 3
_CORRECTED = 0.1
# Largest condition numbers at which a float64 factorisation is trusted; its error relative to sigma_min is some
# eps * kappa for LU, and eps * kappa^2 for a Gram matrix.
_LU_LIMIT = 1e10
_GRAM_LIMIT = 1e6

_Product = Callable[[Tensor], Tensor]


def extreme_singular_values(a: Tensor, rtol: float = 1e-2) -> tuple[Tensor, Tensor]:
    """Return ``sigma_max`` and ``sigma_min`` of every matrix in float64, to a relative error of ``rtol``.

    Lanczos iterations from random starts on ``A^T A``, and on its inverse through a factorisation of A, each until it
    is certain that nothing larger was overlooked: the probabilistic bound of Hochstenbach, *Probabilistic upper bounds
    for the matrix two-norm* (J. Sci. Comput. 57, 2013), which holds for every matrix with a probability of 1 - 1e-4
    over the start, and in practice the error is far smaller. A matrix that this does not settle (singular, a condition
    number above 1e10, or above 1e6 if not square, or a slow iteration), a small one (less than 320 rows or columns),
    and any with ``rtol`` below 1e-3 are measured by `singular_values`.

    The start is seeded: equal matrices have equal results, and the global random state is neither read nor moved. Every
    matrix stands for itself. Not differentiable.

    Args:
        a: Matrices of shape (..., m, n) of any real type.
        rtol: Relative error that does no harm, at least 0 and below 0.5.

    Returns:
        Two tensors of shape (...). Zero matrices have zeros; matrices that are not finite, or empty, NaN.

    Raises:
        ConfigurationError: ``a`` has fewer than two dimensions or is complex, or ``rtol`` is not in [0, 0.5).
    """
    if not 0 <= rtol < 0.5:
        raise ConfigurationError(f"rtol={rtol} is no relative error; give a number in [0, 0.5), such as 0.01.")
    if a.ndim < 2 or a.is_complex() or min(a.shape[-2:]) < _SMALL or rtol < _TIGHT:
        values = singular_values(a, rtol)
        if values.shape[-1] == 0:
            return (values.new_full(values.shape[:-1], math.nan),) * 2
        return values[..., 0], values[..., -1]
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        ends = [_ends(matrix, rtol) for matrix in a.detach().reshape(-1, *a.shape[-2:])]
    result = torch.tensor(ends, dtype=torch.float64, device=a.device).reshape(*a.shape[:-2], 2)
    return result[..., 0], result[..., 1]


def _ends(a: Tensor, rtol: float) -> tuple[float, float]:
    """Return the two singular values of one matrix."""
    size = max(abs(float(end)) for end in torch.aminmax(a))  # NaN and infinity survive it
    if size == 0:
        return 0.0, 0.0
    if math.isfinite(size):
        # By a power of two, which rounds nothing, and only where float32 might not hold fourth powers.
        scale = 1.0 if 1e-4 < size < 1e4 else 2.0 ** math.frexp(size)[1]
        found = _iterate(a if scale == 1 else a.double() / scale, rtol)
        if found is not None:
            return found[0] * scale, found[1] * scale
    values = singular_values(a, rtol)
    return float(values[0]), float(values[-1])


def _iterate(a: Tensor, rtol: float) -> tuple[float, float] | None:
    """Return the ends of a matrix whose fourth powers float32 can hold, or None."""
    a = a if a.shape[0] >= a.shape[1] else a.mT
    narrow, a = a.float(), a.double()
    ends = _eigenvalues(_product(narrow), a.shape[1], narrow, _STARTS, rtol, _NARROW)
    if ends is None:
        return None
    sigma_max = math.sqrt(ends[0])
    if ends[1] is not None:
        return sigma_max, math.sqrt(ends[1])
    square = a.shape[0] == a.shape[1]
    inverse = None
    for factor in (_by_corrected_lu, _by_lu) if square else (_by_gram,):
        solve = factor(a, rtol)
        inverse = None if solve is None else _eigenvalues(solve, a.shape[1], a, 1, rtol)
        if inverse is not None:
            break
    if inverse is None:
        return None
    sigma_min = 1 / math.sqrt(inverse[0])
    return (sigma_max, sigma_min) if sigma_max < (_LU_LIMIT if square else _GRAM_LIMIT) * sigma_min else None


def _product(a: Tensor) -> _Product:
    """Return ``x -> A^T A x`` in one pass over the memory of A."""
    blocks = torch.split(a, max(64, _CACHED // a.shape[1]))

    def product(x: Tensor) -> Tensor:
        result = (x @ blocks[0].mT) @ blocks[0]
        for block in blocks[1:]:
            result = result.addmm(x @ block.mT, block)
        return result

    return product


def _by_corrected_lu(a: Tensor, rtol: float) -> _Product | None:
    """Return ``x -> (A^T A)^-1 x`` for a square matrix through a float32 factorisation and float64 residuals.

    Corrections get smaller by a factor of about eps(float32) * kappa. Where they do not, the result is NaN.
    """
    narrow = a.float()
    lu, pivots, info = torch.linalg.lu_factor_ex(narrow.mT)
    if int(info):
        return None

    def solve(b: Tensor, adjoint: bool) -> Tensor:
        matrix = a.mT if adjoint else a
        x: Tensor = torch.linalg.lu_solve(lu, pivots, b.mT.float(), adjoint=adjoint).mT.double()
        for _ in range(_CORRECTIONS):
            residual = torch.addmm(b, x, matrix, alpha=-1)
            change: Tensor = torch.linalg.lu_solve(lu, pivots, residual.mT.float(), adjoint=adjoint).mT.double()
            x = x + change
            if float(change.norm()) <= _CORRECTED * rtol * float(x.norm()):
                return x
        return torch.full_like(b, math.nan)

    def both(b: Tensor) -> Tensor:
        half = solve(b, False)
        return half if half.isnan().any() else solve(half, True)

    return both


def _by_lu(a: Tensor, rtol: float) -> _Product | None:
    """Return ``x -> (A^T A)^-1 x`` for a square matrix, or None if it is singular."""
    lu, pivots, info = torch.linalg.lu_factor_ex(a.mT)  # the transpose is laid out as LAPACK wants it
    if int(info):
        return None

    def solve(x: Tensor) -> Tensor:
        half = torch.linalg.lu_solve(lu, pivots, x.mT)
        whole: Tensor = torch.linalg.lu_solve(lu, pivots, half, adjoint=True)
        return whole.mT

    return solve


def _by_gram(a: Tensor, rtol: float) -> _Product | None:
    """Return the same for any matrix, or None if it is nearly singular."""
    factor, info = torch.linalg.cholesky_ex(a.mT @ a)
    return None if int(info) else lambda x: torch.cholesky_solve(x.mT, factor).mT


def _eigenvalues(
    apply: _Product, size: int, like: Tensor, starts: int, rtol: float, narrow: float = 0.0
) -> tuple[float, float | None] | None:
    """Return the largest eigenvalue of a positive semidefinite matrix, so that its root is right to ``rtol``.

    Args:
        apply: Product of the matrix with the rows of a tensor of shape (starts, size).
        size: Rows of the matrix.
        like: Gives the type and device of the computation.
        starts: Number of independent Lanczos iterations that go side by side.
        rtol: Relative error of the square root.
        narrow: If the largest seems to be less than this many times the smallest, go on until that is settled too.

    Returns:
        The largest and perhaps the smallest eigenvalue; None if the largest is not settled.
    """
    generator = torch.Generator().manual_seed(size)
    first = torch.randn(starts, size, generator=generator, dtype=torch.float64)
    basis = like.new_empty(starts, _MAX_STEPS + 1, size)
    basis[:, 0] = first.to(like) / first.norm(dim=-1, keepdim=True).to(like)
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    rounding = 10 * math.sqrt(size) * torch.finfo(like.dtype).eps
    look, largest = (8 if starts > 1 else 4), None
    for step in range(1, _MAX_STEPS + 1):
        known = basis[:, :step]
        w = apply(basis[:, step - 1]).unsqueeze(1)
        overlap = w @ known.mT
        diagonal.append(overlap[:, 0, -1])
        w = torch.baddbmm(w, overlap, known, alpha=-1)
        w = torch.baddbmm(w, w @ known.mT, known, alpha=-1)  # once more: rounding
        length = w.norm(dim=-1)
        # Below the rounding there is no direction left to go to: the iteration has found an invariant subspace.
        ends_here = length <= rounding * overlap.amax(dim=-1)
        beside.append(length.masked_fill(ends_here, 0)[:, 0])
        basis[:, step] = (w[:, 0] / length).masked_fill(ends_here, 0)
        if step == look:
            alphas, betas = (torch.stack(part, 1).double().cpu() for part in (diagonal, beside))
            ends = _ritz_values(alphas, betas)
            if ends is None:
                break
            progress = _certainty(alphas, betas, size, rounding, ends[1] * (1 + rtol) ** 2)
            if progress >= 1:
                largest = ends[1]
                if ends[1] >= narrow * ends[0]:
                    return largest, None
                progress = _certainty(alphas, betas, size, rounding, ends[0] * (1 - rtol) ** 2)
                if progress >= 1:
                    return largest, ends[0]
            # A look costs as much as some steps, and the certainty grows geometrically.
            look = max(step + 1, min(math.ceil(step / max(progress, 0.5)), _MAX_STEPS))
    return None if largest is None else (largest, None)


def _ritz_values(diagonal: Tensor, beside: Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest eigenvalue of tridiagonal matrices, None if an iteration broke."""
    if not (diagonal.isfinite().all() and beside.isfinite().all()):
        return None
    # An iteration that has ended goes on with zeros, which are no Ritz values.
    ended = (beside[:, :-1] == 0).cumsum(dim=-1) > 0
    diagonal = diagonal.clone()
    diagonal[:, 1:] = torch.where(ended, diagonal[:, :1], diagonal[:, 1:])
    tridiagonal = torch.diag_embed(diagonal)
    tridiagonal += torch.diag_embed(beside[:, :-1], 1) + torch.diag_embed(beside[:, :-1], -1)
    try:
        values = torch.linalg.eigvalsh(tridiagonal)
    except LinAlgError:
        return None
    smallest, largest = float(values.min()), float(values.max())
    return (smallest, largest) if largest > 0 else None


def _certainty(diagonal: Tensor, beside: Tensor, size: int, rounding: float, bound: float) -> float:
    """Return how far it is certain that no eigenvalue lies beyond a bound that is outside of the Ritz values.

    The Lanczos polynomial p of an iteration, by which its next basis vector is ``p(A) x`` for a start x, satisfies
    ``|p(t)| |component of x| <= 1`` at every eigenvalue t, and grows outside of the Ritz values. That a component is
    below ``1 / limit`` in all iterations has the probability _FAILURE.

    Args:
        diagonal: Of the tridiagonal matrices, of shape (starts, steps).
        beside: Entries beside it, of shape (starts, steps); the last one belongs to the next vector.
        size: Rows of the matrix.
        rounding: Of a step, in parts of the matrix: what a zero stands for.
        bound: The number t.

    Returns:
        The logarithm of the least ``|p(t)|``, in parts of what is needed: 1 or more where it is certain.
    """
    limit = 1 / (_FAILURE ** (1 / len(diagonal)) * math.sqrt(math.pi / (2 * size)))
    least = limit
    for alphas, betas in zip(diagonal.tolist(), beside.tolist(), strict=True):
        before, value, last = 0.0, 1.0, 0.0
        for alpha, beta in zip(alphas, betas, strict=True):
            step = beta or rounding * max(alphas) or 1e-300
            before, value = value, ((bound - alpha) * value - last * before) / step
            last = beta
            if abs(value) > limit or not beta:
                break
        least = min(least, abs(value))
    return math.log(2 * max(least, 0.5)) / math.log(2 * limit)
