"""What a module of a foreign library says of itself: its class, counts of heads, causality, its projections."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lit_cond.surgery.sites import Kind, MatrixLayout, RowSet, WeightView

__all__ = [
    "COUNTS",
    "Projection",
    "attribute",
    "class_path",
    "first_int",
    "is_causal",
    "kind_by_name",
    "projection",
    "projections_at",
    "size",
    "truth",
]

# Spellings of the same number.
COUNTS: Mapping[str, Sequence[str]] = {
    "heads": (
        "num_heads",
        "num_attention_heads",
        "n_heads",
        "n_head",
        "nhead",
        "heads",
        "num_attn_heads",
        "encoder_attention_heads",
        "groups",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "attention_head_size", "d_head", "dim_head", "head_size", "d_kv"),
}

_WRAPPED = ("base_layer", "linear", "conv", "proj")


def class_path(module: nn.Module) -> str:
    """Return `package.module.Class` of a module's class."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def _said(holder: object, name: str) -> object:
    try:
        return getattr(holder, name, None)
    except Exception:  # a configuration may refuse to speak for all layers at once
        return None


def attribute(module: nn.Module, name: str) -> object:
    """Return an attribute of the module, else of its configuration, None where neither says it."""
    own = _said(module, name)
    return _said(getattr(module, "config", None), name) if own is None else own


def first_int(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first positive integer under one of the names, of the module before its configuration."""
    for holder in (module, getattr(module, "config", None)):
        for value in (_said(holder, name) for name in names):
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def size(module: nn.Module, expression: str) -> int | None:
    """Return the value of a product such as `kv_heads*head_dim`, None where a factor is not known.

    Args:
        module: Whose attributes, or whose configuration's, the factors are.
        expression: Factors joined by `*`: integers, keys of `COUNTS`, or names of attributes.
    """
    product = 1
    for factor in expression.split("*"):
        value = int(factor) if factor.isdigit() else first_int(module, COUNTS.get(factor, (factor,)))
        if value is None:
            return None
        product *= value
    return product


def truth(module: nn.Module, condition: str) -> bool:
    """Say whether a condition, `name` or `not name`, holds for an attribute of the module or its configuration."""
    name = condition.removeprefix("not ")
    value = attribute(module, name)
    return value is not None and bool(value) is (name == condition)


def is_causal(module: nn.Module) -> bool:
    """Whether a module shows that positions see earlier ones only: by a flag, its name or a triangular buffer."""
    if any(getattr(module, name, False) is True for name in ("is_causal", "causal")):
        return True
    if "causal" in type(module).__name__.lower():
        return True
    for _, buffer in module.named_buffers(recurse=False):
        square = buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1 and not buffer.is_meta
        if square and bool((buffer.triu(1) == 0).all()) and bool((buffer.tril() != 0).any()):
            return True
        if square and buffer.dtype == torch.bool and torch.equal(buffer, torch.ones_like(buffer).triu(1)):
            return True
    return False


def kind_by_name(module: nn.Module) -> Kind:
    """Return "cross" for a module that says that its keys come from another sequence, else "self"."""
    crossed = "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False) is True
    return "cross" if crossed else "self"


@dataclass(frozen=True, eq=False)
class Projection:
    """A parameter that projects tokens.

    Args:
        owner: The module that holds it.
        tensor_name: Its name there.
        rows: Number of its output channels.
        layout: How it is stored; its own rows do not count.
    """

    owner: nn.Module
    tensor_name: str
    rows: int
    layout: MatrixLayout

    def view(self, rows: RowSet) -> WeightView:
        """Return some of its rows."""
        return WeightView(self.owner, self.tensor_name, replace(self.layout, rows=rows))


def projection(module: nn.Module | None) -> Projection | None:
    """Return the weight of a linear or convolution layer, also of one that is wrapped, None for anything else.

    The wrapper may be that of an adapter or of a quantizer. A layer without a floating-point parameter counts too:
    whoever reads its weight is told that it is lost.
    """
    for _ in range(4):
        if module is None:
            return None
        children = dict(module.named_children())
        inner = next((children[name] for name in _WRAPPED if name in children), None)
        if inner is None:
            break
        module = inner
    if module is None:
        return None
    rows = _out_channels(module)
    if not rows:
        return None
    transposed = class_path(module) == "transformers.pytorch_utils.Conv1D"
    groups = getattr(module, "groups", 1) if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else 1
    return Projection(module, "weight", rows, MatrixLayout(RowSet.span(0, rows), transposed, groups=groups))


def _out_channels(module: nn.Module) -> int:
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.out_channels
    if class_path(module) == "transformers.pytorch_utils.Conv1D":
        return first_int(module, ("nf",)) or 0
    if not re.search("linear|dense|conv", type(module).__name__, re.IGNORECASE):
        return 0
    rows = getattr(module, "out_features", None)
    if isinstance(rows, int):  # packed weights have other shapes
        return rows
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.ndim >= 2 else 0


def projections_at(module: nn.Module, path: str, *, transposed: bool = False, out_axes: int = 1) -> list[Projection]:
    """Return the projections that a path names; `*` stands for all elements of a list; none if there is nothing.

    Args:
        module: Where the path starts.
        path: Dotted names of children; the last may be a parameter of the module before it.
        transposed: Whether such a parameter is stored as (in, out).
        out_axes: How many of its axes are output channels.
    """
    first, _, rest = path.partition(".")
    if not rest and first != "*":
        own = dict(module.named_parameters(recurse=False)).get(first)
        if own is not None and own.ndim >= 2:
            shape = own.shape[-out_axes:] if transposed else own.shape[:out_axes]
            layout = MatrixLayout(RowSet.span(0, shape.numel()), transposed, out_axes)
            return [Projection(module, first, shape.numel(), layout)]
    found = [child for name, child in module.named_children() if first in (name, "*")]
    if rest:
        return [p for child in found for p in projections_at(child, rest, transposed=transposed, out_axes=out_axes)]
    return [p for child in found if (p := projection(child)) is not None]
