"""Where embedded tokens enter the first block: the residual stream that the first attention adds to."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lit_cond.surgery.tracing.graph import Call, Node
from lit_cond.surgery.tracing.operations import JOINS
from lit_cond.surgery.tracing.recorder import Recorder

__all__ = ["Entrance", "find_entrances"]

_ADDITIONS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_"))
_BLOCKING = frozenset(("softmax", "embedding", "scaled_dot_product_attention", "multi_head_attention_forward"))
# How many operations after an attention its sum with the residual stream is looked for.
_REACH = 400
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Entrance:
    """A block whose tensor argument is the residual stream.

    Args:
        module: Dotted name of the block.
        argument: Position or name of the argument.
        shape: Shape of the tokens in the traced pass.
        attention: Dotted name of the module in which the attention ran.
        continues: Whether these tokens are those of an earlier entrance, added to.
        learned: Whether they are parameters, whatever the input is (class tokens, queries).
        tokens_first: Whether they come as (tokens, batch, channels).
        prefix: Learned tokens (class, registers) that stand before those of the input.
    """

    module: str
    argument: int | str
    shape: tuple[int, ...]
    attention: str
    continues: bool
    learned: bool
    tokens_first: bool = False
    prefix: int = 0


def find_entrances(recorder: Recorder, cores: Sequence[Node], batch: int | None = None) -> list[Entrance]:
    """Return the entrance that belongs to each attention that ran, in their order.

    From the attention go forward to the first sum whose other operand is, through operations that project nothing, an
    input of a module around the attention that also feeds it. Of the modules that get this very tensor the innermost
    element of a list of modules is the block, else the innermost module.

    Args:
        recorder: What was recorded.
        cores: The attention operations.
        batch: Size of the batch, to tell its axis from that of the tokens.
    """
    found: list[Entrance] = []
    earlier: set[Node] = set()
    for core in cores:
        place = _entrance(core)
        if place is None:
            continue
        call, node = place
        call, argument = _block(recorder.model, call, node)
        attention = core.call.name if core.call is not None else ""
        continues = any(n in earlier for n in _stream(node))
        earlier.add(node)
        turned = len(node.shape) == 3 and node.shape[0] != batch and node.shape[1] == batch
        learned = bool(node.parameters)
        prefix = _prefix(node, 0 if turned else 1)
        found.append(Entrance(call.name, argument, node.shape, attention, continues, learned, turned, prefix))
    return found


def _prefix(tokens: Node, axis: int) -> int:
    """Return how many learned tokens were put before the others."""
    count = 0
    for node in _stream(tokens):
        if node.name in JOINS and len(node.shape) == len(tokens.shape) and node.axis == axis:
            for parent in node.parents:
                if not parent.parameters:
                    break
                count += parent.shape[axis]
    return count


def _entrance(core: Node) -> tuple[Call, Node] | None:
    waiting = [(child.index, id(child), child) for child in core.children]
    heapq.heapify(waiting)
    below = {core}
    while waiting:
        _, _, node = heapq.heappop(waiting)
        if node in below or node.index - core.index > _REACH:
            continue
        below.add(node)
        if node.name in _ADDITIONS and len(node.parents) == 2 and len(node.shape) >= 2:
            other = [parent for parent in node.parents if parent not in below]
            place = _input_of_module(core, node, other[0]) if len(other) == 1 else None
            if place is not None:
                return place
        for child in node.children:
            heapq.heappush(waiting, (child.index, id(child), child))
    return None


def _input_of_module(core: Node, addition: Node, residual: Node) -> tuple[Call, Node] | None:
    stream = set(_stream(residual))
    open_calls = set(_around(addition.call))
    for call in _around(core.call):
        if call not in open_calls:
            continue
        for _, node in call.inputs:
            inside = node is residual or (node in stream and node.index < call.first)
            if inside and _feeds(core, node, call):
                return call, node
    return None


def _block(model: nn.Module, innermost: Call, node: Node) -> tuple[Call, int | str]:
    """Return the call to hook, and the argument that holds the tokens there."""
    for call in innermost.around():
        place = next((place for place, source in call.inputs if source is node), None)
        if place is None:
            break
        parent = call.name.rpartition(".")[0]
        if call.name and isinstance(model.get_submodule(parent), _LISTS):
            return call, place
    return innermost, next(place for place, source in innermost.inputs if source is node)


def _around(call: Call | None) -> Iterator[Call]:
    return call.around() if call is not None else iter(())


def _stream(node: Node) -> Iterator[Node]:
    """Yield what a tensor is made of by operations that project nothing."""
    seen = {node}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        if current.weights or current.is_product or current.name in _BLOCKING:
            continue
        for parent in current.parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)


def _feeds(core: Node, source: Node, call: Call) -> bool:
    """Whether an input of a call reaches the attention inside it."""
    seen = {core}
    waiting = [core]
    while waiting:
        current = waiting.pop()
        if current is source:
            return True
        if current.index < call.first:
            continue
        for parent in current.parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return False
