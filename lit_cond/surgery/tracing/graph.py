"""What a traced forward pass leaves behind: operations, the module calls around them, the weights they used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Call", "Node", "Operand", "WeightUse", "tensors_in"]


@dataclass(eq=False)
class Call:
    """One call of a module.

    Args:
        name: Dotted name of the module in the traced model.
        module: The module.
        parent: The call around it.
        inputs: Tensor arguments: position or name, and where the tensor came from.
        first: Number of operations before the call.
    """

    name: str
    module: nn.Module
    parent: Call | None
    inputs: list[tuple[int | str, Node]]
    first: int

    def around(self) -> Iterator[Call]:
        """Yield this call and those around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True, eq=False)
class WeightUse:
    """The parameter that an operation projects with.

    Args:
        parameter: The parameter, None where the weight is computed from parameters in any other way than by cutting and
            joining them.
        transposed: Whether its output channels are its last axes.
        out_axes: How many axes they are.
        groups: Groups of a convolution.
        channels: For each output channel of the parameter the channel of the weight that it became (rows,), -1 for
            none; None where the weight is the parameter itself.
    """

    parameter: nn.Parameter | None
    transposed: bool = False
    out_axes: int = 1
    groups: int = 1
    channels: Tensor | None = None


@dataclass(eq=False)
class Node:
    """One operation, or a tensor that was there before.

    Args:
        index: Position in the order of execution; 0 for what was there before.
        name: Name of the function.
        parents: Where its tensor arguments came from.
        call: The module call in which it happened.
        shape: Shape of its first output.
        weights: The parameters that it projects with; empty if it is no projection.
        source: Input of the projection.
        channels: Axes of its output that hold the output channels, from the end.
        parameters: The parameters that it is made of by cutting and joining only; None for anything else.
        from_input: Whether it depends on the model's input.
        differentiable: Whether its output carries a gradient.
        products: Products of two activations that reach it through elementwise and shape operations.
        softmaxes: Softmaxes of such products that reach it in the same way.
        is_product: Whether it multiplies two activations.
        product: The operands of such a product, as long as they may be needed.
        axis: The axis that a softmax sums over, or along which tensors are joined.
        tensor: Output of a projection, softmax or product, as long as it may be needed.
        children: Operations that use it.
        carriers: Those of the parents through which gradients flow: not masks, positions, chosen indices.
    """

    index: int
    name: str
    parents: list[Node]
    call: Call | None
    shape: tuple[int, ...] = ()
    weights: tuple[WeightUse, ...] = ()
    source: Node | None = None
    channels: tuple[int, ...] = ()
    parameters: tuple[nn.Parameter, ...] | None = None
    from_input: bool = False
    differentiable: bool = False
    products: tuple[Node, ...] = ()
    softmaxes: tuple[Node, ...] = ()
    is_product: bool = False
    product: tuple[Operand, Operand] | None = None
    axis: int = -1
    tensor: Tensor | None = None
    children: list[Node] = field(default_factory=list)
    carriers: list[Node] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Operand:
    """One side of a product.

    Args:
        tensor: Its value.
        node: Where it came from.
        contracted: The axis that the product sums over.
        free: The axis that the product keeps as its own, in the product's output.
        own: The same axis in the tensor.
    """

    tensor: Tensor
    node: Node
    contracted: int
    free: int
    own: int


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def is_floating(tensor: Tensor) -> bool:
    """Whether a tensor can carry a gradient."""
    return tensor.is_floating_point() or torch.is_complex(tensor)
