"""All checks on one site."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from scripts.conformance_oracle.checks import channel_ratio, evidence, operand_changes, projected
from scripts.conformance_oracle.records import AUX, ROLES, Core, Operand, scale_of
from scripts.conformance_oracle.runs import Bench, Outcome
from scripts.conformance_oracle.weights import Change, Described, random_rows

__all__ = ["Finding", "SiteReport", "judge_site"]

RANDOM_ROWS = 3
SMALL = 1e-4  # of a change, where a large one makes the model choose other tokens


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
    judge.roles()
    judge.one_attention()
    judge.completeness()
    if deep:
        judge.projections()
        judge.single_rows()
        judge.geometry()
    return judge.report


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of one view, the roles that list them, and the run with all of them changed that showed these roles."""

    view: Described
    expected: frozenset[str]
    rows: tuple[int, ...]
    change: Change
    outcome: Outcome
    core: Core
    size: float = 1.0

    def some(self, rows: Sequence[int], seed: int) -> Change:
        """Return a change of other rows of the parameter, as large as that of all rows of the part."""
        return random_rows(self.view, rows, seed).times(self.size)

    def chosen(self) -> list[int]:
        """Return rows to change one by one: the ends of the first and the last block, and some others."""
        block = _block(self.rows)
        ends = {self.rows[0], self.rows[block - 1], self.rows[-block], self.rows[-1]}
        return sorted(ends.union(random.Random(0).sample(self.rows, min(RANDOM_ROWS, len(self.rows)))))


