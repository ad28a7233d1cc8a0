"""The token matrices of a batch where they enter the first block, with and without their correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_cond.surgery.rules import TokenRule
from lit_cond.surgery.token_sites import TokenSite
from lit_cond.surgery.tokens import TokenForward, token_forwards

__all__ = ["TokenMatrices", "token_matrices"]


class TokenMatrices:
    """Token matrices of samples, padding left out.

    Args:
        read: As the block reads them, each (tokens, channels).
        raw: Without the correction; None where there is none.
        skipped: How many samples have no token.
    """

    def __init__(self, read: list[Tensor], raw: list[Tensor] | None, skipped: int) -> None:
        self.read = read
        self.raw = raw
        self.skipped = skipped


@torch.no_grad()
def token_matrices(
    site: TokenSite, args: tuple[Any, ...], kwargs: dict[str, Any], max_samples: int, raw: bool
) -> TokenMatrices:
    """Return the tokens of the first samples that enter a block.

    Args:
        site: Where they enter.
        args: What the block is called with.
        kwargs: Likewise by name.
        max_samples: How many samples.
        raw: Whether to return also what they are without a correction.

    Raises:
        ConfigurationError: If the tokens, or which of them are padding, can not be read from the arguments.
    """
    active = next((f for _, f in token_forwards(site.module)), None)
    reader = active or TokenForward(site, TokenRule(correction="identity", scale=1.0), torch.tensor(0.0))
    _, tokens = reader.find_tokens(args, kwargs)
    mask = reader.find_mask(args, kwargs, tokens)
    axis = 0 if reader.batch_first else 1
    tokens = tokens.detach().narrow(axis, 0, min(max_samples, tokens.shape[axis]))
    mask = None if mask is None else mask[:max_samples]
    before = reader.matrices(tokens)
    read = before if active is None else reader.matrices(active.correct(tokens, mask))
    kept = _samples(read, mask)
    return TokenMatrices(kept, None if active is None or not raw else _samples(before, mask), len(read) - len(kept))


def _samples(matrices: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return one matrix for each sample, padding left out; samples without tokens are dropped."""
    if mask is None:
        return list(matrices)
    return [matrix[keep] for matrix, keep in zip(matrices, mask, strict=True) if keep.any()]
