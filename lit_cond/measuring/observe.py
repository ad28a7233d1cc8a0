"""One attention layer as it ran: its queries, keys, values and softmax, head by head and sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

# Rows of a softmax that are computed at once, and its numbers from which one more sample would tell little.
_ROWS_AT_ONCE = 256
_NUMBERS = 2**20
_APPROXIMATE = "it never computes all its scores (approximate attention)"


@dataclass(frozen=True, eq=False)
class ObservedSample:
    """The attention of one sample (a sequence, a window) in a layer, padding left out.

    Softmax matrices are computed when they are asked for, of as many queries as are asked for: those of a long sequence
    do not fit into memory.

    Args:
        index: Which entry of the batch.
        queries: Positions of the real queries among the padded ones (n,).
        keys: Positions of the real keys (m,).
        query: Queries (heads, n, d).
        key: Keys, one set for each query head (heads, m, d).
        value: Values, likewise (heads, m, v).
        seen: How many keys each query may see (n,).
        rows: Returns the softmax of some of the real queries (heads, rows, m), float64; zero where a key is hidden.
    """

    index: int
    queries: Tensor
    keys: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    rows: Callable[[Tensor], Tensor]

    def spread(self, most: int) -> Tensor:
        """Return all real queries (n,), or as many as `most`, evenly spread, where there are more."""
        count = len(self.queries)
        every = torch.arange(count, device=self.queries.device)
        if count <= most:
            return every
        return ((every[:most] + 0.5) * (count / most)).long()

    @property
    def probabilities(self) -> Tensor:
        """The whole softmax (heads, n, m), float64."""
        return self.rows(self.spread(len(self.queries)))

    @property
    def output(self) -> Tensor:
        """What the heads return, ``P V`` (heads, n, v), float64; computed part by part."""
        value = self.value.double()
        parts = torch.split(self.spread(len(self.queries)), _ROWS_AT_ONCE)
        return torch.cat([self.rows(part) @ value for part in parts], dim=1)


@dataclass(frozen=True, eq=False)
class ObservedAttention:
    """One attention layer as it ran.

    Args:
        site: The layer.
        samples: The first samples of the batch that have a token.
        skipped: How many of those looked at had none.
        attended: The operands as the kernel got them, whose tensors are not copied.
        inputs: What the heads of a sample project, by its index, as soon as a quantity has asked for it.
    """

    site: AttentionSite
    samples: tuple[ObservedSample, ...]
    skipped: int
    attended: Attended
    inputs: dict[int, Any] = field(default_factory=dict)


def why_not(site: AttentionSite) -> str | None:
    """Return why the softmax of a layer can not be observed, by its kind; None if it can."""
    return _APPROXIMATE if site.kind == "approximate" else None


@torch.no_grad()
def _observed(site: AttentionSite, attended: Attended, limit: int, needed: int) -> ObservedAttention:
    query = by_head(canonical(attended.query), site.num_heads)
    heads = query.shape[1]
    key, value = (
        per_query_head(by_head(canonical(operand), heads_of(operand, len(query))), heads)
        for operand in (attended.key, attended.value)
    )
    if len(key) != len(query) or len(value) != len(query):
        raise ConfigurationError(f"'{site.name}': its keys or values belong to other samples than its queries")
    same = _same_tokens(site, attended)
    size = heads * min(query.shape[2], _ROWS_AT_ONCE) * key.shape[2]
    count = min(len(query), max(needed, min(limit, _NUMBERS // max(1, size))))
    logits = None if attended.logits is None else by_head(attended.logits, heads)
    if query.numel() == 0 or key.numel() == 0:
        raise ConfigurationError(f"'{site.name}': it attends with no tokens at all")
    if logits is not None and logits.shape[2] != query.shape[2]:
        raise ConfigurationError(f"'{site.name}': its softmax has other rows than there are queries")
    mask = None if logits is not None else _mask(attended, query, key, heads)
    samples = []
    for i in range(count):
        own = None if mask is None else mask[i if len(mask) > 1 else 0]
        sample = _sample(
            i, query[i], key[i], value[i], None if logits is None else logits[i], own, attended.scale, same
        )
        if len(sample.queries):
            samples.append(sample)
    return ObservedAttention(site, tuple(samples), count - len(samples), attended)


def heads_of(operand: Operand, samples: int) -> int:
    """Return how many heads keys or values have: what their leading axes hold besides the samples, at least one."""
    return max(1, math.prod(canonical(operand).shape[:-2]) // max(1, samples))


def _same_tokens(site: AttentionSite, attended: Attended) -> bool:
    """Whether queries and keys are made of the same tokens, so that padding is the same for both."""
    if site.kind == "cross":
        return False
    made = [[p.inputs for p in operand.projections] for operand in (attended.query, attended.key)]
    shared = any(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a in made[0] for b in made[1])
    # A forward pass has told self- from cross-attention; the table of layouts can not.
    return shared or site.traced or not all(made)


def _mask(attended: Attended, query: Tensor, key: Tensor, heads: int) -> Tensor | None:
    """Return the mask of a fused kernel (samples or 1, heads or 1, n or 1, m)."""
    if attended.is_causal:
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    mask = attended.mask
    if mask is None:
        return None
    if mask.ndim <= 2:
        return mask.reshape(1, 1, -1, mask.shape[-1])
    if mask.ndim == 4 and mask.shape[0] in (1, len(query)) and mask.shape[1] in (1, heads):
        return mask
    return by_head(mask.expand(*attended.query.tensor.shape[:-2], *mask.shape[-2:]), heads)


def _sample(
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    same: bool,
) -> ObservedSample:
    """Return one sample of (heads, tokens, channels) with its logits (heads, n, m), or mask (heads or 1, n or 1, m)."""
    shape = (query.shape[1], key.shape[1])
    if logits is not None:
        seen = visible(logits).any(dim=0)[:, : shape[1]]
    elif mask is not None:
        seen = visible(mask).any(dim=0).expand(shape)
    else:
        seen = torch.ones((), dtype=torch.bool, device=query.device).expand(shape)
    queries, keys = (real.nonzero().flatten() for real in real_tokens(seen, same))

    def rows(chosen: Tensor) -> Tensor:
        at = queries[chosen]
        if logits is not None:
            # Columns behind the keys are attention sinks: they take their share and are dropped (GPT-OSS).
            sinks = torch.arange(shape[1], logits.shape[2], device=keys.device)
            part = logits[:, at][:, :, torch.cat([keys, sinks])]
            shown = visible(part)
            sharp = _sharpened(part, shown, query[:, at], key[:, keys], scale)
            return (sharp.softmax(dim=-1) * shown)[..., : len(keys)]
        own = mask
        if own is not None:
            own = (own[:, at] if own.shape[1] > 1 else own)[:, :, keys]
        return attention_probabilities(query[:, at], key[:, keys], 1.0 if scale is None else scale, own)

    return ObservedSample(
        index,
        queries,
        keys,
        query[:, queries],
        key[:, keys],
        value[:, keys],
        seen[queries][:, keys].sum(dim=1),
        rows,
    )


def _sharpened(logits: Tensor, seen: Tensor, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return logits in float64, from queries and keys where these are all that they are made of.

    Their own rounding would hide the small singular values of a softmax that is nearly uniform.
    """
    if scale is not None and logits.dtype != torch.float64:
        exact = scale * (query.double() @ key.double().mT)
        if exact.shape == logits.shape:
            # Each logit is rounded for itself, and by the sum of products that it is.
            eps = max(torch.finfo(query.dtype).eps, torch.finfo(logits.dtype).eps)
            size = abs(scale) * (query.double().abs() @ key.double().abs().mT)
            allowed = 4 * eps * exact.abs() + 32 * torch.finfo(torch.float32).eps * size
            if bool(((exact - logits).abs() <= allowed)[seen].all()):
                return exact.masked_fill(~seen, -torch.inf)
    return logits.double()


