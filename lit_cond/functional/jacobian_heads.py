"""The Jacobians of many heads at once: the same numbers as head by head, with less overhead where heads are small."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lit_cond.errors import ConfigurationError
from lit_cond.functional.jacobian import (
    GRAM_LIMIT,
    JacobianSpectrum,
    attention_jacobian_singular_values,
    jacobian_tolerance,
)

__all__ = ["attention_jacobian_spectra"]

# Numbers in the Gram matrices that are made together: 32 MB.
_TOGETHER = 2**22
# Products that make up a Gram matrix hold up to six operands; beyond these sizes heads are scaled one by one.
_SAFE = 1e30


def attention_jacobian_spectra(
    query_tokens: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    scale: float,
    *,
    max_rows: int = 512,
    rows: Tensor | None = None,
    query_maps: Tensor | None = None,
    key_maps: Tensor | None = None,
    value_maps: Tensor | None = None,
) -> list[JacobianSpectrum]:
    """Return `attention_jacobian_singular_values` of every head.

    Heads that are small enough to be measured whole, without maps or hidden tokens, share the formation of their Gram
    matrices, in pieces of 32 MB; all others are measured one after the other. Memory is otherwise as there.

    Args:
        query_tokens: Of shape (H, N, D), or (N, D) where all heads have the same; and so on, see
            `attention_jacobian_singular_values` for all arguments.
        key_tokens: Of shape (H, M, Dk) or (M, Dk).
        value_tokens: Of shape (H, M, Dv) or (M, Dv).
        query: Of shape (H, N, d).
        key: Of shape (H, M, d), or (M, d) where heads share it.
        value: Of shape (H, M, v), or (M, v) where heads share it.
        probabilities: Of shape (H, N, M).
        scale: Factor of the products.
        max_rows: Largest number of outputs to measure of each head.
        rows: LongTensor of the output tokens to choose from.
        query_maps: Of shape (H, N, d, c), or (N, d, c) where all heads have the same.
        key_maps: The same for the keys.
        value_maps: The same for the values.

    Returns:
        One spectrum for each head.

    Raises:
        ConfigurationError: Shapes do not fit each other, or ``max_rows`` does not hold a single token.
    """
    tensors = (query_tokens, key_tokens, value_tokens, query, key, value, probabilities)
    maps = (query_maps, key_maps, value_maps)
    if probabilities.ndim != 3:
        raise ConfigurationError(
            f"probabilities of shape {tuple(probabilities.shape)} are not those of several heads; "
            "give (heads, queries, keys)."
        )
    heads = len(probabilities)
    for tensor, ndim in [*((t, 2) for t in tensors), *((t, 3) for t in maps if t is not None)]:
        if tensor.ndim not in (ndim, ndim + 1) or (tensor.ndim > ndim and len(tensor) != heads):
            raise ConfigurationError(
                f"A tensor of shape {tuple(tensor.shape)} does not fit {heads} heads; give {ndim} dimensions, or one "
                f"more of size {heads} in front."
            )

    def of(tensor: Tensor, head: int, ndim: int) -> Tensor:
        return tensor if tensor.ndim == ndim else tensor[head]

    outputs = query.shape[-2] * value.shape[-1]
    found: dict[int, Tensor] = {}
    if rows is None and outputs <= max_rows and all(t is None for t in maps):
        step = max(1, _TOGETHER // max(1, outputs) ** 2)
        for start in range(0, heads, step):
            part = slice(start, start + step)
            values = _together([t if t.ndim == 2 else t[part] for t in tensors], scale)
            found |= {start + index: one for index, one in values.items()}
    parameters = sum(a.shape[-1] * b.shape[-1] for a, b in zip(tensors[:3], tensors[3:6], strict=True))
    spectra = []
    for head in range(heads):
        if head in found:
            tolerance = jacobian_tolerance(tensors, outputs, parameters)
            tokens = tuple(range(query.shape[-2]))
            spectra.append(JacobianSpectrum(found[head], tokens, True, parameters, tolerance))
            continue
        query_map, key_map, value_map = (None if t is None else of(t, head, 3) for t in maps)
        x, y, z, q, k, v, p = (of(t, head, 2) for t in tensors)
        spectra.append(
            attention_jacobian_singular_values(
                x, y, z, q, k, v, p, scale, max_rows=max_rows, rows=rows,
                query_maps=query_map, key_maps=key_map, value_maps=value_map,
            )
        )  # fmt: skip
    return spectra


def _together(tensors: list[Tensor], scale: float) -> dict[int, Tensor]:
    """Return the singular values of those heads for which the Gram matrix is good enough."""
    x, y, z, q, k, v, p = tensors
    device = p.device
    fits = (
        (x.shape[-2], q.shape[-2], y.shape[-2], z.shape[-2], k.shape[-2], v.shape[-2])
        == (p.shape[1], p.shape[1], p.shape[2], p.shape[2], p.shape[2], p.shape[2])
    ) and q.shape[-1] == k.shape[-1]  # fmt: skip
    if not fits or p.numel() == 0 or v.numel() == 0 or any(t.is_complex() for t in tensors):
        return {}  # the way head by head says what is wrong
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        x, y, z, q, k, v, p = (t.detach().to(device).double() for t in tensors)
        sizes = torch.cat([t.abs().amax(dim=(-2, -1)).flatten() for t in (x, y, z, q, k, v, p)])
        if not bool(((sizes > 1 / _SAFE) & (sizes < _SAFE)).all()) or not 1 / _SAFE < abs(scale) < _SAFE:
            return {}
        if not bool((p != 0).any(dim=1).all() & (p != 0).any(dim=2).all()):
            return {}
        across = v.mT.contiguous() if v.ndim == 2 else v.mT.contiguous().unsqueeze(1)
        w = p.unsqueeze(2) * (across - (p @ v).unsqueeze(-1))
        w *= scale
        heads, tokens, channels, keys = w.shape
        rows = tokens * channels
        w = w.reshape(heads, rows, keys)
        m, left, r = w @ k, w @ y, p @ z
        gram = m @ m.mT
        gram *= _spread(x @ x.mT, channels)
        products = left @ left.mT
        products *= _spread(q @ q.mT, channels)
        gram += products
        gram.view(heads, tokens, channels, tokens, channels).diagonal(dim1=2, dim2=4).add_((r @ r.mT).unsqueeze(-1))
        try:
            eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
        except LinAlgError:  # finite data, and LAPACK gave up on one of them
            return {}
        values = eigenvalues.flip(-1).clamp_min(0).sqrt()
        sound = (values[:, -1] * GRAM_LIMIT > values[:, 0]) & values.isfinite().all(dim=-1)
        return {head: values[head] for head in sound.nonzero().flatten().tolist()}


def _spread(products: Tensor, channels: int) -> Tensor:
    """Return each product of tokens once for every pair of channels."""
    return products.repeat_interleave(channels, dim=-2).repeat_interleave(channels, dim=-1)
