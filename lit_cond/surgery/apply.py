"""The verbs: condition a model in place, undo it, fold it into the weights, move its strength."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lit_cond.errors import AlreadyConditionedError, ConfigurationError
from lit_cond.functional.corrections import identity_correction, spectral_correction
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.parallel import side_by_side
from lit_cond.surgery.rules import Rule, TokenRule, WeightRule
from lit_cond.surgery.saving import guard_saving, release_saving
from lit_cond.surgery.sites import AttentionSite, MatrixLayout, Role, WeightView
from lit_cond.surgery.token_sites import find_token_sites
from lit_cond.surgery.tokens import TokenForward, attach_tokens, detach_tokens, prepare_tokens, token_forwards
from lit_cond.surgery.weight_state import without_marks
from lit_cond.surgery.weights import (
    ConditionedWeight,
    Term,
    attach,
    conditioned_weight,
    conditioned_weights,
    detach,
    forget,
    gathered,
)

__all__ = [
    "AppliesTo",
    "bake_",
    "compute_correction",
    "condition_",
    "effective_matrix",
    "effective_state_dict",
    "fold_",
    "refresh_",
    "set_strength_",
    "strengths",
    "targeted_sites",
    "unbake_",
    "uncondition_",
]

AppliesTo = Literal["all", "weights", "tokens"]


@dataclass(frozen=True, eq=False)
class _Target:
    site: AttentionSite
    role: Role
    view: WeightView


def condition_(model: nn.Module, rule: Rule) -> None:
    """Condition a model in place; its parameters keep their identity, names and order.

    Args:
        model: Any module that holds attention.
        rule: A `WeightRule` or a `TokenRule`.

    Raises:
        NoMatchingTargetError: If the rule selects nothing.
        UnknownAttentionError: If an attention layer is stored in a way that no family knows.
        AlreadyConditionedError: If a selected weight or block carries a correction.
        LostTargetError: If a selected weight is not a plain parameter.
        ConfigurationError: If the rule does not fit the model.
    """
    if isinstance(rule, TokenRule):
        _condition_tokens(model, rule)
    else:
        _condition_weights(model, rule)
    guard_saving(model)


def targeted_sites(model: nn.Module, rule: Rule) -> list[AttentionSite]:
    """Return the attention layers that a rule selects, or before which it corrects tokens."""
    if isinstance(rule, TokenRule):
        return [site.attention for site in find_token_sites(model, rule.include)]
    return find_attention(model, rule.include, rule.exclude, layers=rule.layers, kinds=rule.kinds)


def _condition_tokens(model: nn.Module, rule: TokenRule) -> None:
    sites = find_token_sites(model, rule.include)
    present = {forward.module for _, forward in token_forwards(model)}
    for site in sites:
        if site.module in present:
            raise AlreadyConditionedError(
                f"the tokens at '{site.name}' are conditioned already; call uncondition_ first"
            )
    for site, forward in prepare_tokens(sites, rule):
        attach_tokens(site, rule, forward)


def _condition_weights(model: nn.Module, rule: WeightRule) -> None:
    targets = [
        _Target(site, role, view)
        for site in targeted_sites(model, rule)
        for role, view in site
        if role in (rule.roles or ())
    ]
    by_parameter: dict[int, list[_Target]] = defaultdict(list)
    for target in targets:
        by_parameter[id(target.view.parameter)].append(target)
    owners = _owners(model)
    # Everything is checked and computed before the first change, so that a refusal leaves the model as it was.
    strength = torch.tensor(float(rule.strength))
    made = side_by_side(
        lambda group: _term(group, rule, strength),
        list(by_parameter.values()),
        [group[0].view.parameter for group in by_parameter.values()],
    )
    terms = dict(zip(by_parameter, made, strict=True))
    for key, group in by_parameter.items():
        _check_owners(group, owners[key])
        for weight in (existing(owner, name) for owner, name in owners[key]):
            if weight is not None:
                _check_free(weight, terms[key], group[0].site.name)
    parents = _parents(model)
    for key, term in terms.items():
        for owner, name in owners[key]:
            weight = conditioned_weight(owner, name)
            weight.terms.append(term)
            attach(weight, [owner, *parents[owner]])


def existing(owner: nn.Module, tensor_name: str) -> ConditionedWeight | None:
    """Return the conditioned weight of a parameter if it has one."""
    return next((weight for name, weight in conditioned_weights(owner) if name == tensor_name), None)


def effective_matrix(view: WeightView) -> Tensor:
    """Return a projection (rows, in_features) as the forward pass reads it, corrected or not."""
    weight = existing(view.module, view.tensor_name)
    return view.layout.matrix(gathered(view.parameter.detach() if weight is None else weight.current_effective))


def _term(group: list[_Target], rule: WeightRule, strength: Tensor) -> Term:
    parameter = group[0].view.parameter.detach()
    if parameter.is_meta:
        raise ConfigurationError(
            f"the weights of '{group[0].site.name}' are on the meta device; materialise the model before "
            "conditioning it"
        )
    if not bool(gathered(parameter).isfinite().all()):
        name = group[0].site.name
        raise ConfigurationError(f"the weights of '{name}' hold NaN or Inf; load or initialise them first")
    # Tied weights show the same matrix at several sites.
    blocks = list(dict.fromkeys((target.view.layout, _num_blocks(target, rule)) for target in group))
    return Term(rule, blocks, compute_correction(rule, blocks, parameter), strength)


def compute_correction(rule: WeightRule, blocks: Sequence[tuple[MatrixLayout, int]], raw: Tensor) -> Tensor:
    """Return C for one parameter, in float32 at least, zero outside the given matrices.

    Args:
        rule: What to compute.
        blocks: The matrices in the parameter and the number of row blocks in each.
        raw: The raw weight, of the parameter's shape; a sharded one is gathered, so every process must call this.
    """
    raw = gathered(raw)
    # Contiguous, unlike a channels-last weight: `scatter_` writes through a view.
    full = torch.zeros(raw.shape, dtype=torch.promote_types(raw.dtype, torch.float32), device=raw.device)
    for layout, num_blocks in blocks:
        matrix = layout.matrix(raw).to(full.dtype)
        if rule.correction == "identity":
            layout.scatter_(full, identity_correction(matrix, rule.scale, num_blocks))
        else:
            layout.scatter_(full, spectral_correction(matrix, rule.scale, num_blocks))
    return full


def _num_blocks(target: _Target, rule: WeightRule) -> int:
    if rule.granularity == "matrix":
        return 1
    heads = target.site.heads(target.role)
    if heads is None:
        raise ConfigurationError(
            f"'{target.site.name}' does not say how many {target.role} heads it has; use granularity='matrix' or "
            "give the module a `num_heads` attribute"
        )
    return heads


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every place where a parameter stands: tied weights have several."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[id(parameter)].append((module, name))
    return places


def _parents(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The modules that may read a child's weight instead of calling the child."""
    parents: dict[nn.Module, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            for child in module.children():
                parents[child].append(module)
    return parents


def _check_owners(group: list[_Target], places: list[tuple[nn.Module, str]]) -> None:
    selected = {target.view.module for target in group}
    if any(owner not in selected for owner, _ in places):
        raise ConfigurationError(
            f"a weight of '{group[0].site.name}' is shared with a module that is not selected; select all modules "
            "that share it, or none"
        )


def _check_free(weight: ConditionedWeight, term: Term, name: str) -> None:
    if weight.baked:
        raise AlreadyConditionedError(
            f"'{name}' carries the correction of an earlier fit in its weights; call fold_ to keep it or "
            "uncondition_ to take it back first"
        )
    if any(torch.isin(other.rows, term.rows).any() for other in weight.terms):
        raise AlreadyConditionedError(
            f"'{name}' is conditioned already by another rule; one correction for each weight"
        )


def _same(rule: Rule, other: Rule | None) -> bool:
    """Whether two rules make the same correction, whatever its strength; None stands for all rules."""
    return other is None or rule.settings() == other.settings()


def _groups(model: nn.Module) -> Iterator[list[ConditionedWeight]]:
    """Conditioned weights by parameter: the places of a tied one together."""
    groups: dict[int, dict[int, ConditionedWeight]] = defaultdict(dict)
    for _, weight in conditioned_weights(model):
        groups[id(weight.parameter)][id(weight)] = weight
    return iter([list(group.values()) for group in groups.values()])


@torch.no_grad()
def bake_(model: nn.Module) -> None:
    """Write the effective weights into the parameters and stop correcting; `unbake_` takes this back exactly."""
    for group in _groups(model):
        if group[0].baked:
            continue
        parameter = group[0].parameter
        raw = parameter.detach().clone()
        parameter.copy_(group[0].effective(raw))
        for weight in group:
            detach(weight)
            weight.raw = raw


@torch.no_grad()
def unbake_(model: nn.Module, rule: WeightRule | None = None) -> None:
    """Restore the raw weights kept by `bake_` and correct again in the forward pass.

    A weight that was changed since (trained on, loaded) is taken as effective: its raw value is what the correction
    leaves of it.

    Args:
        model: A model that was baked.
        rule: Only weights that carry a correction of these settings.
    """
    parents = _parents(model)
    for group in _groups(model):
        if not group[0].baked or not any(_same(term.rule, rule) for term in group[0].terms):
            continue
        parameter = group[0].parameter
        parameter.copy_(group[0].raw_of(parameter.detach()))
        for weight in group:
            weight.raw = None
            attach(weight, [weight.owner, *parents[weight.owner]])
    guard_saving(model)


@torch.no_grad()
def uncondition_(model: nn.Module, rule: Rule | None = None) -> None:
    """Take corrections back: the parameters hold the raw weights, tokens enter as they are.

    Args:
        model: A conditioned model.
        rule: Take back the corrections of this rule only.
    """
    for group in _groups(model):
        if not any(_same(term.rule, rule) for term in group[0].terms):
            continue
        if group[0].baked:
            group[0].parameter.copy_(group[0].current_raw)
            for weight in group:
                weight.raw = None
        for weight in group:
            weight.terms = [term for term in weight.terms if not _same(term.rule, rule)]
            if not weight.terms:
                detach(weight)
                forget(weight)
    for _, forward in list(token_forwards(model)):
        if _same(forward.rule, rule):
            detach_tokens(forward)
    release_saving(model)


@torch.no_grad()
def fold_(model: nn.Module) -> None:
    """Make the weight corrections part of the weights for good; the function stays what it was.

    Token corrections depend on the input, can not fold and stay in place.
    """
    for group in _groups(model):
        if not group[0].baked:
            group[0].parameter.copy_(group[0].effective(group[0].parameter.detach()))
        for weight in group:
            detach(weight)
            forget(weight)
    release_saving(model)


@torch.no_grad()
def refresh_(model: nn.Module, rule: WeightRule | None = None) -> None:
    """Compute the corrections anew from the current raw weights.

    Args:
        model: A conditioned model.
        rule: Refresh the corrections of this rule only.
    """
    for group in _groups(model):
        raw = group[0].current_raw
        for term in {id(term): term for weight in group for term in weight.terms}.values():
            if _same(term.rule, rule):
                term.correction = compute_correction(term.rule, term.blocks, raw)


def effective_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the `state_dict` with every conditioned weight at its effective value, live or baked."""
    state: dict[str, Tensor] = model.state_dict()
    for name, weight in conditioned_weights(model):
        state[name] = weight.current_effective
        without_marks(state, [name])
    return state


def _carriers(model: nn.Module, applies_to: AppliesTo | Rule) -> Iterator[Term | TokenForward]:
    rule = None if isinstance(applies_to, str) else applies_to
    if isinstance(applies_to, WeightRule) or applies_to in ("all", "weights"):
        for _, weight in conditioned_weights(model):
            yield from (term for term in weight.terms if _same(term.rule, rule))
    if isinstance(applies_to, TokenRule) or applies_to in ("all", "tokens"):
        for _, forward in token_forwards(model):
            if _same(forward.rule, rule):
                yield forward


def strengths(model: nn.Module, applies_to: AppliesTo | Rule = "all") -> list[float]:
    """Return the strengths in force, one for each correction.

    Args:
        model: A conditioned model.
        applies_to: Corrections of weights, of tokens, both, or of one rule.
    """
    return [float(carrier.strength) for carrier in _carriers(model, applies_to)]


@torch.no_grad()
def set_strength_(model: nn.Module, value: float, applies_to: AppliesTo | Rule = "all") -> int:
    """Set the strength of the corrections of a model; nothing is recompiled.

    Args:
        model: A conditioned model.
        value: The multiplier, >= 0.
        applies_to: Corrections of weights, of tokens, both, or of one rule.

    Returns:
        How many corrections were set.
    """
    count = 0
    for carrier in _carriers(model, applies_to):
        carrier.strength.fill_(value)
        count += 1
    return count
