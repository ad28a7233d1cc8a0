"""Everything that looks like attention in a model: what a forward pass shows and what the table of layouts says.

A traced pass is authoritative: a layer that it ran is attention if it computed a softmax of products, and its rows are
those that reached it. The table of layouts serves what no pass has reached. Where both speak they must agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lit_cond.errors import LitCondError, UnknownAttentionError
from lit_cond.surgery.families import describe, not_attention, suspicion, unknown_attention
from lit_cond.surgery.samples import Sample, as_samples, sampled_parts
from lit_cond.surgery.sites import ROLES, AttentionSite, Role, WeightView, clean_name, own_parameter, reading
from lit_cond.surgery.tracing.cores import BLIND
from lit_cond.surgery.tracing.entrance import Entrance
from lit_cond.surgery.tracing.trace import Trace, TracedSite, trace_attention

__all__ = ["Survey", "survey_attention", "trace_and_remember"]

_NO_SOFTMAX = "it ran and computes no softmax of products of queries and keys"


@dataclass(eq=False)
class Survey:
    """What was found in a model.

    Args:
        sites: Attention layers whose rows are known, in the order of the model's modules.
        entrances: Where embedded tokens enter, as traced passes show, by the name of the block.
        left_alone: Modules that look like attention and are none, by name, with the reason.
        unknown: Modules that look like attention, were reached by no pass and have no known layout; and layers whose
            pass contradicts the table of layouts.
        notes: What could not be traced, and why.
    """

    sites: list[AttentionSite] = field(default_factory=list)
    entrances: dict[str, Entrance] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, UnknownAttentionError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def survey_attention(model: nn.Module, sample: Any = None, *, trace: bool = True) -> Survey:
    """Return all attention layers of a model.

    Args:
        model: Any module.
        sample: Arguments for one forward pass of the model (a tensor, a tuple, a dictionary, a `Sample` or a list of
            these); None takes what the model, or parts of it, say of their inputs.
        trace: Whether to run the model; without, the table of layouts alone is asked.
    """
    with reading(model):
        return _surveyed(model, sample, trace)


def _surveyed(model: nn.Module, sample: Any, trace: bool) -> Survey:
    survey = Survey()
    contradicted: dict[str, UnknownAttentionError] = {}
    traces = _traces(model, sample, survey.notes) if trace else []
    called = {name for shown in traces for name in shown.called}
    names = {module: clean_name(name) for name, module in model.named_modules()}
    traced = _bound(model, traces)
    static, survey.unknown, survey.left_alone = _static(names)
    for shown in traces:
        survey.entrances.update(
            (clean_name(e.module), replace(e, module=clean_name(e.module))) for e in shown.entrances
        )
        survey.left_alone.update((clean_name(name), reason) for name, reason in shown.unresolved)
    order = {name: i for i, name in enumerate(names.values())}
    opaque = {name for shown in traces for name in shown.opaque}
    joined = _joined(traced, static)
    used = {id(site) for pair in joined for site in pair if site is not None}
    for site, partner in joined:
        problem = None if partner is None else _disagreement(site, partner)
        if problem is None:
            survey.sites.append(_one(site, partner))
        else:
            contradicted[site.name] = problem
    for site in static:
        if id(site) in used:
            continue
        ran = site.name in called or any(view.owner_name in called for _, view in site)
        if ran and site.name in opaque:
            survey.notes.append(f"'{site.name}' runs a kernel that can not be looked into: the table of layouts serves")
            survey.sites.append(site)
        elif ran and any(own_parameter(view.module, view.tensor_name) is None for _, view in site):
            survey.notes.append(
                f"'{site.name}' computes its weight (weight_norm, spectral_norm, pruning), which hides the parameters "
                "from a forward pass: the table of layouts serves"
            )
            survey.sites.append(site)
        elif ran:
            survey.left_alone[site.name] = _NO_SOFTMAX
        else:
            survey.sites.append(site)
    known = [site.name for site in survey.sites]
    for name in known:
        survey.left_alone.pop(name, None)
    for name in list(survey.unknown):
        around = any(
            site == name or site.startswith(f"{name}.") or name.startswith(f"{site}.") for site in known if site
        )
        if name in called:
            del survey.unknown[name]
            if not around:
                survey.left_alone[name] = _NO_SOFTMAX
    survey.unknown.update(contradicted)
    survey.sites.sort(key=lambda site: order.get(site.name.partition(":")[0], len(order)))
    return survey


# Traces by model, in names only, so that they keep nothing alive.
_CACHE: weakref.WeakKeyDictionary[nn.Module, tuple[object, Trace]] = weakref.WeakKeyDictionary()


def _traces(model: nn.Module, sample: Any, notes: list[str]) -> list[Trace]:
    if sample is not None:
        return [_prefixed(trace_attention(model, as_samples(sample)), "")]
    remembered = {name: trace for name, part in model.named_modules() if (trace := _recall(part)) is not None}
    traces = [_prefixed(trace, name) for name, trace in remembered.items()]
    for name, part, samples in sampled_parts(model):
        if any(name == seen or seen == "" or name.startswith(f"{seen}.") for seen in remembered):
            continue
        label = clean_name(name) or type(part).__name__
        if isinstance(samples, Exception):
            notes.append(f"'{label}' was not traced: {_brief(samples)}")
            continue
        trace = _traced(part, samples, label, notes)
        if trace is not None:
            traces.append(_prefixed(trace, name))
    return traces


def _signature(part: nn.Module) -> object:
    return tuple((name, tuple(p.shape)) for name, p in part.named_parameters(remove_duplicate=False))


def _recall(part: nn.Module) -> Trace | None:
    """Return the trace of a module that has not changed its parameters since."""
    found = _CACHE.get(part)
    return found[1] if found is not None and found[0] == _signature(part) else None


def trace_and_remember(part: nn.Module, samples: Sequence[Sample]) -> None:
    """Trace a module on inputs that it got in practice; later surveys of models that hold it know what was seen.

    Args:
        part: A module.
        samples: What it was called with.
    """
    _CACHE[part] = (_signature(part), trace_attention(part, samples))


def _traced(part: nn.Module, samples: list[Sample], label: str, notes: list[str]) -> Trace | None:
    if any(p.is_meta for p in part.parameters()):
        notes.append(f"'{label}' was not traced: its weights are on the meta device")
        return None
    if any(isinstance(p, DTensor) for p in part.parameters()):
        notes.append(f"'{label}' was not traced: its weights are sharded")
        return None
    try:
        trace_and_remember(part, samples)
    except Exception as error:  # whatever a foreign forward raises
        notes.append(f"'{label}' was not traced: {_brief(error)}")
        return None
    return _recall(part)


def _brief(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, LitCondError) else f"{type(error).__name__}: {text}"


def _prefixed(trace: Trace, prefix: str) -> Trace:
    """Return a trace of a part with the names of the whole."""

    def full(name: str) -> str:
        return ".".join(part for part in (prefix, name) if part)

    return Trace(
        tuple(
            replace(
                site,
                module=full(site.module),
                places={r: tuple(replace(p, owner=full(p.owner)) for p in group) for r, group in site.places.items()},
            )
            for site in trace.sites
        ),
        frozenset(clean_name(full(name)) for name in trace.called),
        tuple(replace(e, module=full(e.module), attention=full(e.attention)) for e in trace.entrances),
        tuple((full(name), reason) for name, reason in trace.unresolved),
        frozenset(clean_name(full(name)) for name in trace.opaque),
    )


def _bound(model: nn.Module, traces: list[Trace]) -> list[AttentionSite]:
    """Return traced sites with the modules that their names mean."""
    modules = dict(model.named_modules(remove_duplicate=False))
    sites: list[AttentionSite] = []
    taken: dict[str, int] = {}
    for traced in (site for trace in traces for site in trace.sites):
        name = clean_name(traced.module)
        taken[name] = taken.get(name, 0) + 1
        views = {
            role: tuple(WeightView(modules[p.owner], p.tensor, p.layout, clean_name(p.owner)) for p in group)
            for role, group in traced.places.items()
        }
        sites.append(_site(traced, name if taken[name] == 1 else f"{name}:{taken[name]}", modules, views))
    return sites


def _site(
    traced: TracedSite, name: str, modules: Mapping[str, nn.Module], views: dict[Role, tuple[WeightView, ...]]
) -> AttentionSite:
    return AttentionSite(
        name,
        modules[traced.module],
        views,
        traced.num_heads,
        traced.num_kv_heads,
        traced.kind,
        traced.causal,
        traced=True,
        notes=traced.notes,
        num_value_heads=traced.num_value_heads,
    )


def _static(
    names: Mapping[nn.Module, str],
) -> tuple[list[AttentionSite], dict[str, UnknownAttentionError], dict[str, str]]:
    """Return what the table of layouts says of every module: attention, not understood, and none."""
    sites: list[AttentionSite] = []
    unknown: dict[str, UnknownAttentionError] = {}
    none: dict[str, str] = {}
    for module, name in names.items():
        try:
            site = describe(module)
            reason = suspicion(module) if site is None else None
            if reason is not None and not _holds_known(module):
                raise unknown_attention(module, reason)
        except UnknownAttentionError as error:
            unknown[name] = error
            continue
        if site is not None:
            sites.append(_named(site, name, names))
        elif (other := not_attention(module)) is not None and any(True for _ in module.parameters()):
            none[name] = other
    return sites, unknown, none


def _named(site: AttentionSite, name: str, names: Mapping[nn.Module, str]) -> AttentionSite:
    views = {
        role: tuple(replace(view, owner_name=names[view.module]) for view in views)
        for role, views in site.views.items()
    }
    return replace(site, name=name, views=views)


def _holds_known(module: nn.Module) -> bool:
    """Whether a descendant is attention of a known kind: the module is then a wrapper around it."""
    for child in module.modules():
        if child is module:
            continue
        try:
            if describe(child) is not None:
                return True
        except UnknownAttentionError:
            return True
    return False


def _joined(
    traced: list[AttentionSite], static: list[AttentionSite]
) -> list[tuple[AttentionSite, AttentionSite | None]]:
    """Pair each traced site with the one of the table that uses the same parameters."""
    by_parameter: dict[int | None, list[tuple[WeightView, AttentionSite]]] = {}
    for site in static:
        for _, view in site:
            by_parameter.setdefault(_parameter(view), []).append((view, site))
    pairs: list[tuple[AttentionSite, AttentionSite | None]] = []
    for site in traced:
        shared = [(mine, *other) for _, mine in site for other in by_parameter.get(_parameter(mine), [])]
        # Layers that share a parameter (ZAMBA) are told apart by who owns it.
        shared.sort(key=lambda triple: triple[0].module is not triple[1].module)
        partner = shared[0][2] if shared else None
        pairs.append((site, partner))
    return pairs


def _parameter(view: WeightView) -> int | None:
    value = dict(view.module.named_parameters(recurse=False, remove_duplicate=False)).get(view.tensor_name)
    return None if value is None else id(value)


def _disagreement(traced: AttentionSite, static: AttentionSite) -> UnknownAttentionError | None:
    """Return what is wrong where the two differ in the rows of a role."""
    for role in ROLES:
        shown, said = _rows(traced, role), _rows(static, role)
        common = shown.keys() & said.keys()
        if any(shown[key] != said[key] for key in common):
            return UnknownAttentionError(
                f"the forward pass reads its {role} from {_spell(traced, role)}, the table of layouts "
                f"says {_spell(static, role)}; correct the description (register_fused, register_family) or leave the "
                "layer out with `exclude`"
            )
    return None


def _rows(site: AttentionSite, role: Role) -> dict[int | None, frozenset[int]]:
    rows: dict[int | None, frozenset[int]] = {}
    for view in site.views.get(role, ()):
        key = _parameter(view)
        rows[key] = rows.get(key, frozenset()) | frozenset(view.layout.rows.indices(torch.device("cpu")).tolist())
    return rows


def _spell(site: AttentionSite, role: Role) -> str:
    return " and ".join(f"{v.owner_name}.{v.tensor_name}{v.layout.rows}" for v in site.views.get(role, ())) or "nothing"


def _one(traced: AttentionSite, static: AttentionSite | None) -> AttentionSite:
    """Return the traced site with what only the table knows."""
    if static is None:
        return traced
    # A role whose gradient ended on the way (a gate of zeros, a function without history) is what the table says.
    blind = [role for role in ROLES if traced.notes.get(role) in BLIND and role in static.views]
    return replace(
        traced,
        views={**traced.views, **{role: static.views[role] for role in blind}},
        notes={role: note for role, note in traced.notes.items() if role not in blind},
        causal=traced.causal or static.causal,
        batch_first=static.batch_first,
    )