def observe_call(
    sites: Sequence[AttentionSite],
    module: nn.Module,
    call: Callable[[], Any],
    note: Callable[[ObservedAttention], None],
    max_samples: int,
    needed: int = 1,
) -> tuple[Any, Exception | None]:
    """Run one call of an attention module and note what its layers attend to.

    Args:
        sites: The layers that the module holds, in the order in which they run.
        module: The module.
        call: Runs it.
        note: Called with each layer when the call is over, while its tensors are alive.
        max_samples: How many samples to look at; fewer where they are long: a million numbers of softmax are enough.
        needed: How many samples to look at in any case.

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
            note(_observed(site, attended, max_samples, needed))
    except Exception as error:  # handed on: a measurement that fails must not break the step
        problem = error
    return result, problem


def _mismatch(sites: Sequence[AttentionSite], ran: Sequence[Attended]) -> ConfigurationError | None:
    """Return what is wrong where a module did not run one softmax for each layer.

    One layer may run several, sequence after sequence (packed images): the first one is a sample like any other.
    """
    first, kind = sites[0].name, type(sites[0].module).__name__
    if not ran:
        return ConfigurationError(
            f"'{first}' ({kind}) computes its softmax where it can not be looked into: in a kernel of its own (use "
            "attn_implementation='sdpa' or 'eager' where there is a choice) or without torch's softmax; leave it out "
            "with `exclude`, or leave attention out of `quantities`"
        )
    if len(ran) != len(sites) and not (len(sites) == 1 and _are_sequences(sites[0], ran)):
        return ConfigurationError(
            f"'{first}' ({kind}) ran {len(ran)} softmaxes for {len(sites)} attention layer{'s' * (len(sites) > 1)} (an "
            "approximation, a difference, or part after part), so there is no one matrix to measure; leave it out with "
            "`exclude`"
        )
    return None


def _are_sequences(site: AttentionSite, ran: Sequence[Attended]) -> bool:
    """Whether softmaxes belong to different sequences: all heads, square, with keys and values of their own."""
    keys, values = {a.key.tensor.data_ptr() for a in ran}, {a.value.tensor.data_ptr() for a in ran}
    own = len(keys) == len(values) == len(ran)
    square = all(a.query.tensor.shape[a.query.tokens] == a.key.tensor.shape[a.key.tokens] for a in ran)
    heads = {by_head(canonical(a.query), site.num_heads).shape[1] for a in ran}
    return own and square and (site.num_heads is None or heads == {site.num_heads})
