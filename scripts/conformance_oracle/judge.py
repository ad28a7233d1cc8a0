"""The verdict on the sites that a finder reports for one model."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scripts.conformance_oracle.records import ROLES, Core
from scripts.conformance_oracle.runs import Bench
from scripts.conformance_oracle.site import Finding, SiteReport, judge_site
from scripts.conformance_oracle.weights import Described, describe, random_rows

__all__ = ["Judgement", "judge_model"]

MANY_SITES = 6
Views = Mapping[str, Sequence[Described]]
Covered = dict[int, dict[str, set[str]]]  # names of the sites whose views change an operand, by core and role


@dataclass
class Judgement:
    """What was found out about one model.

    Args:
        verdict: `right`, `partial` (right as far as it goes; a person should look at what is open) or `wrong`.
        findings: What contradicts the sites, what is open, what is worth knowing.
        sites: Number of sites.
        cores: Number of attention cores that ran.
        deep: Number of sites that got all checks; the others got those of role and completeness.
        evidence: How many views' changes arrived at the operand exactly, linearly, or through a normalization.
        dtype: In which type the model ran.
    """

    verdict: str = "right"
    findings: list[Finding] = field(default_factory=list)
    sites: int = 0
    cores: int = 0
    deep: int = 0
    evidence: Counter[str] = field(default_factory=Counter)
    dtype: str = ""

    def of(self, level: str) -> list[str]:
        """Return the texts of one level."""
        return [str(finding) for finding in self.findings if finding.level == level]


def judge_model(
    bench: Bench, sites: Sequence[Any], *, deep_until: float = math.inf, until: float = math.inf
) -> Judgement:
    """Check sites against what the model computes.

    Args:
        bench: The model with its inputs.
        sites: What a finder says; each has `name`, `module`, `views`, `num_heads`, `num_kv_heads` and `kind`.
        deep_until: Processor time of this process, in seconds, after which the remaining sites get short checks only.
        until: That after which they get none, which is an open point.
    """
    result = Judgement(sites=len(sites), cores=len(bench.base), dtype=str(bench.dtype).removeprefix("torch."))
    described = [_described(site, result.findings) for site in sites]
    bench.watch([view.parameter for views in described for view in _flat(views)])
    wanted = _deep(sites)
    covered: Covered = defaultdict(lambda: defaultdict(set))
    for number, (site, views) in enumerate(zip(sites, described, strict=True)):
        if time.process_time() > until:
            result.findings.append(
                Finding("partial", site.name, "", f"not checked, nor {len(sites) - number - 1} others")
            )
            break
        others = [other for i, other in enumerate(described) if i != number]
        deep = number in wanted and time.process_time() < deep_until
        _add(result, site.name, judge_site(bench, site, views, others, deep=deep), covered)
    _account(bench, described, covered, result)
    levels = {finding.level for finding in result.findings}
    result.verdict = next((level for level in ("wrong", "partial") if level in levels), "right")
    return result


def _add(result: Judgement, site: str, report: SiteReport, covered: Covered) -> None:
    result.findings.extend(report.findings)
    result.evidence.update(report.evidence)
    result.deep += report.deep
    for index, role in report.covered:
        covered[index][role].add(site)


def _described(site: Any, findings: list[Finding]) -> dict[str, list[Described]]:
    """Read the views of a site by role; those that make no sense are findings."""
    views: dict[str, list[Described]] = {}
    for role, view in site:
        try:
            views.setdefault(role, []).append(describe(role, view))
        except LookupError as error:
            findings.append(Finding("wrong", site.name, role, str(error)))
    return views


def _flat(views: Views) -> list[Described]:
    return [view for entries in views.values() for view in entries]


def _deep(sites: Sequence[Any]) -> set[int]:
    """Return which sites get all checks: all of a few, else the first of each kind, the first and the last."""
    if len(sites) <= MANY_SITES:
        return set(range(len(sites)))
    kinds: dict[Any, int] = {}
    for number, site in enumerate(sites):
        layouts = tuple((role, view.tensor_name, repr(view.layout)) for role, view in site)
        kinds.setdefault((type(site.module), layouts, site.kind), number)
    return {0, len(sites) - 1, *kinds.values()}


def _account(
    bench: Bench,
    described: Sequence[Views],
    covered: Covered,
    result: Judgement,
) -> None:
    """Report the operands of cores that no site's views change."""
    if any(set(ROLES) - set(covered[core.index]) for core in bench.base):
        _sweep(bench, described, covered)
    for core in bench.base:
        missing = [role for role in ROLES if role not in covered[core.index]]
        if not missing:
            continue
        where = f"core {core.index} in {_place(core, bench)}"
        reasons = {role: _reason(role, core, bench, covered) for role in missing}
        makers = _makers(core, bench, frozenset(missing)) if not all(reasons.values()) else {}
        if len(missing) == len(ROLES) and not any(reasons.values()) and any(makers.values()):
            result.findings.append(Finding("wrong", where, "", "no site for this attention"))
            continue
        known = sorted(name for names in covered[core.index].values() for name in names if name)
        for role, reason in reasons.items():
            others = f"; the other operands are of {known[0]}" if known else ""
            inside = ", ".join(makers.get(role, ())[:4])
            text = (
                f"no view changes this operand, though {inside} does" if inside else "made by no weight of this layer"
            )
            result.findings.append(Finding("partial", where, role, reason or text + others))


