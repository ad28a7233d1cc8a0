"""The derivatives of a head's outputs, kept as the small factors of which its Jacobian is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError

__all__ = ["HeadDerivatives", "head_derivatives"]

# Numbers in one temporary of the sums over pairs of tokens: 32 MB.
_PAIRS = 2**22


@dataclass(frozen=True)
class HeadDerivatives:
    """Derivatives of n output tokens, v channels each, in float64 and in units of ``unit``.

    A row (i, a) of the Jacobian holds ``m[i, a] x x[i]``, then ``sum_j w[i, a, j] u[i, j] x y[j]`` where ``u[i, j]`` is
    ``q[i]`` without maps, then ``sum_j p[i, j] t[j, a] x z[j]`` where ``t[j]`` is the identity without maps.

    Attributes:
        x: Tokens of the queries, of shape (n, D).
        m: Derivatives by what W_Q returns, of shape (n, v, d).
        y: Tokens of the keys, of shape (M, Dk).
        w: Derivatives by the scores, of shape (n, v, M).
        q: Queries, of shape (n, d).
        z: Tokens of the values, of shape (M, Dv).
        p: Probabilities, of shape (n, M).
        key_maps: None, or of shape (M, d, c).
        value_maps: None, or of shape (M, v, c).
        unit: What the Jacobian was divided by, against overflow and underflow.
        finite: Whether all numbers that were used are finite.
        parameters: Entries of W_Q, W_K and W_V together: the number of columns.
    """

    x: Tensor
    m: Tensor
    y: Tensor
    w: Tensor
    q: Tensor
    z: Tensor
    p: Tensor
    key_maps: Tensor | None
    value_maps: Tensor | None
    unit: float
    finite: bool
    parameters: int

    @property
    def rows(self) -> int:
        """Number of outputs, n v."""
        return self.m.shape[0] * self.m.shape[1]

    def gram(self, a: slice = slice(None), b: slice = slice(None)) -> Tensor:
        """Return the block of J J^T of the tokens ``a`` by the tokens ``b``, in units of ``unit`` squared."""
        m_a, m_b = self.m[a].flatten(0, 1), self.m[b].flatten(0, 1)
        v = self.m.shape[1]
        shape = (m_a.shape[0] // v, v, m_b.shape[0] // v, v)
        result = (m_a @ m_b.mT).view(shape)
        result *= (self.x[a] @ self.x[b].mT)[:, None, :, None]
        if self.key_maps is None:
            l_a, l_b = self.w[a].flatten(0, 1) @ self.y, self.w[b].flatten(0, 1) @ self.y
            products = (l_a @ l_b.mT).view(shape)
            products *= (self.q[a] @ self.q[b].mT)[:, None, :, None]
            result += products
        else:
            result += self._mapped_keys(a, b)
        if self.value_maps is None:
            r_a, r_b = self.p[a] @ self.z, self.p[b] @ self.z
            result.diagonal(dim1=1, dim2=3).add_((r_a @ r_b.mT).unsqueeze(-1))
        else:
            for channel in range(self.value_maps.shape[-1]):
                e_a, e_b = (self._mapped_value(part, channel).flatten(0, 1) for part in (a, b))
                result += (e_a @ e_b.mT).view(shape)
        return result.view(shape[0] * v, shape[2] * v)

    def _mapped_keys(self, a: slice, b: slice) -> Tensor:
        """Return the key term where every key has a map: a sum over pairs of keys."""
        assert self.key_maps is not None
        u_a, u_b = (torch.einsum("mdc,nd->nmc", self.key_maps, self.q[part]) for part in (a, b))
        w_a, w_b = self.w[a], self.w[b]
        v, tokens = self.m.shape[1], self.y.shape[0]
        result = self.m.new_zeros(len(u_a), v, len(u_b), v)
        step = max(1, _PAIRS // max(1, len(u_b) * tokens))
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            products = self.y @ self.y[part].mT
            for i in range(len(u_a)):
                pairs = (u_a[i] @ u_b[:, part].mT).mul_(products)  # (n_b, M, step)
                result[i] += (w_a[i] @ pairs @ w_b[:, :, part].mT).transpose(0, 1)
        return result

    def _mapped_value(self, a: slice, channel: int) -> Tensor:
        """Return the derivatives by the weights of one channel of the values, of shape (n, v, Dv)."""
        assert self.value_maps is not None
        return (self.p[a].unsqueeze(1) * self.value_maps[:, :, channel].mT) @ self.z

    def factors(self) -> Iterator[Tensor]:
        """Yield blocks of n v rows that side by side have the singular values of J, in units of ``unit``.

        Tokens enter by their triangular factors, so that there are as few columns as J may have rank, not D times d.
        """
        v = self.m.shape[1]
        x = _compress(self.x)
        yield (self.m.unsqueeze(-1) * x[:, None, None, :]).flatten(2).flatten(0, 1)
        y = _compress(self.y)
        if self.key_maps is None:
            left, q = _compress(self.w.flatten(0, 1) @ y), _compress(self.q).repeat_interleave(v, dim=0)
            for channel in range(q.shape[1]):
                yield left * q[:, channel : channel + 1]
        else:
            for channel in range(self.key_maps.shape[-1]):
                u = self.q @ self.key_maps[:, :, channel].mT
                yield (self.w * u.unsqueeze(1)).flatten(0, 1) @ y
        if self.value_maps is None:
            r = _compress(self.p @ self.z)
            identity = torch.eye(v, dtype=r.dtype, device=r.device)
            yield (r[:, None, :, None] * identity[:, None, :]).flatten(2).flatten(0, 1)
        else:
            for channel in range(self.value_maps.shape[-1]):
                yield self._mapped_value(slice(None), channel).flatten(0, 1)


def head_derivatives(
    query_tokens: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    scale: float,
    rows: Tensor | None,
    maps: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> HeadDerivatives:
    """Return the derivatives of the output tokens ``rows``; see `attention_jacobian_gram` for the arguments."""
    query_maps, key_maps, value_maps = maps
    tensors = (query_tokens, key_tokens, value_tokens, query, key, value, probabilities)
    chosen = torch.arange(sum(probabilities.shape[:1])) if rows is None else rows.detach().cpu()
    _check(tensors, chosen)
    _check_maps(maps, (query, key, value))
    device = probabilities.device
    chosen = chosen.to(device)

    def prepare(tensor: Tensor, index: Tensor) -> Tensor:
        return tensor.detach().to(device)[index].double()

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        p = prepare(probabilities, chosen)
        # Keys that no chosen query sees contribute nothing, whatever padding they hold.
        seen = (p != 0).any(dim=0).nonzero().squeeze(-1)
        p = p[:, seen]
        x, q = (prepare(t, chosen) for t in (query_tokens, query))
        y, z, k, v = (prepare(t, seen) for t in (key_tokens, value_tokens, key, value))
        t_q = None if query_maps is None else prepare(query_maps, chosen)
        t_k, t_v = (None if t is None else prepare(t, seen) for t in (key_maps, value_maps))
        used = [t for t in (x, q, y, z, k, v, p, t_q, t_k, t_v) if t is not None]
        finite = all(bool(t.isfinite().all()) for t in used) and math.isfinite(scale)
        parameters = (
            (q if t_q is None else t_q).shape[-1] * x.shape[1]
            + (q if t_k is None else t_k).shape[-1] * y.shape[1]
            + (v if t_v is None else t_v).shape[-1] * z.shape[1]
        )
        # Every factor is scaled to 1, and each of the three parts of J gets its share of the common unit.
        (x, s_x), (q, s_q), (y, s_y), (z, s_z), (k, s_k), (v, s_v) = (_scaled(t) for t in (x, q, y, z, k, v))
        (t_q, s_tq), (t_k, s_tk), (t_v, s_tv) = ((None, 1.0) if t is None else _scaled(t) for t in (t_q, t_k, t_v))
        sizes = [abs(scale) * s_v * s_k * s_tq * s_x, abs(scale) * s_v * s_q * s_tk * s_y, s_tv * s_z]
        unit = max(sizes) if finite else math.nan
        finite = finite and math.isfinite(unit)
        part_q, part_k, part_v = (size / unit if unit > 0 else 0.0 for size in sizes)
        output = p @ v
        w = p.unsqueeze(1) * (v.mT - output.unsqueeze(-1))
        m = w @ k
        return HeadDerivatives(
            x=x * part_q,
            m=m if t_q is None else m @ t_q,
            y=y * part_k,
            w=w,
            q=q,
            z=z * part_v,
            p=p,
            key_maps=t_k,
            value_maps=t_v,
            unit=unit,
            finite=finite,
            parameters=parameters,
        )


def _scaled(t: Tensor) -> tuple[Tensor, float]:
    """Return a tensor whose largest entry is 1, and what it was divided by."""
    largest = float(t.abs().max()) if t.numel() else 0.0
    if not 0 < largest < math.inf:
        return t, 0.0 if largest == 0 else largest
    return t / largest, largest


def _compress(b: Tensor) -> Tensor:
    """Return a matrix with the products of rows of ``b``, and no more columns than rows."""
    if b.shape[1] <= b.shape[0]:
        return b
    # Householder QR is stable for each column of b^T, so small tokens beside large ones keep their digits.
    triangle: Tensor = torch.linalg.qr(b.mT, mode="r")[1]
    return triangle.mT


def _check(tensors: tuple[Tensor, ...], rows: Tensor) -> None:
    names = ("query_tokens", "key_tokens", "value_tokens", "query", "key", "value", "probabilities")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.ndim != 2 or tensor.is_complex():
            raise ConfigurationError(
                f"{name} of shape {tuple(tensor.shape)} and type {tensor.dtype} is no real matrix; "
                "give one row for each token of a single head of a single sample."
            )
    query, key = tensors[3], tensors[4]
    n, m = tensors[6].shape
    for name, tensor, tokens in zip(names, tensors[:6], (n, m, m, n, m, m), strict=False):
        if tensor.shape[0] != tokens:
            raise ConfigurationError(
                f"{name} has {tensor.shape[0]} rows, and probabilities of shape {(n, m)} ask for {tokens}; "
                "give one row for each token of the same sample."
            )
    if query.shape[1] != key.shape[1]:
        raise ConfigurationError(
            f"query and key have {query.shape[1]} and {key.shape[1]} channels; give those of one head."
        )
    if rows.ndim != 1 or rows.dtype != torch.long or (rows.numel() and not 0 <= rows.min() <= rows.max() < n):
        raise ConfigurationError(
            f"rows of shape {tuple(rows.shape)} and type {rows.dtype} choose none of {n} output tokens; "
            f"give a LongTensor of indices from 0 to {n - 1}."
        )


def _check_maps(maps: tuple[Tensor | None, ...], operands: tuple[Tensor, ...]) -> None:
    for name, given, operand in zip(("query_maps", "key_maps", "value_maps"), maps, operands, strict=True):
        if given is not None and (given.ndim != 3 or given.shape[:2] != operand.shape or given.is_complex()):
            raise ConfigurationError(
                f"{name} of shape {tuple(given.shape)} do not fit {tuple(operand.shape)}; "
                f"give {(*operand.shape, operand.shape[1])}, one matrix for each token."
            )
