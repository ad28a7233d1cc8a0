"""Choosing names: PEFT's grammar of targets, one refusal for all that match nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from lit_cond.errors import ConfigurationError, NoMatchingTargetError

__all__ = ["Pattern", "matches", "nothing_matched", "unmatched"]

Pattern = str | Sequence[str] | None


def matches(pattern: Pattern, names: Iterable[str]) -> bool:
    """Say whether one of the names of a thing fits a pattern.

    Args:
        pattern: A string is a regular expression that must match a name in full; a list holds exact names or
            dotted endings of names; None fits nothing.
        names: The names by which the thing may be called.

    Raises:
        ConfigurationError: If the string is no regular expression.
    """
    if pattern is None:
        return False
    if isinstance(pattern, str):
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
        return any(compiled.fullmatch(name) for name in names)
    return any(name == entry or name.endswith(f".{entry}") for name in names for entry in pattern)


def unmatched(pattern: Pattern, names: Iterable[str]) -> list[str]:
    """Return the entries of a pattern that fit none of the names; a misspelt one must not pass in silence."""
    entries: Sequence[Pattern] = [pattern] if pattern is None or isinstance(pattern, str) else [[p] for p in pattern]
    known = list(names)
    missed = [entry for entry in entries if entry is not None and not matches(entry, known)]
    return [entry if isinstance(entry, str) else entry[0] for entry in missed]


def nothing_matched(what: str, pattern: Pattern, exclude: Pattern, candidates: Sequence[str]) -> NoMatchingTargetError:
    """Return the error for a selection that left nothing, with the nearest candidates.

    Args:
        what: What was looked for, in the plural.
        pattern: What was asked for.
        exclude: What was left out.
        candidates: Names of everything that could have been selected.
    """
    if not candidates:
        return NoMatchingTargetError(f"found no {what} in the model; is it built before or in `configure_model`?")
    asked = [pattern] if isinstance(pattern, str) else list(pattern or [])
    near = [name for entry in asked for name in difflib.get_close_matches(entry, candidates, n=3, cutoff=0.3)]
    listed = list(dict.fromkeys(near or candidates))[:3]
    if pattern is None:
        return NoMatchingTargetError(f"exclude={exclude!r} leaves none of the {len(candidates)} {what}")
    return NoMatchingTargetError(
        f"include={pattern!r} (exclude={exclude!r}) matches none of the {len(candidates)} {what}; nearest: "
        + ", ".join(listed)
    )
