"""Finding attention layers and choosing among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lit_cond.errors import ConfigurationError, NoMatchingTargetError, UnknownAttentionError
from lit_cond.surgery.selection import Pattern, matches, nothing_matched, unmatched
from lit_cond.surgery.sites import AttentionSite, Kind, clean_name
from lit_cond.surgery.survey import Survey, survey_attention

__all__ = ["find_attention", "select"]


def _aliases(name: str, site: AttentionSite | None = None) -> list[str]:
    """The names by which a layer may be selected: its own, of owners of its weights, and of modules around it."""
    parts = name.split(".")
    around = [".".join(parts[:i]) for i in range(1, len(parts))]
    return _bare([name, *((view.owner_name for _, view in site) if site is not None else ()), *around])


def _bare(names: Iterable[str]) -> list[str]:
    """Return names, and those inside of `DataParallel` and its kind without the prefix as well."""
    return [alias for name in names for alias in dict.fromkeys((name, name.removeprefix("module.")))]


def find_attention(
    model: nn.Module,
    include: Pattern = None,
    exclude: Pattern = None,
    *,
    layers: Sequence[int] | None = None,
    kinds: Sequence[Kind] | None = None,
    sample: Any = None,
) -> list[AttentionSite]:
    """Return the attention layers of a model in the order of its modules.

    Args:
        model: Any module.
        include: Which layers to take, by the name of the attention module or of a module that owns one of its weights:
            a string is a regular expression matched in full, a list holds exact names or dotted endings. None takes
            all.
        exclude: Which layers to leave out, in the same grammar.
        layers: Which layers to take by their position among all that the model has, from 0; negative ones count from
            the end.
        kinds: Which kinds to take, as in `AttentionSite.kind`.
        sample: Arguments for a forward pass; None takes what the model says of its inputs.

    Raises:
        NoMatchingTargetError: If nothing is left.
        UnknownAttentionError: If a module that is not excluded looks like attention, ran in no traced pass and has no
            known layout.
        ConfigurationError: If a position in `layers` does not exist.
    """
    return select(survey_attention(model, sample), model, include, exclude, layers, kinds)


def select(
    survey: Survey,
    model: nn.Module,
    include: Pattern = None,
    exclude: Pattern = None,
    layers: Sequence[int] | None = None,
    kinds: Sequence[Kind] | None = None,
) -> list[AttentionSite]:
    """Return the layers of a survey that are asked for; see `find_attention`."""
    names = [clean_name(name) for name, _ in model.named_modules()]
    candidates = [site.name for site in survey.sites]
    for pattern in (include, exclude):
        for entry in unmatched(pattern, _bare([*names, *candidates])):
            raise nothing_matched("attention layers", entry, None, candidates)
    for name, problem in survey.unknown.items():
        if not matches(exclude, _aliases(name)) and (include is None or matches(include, _aliases(name))):
            raise UnknownAttentionError(f"'{name}': {problem}")
    wanted = [s for s in survey.sites if include is None or matches(include, _aliases(s.name, s))]
    wanted = [s for s in wanted if not matches(exclude, _aliases(s.name, s))]
    if not candidates:
        reasons = [*survey.notes, *(f"'{name}': {reason}" for name, reason in survey.left_alone.items())]
        raise NoMatchingTargetError(
            "found no attention layers in the model; is it built before or in `configure_model`?"
            + (f" ({'; '.join(reasons[:2])})" if reasons else "")
        )
    if not wanted:
        raise nothing_matched("attention layers", include, exclude, candidates)
    if layers is not None:
        chosen = {id(survey.sites[_position(layer, len(survey.sites))]) for layer in layers}
        wanted = [s for s in wanted if id(s) in chosen]
    if kinds is not None:
        wanted = [s for s in wanted if s.kind in kinds]
    if not wanted:
        there = ", ".join(f"{i}: {site.name} ({site.kind})" for i, site in enumerate(survey.sites[:3]))
        raise NoMatchingTargetError(
            f"layers={layers} and kinds={kinds} leave none of the {len(candidates)} attention layers; the first are "
            f"{there}"
        )
    return wanted


def _position(layer: int, count: int) -> int:
    if not -count <= layer < count:
        raise ConfigurationError(f"`layers` holds {layer}, and the model has {count} attention layers; count from 0")
    return layer % count
