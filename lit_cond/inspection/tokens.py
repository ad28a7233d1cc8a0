"""How the embedded tokens are conditioned where they enter, and what each correction would make of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_cond.functional.condition_number import condition_of_spectrum, singular_values
from lit_cond.functional.tokens import is_prefix_safe, token_correction
from lit_cond.inspection.attention import Inputs, first_line
from lit_cond.measuring.install import run_on_the_side
from lit_cond.measuring.probes import InputProbe
from lit_cond.measuring.quantities import finite_mean
from lit_cond.measuring.token_matrices import TokenMatrices, token_matrices
from lit_cond.surgery.rules import TokenRule
from lit_cond.surgery.token_sites import TokenSite

__all__ = ["TOKEN_CORRECTIONS", "TokenNumbers", "measure_tokens"]

TOKEN_CORRECTIONS: Mapping[str, TokenRule] = {
    "exact": TokenRule(),
    "identity 1": TokenRule("identity", 1.0),
}
"""The corrections whose effect on tokens is computed: the default, and the one that causal models may use."""

_MAX_SAMPLES = 8


@dataclass(frozen=True)
class TokenNumbers:
    """The tokens that enter one block, mean over the samples of a batch that have a finite number.

    Args:
        name: Name of the block.
        kappa: Condition number as the block reads them, dimensionless, >= 1; inf where a direction is missing in every
            sample, NaN where nothing was measured.
        without: Condition number without the correction that the block makes; None where it makes none.
        after: Condition number that each correction would leave, by its label.
        refused: Why a correction can not be used, by its label.
        samples: How many samples were measured.
        reason: Why nothing was measured.
    """

    name: str
    kappa: float = math.nan
    without: float | None = None
    after: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    samples: int = 0
    reason: str | None = None


@torch.no_grad()
def measure_tokens(sites: Sequence[TokenSite], inputs: Inputs) -> list[TokenNumbers]:
    """Run a model and measure the tokens that enter it.

    Args:
        sites: Where tokens enter.
        inputs: What to show the model.

    Returns:
        The numbers of each site, in their order.
    """
    found: dict[int, TokenNumbers] = {}
    for part, samples in inputs.parts:
        inside = set(part.modules())
        for sample in samples:
            probes = [
                InputProbe(site.module, *_callbacks(site, found))
                for site in sites
                if site.module in inside and (id(site) not in found or found[id(site)].reason is not None)
            ]
            if probes:
                call = part if sample.method is None else getattr(part, sample.method)
                with inputs.evaluating(part):
                    run_on_the_side(part, call, probes, sample.args, dict(sample.kwargs))
    unseen = inputs.left_out or "not measured: no input reaches it"
    return [found.get(id(site), TokenNumbers(site.name, reason=unseen)) for site in sites]


def _callbacks(
    site: TokenSite, found: dict[int, TokenNumbers]
) -> tuple[Callable[[tuple[Any, ...], dict[str, Any]], None], Callable[[Exception], None]]:
    def see(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[id(site)] = _numbers(site, token_matrices(site, args, kwargs, _MAX_SAMPLES, raw=True))

    def failed(error: Exception) -> None:
        found[id(site)] = TokenNumbers(site.name, reason=f"not measured: {first_line(error)}")

    return see, failed


def _numbers(site: TokenSite, tokens: TokenMatrices) -> TokenNumbers:
    if not tokens.read:
        return TokenNumbers(site.name, reason="not measured: the input holds no token for it")
    kappa = finite_mean(map(_kappa, tokens.read))
    if tokens.raw is not None:
        return TokenNumbers(site.name, kappa, finite_mean(map(_kappa, tokens.raw)), samples=len(tokens.read))
    allowed = {
        label: rule
        for label, rule in TOKEN_CORRECTIONS.items()
        if not site.causal or is_prefix_safe(rule.correction, rule.scale)
    }
    return TokenNumbers(
        site.name,
        kappa,
        None,
        {label: finite_mean(_kappa(_corrected(x, rule)) for x in tokens.read) for label, rule in allowed.items()},
        {label: "its attention is causal" for label in TOKEN_CORRECTIONS if label not in allowed},
        len(tokens.read),
    )


def _corrected(tokens: Tensor, rule: TokenRule) -> Tensor:
    """Return tokens (n, channels) with their correction, rounded to their type as in a forward pass."""
    correction = token_correction(tokens.unsqueeze(0), None, rule.correction, rule.scale, rule.backend)[0]
    return (tokens.to(correction.dtype) + correction).to(tokens.dtype)


def _kappa(tokens: Tensor) -> float:
    return float(condition_of_spectrum(singular_values(tokens), tokens.shape, tokens.dtype))
