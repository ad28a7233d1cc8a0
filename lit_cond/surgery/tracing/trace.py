"""The attention layers of a model as a recorded forward pass shows them, in plain names and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lit_cond.surgery.samples import Sample
from lit_cond.surgery.sites import ROLES, Kind, MatrixLayout, Role
from lit_cond.surgery.tracing.cores import IRREGULAR, Core, Source, resolve, views_of
from lit_cond.surgery.tracing.entrance import Entrance, choose_towers, find_entrances
from lit_cond.surgery.tracing.graph import Call, Node, tensors_in
from lit_cond.surgery.tracing.quiet import as_it_was
from lit_cond.surgery.tracing.recorder import Attention, Recorder

__all__ = ["Place", "Trace", "TracedSite", "trace_attention"]


@dataclass(frozen=True)
class Place:
    """Rows of a parameter, by name.

    Args:
        owner: Dotted name of the module that owns the parameter.
        tensor: Name of the parameter on its owner.
        layout: Which rows.
    """

    owner: str
    tensor: str
    layout: MatrixLayout


@dataclass(frozen=True)
class TracedSite:
    """One attention layer that ran.

    Args:
        module: Dotted name of the innermost module that holds the attention and its projections.
        places: The rows that made query, key and value.
        num_heads: Query heads, None where rows and head width do not fit together.
        num_kv_heads: Key heads, likewise.
        num_value_heads: Value heads, likewise.
        kind: What the softmax runs over.
        causal: Whether a position sees itself and earlier ones only.
        notes: Why a role has no rows here.
    """

    module: str
    places: dict[Role, tuple[Place, ...]]
    num_heads: int | None
    num_kv_heads: int | None
    num_value_heads: int | None
    kind: Kind
    causal: bool
    notes: dict[Role, str]


@dataclass(frozen=True)
class Trace:
    """What one or several forward passes of a model have shown.

    Args:
        sites: The attention layers, in the order in which they ran.
        called: Names of the modules that ran.
        entrances: Where embedded tokens enter, one for each tower.
        opaque: Names of modules in which a kernel ran that can not be looked into.
        unresolved: Attention that ran without any weight of its own: name of the module and the reason.
    """

    sites: tuple[TracedSite, ...]
    called: frozenset[str]
    entrances: tuple[Entrance, ...] = ()
    unresolved: tuple[tuple[str, str], ...] = ()
    opaque: frozenset[str] = frozenset()


_OUTSIDE = "it is made outside of the layer"


@dataclass(eq=False)
class _Layer:
    """Calls of one attention layer, joined."""

    anchor: Call
    cores: list[Core] = field(default_factory=list)
    sources: dict[Role, list[Source]] = field(default_factory=lambda: {role: [] for role in ROLES})


def trace_attention(model: nn.Module, samples: Sequence[Sample]) -> Trace:
    """Run a model on small inputs and return the attention that it computes.

    The model is run in evaluation mode with gradients, one pass for each sample, and is left as it was. Memory: the
    outputs of the last projections and products, 256 MiB or 24 of them, and the graphs between them.

    Args:
        model: A model in eager mode with real weights (not on the meta device).
        samples: What to call it with.
    """
    layers: dict[object, _Layer] = {}
    unresolved: dict[str, str] = {}
    called: dict[str, None] = {}
    opaque: set[str] = set()
    entrances: list[Entrance] = []
    with as_it_was(model):
        for sample in samples:
            cores: list[Core] = []

            def found(attention: Attention, cores: list[Core] = cores) -> None:
                cores.append(resolve(attention))

            recorder = Recorder(model, found)
            with recorder.recording():
                recorder.mark_input((sample.args, dict(sample.kwargs)))
                sample.run(model)
            called.update((call.name, None) for call in recorder.calls)
            opaque |= recorder.opaque
            before: list[tuple[int, Call]] = []
            anchors: dict[Node, Call] = {}
            for core in cores:
                anchor = _anchor(core)
                if anchor is not None and _drop_residual_stream(core, anchor, before):
                    anchor = _anchor(core)
                if anchor is not None:
                    before.append((core.node.index, anchor))
                    anchors[core.node] = anchor
                else:
                    name = core.node.call.name if core.node.call is not None else ""
                    unresolved[name] = next(iter(core.problems.values()), "no weight makes its operands")
                    continue
                layer = layers.setdefault(_key(core, anchor), _Layer(anchor))
                layer.cores.append(core)
                for role, sources in core.sources.items():
                    layer.sources[role] += _inside(sources, anchor)
            batch = _batch(sample)
            entrances += find_entrances(recorder, [core.node for core in cores], batch, anchors)
        owners = _owners(model)
        sites = [_site(layer, owners) for layer in _complete(layers.values())]
    return Trace(
        tuple(sites), frozenset(called), choose_towers(entrances), tuple(unresolved.items()), frozenset(opaque)
    )


def _batch(sample: Sample) -> int | None:
    """Return the size of the batch, by the convention that it is the first axis of the first input."""
    first = next(tensors_in((sample.args, dict(sample.kwargs))), None)
    return first.shape[0] if first is not None and first.ndim else None


def _anchor(core: Core) -> Call | None:
    """Return the innermost call around the attention in which some of its operands were projected."""
    inside = {id(call) for group in core.sources.values() for s in group for call in _calls(s)}
    around = core.node.call.around() if core.node.call is not None else ()
    return next((call for call in around if id(call) in inside), None)


def _calls(source: Source) -> list[Call]:
    return list(source.node.call.around()) if source.node.call is not None else []


def _drop_residual_stream(core: Core, anchor: Call, before: Sequence[tuple[int, Call]]) -> bool:
    """Drop what made an operand that is the residual stream itself: other layers ran since its first part was made."""
    dropped = False
    for role, sources in core.sources.items():
        oldest = min((s.node.index for s in _inside(sources, anchor)), default=core.node.index)
        between = (call for index, call in before if index > oldest and call is not anchor)
        if any(outer is anchor for call in between for outer in call.around()):
            core.sources[role] = []
            core.problems[role] = "it is the residual stream itself, without a projection"
            dropped = True
    return dropped


def _inside(sources: Iterable[Source], anchor: Call) -> list[Source]:
    """Keep what was projected in the layer itself: a shared key or a global query belongs to another place."""
    return [s for s in sources if any(call is anchor for call in _calls(s))]


def _key(core: Core, anchor: Call) -> object:
    ids = (frozenset(id(s.parameter) for s in _inside(core.sources[role], anchor)) for role in ROLES)
    return anchor.module, *ids


def _complete(layers: Iterable[_Layer]) -> list[_Layer]:
    """Drop products whose operands are part of another one of the same module.

    Relative positions make scores and values of their own; an approximation has products of products.
    """
    layers = _without_parts(list(layers))
    whole = {id(layer.anchor.module) for layer in layers if all(layer.sources[role] for role in ROLES)}
    mixed = [layer for layer in layers if _mixes(layer) and id(layer.anchor.module) in whole]
    return [layer for layer in layers if not any(layer is m for m in mixed)]


def _without_parts(layers: list[_Layer]) -> list[_Layer]:
    """Keep of the layers in one module those that add a weight to the others, whole and even ones first.

    Sums of scores (content and layout, each with its values) pair every query with every value.
    """

    def rank(layer: _Layer) -> tuple[bool, bool]:
        counts = [sum(int(s.rows.sum()) for s in layer.sources[role]) for role in ROLES]
        return 0 in counts, counts[0] != counts[2]

    known: dict[int, set[tuple[Role, int]]] = {}
    kept = []
    for layer in sorted(layers, key=rank):
        weights = {(role, id(s.parameter)) for role in ROLES for s in layer.sources[role]}
        seen = known.setdefault(id(layer.anchor.module), set())
        if not weights <= seen:
            kept.append(layer)
            seen |= weights
    return [layer for layer in layers if layer in kept]


def _mixes(layer: _Layer) -> bool:
    return any("products" in problem for core in layer.cores for problem in core.problems.values())


def _site(layer: _Layer, owners: dict[int, list[tuple[str, str, nn.Module]]]) -> TracedSite:
    core = layer.cores[0]
    places: dict[Role, tuple[Place, ...]] = {}
    notes: dict[Role, str] = {}
    for role in ROLES:
        found = [_place(source, layout, owners) for source, layout in views_of(layer.sources[role])]
        # An adapter (LoRA) adds to what its base layer projects; the base layer is what counts.
        base = [place for place in found if not any(part.startswith("lora_") for part in place.owner.split("."))]
        if base:
            places[role] = tuple(base)
        elif layer.sources[role]:
            notes[role] = IRREGULAR
        else:
            notes[role] = core.problems.get(role) or _OUTSIDE
    rows = {role: _count(layer.sources[role], places.get(role, ())) for role in ROLES}
    return TracedSite(
        layer.anchor.name,
        places,
        _quotient(rows["query"], core.head_width) or core.heads[0],
        _quotient(rows["key"], core.head_width) or core.heads[1],
        _quotient(rows["value"], core.value_width),
        _kind(layer, places),
        all(c.causal for c in layer.cores),
        notes,
    )


def _count(sources: Sequence[Source], places: Sequence[Place]) -> int:
    """Number of rows, where one parameter holds them all."""
    return sum(len(place.layout.rows) for place in places) if len({p.owner for p in places}) == 1 else 0


def _quotient(rows: int, width: int) -> int | None:
    return rows // width if width and rows and rows % width == 0 else None


def _place(source: Source, layout: MatrixLayout, owners: dict[int, list[tuple[str, str, nn.Module]]]) -> Place:
    candidates = owners[id(source.parameter)]
    around = [call.module for call in _calls(source)]
    # Tied weights have several owners; the one that ran is meant.
    owner, tensor, _ = min(
        candidates, key=lambda c: next((i for i, module in enumerate(around) if module is c[2]), len(around))
    )
    return Place(owner, tensor, layout)


def _owners(model: nn.Module) -> dict[int, list[tuple[str, str, nn.Module]]]:
    owners: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for tensor, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((name, tensor, module))
    return owners


def _kind(layer: _Layer, places: dict[Role, tuple[Place, ...]]) -> Kind:
    if layer.cores[0].over_channels:
        return "channel"
    if _mixes(layer):
        return "approximate"
    key, value = ({(p.owner, p.tensor) for p in places.get(role, ())} for role in ("key", "value"))
    if len(key) > 1 and key & value:
        return "latent"
    if not layer.sources["query"] or not layer.sources["key"]:
        return "self"
    query_from, key_from = (_origins(layer.sources[role], layer.anchor) for role in ("query", "key"))
    shared = query_from & key_from
    if any(node.from_input for node in query_from | key_from):
        # Two streams may share a constant, as a table of positions.
        shared = {node for node in shared if node.from_input}
    return "self" if shared else "cross"


def _origins(sources: Sequence[Source], anchor: Call) -> set[Node]:
    """Return what the projected tokens are made of, as far back as the inputs of the layer."""
    waiting = [s.node.source for s in sources if s.node.source is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.index < anchor.first:
            continue
        for parent in node.parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return {node for node in seen if not node.parameters}


def same_rows(a: Iterable[Place], b: Iterable[Place]) -> bool:
    """Say whether two descriptions mean the same rows of the same parameters, in whatever pieces."""
    return _rows_of(a) == _rows_of(b)


def _rows_of(places: Iterable[Place]) -> dict[tuple[str, str], frozenset[int]]:
    rows: dict[tuple[str, str], frozenset[int]] = {}
    for place in places:
        key = (place.owner, place.tensor)
        rows[key] = rows.get(key, frozenset()) | frozenset(place.layout.rows.indices(torch.device("cpu")).tolist())
    return rows
