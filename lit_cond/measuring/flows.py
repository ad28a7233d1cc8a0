"""What reaches a tensor on its way through attention: projections, scores, softmaxes, and what happened to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lit_cond.measuring.records import Attended, Operand, Projection

__all__ = [
    "MIXED",
    "OTHER_TERM",
    "SOFTMAXES",
    "Flow",
    "Flows",
    "Scores",
    "Softmax",
    "attend",
    "changed",
    "joined",
    "passed",
]

SOFTMAXES = frozenset(("softmax", "_softmax", "softmax_"))
_TIMES = frozenset(("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"))
_OVER = frozenset(("div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"))
# What may stand between the product of queries and keys and the softmax without changing how one depends on the other.
_HARMLESS = frozenset(
    (
        *("add", "add_", "__add__", "__radd__", "__iadd__", "__sub__", "sub", "masked_fill", "masked_fill_", "where"),
        *("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "clone", "expand"),
        *("to", "float", "double", "type", "type_as", "half", "bfloat16", "__getitem__"),
        *("max", "amax", "detach", "dropout", "nan_to_num"),
    )
)
# The same between the softmax and the values.
_HARMLESS_AFTER = frozenset(
    (
        *("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous", "clone", "expand", "detach"),
        *("to", "float", "double", "type", "type_as", "half", "bfloat16", "__getitem__", "dropout", "nan_to_num"),
        *("permute", "transpose", "swapaxes", "swapdims", "mT"),
    )
)
_TURNS = frozenset(("transpose", "transpose_", "swapaxes", "swapdims", "permute", "mT", "T", "t", "adjoint"))
OTHER_TERM = "its scores hold a term that is made of tokens and no product of query and key"
MIXED = "its scores are mixed by a weight"
_LOST = "its scores change the places of their axes"


@dataclass(frozen=True, eq=False)
class Scores:
    """A product of two activations, and what has become of it on one way since.

    `placed` are the axes of the tokens of each, from the end.
    """

    left: Operand
    right: Operand
    placed: tuple[int, int]
    scale: float = 1.0
    obstacle: str | None = None

    @property
    def origin(self) -> object:
        """The same for all that this product becomes on its ways."""
        return self.left

    @property
    def changed(self) -> str | None:
        """What has happened to it, beside a factor."""
        return self.obstacle


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax of scores, and what has become of it on one way since."""

    scores: tuple[Scores, ...]
    logits: Tensor
    axis: int
    changed: str | None = None

    @property
    def origin(self) -> object:
        """The same for all that this softmax becomes on its ways."""
        return self.logits


@dataclass(frozen=True, eq=False)
class Flow:
    """What has reached a tensor."""

    weight: bool = False
    projections: tuple[Projection, ...] = ()
    scores: tuple[Scores, ...] = ()
    softmaxes: tuple[Softmax, ...] = ()


@dataclass(eq=False)
class Flows:
    """Flows by tensor. The tensors are kept: their identities stay unique as long as a call is watched."""

    flows: dict[int, tuple[Tensor, Flow]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> Flow | None:
        """Return what has reached a tensor, None if that is not known."""
        found = self.flows.get(id(tensor))
        return found[1] if found is not None else None

    def put(self, tensor: Tensor, flow: Flow) -> None:
        """Note what has reached a tensor."""
        self.flows[id(tensor)] = (tensor, flow)


def attend(softmax: Softmax, value: Operand) -> Attended:
    """Return the attention of a softmax that averages values."""
    # Scores of content and of relative position may be added; content has tokens of the input on both sides.
    content = [s for s in softmax.scores if s.left.projections and s.right.projections]
    scores = (content or list(softmax.scores))[0]
    several = len(softmax.scores) > 1
    axis = softmax.axis - softmax.logits.ndim if softmax.axis >= 0 else softmax.axis
    query, key = (scores.left, scores.right) if scores.placed[1] == axis else (scores.right, scores.left)
    return Attended(
        query,
        key,
        value,
        scale=None if several or scores.obstacle else scores.scale,
        obstacle="its scores are a sum of several products" if several else scores.obstacle,
        logits=softmax.logits.movedim(axis, -1),
        after=softmax.changed,
    )


def passed(softmax: Softmax, name: str) -> Softmax:
    """Return what a function makes of a softmax on its way to the values."""
    if name in _HARMLESS_AFTER or softmax.changed is not None:
        return softmax
    return replace(softmax, changed=f"`{name}`")


def changed(
    scores: Scores, name: str, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Scores:
    """Return what a function makes of scores on their way to the softmax."""
    if name in _TIMES or name in _OVER:
        factor = next((a for a in args if isinstance(a, (int, float))), None)
        single = [t for t in inputs if t.numel() == 1]
        if factor is None and len(single) == 1 and len(inputs) == 2:
            factor = float(single[0])
        divided = name in _OVER and not isinstance(args[0], (int, float))
        if factor and (divided or name in _TIMES):
            return replace(scores, scale=scores.scale * (1 / factor if divided else factor))
    elif name in _TURNS:
        placed = _turned(scores.placed, name, args, kwargs)
        return replace(scores, placed=placed) if placed is not None else replace(scores, obstacle=_LOST)
    elif name in _HARMLESS:
        return scores
    return replace(scores, obstacle=f"its scores pass `{name}` before the softmax")


def _turned(
    placed: tuple[int, int], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Return where the axes of the tokens are after the axes of scores have changed places, None if that is lost."""
    tensor: Tensor = args[0] if args else kwargs["input"]
    order = list(range(tensor.ndim))
    rest = [*args[1:], *(kwargs[key] for key in ("dim0", "dim1", "dims") if key in kwargs)]
    if name in ("mT", "T", "t", "adjoint"):
        a, b = (-2, -1)
    elif name == "permute":
        dims = rest[0] if rest and isinstance(rest[0], (list, tuple)) else rest
        order = [d % tensor.ndim for d in dims]
        return (
            order.index(placed[0] % tensor.ndim) - tensor.ndim,
            order.index(placed[1] % tensor.ndim) - tensor.ndim,
        )
    elif len(rest) == 2:
        a, b = rest
    else:
        return None
    swapped = {a % tensor.ndim: b % tensor.ndim, b % tensor.ndim: a % tensor.ndim}
    first, second = (swapped.get(p % tensor.ndim, p % tensor.ndim) - tensor.ndim for p in placed)
    return first, second


def joined(flows: Sequence[Flow], all_known: bool) -> Flow:
    """Return what reaches a tensor that is made of several.

    Args:
        flows: What has reached those that it is made of.
        all_known: Whether these are all: it is a weight if all are.
    """
    return Flow(
        all_known and all(flow.weight for flow in flows),
        tuple(dict.fromkeys(projection for flow in flows for projection in flow.projections)),
        _union(flow.scores for flow in flows),
        _union(flow.softmaxes for flow in flows),
    )


def _union(groups: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what is in any group once; of two that began as one, the one that something has happened to."""
    found: dict[int, Any] = {}
    for item in (item for group in groups for item in group):
        before = found.get(id(item.origin))
        if before is None or (before.changed is None and item.changed is not None):
            found[id(item.origin)] = item
    return tuple(found.values())
