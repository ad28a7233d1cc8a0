"""Operands of attention as (samples, heads, tokens, channels), whatever layout a model computes with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_cond.measuring.records import Operand

__all__ = ["by_head", "canonical", "per_query_head", "real_tokens", "visible"]


# No real logit, and no position bias of a sequence of up to 10,000 tokens, is as low.
_HIDDEN = -9e3


def canonical(operand: Operand) -> Tensor:
    """Return an operand with its tokens and channels last (..., tokens, channels)."""
    return operand.tensor.detach().movedim((operand.tokens, operand.channels), (-2, -1))


def by_head(tensor: Tensor, heads: int | None) -> Tensor:
    """Return a tensor (..., a, b) as (samples, heads, a, b).

    The axes before the last two hold samples (sequences, windows) and heads in one of the orders in use: heads last,
    over one or several axes (groups), heads inside the batch axis, or heads before the batch.

    Args:
        tensor: Of shape (..., a, b).
        heads: How many heads there are; None takes the axis next to the last two, where there are two before them.
    """
    leading, last = tensor.shape[:-2], tensor.shape[-2:]
    if heads is None:
        heads = leading[-1] if len(leading) > 1 else 1
    for start in range(len(leading) - 1, -1, -1):
        if math.prod(leading[start:]) == heads:
            return tensor.reshape(-1, heads, *last)
    if heads == 1:
        return tensor.reshape(-1, 1, *last)
    if heads in leading:
        return tensor.movedim(leading.index(heads), -3).reshape(-1, heads, *last)
    if math.prod(leading) % heads == 0 and math.prod(leading) > 0:
        return tensor.reshape(-1, heads, *last)
    # Another number of heads than the module was thought to have: each entry stands for itself.
    return tensor.reshape(-1, 1, *last)


def per_query_head(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values (samples, kv heads, ...) with one entry for each query head (samples, heads, ...)."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1) if tensor.shape[1] != heads else tensor


def visible(mask: Tensor) -> Tensor:
    """Return where a mask, or logits with a mask added, let a key be seen (same shape).

    Hidden is minus infinity, or any number that stands for it in models: the lowest of a dtype, -1e9, -1e4.
    """
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def real_tokens(seen: Tensor, same: bool) -> tuple[Tensor, Tensor]:
    """Return which queries and keys are no padding, as the mask of one sample shows.

    A key is real if a query sees it. A query is real if it sees a key; where queries and keys are the same tokens, also
    only if it is real as a key and sees itself, unless none does.

    Args:
        seen: Which key each query sees (queries, keys).
        same: Whether queries and keys are the same tokens.
    """
    keys, queries = seen.any(dim=0), seen.any(dim=1)
    if same and seen.shape[0] == seen.shape[1]:
        own = seen.diagonal()
        queries = queries & keys & (own if bool(own.any()) else torch.ones_like(own))
        keys = keys & queries if bool(own.any()) else keys
    return queries, keys
