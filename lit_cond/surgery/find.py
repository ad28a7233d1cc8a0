"""Finding attention layers, and the place where embedded tokens enter the first of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lit_cond.errors import NoMatchingTargetError, UnknownAttentionError
from lit_cond.surgery.families import describe, suspicion, unknown_attention
from lit_cond.surgery.selection import Pattern, matches, nothing_matched, unmatched
from lit_cond.surgery.sites import AttentionSite, clean_name

__all__ = ["TokenSite", "find_attention", "find_token_sites"]


@dataclass(frozen=True, eq=False)
class TokenSite:
    """The module whose first tensor input is the embedded tokens.

    Args:
        name: Dotted name of the module, without wrapper parts.
        module: The module.
        attention: The first attention layer inside it.
    """

    name: str
    module: nn.Module
    attention: AttentionSite


def _aliases(name: str, site: AttentionSite | None = None) -> list[str]:
    """The names by which a layer may be selected: its own, of owners of its weights, and of modules around it."""
    parts = name.split(".")
    around = [".".join(parts[:i]) for i in range(1, len(parts))]
    return [name, *((view.owner_name for _, view in site) if site is not None else ()), *around]


def find_attention(model: nn.Module, include: Pattern = None, exclude: Pattern = None) -> list[AttentionSite]:
    """Return the attention layers of a model in the order of its modules.

    Args:
        model: Any module.
        include: Which layers to take, by the name of the attention module or of a module that owns one of its weights:
            a string is a regular expression matched in full, a list holds exact names or dotted endings. None takes
            all.
        exclude: Which layers to leave out, in the same grammar.

    Raises:
        NoMatchingTargetError: If nothing is left.
        UnknownAttentionError: If a module that is not excluded looks like attention and no family knows its layout.
    """
    names = {module: clean_name(name) for name, module in model.named_modules()}
    found: list[AttentionSite] = []
    unknown: list[tuple[str, UnknownAttentionError]] = []
    for module, name in names.items():
        excluded = matches(exclude, _aliases(name))
        try:
            site = _describe(module)
        except UnknownAttentionError as error:
            if not excluded:
                unknown.append((name, error))
            continue
        if site is not None:
            found.append(named(site, name, names))
    for pattern in (include, exclude):
        for entry in unmatched(pattern, names.values()):
            raise nothing_matched("attention layers", entry, None, [s.name for s in found])
    wanted = [s for s in found if include is None or matches(include, _aliases(s.name, s))]
    wanted = [s for s in wanted if not matches(exclude, _aliases(s.name, s))]
    for name, problem in unknown:
        if include is None or matches(include, _aliases(name)):
            raise UnknownAttentionError(f"'{name}': {problem}")
    if not wanted:
        raise nothing_matched("attention layers", include, exclude, [s.name for s in found])
    return wanted


def named(site: AttentionSite, name: str, names: Mapping[nn.Module, str]) -> AttentionSite:
    """Return a site with its own name and those of the owners of its weights."""
    views = {
        role: tuple(replace(view, owner_name=names[view.module]) for view in views)
        for role, views in site.views.items()
    }
    return replace(site, name=name, views=views)


def _describe(module: nn.Module) -> AttentionSite | None:
    """Return the site of one module; one that looks like attention and is not known, nor a wrapper, is an error."""
    site = describe(module)
    reason = None if site is not None else suspicion(module)
    if reason is None or _holds_known(module):
        return site
    raise unknown_attention(module, reason)


def _holds_known(module: nn.Module) -> bool:
    """Whether a descendant is attention of a known kind: the module is then a wrapper around it."""
    for child in module.modules():
        if child is module:
            continue
        try:
            if describe(child) is not None:
                return True
        except UnknownAttentionError:
            return True
    return False


def find_token_sites(model: nn.Module, include: Pattern = None) -> list[TokenSite]:
    """Return where embedded tokens enter the first attention layer.

    Without `include`: the innermost element of a list of modules (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`) on
    the path to the first attention layer, that is, the first transformer block.

    Args:
        model: Any module.
        include: Names of the blocks whose first tensor input shall be corrected, in the grammar of `find_attention`.

    Raises:
        NoMatchingTargetError: If no such module exists.
    """
    modules = {clean_name(name): module for name, module in model.named_modules()}
    sites = find_attention(model) if include is None else _attention_below(model)
    if include is None:
        first = sites[0]
        path = first.name.split(".")
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
        chosen = [inside[-1]]
    else:
        chosen = [name for name in modules if name and matches(include, [name])]
        if not chosen:
            raise nothing_matched("modules", include, None, [name for name in modules if name])
    result = []
    for name in chosen:
        below = [s for s in sites if s.name == name or s.name.startswith(f"{name}.")]
        if not below:
            raise NoMatchingTargetError(f"the module '{name}' holds no attention layer; name a block that does")
        result.append(TokenSite(name, modules[name], below[0]))
    return result


def _attention_below(model: nn.Module) -> Sequence[AttentionSite]:
    """All known layers; those that are not understood matter only where tokens enter."""
    names = {module: clean_name(name) for name, module in model.named_modules()}
    result = []
    for module, name in names.items():
        try:
            site = describe(module)
        except UnknownAttentionError:
            continue
        if site is not None:
            result.append(named(site, name, names))
    return result
