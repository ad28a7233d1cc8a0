"""One attention layer as it ran: its queries, keys, values and softmax, head by head and sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError
from lit_cond.functional.attention import attention_probabilities
from lit_cond.measuring.heads import by_head, canonical, per_query_head, real_tokens, visible
from lit_cond.measuring.records import Attended, Operand
from lit_cond.measuring.watch import Watch
from lit_cond.surgery.sites import AttentionSite

__all__ = ["ObservedAttention", "ObservedSample", "observe_call", "why_not"]

_APPROXIMATE = "it never computes all its scores (approximate attention)"


@dataclass(frozen=True, eq=False)
class ObservedSample:
    """The attention of one sample (a sequence, a window) in a layer, padding left out.

    Args:
        index: Which entry of the batch.
        queries: Positions of the real queries among the padded ones (n,).
        keys: Positions of the real keys (m,).
        query: Queries (heads, n, d).
        key: Keys, one set for each query head (heads, m, d).
        value: Values, likewise (heads, m, v).
        probabilities: The softmax (heads, n, m), float64; zero where a key is hidden.
        seen: How many keys each query may see (n,).
    """

    index: int
    queries: Tensor
    keys: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    probabilities: Tensor
    seen: Tensor

    @property
    def output(self) -> Tensor:
        """What the heads return, ``P V`` (heads, n, v), float64."""
        return self.probabilities @ self.value.double()


@dataclass(frozen=True, eq=False)
class ObservedAttention:
    """One attention layer as it ran.

    Args:
        site: The layer.
        samples: The first samples of the batch that have a token.
        skipped: How many of those looked at had none.
        attended: The operands as the kernel got them, whose tensors are not copied.
        scale: Factor between products and logits, None where the logits are more than that.
        obstacle: Why they are.
    """

    site: AttentionSite
    samples: tuple[ObservedSample, ...]
    skipped: int
    attended: Attended
    scale: float | None
    obstacle: str | None


def why_not(site: AttentionSite) -> str | None:
    """Return why the softmax of a layer can not be observed, by its kind; None if it can."""
    return _APPROXIMATE if site.kind == "approximate" else None


@torch.no_grad()
def _observed(site: AttentionSite, attended: Attended, limit: int) -> ObservedAttention:
    heads = site.num_heads
    query = by_head(canonical(attended.query), heads)
    heads = query.shape[1]
    key, value = (
        per_query_head(by_head(canonical(operand), _kv_heads(operand, count, heads)), heads)
        for operand, count in ((attended.key, site.heads("key")), (attended.value, site.heads("value")))
    )
    count = min(limit, query.shape[0])
    query, key, value = query[:count], key[:count], value[:count]
    if attended.logits is not None:
        logits = by_head(attended.logits, heads)[:count]
        seen = visible(logits)
        probabilities = _sharpened(logits, seen, query, key, attended.scale).softmax(dim=-1)
        seen = seen.any(dim=1)
    else:
        mask = _mask(attended, query, key, heads)
        probabilities = attention_probabilities(query, key, attended.scale or 1.0, mask)
        shape = (count, heads, query.shape[2], key.shape[2])
        seen = (visible(mask) if mask is not None else query.new_ones((), dtype=torch.bool)).expand(shape).any(dim=1)
    samples = [_sample(i, query[i], key[i], value[i], probabilities[i], seen[i]) for i in range(count)]
    kept = tuple(sample for sample in samples if len(sample.queries))
    return ObservedAttention(site, kept, count - len(kept), attended, attended.scale, attended.obstacle)


def _sharpened(logits: Tensor, seen: Tensor, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return logits in float64, from queries and keys where these are all that they are made of.

    Their own rounding would hide the small singular values of a softmax that is nearly uniform.
    """
    if scale is not None and logits.dtype != torch.float64:
        exact = scale * (query.double() @ key.double().mT)
        if exact.shape == logits.shape:
            wrong = torch.where(seen, exact - logits, 0).abs().amax()
            if bool(wrong <= 32 * torch.finfo(query.dtype).eps * torch.where(seen, exact, 0).abs().amax()):
                return exact.masked_fill(~seen, -torch.inf)
    return logits.double()


def _kv_heads(operand: Operand, count: int | None, heads: int) -> int | None:
    """Return the heads of keys or values as they were given: as many as there are weights for, or repeated."""
    leading = canonical(operand).shape[:-2]
    if count is None or count == heads or heads in leading or not leading:
        return heads
    return count


def _mask(attended: Attended, query: Tensor, key: Tensor, heads: int) -> Tensor | None:
    """Return the mask of a fused kernel for the samples looked at, broadcastable to (samples, heads, n, m)."""
    if attended.is_causal:
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    mask = attended.mask
    if mask is None:
        return None
    leading = attended.query.tensor.shape[:-2]
    whole = mask.expand(*leading, *mask.shape[-2:]) if mask.ndim > 2 else mask
    return by_head(whole, heads)[: query.shape[0]] if mask.ndim > 2 else whole


def _sample(
    index: int, query: Tensor, key: Tensor, value: Tensor, probabilities: Tensor, seen: Tensor
) -> ObservedSample:
    queries, keys = (mask.nonzero().flatten() for mask in real_tokens(seen))
    inside = seen[queries][:, keys]
    return ObservedSample(
        index,
        queries,
        keys,
        query[:, queries],
        key[:, keys],
        value[:, keys],
        probabilities[:, queries][:, :, keys] * inside,
        inside.sum(dim=1),
    )


def observe_call(
    sites: Sequence[AttentionSite],
    module: nn.Module,
    call: Callable[[], Any],
    note: Callable[[ObservedAttention], None],
    max_samples: int,
) -> tuple[Any, Exception | None]:
    """Run one call of an attention module and note what its layers attend to.

    Args:
        sites: The layers that the module holds, in the order in which they run.
        module: The module.
        call: Runs it.
        note: Called with each layer when the call is over, while its tensors are alive.
        max_samples: How many samples to look at.

    Returns:
        What the call returns, and what went wrong in looking, if anything did: the module attended otherwise than its
        layers say, or `note` raised.
    """
    ran: list[Attended] = []
    with Watch(module, ran.append, max_samples):
        result = call()
    problem: Exception | None = _mismatch(sites, ran)
    try:
        for site, attended in zip(sites, ran, strict=False) if problem is None else ():
            note(_observed(site, attended, max_samples))
    except Exception as error:  # handed on: a measurement that fails must not break the step
        problem = error
    return result, problem


def _mismatch(sites: Sequence[AttentionSite], ran: Sequence[Attended]) -> ConfigurationError | None:
    """Return what is wrong where a module did not run one softmax for each layer.

    One layer may run several of one shape, part of the sequence after part: the first one is a sample like any other.
    """
    first, kind = sites[0].name, type(sites[0].module).__name__
    if not ran:
        return ConfigurationError(
            f"'{first}' ({kind}) computes its softmax inside a kernel that can not be looked into; use an "
            "implementation that torch runs itself (attn_implementation='sdpa' or 'eager'), leave the layer out with "
            "`exclude`, or leave attention out of `quantities`"
        )
    shapes = {(a.query.tensor.shape, a.key.tensor.shape, a.value.tensor.shape) for a in ran}
    if len(ran) != len(sites) and (len(sites) > 1 or len(shapes) > 1):
        return ConfigurationError(
            f"'{first}' ({kind}) ran {len(ran)} softmaxes for {len(sites)} attention layer{'s' * (len(sites) > 1)}, as "
            "approximations of attention do, so there is no one matrix to measure; leave it out with `exclude`"
        )
    return None
