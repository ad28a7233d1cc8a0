"""The polar factor of a matrix by two routes, and its derivative in closed form."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_cond.errors import ConfigurationError
from lit_cond.functional.decomposition import polar_and_spectrum

__all__ = ["DEFAULT_NUM_STEPS", "PolarBackend", "largest_singular_value", "polar_factor"]

PolarBackend = Literal["svd", "products"]

# Polar Express, arXiv 2505.16932: odd quintics a x + b x^3 + c x^5, each optimal on the interval that its
# predecessors leave behind.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_NEWTON_SCHULZ = (1.875, -1.25, 0.375)
# The published coefficients may send a singular value slightly above 1; shrinking by this factor keeps
# rounding from carrying it out of the region of convergence.
_SAFETY = 1.01

DEFAULT_NUM_STEPS = 24
# 2 ** _SQUARINGS is the power of the Gram matrix from which the dominant singular vector is read.
_SQUARINGS = 11


def polar_factor(w: Tensor, backend: PolarBackend = "svd", num_steps: int = DEFAULT_NUM_STEPS) -> Tensor:
    r"""Return the orthogonal polar factor ``U V^T`` of the thin SVD ``w = U S V^T``.

    The result has orthonormal columns (``m >= n``) or rows (``m <= n``). Half precision is computed in
    float32 and rounded back; float64 stays float64.

    ``backend="svd"`` is exact for every finite input; where ``w`` is rank deficient the missing directions
    are completed to orthonormal ones, an arbitrary choice of the SVD. Without gradient, float32 takes a cheaper
    route where no direction is missing, see `polar_and_spectrum`.

    ``backend="products"`` needs matrix products only: seven Polar Express steps, then Newton-Schulz. A
    singular value ``s`` becomes ``z(s / b)``, where ``b >= sigma_max`` is a cheap bound (for a random 768 x
    768 matrix about three times ``sigma_max``). Early steps multiply a small value by about 2,000 in all,
    later ones by 1.875 each: with the default 24 steps ``z`` is 1 to rounding down to ``s / b`` of about
    1e-7. It is *not* exact below that: a singular value of zero stays zero (nothing is completed), and in
    float32 the directions of values below about ``1e-6 * sigma_max`` are rounding noise, orthonormal all the
    same.

    Differentiable by the closed form of the polar derivative for "svd" (repeated singular values are
    harmless; directions of singular value zero, where no derivative exists, pass no gradient), by automatic
    differentiation for "products".

    Args:
        w: Matrix or batch of matrices of shape (..., m, n).
        backend: How to compute it.
        num_steps: Number of product steps; "svd" ignores it.

    Returns:
        Tensor of the shape and type of ``w``.

    Raises:
        ConfigurationError: ``w`` is not a real floating-point matrix or holds a non-finite entry, or an
            option is unknown.
    """
    require_matrix(w)
    require_finite(w)
    if backend not in ("svd", "products"):
        raise ConfigurationError(f"backend={backend!r} is unknown; choose 'svd' or 'products'.")
    if num_steps < 1:
        raise ConfigurationError(f"num_steps={num_steps} is too small; give at least 1.")
    if w.numel() == 0:
        return torch.zeros_like(w)
    with torch.autocast(w.device.type, enabled=False):
        work = at_least_float32(w)
        if backend == "products":
            return polar_by_products(work, num_steps).to(w.dtype)
        return polar_and_norm(work)[0].to(w.dtype)


def polar_and_norm(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the polar factor and ``sigma_max`` from one decomposition, both differentiable.

    Args:
        w: Finite tensor of shape (..., m, n), float32 or float64, with no empty dimension.

    Returns:
        Tensors of shape (..., m, n) and (...).
    """
    if not (w.requires_grad and torch.is_grad_enabled()):
        polar, values = polar_and_spectrum(w)
        return polar, values[..., 0].to(w.dtype)
    with torch.no_grad():
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
    tolerance = s.shape[-1] * torch.finfo(s.dtype).eps
    polar = attach_polar_gradient(w, u @ vh, u, s, vh.mT, tolerance)
    # With u and v held fixed, the derivative of u^T W v is that of sigma_max.
    return polar, (u[..., :1].mT @ w @ vh[..., :1, :].mT)[..., 0, 0]


def polar_by_products(w: Tensor, num_steps: int = DEFAULT_NUM_STEPS) -> Tensor:
    """Return the polar factor by ``num_steps`` polynomial steps; zero matrices give zero.

    Args:
        w: Finite tensor of shape (..., m, n), float32 or float64, with no empty dimension.
        num_steps: Number of steps.

    Returns:
        Tensor like ``w``.
    """
    tall = w.shape[-2] > w.shape[-1]
    x = w.transpose(-2, -1) if tall else w
    x = x / _positive(x.detach().abs().amax(dim=(-2, -1), keepdim=True))
    with torch.no_grad():
        # ||X X^T||_F ** 0.5 bounds sigma_max from above, tighter than ||X||_F at the price of one product.
        bound = (x @ x.mT).square().sum(dim=(-2, -1), keepdim=True).pow(0.25)
    x = x / (_SAFETY * _positive(bound))
    for step in range(num_steps):
        if step < len(_POLAR_EXPRESS):
            a, b, c = (k / _SAFETY**power for k, power in zip(_POLAR_EXPRESS[step], (1, 3, 5), strict=True))
        else:
            a, b, c = _NEWTON_SCHULZ
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(-2, -1) if tall else x