class _SiteJudge:
    def __init__(
        self,
        bench: Bench,
        site: Any,
        views: Mapping[str, Sequence[Described]],
        others: Sequence[Mapping[str, Sequence[Described]]],
        deep: bool,
    ) -> None:
        self.bench, self.site, self.views = bench, site, views
        self.mine = [view for entries in views.values() for view in entries]
        self.others = [[view for entries in other.values() for view in entries] for other in others]
        self.report = SiteReport(deep)
        self.parts: list[_Part] = []
        self.spread: dict[str, tuple[float, float]] = {}

    def say(self, level: str, role: str, text: str) -> None:
        self.report.findings.append(Finding(level, self.site.name, role, text))

    def by_roles(self, view: Described) -> dict[frozenset[str], list[int]]:
        """Return the view's rows by the roles that list them; there is one part unless roles share some of them."""
        listing = [(other.role, set(other.rows)) for other in self.mine if other.overlaps(view)]
        parts: dict[frozenset[str], list[int]] = {}
        for row in view.rows:
            parts.setdefault(frozenset(role for role, rows in listing if row in rows), []).append(row)
        return parts

    def roles(self) -> None:
        """Each view's rows change the operands of the roles that list them, and nothing else."""
        for view in self.mine:
            for expected, rows in self.by_roles(view).items():
                part = self.arrived(view, expected, tuple(rows))
                if part is not None:
                    self.parts.append(part)
                    self.report.covered.update((part.core.index, role) for role in expected)
        if not self.mine:
            self.say("wrong", "", "the site has no view at all")

    def one_attention(self) -> None:
        """All views of the site reach one and the same attention."""
        if len({part.core.index for part in self.parts}) < 2:
            return
        reached = []
        for part in self.parts:
            touched = self.bench.run([part.change], clamp=True, full=True).touched
            reached.append({index for index, roles in touched.items() if roles - {AUX} == part.expected})
        common = min(set.intersection(*reached), default=None)
        if common is None:
            where = ", ".join(f"{part.view.role} of core {part.core.index}" for part in self.parts)
            self.say("wrong", "", f"its views reach different attention: {where}")
            return
        for number, part in enumerate(self.parts):
            outcome = self.bench.run([part.change], clamp=True, begin=common, end=common)
            assert outcome.core is not None
            self.parts[number] = replace(part, outcome=outcome, core=outcome.core)
            self.report.covered.update((common, role) for role in part.expected)

    def arrived(self, view: Described, expected: frozenset[str], rows: tuple[int, ...]) -> _Part | None:
        """Return the run that shows that rows change the operands of the roles that list them, None if they do not."""
        change = random_rows(view, rows)
        outcome = self.bench.run([change])
        name = _named(view, rows)
        if outcome.core is None:
            uses = self.bench.uses_of(view.parameter)
            if uses and not any(bool(use.inputs.any()) for use in uses):
                self.say("partial", view.role, f"{name}: what it projects is zero in these forward passes")
            elif uses:
                self.say("wrong", view.role, f"{name}: a change reaches no attention that was captured")
            else:
                self.say("partial", view.role, f"{name}: not seen to be used in these forward passes")
            return None
        size = 1.0
        if outcome.roles - {AUX} != expected:
            outcome = self.elsewhere(view, expected, change, outcome)
        if outcome.roles - {AUX} != expected and self.bench.dtype == torch.float64:
            small = self.bench.run([change.times(SMALL)])
            if small.roles - {AUX} == expected:
                self.say(
                    "note", view.role, f"{name}: a large change reaches {_listed(outcome.roles)}, a small one does not"
                )
                change, outcome, size = change.times(SMALL), small, SMALL
        core = outcome.core
        assert core is not None
        if outcome.roles - {AUX} != expected:
            self.say(
                "partial" if outcome.roles == {AUX} else "wrong",
                view.role,
                f"{name}: a change reaches {_listed(outcome.roles)} of core {core.index}, not {_listed(expected)}",
            )
            return None
        if self.site.module not in core.modules:
            self.say("note", view.role, f"core {core.index} runs outside the module that the site names")
        return _Part(view, expected, rows, change, outcome, core, size)

    def elsewhere(self, view: Described, expected: frozenset[str], change: Change, outcome: Outcome) -> Outcome:
        """Look for the site's own core behind those of other sites that use the same rows in other roles."""
        sharing = [{o.role for o in other if o.overlaps(view)} for other in self.others]
        later = outcome
        while later.core is not None and any(roles and later.roles - {AUX} <= roles for roles in sharing):
            later = self.bench.run([change], clamp=True, begin=later.core.index + 1)
            if later.core is not None and later.roles - {AUX} == expected:
                return later
        return outcome

    def completeness(self) -> None:
        """Rows that no view lists for a role must not reach its operand."""
        done = set()
        for part in self.parts:
            view, index = part.view, part.core.index
            if (view.role, id(view.parameter)) in done:
                continue
            done.add((view.role, id(view.parameter)))
            # Rows listed for other roles were seen to change these only.
            listed = {row for p in self.parts if p.view.parameter is view.parameter for row in p.rows}
            if any(p.core.index != index for p in self.parts):
                listed = {row for v in self.views[view.role] if v.parameter is view.parameter for row in v.rows}
            self.unlisted(part, [row for row in range(len(view.whole)) if row not in listed])

    def unlisted(self, part: _Part, rest: list[int]) -> None:
        """Report one of these rows if they reach the operand of the part's role."""
        view, index = part.view, part.core.index
        # Maps in series (latent attention): what the rest makes must not come back through another view of the role.
        frozen = {v.parameter for v in self.views[view.role]} - {view.parameter}

        def reaches(rows: Sequence[int]) -> bool:
            changes = [part.some(rows, seed=1)]
            outcome = self.bench.run(changes, clamp=True, begin=index, end=index, frozen=frozen)
            return view.role in outcome.touched.get(index, ())

        if not rest or not reaches(rest):
            return
        while len(rest) > 1:  # to name one of them
            half = rest[: len(rest) // 2]
            rest = half if reaches(half) else rest[len(rest) // 2 :]
        self.say("wrong", view.role, f"{_named(view)}: row {rest[0]} reaches the {view.role} too and is not listed")

    def projections(self) -> None:
        """The projections change by X * delta in the views' rows, and the operands by its image."""
        for batch in self.batches():
            # One run for several roles: each changes its own operand only.
            index = batch[0].core.index
            twice = self.bench.run([p.change.times(2.0) for p in batch], clamp=True, begin=index, end=index)
            for part in batch:
                values = self.projection(part)
                if twice.core is not None and twice.core.index == index:
                    self.image(part, twice.core, values)

    def batches(self) -> list[list[_Part]]:
        """Return the parts in groups that share a core and change operands of different roles."""
        groups: list[list[_Part]] = []
        for part in self.parts:
            for group in groups:
                if group[0].core.index == part.core.index and not any(p.expected & part.expected for p in group):
                    group.append(part)
                    break
            else:
                groups.append([part])
        return groups

    def projection(self, part: _Part) -> Tensor:
        """Check the projections by one parameter; return by what they change."""
        view, outcome = part.view, part.outcome
        before = self.bench.uses_of(view.parameter, outcome.first)
        seen = projected(part.change, before, outcome.uses.get(id(view.parameter), ()))
        if seen.problem:
            self.say("wrong", view.role, f"{_named(view)}: {seen.problem}")
        elif seen.rows is None:
            self.say("note", view.role, f"{_named(view)}: how it is multiplied was not seen")
        elif seen.rows < len(part.rows):
            self.say("note", view.role, f"{_named(view)}: {seen.rows} of {len(part.rows)} rows were used")
        return seen.values

    def image(self, part: _Part, twice: Core, values: Tensor) -> None:
        """Count how the change of an operand follows from that of the projection."""
        role, base = part.view.role, self.bench.base[part.core.index]
        shapes = [[t.shape for t in core.tensors(role)] for core in (part.core, twice, base)]
        if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
            self.say("note", role, "the operand has another shape when weights change")
            return
        steps = [operand_changes(role, core, base) for core in (part.core, twice)]
        self.report.evidence[evidence(steps[0], steps[1], values)] += 1

    def single_rows(self) -> None:
        """Single rows reach the same operands as all of them."""
        for batch in self.batches():
            for picked in zip_longest(*(part.chosen() for part in batch)):
                rows = [(part, row) for part, row in zip(batch, picked, strict=True) if row is not None]
                if not self.together(rows):
                    for part, row in rows:
                        self.single_row(part, row)

    def together(self, rows: Sequence[tuple[_Part, int]]) -> bool:
        """Whether rows of several roles, one of each, change the operands of all of these roles at their core."""
        index = rows[0][0].core.index
        changes = [part.some([row], seed=2) for part, row in rows]
        outcome = self.bench.run(changes, clamp=True, begin=index, end=index)
        expected = frozenset[str]().union(*(part.expected for part, _ in rows))
        if outcome.core is None or outcome.core.index != index or outcome.roles - {AUX} != expected:
            return False
        for part, _ in rows:
            self.measure(part.view.role, outcome.core, part.core)
        return True

    def single_row(self, part: _Part, row: int) -> None:
        """Check one row by itself."""
        view = part.view
        outcome = self.bench.run([part.some([row], seed=2)], clamp=True, begin=part.core.index)
        roles = outcome.roles - {AUX}
        if outcome.core is None and self.dead(view, outcome):
            self.say("note", view.role, f"{_named(view)}: row {row} is not used for this input")
        elif outcome.core is None:
            self.say("wrong", view.role, f"{_named(view)}: row {row} reaches no attention that was captured")
        elif roles != part.expected:
            text = f"row {row} reaches {_listed(roles)} of core {outcome.core.index}, not {_listed(part.expected)}"
            self.say("wrong", view.role, f"{_named(view)}: {text}")
        else:
            self.report.covered.update((outcome.core.index, role) for role in roles)
            self.measure(view.role, outcome.core, part.core)

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
        # One row is one channel of all tokens. Where both shares are equal, a normalization has spread it.
        along = {role: contracted < free for role, (contracted, free) in self.spread.items() if contracted != free}
        for role, channels_are_contracted in along.items():
            summed = "channels" if channels_are_contracted != (role == "value") else "tokens"
            if (summed == "tokens") != channels:
                self.say("wrong", role, f"kind {self.site.kind!r}, and the product of query and key sums over {summed}")
                break
        for role, heads in (
            ("query", self.site.num_heads),
            ("key", self.site.num_kv_heads),
            ("value", getattr(self.site, "num_value_heads", None) or self.site.num_kv_heads),
        ):
            parts = [part for part in self.parts if part.view.role == role]
            if heads and parts and len(self.views[role]) == 1 and len(parts[0].view.rows) > 1:
                operand = self.operand(parts[0])
                contracted = along.get(role, (role == "value") == channels)
                self.heads(role, heads, operand.tensor, operand.contracted if contracted else operand.free)

    def operand(self, part: _Part) -> Operand:
        """Return the operand that a part changes: there are several where logits have several terms."""
        base = self.bench.base[part.core.index].operands[part.view.role]
        steps = operand_changes(part.view.role, part.core, self.bench.base[part.core.index])
        return next(operand for operand, step in zip(base, steps, strict=True) if scale_of(step) > 0)

    def heads(self, role: str, heads: int, operand: Tensor, axis: int | None) -> None:
        """The rows of a role are as many heads as the operand's head width says."""
        if axis is None:
            return
        width, rows = operand.shape[axis], len(self.views[role][0].rows)
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
