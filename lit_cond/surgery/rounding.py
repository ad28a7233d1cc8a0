"""How much of a correction the dtype of the weights is too coarse for."""

from __future__ import annotations

import torch
from torch import nn

from lit_cond.surgery.rules import WeightRule
from lit_cond.surgery.weights import conditioned_weights, effective_weight, gathered

__all__ = ["rounded_away"]


@torch.no_grad()
def rounded_away(model: nn.Module, rule: WeightRule) -> tuple[int, int]:
    """Count the entries that a correction shall change, and those among them that it leaves as they were.

    W + strength * C is computed in float32 and rounded once to the dtype of W; an entry of C below half a step of that
    dtype at W vanishes.

    Args:
        model: A conditioned model.
        rule: Whose corrections to count; those at strength 0 do not.

    Returns:
        Entries that stay what they were, and all entries that the rule corrects.
    """
    lost = total = 0
    for _, weight in conditioned_weights(model):
        for term in weight.terms:
            if term.rule.settings() != rule.settings() or float(term.strength) == 0:
                continue
            raw = gathered(weight.current_raw)
            corrected = term.correction.to(raw.device) != 0
            lost += int(((effective_weight(raw, [term]) == raw) & corrected).sum())
            total += int(corrected.sum())
    return lost, total
