"""The Jacobian of an attention head with respect to its query, key and value weights, in closed form.

One head computes ``A = P V`` (N x v) with ``P = softmax(s Q K^T + mask)``, ``q_i = T_i W_Q x_i + const`` and so on; the
maps ``T_i`` (rotary positions, the derivative of a normalisation) are the identity for most models. A row of the
Jacobian J belongs to one output (token i, channel a), a column to one entry of W_Q, W_K or W_V. With

    W_i = (p_ij (v_j - A_i))_j  (v x M)      M_i = s W_i K  (v x d)      L_i = s W_i X_k  (v x D)      R = P X_v

the v x v block (i, j) of the Gram matrix ``G = J J^T`` is, without maps,

    G_ij = (x_i . x_j) M_i M_j^T + (q_i . q_j) L_i L_j^T + (r_i . r_j) I_v.

G has N v rows, whatever the number of parameters, and neither autograd nor J itself is needed. Derived for this package
from the derivative of the softmax, ``S_i = diag(p_i) - p_i p_i^T``; tests compare it with autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from lit_cond.errors import ConfigurationError
from lit_cond.functional.condition_number import condition_of_spectrum, singular_tolerance, singular_values
from lit_cond.functional.head_derivatives import HeadDerivatives, head_derivatives

__all__ = ["JacobianSpectrum", "attention_jacobian_gram", "attention_jacobian_singular_values"]

# Up to this condition number of J the eigenvalues of its float64 Gram matrix are trusted: squaring costs sigma_min a
# relative error of some eps * kappa^2, here 2e-6 times a small factor.
GRAM_LIMIT = 1e5


@dataclass(frozen=True)
class JacobianSpectrum:
    """Singular values of a head's Jacobian, or of the rows of it that were measured.

    Attributes:
        values: Singular values, descending, float64, one for each measured output: (rows,). Zeros where the head has
            fewer parameters than outputs; NaN if an input is not finite.
        tokens: Output tokens that were measured, ascending.
        exact: Whether these are all tokens that see anything. Otherwise the values belong to some rows of J, and by
            interlacing their condition number is a lower bound of that of J.
        parameters: Entries of W_Q, W_K and W_V together, so that the rank is at most ``min(rows, parameters)``.
        rtol: Parts of the largest singular value up to which one counts as zero.
    """

    values: Tensor
    tokens: tuple[int, ...]
    exact: bool
    parameters: int
    rtol: float

    @property
    def rows(self) -> int:
        """Number of outputs that were measured: tokens times channels."""
        return self.values.shape[0]

    @property
    def rank_bound(self) -> int:
        """Largest rank that the sizes allow."""
        return min(self.rows, self.parameters)

    @property
    def condition(self) -> float:
        """Largest over smallest singular value; ``inf`` if the rank is below the number of rows, NaN if unknown."""
        shape = (self.rows, self.parameters)
        return float(condition_of_spectrum(self.values, shape, torch.float64, self.rtol))

    @property
    def rank(self) -> float:
        """Number of singular values above the tolerance; NaN if an input is not finite."""
        if self.values.isnan().any():
            return math.nan
        return float((self.values > self.rtol * self.values[:1]).sum())

    @property
    def smallest_nonzero(self) -> float:
        """Smallest singular value above the tolerance; 0 if there is none, NaN if an input is not finite."""
        rank = self.rank
        if math.isnan(rank):
            return math.nan
        return float(self.values[int(rank) - 1]) if rank else 0.0


def attention_jacobian_gram(
    query_tokens: Tensor,
    key_tokens: Tensor,
    value_tokens: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    probabilities: Tensor,
    scale: float,
    *,
    rows: Tensor | None = None,
    query_maps: Tensor | None = None,
    key_maps: Tensor | None = None,
    value_maps: Tensor | None = None,
) -> Tensor:
    """Return ``J J^T`` for the Jacobian J of one head's outputs ``P V`` by its W_Q, W_K and W_V, in float64.

    Self-attention has the same tokens three times. Biases need nothing, nor do masks and position biases that are added
    to the scores: they are in the probabilities. Rows of P may sum to less than 1 (attention sinks). Keys that no query
    sees may hold anything. Not differentiable; outside autocast.

    Args:
        query_tokens: What W_Q is applied to, of shape (N, D).
        key_tokens: What W_K is applied to, of shape (M, Dk).
        value_tokens: What W_V is applied to, of shape (M, Dv).
        query: Queries as they enter the scores, of shape (N, d).
        key: Keys as they enter the scores, of shape (M, d).
        value: Values as they are averaged, of shape (M, v).
        probabilities: Softmax of ``scale * query key^T + mask``, of shape (N, M), before dropout.
        scale: Factor of the products of queries and keys.
        rows: LongTensor of output tokens; the result is their principal block. None means all.
        query_maps: Derivatives T of each query by what W_Q returned for it, of shape (N, d, c), such as a rotation by
            its position; None means the identity.
        key_maps: The same for the keys, of shape (M, d, c).
        value_maps: The same for the values, of shape (M, v, c).

    Returns:
        Tensor of shape (n v, n v) for n output tokens, tokens first, then channels; all NaN if a number that takes part
        is not finite.

    Raises:
        ConfigurationError: Shapes do not fit each other.
    """
    tensors = (query_tokens, key_tokens, value_tokens, query, key, value, probabilities)
    parts = head_derivatives(*tensors, scale, rows, (query_maps, key_maps, value_maps))
    if not parts.finite:
        return parts.m.new_full((parts.rows, parts.rows), math.nan)
    return parts.gram() * parts.unit * parts.unit


def attention_jacobian_singular_values(
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
) -> JacobianSpectrum:
    """Return the singular values of the Jacobian of one head's outputs by its W_Q, W_K and W_V.

    Where there are more than ``max_rows`` outputs, evenly spread tokens are measured, all channels of each. Tokens that
    see nothing are left out: their output is constant. A singular value counts as zero up to ``max(size) *
    eps(float64)`` or, if any input is narrower than float64, ``eps(float32)`` parts of the largest; up to a condition
    number of 1e9 of float64 inputs the relative error is below 1e-2.

    Memory beside the inputs in float64 is about ``8 * max_rows * (14 * max_rows + 3 * M + 2 * min(M, Dk))`` bytes, plus
    ``8 * max_rows * M * d / v`` with key maps; time grows with the cube of ``max_rows``.

    Args:
        query_tokens: As in `attention_jacobian_gram`, and so are the others that are not named here.
        key_tokens: See there.
        value_tokens: See there.
        query: See there.
        key: See there.
        value: See there.
        probabilities: See there.
        scale: See there.
        max_rows: Largest number of outputs (tokens times channels) to measure.
        rows: LongTensor of the output tokens to choose from, without padding for example; None means all.
        query_maps: See there.
        key_maps: See there.
        value_maps: See there.

    Returns:
        The spectrum, and what it is of. It is empty if no token sees anything.

    Raises:
        ConfigurationError: Shapes do not fit each other, or ``max_rows`` does not hold a single token.
    """
    chosen, exact = _choose(probabilities, rows, value.shape[-1], max_rows)
    tensors = (query_tokens, key_tokens, value_tokens, query, key, value, probabilities)
    parts = head_derivatives(*tensors, scale, chosen, (query_maps, key_maps, value_maps))
    return JacobianSpectrum(
        values=_values(parts) * parts.unit if parts.finite else parts.m.new_full((parts.rows,), math.nan),
        tokens=tuple(chosen.tolist()),
        exact=exact,
        parameters=parts.parameters,
        rtol=jacobian_tolerance(tensors, parts.rows, parts.parameters),
    )


def jacobian_tolerance(tensors: tuple[Tensor, ...], rows: int, parameters: int) -> float:
    """Return the part of the largest singular value up to which one counts as zero.

    Args:
        tensors: What the Jacobian was made from.
        rows: Outputs.
        parameters: Entries of W_Q, W_K and W_V.

    Returns:
        The rounding of the computation, or that of the inputs if one of them is narrower than float64.
    """
    narrow = any(t.dtype != torch.float64 for t in tensors)
    return singular_tolerance((rows, parameters), torch.float32 if narrow else torch.float64)


def _choose(probabilities: Tensor, rows: Tensor | None, channels: int, max_rows: int) -> tuple[Tensor, bool]:
    """Return the output tokens to measure, and whether they are all that see anything."""
    if max_rows < channels:
        raise ConfigurationError(
            f"max_rows={max_rows} does not hold one output token of {channels} channels; give at least {channels}."
        )
    if probabilities.ndim != 2:
        raise ConfigurationError(
            f"probabilities of shape {tuple(probabilities.shape)} are not those of one head; give (queries, keys)."
        )
    seeing = (probabilities != 0).any(dim=-1).cpu()
    candidates = torch.arange(len(seeing)) if rows is None else torch.unique(rows.detach().cpu())
    if rows is not None and (
        rows.dtype != torch.long or (rows.numel() and not 0 <= candidates[0] <= candidates[-1] < len(seeing))
    ):
        raise ConfigurationError(
            f"rows of type {rows.dtype} choose none of {len(seeing)} output tokens; "
            f"give a LongTensor of indices from 0 to {len(seeing) - 1}."
        )
    candidates = candidates[seeing[candidates]]
    count = max_rows // max(1, channels)
    if len(candidates) <= count:
        return candidates, True
    # The middles of equal stretches: the first token of a causal model sees itself alone and is no typical one.
    spread = ((torch.arange(count) + 0.5) * (len(candidates) / count)).long()
    return candidates[spread], False


def _values(parts: HeadDerivatives) -> Tensor:
    """Return all singular values in units of ``parts.unit``."""
    if parts.rows == 0:
        return parts.m.new_zeros(0)
    try:
        eigenvalues: Tensor = torch.linalg.eigvalsh(parts.gram())
        values = eigenvalues.flip(-1).clamp_min(0).sqrt()
        if bool(values[-1] * GRAM_LIMIT > values[0]):
            return values
    except LinAlgError:  # finite data, and LAPACK gave up: the other route decides
        pass
    values = singular_values(_reduced(parts))
    return torch.cat([values, values.new_zeros(parts.rows - len(values))])


def _reduced(parts: HeadDerivatives) -> Tensor:
    """Return a matrix with the singular values of J and at most about three times as many columns as rows."""
    pending: list[Tensor] = []
    width = 0
    for block in parts.factors():
        pending.append(block.mT)
        width += block.shape[1]
        if width > 3 * parts.rows:
            triangle: Tensor = torch.linalg.qr(torch.cat(pending), mode="r")[1]
            pending, width = [triangle], triangle.shape[0]
    return torch.cat(pending).mT
