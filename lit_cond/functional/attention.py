"""The softmax of attention: its probabilities and how concentrated they are, measured or predicted before any data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError

__all__ = [
    "attention_entropy",
    "attention_probabilities",
    "predicted_attention_entropy",
    "row_entropy",
    "saturated_share",
]


def attention_probabilities(query: Tensor, key: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return ``softmax(scale * query key^T + mask)`` over the keys, in float64.

    A query that may see nothing gets a row of zeros. What a hidden token holds, even a NaN, reaches no row; a
    query with a non-finite score among the tokens that it sees gets a row of NaN and leaves the others alone.
    Not differentiable; outside autocast.

    Args:
        query: Queries of shape (..., N, d).
        key: Keys of shape (..., M, d); leading dimensions are broadcast.
        scale: Factor of the products, usually ``d ** -0.5``.
        mask: Broadcastable to (..., N, M). Boolean: true where a token may be seen. Floating point: added to
            the scores; minus infinity, and anything below half of the lowest number of its type (the lowest
            number stands for minus infinity in Hugging Face models), hides a token.

    Returns:
        Tensor of shape (..., N, M).

    Raises:
        ConfigurationError: The shapes do not fit each other, or the mask is an integer.
    """
    if query.ndim < 2 or key.ndim < 2 or query.shape[-1] != key.shape[-1]:
        raise ConfigurationError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} have no products; "
            "give (..., tokens, channels) with equal channels."
        )
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ConfigurationError(
            f"A mask of type {mask.dtype} is ambiguous; give booleans, true where a token may be seen, or a "
            "floating-point mask to add to the scores."
        )
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        scores = float(scale) * (query.double() @ key.double().mT)
        if mask is None:
            hidden = torch.zeros((), dtype=torch.bool, device=scores.device)
        else:
            fits = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
            if mask.ndim > scores.ndim or any(have not in (1, need) for have, need in fits):
                raise ConfigurationError(
                    f"A mask of shape {tuple(mask.shape)} does not fit scores of shape {tuple(scores.shape)}; "
                    "give one entry for each query and key, or dimensions of size 1."
                )
            mask = mask.to(scores.device)
            if mask.dtype == torch.bool:
                hidden = ~mask
            else:
                hidden = mask <= torch.finfo(mask.dtype).min / 2
                scores = scores + mask
        scores = scores.masked_fill(hidden, -math.inf)
        if scores.shape[-1] == 0:
            return scores
        largest = scores.amax(dim=-1, keepdim=True)  # NaN wherever a visible score is
        blind = largest == -math.inf
        weights = (scores - largest.masked_fill(blind, 0)).exp()
        return weights / weights.sum(dim=-1, keepdim=True).masked_fill(blind, 1)


def row_entropy(p: Tensor) -> Tensor:
    """Return the entropy ``-sum p log p`` of each row, in nats and float64.

    Uniform attention over M tokens has ``log(M)``, a row on a single token 0.

    Args:
        p: Probabilities of shape (..., M).

    Returns:
        Tensor of shape (...); NaN for a row that is zero (nothing to see), empty or not finite.
    """
    p = p.detach().double()
    entropy = torch.special.entr(p).sum(dim=-1)
    # Rounding of a row that sums to just above 1 must not make an entropy negative.
    return torch.where(_counts(p), entropy.clamp_min(0), math.nan)


def saturated_share(p: Tensor, threshold: float = 0.99, visible: Tensor | None = None) -> Tensor:
    """Return the share of rows whose largest probability is at least ``threshold``, in float64.

    Such a row passes hardly any gradient to query and key. Rows of zeros (nothing to see) do not count.

    Args:
        p: Probabilities of shape (..., N, M).
        threshold: Probability from which a row is saturated.
        visible: How many tokens each row may see, broadcastable to (..., N). If given, rows with fewer than
            two do not count: the first token of a causal model has no choice.

    Returns:
        Tensor of shape (...), between 0 and 1; NaN where no row counts or a row is not finite.

    Raises:
        ConfigurationError: ``threshold`` is not in (0, 1], or ``p`` has fewer than two dimensions.
    """
    if not 0 < threshold <= 1:
        raise ConfigurationError(f"threshold={threshold} is no probability; give a number in (0, 1], such as 0.99.")
    if p.ndim < 2:
        raise ConfigurationError(f"Probabilities of shape {tuple(p.shape)} have no rows; give (..., queries, keys).")
    p = p.detach().double()
    if p.shape[-1] == 0:
        return p.new_full(p.shape[:-2], math.nan)
    counts = p.sum(dim=-1) != 0
    if visible is not None:
        counts = counts & (visible.to(p.device) >= 2)
    # Rounding: a float32 softmax may give 0.98999995 for 0.99.
    saturated = (p.amax(dim=-1) >= threshold * (1 - 1e-6)) & counts
    share = saturated.sum(dim=-1).double() / counts.sum(dim=-1)  # 0 / 0 is NaN
    return torch.where((p.isfinite().all(dim=-1) | ~counts).all(dim=-1), share, math.nan)


