"""Seeing the attention inside one call of a module, whatever function computes it.

A `TorchFunctionMode` is told of each torch function that runs. It only looks: functions run as they would have, on the
same tensors. Each tensor that a projection made is followed through functions until it meets another one in a product
(scores), then through a softmax, until the softmax averages values; `scaled_dot_product_attention` and torch's
multi-head function are all of that at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_cond.measuring.flows import (
    MIXED,
    OTHER_TERM,
    SOFTMAXES,
    Flow,
    Flows,
    Scores,
    Softmax,
    attend,
    changed,
    joined,
    passed,
)
from lit_cond.measuring.multihead import multi_head_attention
from lit_cond.measuring.records import Attended, Operand, Projection, Step
from lit_cond.surgery.tracing.graph import is_floating, tensors_in
from lit_cond.surgery.tracing.operations import METADATA, Product, product_of

__all__ = ["Watch"]


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
        self._seen = Flows()
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
        flow = joined(flows, len(flows) == len(inputs))
        flow = replace(flow, softmaxes=tuple(passed(s, name) for s in flow.softmaxes))
        if flow.scores and name not in SOFTMAXES:
            flow = replace(flow, scores=tuple(changed(s, name, inputs, args, kwargs) for s in flow.scores))
        if name in SOFTMAXES and flow.scores:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            logits = inputs[0] if before is None else before
            scores = flow.scores
            if flow.projections:
                scores = tuple(replace(s, obstacle=OTHER_TERM) for s in scores)
            softmax = Softmax(scores, logits.detach(), axis if isinstance(axis, int) else -1)
            flow = Flow(softmaxes=(softmax,))
        elif flow.projections and not flow.scores and not flow.softmaxes:
            in_place = name == "__setitem__" or any(output is t for output in outputs for t in inputs[:1])
            self._steps.append(Step(func, args, kwargs, tuple(outputs), in_place))
        for output in outputs:
            self._seen.put(output, flow)

    def _flow(self, tensor: Tensor) -> Flow | None:
        """Return what has reached a tensor; a parameter, or a corrected weight in its place, is a weight."""
        found = self._seen.of(tensor)
        if found is None and self._is_weight(tensor):
            found = Flow(weight=True)
            self._seen.put(tensor, found)
        return found

    def _is_weight(self, tensor: Tensor) -> bool:
        # A buffer is as constant: positions that a layer makes its bias of.
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._constants:
            return True
        return any(tensor is value for module in self._modules for value in module.__dict__.values())

    def _multiplied(self, name: str, product: Product, output: Tensor) -> Flow | None:
        sides = (product.left, product.right)
        flows = [self._flow(t) or Flow() for t in sides]
        by_meaning = product.weight_only or name == "linear"
        weight = 1 if by_meaning else next((i for i in (1, 0) if flows[i].weight), None)
        if weight is not None:
            if flows[1 - weight].weight:
                return Flow(weight=True)
            if flows[1 - weight].scores or flows[1 - weight].softmaxes:  # talking heads
                mixed = tuple(replace(s, obstacle=MIXED) for s in flows[1 - weight].scores)
                turned = tuple(replace(s, changed="a weight") for s in flows[1 - weight].softmaxes)
                return replace(flows[1 - weight], scores=mixed, softmaxes=turned)
            placed = product.placed[weight][-1] if product.placed[weight] else -1
            return Flow(
                projections=(Projection(sides[1 - weight], product.contracted[1 - weight][-1], output, placed),),
            )
        if not is_floating(output):
            return None
        for i in (0, 1):
            if flows[i].softmaxes and not flows[1 - i].softmaxes:
                self._average(flows[i].softmaxes, product, 1 - i, flows[1 - i].projections)
                return Flow()
        if any(flow.softmaxes for flow in flows) or len(product.contracted[0]) != 1 or not all(product.placed):
            return None
        operands = [
            Operand(sides[i], product.free[i][-1], product.contracted[i][0], flows[i].projections) for i in (0, 1)
        ]
        return Flow(scores=(Scores(operands[0], operands[1], (product.placed[0][-1], product.placed[1][-1])),))

    def _average(
        self, softmaxes: Sequence[Softmax], product: Product, side: int, projections: tuple[Projection, ...]
    ) -> None:
        values = (product.left, product.right)[side]
        value = Operand(values, product.contracted[side][-1], product.free[side][-1], projections)
        for softmax in softmaxes:
            self._look(attend(softmax, value))


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    tensor: Tensor = args[0] if args else kwargs["input"]
    return tensor


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name
