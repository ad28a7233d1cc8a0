"""What one forward pass leaves behind: attention cores, and the projections that read a weight under test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "AUX",
    "ROLES",
    "Core",
    "Operand",
    "Product",
    "Tags",
    "Use",
    "differs",
    "flat_tensors",
    "scale_of",
    "tolerance",
]

ROLES = ("query", "key", "value")
AUX = "auxiliary"  # operands of a logit term that is no plain query-times-key, as those of positions


def tolerance(dtype: torch.dtype) -> float:
    """Return up to which share of the largest entry two results of the same computation may differ."""
    return 1e-9 if dtype == torch.float64 else 2e-5


def scale_of(tensor: Tensor) -> float:
    """Return the largest finite absolute entry, 0 if there is none."""
    values = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(values.max()) if values.numel() else 0.0


def differs(new: Tensor, old: Tensor, tol: float | None = None) -> bool:
    """Return whether two tensors differ by more than rounding."""
    if new.shape != old.shape:
        return True
    if torch.equal(new, old) or not new.numel():
        return False
    tol = tolerance(old.dtype) if tol is None else tol
    change = new.nan_to_num() - old.nan_to_num()
    return scale_of(change) > tol * scale_of(old)


@dataclass(frozen=True, eq=False)
class Operand:
    """One factor of a product inside attention.

    Args:
        tensor: The factor.
        contracted: Its axis that the product sums over: channels in query and key, unless attention is over channels;
            None where the product does not say.
        free: Its other matrix axis: tokens in query and key, channels in value.
        weight: Whether it is made of parameters only, by no product.
    """

    tensor: Tensor
    contracted: int | None
    free: int | None
    weight: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two computed tensors that reached a softmax."""

    left: Operand
    right: Operand


@dataclass(frozen=True, eq=False)
class Core:
    """One softmax attention: what was multiplied.

    Args:
        index: Number in the order of execution.
        kernel: `sdpa` or `softmax`.
        modules: The modules that were running, outermost first.
        operands: Factors by role, and those of further logit terms under `AUX`.
        output: What came out.
    """

    index: int
    kernel: str
    modules: tuple[nn.Module, ...]
    operands: Mapping[str, tuple[Operand, ...]]
    output: Tensor

    def tensors(self, role: str) -> list[Tensor]:
        """Return the factors of a role."""
        return [operand.tensor for operand in self.operands.get(role, ())]

    def changed(self, base: Core) -> frozenset[str]:
        """Return the roles of which a factor differs from that of another run."""
        return frozenset(
            role
            for role in (*ROLES, AUX)
            if len(self.tensors(role)) != len(base.tensors(role))
            or any(differs(a, b) for a, b in zip(self.tensors(role), base.tensors(role), strict=True))
        )


@dataclass(frozen=True, eq=False)
class Use:
    """One projection that read a weight under test.

    Args:
        function: Name of the torch function.
        parameters: Ids of the parameters that the weight is made of.
        inputs: What was projected.
        weight: The weight as the function got it.
        matrix: The same as (output channels, inputs), None where the function does not say which axes are which.
        output: The projection.
        channel_axes: Axes of the output that make up the output channels.
        pointwise: Whether each position is multiplied with the matrix alone: `output = inputs @ matrix.T + bias`.
        imagined: Whether the inputs are random numbers in the place of zeros; see `imagine`.
    """

    function: str
    parameters: frozenset[int]
    inputs: Tensor
    weight: Tensor
    matrix: Tensor | None
    output: Tensor
    channel_axes: tuple[int, ...] | None
    pointwise: bool = False
    imagined: bool = False

    def imagine(self, old: Use) -> Use:
        """Return what the projection would be if not zeros were projected, where the weight has changed since `old`.

        The first decoder layer of DETR projects zeros: no change of its weight shows. Random numbers are multiplied
        with the change alone, so that an unchanged weight gives an unchanged projection.
        """
        if self.matrix is None or old.matrix is None or not self.pointwise or self.channel_axes != (-1,):
            return self
        if scale_of(old.inputs) > 0 or scale_of(self.inputs) > 0:
            return self
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.inputs.shape, generator=generator, dtype=torch.float64).to(self.inputs)
        output = self.output + inputs @ (self.matrix - old.matrix).t()
        return replace(self, inputs=inputs, output=output, imagined=True)

    def channels_last(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the output's shape as (positions, output channels)."""
        assert self.channel_axes is not None
        count = len(self.channel_axes)
        moved = tensor.movedim(self.channel_axes, tuple(range(-count, 0)))
        return moved.reshape(-1, moved.shape[-count:].numel())


@dataclass(eq=False)
class Tags:
    """Where a tensor comes from, as far as attention is concerned.

    Args:
        tensor: The tensor, kept so that its id stays its own.
        weights: Ids of the parameters that it is made of, if it is made of nothing else; else empty.
        products: Products of two computed tensors that it carries.
        softmaxes: Attention probabilities that it carries.
    """

    tensor: Tensor
    weights: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()
    softmaxes: frozenset[int] = frozenset()


def flat_tensors(value: Any) -> list[Tensor]:
    """Return the tensors inside nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [tensor for entry in value for tensor in flat_tensors(entry)]
    return []