def _counts(p: Tensor) -> Tensor:
    """Tell which rows are a distribution: finite and not all zero."""
    return p.isfinite().all(dim=-1) & (p != 0).any(dim=-1)


def attention_entropy(x: Tensor, query: Tensor, key: Tensor, num_heads: int, normalized: bool = False) -> float:
    r"""Return the mean entropy, in nats, of ``softmax(x Wq^T (x Wk^T)^T / sqrt(d))`` over heads and tokens.

    Without biases, position encodings or masks. Uniform attention has ``log(tokens)``; a value near 0 means
    that each token attends to a single one and the softmax passes hardly any gradient. Computed in float32,
    outside autocast.

    Args:
        x: Input of the projections, after the normalisation layer, of shape (batch, tokens, width).
        query: Weight of shape (num_heads * head_dim, width).
        key: Weight of shape (num_key_heads * head_dim, width), where num_key_heads divides num_heads.
        num_heads: Number of query heads.
        normalized: Divide by ``log(tokens)``, so that uniform attention has 1.

    Returns:
        The entropy; NaN if an input holds a NaN or an infinity.

    Raises:
        ConfigurationError: The shapes do not fit each other or ``num_heads``, or there is nothing to attend
            to.
    """
    head_dim, key_heads = _heads(query, key, num_heads)
    if x.ndim != 3 or x.shape[0] < 1 or x.shape[1] < 2 or x.shape[2] != query.shape[1]:
        raise ConfigurationError(
            f"Tokens of shape {tuple(x.shape)} can not attend by weights of width {query.shape[1]}; give "
            f"(batch, tokens, {query.shape[1]}) with at least one sequence of at least two tokens."
        )
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        x = x.to(query.device).float().unsqueeze(1)
        q = x @ query.float().reshape(num_heads, head_dim, -1).mT
        k = x @ key.to(query.device).float().reshape(key_heads, head_dim, -1).mT
        k = k.repeat_interleave(num_heads // key_heads, dim=1)
        log_p = (q @ k.mT / math.sqrt(head_dim)).log_softmax(dim=-1)
        # Where p underflows to 0 its logarithm is still finite here, unlike that of the softmax.
        entropy = 0.0 - (log_p.exp() * log_p).sum(dim=-1).mean().item()
    return entropy / math.log(x.shape[2]) if normalized else entropy


def predicted_attention_entropy(
    query: Tensor,
    key: Tensor,
    num_heads: int,
    num_tokens: int = 64,
    normalized: bool = False,
    seed: int = 0,
    num_sequences: int = 8,
) -> float:
    """Return `attention_entropy` for LayerNorm'd Gaussian tokens, to see saturation before any data.

    Independent tokens are the hard case: real ones resemble each other and keep a higher entropy. For the
    identity at 1 on width 64, 4 heads and 17 tokens this predicts 1.4 nats, and 8 x 8 images of digits have
    2.0; at 10 it predicts 0.0 and they have 0.2. Deterministic; the global random state is neither read nor
    moved.

    Args:
        query: Weight of shape (num_heads * head_dim, width).
        key: Weight of shape (num_key_heads * head_dim, width), where num_key_heads divides num_heads.
        num_heads: Number of query heads.
        num_tokens: Length of each sequence.
        normalized: Divide by ``log(num_tokens)``, so that uniform attention has 1.
        seed: Seed of the tokens.
        num_sequences: Number of sequences to average over.

    Returns:
        The entropy; NaN if the weights hold a NaN or an infinity.

    Raises:
        ConfigurationError: The shapes do not fit each other or ``num_heads``, or there is nothing to attend
            to.
    """
    if num_tokens < 2 or num_sequences < 1:
        raise ConfigurationError(
            f"num_tokens={num_tokens}, num_sequences={num_sequences} leave nothing to attend to; give at least 2 and 1."
        )
    _heads(query, key, num_heads)
    width = query.shape[1]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_sequences, num_tokens, width, generator=generator)
    return attention_entropy(torch.nn.functional.layer_norm(x, (width,)), query, key, num_heads, normalized)


def _heads(query: Tensor, key: Tensor, num_heads: int) -> tuple[int, int]:
    """Return the rows of one head and the number of key heads."""
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1]:
        raise ConfigurationError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} are no weights of one attention layer; "
            "give two (out_features, in_features) matrices of equal in_features."
        )
    if num_heads < 1 or query.shape[0] < 1 or query.shape[0] % num_heads:
        raise ConfigurationError(
            f"{query.shape[0]} query rows can not be cut into num_heads={num_heads} heads; give a divisor."
        )
    head_dim = query.shape[0] // num_heads
    key_heads, rest = divmod(key.shape[0], head_dim)
    if rest or key_heads < 1 or num_heads % key_heads:
        raise ConfigurationError(
            f"{key.shape[0]} key rows do not hold heads of {head_dim} rows whose number divides "
            f"num_heads={num_heads}; give the key weight of the same layer."
        )
    return head_dim, key_heads
