"""Names that differ in one number only, as one: `blocks.{0..11}.attn`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

__all__ = ["fold", "joined_name", "ranges"]


def fold(items: Sequence[tuple[object, str]]) -> list[list[int]]:
    """Group the positions of items with the same mark whose names differ in at most one number.

    Args:
        items: A mark (hashable) and a name each.

    Returns:
        Groups of positions, each ascending, in the order of their first ones.
    """
    alike: dict[object, list[int]] = {}
    pieces = [re.split(r"(\d+)", name) for _, name in items]
    for index, (mark, _) in enumerate(items):
        alike.setdefault((mark, tuple(pieces[index][::2])), []).append(index)
    groups: list[list[int]] = []
    for group in alike.values():
        numbers = [pieces[index][1::2] for index in group]
        choices = [
            _split(group, [[*n[:place], *n[place + 1 :]] for n in numbers])
            for place in reversed(range(len(numbers[0])))
        ]
        # Names without a number, several times the same, stay apart.
        groups += min(choices, key=len).values() if choices else [[index] for index in group]
    return sorted(groups)


def _split(group: Sequence[int], keys: Iterable[Sequence[str]]) -> dict[object, list[int]]:
    parts: dict[object, list[int]] = {}
    for index, key in zip(group, keys, strict=True):
        parts.setdefault(tuple(key), []).append(index)
    return parts


def joined_name(names: Sequence[str]) -> str:
    """Return one name for names that differ in one number: `blocks.{0..11}.attn`."""
    pieces = [re.split(r"(\d+)", name) for name in names]
    joined = [
        column[0] if len(set(column)) == 1 else "{" + ranges(sorted(int(number) for number in column)) + "}"
        for column in zip(*pieces, strict=True)
    ]
    return "".join(joined)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: `0..11`, `3,7..47` in equal steps, `0..2,5` with gaps."""
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 1
    if step > 1 and all(b - a == step for a, b in itertools.pairwise(numbers)):
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
