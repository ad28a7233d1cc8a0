"""Listening to a forward pass: which tensors are multiplied as query, key and value.

`scaled_dot_product_attention` says so itself. Otherwise attention is a softmax over a product of two computed tensors
whose result is multiplied with a third one; which factor is the query follows from gradients: one line of the softmax
shares one query and has all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scripts.conformance_oracle.operations import SOFTMAXES, Factors, Side, factors, name_of, softmax_input
from scripts.conformance_oracle.records import AUX, Core, Operand, Product, Tags, Use, flat_tensors, tolerance

__all__ = ["LEFT_IS_QUERY", "RIGHT_IS_QUERY", "Capture"]

LEFT_IS_QUERY, RIGHT_IS_QUERY = "left", "right"
_SHAPE_ONLY = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "shape"})
_LOOK_UPS = frozenset({"embedding", "embedding_bag"})  # of a weight they make tokens
_FIRST_ONLY = frozenset({"type_as", "view_as", "expand_as", "reshape_as", "to"})
_LARGEST_HEAD_MIX = 64


class Capture(TorchFunctionMode):
    """Calls back at every attention core, and at every projection that reads a watched parameter.

    Args:
        weights: Parameters and buffers of the model.
        watched: Ids of the parameters whose projections are reported.
        modules: The modules that are running, outermost first; somebody else keeps it.
        on_core: Gets a core; what it returns, if anything, replaces the core's output.
        on_use: Gets a projection; what it returns, if anything, replaces the projection.
        sides: For each softmax in order of execution what its terms are, as `decided` of an earlier run; None decides
            by gradients, which needs them enabled.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        watched: frozenset[int] = frozenset(),
        *,
        modules: Sequence[nn.Module] = (),
        on_core: Callable[[Core], Tensor | None] = lambda core: None,
        on_use: Callable[[Use], Tensor | None] = lambda use: None,
        sides: Sequence[Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        self.watched = watched
        self.modules = modules
        self.on_core, self.on_use = on_core, on_use
        self.sides = sides
        self.decided: list[list[str]] = []
        self.guessed = 0
        self._tags: dict[int, Tags] = {id(w): Tags(w, weights=frozenset({id(w)})) for w in weights}
        self._products: list[tuple[Product, int]] = []
        self._softmaxes: list[tuple[dict[str, list[Operand]], set[int]]] = []
        self._cores = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function and look at what it did."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # Unfolded, so that the steps inside come by as well; it asks this function whether to hand itself over.
            with mock.patch.object(F, "has_torch_function", return_value=False), self:
                return func(*args, **kwargs)
        name = name_of(func)
        result = func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused_core(args, kwargs, result)
        if name in SOFTMAXES:
            return self._softmax(name, args, kwargs, result)
        both = factors(name, args, kwargs)
        if both is not None:
            return self._product(name, both, result)
        if name not in _SHAPE_ONLY and name not in _LOOK_UPS:
            self._pass_on(name, args, kwargs, result)
        return result

    def _tags_of(self, tensor: Tensor) -> Tags:
        return self._tags.get(id(tensor)) or Tags(tensor)

    def _tag(self, tensor: Tensor, tags: Tags) -> None:
        if tags.weights or tags.products or tags.softmaxes:
            self._tags[id(tensor)] = Tags(tensor, tags.weights, tags.products, tags.softmaxes)
        else:
            self._tags.pop(id(tensor), None)

    def _operand(self, side: Side) -> Operand:
        tensor = side.tensor if self.sides is None else side.tensor.detach().clone()
        return Operand(tensor, side.contracted, side.free, bool(self._tags_of(side.tensor).weights))

    def _pass_on(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Let the results of any other function carry what its inputs carry."""
        inputs = [t for t in flat_tensors((args, kwargs)) if t.is_floating_point()]
        inputs = inputs[:1] if name in _FIRST_ONLY else inputs
        known = [self._tags[id(t)] for t in inputs if id(t) in self._tags]
        if not known:
            return
        pure = all(self._tags_of(t).weights or t.numel() == 1 for t in inputs)
        weights = frozenset[int]().union(*(tags.weights for tags in known)) if pure else frozenset[int]()
        products = frozenset[int]().union(*(tags.products for tags in known))
        softmaxes = frozenset[int]().union(*(tags.softmaxes for tags in known))
        results = [args[0]] if name == "__setitem__" else flat_tensors(result)
        for tensor in results:
            if isinstance(tensor, nn.Parameter):  # as when a module reads its own parameter
                continue
            if tensor.is_floating_point():
                self._tag(tensor, Tags(tensor, weights, products, softmaxes))

    def _product(self, name: str, both: Factors, result: Tensor) -> Tensor:
        left, right = self._tags_of(both.left.tensor), self._tags_of(both.right.tensor)
        learned = isinstance(both.right.tensor, nn.Parameter)  # also where what it multiplies is learned, as tokens
        if both.projection or learned or bool(left.weights) != bool(right.weights):
            weight = both.right if both.projection or right.weights else both.left
            return self._projection(name, both, weight, result)
        if left.softmaxes and right.softmaxes:  # Nystrom's approximation multiplies probabilities
            self._tag(result, Tags(result, softmaxes=left.softmaxes | right.softmaxes))
        elif left.softmaxes or right.softmaxes:
            value = both.right if left.softmaxes else both.left
            return self._core("softmax", left.softmaxes | right.softmaxes, value, result)
        else:
            self._products.append((Product(self._operand(both.left), self._operand(both.right)), _heads(result)))
            self._tag(result, Tags(result, products=frozenset({len(self._products) - 1})))
        return result

    def _projection(self, name: str, both: Factors, weight: Side, result: Tensor) -> Tensor:
        inputs = both.other(weight)
        tags, carried = self._tags_of(weight.tensor), self._tags_of(inputs.tensor)
        if carried.products or carried.softmaxes:
            mixes = self._mixes_heads(weight.tensor, carried)
            self._tag(result, Tags(result, products=carried.products, softmaxes=carried.softmaxes) if mixes else _NONE)
        if not tags.weights & self.watched:
            return result
        matrix = weight.matrix
        pointwise = both.pointwise and weight is both.right and matrix is not None
        use = Use(
            name,
            tags.weights,
            (inputs.tensor.movedim(inputs.contracted or -1, -1) if pointwise else inputs.tensor).detach().clone(),
            weight.tensor.detach().clone(),
            None if matrix is None else matrix.detach().clone(),
            result.detach().clone(),
            weight.channel_axes,
            pointwise,
        )
        replacement = self.on_use(use)
        return result if replacement is None else replacement.clone()

    def _mixes_heads(self, weight: Tensor, carried: Tags) -> bool:
        """Whether a small matrix mixes the heads of logits or probabilities, as talking heads do."""
        if weight.dim() < 2 or max(weight.shape[:2]) > _LARGEST_HEAD_MIX:
            return False
        heads = {self._products[i][1] for i in carried.products}
        heads.update(*(self._softmaxes[i][1] for i in carried.softmaxes))
        return weight.shape[1] in heads

    def _softmax(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
        logits, axis = softmax_input(name, args, kwargs)
        carried = sorted(self._tags_of(logits).products)
        if not carried:
            return result
        products = [self._products[i][0] for i in carried]
        if self.sides is None:
            decisions = self._decide(logits, axis, products)
            self.decided.append(decisions)
        else:
            decisions = list(self.sides[len(self._softmaxes)])
        terms: dict[str, list[Operand]] = {"query": [], "key": [], AUX: []}
        for product, decision in zip(products, decisions, strict=True):
            roles = {LEFT_IS_QUERY: ("query", "key"), RIGHT_IS_QUERY: ("key", "query")}.get(decision, (AUX, AUX))
            terms[roles[0]].append(product.left)
            terms[roles[1]].append(product.right)
        self._softmaxes.append((terms, {self._products[i][1] for i in carried}))
        self._tag(result, Tags(result, softmaxes=frozenset({len(self._softmaxes) - 1})))
        return result

    def _decide(self, logits: Tensor, axis: int, products: Sequence[Product]) -> list[str]:
        """Return for each term of the logits which factor is the query, or that it is none of query and key."""
        counts = [_touched(logits, axis, product) for product in products]
        decisions: list[str] = []
        for count in counts:
            if count is None and any(decision != AUX for decision in decisions):
                # Without gradients (SEW-D has a softmax of its own) the first term is that of content.
                decisions.append(AUX)
            elif count is None or count[0] == count[1] == 1:  # one token, or no gradient: queries stand on the left
                self.guessed += 1
                decisions.append(LEFT_IS_QUERY)
            elif min(count) > 1 and not (min(count) == 2 < max(count)):
                decisions.append(AUX)
            else:
                decisions.append(LEFT_IS_QUERY if count[0] < count[1] else RIGHT_IS_QUERY)
        if all(decision == AUX for decision in decisions):
            decisions[0] = LEFT_IS_QUERY
            self.guessed += 1
        return decisions

    def _fused_core(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> Tensor:
        named = {**dict(zip(("query", "key", "value"), args[:3], strict=False)), **kwargs}
        sides = {
            "query": Side(named["query"], -1, -2),
            "key": Side(named["key"], -1, -2),
            "value": Side(named["value"], -2, -1),
        }
        return self._finish("sdpa", {role: (self._operand(side),) for role, side in sides.items()}, result)

    def _core(self, kernel: str, softmaxes: frozenset[int], value: Side, result: Tensor) -> Tensor:
        joined: dict[str, list[Operand]] = {"query": [], "key": [], AUX: []}
        for index in sorted(softmaxes):
            for role, terms in self._softmaxes[index][0].items():
                joined[role].extend(terms)
        operands = {role: tuple(terms) for role, terms in joined.items()}
        return self._finish(kernel, {**operands, "value": (self._operand(value),)}, result)

    def _finish(self, kernel: str, operands: Mapping[str, tuple[Operand, ...]], result: Tensor) -> Tensor:
        core = Core(self._cores, kernel, tuple(self.modules), operands, result)
        self._cores += 1
        self._tag(result, _NONE)
        replacement = self.on_core(core)
        return result if replacement is None else replacement.clone()


_NONE = Tags(torch.empty(0))


def _heads(logits: Tensor) -> int:
    """Return the size of the axis where heads stand in logits (batch, heads, ...)."""
    return logits.shape[1] if logits.dim() > 3 else logits.shape[0]


def _touched(logits: Tensor, axis: int, product: Product) -> tuple[int, int] | None:
    """Return how many tokens of the left and of the right factor one line of a softmax sees, at most.

    Lines at the start, in the middle and at the end are tried, since masks hide tokens from some.
    """
    pair = (product.left, product.right)
    if not logits.requires_grad or any(operand.free is None for operand in pair):
        return None
    lines = logits.movedim(axis, -1).flatten(0, -2)
    seen = []
    for index in {0, len(lines) // 2, len(lines) - 1}:
        line = lines[index]
        usable = torch.isfinite(line)
        # Weights of mean zero, as softmax does not see what is added to a whole line, such as a largest entry.
        weights = torch.linspace(1.0, 2.0, len(line), dtype=line.dtype) * usable
        weights = (weights - weights.sum() / usable.sum().clamp(min=1)) * usable
        try:
            gradients = torch.autograd.grad(
                (torch.where(usable, line, 0.0) * weights).sum(),
                [operand.tensor for operand in pair],
                retain_graph=True,
                allow_unused=True,
            )
        except RuntimeError:  # a factor without gradient, or changed in place since
            return None
        counts = []
        for operand, gradient in zip(pair, gradients, strict=True):
            if gradient is None:
                return None
            assert operand.free is not None
            sizes = gradient.nan_to_num().movedim(operand.free, 0).flatten(1).abs().amax(1)
            counts.append(int((sizes > 10 * tolerance(sizes.dtype) * sizes.max()).sum()))
        seen.append(counts)
    best = max(seen, key=max)
    return (best[0], best[1]) if min(best) > 0 else None
