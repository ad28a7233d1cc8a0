"""Sets of rows as few numbers: from a mask to offset, block, period and count."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lit_cond.surgery.sites import RowSet

__all__ = ["row_set"]


def row_set(mask: Tensor) -> RowSet | None:
    """Return the rows of a mask as evenly spaced blocks, None where they are not: nobody wrote down such a layout.

    Args:
        mask: True for the rows that count (rows,).
    """
    edges = torch.diff(mask.to(torch.int8), prepend=mask.new_zeros(1, dtype=torch.int8)).nonzero().flatten().tolist()
    if len(edges) % 2:
        edges.append(len(mask))
    starts, ends = edges[::2], edges[1::2]
    blocks = {end - start for start, end in zip(starts, ends, strict=True)}
    periods = {b - a for a, b in itertools.pairwise(starts)}
    if len(starts) == 1:
        return RowSet.span(starts[0], ends[0] - starts[0])
    if len(blocks) == 1 and len(periods) == 1:
        return RowSet(starts[0], blocks.pop(), periods.pop(), len(starts))
    return None
