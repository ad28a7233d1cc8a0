"""Descriptions of attention layers: which rows of which parameter form the query, key and value matrices.

Everything that knows how a weight is laid out in memory lives here: orientation (`torch.nn.Linear` against the
transposed Conv1D of GPT-2), 1x1 convolutions, and fused weights whose rows belong to several roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
    "reading",
]

Role = Literal["query", "key", "value"]
Kind = Literal["self", "cross", "channel", "latent", "approximate"]
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
        transposed: Whether the tensor is stored as (in, out) and not as (out, in).
        out_axes: How many axes of the tensor make up the output channels: 2 in a weight (in, heads, head width).
        groups: Groups of a grouped convolution: each has its own part of the rows and of the input channels.
    """

    rows: RowSet
    transposed: bool = False
    out_axes: int = 1
    groups: int = 1

    def oriented(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor as a matrix (all output channels, in_features), a view of it."""
        if self.transposed:
            return tensor.flatten(-self.out_axes).flatten(0, -2).t()
        # A convolution (out, in, 1, 1) is a matrix as well.
        return tensor.flatten(0, self.out_axes - 1).flatten(1)

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the projection as a matrix (rows, in_features), a view of the tensor where possible.

        A grouped convolution is the matrix that it computes with: zero where a row does not see an input channel.
        """
        oriented = self.oriented(tensor)
        if self.rows.count == 1:
            rows = oriented[self.rows.offset : self.rows.offset + self.rows.block]
        else:
            rows = oriented.index_select(0, self.rows.indices(oriented.device))
        if self.groups == 1:
            return rows
        groups, count = self._groups(oriented)
        full = rows.new_zeros(rows.shape[0], count, rows.shape[1])
        full[torch.arange(rows.shape[0], device=rows.device), groups] = rows
        return full.flatten(1)

    def scatter_(self, tensor: Tensor, values: Tensor) -> None:
        """Write a matrix (rows, in_features) into its place; of a grouped convolution only what stands there."""
        oriented = self.oriented(tensor)
        if self.groups > 1:
            groups, count = self._groups(oriented)
            parts = values.reshape(values.shape[0], count, -1)
            values = parts[torch.arange(values.shape[0], device=values.device), groups]
        oriented.index_copy_(0, self.rows.indices(tensor.device), values.to(tensor))

    def _groups(self, oriented: Tensor) -> tuple[Tensor, int]:
        """Return for each row its group, counted among those that the rows touch, and how many these are."""
        group = self.rows.indices(oriented.device) // (oriented.shape[0] // self.groups)
        touched, position = torch.unique(group, return_inverse=True)
        return position, len(touched)


@dataclass(frozen=True, eq=False)
class WeightView:
    """The rows of one parameter that hold one projection matrix.

    Args:
        module: Owner of the parameter.
        tensor_name: Name of the parameter on its owner.
        layout: Where the matrix stands in the parameter.
        owner_name: Dotted name of the owner in the model, without wrapper parts.
    """

    module: nn.Module
    tensor_name: str
    layout: MatrixLayout
    owner_name: str = ""

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

    @torch.no_grad()
    def as_read(self) -> Tensor:
        """Return the tensor that the module reads.

        Usually the parameter; else what a parametrization or a pruning mask has put in its place. Parametrizations are
        computed in evaluation mode: reading must not be a step of spectral normalisation.

        Raises:
            LostTargetError: If there is no floating-point tensor under this name, as after quantization.
        """
        if own_parameter(self.module, self.tensor_name) is not None:
            return self.parameter
        with reading(self.module):
            value = getattr(self.module, self.tensor_name, None)
        return value if isinstance(value, Tensor) and value.is_floating_point() else self.parameter

    @property
    def in_features(self) -> int:
        """Columns of the matrix: channels of what is projected."""
        oriented = self.layout.oriented(self.as_read())
        rows = self.layout.rows.indices() if self.layout.groups > 1 else None
        touched = 1 if rows is None else len(set((rows // (oriented.shape[0] // self.layout.groups)).tolist()))
        return oriented.shape[1] * touched

    @property
    def key(self) -> tuple[int, MatrixLayout]:
        """What two views of the same numbers have in common, whatever the names of their owners."""
        return id(self.parameter), self.layout

    def matrix(self) -> Tensor:
        """Return the projection (rows, in_features) as the parameter holds it."""
        return self.layout.matrix(self.parameter)


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Read weights that parametrizations compute, without a step of spectral normalisation and without random numbers.

    Args:
        model: A module whose parametrizations are read.
    """
    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    computing = [m for outer in lists for m in outer.modules() if m.training]
    with torch.random.fork_rng(devices=[], enabled=bool(lists)):
        for module in computing:
            module.training = False
        try:
            yield
        finally:
            for module in computing:
                module.training = True


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter of the module itself, whatever shadows it, or None."""
    for own_name, value in module.named_parameters(recurse=False, remove_duplicate=False):
        if own_name == name:
            return value
    return None


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """One attention layer.

    A role may have several matrices, whose products are joined: a query made of content and position, the two parts of
    a key in multi-head latent attention. It may have none: a query that is itself a parameter, keys that come from
    another layer. The same rows may serve two roles.

    Args:
        name: Dotted name of the attention module in the model, without wrapper parts.
        module: The attention module.
        views: The projection matrices by role.
        num_heads: Query heads, None where it is not known.
        num_kv_heads: Key heads, None where it is not known; value heads as well unless `num_value_heads` differs.
        kind: What the softmax runs over: tokens of the same sequence, of another one, or channels; "latent" where keys
            and values come from one low-rank latent, "approximate" where not all scores are computed.
        causal: Whether a position attends to itself and earlier ones only.
        batch_first: Whether token tensors come as (batch, tokens, ...) and not as (tokens, batch, ...).
        traced: Whether a forward pass has shown the rows; else they come from the table of known layouts.
        notes: Why a role has no matrix here.
        num_value_heads: Value heads where there are not as many as key heads (differential attention).
    """

    name: str
    module: nn.Module
    views: Mapping[Role, tuple[WeightView, ...]]
    num_heads: int | None = None
    num_kv_heads: int | None = None
    kind: Kind = "self"
    causal: bool = False
    batch_first: bool = True
    traced: bool = False
    notes: Mapping[Role, str] = field(default_factory=dict)
    num_value_heads: int | None = None

    def heads(self, role: Role) -> int | None:
        """Return the number of heads of a role's matrix."""
        if role == "value":
            return self.num_value_heads or self.num_kv_heads
        return self.num_heads if role == "query" else self.num_kv_heads

    def matrix_view(self, role: Role) -> WeightView | None:
        """Return the one matrix of a role, None where it has none or several."""
        views = self.views.get(role, ())
        return views[0] if len(views) == 1 else None

    @property
    def width(self) -> int:
        """Channels of the tokens that are projected."""
        return next(iter(self))[1].in_features

    def __iter__(self) -> Iterator[tuple[Role, WeightView]]:
        return iter((role, view) for role in ROLES for view in self.views.get(role, ()))
