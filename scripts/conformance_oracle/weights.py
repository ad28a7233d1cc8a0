"""Places of rows in parameters, and changes of them: the judge's own reading of a described view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Change", "Described", "changed_weights", "describe", "random_rows", "row_numbers"]


@dataclass(frozen=True, eq=False)
class Described:
    """A view as the judge reads it.

    Args:
        role: The role that the view is listed under.
        label: What a person calls it.
        parameter: The parameter.
        places: (rows, inputs) of the view: where each entry stands in the flattened parameter.
        whole: (all output channels, inputs): the same of the whole parameter.
        rows: Numbers of the view's rows among all output channels.
    """

    role: str
    label: str
    parameter: nn.Parameter
    places: Tensor
    whole: Tensor
    rows: tuple[int, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """Equal for two views of the same rows."""
        return id(self.parameter), self.rows

    def overlaps(self, other: Described) -> bool:
        """Return whether both have rows in common."""
        return self.parameter is other.parameter and not set(self.rows).isdisjoint(other.rows)


@dataclass(frozen=True, eq=False)
class Change:
    """Numbers to add to some entries of one parameter."""

    parameter: nn.Parameter
    places: Tensor
    values: Tensor

    def times(self, factor: float) -> Change:
        """Return a multiple."""
        return Change(self.parameter, self.places, self.values * factor)


def row_numbers(rows: Any) -> tuple[int, ...]:
    """Return the rows `offset + i * period + j` for `i < count`, `j < block`, in this order."""
    return tuple(rows.offset + i * rows.period + j for i in range(rows.count) for j in range(rows.block))


def describe(role: str, view: Any) -> Described:
    """Read a view: anything with `module`, `tensor_name` and `layout`.

    Raises:
        LookupError: The parameter does not exist or has not as many rows.
    """
    own = dict(view.module.named_parameters(recurse=False, remove_duplicate=False))
    parameter = own.get(view.tensor_name)
    label = f"{getattr(view, 'owner_name', '') or type(view.module).__name__}.{view.tensor_name}"
    if parameter is None:
        raise LookupError(f"{type(view.module).__name__} has no parameter {view.tensor_name!r}.")
    layout = view.layout
    shape, axes = parameter.shape, layout.out_axes
    numbers = torch.arange(parameter.numel()).reshape(shape)
    if layout.transposed:
        whole = numbers.reshape(-1, shape[len(shape) - axes :].numel()).t()
    else:
        whole = numbers.reshape(shape[:axes].numel(), -1)
    rows = row_numbers(layout.rows)
    if not rows or min(rows) < 0 or max(rows) >= len(whole) or len(set(rows)) != len(rows):
        raise LookupError(f"{label} has {len(whole)} output channels; the rows {layout.rows} do not fit.")
    return Described(role, label, parameter, whole[list(rows)], whole, rows)


def random_rows(view: Described, rows: Sequence[int], seed: int = 0) -> Change:
    """Return a random change of some rows of the parameter, about as large as what stands there."""
    generator = torch.Generator().manual_seed(seed)
    places = view.whole[list(rows)]
    values = view.parameter.detach()
    size = float(values.nan_to_num().pow(2).mean().sqrt())
    noise = torch.randn(places.shape, generator=generator, dtype=torch.float64)
    return Change(view.parameter, places, (noise * (0.5 * size + 1e-2)).to(values.dtype))


@contextmanager
def changed_weights(changes: Sequence[Change]) -> Iterator[None]:
    """Add changes for a while; afterwards the parameters hold exactly what they held."""
    before = {change.parameter: change.parameter.detach().clone() for change in changes}
    try:
        with torch.no_grad():
            for change in changes:
                # By value and not through a view, since a parameter need not be contiguous.
                flat = change.parameter.detach().clone(memory_format=torch.contiguous_format).flatten()
                flat[change.places.flatten()] += change.values.flatten()
                change.parameter.copy_(flat.reshape(change.parameter.shape))
        yield
    finally:
        with torch.no_grad():
            for parameter, values in before.items():
                parameter.copy_(values)
