"""Where embedded tokens enter the first block of each tower of a model, as a recorded forward pass shows it.

Rule E1: the residual stream to which the first attention is added. Rule E2, where no plain sum with a stream is found
(shortcuts that project, hyper-connections): the innermost element of a list of modules around the first attention.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lit_cond.surgery.sites import clean_name
from lit_cond.surgery.tracing.graph import Call, Node
from lit_cond.surgery.tracing.recorder import Recorder
from lit_cond.surgery.tracing.token_layout import ENDS, channel_axis, prefix_length, stream, tokens_first

__all__ = ["Entrance", "choose_towers", "find_entrances"]

_ADDITIONS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_"))
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
        continues: Whether these tokens are made of those of an earlier entrance and of nothing else of the input.
        learned: Whether they are the same whatever the input is (class tokens, queries).
        tokens_first: Whether they come as (tokens, batch, channels).
        prefix: Learned tokens (class, registers) that stand before those of the input; None if that is not clear.
        derived: Whether they are made of the tokens of an earlier entrance, in any way.
        rule: Which rule found it.
        joined: Whether all samples of the batch stand one behind the other, in one sequence.
        channel_axis: The axis of the channels, -1 for the last; None where the pass does not show it.
        repeats_in: The block is called again on its own output; this many last parts of its name lead from the module
            in which that happens. None where it is not called again.
    """

    module: str
    argument: int | str
    shape: tuple[int, ...]
    attention: str
    continues: bool
    learned: bool
    tokens_first: bool = False
    prefix: int | None = 0
    derived: bool = False
    rule: Literal["E1", "E2"] = "E1"
    joined: bool = False
    channel_axis: int | None = None
    repeats_in: int | None = None


def find_entrances(
    recorder: Recorder, cores: Sequence[Node], batch: int | None = None, anchors: Mapping[Node, Call] | None = None
) -> list[Entrance]:
    """Return the entrance that belongs to each attention that ran, in their order.

    From the attention go forward to the first sum whose other operand is, through operations that project nothing, an
    input of a module around the attention that also feeds it. Of the modules that get this very tensor the innermost
    element of a list of modules is the block, else the innermost module.

    Args:
        recorder: What was recorded.
        cores: The attention operations.
        batch: Size of the batch, to tell its axis from that of the tokens.
        anchors: The call that projects the operands of an attention; rule E2 serves those attentions only.
    """
    anchors = anchors or {}
    places: list[tuple[Node, Call, Node, Literal["E1", "E2"]]] = []
    for core in cores:
        place = _entrance(core)
        if place is not None:
            places.append((core, *place, "E1"))
        elif core in anchors:
            fallback = _element(recorder.model, anchors[core])
            if fallback is not None:
                places.append((core, *fallback, "E2"))
    # An element that holds a stream which another of its attentions adds to is not where that begins.
    holding = {id(outer) for _, call, _, rule in places if rule == "E1" for outer in call.around()}
    places = [place for place in places if place[3] == "E1" or id(place[1]) not in holding]
    # A map with one channel weighs tokens and is none.
    places = [place for place in places if not _has_one_channel(place[1], place[2])]
    # What a block adds to itself inside comes after what entered it, whichever attention ran first.
    places.sort(key=lambda place: place[2].index if place[3] == "E1" else place[0].index)
    below = _below(recorder, {node for _, _, node, _ in places})
    found: list[Entrance] = []
    earlier: set[Node] = set()
    entered: set[Node] = set()
    known: dict[tuple[Node, int], int | None] = {}
    for core, innermost, node, rule in places:
        call, argument = _block(recorder.model, innermost, node)
        axis = channel_axis(node, call)
        made_of = set(stream(node, earlier))
        news = any(_brings_input(n, below) for n in made_of - earlier - entered)
        turned = tokens_first(core, node, batch)
        found.append(
            Entrance(
                call.name,
                argument,
                node.shape,
                core.call.name if core.call is not None else "",
                continues=node in below and not news,
                learned=not node.from_input,
                tokens_first=turned,
                prefix=prefix_length(node, turned=turned, known=known, until=earlier),
                derived=node in below,
                rule=rule,
                joined=len(node.shape) == 2 or (len(node.shape) == 3 and node.shape[0] == 1 and batch not in (1, None)),
                channel_axis=axis,
                repeats_in=_repeats(recorder, call, argument),
            )
        )
        earlier.add(node)
        entered |= made_of
    return found


