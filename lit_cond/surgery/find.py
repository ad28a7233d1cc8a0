"""Finding attention layers, and the place where embedded tokens enter the first of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_cond.errors import ConfigurationError, NoMatchingTargetError, UnknownAttentionError
from lit_cond.surgery.selection import Pattern, matches, nothing_matched, unmatched
from lit_cond.surgery.sites import AttentionSite, Kind, clean_name
from lit_cond.surgery.survey import Survey, survey_attention

__all__ = ["TokenSite", "find_attention", "find_token_sites", "select"]


@dataclass(frozen=True, eq=False)
class TokenSite:
    """The module whose tensor input is the embedded tokens.

    Args:
        name: Dotted name of the module, without wrapper parts.
        module: The module.
        attention: The first attention layer inside it.
        argument: Position or name of the argument that holds the tokens; None for the first that fits.
        channel_axis: Axis of the channels; None where only its size is known.
        batch_first: Whether tokens come as (batch, tokens, ...) and not as (tokens, batch, ...).
        prefix: Learned tokens (class, registers) before those of the input; None where no pass has shown it.
    """

    name: str
    module: nn.Module
    attention: AttentionSite
    argument: int | str | None = None
    channel_axis: int | None = None
    batch_first: bool = True
    prefix: int | None = None


def _aliases(name: str, site: AttentionSite | None = None) -> list[str]:
    """The names by which a layer may be selected: its own, of owners of its weights, and of modules around it."""
    parts = name.split(".")
    around = [".".join(parts[:i]) for i in range(1, len(parts))]
    return [name, *((view.owner_name for _, view in site) if site is not None else ()), *around]


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
        for entry in unmatched(pattern, [*names, *candidates]):
            raise nothing_matched("attention layers", entry, None, candidates)
    for name, problem in survey.unknown.items():
        if not matches(exclude, _aliases(name)) and (include is None or matches(include, _aliases(name))):
            raise UnknownAttentionError(f"'{name}': {problem}")
    wanted = [s for s in survey.sites if include is None or matches(include, _aliases(s.name, s))]
    wanted = [s for s in wanted if not matches(exclude, _aliases(s.name, s))]
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


def find_token_sites(model: nn.Module, include: Pattern = None, *, sample: Any = None) -> list[TokenSite]:
    """Return where embedded tokens enter, one place for each tower of the model.

    Without `include`: where a traced pass shows the residual stream of the first attention (rule E1); else the
    innermost element of a list of modules (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`) on the path to the first
    attention layer, that is, the first transformer block (rule E2).

    Args:
        model: Any module.
        include: Names of the blocks whose first tensor input shall be corrected, in the grammar of `find_attention`.
        sample: Arguments for a forward pass; None takes what the model says of its inputs.

    Raises:
        NoMatchingTargetError: If no such module exists.
    """
    survey = survey_attention(model, sample)
    modules = {clean_name(name): module for name, module in model.named_modules()}
    if include is None:
        sites = select(survey, model)
        chosen = list(survey.entrances) or [_first_block(sites[0], modules)]
    else:
        # Layers that are not understood matter only where tokens enter.
        sites = survey.sites
        chosen = [name for name in modules if name and matches(include, [name])]
        if not chosen:
            raise nothing_matched("modules", include, None, [name for name in modules if name])
    return [_token_site(name, modules[name], sites, survey) for name in chosen]


def _token_site(name: str, module: nn.Module, sites: Sequence[AttentionSite], survey: Survey) -> TokenSite:
    below = [s for s in sites if name == "" or s.name == name or s.name.startswith(f"{name}.")]
    if not below:
        raise NoMatchingTargetError(f"the module '{name}' holds no attention layer; name a block that does")
    first, entrance = below[0], survey.entrances.get(name)
    if entrance is None:
        return TokenSite(name, module, first, batch_first=first.batch_first)
    axes = [axis for axis, size in enumerate(entrance.shape) if size == first.width]
    return TokenSite(
        name,
        module,
        first,
        entrance.argument,
        axes[0] if len(axes) == 1 else None,
        first.batch_first and not entrance.tokens_first,
        entrance.prefix,
    )


def _first_block(first: AttentionSite, modules: dict[str, nn.Module]) -> str:
    path = first.name.partition(":")[0].split(".")
    prefixes = [".".join(path[:i]) for i in range(len(path) + 1)]
    inside = [
        prefix
        for outer, prefix in itertools.pairwise(prefixes)
        if isinstance(modules[outer], (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    ]
    if not inside or modules[inside[-1]] is first.module:
        raise NoMatchingTargetError(
            f"no list of blocks holds the first attention layer '{first.name}', so the place where tokens enter "
            "is not known; name the block with `include`"
        )
    return inside[-1]
