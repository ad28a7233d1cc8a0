"""From the operands of an attention that ran to the rows of the parameters that made them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lit_cond.surgery.sites import MatrixLayout, Role, RowSet
from lit_cond.surgery.tracing.graph import Call, Node, Operand
from lit_cond.surgery.tracing.recorder import Attention
from lit_cond.surgery.tracing.rows import row_sets

__all__ = ["Core", "Source", "resolve"]

_SEED = 0


@dataclass(frozen=True, eq=False)
class Source:
    """Rows of one parameter that made an operand.

    Args:
        parameter: The parameter.
        rows: Which of its output channels (all output channels,).
        layout: Orientation of the parameter; its own rows are not yet those of the mask.
        call: The module call that projected.
        tokens: Where the projected tokens came from.
        index: When it projected, in the order of operations.
    """

    parameter: nn.Parameter
    rows: Tensor
    layout: MatrixLayout
    call: Call | None
    tokens: Node | None
    index: int


@dataclass(eq=False)
class Core:
    """One softmax attention with what made its operands.

    Args:
        node: The operation that returned the average of the values.
        sources: What made the query, key and value.
        problems: Why a role has no rows, or not all.
        head_width: Channels of one head of the query.
        over_channels: Whether the softmax runs over channels instead of tokens.
        causal: Whether each position sees itself and earlier ones only.
    """

    node: Node
    sources: dict[Role, list[Source]]
    problems: dict[Role, str] = field(default_factory=dict)
    head_width: int = 0
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
    core.over_channels = _contracts_tokens(query, core.sources["query"])
    core.head_width = query.tensor.shape[_other_axis(query) if core.over_channels else query.contracted]
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
        for parent in current.parents:
            if parent.differentiable and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return sorted(found, key=lambda n: n.index), None if found and problem and "parameter" in problem else problem


def _sources(operand: Operand) -> tuple[list[Source], str | None]:
    projections, problem = _projections(operand.node)
    if problem is not None and "products" in problem:
        return [], problem
    uses = [(node, use) for node in projections for use in node.weights]
    known = {id(use.parameter): use.parameter for _, use in uses if use.parameter is not None}
    if len({id(use.parameter) for _, use in uses if use.parameter is None}) and not known:
        return [], "its weight is computed from parameters"
    if not known or not operand.tensor.requires_grad:
        return [], problem or "no weight makes it"
    parameters = list(known.values())
    generator = torch.Generator(device=operand.tensor.device).manual_seed(_SEED)
    with torch.enable_grad():
        seed = torch.randn(
            operand.tensor.shape, generator=generator, device=operand.tensor.device, dtype=operand.tensor.dtype
        )
        gradients = torch.autograd.grad(operand.tensor, parameters, seed, retain_graph=True, allow_unused=True)
    result = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        node, use = next((n, u) for n, u in uses if u.parameter is parameter)
        layout = MatrixLayout(RowSet.span(0, 0), use.transposed, use.out_axes, use.groups)
        rows = (layout.oriented(gradient) != 0).any(dim=1)
        if bool(rows.any()):
            result.append(Source(parameter, rows, layout, node.call, node.source, node.index))
    return result, None if result else "no row of its weights reaches it"


def _contracts_tokens(query: Operand, sources: Sequence[Source]) -> bool:
    """Whether the product of query and key sums over tokens: one entry of the sum then needs all rows of a head."""
    tensor = query.tensor
    if not sources or tensor.ndim < 2:
        return False
    source = max(sources, key=lambda s: int(s.rows.sum()))
    counts = []
    for axis in (query.contracted, _other_axis(query)):
        entry = tensor.movedim(axis, -1)[..., 0]
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(
                entry, source.parameter, torch.ones_like(entry), retain_graph=True, allow_unused=True
            )
        rows = 0 if gradient is None else int((source.layout.oriented(gradient) != 0).any(dim=1).sum())
        counts.append(rows)
    # A slice through a channel axis needs few rows, one through the token axis all of them.
    return counts[0] > counts[1]


def _other_axis(operand: Operand) -> int:
    """Return the one of the last two axes that is not summed over."""
    ndim = operand.tensor.ndim
    return next(axis for axis in (-2, -1) if axis % ndim != operand.contracted % ndim)


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
        for part in row_sets(rows) or ():
            layout = source.layout
            yield source, MatrixLayout(part, layout.transposed, layout.out_axes, layout.groups)
