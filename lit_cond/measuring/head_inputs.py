"""What each head of a layer projects: the tokens that its Jacobian with respect to the weights needs.

The closed form holds where a query, key or value is the product of tokens with one weight, times a number or a map of
its own for each token (rotary positions, a normalisation of each head). That is checked on the values, and what does
not agree is declined with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lit_cond.measuring.heads import by_head, canonical, per_query_head
from lit_cond.measuring.maps import token_maps
from lit_cond.measuring.observe import ObservedAttention, ObservedSample, heads_of
from lit_cond.measuring.records import Operand, Step
from lit_cond.surgery.sites import ROLES, AttentionSite, Role

__all__ = ["HeadInputs", "changed_softmax", "head_inputs"]


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """The tokens behind the queries, keys and values of one sample.

    Args:
        tokens: For each role (tokens, channels), times the factor between the projection and what entered the kernel.
        maps: For roles with more than a factor between: the derivative of each token by what the projection returned
            for it (heads, tokens, d, c).
    """

    tokens: dict[Role, Tensor]
    maps: dict[Role, Tensor]


def head_inputs(observed: ObservedAttention, sample: ObservedSample) -> HeadInputs | str:
    """Return the tokens that the heads of a layer project, or why the closed form does not hold there."""
    site, attended = observed.site, observed.attended
    if site.kind == "channel":
        return "its softmax runs over channels, and the closed form is that of tokens"
    if attended.after is not None:
        return changed_softmax(attended.after)
    if attended.scale is None:
        return attended.obstacle or "its scores are more than a product of queries and keys"
    operands: dict[Role, Operand] = {"query": attended.query, "key": attended.key, "value": attended.value}
    places: dict[Role, Tensor] = {"query": sample.queries, "key": sample.keys, "value": sample.keys}
    found = HeadInputs({}, {})
    batch = len(by_head(canonical(attended.query), site.num_heads))
    for role in ROLES:
        projected = _tokens(site, role, operands[role], sample.index, attended.steps, batch)
        if isinstance(projected, str):
            return projected
        found.tokens[role] = projected[0][places[role]]
        if projected[1] is not None:
            found.maps[role] = per_query_head(projected[1][None], len(sample.query))[0][:, places[role]]
    return found


def changed_softmax(by: str) -> str:
    """Return why what a head returns is not the product of its softmax and its values."""
    return f"its softmax passes {by} before it meets the values"


def _tokens(
    site: AttentionSite, role: Role, operand: Operand, index: int, steps: Sequence[Step], samples: int
) -> tuple[Tensor, Tensor | None] | str:
    if len(operand.projections) != 1:
        made = f"made by {len(operand.projections)} projections" if operand.projections else "not projected here"
        return f"its {role} is {made}"
    (projection,) = operand.projections
    view = site.matrix_view(role)
    inputs = projection.inputs.detach().movedim(projection.input_axis, -1)
    outputs = projection.output.detach().movedim(projection.output_axis, -1)
    if view is None or view.layout.groups > 1 or inputs.shape[:-1] != outputs.shape[:-1]:
        return f"its {role} is no product of tokens with one weight"
    whole = canonical(operand)
    heads = site.num_heads if role == "query" else heads_of(operand, samples)
    entered = by_head(whole, heads)[index].double()
    channels = _channels(site, role, outputs.shape[-1], len(view.layout.rows))
    if channels is None or inputs.shape[-1] != view.in_features:
        return f"the rows of its {role} are not known in what is projected"
    x = inputs.flatten(0, -2)
    count, width = entered.shape[1:]
    groups = len(channels) // width
    if not count or len(x) % count or len(channels) % width or not groups or len(entered) % groups:
        return f"its {role} has other tokens or heads than were projected"

    def placed(like: Tensor, of_sample: slice) -> Tensor:
        rows = like.movedim(projection.output_axis, -1).flatten(0, -2)[of_sample][:, channels.to(like.device)]
        return rows.reshape(count, groups, width).transpose(0, 1)

    def of_heads(like: Tensor) -> Tensor:
        # Of a key that is repeated for several queries, the first.
        moved = like.movedim((operand.tokens, operand.channels), (-2, -1))
        return by_head(moved, heads)[index][:: len(entered) // groups]

    orders = _orders(len(x), count, index)
    for of_sample in orders:
        factor = _factor(placed(projection.output.detach(), of_sample).double(), entered, operand.tensor.dtype)
        if factor is not None:
            return x[of_sample].double() * factor, None
    for of_sample in orders:
        maps = token_maps(steps, projection, operand.tensor, of_heads, partial(placed, of_sample=of_sample))
        if maps is not None:
            return x[of_sample].double(), maps.double()
    return (
        f"its {role} is more than a product of tokens with a weight and a map of each token (heads or tokens are mixed "
        "in between), for which there is no closed form here"
    )


def _channels(site: AttentionSite, role: Role, width: int, rows: int) -> Tensor | None:
    """Return which channels of a projection's output are those of a role: all, or its rows in a fused weight."""
    if width == rows:
        return torch.arange(rows)
    view = site.matrix_view(role)
    indices = view.layout.rows.indices(torch.device("cpu")) if view is not None else torch.arange(0)
    return indices if len(indices) and int(indices.max()) < width else None


def _orders(places: int, count: int, index: int) -> list[slice]:
    """Return where the tokens of a sample may stand among all places: batch first, or tokens first."""
    samples = places // count
    if index >= samples:
        return []
    return [slice(index * count, (index + 1) * count), slice(index, None, samples)]


def _factor(made: Tensor, entered: Tensor, dtype: torch.dtype) -> float | None:
    """Return c if `entered = c * made` (heads, tokens, channels) up to rounding; heads may be repeated."""
    if made.shape[0] != entered.shape[0]:
        if entered.shape[0] % made.shape[0]:
            return None
        made = made.repeat_interleave(entered.shape[0] // made.shape[0], dim=0)
    if made.shape != entered.shape:
        return None
    finite = made.isfinite() & entered.isfinite()
    if not bool(finite.any()):  # nothing to compare, and what is measured will not be finite either
        return 1.0
    made, entered = (torch.where(finite, t, 0) for t in (made, entered))
    size = (made * made).sum()
    factor = (made * entered).sum() / torch.where(size > 0, size, 1)
    # Entry by entry, as rounding goes: a normalisation moves each token by another factor.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    agrees = (entered - factor * made).abs() <= 4 * eps * entered.abs() + 1e-30
    # Nothing at all is projected where both are zero, as in a layer that was initialised so.
    return float(factor) if bool(agrees.all()) and bool(factor != 0) else None
