"""The matrix C that is added to a projection weight."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError
from lit_cond.functional.polar import (
    PolarBackend,
    at_least_float32,
    largest_singular_value,
    polar_and_norm,
    polar_factor,
    require_finite,
    require_matrix,
)

__all__ = ["identity_correction", "spectral_correction"]


def identity_correction(w: Tensor, scale: float | Literal["spectral"] = "spectral", num_blocks: int = 1) -> Tensor:
    """Return the rectangular identity times ``scale``, once per row block.

    The practical variant of *Spectral Conditioning of Attention* (arXiv 2603.07162): ``C = lambda * I`` with
    lambda = 10, fixed before training. That the ones stand on the leading diagonal of a non-square matrix is
    inferred (the sources reached say only "rectangular lambda-I"), and whether the matrix is the whole
    projection (``num_blocks=1``) or each head's block (``num_blocks=num_heads``) they leave open.
    ``scale="spectral"`` is ours, not the paper's.

    Theorem 3.8 of the paper claims a smaller condition number for lambda >= 2 under conditions that are not
    known to us. ``lambda > sigma_max * (kappa + 1) / (kappa - 1)`` suffices, because ``kappa(W + lambda I) <=
    (lambda + sigma_max) / (lambda - sigma_max)`` (our derivation); at ``lambda = sigma_max`` there is no
    guarantee.

    Args:
        w: Weight of shape (..., out_features, in_features); only its shape matters when ``scale`` is a
            number.
        scale: Value of the ones: a number, or the largest singular value of the block.
        num_blocks: Number of equal row blocks (heads).

    Returns:
        Tensor of the shape of ``w``, float64 if ``w`` is, else float32.

    Raises:
        ConfigurationError: The rows do not divide, or ``scale`` or ``w`` can not be used.
    """
    blocks = _blocks(w, scale, num_blocks)
    eye = torch.eye(blocks.shape[-2], blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    return (_factor(blocks, scale, "svd") * eye).expand(blocks.shape).reshape(w.shape)


def spectral_correction(
    w: Tensor,
    scale: float | Literal["spectral"] = "spectral",
    num_blocks: int = 1,
    backend: PolarBackend = "svd",
) -> Tensor:
    r"""Return the polar factor of each row block times ``scale``.

    Theorem 3.5 of *Spectral Conditioning of Attention* (arXiv 2603.07162): with ``W = U S V^T`` and ``C = U
    Sbar V^T``, ``diag(Sbar) = sigma_max(W)``, every singular value ``s_i`` becomes ``s_i + sigma_max``, so
    ``kappa(W + C) <= 2``. This is ``scale="spectral"``; with a number ``lambda`` the bound is ``(sigma_max +
    lambda) / (sigma_min + lambda)``. The theorem speaks of one matrix; applying it per head
    (``num_blocks=num_heads``) is our reading.

    The bound holds for a whole block, so for ``num_blocks > 1`` the stacked matrix itself may be conditioned
    worse.

    Args:
        w: Weight of shape (..., out_features, in_features).
        scale: Singular value of the correction: a number, or the largest singular value of the block.
        num_blocks: Number of equal row blocks (heads).
        backend: Route to the polar factor, see `polar_factor`; also to ``sigma_max``.

    Returns:
        Tensor of the shape of ``w``, float64 if ``w`` is, else float32.

    Raises:
        ConfigurationError: The rows do not divide, or ``scale`` or ``w`` can not be used.
    """
    blocks = _blocks(w, scale, num_blocks)
    if backend == "svd" and scale == "spectral" and blocks.numel():
        require_finite(blocks)
        with torch.autocast(blocks.device.type, enabled=False):
            polar, largest = polar_and_norm(blocks)
        return (largest[..., None, None] * polar).reshape(w.shape)
    return (_factor(blocks, scale, backend) * polar_factor(blocks, backend)).reshape(w.shape)


def check_scale(scale: float | str) -> None:
    """Raise unless ``scale`` is "spectral" or a finite number."""
    if isinstance(scale, str):
        if scale != "spectral":
            raise ConfigurationError(f"scale={scale!r} is unknown; give 'spectral' or a number.")
    elif not math.isfinite(scale):
        raise ConfigurationError(f"scale={scale} is not finite; give 'spectral' or a finite number.")


def _blocks(w: Tensor, scale: float | str, num_blocks: int) -> Tensor:
    require_matrix(w)
    check_scale(scale)
    rows, columns = w.shape[-2:]
    if num_blocks < 1 or rows % num_blocks:
        raise ConfigurationError(
            f"{rows} rows can not be cut into num_blocks={num_blocks} equal blocks; give a divisor of {rows}."
        )
    return at_least_float32(w).reshape(*w.shape[:-2], num_blocks, rows // num_blocks, columns)


def _factor(blocks: Tensor, scale: float | Literal["spectral"], backend: PolarBackend) -> Tensor:
    """Return the scale of each block, of shape (..., num_blocks, 1, 1)."""
    if scale != "spectral":
        return blocks.new_full((1, 1, 1), float(scale))
    if blocks.numel() == 0:
        return blocks.new_zeros((1, 1, 1))
    require_finite(blocks)
    with torch.autocast(blocks.device.type, enabled=False):
        return largest_singular_value(blocks, backend)[..., None, None]
