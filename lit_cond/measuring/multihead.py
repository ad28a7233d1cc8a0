"""The inside of `torch.nn.functional.multi_head_attention_forward`, computed anew from its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_cond.measuring.records import Attended, Operand, Projection

__all__ = ["multi_head_attention"]


@torch.no_grad()
def multi_head_attention(args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> Attended:
    """Return what a call of the function attends with.

    Args:
        args: Its arguments.
        kwargs: Its named arguments.
        samples: How many entries of the batch to compute.
    """
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    heads = given["num_heads"]
    # (tokens, batch, channels), or without a batch.
    batched = given["query"].ndim == 3
    inputs = [_samples(given[role], samples) for role in ("query", "key", "value")]
    weights, biases = _projections(given)
    projected = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    # What the module adds to the keys and values of every sequence.
    extra = (None, given["bias_k"], given["bias_v"])
    operands = []
    for place, (x, u) in enumerate(zip(inputs, projected, strict=True)):
        parts = [u]
        if (bias := extra[place]) is not None:
            parts.append(bias.to(u).expand(u.shape[0], 1, -1))
        if place > 0 and given["add_zero_attn"]:
            parts.append(u.new_zeros(u.shape[0], 1, u.shape[2]))
        split = torch.cat(parts, dim=1)
        split = split.view(*split.shape[:2], heads, -1).transpose(1, 2)
        operands.append(Operand(split, -2, -1, (Projection(x, -1, u, -1),)))
    query, key, value = operands
    mask = _mask(given, heads, len(inputs[0]), batched)
    if mask is not None:
        mask = F.pad(mask, (0, key.tensor.shape[-2] - inputs[1].shape[1]))
    return Attended(query, key, value, scale=query.tensor.shape[-1] ** -0.5, mask=mask)


def _samples(tokens: Tensor, samples: int) -> Tensor:
    """Return the first sequences of (tokens, batch, channels) as (batch, tokens, channels)."""
    return tokens[:, :samples].transpose(0, 1) if tokens.ndim == 3 else tokens.unsqueeze(0)


def _projections(given: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    bias = given["in_proj_bias"]
    biases = [None, None, None] if bias is None else list(bias.chunk(3))
    if given["use_separate_proj_weight"]:
        return [given[f"{role}_proj_weight"] for role in "qkv"], biases
    return list(given["in_proj_weight"].chunk(3)), biases


def _mask(given: Mapping[str, Any], heads: int, batch: int, batched: bool) -> Tensor | None:
    """Return an additive mask (batch or 1, heads or 1, queries or 1, keys) of both masks; hidden is -inf."""
    total: Tensor | None = None
    attention, padding = given["attn_mask"], given["key_padding_mask"]
    if attention is not None:
        mask = _additive(attention)
        if mask.ndim == 3:
            mask = mask.view(-1, heads, *mask.shape[1:])[:batch]
        total = mask
    if padding is not None:
        hidden = _additive(padding if batched else padding.unsqueeze(0))[:batch, None, None, :]
        total = hidden if total is None else total + hidden
    return total


def _additive(mask: Tensor) -> Tensor:
    """Return a mask of torch's multi-head attention, where True hides, as one that is added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, float("-inf"))
