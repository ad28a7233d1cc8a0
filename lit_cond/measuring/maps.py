"""What stands between a projection and the operand that enters attention: rotary positions, a normalisation.

The functions that ran there are run again on the projection's output, and their derivative is taken token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_cond.measuring.records import Projection, Step
from lit_cond.measuring.values import mapped, random_numbers_kept
from lit_cond.surgery.tracing.graph import tensors_in

__all__ = ["token_maps"]

_SEED = 0
# A normalisation may be computed in float32 whatever the model is in, and a model in bfloat16.
_CROSSING = 0.03


def token_maps(
    steps: Sequence[Step],
    projection: Projection,
    operand: Tensor,
    heads_of: Callable[[Tensor], Tensor],
    placed: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Return the derivative of each token of each head by what the projection returned for this token and head.

    Args:
        steps: The functions that ran in the module.
        projection: The projection.
        operand: The operand that they made of its output.
        heads_of: Returns the operand of one sample by head (heads, tokens, d).
        placed: Returns the part of a tensor like the projection's output that belongs to this sample, in the same order
            (heads, tokens, c).

    Returns:
        Tensor of shape (heads, tokens, d, c); None if the functions do not give the operand again, or mix tokens or
        heads.
    """
    leaf = projection.output.detach().clone().requires_grad_()
    with torch.enable_grad(), random_numbers_kept([leaf]):
        try:
            again = _replayed(steps, projection.output, leaf.clone(), operand)
        except Exception:  # whatever foreign functions raise when they run a second time
            again = None
        if again is None:
            return None
        entered, expected = heads_of(again), heads_of(operand.detach())
        if not entered.requires_grad or not _close(entered.detach(), expected, 32 * torch.finfo(operand.dtype).eps):
            return None
        columns = []
        for channel in range(entered.shape[-1]):
            own = _gradient(entered[..., channel].sum(), leaf, placed)
            if own is None:
                return None
            columns.append(own)
        maps = torch.stack(columns, dim=2)
        seed = torch.Generator(device=entered.device).manual_seed(_SEED)
        weights = torch.randn(entered.shape, generator=seed, device=entered.device, dtype=entered.dtype)
        mixed = _gradient((entered * weights).sum(), leaf, placed)
    # Sums over tokens and heads hide what crosses between them; random weights show it, and not by a rounding error.
    alone = torch.einsum("hnd,hndc->hnc", weights, maps)
    return maps if mixed is not None and _close(mixed, alone, _CROSSING) else None


def _gradient(of: Tensor, leaf: Tensor, placed: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the gradient where the sample stands, None if there is more elsewhere."""
    (whole,) = torch.autograd.grad(of, leaf, retain_graph=True)
    own = placed(whole)
    total, part = whole.abs().double().sum(), own.abs().double().sum()
    return own if bool(part >= total * (1 - 1e-6)) else None


def _replayed(steps: Sequence[Step], start: Tensor, leaf: Tensor, end: Tensor) -> Tensor | None:
    known: dict[int, Tensor] = {id(start): leaf}
    for step in steps:
        given = [*tensors_in(step.args), *tensors_in(step.kwargs)]
        if not any(id(t) in known for t in given):
            continue
        if step.in_place and id(given[0]) not in known:
            known[id(given[0])] = given[0].detach().clone()

        def replaced(tensor: Tensor) -> Any:
            # Copies: a normalisation over a batch would move the statistics of the model.
            return known[id(tensor)] if id(tensor) in known else tensor.detach().clone()

        result = step.function(*mapped(step.args, replaced), **mapped(step.kwargs, replaced))
        made = [known[id(given[0])]] if step.in_place else list(tensors_in(result))
        known.update((id(old), new) for old, new in zip(step.outputs, made, strict=False))
    return known.get(id(end))


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())
