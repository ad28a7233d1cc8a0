"""The bound of Theorem 3.4 on the condition number of a head's Jacobian, factor by factor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError
from lit_cond.functional.condition_number import condition_number

__all__ = ["JacobianBound", "jacobian_bound", "jacobian_bounds", "softmax_derivative_range"]

# A row of a float32 softmax sums to 1 up to some 1e-7. What is missing beyond this belongs to an attention sink.
_SUM_TOLERANCE = 1e-5


@dataclass(frozen=True)
class JacobianBound:
    """Factors of the bound: condition numbers, at least 1, ``inf`` where singular and NaN where not finite.

    Attributes:
        tokens: kappa(X).
        query: kappa(W_Q).
        key: kappa(W_K).
        value: kappa(W_V).
        scores: kappa of the softmax matrix P.
        softmax_derivative: kappa(Lambda) as it stands, infinite for any softmax.
        softmax_derivative_nonzero: Largest over smallest *non-zero* singular value of Lambda.
    """

    tokens: float
    query: float
    key: float
    value: float
    scores: float
    softmax_derivative: float
    softmax_derivative_nonzero: float

    @property
    def bound(self) -> float:
        """The bound as it stands: infinite for any softmax, so it says nothing."""
        return self._with(self.softmax_derivative)

    @property
    def bound_nonzero(self) -> float:
        """The same expression with ``softmax_derivative_nonzero``. No theorem says that it bounds kappa(J)."""
        return self._with(self.softmax_derivative_nonzero)

    def _with(self, softmax: float) -> float:
        try:
            return self.tokens**3 * softmax * self.value * (self.query + self.key) + self.tokens * self.scores
        except OverflowError:
            return math.inf


def jacobian_bound(tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: Tensor) -> JacobianBound:
    r"""Return the right-hand side of Theorem 3.4 of *Spectral Conditioning of Attention* (arXiv 2603.07162).

    For self-attention, with J the Jacobian of one head's output by W_Q, W_K and W_V,

    ``kappa(J) <= kappa(X)^3 kappa(Lambda) kappa(W_V) (kappa(W_Q) + kappa(W_K)) + kappa(X) kappa(softmax(.))``.

    The paper's text could not be read; its formula is known second hand, with Lambda "the derivative of softmax" and
    no further definition. Taken literally that is the block-diagonal matrix of ``S_i = diag(p_i) - p_i p_i^T``, one
    block for each query, and each block is singular: ``S_i 1 = 0``, since a constant added to the scores changes
    nothing. So kappa(Lambda), and with it the bound, is infinite, and this is what ``bound`` reports. Beside it
    ``bound_nonzero`` takes the largest over the smallest non-zero singular value of Lambda, over all queries: the
    condition number of Lambda on its range. That is our reading, finite and useful to compare layers and steps; it is
    not proven to bound kappa(J). A query that sees a single token has ``S_i = 0`` and no non-zero value to give.

    Args:
        tokens: Input X of the projections, of shape (N, D).
        query: Weight of one head, of shape (d, D); its transpose is as good.
        key: The same for the keys.
        value: The same for the values.
        probabilities: Softmax of the scores, of shape (N, M), float64 where it is to be right for tiny probabilities.

    Returns:
        The factors and the two bounds.

    Raises:
        ConfigurationError: An argument is no real matrix.
    """
    named = {"tokens": tokens, "query": query, "key": key, "value": value, "probabilities": probabilities}
    for name, tensor in named.items():
        if tensor.ndim != 2 or tensor.is_complex():
            raise ConfigurationError(
                f"{name} of shape {tuple(tensor.shape)} and type {tensor.dtype} is no real matrix; "
                "give one head of one sample."
            )
    heads = (query[None], key[None], value[None], probabilities[None])
    return jacobian_bounds(tokens, *heads)[0]


def jacobian_bounds(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, probabilities: Tensor
) -> list[JacobianBound]:
    """Return `jacobian_bound` of every head of one layer; what the heads share is computed once.

    Args:
        tokens: Input X of the projections, of shape (N, D).
        query: Weights of the heads, of shape (heads, d, D).
        key: The same for the keys.
        value: The same for the values.
        probabilities: Softmax of the scores, of shape (heads, N, M).

    Raises:
        ConfigurationError: An argument is no stack of real matrices, or the numbers of heads differ.
    """
    heads = {"query": query, "key": key, "value": value, "probabilities": probabilities}
    if any(t.ndim != 3 or len(t) != len(query) for t in heads.values()):
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in heads.items())
        raise ConfigurationError(f"{shapes} do not hold one matrix for each head; give (heads, rows, columns).")
    shared = float(condition_number(tokens))
    kappas = zip(*(condition_number(t).tolist() for t in heads.values()), strict=True)
    result = []
    for head, (w_query, w_key, w_value, scores) in zip(probabilities, kappas, strict=True):
        largest, smallest, singular = softmax_derivative_range(head)
        on_range = math.nan if math.isnan(largest) else largest / smallest if smallest > 0 else math.inf
        strict = math.inf if singular and not math.isnan(on_range) else on_range
        result.append(JacobianBound(shared, w_query, w_key, w_value, scores, strict, on_range))
    return result


def softmax_derivative_range(probabilities: Tensor) -> tuple[float, float, bool]:
    """Return the ends of the non-zero spectrum of the matrices ``diag(p) - p p^T``, and whether any is singular.

    The non-zero eigenvalues are the roots of ``lambda * sum_j p_j / (p_j - lambda) = 1 - sum_j p_j``, which interlace
    with p, so that the smallest is found to full relative precision however small; an eigensolver would lose it in the
    rounding of the largest.

    Args:
        probabilities: Rows of shape (N, M). Rows of zeros are left out; a row may sum to less than 1 (attention sinks).

    Returns:
        The largest and the smallest non-zero eigenvalue over all rows, 0 and 0 if there is none, NaN if an entry is
        not finite; true if a row sums to 1.
    """
    p = probabilities.detach().double()
    if not p.isfinite().all():
        return math.nan, math.nan, False
    p = p[(p > 0).any(dim=-1)].clamp_min(0)
    if p.numel() == 0:
        return 0.0, 0.0, False
    rest = 1 - p.sum(dim=-1)
    rest = torch.where(rest < _SUM_TOLERANCE, 0, rest)
    ascending = p.sort(dim=-1)[0]
    seen = (ascending > 0).sum(dim=-1)
    first = (p.shape[1] - seen).clamp_max(p.shape[1] - 1)
    zero = torch.zeros(len(p), 1, dtype=p.dtype, device=p.device)
    padded = torch.cat([zero, ascending], dim=1)  # padded[k + 1] is ascending[k]
    take = [padded.gather(1, index.unsqueeze(1)) for index in (first, first + 1, (first + 2).clamp_max(p.shape[1]))]
    sinks = rest > 0
    # Between 0 and the smallest p where a sink takes its share, else between the two smallest.
    low = torch.where(sinks.unsqueeze(1), zero, take[1])
    high = torch.where(sinks.unsqueeze(1), take[1], take[2])
    # One visible token and no sink: the matrix is zero.
    counts = sinks | (seen > 1)
    if not counts.any():
        return 0.0, 0.0, True
    below, above = padded[:, -2:-1], padded[:, -1:]
    # Only rows whose interval reaches as far as any other's can hold the end.
    first_rows = counts & (low <= high[counts].min()).squeeze(1)
    last_rows = counts & (above >= below[counts].max()).squeeze(1)
    smallest = _root(ascending[first_rows], rest[first_rows], low[first_rows], high[first_rows])
    largest = _root(ascending[last_rows], rest[last_rows], below[last_rows], above[last_rows])
    return float(largest.max()), float(smallest.min()), bool((~sinks).any())


def _root(p: Tensor, rest: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the eigenvalue of each row between two neighbouring poles, by bisection of an increasing function."""
    width, distance = high - low, p - low
    left, right = torch.zeros_like(low), torch.ones_like(low)
    for _ in range(64):
        middle = (left + right) / 2
        gap = distance - middle * width
        value = (low + middle * width) * torch.where(p > 0, p / gap, 0).sum(dim=-1, keepdim=True) - rest.unsqueeze(1)
        below = value < 0
        left, right = torch.where(below, middle, left), torch.where(below, right, middle)
    return (low + left * width).squeeze(1)
