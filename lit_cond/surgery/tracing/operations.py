"""What torch functions mean to the tracer, by name: products, projections, shape operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["CUTS", "JOINS", "METADATA", "OPAQUE", "Product", "product_of"]

# fmt: off
# Attributes and queries: they return no tensor that anything is computed with.
METADATA = frozenset(
    (
        "shape", "device", "dtype", "layout", "size", "dim", "ndim", "numel", "grad", "grad_fn", "requires_grad",
        "is_leaf", "data_ptr", "is_floating_point", "is_complex", "stride", "storage_offset", "is_contiguous",
        "element_size", "is_cuda", "is_meta", "is_nested", "is_sparse", "__set__", "__len__", "__bool__", "item",
        "tolist", "__hash__", "__repr__", "__format__", "get_device", "requires_grad_", "register_hook", "is_tensor",
    )
)

# What gives back entries of its argument, unchanged but for place and dtype.
CUTS = frozenset(
    (
        "chunk", "split", "__getitem__", "T", "mT", "H", "t", "transpose", "view", "reshape", "narrow", "unbind",
        "permute", "swapaxes", "unsqueeze", "squeeze", "to", "type_as", "contiguous", "float", "detach", "select",
        "tensor_split", "split_with_sizes", "flatten", "unflatten", "expand", "movedim", "swapdims", "view_as",
        "reshape_as", "type", "half", "bfloat16", "double", "clone", "data", "index_select",
    )
)
JOINS = frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack"))

# Functions behind which the scores of attention are not followed any further.
OPAQUE = frozenset(
    (
        "embedding", "embedding_bag", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
        "local_response_norm", "scaled_dot_product_attention",
    )
)

# fmt: on
_MATMULS = frozenset(("matmul", "__matmul__", "__rmatmul__", "bmm", "mm"))
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}


@dataclass(frozen=True, eq=False)
class Product:
    """A sum of products of two tensors.

    Args:
        left: One tensor.
        right: The other.
        contracted: The axes of each that are summed over, from the end (negative).
        free: The axes of each that stand in the output.
        placed: Where in the output, from the end, these axes stand.
        groups: Groups of a convolution.
        weight_only: Whether the right one is a weight by the meaning of the function.
    """

    left: Tensor
    right: Tensor
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    placed: tuple[tuple[int, ...], tuple[int, ...]] = ((-2,), (-1,))
    groups: int = 1
    weight_only: bool = False


def product_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """Return the product that a function call computes, or None if it computes none (or one that is not understood)."""
    if name == "linear":
        left, right = _arguments(args, kwargs, ("input", "weight"))
        return Product(left, right, ((-1,), (-1,)), ((-2,), (-2,))) if right.ndim == 2 else None
    if name in _CONVOLUTIONS:
        left, right = _arguments(args, kwargs, ("input", "weight"))
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        inner = tuple(range(1 - right.ndim, 0))
        return Product(
            left,
            right,
            ((-1 - _CONVOLUTIONS[name],), inner),
            ((), (-right.ndim,)),
            ((), (-1 - _CONVOLUTIONS[name],)),
            groups,
            True,
        )
    if name in ("addmm", "baddbmm", "addbmm"):
        tensors = [a for a in args if isinstance(a, Tensor)] + [kwargs[k] for k in _ADDED if k in kwargs]
        return _matmul(*tensors[-2:]) if len(tensors) >= 2 else None
    if name in _MATMULS:
        names = ("input", "mat2") if name in ("bmm", "mm") else ("input", "other")
        left, right = _arguments(args, kwargs, names)
        return _matmul(right, left) if name == "__rmatmul__" else _matmul(left, right)
    if name == "einsum":
        return _einsum(args)
    if name == "tensordot":
        return _tensordot(args, kwargs)
    return None


_ADDED = ("mat1", "batch1", "mat2", "batch2")


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: tuple[str, str]) -> tuple[Tensor, Tensor]:
    left, right = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))
    return left, right


def _matmul(left: Tensor, right: Tensor) -> Product | None:
    if left.ndim < 2 or right.ndim < 2:
        return None
    return Product(left, right, ((-1,), (-2,)), ((-2,), (-1,)))


def _einsum(args: Sequence[Any]) -> Product | None:
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2 or "->" not in args[0]:
        return None
    inputs, output = args[0].replace(" ", "").split("->")
    terms = inputs.split(",")
    if "..." in args[0]:
        # The dots stand for leading batch axes; letters after them keep their places from the end.
        if any("..." in term and not term.startswith("...") for term in (*terms, output)):
            return None
        terms, output = [term.replace("...", "") for term in terms], output.replace("...", "")
    a, b = terms
    summed = [c for c in a if c in b and c not in output]
    if not summed or len(set(a)) != len(a) or len(set(b)) != len(b):
        return None
    contracted = tuple(tuple(term.index(c) - len(term) for c in summed) for term in terms)
    kept = [[c for c in term if c in output and c not in other] for term, other in ((a, b), (b, a))]
    free = tuple(tuple(term.index(c) - len(term) for c in letters) for term, letters in zip(terms, kept, strict=True))
    placed = tuple(tuple(output.index(c) - len(output) for c in letters) for letters in kept)
    left, right = operands
    return Product(left, right, contracted, free, placed)  # type: ignore[arg-type]


def _tensordot(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    left, right = args[:2]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", 2)
    if isinstance(dims, int):
        dims = (range(left.ndim - dims, left.ndim), range(dims))
    if not isinstance(dims, (list, tuple)):
        return None
    contracted = tuple(tuple((d % t.ndim) - t.ndim for d in axes) for t, axes in zip((left, right), dims, strict=True))
    free = tuple(
        tuple(d for d in range(-t.ndim, 0) if d not in axes) for t, axes in zip((left, right), contracted, strict=True)
    )
    return Product(left, right, contracted, free, ((), tuple(range(-len(free[1]), 0))))  # type: ignore[arg-type]
