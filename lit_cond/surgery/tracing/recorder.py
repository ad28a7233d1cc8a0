"""Recording one forward pass: every torch function that runs, and the attention in it.

The graph that autograd keeps is cut at every projection (a product with a weight): what it returns is a fresh leaf. So
a query, key or value leads back to the projections that made it and to nothing else, the output channels with a
gradient are exactly those that reach it, and all that lies before is freed while the pass goes on.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_cond.surgery.tracing.graph import Call, Node, Operand, is_floating, tensors_in
from lit_cond.surgery.tracing.operations import CUTS, JOINS, METADATA, OPAQUE, Product, product_of
from lit_cond.surgery.tracing.projections import is_depthwise, mixes_heads, weight_uses

__all__ = ["Attention", "Recorder"]

# Values of projections, products and softmaxes are kept for the attention that may follow: the newest so many, and
# older ones up to so many bytes in all.
_KEPT = 24
_KEPT_BYTES = 2**28
# Units that happen to be off hide their weights: what is asked is the structure, not the value.
_DROPOUTS = frozenset(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"))
_LEAK = 0.01
_IN_PLACE = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ipow__")
)


class Attention:
    """Operands of one softmax attention, as it ran.

    Args:
        query: The operand of the scores whose tokens (channels) ask.
        key: The one whose tokens are asked.
        value: What the softmax averages.
        node: The operation that returns the average.
        scores: The softmax, where it was an operation of its own.
        arguments: Mask and causality where one function did it all.
    """

    def __init__(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        node: Node,
        scores: Node | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self.node = node
        self.scores = scores
        self.arguments = arguments or {}


class Recorder(TorchFunctionMode):
    """Records operations and module calls while it is active, and hands over each attention as soon as it ran.

    Args:
        model: The model that runs.
        found: Called with each attention while its operands and their graphs are alive.
    """

    def __init__(self, model: nn.Module, found: Callable[[Attention], None]) -> None:
        super().__init__()
        self.model = model
        self.found = found
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.call: Call | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(p): p for p in model.parameters()}
        self._places: dict[int, tuple[weakref.ref[Tensor], Node]] = {}
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: deque[Node] = deque()
        self._kept_bytes = 0
        self.opaque: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what runs inside."""
        handles = []
        for module in self._names:
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks and shows no operations
                continue
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with torch.enable_grad(), self:
                yield self
        finally:
            with torch.no_grad():
                for tensor, value in self._originals.values():
                    tensor.copy_(value)
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        inputs = [(place, self.node_of(t)) for place, value in named for t in tensors_in(value)]
        self.call = Call(self._names[module], module, self.call, inputs, len(self.nodes))
        self.calls.append(self.call)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A call that failed, and was caught, leaves nothing behind.
        while self.call is not None and self.call.module is not module:
            self.call = self.call.parent
        self.call = self.call.parent if self.call is not None else None

    def mark_input(self, value: object) -> None:
        """Take the tensors in a value for inputs of the model."""
        for tensor in tensors_in(value):
            self.node_of(tensor).from_input = True

    def node_of(self, tensor: Tensor) -> Node:
        """Return where a tensor came from."""
        place = self._places.get(id(tensor))
        if place is not None and place[0]() is tensor:
            return place[1]
        parameter = self._parameters.get(id(tensor))
        node = Node(
            len(self.nodes),
            "parameter" if parameter is not None else "source",
            [],
            None,
            tuple(tensor.shape),
            parameters=None if parameter is None else (parameter,),
            differentiable=tensor.requires_grad,
        )
        self._place(tensor, node)
        return node

    def _place(self, tensor: Tensor, node: Node) -> None:
        self._places[id(tensor)] = (weakref.ref(tensor), node)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function and record it."""
        kwargs = kwargs or {}
        name = _name(func)
        if name in METADATA:
            return func(*args, **kwargs)
        if name == "numpy":  # what leaves torch needs no gradient
            return func(args[0].detach(), *args[1:], **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        if name.startswith("flex_attention") or _is_foreign(func):
            self.opaque.update(call.name for call in (self.call.around() if self.call is not None else ()))
        product = product_of(name, args, kwargs)
        inputs = list(tensors_in(args)) + list(tensors_in(kwargs))
        node = Node(len(self.nodes), name, [self.node_of(t) for t in inputs], self.call)
        node.carriers = [self.node_of(t) for t in inputs if t.requires_grad]
        if product is not None:
            self._classify(node, product)
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if node.weights:
            with torch.no_grad():
                leaf = func(*args, **kwargs).detach().requires_grad_()
            self._keep(node, leaf)
            with torch.enable_grad():
                result = leaf.clone()  # a leaf itself could not be changed in place
        elif in_place and inputs and self._was_there(inputs[0]):
            with torch.no_grad():
                result = func(*args, **kwargs)
        elif name in _DROPOUTS:
            result = args[0].clone() if args else kwargs["input"].clone()
        elif name == "relu":
            with torch.enable_grad():
                result = func(*args, **kwargs) + _LEAK * inputs[0]
        else:
            # Parts of a model may run without gradients, frozen towers for instance.
            with torch.enable_grad():
                result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        if name == "__setitem__":
            outputs = inputs[:1]
        if not outputs:
            return result
        self._finish(node, outputs, args, kwargs)
        if in_place:
            # No public way leads from a view to what it is a view of (torch 2.14).
            base = outputs[0]._base
            if base is not None:
                before = self.node_of(base)
                self._place(base, node)
                if before is not node:
                    node.parents.append(before)
                    node.carriers.append(before)
        if product is not None and node.is_product:
            with torch.enable_grad():
                self._multiply(node, product, outputs[0])
        if name in JOINS:
            axis = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            node.axis = axis % len(node.shape) if isinstance(axis, int) else 0
        if name == "scaled_dot_product_attention":
            with torch.enable_grad():
                self._attend(node, args, kwargs)
        return result

    def _was_there(self, changed: Tensor) -> bool:
        """Keep what was there before the pass and is about to change: weights (RWKV), buffers, caches."""
        # No public way leads from a view to what it is a view of (torch 2.14).
        whole = changed if changed._base is None else changed._base
        if id(whole) not in self._originals:
            if self.node_of(whole).name not in ("source", "parameter"):
                return False
            self._originals[id(whole)] = (whole, whole.detach().clone())
        return True

    def _finish(self, node: Node, outputs: list[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        node.shape = tuple(outputs[0].shape)
        node.from_input = any(p.from_input for p in node.parents)
        node.differentiable = any(t.requires_grad for t in outputs)
        if node.name in CUTS or node.name in JOINS:
            parts = [p.parameters for p in node.parents if p.differentiable or p.parameters]
            if parts and all(part is not None for part in parts):
                node.parameters = tuple(dict.fromkeys(q for part in parts for q in part or ()))
        if is_floating(outputs[0]) and not node.weights and node.name not in OPAQUE:
            node.products = _union(p.products for p in node.carriers)
            node.softmaxes = _union(p.softmaxes for p in node.carriers)
            if node.name in ("softmax", "_softmax", "softmax_") and node.products:
                axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
                node.axis = axis if isinstance(axis, int) else -1
                node.softmaxes = (node,)
                self._keep(node, outputs[0])
        self.nodes.append(node)
        for parent in node.parents:
            parent.children.append(node)
        for tensor in outputs:
            self._place(tensor, node)

    def _keep(self, node: Node, tensor: Tensor) -> None:
        node.tensor = tensor
        self._kept.append(node)
        self._kept_bytes += tensor.nbytes
        while len(self._kept) > _KEPT and self._kept_bytes > _KEPT_BYTES:
            old = self._kept.popleft()
            self._kept_bytes -= old.tensor.nbytes if old.tensor is not None else 0
            old.tensor, old.product = None, None

    def _classify(self, node: Node, product: Product) -> None:
        """Tell a projection, with its weights, from a product of two activations."""
        sides = (product.left, product.right)
        nodes = [self.node_of(t) for t in sides]
        weight = next((i for i in (1, 0) if nodes[i].parameters and sides[i].ndim >= 2), None)
        if weight is None and (product.weight_only or (node.name == "linear" and not nodes[1].from_input)):
            weight = 1
        if weight is None:
            node.is_product = all(product.placed)
        elif not is_depthwise(product) and not mixes_heads(product, weight, nodes):
            node.source = nodes[1 - weight]
            node.weights = weight_uses(sides[weight], nodes[weight], product, weight)
            node.channels = product.placed[weight]

    def _multiply(self, node: Node, product: Product, output: Tensor) -> None:
        """Take up a product of two activations: scores, or the average of values by a softmax of scores."""
        sides = (product.left, product.right)
        if not is_floating(output) or not output.requires_grad:  # a product of masks, of positions
            node.is_product = False
            return
        nodes = [self.node_of(t) for t in sides]
        operands = [
            Operand(sides[i], nodes[i], product.contracted[i][0], product.placed[i][-1], product.free[i][-1])
            for i in (0, 1)
        ]
        softmaxes = [side.softmaxes for side in nodes]
        node.product = (operands[0], operands[1])
        for i in (0, 1):
            if softmaxes[i] and not softmaxes[1 - i]:
                for softmax in softmaxes[i]:
                    self._average(node, softmax, operands[1 - i])
        node.products, node.softmaxes = (node,), ()
        self._keep(node, output)

    def _average(self, node: Node, softmax: Node, value: Operand) -> None:
        alive = [p for p in softmax.products if p.product is not None]
        # Scores of content and of relative position are added; content depends on the input on both sides.
        content = [p for p in alive if p.product and all(side.node.from_input for side in p.product)] or alive[:1]
        for scores in content:
            if scores.product is None:
                continue
            query, key = scores.product
            if _asks(softmax, scores) == 1:
                query, key = key, query
            self.found(Attention(query, key, value, node, softmax))

    def _attend(self, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[role] for role in names[:3])
        arguments = {name: given.get(name) for name in ("attn_mask", "is_causal")}
        self.found(
            Attention(
                Operand(query, self.node_of(query), -1, -2, -2),
                Operand(key, self.node_of(key), -1, -2, -2),
                Operand(value, self.node_of(value), -2, -1, -1),
                node,
                arguments=arguments,
            )
        )

    def _multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's multi-head attention, whose projections are inside the function and known."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        inputs = [given[role] for role in ("query", "key", "value")]
        if given.get("use_separate_proj_weight"):
            weights = [given[f"{role}_proj_weight"] for role in "qkv"]
        else:
            width = given["embed_dim_to_check"]
            with self:
                weights = [given["in_proj_weight"][i * width : (i + 1) * width] for i in range(3)]
        heads = given["num_heads"]
        with self, torch.enable_grad():
            projected = [F.linear(x, w) for x, w in zip(inputs, weights, strict=True)]
            q, k, v = (p.reshape(*p.shape[:-1], heads, -1).movedim(-2, 0) for p in projected)
        node = Node(len(self.nodes), "multi_head_attention_forward", [self.node_of(t) for t in (q, k, v)], self.call)
        node.carriers = list(node.parents)
        with torch.no_grad():
            result = func(*args, **kwargs)
        self._finish(node, list(tensors_in(result)), args, kwargs)
        node.products = node.softmaxes = ()
        arguments = {"true_is_hidden": True, **{name: given.get(name) for name in ("attn_mask", "is_causal")}}
        operands = (Operand(q, self.node_of(q), -1, -2, -2), Operand(k, self.node_of(k), -1, -2, -2))
        with torch.enable_grad():
            self.found(Attention(*operands, Operand(v, self.node_of(v), -2, -1, -1), node, arguments=arguments))
        return result


def _is_foreign(func: Any) -> bool:
    """Whether a function is an operation that torch itself has not, a fused kernel for instance."""
    namespace = getattr(func, "namespace", None)
    return isinstance(namespace, str) and namespace not in ("aten", "prims", "torchvision")


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def _union(groups: Iterator[tuple[Node, ...]] | Any) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(node for group in groups for node in group))


def _asks(softmax: Node, scores: Node) -> int:
    """Return which operand of the scores holds the queries: the one whose index one row of the softmax keeps."""
    if softmax.tensor is None or scores.tensor is None or scores.product is None:
        return 0
    rows = softmax.tensor.movedim(softmax.axis, -1)
    # The last row: behind a causal mask the first one sees a single score and has no gradient.
    row = rows.reshape(-1, rows.shape[-1])[-1]
    weights = torch.linspace(1.0, 2.0, row.numel(), device=row.device, dtype=row.dtype)
    (gradient,) = torch.autograd.grad(row, scores.tensor, weights, retain_graph=True, allow_unused=True)
    if gradient is None:
        return 0
    touched = (gradient != 0).nonzero()
    spread = [len(set(touched[:, side.free].tolist())) for side in scores.product]
    return 0 if spread[0] <= spread[1] else 1
