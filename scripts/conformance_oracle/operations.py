"""What torch functions multiply: the two factors of a product, and which of their axes are summed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from scripts.conformance_oracle.records import flat_tensors

__all__ = ["CONVOLUTIONS", "SOFTMAXES", "Factors", "Side", "factors", "name_of", "softmax_input"]

SOFTMAXES = frozenset({"softmax", "_softmax", "softmax_", "gumbel_softmax"})
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_PLAIN = {"matmul": "other", "__matmul__": "other", "bmm": "mat2", "mm": "mat2"}
_ADDED = {"baddbmm": ("batch1", "batch2"), "baddbmm_": ("batch1", "batch2"), "addmm": ("mat1", "mat2")}


@dataclass(frozen=True, eq=False)
class Side:
    """One factor.

    Args:
        tensor: The factor.
        contracted: Axis summed over; None if there are several or it is not known.
        free: Axis that the other factor does not have; None if there are several or it is not known.
        matrix: The factor as (output channels, inputs) if it is the weight of a projection; None if not known.
        channel_axes: Axes of the result that make up the output channels if this is the weight.
    """

    tensor: Tensor
    contracted: int | None = None
    free: int | None = None
    matrix: Tensor | None = None
    channel_axes: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Factors:
    """Both factors of a product; `projection` says that the second one is a weight whatever it comes from."""

    left: Side
    right: Side
    projection: bool = False
    pointwise: bool = False

    def other(self, side: Side) -> Side:
        """Return the factor that is not this one."""
        return self.right if side is self.left else self.left


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a torch function; of a property its own, as `T` or `shape`."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


def softmax_input(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the logits of a softmax and the axis that it runs along."""
    logits = args[0] if args else kwargs.get("input", kwargs.get("logits"))
    assert isinstance(logits, Tensor)
    position = 4 if name == "gumbel_softmax" else 1
    axis = kwargs.get("dim", args[position] if len(args) > position else -1)
    return logits, int(-1 if axis is None else axis)


def factors(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Factors | None:
    """Return what a torch function multiplies, None if it is no product or of more than two factors."""
    if name == "einsum":
        return _einsum(args)
    if name == "__rmatmul__":
        return _matrices(args[1], args[0])
    if name in _PLAIN:
        return _matrices(args[0], args[1] if len(args) > 1 else kwargs[_PLAIN[name]])
    if name in _ADDED:
        first, second = _ADDED[name]
        return _matrices(
            args[1] if len(args) > 1 else kwargs[first],
            args[2] if len(args) > 2 else kwargs[second],
        )
    if name == "linear":
        inputs, weight = _first_two(args, kwargs)
        side = Side(weight, -1, 0, weight if weight.dim() == 2 else None, (-1,))
        return Factors(Side(inputs, -1, None), side, projection=True, pointwise=True)
    if name in CONVOLUTIONS:
        return _convolution(*_first_two(args, kwargs))
    if name.startswith("conv_transpose"):
        inputs, weight = _first_two(args, kwargs)
        return Factors(Side(inputs), Side(weight), projection=True)
    return None


def _first_two(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    inputs = args[0] if args else kwargs["input"]
    return inputs, args[1] if len(args) > 1 else kwargs["weight"]


def _matrices(left: Any, right: Any) -> Factors | None:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.dim() < 2 or right.dim() < 2:
        return None
    # A weight (heads, in, out) on the right gives one block of output channels for each head.
    matrix: Tensor | None = None
    axes: tuple[int, ...] | None = None
    if right.dim() == 2:
        matrix, axes = right.t(), (-1,)
    elif right.dim() == 3:
        matrix, axes = right.transpose(-1, -2).flatten(0, 1), (-3, -1)
    return Factors(
        Side(left, -1, -2, left if left.dim() == 2 else None, (-2,)),
        Side(right, -2, -1, matrix, axes),
        pointwise=right.dim() == 2,
    )


def _convolution(inputs: Tensor, weight: Tensor) -> Factors:
    axis = 1 if inputs.dim() == weight.dim() else 0
    pointwise = weight[0, 0].numel() == 1 and weight.shape[1] == inputs.shape[axis]
    side = Side(weight, None, 0, weight.flatten(1), (axis,))
    return Factors(Side(inputs, axis, None), side, projection=True, pointwise=pointwise)


def _einsum(args: Sequence[Any]) -> Factors | None:
    operands = flat_tensors(args[1:])
    equation = args[0]
    if len(operands) != 2 or not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "")
    if "->" not in equation:
        return Factors(Side(operands[0]), Side(operands[1]))
    terms, result = equation.split("->")
    left, right = terms.split(",")
    return Factors(_side(operands[0], left, right, result), _side(operands[1], right, left, result))


def _side(tensor: Tensor, own: str, other: str, result: str) -> Side:
    """Describe one factor of a sum over named axes; `...` may stand for leading axes."""
    letters = own.replace("...", "")
    contracted = [letter for letter in letters if letter not in result]
    free = [letter for letter in letters if letter in result and letter not in other]
    side = Side(tensor, _only(contracted, own), _only(free, own))
    if "..." in own or tensor.dim() != len(letters):
        return side
    kept = [letter for letter in letters if letter in result]
    order = [letters.index(letter) for letter in (*kept, *contracted)]
    rows = tensor.permute(order)
    shape = rows.shape[: len(kept)].numel()
    return replace(side, matrix=rows.reshape(shape, -1), channel_axes=tuple(_axis(letter, result) for letter in kept))


def _only(letters: Sequence[str], own: str) -> int | None:
    return _axis(letters[0], own) if len(letters) == 1 else None


def _axis(letter: str, term: str) -> int:
    """Return the axis of a letter, counted from the end where `...` stands before it."""
    before, dots, after = term.partition("...")
    if letter in before or not dots:
        return before.index(letter)
    return after.index(letter) - len(after)
