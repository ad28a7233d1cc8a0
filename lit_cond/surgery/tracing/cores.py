"""From the operands of an attention that ran to the rows of the parameters that made them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lit_cond.surgery.sites import MatrixLayout, Role, RowSet
from lit_cond.surgery.tracing.graph import Node, Operand
from lit_cond.surgery.tracing.recorder import Attention
from lit_cond.surgery.tracing.rows import row_set

__all__ = ["BLIND", "IRREGULAR", "Core", "Source", "resolve"]

_SEED = 0
_NO_WEIGHT, _NO_ROW, IRREGULAR = (
    "no weight makes it",
    "no row of its weights reaches it",
    "its rows are too irregular to describe",
)
# What may be said of an operand only because its gradient ended, or a unit was off, in this one pass.
BLIND = frozenset((_NO_WEIGHT, _NO_ROW, IRREGULAR))


@dataclass(frozen=True, eq=False)
class Source:
    """Rows of one parameter that made an operand.

    Args:
        parameter: The parameter.
        rows: Which of its output channels (all output channels,).
        layout: Orientation of the parameter; its own rows are not yet those of the mask.
        node: The projection.
    """

    parameter: nn.Parameter
    rows: Tensor
    layout: MatrixLayout
    node: Node


@dataclass(eq=False)
class Core:
    """One softmax attention with what made its operands.

    Args:
        node: The operation that returned the average of the values.
        sources: What made the query, key and value.
        problems: Why a role has no rows, or not all.
        head_width: Channels of one head of the query.
        value_width: Channels of one head of the value.
        heads: Heads of query and key as their shapes show them, None where they do not.
        over_channels: Whether the softmax runs over channels instead of tokens.
        causal: Whether each position sees itself and earlier ones only.
    """

    node: Node
    sources: dict[Role, list[Source]]
    problems: dict[Role, str] = field(default_factory=dict)
    head_width: int = 0
    value_width: int = 0
    heads: tuple[int | None, int | None] = (None, None)
    over_channels: bool = False
    causal: bool = False


def resolve(attention: Attention) -> Core:
    """Return the rows that made the operands of an attention; call it while their graphs are alive."""
    core = Core(attention.node, {})
    operands: dict[Role, Operand] = {"query": attention.query, "key": attention.key, "value": attention.value}
    for role, operand in operands.items():
        core.sources[role], problem = _sources(operand)
        if problem is not None:
            core.problems[role] = problem
    query = attention.query
    roles: tuple[Role, Role] = ("query", "key")
    sides = [(operands[role], core.sources[role]) for role in roles if core.sources[role]]
    # A query or key made far away, of a feature map, may show anything; the other one then speaks against channels.
    core.over_channels = bool(sides) and all(_contracts_tokens(operand, sources) for operand, sources in sides)
    core.head_width = query.tensor.shape[query.own if core.over_channels else query.contracted]
    value = attention.value
    core.value_width = value.tensor.shape[value.contracted if core.over_channels else value.own]
    core.heads = _heads(query.tensor), _heads(attention.key.tensor)
    core.causal = _is_causal(attention)
    return core


def _projections(node: Node) -> tuple[list[Node], str | None]:
    """Return the nearest projections that a tensor is made of, and what else it is made of."""
    found: list[Node] = []
    problem = None
    seen = {node}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.weights:
            found.append(current)
            continue
        if current.is_product or current.name in ("scaled_dot_product_attention", "softmax"):
            problem = "it is made of products of activations"
            continue
        if current.name == "parameter" and problem is None and current.parameters:
            problem = "a parameter takes part in it without a projection"
        for parent in current.carriers:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return sorted(found, key=lambda n: n.index), None if found and problem and "parameter" in problem else problem


def _sources(operand: Operand) -> tuple[list[Source], str | None]:
    projections, problem = _projections(operand.node)
    if problem is not None and "products" in problem:
        return [], problem
    alive = [node for node in projections if node.tensor is not None]
    if len(alive) < len(projections) or not alive or not operand.tensor.requires_grad:
        return [], "it is made outside of the layer" if projections else problem or _NO_WEIGHT
    if all(use.parameter is None for node in alive for use in node.weights):
        return [], "its weight is computed from parameters"
    generator = torch.Generator(device=operand.tensor.device).manual_seed(_SEED)
    seed = torch.randn(
        operand.tensor.shape, generator=generator, device=operand.tensor.device, dtype=operand.tensor.dtype
    )
    result = []
    for node, entries in zip(alive, _reached(operand.tensor, seed, alive), strict=True):
        reached = entries.any(dim=0)
        for use in node.weights:
            if use.parameter is None or not bool(reached.any()):
                continue
            rows = reached if use.channels is None else reached[use.channels] & (use.channels >= 0)
            layout = MatrixLayout(RowSet.span(0, 0), use.transposed, use.out_axes, use.groups)
            if bool(rows.any()):
                result.append(Source(use.parameter, rows, layout, node))
    return result, None if result else _NO_ROW


def _reached(tensor: Tensor, seed: Tensor, projections: Sequence[Node]) -> list[Tensor]:
    """Return for each projection which of its output channels, at which places, reach a tensor (places, channels)."""
    leaves = [node.tensor for node in projections if node.tensor is not None]
    gradients = torch.autograd.grad(tensor, leaves, seed, retain_graph=True, allow_unused=True)
    result = []
    for node, gradient in zip(projections, gradients, strict=True):
        count = math.prod(node.shape[axis] for axis in node.channels)
        if gradient is None:
            result.append(torch.zeros(1, count, dtype=torch.bool, device=tensor.device))
        else:
            last = tuple(range(-len(node.channels), 0))
            result.append((gradient.movedim(node.channels, last) != 0).reshape(-1, count))
    return result


def _contracts_tokens(operand: Operand, sources: Sequence[Source]) -> bool:
    """Whether the product of query and key sums over tokens and not over channels.

    An entry of a token axis belongs to one token, one of a channel axis to all of them. Where normalisation over tokens
    hides that: an entry of a channel axis needs one channel of each head, one of a token axis all channels.
    """
    if not sources or operand.tensor.ndim < 2 or operand.tensor.shape[operand.own] == 1:
        return False
    node = max(sources, key=lambda s: int(s.rows.sum())).node
    places, channels = [], []
    for axis in (operand.contracted, operand.own):
        entry = operand.tensor.movedim(axis, -1)[..., 0]
        (reached,) = _reached(entry, torch.ones_like(entry), [node])
        places.append(int(reached.any(dim=1).sum()))
        channels.append(int(reached.any(dim=0).sum()))
    if places[0] != places[1]:
        return places[0] < places[1]
    return channels[0] > channels[1]


def _heads(operand: Tensor) -> int | None:
    """Return the size of the axis before tokens and channels, by the usual convention (batch, heads, tokens, width)."""
    return operand.shape[-3] if operand.ndim == 4 else None


def _is_causal(attention: Attention) -> bool:
    """Whether the mask, or the softmax itself, hides all later positions and shows earlier ones."""
    if attention.arguments.get("is_causal"):
        return True
    if attention.scores is not None and attention.scores.tensor is not None:
        weights = attention.scores.tensor.movedim(attention.scores.axis, -1)
        return _is_lower(weights != 0)
    mask = attention.arguments.get("attn_mask")
    if not isinstance(mask, Tensor) or mask.ndim < 2:
        return False
    if mask.dtype == torch.bool:
        return _is_lower(~mask if attention.arguments.get("true_is_hidden") else mask)
    return _is_lower(mask > torch.finfo(mask.dtype).min / 2)


def _is_lower(seen: Tensor) -> bool:
    """Whether the last two axes (..., queries, keys) show a lower triangle: the first token sees itself only."""
    if seen.ndim < 2 or seen.shape[-1] != seen.shape[-2] or seen.shape[-1] < 2 or seen.is_meta:
        return False
    above = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).triu(1)
    diagonal = seen.diagonal(dim1=-2, dim2=-1)
    return not bool((seen & above).any()) and bool(diagonal.any()) and bool((seen & above.mT).any())


def views_of(sources: Sequence[Source]) -> Iterator[tuple[Source, MatrixLayout]]:
    """Yield the layouts of the rows of each source, joined over calls.

    A source whose rows are too irregular to describe yields none.
    """
    joined: dict[int, tuple[Source, Tensor]] = {}
    for source in sources:
        before = joined.get(id(source.parameter))
        joined[id(source.parameter)] = (source, source.rows if before is None else before[1] | source.rows)
    for source, rows in joined.values():
        part, layout = row_set(rows), source.layout
        if part is not None:
            yield source, MatrixLayout(part, layout.transposed, layout.out_axes, layout.groups)
