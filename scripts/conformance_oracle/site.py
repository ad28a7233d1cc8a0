"""All checks on one site."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.conformance_oracle.checks import channel_ratio, evidence, operand_changes, projected
from scripts.conformance_oracle.records import AUX, ROLES, Core
from scripts.conformance_oracle.runs import Bench, Outcome
from scripts.conformance_oracle.weights import Change, Described, random_rows

__all__ = ["Finding", "SiteReport", "judge_site"]

RANDOM_ROWS = 3


@dataclass(frozen=True)
class Finding:
    """One sentence on one site.

    Args:
        level: `wrong`, `partial` or `note`.
        site: Name of the site, or a core.
        role: Role, empty if the sentence is about the whole site.
        text: The sentence.
    """

    level: str
    site: str
    role: str
    text: str

    def __str__(self) -> str:
        return f"{self.site}{f' {self.role}' if self.role else ''}: {self.text}"


@dataclass
class SiteReport:
    """What the checks of one site found; `covered` has the operands that its views change."""

    deep: bool
    findings: list[Finding] = field(default_factory=list)
    covered: set[tuple[int, str]] = field(default_factory=set)
    evidence: Counter[str] = field(default_factory=Counter)


def judge_site(
    bench: Bench,
    site: Any,
    views: Mapping[str, Sequence[Described]],
    others: Sequence[Mapping[str, Sequence[Described]]],
    *,
    deep: bool,
) -> SiteReport:
    """Check one site.

    Args:
        bench: The model; the views' parameters are watched.
        site: What the finder says.
        views: Its views by role.
        others: Those of the other sites.
        deep: Whether to do more than role and completeness.
    """
    judge = _SiteJudge(bench, site, views, others, deep)
    for role in ROLES:
        for view in views.get(role, ()):
            judge.view(view)
    if not any(views.values()):
        judge.say("wrong", "", "the site has no view at all")
    if deep:
        judge.geometry()
    return judge.report


class _SiteJudge:
    def __init__(
        self,
        bench: Bench,
        site: Any,
        views: Mapping[str, Sequence[Described]],
        others: Sequence[Mapping[str, Sequence[Described]]],
        deep: bool,
    ) -> None:
        self.bench, self.site, self.views, self.deep = bench, site, views, deep
        self.mine = [view for entries in views.values() for view in entries]
        self.others = [[view for entries in other.values() for view in entries] for other in others]
        self.report = SiteReport(deep)
        self.cores: dict[str, int] = {}
        self.spread: dict[str, tuple[float, float]] = {}

    def say(self, level: str, role: str, text: str) -> None:
        self.report.findings.append(Finding(level, self.site.name, role, text))

    def parts(self, view: Described) -> dict[frozenset[str], list[int]]:
        """Return the view's rows by the roles that list them; there is one part unless roles share some of them."""
        listing = [(other.role, set(other.rows)) for other in self.mine if other.overlaps(view)]
        parts: dict[frozenset[str], list[int]] = {}
        for row in view.rows:
            parts.setdefault(frozenset(role for role, rows in listing if row in rows), []).append(row)
        return parts

    def view(self, view: Described) -> None:
        """Do all checks of one view."""
        cores = [self.part(view, expected, rows) for expected, rows in self.parts(view).items()]
        arrived = [core for core in cores if core is not None]
        if arrived:
            self.cores.setdefault(view.role, arrived[0].index)
            self.complete(view, arrived[0])

    def part(self, view: Described, expected: frozenset[str], rows: Sequence[int]) -> Core | None:
        """Check that rows change the operands of the roles that list them, and return the core where they do."""
        change = random_rows(view, rows)
        outcome = self.bench.run([change])
        name = _named(view, rows)
        if outcome.core is None:
            if self.bench.uses_of(view.parameter):
                self.say("wrong", view.role, f"{name}: a change reaches no attention that was captured")
            else:
                self.say("partial", view.role, f"{name}: not seen to be used in these forward passes")
            return None
        if outcome.roles - {AUX} != expected:
            outcome = self.elsewhere(view, expected, change, outcome)
        core = outcome.core
        assert core is not None
        if outcome.roles - {AUX} != expected:
            self.say(
                "partial" if outcome.roles == {AUX} else "wrong",
                view.role,
                f"{name}: a change reaches {_listed(outcome.roles)} of core {core.index}, not {_listed(expected)}",
            )
            return None
        self.report.covered.update((core.index, role) for role in expected)
        if self.site.module not in core.modules:
            self.say("note", view.role, f"core {core.index} runs outside the module that the site names")
        if self.deep:
            self.exact(view, change, outcome)
            self.rows(view, expected, rows, core)
        return core

    def elsewhere(self, view: Described, expected: frozenset[str], change: Change, outcome: Outcome) -> Outcome:
        """Look for the site's own core behind those of other sites that use the same rows in other roles."""
        sharing = [{o.role for o in other if o.overlaps(view)} for other in self.others]
        later = outcome
        while later.core is not None and any(roles and later.roles - {AUX} <= roles for roles in sharing):
            later = self.bench.run([change], clamp=True, begin=later.core.index + 1)
            if later.core is not None and later.roles - {AUX} == expected:
                return later
        return outcome

    def complete(self, view: Described, core: Core) -> None:
        """Rows of the same parameter that the view does not list must not reach its operand."""
        same = [v for v in self.views[view.role] if v.parameter is view.parameter]
        listed = {row for v in same for row in v.rows}
        rest = [row for row in range(len(view.whole)) if row not in listed]
        if not rest or same[0] is not view:
            return
        # Maps in series (latent attention): what the rest makes must not come back through another view of the role.
        frozen = {v.parameter for v in self.views[view.role]} - {view.parameter}

        def reaches(rows: Sequence[int]) -> bool:
            outcome = self.bench.run(
                [random_rows(view, rows, seed=1)], clamp=True, begin=core.index, end=core.index, frozen=frozen
            )
            return view.role in outcome.touched.get(core.index, ())

        if not reaches(rest):
            return
        while len(rest) > 1:  # to name one of them
            half = rest[: len(rest) // 2]
            rest = half if reaches(half) else rest[len(rest) // 2 :]
        self.say("wrong", view.role, f"{_named(view)}: row {rest[0]} reaches the {view.role} too and is not listed")

    def exact(self, view: Described, change: Change, outcome: Outcome) -> None:
        """The projection changes by X * delta in the view's rows, and the operand by its image."""
        before = self.bench.uses_of(view.parameter, outcome.first)
        seen = projected(change, before, outcome.uses.get(id(view.parameter), ()))
        if seen.problem:
            self.say("wrong", view.role, f"{_named(view)}: {seen.problem}")
        elif seen.rows is None:
            self.say("note", view.role, f"{_named(view)}: how it is multiplied was not seen")
        elif seen.rows < len(change.values):
            self.say("note", view.role, f"{_named(view)}: {seen.rows} of {len(change.values)} rows were used")
        core = outcome.core
        assert core is not None
        twice = self.bench.run([change.times(2.0)], clamp=True, begin=core.index, end=core.index)
        if twice.core is None or twice.core.index != core.index:
            return
        base = self.bench.base[core.index]
        shapes = [[t.shape for t in c.tensors(view.role)] for c in (core, twice.core, base)]
        if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
            self.say("note", view.role, "the operand has another shape when weights change")
            return
        steps = [operand_changes(view.role, c, base) for c in (core, twice.core)]
        self.report.evidence[evidence(steps[0], steps[1], seen.values)] += 1

    def rows(self, view: Described, expected: frozenset[str], rows: Sequence[int], core: Core) -> None:
        """Single rows reach the same operands as all of them."""
        block = _block(rows)
        chosen = {rows[0], rows[block - 1], rows[-block], rows[-1]}
        chosen.update(random.Random(0).sample(rows, min(RANDOM_ROWS, len(rows))))
        for row in sorted(chosen):
            outcome = self.bench.run([random_rows(view, [row], seed=2)], clamp=True, begin=core.index)
            if outcome.core is None:
                if self.dead(view, outcome):
                    self.say("note", view.role, f"{_named(view)}: row {row} is not used for this input")
                else:
                    self.say("wrong", view.role, f"{_named(view)}: row {row} reaches no attention that was captured")
                continue
            roles = outcome.roles - {AUX}
            if roles != expected:
                text = f"row {row} reaches {_listed(roles)} of core {outcome.core.index}, not {_listed(expected)}"
                self.say("wrong", view.role, f"{_named(view)}: {text}")
                continue
            self.report.covered.update((outcome.core.index, role) for role in roles)
            self.measure(view.role, outcome.core, core)

    def dead(self, view: Described, outcome: Outcome) -> bool:
        """Whether the projection itself did not change, as that of an expert that no token was sent to."""
        before = self.bench.uses_of(view.parameter, outcome.first)
        after = outcome.uses.get(id(view.parameter), [])
        return bool(after) and all(bool((a.output == b.output).all()) for a, b in zip(after, before, strict=False))

    def measure(self, role: str, one: Core, all_rows: Core) -> None:
        """Keep over which share of the contracted and of the free axis that all rows reach one row spreads."""
        base = self.bench.base[one.index]
        if one.index != all_rows.index or role in self.spread:
            return
        for single, every, old in zip(one.operands[role], all_rows.operands[role], base.operands[role], strict=False):
            if single.tensor.shape != old.tensor.shape or every.tensor.shape != old.tensor.shape:
                continue
            share = channel_ratio(single.tensor - old.tensor, old)
            whole = channel_ratio(every.tensor - old.tensor, old)
            if share is not None and whole is not None and min(*share, *whole) > 0:
                self.spread[role] = (share[0] / whole[0], share[1] / whole[1])
                return

    def geometry(self) -> None:
        """Which axis is contracted, and how wide a head is."""
        channels = self.site.kind == "channel"
        for role, (contracted, free) in self.spread.items():
            # One row is one channel of all tokens. Where both shares are equal, a normalization has spread it.
            summed = {True: "tokens", False: "channels"}[(contracted > free) != (role == "value")]
            if contracted != free and (summed == "tokens") != channels:
                self.say("wrong", role, f"kind {self.site.kind!r}, and the product of query and key sums over {summed}")
                break
        for role, heads in (
            ("query", self.site.num_heads),
            ("key", self.site.num_kv_heads),
            ("value", self.site.num_kv_heads),
        ):
            if heads and role in self.cores and len(self.views[role]) == 1:
                self.heads(role, heads, channels)

    def heads(self, role: str, heads: int, channels: bool) -> None:
        """The rows of a role are as many heads as the operand's head width says."""
        operand = self.bench.base[self.cores[role]].operands[role][0]
        # In query and key the product sums over channels, in value over tokens; over channels it is the other way.
        axis = operand.free if (role == "value") != channels else operand.contracted
        if axis is None:
            return
        width, rows = operand.tensor.shape[axis], len(self.views[role][0].rows)
        if rows == heads * width:
            return
        level = "note" if rows % heads == 0 and rows // heads > width and (rows // heads) % width == 0 else "wrong"
        self.say(level, role, f"{rows} rows as {heads} heads, and a head of the operand has {width} channels")


def _block(rows: Sequence[int]) -> int:
    """Return how many rows follow each other without a gap at the start."""
    length = 1
    while length < len(rows) and rows[length] == rows[length - 1] + 1:
        length += 1
    return length


def _named(view: Described, rows: Sequence[int] | None = None) -> str:
    rows = view.rows if rows is None else rows
    return f"{view.label}[{rows[0]}..{rows[-1]}, {len(rows)} rows]"


def _listed(roles: frozenset[str] | set[str]) -> str:
    return " and ".join(role for role in (*ROLES, AUX) if role in roles) or "nothing"
