"""Which axis of recorded tokens is which, and how many of them are learned."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

from torch import nn

from lit_cond.surgery.tracing.graph import Call, Node
from lit_cond.surgery.tracing.operations import JOINS

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
    return first != batch and second == batch


def prefix_length(tokens: Node, *, turned: bool = False) -> int:
    """Return how many learned tokens were put before the others.

    What stands before the longest part that depends on the input counts: registers are put between the class token and
    the patches by cutting them apart and joining three parts.

    Args:
        tokens: The tokens.
        turned: Whether they stand before the batch; they may have been joined behind it all the same.
    """
    count = 0
    axes = (0, 1) if turned else (1,)
    for node in stream(tokens):
        axis = node.axis
        if node.name not in JOINS or len(node.shape) != len(tokens.shape) or axis not in axes:
            continue
        parts = [parent for parent in node.parents if len(parent.shape) == len(node.shape)]
        if not node.from_input or not parts:  # encodings of positions may be joined too
            continue
        longest = max((p for p in parts if p.from_input), key=lambda p: p.shape[axis])
        before = parts[: parts.index(longest)]
        count += sum(p.shape[axis] for p in before if not p.from_input and p.differentiable)
    return count


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
