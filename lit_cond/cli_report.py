"""Reading the reports of jsonargparse: the tree of statements, and the names that would have been right."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser

__all__ = [
    "Complaint",
    "Report",
    "Vocabulary",
    "class_arguments",
    "flat_keys",
    "hint_at",
    "nearest",
    "public_path",
    "read_report",
    "subclasses",
]

Vocabulary = Mapping[str, "Vocabulary"]
"""The accepted keys, nested: a key without keys below it maps to an empty mapping."""

_SHORTEST_BEGINNING = 3
_MAX_LISTED = 12
_FILLED_IN = ("params", "optimizer")  # what Lightning passes to an optimizer or a scheduler


class Complaint(NamedTuple):
    """One statement of a report, with the keys and the class it is about."""

    keys: tuple[str, ...]
    class_path: str | None
    text: str

    @property
    def place(self) -> str:
        """The keys as the beginning of a sentence."""
        return f"{'.'.join(self.keys)}: " if self.keys else ""


class Report(NamedTuple):
    """A report of jsonargparse and what is needed to explain it.

    Attributes:
        complaints: Its statements, in their order.
        vocabulary: The accepted keys of the configuration.
        arguments: The command line.
        bases: The classes of which the value could have been one.
        value: The value as it was given.
    """

    complaints: list[Complaint]
    vocabulary: Vocabulary
    arguments: Sequence[str]
    bases: list[type]
    value: str


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Find the candidate that a misspelt word most likely meant.

    Args:
        word: The word as it was written.
        candidates: The accepted words.

    Returns:
        The one that begins with the word, else the nearest in spelling, without regard to case; None when none is
        near.
    """
    by_lower = {candidate.lower(): candidate for candidate in sorted(candidates)}
    longer = [candidate for candidate in by_lower if candidate.startswith(word.lower())]
    if len(longer) == 1 and len(word) >= _SHORTEST_BEGINNING:
        return by_lower[longer[0]]
    found = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def hint_at(word: str, candidates: Iterable[str]) -> str:
    """Return the end of a sentence on a wrong word: the nearest candidate, else all where they are few."""
    words = sorted(set(candidates))
    found = nearest(word, words)
    if found:
        return f"; did you mean {found!r}?"
    if not words or len(words) > _MAX_LISTED:
        return ""
    return f"; it can be {', '.join(words)}"


def flat_keys(vocabulary: Vocabulary, prefix: str = "") -> list[str]:
    """Return all keys of a vocabulary in dotted form."""
    return [name for key, below in vocabulary.items() for name in (prefix + key, *flat_keys(below, f"{prefix}{key}."))]


def read_report(message: str, vocabulary: Vocabulary, arguments: Sequence[str]) -> Report:
    """Take a report apart.

    Args:
        message: The text of jsonargparse.
        vocabulary: The accepted keys of the configuration.
        arguments: The command line.

    Returns:
        The parts.
    """
    values = re.findall(r"Given value: (.*)", message)
    return Report(_complaints(message), vocabulary, arguments, _bases(message), values[-1] if values else "")


def _complaints(message: str) -> list[Complaint]:
    stack: list[tuple[int, str | None, str | None]] = []
    found: list[Complaint] = []
    for line in message.splitlines():
        text = line.lstrip(" ")
        if not text:
            continue
        if text.startswith("- "):
            text = text[2:]
        indent = len(line) - len(text)
        while stack and stack[-1][0] >= indent:
            stack.pop()
        key = re.match(r'Parser key "(.+?)":\s*', text)
        owner = re.match(r"Problem with given class_path '(.+?)':\s*", text)
        if key or owner:
            stack.append((indent, key and key[1], owner and owner[1]))
            text = text[(key or owner).end() :]  # type: ignore[union-attr]
        keys = tuple(key for _, key, _ in stack if key)
        owners = [owner for _, _, owner in stack if owner]
        found.append(Complaint(keys, owners[-1] if owners else None, text))
    return found


def _bases(message: str) -> list[type]:
    first = re.search(r"Subtypes: (.*)", message)
    paths = re.findall(r"(?<![\w.])((?:\w+\.)+\w+)(?![\w.])", first[1]) if first else []
    return [found for path in paths if isinstance(found := _import(path), type)]


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def subclasses(base: type) -> set[type]:
    """Return a class and all classes derived from it that are known so far."""
    derived: list[type] = type.__subclasses__(base)
    return {base}.union(*(subclasses(cls) for cls in derived))


def public_path(cls: type) -> str:
    """Return the shortest path under which a class can be imported."""
    parts = cls.__module__.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def class_arguments(class_path: str) -> list[str]:
    """Return the options that a class takes in a configuration; none for one that can not be imported."""
    cls = _import(class_path)
    if not isinstance(cls, type):
        return []
    names = ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False)
    return [name for name in names if name not in _FILLED_IN]