def _makers(core: Core, bench: Bench, missing: frozenset[str]) -> dict[str, list[str]]:
    """Return the weights around a core that change missing operands only.

    They are looked for in the largest module with no other core; if there is none, in the innermost one.
    """
    alone = [m for m in core.modules if not any(m in other.modules for other in bench.base if other is not core)]
    alone = alone or list(core.modules[-1:])
    names = {id(parameter): name for name, parameter in bench.model.named_parameters()}
    makers: dict[str, list[str]] = {role: [] for role in missing}
    for parameter in alone[0].parameters() if alone else ():
        if parameter.dim() < 2 or not parameter.is_floating_point():
            continue
        places = torch.arange(parameter.numel()).reshape(len(parameter), -1)
        view = Described("", "", parameter, places, places, tuple(range(len(parameter))))
        index = core.index
        outcome = bench.run([random_rows(view, view.rows)], clamp=True, begin=index, end=index)
        roles = outcome.touched.get(index, frozenset()) & set(ROLES)
        for role in roles if roles <= missing else ():
            makers[role].append(names[id(parameter)])
    return makers


def _sweep(bench: Bench, described: Sequence[Views], covered: Covered) -> None:
    """Change all views of a role at once, every core's output held, and see which operands follow."""
    everything = [view for views in described for view in _flat(views)]
    for role in ROLES:
        mine = {view.key: view for view in everything if view.role == role}
        shared = {v.role for v in everything for m in mine.values() if v.overlaps(m)}
        changes = [random_rows(view, view.rows, seed) for seed, view in enumerate(mine.values())]
        if not changes:
            continue
        for index, roles in bench.run(changes, clamp=True, full=True).touched.items():
            # Where other operands change too, the change went round the core: it says nothing about this one.
            if role in roles and not (roles & set(ROLES)) - shared:
                covered[index][role].add("")


def _reason(role: str, core: Core, bench: Bench, covered: Covered) -> str:
    """Return why an operand may have no view, empty if no reason is known."""
    operands = core.operands.get(role, ())
    if operands and all(operand.weight for operand in operands):
        return "a parameter itself, by no projection"
    for other in bench.base:
        if other.index == core.index or role not in covered[other.index]:
            continue
        for mine in core.tensors(role):
            if any(mine.shape == t.shape and torch.equal(mine, t) for t in other.tensors(role)):
                return f"the same numbers as in core {other.index}, where a view makes them"
    return ""


def _place(core: Core, bench: Bench) -> str:
    """Return the dotted name of the module where a core ran."""
    names = {id(module): name for name, module in bench.model.named_modules()}
    for module in reversed(core.modules):
        if names.get(id(module)):
            return f"{names[id(module)]} ({type(module).__name__})"
    return type(bench.model).__name__
