"""When a training is to stop because of a logged number: the text of a rule, and what it remembers between steps."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_cond.errors import ConfigurationError

__all__ = ["StopCondition", "StopRule"]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = re.compile(
    r"(?P<key>[^\s<>=]+)\s*(?P<op>>=|<=|>|<)\s*(?P<number>[^\s<>=]+)(?:\s+for\s+(?P<steps>\d+)\s+steps?)?"
)
_GRAMMAR = (
    "write KEY > NUMBER, or >=, <, <=, with `for N steps` after it if it shall last, several joined by ` or `: "
    "'cond/tokens/max > 1e6 for 100 steps'"
)


@dataclass(frozen=True)
class StopCondition:
    """One comparison of a rule.

    Args:
        key: The logged key.
        operator: One of ``>``, ``>=``, ``<``, ``<=``.
        threshold: What the value is compared with; in the unit of the key.
        steps: For how many optimizer steps the comparison must hold without interruption; 0 stops at the first time.
    """

    key: str
    operator: str
    threshold: float
    steps: int = 0

    @property
    def group(self) -> str:
        """What the key belongs to: `cond/tokens` of `cond/tokens/max`."""
        return "/".join(self.key.split("/")[:2])

    def holds(self, value: float) -> bool:
        """Compare a value; an infinity is larger than any threshold, a NaN too, and neither is ever smaller."""
        if math.isnan(value) or value == math.inf:
            return self.operator in (">", ">=")
        return _OPERATORS[self.operator](value, self.threshold)

    def __str__(self) -> str:
        lasting = f" for {self.steps} step{'s' * (self.steps != 1)}" if self.steps else ""
        return f"{self.key} {self.operator} {_number(self.threshold)}{lasting}"


class StopRule:
    """Conditions on logged numbers, any of which stops a training, and since when each one holds.

    The conditions never change; `state_dict` carries the rest, so that a resumed run stops where the uninterrupted one
    does. Every process that sees the same values comes to the same decision.

    Args:
        conditions: At least one.

    Raises:
        ConfigurationError: If there is no condition.

    Example::

        >>> rule = StopRule.parse("cond/tokens/max > 1e6 for 100 steps")
        >>> rule.update(0, {"cond/tokens/max": 2e6})
        >>> rule.update(100, {"cond/tokens/max": 3e6})
        'cond/tokens/max is 3e+06, which is > 1e+06 since step 0 (rule: cond/tokens/max > 1e+06 for 100 steps)'
    """

    def __init__(self, conditions: Iterable[StopCondition]) -> None:
        self.conditions = tuple(conditions)
        if not self.conditions:
            raise ConfigurationError(f"a stop rule without a condition stops nothing: {_GRAMMAR}")
        self.reset()

    @classmethod
    def parse(cls, text: str) -> StopRule:
        """Read a rule: ``KEY > NUMBER [for N steps]``, several joined by `` or ``.

        Args:
            text: The rule. The operators are ``>``, ``>=``, ``<`` and ``<=``; the number is anything that `float` reads
                but NaN, such as ``1e6`` or ``inf``.

        Raises:
            ConfigurationError: If the text is not of this form.
        """
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"the stop rule {text!r} is no text: {_GRAMMAR}")
        return cls(_condition(part.strip(), text) for part in re.split(r"\s+or\s+", text.strip()))

    def __str__(self) -> str:
        return " or ".join(map(str, self.conditions))

    @property
    def keys(self) -> tuple[str, ...]:
        """The logged keys that the rule reads."""
        return tuple(condition.key for condition in self.conditions)

    def check(self, groups: Collection[str]) -> None:
        """Refuse a key that belongs to nothing that will be measured, and so would never stop anything.

        Args:
            groups: The first two parts of all keys that can be logged, such as `cond/tokens`.

        Raises:
            ConfigurationError: If a key belongs to none of them.
        """
        for condition in self.conditions:
            if condition.group not in groups:
                close = difflib.get_close_matches(condition.group, sorted(groups), n=3, cutoff=0.5) or sorted(groups)
                raise ConfigurationError(
                    f"the stop rule reads {condition.key!r}, and nothing of {condition.group!r} is measured; "
                    f"measured: {', '.join(close)}"
                )

    def reset(self) -> None:
        """Forget everything, as before the first measurement."""
        self._since: list[int | None] = [None] * len(self.conditions)
        self._seen = [False] * len(self.conditions)

    def update(self, step: int, values: Mapping[str, float]) -> str | None:
        """Take the numbers of one measured step.

        A condition whose quantity was not measured in this step stays as it is. `.../nonfinite` is logged only where it
        is above 0, so a missing one counts as 0 where its quantity was measured.

        Args:
            step: Optimizer steps done so far.
            values: The numbers by their logged keys; those of a quantity come together.

        Returns:
            Why to stop: key, value, threshold and since which step; None to go on.

        Raises:
            ConfigurationError: If the quantity of a key was measured, and the key is not among its numbers and never
                was; near ones are named.
        """
        reason = None
        for index, condition in enumerate(self.conditions):
            value = self._value(index, condition, values)
            if value is None:
                continue
            since = self._since[index]
            if not condition.holds(value):
                self._since[index] = None
                continue
            # A step before the first one is another training.
            since = step if since is None or since > step else since
            self._since[index] = since
            if reason is None and step - since >= condition.steps:
                reason = (
                    f"{condition.key} is {value:.4g}, which is {_relation(condition, value)} since step {since} "
                    f"(rule: {condition})"
                )
        return reason

    def _value(self, index: int, condition: StopCondition, values: Mapping[str, float]) -> float | None:
        if condition.key in values:
            self._seen[index] = True
            return float(values[condition.key])
        together = [key for key in values if key.startswith(f"{condition.group}/")]
        if together and condition.key.endswith("/nonfinite"):
            return 0.0
        if not together or self._seen[index]:
            return None
        close = difflib.get_close_matches(condition.key, together, n=3, cutoff=0.3) or together[:3]
        raise ConfigurationError(
            f"the stop rule reads {condition.key!r}, which is not logged; logged are {', '.join(close)}"
            + (" and others" if len(close) < len(together) else "")
        )

    def state_dict(self) -> dict[str, Any]:
        """Return since when each condition holds, in plain values."""
        return {"rule": str(self), "since": list(self._since), "seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state; that of another rule says nothing about this one and is left.

        Args:
            state: What `state_dict` returned.
        """
        self.reset()
        if state.get("rule") == str(self):
            self._since, self._seen = list(state["since"]), list(state["seen"])


def _condition(part: str, text: str) -> StopCondition:
    match = _CONDITION.fullmatch(part)
    where = f"the stop rule {text!r}" if part == text.strip() else f"{part!r} in the stop rule {text!r}"
    if match is None:
        raise ConfigurationError(f"{where} is no comparison: {_GRAMMAR}")
    try:
        threshold = float(match["number"])
    except ValueError:
        threshold = math.nan
    if math.isnan(threshold):
        raise ConfigurationError(f"{where} compares with {match['number']!r}, which is no number: {_GRAMMAR}")
    steps = int(match["steps"] or 0)
    if match["steps"] and steps < 1:
        raise ConfigurationError(f"{where} lasts for 0 steps: leave `for` out, or {_GRAMMAR}")
    return StopCondition(match["key"], match["op"], threshold, steps)


def _relation(condition: StopCondition, value: float) -> str:
    if math.isfinite(value):
        return f"{condition.operator} {_number(condition.threshold)}"
    return f"not finite and counts as {condition.operator} {_number(condition.threshold)}"


def _number(value: float) -> str:
    """Return a threshold in short, but never one that is read as another number."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
