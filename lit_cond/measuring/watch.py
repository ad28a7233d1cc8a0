"""Seeing the attention inside one call of a module, whatever function computes it.

A `TorchFunctionMode` is told of each torch function that runs. It only looks: functions run as they would have, on the
same tensors. Each tensor that a projection made is followed through functions until it meets another one in a product
(scores), then through a softmax, until the softmax averages values; `scaled_dot_product_attention` and torch's
multi-head function are all of that at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_cond.measuring.multihead import multi_head_attention
from lit_cond.measuring.records import Attended, Operand, Projection, Step
from lit_cond.surgery.tracing.graph import is_floating, tensors_in
from lit_cond.surgery.tracing.operations import METADATA, Product, product_of

__all__ = ["Watch"]

_SOFTMAXES = frozenset(("softmax", "_softmax", "softmax_"))
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
_TURNS = frozenset(("transpose", "transpose_", "swapaxes", "swapdims", "permute", "mT", "T", "t", "adjoint"))
_OTHER_TERM = "its scores hold a term that is made of tokens and no product of query and key"
_MIXED = "its scores are mixed by a weight"
_LOST = "its scores change the places of their axes"


@dataclass(frozen=True, eq=False)
class _Scores:
    """A product of two activations, and what has become of it on one way since.

    `placed` are the axes of the tokens of each, from the end.
    """

    left: Operand
    right: Operand
    placed: tuple[int, int]
    scale: float = 1.0
    obstacle: str | None = None


@dataclass(frozen=True, eq=False)
class _Softmax:
    scores: tuple[_Scores, ...]
    logits: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class _Flow:
    """What has reached a tensor."""

    weight: bool = False
    projections: tuple[Projection, ...] = ()
    scores: tuple[_Scores, ...] = ()
    softmaxes: tuple[_Softmax, ...] = ()


@dataclass(eq=False)
class _Seen:
    """Flows by tensor. The tensors are kept: their identities stay unique as long as a call is watched."""

    flows: dict[int, tuple[Tensor, _Flow]] = field(default_factory=dict)

    def of(self, tensor: Tensor) -> _Flow | None:
        found = self.flows.get(id(tensor))
        return found[1] if found is not None else None

    def put(self, tensor: Tensor, flow: _Flow) -> None:
        self.flows[id(tensor)] = (tensor, flow)


class Watch(TorchFunctionMode):
    """Looks at one call of an attention module; active as a context.

    Args:
        module: The module.
        observe: Called with each attention as soon as it ran.
        samples: How many entries of the batch are looked at where the watch itself has to compute something.
    """

    def __init__(self, module: nn.Module, observe: Callable[[Attended], None], samples: int) -> None:
        super().__init__()
        self._modules = list(module.modules())
        self._constants = {id(buffer) for buffer in module.buffers()}
        self._observe = observe
        self._samples = samples
        self._seen = _Seen()
        self._steps: list[Step] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function and note what it did."""
        kwargs = kwargs or {}
        name = _name(func)
        logits = _first(args, kwargs).detach() if name == "softmax_" else None
        if logits is not None:
            logits = logits.clone()
        result = func(*args, **kwargs)
        if name in METADATA:
            return result
        if func is F.multi_head_attention_forward:
            self._look(multi_head_attention(args, kwargs, self._samples))
        elif name == "scaled_dot_product_attention":
            self._look(self._fused(args, kwargs))
        else:
            self._follow(func, name, args, kwargs, result, logits)
        return result

    def _look(self, attended: Attended) -> None:
        attended.steps = self._steps
        with torch.no_grad():
            self._observe(attended)

    def _fused(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Attended:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[role] for role in names[:3])
        scale = given.get("scale")
        return Attended(
            Operand(query, -2, -1, self._projections(query)),
            Operand(key, -2, -1, self._projections(key)),
            Operand(value, -2, -1, self._projections(value)),
            scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
            mask=given.get("attn_mask"),
            is_causal=bool(given.get("is_causal", False)),
        )

    def _projections(self, tensor: Tensor) -> tuple[Projection, ...]:
        flow = self._seen.of(tensor)
        return () if flow is None else flow.projections

    def _follow(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        before: Tensor | None,
    ) -> None:
        inputs = [*tensors_in(args), *tensors_in(dict(kwargs))]
        flows = [flow for t in inputs if (flow := self._flow(t)) is not None]
        product = product_of(name, args, kwargs)
        outputs = inputs[:1] if name == "__setitem__" else [t for t in tensors_in(result) if is_floating(t)]
        if not outputs:
            return
        if product is not None and (flow := self._multiplied(name, product, outputs[0])) is not None:
            self._seen.put(outputs[0], flow)
            return
        if not flows:
            return
        flow = _joined(flows, len(flows) == len(inputs))
        if flow.scores and name not in _SOFTMAXES:
            flow = replace(flow, scores=tuple(_changed(s, name, inputs, args, kwargs) for s in flow.scores))
        if name in _SOFTMAXES and flow.scores:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            logits = inputs[0] if before is None else before
            scores = flow.scores
            if flow.projections:
                scores = tuple(replace(s, obstacle=_OTHER_TERM) for s in scores)
            softmax = _Softmax(scores, logits.detach(), axis if isinstance(axis, int) else -1)
            flow = _Flow(softmaxes=(softmax,))
        elif flow.projections and not flow.scores and not flow.softmaxes:
            changed = name == "__setitem__" or any(output is t for output in outputs for t in inputs[:1])
            self._steps.append(Step(func, args, kwargs, tuple(outputs), changed))
        for output in outputs:
            self._seen.put(output, flow)

    def _flow(self, tensor: Tensor) -> _Flow | None:
        """Return what has reached a tensor; a parameter, or a corrected weight in its place, is a weight."""
        found = self._seen.of(tensor)
        if found is None and self._is_weight(tensor):
            found = _Flow(weight=True)
            self._seen.put(tensor, found)
        return found

    def _is_weight(self, tensor: Tensor) -> bool:
        # A buffer is as constant: positions that a layer makes its bias of.
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._constants:
            return True
        return any(tensor is value for module in self._modules for value in module.__dict__.values())

    def _multiplied(self, name: str, product: Product, output: Tensor) -> _Flow | None:
        sides = (product.left, product.right)
        flows = [self._flow(t) or _Flow() for t in sides]
        by_meaning = product.weight_only or name == "linear"
        weight = 1 if by_meaning else next((i for i in (1, 0) if flows[i].weight), None)
        if weight is not None:
            if flows[1 - weight].weight:
                return _Flow(weight=True)
            if flows[1 - weight].scores or flows[1 - weight].softmaxes:  # talking heads
                mixed = tuple(replace(s, obstacle=_MIXED) for s in flows[1 - weight].scores)
                return replace(flows[1 - weight], scores=mixed)
            placed = product.placed[weight][-1] if product.placed[weight] else -1
            return _Flow(
                projections=(Projection(sides[1 - weight], product.contracted[1 - weight][-1], output, placed),),
            )
        if not is_floating(output):
            return None
        for i in (0, 1):
            if flows[i].softmaxes and not flows[1 - i].softmaxes:
                self._average(flows[i].softmaxes, product, 1 - i, flows[1 - i].projections)
                return _Flow()
        if any(flow.softmaxes for flow in flows) or len(product.contracted[0]) != 1 or not all(product.placed):
            return None
        operands = [
            Operand(sides[i], product.free[i][-1], product.contracted[i][0], flows[i].projections) for i in (0, 1)
        ]
        return _Flow(scores=(_Scores(operands[0], operands[1], (product.placed[0][-1], product.placed[1][-1])),))

    def _average(
        self, softmaxes: Sequence[_Softmax], product: Product, side: int, projections: tuple[Projection, ...]
    ) -> None:
        values = (product.left, product.right)[side]
        value = Operand(values, product.contracted[side][-1], product.free[side][-1], projections)
        for softmax in softmaxes:
            self._look(_attended(softmax, value))


def _attended(softmax: _Softmax, value: Operand) -> Attended:
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
    )


def _changed(
    scores: _Scores, name: str, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Scores:
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


def _joined(flows: Sequence[_Flow], all_known: bool) -> _Flow:
    return _Flow(
        all_known and all(flow.weight for flow in flows),
        _union(flow.projections for flow in flows),
        _union(flow.scores for flow in flows),
        _union(flow.softmaxes for flow in flows),
    )


def _union(groups: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(item for group in groups for item in group))


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    tensor: Tensor = args[0] if args else kwargs["input"]
    return tensor


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name
