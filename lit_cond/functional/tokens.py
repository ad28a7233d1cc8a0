"""The matrix C that is added to the embedded tokens of each sample."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lit_cond.errors import ConfigurationError
from lit_cond.functional.corrections import check_scale
from lit_cond.functional.polar import (
    at_least_float32,
    attach_polar_gradient,
    largest_singular_value,
    polar_by_products,
)

__all__ = ["TokenBackend", "TokenCorrection", "is_prefix_safe", "token_correction"]

TokenCorrection = Literal["exact", "identity"]
TokenBackend = Literal["auto", "gram", "svd", "products"]

# Singular values below this fraction of the largest are treated as missing directions. Squared it is 1e-14,
# some fifty times the rounding of a float64 Gram matrix, and a hundred times less than what a condition
# number of 1e6 needs.
_RANK_TOLERANCE = 1e-7


def token_correction(
    x: Tensor,
    mask: Tensor | None = None,
    correction: TokenCorrection = "exact",
    scale: float | Literal["spectral"] = "spectral",
    backend: TokenBackend = "auto",
) -> Tensor:
    r"""Return the correction C of every sample's token matrix X, to be added to it.

    From *Conditioned Embedded Tokens* (arXiv 2505.12789): ``X + C`` with ``kappa(X + C) <= 2`` (Theorem 4.4).
    The sources reached give no formula; ``C = sigma_max(X) * polar(X)`` (``correction="exact"``) is inferred
    from the sister construction of the same authors. One matrix per sample is inferred too.
    ``correction="identity"`` puts ``scale`` on the leading diagonal instead: the k-th *valid* token gets it
    in channel k, tokens beyond the width get nothing; that variant is ours, by analogy with the weights, and
    bounds nothing.

    Masked rows neither receive a correction nor influence one: a sequence alone, padded left, or padded right
    gives the same numbers. An empty sequence gives zeros. A sample with a non-finite valid entry gives NaN on
    its valid rows and leaves the other samples alone; nothing in the data raises. (The identity with a
    numeric scale looks at no entry, so it stays finite.)

    Backends of the exact correction:

    - "gram": eigendecomposition of the smaller of ``X X^T`` and ``X^T X`` in float64. A direction whose
      singular value is below ``1e-7 * sigma_max`` is faded out in proportion, so repeated tokens and padding
      leave no arbitrary direction. Full-rank X of condition number up to 1e6 give ``kappa(X + C) <= 2.001``.
    - "svd": the same by the SVD in float64; slower, accurate beyond 1e6.
    - "products": matrix products in the type of the result, see `polar_factor`; for accelerators, where
      decompositions of many small matrices are slow and float64 may be missing. It follows the global setting
      of float32 matrix products (TF32 costs digits).
    - "auto": "gram" on a CPU; on other devices "products", but for "gram" on CUDA when a gradient is wanted.

    Differentiable with respect to ``x`` (detach ``x`` to hold C fixed), by a closed form that repeated
    singular values do not upset and that passes no gradient along missing directions, where the derivative
    does not exist. Only "products" is differentiated step by step: there a missing direction, such as that of
    two equal tokens, has a derivative of up to 1e8 divided by the size of X. Computed outside autocast.

    Args:
        x: Tokens of shape (batch, tokens, width).
        mask: Boolean of shape (batch, tokens), true where a token is valid; None means all.
        correction: Polar factor or rectangular identity.
        scale: Size of the correction: a number, or the sample's largest singular value.
        backend: Route of the computation; with a numeric ``scale`` the identity needs none.

    Returns:
        Tensor of the shape of ``x``, float64 if ``x`` is, else float32.

    Raises:
        ConfigurationError: A shape, type or option can not be used.
    """
    _check(x, mask, correction, scale, backend)
    with torch.autocast(x.device.type, enabled=False):
        work = at_least_float32(x)
        if work.numel() == 0:
            return torch.zeros_like(work)
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        if correction == "identity" and scale != "spectral":
            return scale * _identity(valid, work)
        rows = valid.unsqueeze(-1)
        work = work.masked_fill(~rows, 0)
        finite = work.detach().isfinite().all(dim=-1).all(dim=-1)[:, None, None]
        work = torch.where(finite, work, 0)
        if backend == "auto":
            backend = _choose_backend(work)
        if correction == "identity":
            result = _sigma(work, backend) * _identity(valid, work)
        else:
            polar, sigma = _polar_and_sigma(work, backend)
            result = (sigma if scale == "spectral" else scale) * polar
        return torch.where(finite, result, float("nan")).masked_fill(~rows, 0)


def is_prefix_safe(correction: TokenCorrection, scale: float | Literal["spectral"]) -> bool:
    """Tell whether the correction of a token depends on no later token.

    Only then may a causal model use it: the exact correction, and any correction scaled by ``sigma_max`` of
    the whole sequence, shows every position the future.

    Args:
        correction: As in `token_correction`.
        scale: As in `token_correction`.

    Returns:
        True for the identity with a numeric scale.
    """
    return correction == "identity" and scale != "spectral"


def _choose_backend(x: Tensor) -> Literal["gram", "products"]:
    """Return the cheapest backend that is exact enough for this tensor."""
    if x.device.type == "cpu":
        # Measured on one and two cores for 17 x 64 to 512 x 768: mostly half the time of "svd" or less, and a
        # third to a fifth of "products".
        return "gram"
    if x.device.type == "cuda" and x.requires_grad and torch.is_grad_enabled():
        return "gram"
    return "products"


def _check(x: Tensor, mask: Tensor | None, correction: str, scale: float | str, backend: str) -> None:
    if x.ndim != 3 or not x.is_floating_point():
        raise ConfigurationError(
            f"Tokens of shape {tuple(x.shape)} and type {x.dtype} can not be conditioned; "
            "give (batch, tokens, width) in a floating-point type."
        )
    if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
        raise ConfigurationError(
            f"A mask of shape {tuple(mask.shape)} and type {mask.dtype} does not fit tokens of shape "
            f"{tuple(x.shape)}; give a boolean of shape {tuple(x.shape[:2])}, true where a token is valid."
        )
    if correction not in ("exact", "identity"):
        raise ConfigurationError(f"correction={correction!r} is unknown; choose 'exact' or 'identity'.")
    if backend not in ("auto", "gram", "svd", "products"):
        raise ConfigurationError(f"backend={backend!r} is unknown; choose 'auto', 'gram', 'svd' or 'products'.")
    check_scale(scale)


def _identity(valid: Tensor, like: Tensor) -> Tensor:
    """Return ones at (token, its rank among the valid tokens), which no later token can change."""
    rank = valid.cumsum(dim=1) - 1
    channel = torch.arange(like.shape[2], device=like.device)
    return ((rank.unsqueeze(-1) == channel) & valid.unsqueeze(-1)).to(like.dtype)


def _sigma(x: Tensor, backend: str) -> Tensor:
    """Return the largest singular value of each sample, of shape (batch, 1, 1)."""
    if backend == "products":
        return largest_singular_value(x, "products")[:, None, None]
    return _polar_and_sigma(x, backend)[1]


def _polar_and_sigma(x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return the polar factor, shaped like ``x``, and the largest singular value, of shape (batch, 1, 1)."""
    if backend == "products":
        return polar_by_products(x), _sigma(x, backend)
    with torch.no_grad():
        magnitude = x.abs().amax(dim=(1, 2), keepdim=True)
        magnitude = torch.where(magnitude > 0, magnitude, 1)
        # To float64 before the division: rounding X would already move its smallest singular values.
        parts = _decompose(x.double() / magnitude, backend)
    if parts is None:
        polar, sigma = _polar_and_sigma(x.double(), "products")
        return polar.to(x.dtype), sigma.to(x.dtype)
    u, s, v, polar = (part.to(x.dtype) for part in parts)
    if x.requires_grad and torch.is_grad_enabled():
        polar = attach_polar_gradient(x, polar, u, s * magnitude[:, 0], v, _RANK_TOLERANCE)
    # With u and v held fixed, the derivative of u^T X v is that of sigma_max.
    return polar, u[..., :1].mT @ x @ v[..., :1]


def _decompose(x: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return u, s (descending), v and the faded polar factor of float64 matrices; None if it diverges."""
    try:
        if backend == "svd":
            u, s, vh = torch.linalg.svd(x, full_matrices=False)
            return u, s, vh.mT, (u * (s * _faded_inverse(s)).unsqueeze(-2)) @ vh
        wide = x.shape[-2] <= x.shape[-1]
        x = x if wide else x.mT
        eigenvalues, vectors = torch.linalg.eigh(x @ x.mT)
    except LinAlgError:  # finite data, and LAPACK gave up: rare, and no reason to end a run
        return None
    u = vectors.flip(-1)
    s = eigenvalues.flip(-1).clamp_min(0).sqrt()
    inverse = _faded_inverse(s).unsqueeze(-2)
    polar = ((u * inverse) @ u.mT) @ x
    v = x.mT @ (u * inverse)
    return (u, s, v, polar) if wide else (v, s, u, polar.mT)


def _faded_inverse(s: Tensor) -> Tensor:
    """Return 1/s, bounded by its value at the rank tolerance."""
    floor = (s.amax(dim=-1, keepdim=True) * _RANK_TOLERANCE).clamp_min(torch.finfo(s.dtype).tiny)
    return 1 / torch.maximum(s, floor)
