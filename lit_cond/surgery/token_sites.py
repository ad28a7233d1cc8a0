"""The places where embedded tokens enter the first block, one for each tower of a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from lit_cond.errors import NoMatchingTargetError
from lit_cond.surgery.find import select
from lit_cond.surgery.selection import Pattern, matches, nothing_matched
from lit_cond.surgery.sites import AttentionSite, clean_name
from lit_cond.surgery.survey import Survey, survey_attention
from lit_cond.surgery.tracing.entrance import Entrance

__all__ = ["TokenSite", "find_token_sites"]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class TokenSite:
    """The module whose tensor input is the embedded tokens.

    Args:
        name: Dotted name of the module, without wrapper parts.
        module: The module.
        attention: The first attention layer that runs inside it.
        argument: Position or name of the argument that holds the tokens; None for the first that fits.
        channel_axis: Axis of the channels, -1 for the last; None where only its size is known.
        batch_first: Whether tokens come as (batch, tokens, ...) and not as (tokens, batch, ...).
        prefix: Learned tokens (class, registers) before those of the input; None where no pass
            has shown it.
        scope: The module in which the block is called again on its own output, once for each layer that shares its
            weights; None where it is not.
        scope_name: Its dotted name.
        causal: Whether attention inside lets a position see itself and earlier ones only.
        channels: Number of channels of the tokens; None where only that of the attention layer is known.
        joined: Whether all samples of a batch stand one behind the other, in one sequence.
    """

    # In latent attention and behind bottlenecks the layer has other channels than the tokens.

    name: str
    module: nn.Module
    attention: AttentionSite
    argument: int | str | None = None
    channel_axis: int | None = None
    batch_first: bool = True
    prefix: int | None = None
    scope: nn.Module | None = None
    scope_name: str = ""
    causal: bool = False
    channels: int | None = None
    joined: bool = False


def find_token_sites(model: nn.Module, include: Pattern = None, *, sample: Any = None) -> list[TokenSite]:
    """Return where embedded tokens enter, one place for each tower of the model.

    Without `include`: where a traced pass shows the residual stream of the first attention (rule E1), or the innermost
    element of a list of modules around it where it adds to no stream (rule E2). Encoder and decoder, text and vision
    towers have one place each. Where no pass has run: the innermost element of a list of modules (`nn.ModuleList`,
    `nn.Sequential`, `nn.ModuleDict`) on the path to the first attention layer, that is, the first transformer block.
    Tokens that are parameters, whatever the input is (object queries, latents), are no embedded tokens. Where other
    layers come first (Mamba, convolutions), the first block with attention counts.

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
        chosen = [*survey.entrances, *_untraced(sites, list(survey.entrances), modules)]
        if not chosen:
            raise NoMatchingTargetError(_reason(sites))
    else:
        # Layers that are not understood matter only where tokens enter.
        sites = survey.sites
        chosen = [name for name in modules if name and matches(include, [name])]
        if not chosen:
            raise nothing_matched("modules", include, None, [name for name in modules if name])
    return [_token_site(name, modules, sites, survey) for name in chosen]


def _reason(sites: Sequence[AttentionSite]) -> str:
    if any(site.traced for site in sites):
        return (
            "no embedded tokens enter a block of this model: what its first attention layers add to is made of "
            "parameters, whatever the input is, or stands in no list of blocks; name the block with `include`"
        )
    return (
        f"no list of blocks holds the first attention layer '{sites[0].name}', so the place where tokens enter "
        "is not known; name the block with `include`"
    )


def _token_site(
    name: str, modules: Mapping[str, nn.Module], sites: Sequence[AttentionSite], survey: Survey
) -> TokenSite:
    below = [s for s in sites if name == "" or _plain(s) == name or _plain(s).startswith(f"{name}.")]
    if not below:
        raise NoMatchingTargetError(f"the module '{name}' holds no attention layer; name a block that does")
    causal = any(site.causal for site in below)
    entrance = survey.entrances.get(name) or _sibling(name, modules, survey.entrances)
    if entrance is None:
        return TokenSite(name, modules[name], below[0], batch_first=below[0].batch_first, causal=causal)
    first = next((s for s in below if _holds(s, entrance.attention)), below[0])
    scope_name = ""
    scope = None
    if entrance.repeats_in is not None:
        parts = name.split(".")
        scope_name = ".".join(parts[: len(parts) - entrance.repeats_in])
        scope = modules[scope_name]
    axis = entrance.channel_axis
    if axis is None:
        axis = _channel_axis(entrance.shape, {view.in_features for _, view in first})
    said = isinstance(first.module, nn.MultiheadAttention) or first.batch_first
    return TokenSite(
        name,
        modules[name],
        first,
        entrance.argument,
        axis,
        said and not entrance.tokens_first,
        entrance.prefix,
        scope,
        scope_name,
        causal,
        None if axis is None else entrance.shape[axis],
        entrance.joined,
    )


def _plain(site: AttentionSite) -> str:
    """Return the module's name of a site; a module that computes several attentions has numbered sites."""
    return site.name.partition(":")[0]


def _holds(site: AttentionSite, attention: str) -> bool:
    name = _plain(site)
    return attention == name or attention.startswith(f"{name}.")


def _sibling(name: str, modules: Mapping[str, nn.Module], entrances: Mapping[str, Entrance]) -> Entrance | None:
    """Return the entrance of a tower to which a block belongs: blocks of one list get their tokens in one form."""
    parent = name.rpartition(".")[0]
    for other, entrance in entrances.items():
        same_list = other.rpartition(".")[0] == parent and isinstance(modules[parent], _LISTS)
        if same_list and type(modules[other]) is type(modules[name]):
            return entrance
    return None


def _channel_axis(shape: Sequence[int], widths: Set[int]) -> int | None:
    """Return the one axis that has as many entries as a matrix of the layer has columns, -1 for the last."""
    axes = [axis for axis, size in enumerate(shape) if size in widths]
    if len(axes) != 1:
        return None
    return -1 if axes[0] == len(shape) - 1 else axes[0]


def _untraced(sites: Sequence[AttentionSite], traced: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the first blocks of those towers that no pass has reached.

    A tower is a part of the model that holds lists of blocks and is none itself.
    """
    paths = [_plain(site).split(".") for site in sites]
    names = [*paths, *(name.split(".") for name in traced)]
    shared = 0
    while names and all(len(path) > shared + 1 and path[shared] == names[0][shared] for path in names):
        shared += 1

    def branch(path: Sequence[str]) -> str:
        around = [modules.get(".".join(path[:depth])) for depth in (shared, shared + 1)]
        return "" if len(path) <= shared + 1 or any(isinstance(m, _LISTS) for m in around) else path[shared]

    seen = {branch(path) for path, site in zip(paths, sites, strict=True) if site.traced}
    seen.update(branch(name.split(".")) for name in traced)
    blocks = []
    for path, site in zip(paths, sites, strict=True):
        if branch(path) not in seen:
            seen.add(branch(path))
            blocks.append(_first_block(path, site, modules))
    return [block for block in blocks if block is not None]


def _first_block(path: Sequence[str], first: AttentionSite, modules: Mapping[str, nn.Module]) -> str | None:
    prefixes = [".".join(path[:i]) for i in range(len(path) + 1)]
    inside = [prefix for outer, prefix in itertools.pairwise(prefixes) if isinstance(modules[outer], _LISTS)]
    return None if not inside or modules[inside[-1]] is first.module else inside[-1]