def choose_towers(entrances: Sequence[Entrance]) -> tuple[Entrance, ...]:
    """Keep the first entrance of each tower.

    Tokens that are made of nothing that has entered before open a tower, unless their block stands in a list whose
    blocks were seen. So do those that are made of earlier ones and of more of the input (a language model that reads
    images) in another branch of the model, by name. A tower whose tokens do not depend on the input, or are made by
    other towers alone (a decoder on top of an encoder), has no entrance.

    Args:
        entrances: Of all attention, in order, from one or several passes.
    """
    paths = [clean_name(entrance.module).split(".") for entrance in entrances]
    shared = 0
    while paths and all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    branches: set[str] = set()
    lists: set[str] = set()
    towers: dict[str, Entrance] = {}
    for path, entrance in zip(paths, entrances, strict=True):
        # Blocks in one list, or numbered stages, are one tower.
        branch = path[shared].rstrip("0123456789").rstrip("_")
        parent = ".".join(path[:-1])
        opens = not entrance.derived or (branch not in branches and not entrance.continues)
        if opens and parent not in lists and not entrance.learned:
            towers.setdefault(entrance.module, entrance)
        branches.add(branch)
        lists.add(parent)
    return tuple(towers.values())


def _has_one_channel(call: Call, tokens: Node) -> bool:
    axis = channel_axis(tokens, call)
    return axis is not None and tokens.shape[axis] == 1


def _below(recorder: Recorder, seeds: set[Node]) -> set[Node]:
    """Return the operations that use, directly or not, what some seed has made."""
    below: set[Node] = set()
    for node in recorder.nodes:
        if any(parent in seeds or parent in below for parent in node.parents):
            below.add(node)
    return below


def _brings_input(node: Node, below: set[Node]) -> bool:
    """Whether an operation at which the stream ends takes something of the model's input that entered nowhere."""
    ends = bool(node.weights) or node.is_product or node.name in ENDS
    return ends and node.from_input and node not in below


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
    made_of = set(stream(residual))
    open_calls = set(_around(addition.call))
    for call in _around(core.call):
        if call not in open_calls:
            continue
        for _, node in call.inputs:
            inside = node is residual or (node in made_of and node.index < call.first)
            if inside and _feeds(core, node, call):
                return call, node
    return None


def _element(model: nn.Module, anchor: Call) -> tuple[Call, Node] | None:
    """Return the innermost element of a list of modules around an attention, and its first embedded argument."""
    for call in anchor.around():
        if call.name and isinstance(model.get_submodule(call.name.rpartition(".")[0]), _LISTS):
            if call is anchor:
                return None  # attention itself: what it gets may be normalised, and is no residual stream
            tokens = next((n for _, n in call.inputs if len(n.shape) >= 2 and n.differentiable), None)
            return None if tokens is None else (call, tokens)
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


def _repeats(recorder: Recorder, block: Call, argument: int | str) -> int | None:
    """Return how many parts of a block's name lead from the call in which it is called on its own output."""
    chain = [block]
    for call in recorder.calls:
        tokens = next((node for place, node in call.inputs if place == argument), None)
        if call.module is block.module and call is not block and tokens is not None and _made_in(tokens, block):
            chain.append(call)
    if len(chain) == 1:
        return None
    for outer in block.around():
        if outer is not block and all(any(c is outer for c in call.around()) for call in chain):
            name, scope = (clean_name(n) for n in (block.name, outer.name))
            if scope == "" or name.startswith(f"{scope}."):
                return len(name.split(".")) - len(scope.split(".") if scope else [])
    return None


def _made_in(node: Node, call: Call) -> bool:
    """Whether a tensor depends on something that was computed inside a call."""
    seen = {node}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if any(outer is call for outer in _around(current.call)):
            return True
        if current.index < call.first:
            continue
        for parent in current.parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return False


def _around(call: Call | None) -> Iterator[Call]:
    return call.around() if call is not None else iter(())


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
