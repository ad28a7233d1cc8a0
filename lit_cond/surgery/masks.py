"""Reading the mask arguments of transformer blocks: which tokens are real, and whether attention is causal.

Conventions, as found in torch and transformers: a `..._key_padding_mask` is True (or -inf) where a token is padding; an
`attention_mask` is True, 1 or 0.0 (additive) where a token may be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError

__all__ = ["cached_length", "leaks_from_future", "valid_tokens"]

_PADDING_NAMES = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "padding_mask")
_ATTENTION_NAMES = ("attention_mask", "src_mask", "tgt_mask", "attn_mask", "causal_mask", "mask")


def _keeps(mask: Tensor, *, additive: bool) -> Tensor:
    """Return True where an attention mask lets a token be seen."""
    if mask.dtype == torch.bool:
        return mask
    if additive:
        # Additive masks hold 0 and a very negative number (-inf or the smallest of the dtype).
        return mask > -1.0
    return mask != 0


def valid_tokens(arguments: Mapping[str, Any], batch: int, length: int) -> Tensor | None:
    """Return which tokens are real (batch, length), or None when no mask says otherwise.

    Args:
        arguments: The block's arguments by name.
        batch: Number of sequences.
        length: Number of tokens in each.

    Raises:
        ConfigurationError: If a mask is of a form that is not understood.
    """
    for name in _PADDING_NAMES:
        mask = arguments.get(name)
        if isinstance(mask, Tensor):
            padded = mask if mask.dtype == torch.bool else mask != 0
            return ~padded.expand(batch, length)
    for name in _ATTENTION_NAMES:
        mask = arguments.get(name)
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise ConfigurationError(
                f"`{name}` is a {type(mask).__name__}, from which padding can not be read; use an attention "
                "implementation with tensor masks (eager or sdpa)"
            )
        if mask.ndim == 2 and mask.shape == (batch, length) and name == "attention_mask":
            return _keeps(mask, additive=mask.is_floating_point() and bool((mask < 0).any()))
        if mask.ndim == 4 and mask.shape[-1] == length:
            seen = _keeps(mask, additive=mask.is_floating_point())
            if mask.dtype == torch.bool and mask.shape[2] == length:
                # Some models (MPT) mark what is hidden. Every real token sees itself.
                seen = seen ^ ~seen.diagonal(dim1=2, dim2=3).any()
            seen = seen.any(dim=2).any(dim=1)
            return seen.expand(batch, length)
    for name, mask in arguments.items():
        known = name in _PADDING_NAMES or name in _ATTENTION_NAMES or name.startswith("memory")
        if "mask" in name and not known and isinstance(mask, Tensor) and mask.shape == (batch, length):
            raise ConfigurationError(
                f"`{name}` looks like a mask of padding and its meaning is not known; pass it to the block as "
                "`key_padding_mask` (True where a token is padding) or `attention_mask` (True where it is real)"
            )
    return None


def cached_length(cache: Any) -> int:
    """Return how many earlier tokens a cache of keys and values holds, 0 where there is none."""
    if cache is None:
        return 0
    length = getattr(cache, "get_seq_length", None)
    if callable(length):
        return int(length())
    return int(cache[0].shape[-2]) if isinstance(cache, (tuple, list)) and cache else 0


def leaks_from_future(arguments: Mapping[str, Any]) -> bool:
    """Say whether the block's arguments make its attention causal.

    Reads the values of a square mask, which waits for the device: call it once, not at every step.
    """
    if any(arguments.get(name) is True for name in ("is_causal", "causal", "tgt_is_causal")):
        return True
    for name in _ATTENTION_NAMES:
        mask = arguments.get(name)
        if not isinstance(mask, Tensor) or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
            continue
        keeps = _keeps(mask, additive=True)
        if mask.dtype == torch.bool:
            # torch's boolean `src_mask` is True where seeing is forbidden; transformers' is True where it is allowed.
            # The diagonal tells: a token sees itself, unless it is padding.
            own = mask.diagonal(dim1=-2, dim2=-1)
            hides = not bool(own.any()) or (name != "attention_mask" and not bool(own.all()))
            keeps = mask ^ hides
        above = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
        if not bool((keeps & above).any()) and bool((keeps & ~above).any()):
            return True
    return False
