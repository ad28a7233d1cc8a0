"""Descriptions of attention layers: which rows of which parameter form the query, key and value matrices.

Everything that knows how a weight is laid out in memory lives here: orientation (`torch.nn.Linear` against the
transposed Conv1D of GPT-2), 1x1 convolutions, and fused weights whose rows belong to several roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lit_cond.errors import LostTargetError

__all__ = [
    "ROLES",
    "AttentionSite",
    "Kind",
    "MatrixLayout",
    "Role",
    "RowSet",
    "WeightView",
    "clean_name",
    "own_parameter",
]

Role = Literal["query", "key", "value"]
Kind = Literal["self", "cross", "channel"]
ROLES: tuple[Role, ...] = get_args(Role)

_WRAPPER_PARTS = frozenset({"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """Return a module name without the parts that `torch.compile`, FSDP and Lightning put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


@dataclass(frozen=True)
class RowSet:
    """Output channels `offset + i * period + j` for `i < count`, `j < block`.

    One range (a whole matrix, a third of a fused one) has `count == 1`; rows interleaved per head have one block a
    head.

    Args:
        offset: First row.
        block: Rows in one block.
        period: Distance between the first rows of two blocks.
        count: Number of blocks.
    """

    offset: int
    block: int
    period: int
    count: int = 1

    @classmethod
    def span(cls, start: int, length: int) -> RowSet:
        """Return the rows `start ... start + length - 1`."""
        return cls(offset=start, block=length, period=length, count=1)

    def __len__(self) -> int:
        return self.block * self.count

    def indices(self, device: torch.device | None = None) -> Tensor:
        """Return the row numbers (len(self),) in ascending order of blocks."""
        starts = self.offset + self.period * torch.arange(self.count, device=device)
        return (starts[:, None] + torch.arange(self.block, device=device)).flatten()

    def __str__(self) -> str:
        if self.count == 1:
            return f"[{self.offset}:{self.offset + self.block})"
        return f"[{self.offset}:{self.offset + self.block}) + {self.period}i, i<{self.count}"


@dataclass(frozen=True)
class MatrixLayout:
    """Where a projection matrix (rows, in_features) stands in a parameter's tensor.

    Args:
        rows: Output channels of the projection inside the tensor.
        transposed: Whether the tensor is stored as (in, out).
    """

    rows: RowSet
    transposed: bool = False

    def _oriented(self, tensor: Tensor) -> Tensor:
        # A 1x1 convolution (out, in, 1, 1) is a matrix as well.
        return tensor.t() if self.transposed else tensor.flatten(1)

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the projection as a matrix (rows, in_features), a view of the tensor where possible."""
        oriented = self._oriented(tensor)
        if self.rows.count == 1:
            return oriented[self.rows.offset : self.rows.offset + self.rows.block]
        return oriented.index_select(0, self.rows.indices(oriented.device))

    def scatter_(self, tensor: Tensor, values: Tensor) -> None:
        """Write a matrix (rows, in_features) into its place."""
        self._oriented(tensor).index_copy_(0, self.rows.indices(tensor.device), values.to(tensor))


@dataclass(frozen=True, eq=False)
class WeightView:
    """The rows of one parameter that hold one projection matrix.

    Args:
        module: Owner of the parameter.
        tensor_name: Name of the parameter on its owner.
        layout: Where the matrix stands in the parameter.
    """

    module: nn.Module
    tensor_name: str
    layout: MatrixLayout

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself.

        Raises:
            LostTargetError: If the owner does not hold a plain floating-point parameter under this name, as after
                pruning, `torch.nn.utils.parametrize` or quantization.
        """
        value = own_parameter(self.module, self.tensor_name)
        if value is None or not value.is_floating_point():
            raise LostTargetError(
                f"'{self.tensor_name}' of {type(self.module).__name__} is not a plain floating-point parameter "
                "(pruned, parametrized or quantized?); undo that first or leave the layer out with `exclude`"
            )
        return value

    @property
    def in_features(self) -> int:
        """Columns of the matrix: channels of what is projected."""
        shape = self.parameter.shape
        return shape[0] if self.layout.transposed else math.prod(shape[1:])

    def matrix(self) -> Tensor:
        """Return the projection (rows, in_features) as the parameter holds it."""
        return self.layout.matrix(self.parameter)


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter of the module itself, whatever shadows it, or None."""
    for own_name, value in module.named_parameters(recurse=False, remove_duplicate=False):
        if own_name == name:
            return value
    return None


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention layer.

    Args:
        name: Dotted name of the attention module in the model, without wrapper parts.
        module: The attention module.
        views: The projection matrices by role.
        num_heads: Query heads, None where the module does not say.
        num_kv_heads: Key and value heads, None where the module does not say.
        kind: What the softmax runs over: tokens of the same sequence, of another one, or channels.
        causal: Whether a position attends to itself and earlier ones only.
        batch_first: Whether token tensors come as (batch, tokens, ...) and not as (tokens, batch, ...).
    """

    name: str
    module: nn.Module
    views: Mapping[Role, WeightView]
    num_heads: int | None = None
    num_kv_heads: int | None = None
    kind: Kind = "self"
    causal: bool = False
    batch_first: bool = True
    owner_names: Mapping[Role, str] = field(default_factory=dict)

    def heads(self, role: Role) -> int | None:
        """Return the number of heads of a role's matrix."""
        return self.num_heads if role == "query" else self.num_kv_heads

    @property
    def width(self) -> int:
        """Channels of the tokens that are projected to queries."""
        return self.views["query"].in_features

    def __iter__(self) -> Iterator[tuple[Role, WeightView]]:
        return iter((role, self.views[role]) for role in ROLES if role in self.views)