def largest_singular_value(w: Tensor, backend: PolarBackend = "svd") -> Tensor:
    """Return ``sigma_max`` of each matrix, differentiable where it is simple.

    "products" squares the Gram matrix repeatedly instead of decomposing it; the value is then never too large
    and, at worst (many singular values within 1e-4 of the largest), too small by about 1e-4 of itself.

    Args:
        w: Finite tensor of shape (..., m, n), float32 or float64, with no empty dimension.
        backend: Decomposition or products.

    Returns:
        Tensor of shape (...).
    """
    if backend == "svd":
        norm: Tensor = torch.linalg.matrix_norm(w, ord=2)
        return norm
    wide = w.shape[-2] <= w.shape[-1]
    magnitude = _positive(w.detach().abs().amax(dim=(-2, -1), keepdim=True))
    unit = w / magnitude
    with torch.no_grad():
        u = dominant_vector(unit @ unit.mT if wide else unit.mT @ unit)
    # With the unit vector u held fixed, the derivative of ||w^T u|| is that of sigma_max.
    image = (unit.transpose(-2, -1) if wide else unit) @ u.unsqueeze(-1)
    return image.square().sum(dim=(-2, -1)).sqrt() * magnitude[..., 0, 0]


def dominant_vector(gram: Tensor) -> Tensor:
    """Return a unit vector along the eigenvector of the largest eigenvalue, by products only.

    Args:
        gram: Positive semi-definite tensor of shape (..., k, k).

    Returns:
        Tensor of shape (..., k); zero where ``gram`` is zero.
    """
    for _ in range(_SQUARINGS):
        gram = gram / _positive(gram.abs().amax(dim=(-2, -1), keepdim=True))
        gram = gram @ gram
    largest = gram.diagonal(dim1=-2, dim2=-1).argmax(dim=-1, keepdim=True)
    index = largest.unsqueeze(-1).expand(*gram.shape[:-1], 1)
    column = gram.gather(-1, index).squeeze(-1)
    return column / _positive(column.norm(dim=-1, keepdim=True))


class _PolarGradient(torch.autograd.Function):
    """Hands a polar factor through and differentiates it with respect to the matrix it came from."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, polar: Tensor, u: Tensor, s: Tensor, v: Tensor, tolerance: float) -> Tensor:
        return polar.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, u, s, v, ctx.tolerance = inputs
        ctx.save_for_backward(u, s, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With dw = U A V^T + parts outside the ranges, d(polar) = U [(A - A^T)_ij / (s_i + s_j)] V^T + (1 - U
        # U^T) dw V S^-1 V^T + U S^-1 U^T dw (1 - V V^T); this is its adjoint. Every denominator is a sum:
        # unlike the derivative of U or V alone it stays finite when singular values repeat.
        u, s, v = ctx.saved_tensors
        largest = s.amax(dim=-1, keepdim=True)
        keep = s > largest * ctx.tolerance
        inverse = torch.where(keep, 1 / torch.where(keep, s, 1), 0)
        pair = s.unsqueeze(-1) + s.unsqueeze(-2)
        both = keep.unsqueeze(-1) & keep.unsqueeze(-2)
        u, v = u * keep.unsqueeze(-2), v * keep.unsqueeze(-2)
        right = grad @ v
        left = u.mT @ grad
        core = u.mT @ right
        skew = torch.where(both, (core - core.mT) / torch.where(both, pair, 1), 0)
        outside_left = (right - u @ core) * inverse.unsqueeze(-2)
        outside_right = inverse.unsqueeze(-1) * (left - core @ v.mT)
        result = (u @ skew + outside_left) @ v.mT + u @ outside_right
        return result, None, None, None, None, None


def attach_polar_gradient(w: Tensor, polar: Tensor, u: Tensor, s: Tensor, v: Tensor, tolerance: float) -> Tensor:
    """Return ``polar`` as a differentiable function of ``w``.

    Args:
        w: Matrix of shape (..., m, n) that ``polar`` was computed from.
        polar: Its polar factor, detached.
        u: Left singular vectors of shape (..., m, k).
        s: Singular values of shape (..., k).
        v: Right singular vectors of shape (..., n, k).
        tolerance: Fraction of the largest singular value up to which one counts as zero and passes no
            gradient.

    Returns:
        Tensor of the shape and type of ``polar``.
    """
    result: Tensor = _PolarGradient.apply(w, polar, u, s, v, tolerance)
    return result


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _positive(x: Tensor) -> Tensor:
    """Replace zeros by one, to divide by."""
    return torch.where(x > 0, x, 1)


def require_matrix(w: Tensor) -> None:
    """Raise unless ``w`` is a matrix or a batch of them in a floating-point type."""
    if w.ndim < 2 or not w.is_floating_point():
        raise ConfigurationError(
            f"A tensor of shape {tuple(w.shape)} and type {w.dtype} is no real matrix; "
            "give (..., rows, columns) in a floating-point type."
        )


def require_finite(w: Tensor) -> None:
    """Raise if ``w`` holds a NaN or an infinity."""
    bad = int((~torch.isfinite(w)).sum())
    if bad:
        raise ConfigurationError(
            f"{bad} of {w.numel()} entries of a matrix of shape {tuple(w.shape)} are NaN or infinite; "
            "find out where they come from, such a matrix has no singular values."
        )
