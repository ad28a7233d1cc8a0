"""Words and numbers for titles, legends and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

__all__ = ["QUANTITIES", "describe", "format_number", "natural_key", "short_names"]

QUANTITIES = {
    "query": "query weights",
    "key": "key weights",
    "value": "value weights",
    "tokens": "tokens",
    "scores": "attention matrix (softmax)",
    "attention": "attention output",
    "jacobian": "attention Jacobian",
    "jacobian_bound": "bound on the attention Jacobian",
}
"""What is measured, in the order in which it is shown, and how it is called."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def describe(quantity: str) -> str:
    """Return the name of a quantity in words; one that is not known is its own name."""
    return QUANTITIES.get(quantity, quantity.replace("_", " "))


def format_number(value: float) -> str:
    """Return a number as a person writes it: four digits, thousands separated, powers of ten from a million on.

    >>> format_number(25.0169), format_number(5027.3), format_number(3.2e7), format_number(float("inf"))
    ('25.02', '5,027', '3.2·10⁷', 'inf')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}·10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return f"{value:.4g}"


def natural_key(name: str) -> list[tuple[bool, int | str]]:
    """Return a key that sorts numbers within names as numbers: blocks.2 before blocks.10."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name) if part]


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Cut what all names have in common, at the dots.

    Args:
        names: Names of layers.

    Returns:
        The different parts, and the pattern that they fill, with a star where they stand. Names that can not be cut
        come back as they are with an empty pattern.

    >>> short_names(["net.blocks.0.attn", "net.blocks.11.attn"])
    (['0', '11'], 'net.blocks.*.attn')
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names), ""
    first = _agreeing(parts)
    last = min(_agreeing([part[::-1] for part in parts]), min(map(len, parts)) - first)
    shown = [".".join(part[first : len(part) - last]) for part in parts]
    if not (first or last) or not all(shown):
        return list(names), ""
    return shown, ".".join([*parts[0][:first], "*", *parts[0][len(parts[0]) - last :]])


def _agreeing(rows: Sequence[Sequence[str]]) -> int:
    """Return how many first entries are the same in all rows."""
    count = 0
    for entries in zip(*rows, strict=False):
        if len(set(entries)) > 1:
            break
        count += 1
    return count
