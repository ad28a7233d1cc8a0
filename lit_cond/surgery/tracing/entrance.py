"""Where embedded tokens enter the first block: the residual stream that the first attention adds to."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lit_cond.surgery.tracing.graph import Call, Node
from lit_cond.surgery.tracing.recorder import Recorder

__all__ = ["Entrance", "find_entrances"]

_ADDITIONS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_"))
# How many operations after an attention its sum with the residual stream is looked for.
_REACH = 400


@dataclass(frozen=True)
class Entrance:
    """A module whose tensor argument is the residual stream.

    Args:
        module: Dotted name of the module.
        argument: Position or name of the argument; a tensor inside of a nested argument counts on.
        shape: Shape of the tokens in the traced pass.
        attention: Dotted name of the module in which the attention ran.
        order: When the attention ran.
    """

    module: str
    argument: int | str
    shape: tuple[int, ...]
    attention: str
    order: int


def find_entrances(recorder: Recorder, cores: Sequence[Node]) -> list[Entrance]:
    """Return the entrance that belongs to each attention that ran.

    From the attention go forward to the first sum whose other operand is, through operations that project nothing, an
    input of a module around the attention that also feeds it; the innermost such module is the entrance.

    Args:
        recorder: What was recorded.
        cores: The attention operations.
    """
    found = []
    for core in cores:
        entrance = _entrance(core)
        if entrance is not None:
            found.append(entrance)
    return found


def _entrance(core: Node) -> Entrance | None:
    waiting = [(child.index, id(child), child) for child in core.children]
    heapq.heapify(waiting)
    below = {core}
    while waiting:
        _, _, node = heapq.heappop(waiting)
        if node in below or node.index - core.index > _REACH:
            continue
        below.add(node)
        if node.name in _ADDITIONS and len(node.parents) == 2:
            fresh = [parent for parent in node.parents if parent not in below]
            if len(fresh) == 1 and len(node.shape) >= 2:
                entrance = _match(core, node, fresh[0])
                if entrance is not None:
                    return entrance
        for child in node.children:
            heapq.heappush(waiting, (child.index, id(child), child))
    return None


def _match(core: Node, addition: Node, residual: Node) -> Entrance | None:
    stream = set(_stream(residual))
    open_calls = set(_around(addition.call))
    for call in _around(core.call):
        if call not in open_calls:
            continue
        for place, node in call.inputs:
            inside = node is residual or (node in stream and node.index < call.first)
            if inside and node.parameters is None and _feeds(core, node, call):
                return Entrance(call.name, place, node.shape, core.call.name if core.call else "", core.index)
    return None


def _around(call: Call | None) -> Iterator[Call]:
    return call.around() if call is not None else iter(())


def _stream(node: Node) -> Iterator[Node]:
    """Yield what a tensor is made of by operations that project nothing."""
    seen = {node}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        blocked = current.weights or current.is_product or current.name in ("softmax", "embedding") or (
            current.name == "scaled_dot_product_attention"
        )
        if blocked:
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


