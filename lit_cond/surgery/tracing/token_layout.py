"""Which axis of recorded tokens is which, and how many of them are learned."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

from torch import nn

from lit_cond.surgery.tracing.graph import Call, Node
from lit_cond.surgery.tracing.operations import CUTS, JOINS

__all__ = ["ENDS", "channel_axis", "prefix_length", "stream", "tokens_first"]

# Behind these, what a tensor is made of is another tensor's tokens.
ENDS = frozenset(("softmax", "embedding", "scaled_dot_product_attention", "multi_head_attention_forward"))
_LAST = frozenset(("linear", "matmul", "__matmul__", "addmm", "layer_norm", "rms_norm", "native_layer_norm"))
_SECOND = frozenset(
    ("conv1d", "conv2d", "conv3d", "batch_norm", "group_norm", "instance_norm", "avg_pool2d", "max_pool2d")
)
_TURNS = frozenset(("permute", "transpose", "movedim", "swapaxes", "swapdims", "moveaxis", "T", "mT", "rearrange"))
# How many operations after the tokens their first norm or projection is looked for.
_REACH = 200


def stream(node: Node, until: Collection[Node] = ()) -> Iterator[Node]:
    """Yield what a tensor is made of by operations that project nothing, back to some of them if they are met."""
    seen = {node}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        if current.weights or current.is_product or current.name in ENDS or current in until:
            continue
        for parent in current.parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)


def tokens_first(core: Node, tokens: Node, batch: int | None) -> bool:
    """Say whether another axis, that of the tokens as a rule, stands before that of the batch.

    Args:
        core: The attention operation that they reach.
        tokens: The tokens.
        batch: Size of the batch.
    """
    if len(tokens.shape) < 3:
        return False
    first, second = tokens.shape[:2]
    call = core.call
    if len(tokens.shape) == 3 and call is not None and isinstance(call.module, nn.MultiheadAttention) and call.inputs:
        # It says itself what its own input is; the block may turn that round.
        shape = call.inputs[0][1].shape
        if len(shape) == 3 and shape[:2] in ((first, second), (second, first)):
            swapped = first != second and shape[:2] == (second, first)
            return bool(call.module.batch_first) == swapped
    return first not in (1, batch) and second == batch


def prefix_length(
    tokens: Node,
    *,
    turned: bool = False,
    known: dict[tuple[Node, int], int | None] | None = None,
    until: Collection[Node] = (),
) -> int | None:
    """Return how many learned tokens stand before all that depend on the input, None if that can not be followed.

    Args:
        tokens: The tokens.
        turned: Whether they stand before the batch.
        known: What was found of other nodes, by axis; it is added to.
        until: Nodes among them, behind which all is known.
    """
    known = {} if known is None else known
    # Oldest first, so that nothing recurses through a whole model.
    for node in sorted(stream(tokens, until), key=lambda n: n.index):
        for axis in (0, 1):
            _leading(node, axis, known)
    return known[tokens, 0 if turned else 1] if tokens.from_input else 0


def _leading(node: Node, axis: int, known: dict[tuple[Node, int], int | None]) -> int | None:
    """Return how many leading entries of an axis do not depend on the input, None if that can not be followed."""
    if (node, axis) in known:
        return known[node, axis]
    known[node, axis] = 0
    if len(node.shape) <= axis:
        return 0
    length = node.shape[axis]
    if not node.from_input:
        known[node, axis] = length if node.differentiable else 0
    elif not (node.weights or node.is_product or node.name in ENDS):
        known[node, axis] = _leading_in(node, axis, length, known)
    return known[node, axis]


def _leading_in(node: Node, axis: int, length: int, known: dict[tuple[Node, int], int | None]) -> int | None:
    parents = [parent for parent in node.parents if len(parent.shape) == len(node.shape)]
    if node.name in JOINS and node.axis == axis and len(parents) == len(node.parents):
        count = 0
        for part in parents:
            leading = _leading(part, axis, known)
            if leading is None:
                return None
            count += leading
            if leading < part.shape[axis]:
                break
        return count
    counts: list[int | None] = []
    for parent in (p for p in node.parents if p.from_input):
        if len(parent.shape) != len(node.shape):
            counts.append(None if _holds_learned(parent) else 0)
        elif parent.shape[axis] == length:
            counts.append(_leading(parent, axis, known))
        elif math.prod(parent.shape) == math.prod(node.shape) and axis < 2 and parent.shape[1 - axis] == length:
            counts.append(_leading(parent, 1 - axis, known))  # turned round
        elif node.name in CUTS and parent.shape[axis] > length:
            leading = _leading(parent, axis, known)
            if leading is not None:
                # The learned tokens are cut off, or what is behind them.
                leading = 0 if length == parent.shape[axis] - leading > leading else min(leading, length)
            counts.append(leading)
        else:
            counts.append(None if _holds_learned(parent) else 0)
    found = [count for count in counts if count is not None]
    return min(found, default=0) if len(found) == len(counts) else None


def _holds_learned(node: Node) -> bool:
    """Whether something learned was joined to what a tensor is made of."""
    return any(
        each.name in JOINS and any(not part.from_input and part.differentiable for part in each.parents)
        for each in stream(node)
    )


def channel_axis(tokens: Node, block: Call) -> int | None:
    """Return the axis of the channels: the one that the first norm or projection in the block works on.

    Args:
        tokens: The input of the block.
        block: The call of the block.

    Returns:
        -1 for the last axis, a positive number for another one, None where nothing shows it.
    """
    count = math.prod(tokens.shape)
    waiting = [
        (child.index, id(child), id(tokens), child, tokens, False)
        for child in tokens.children
        if child.index >= block.first
    ]
    heapq.heapify(waiting)
    seen: set[Node] = set()
    while waiting:
        *_, node, parent, turned = heapq.heappop(waiting)
        if node in seen or node.index - block.first > _REACH:
            continue
        seen.add(node)
        axis = _worked_axis(node, parent)
        if axis is not None and len(parent.shape) > axis:
            return _same_axis(tokens, parent, axis, turned)
        if math.prod(node.shape) == count and not node.weights:
            around = turned or node.name in _TURNS or node.shape != parent.shape
            for child in node.children:
                heapq.heappush(waiting, (child.index, id(child), id(node), child, node, around))
    return None


def _worked_axis(node: Node, parent: Node) -> int | None:
    """Return the axis of an operand, -1 or 1, over which an operation projects, normalises or scales it."""
    if node.weights and node.source is not parent:
        return None
    if node.name in _SECOND:
        return 1
    if node.weights or node.name in _LAST:
        return -1 if (node.weights and node.name in _LAST) or "norm" in node.name else None
    vectors = [p for p in node.parents if p is not parent and p.parameters and len(p.shape) == 1 and p.shape[0] > 1]
    return -1 if vectors and parent.shape[-1:] == vectors[0].shape else None


def _same_axis(tokens: Node, operand: Node, axis: int, turned: bool) -> int | None:
    """Return the axis of the tokens that an operand, made by shape operations from them, has at `axis`."""
    if turned or len(operand.shape) != len(tokens.shape):
        axes = [i for i, size in enumerate(tokens.shape) if size == operand.shape[axis]]
        if len(axes) != 1:
            return None
        axis = axes[0]
    last = len(tokens.shape) - 1
    return -1 if axis in (-1, last) else axis
