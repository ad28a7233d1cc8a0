"""What is kept of one attention that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Attended", "Operand", "Projection", "Step"]


@dataclass(frozen=True, eq=False)
class Projection:
    """A product of tokens with a weight.

    Args:
        inputs: The tokens.
        input_axis: Their axis of channels.
        output: What was made of them.
        output_axis: Its axis of channels.
    """

    inputs: Tensor
    input_axis: int
    output: Tensor
    output_axis: int


@dataclass(frozen=True, eq=False)
class Step:
    """One function that ran on what a projection made.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Likewise by name.
        outputs: The tensors that it returned, or changed.
        in_place: Whether it changed its first argument.
    """

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    in_place: bool


@dataclass(frozen=True, eq=False)
class Operand:
    """A query, key or value as it entered the attention.

    Args:
        tensor: Its value.
        tokens: The axis of its tokens, from the end.
        channels: The axis of its channels, from the end.
        projections: What it was made by, as far as that happened inside the module.
    """

    tensor: Tensor
    tokens: int
    channels: int
    projections: tuple[Projection, ...] = ()


@dataclass(eq=False)
class Attended:
    """One softmax attention as it ran.

    Args:
        query: What asks.
        key: What is asked.
        value: What is averaged.
        scale: Factor between the products of query and key and the logits, None where that is more than a factor.
        obstacle: Why the logits are no multiple of one product of query and key, plus a bias.
        logits: What the softmax was taken of (..., queries, keys), where it was an operation of its own.
        mask: Mask of a fused kernel: boolean, True where a key may be seen, or additive.
        is_causal: Whether the fused kernel hides later tokens.
        after: What changes the softmax before it meets the values, None if nothing does.
        steps: What ran between the projections and here.
    """

    query: Operand
    key: Operand
    value: Operand
    scale: float | None = None
    obstacle: str | None = None
    logits: Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    after: str | None = None
    steps: Sequence[Step] = ()
