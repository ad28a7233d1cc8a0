"""Products with a weight: which of them project tokens, with which rows of which parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_cond.surgery.sites import MatrixLayout, RowSet
from lit_cond.surgery.tracing.graph import Node, WeightUse
from lit_cond.surgery.tracing.operations import Product

__all__ = ["is_depthwise", "mixes_heads", "weight_uses"]

_BASE = 128


def is_depthwise(product: Product) -> bool:
    """Whether a convolution keeps channels apart: it then is no projection."""
    return (
        product.groups > 1
        and product.right.shape[1] == 1
        and product.groups == product.left.shape[product.contracted[0][0]]
    )


def mixes_heads(product: Product, weight: int, nodes: list[Node]) -> bool:
    """Whether a weight mixes the heads of attention scores, as talking heads do, and projects no tokens."""
    activation, matrix = nodes[1 - weight], (product.left, product.right)[weight]
    scores = (*activation.products, *activation.softmaxes)
    if not scores or matrix.shape[0] != matrix.shape[1] or matrix[0, 0].numel() != 1:
        return False
    return any(len(s.shape) == 4 and s.shape[1] == matrix.shape[0] for s in scores)


def weight_uses(weight: Tensor, node: Node, product: Product, side: int) -> tuple[WeightUse, ...]:
    """Return which parameters a projection's weight is made of, and which of their axes are output channels."""
    unknown = (WeightUse(None),)
    out = [axis % weight.ndim for axis in product.free[side]]
    if not node.parameters or len(out) + len(product.contracted[side]) != weight.ndim:
        return unknown
    if len(node.parameters) == 1 and weight is node.parameters[0]:
        use = _oriented(node.parameters[0], out, product.groups)
        return (use,) if use is not None else unknown
    # Number the output channels of the weight, and let the numbers flow back to where they came from.
    shape = [weight.shape[axis] if axis in out else 1 for axis in range(weight.ndim)]
    numbers = torch.arange(1, math.prod(shape) + 1, device=weight.device).view(shape).expand(weight.shape)
    # In digits that bfloat16 holds exactly.
    digits = [(numbers // _BASE**i % _BASE).to(weight.dtype) for i in range(3)]
    uses = []
    for parameter in node.parameters:
        with torch.enable_grad():
            ones, *places = (
                torch.autograd.grad(weight, parameter, g, retain_graph=True, allow_unused=True)[0]
                for g in (torch.ones_like(weight), *digits)
            )
        if ones is None or not bool(((ones == 0) | (ones == 1)).all()):
            return unknown
        flowed = sum(place.round().long() * _BASE**i for i, place in enumerate(places))
        varying = [a for a in range(flowed.ndim) if not bool((flowed == flowed.narrow(a, 0, 1)).all())]
        use = _oriented(parameter, varying or [0], product.groups)
        if use is None:
            return unknown
        layout = MatrixLayout(RowSet.span(0, 0), use.transposed, use.out_axes)
        uses.append(replace(use, channels=layout.oriented(flowed)[:, 0] - 1))
    return tuple(uses)


def _oriented(parameter: nn.Parameter, out: list[int], groups: int) -> WeightUse | None:
    first, last = list(range(len(out))), list(range(parameter.ndim - len(out), parameter.ndim))
    if not out or len(out) == parameter.ndim:
        return None
    if sorted(out) == first:
        return WeightUse(parameter, False, len(out), groups)
    if sorted(out) == last:
        return WeightUse(parameter, True, len(out), groups)
    return None
