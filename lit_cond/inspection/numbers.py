"""The numbers of `inspect`: how the weights are conditioned, and what each correction would make of them.

Nothing is trained and the model stays as it was: a correction is put on by `condition_`, looked at, and taken back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from lit_cond.errors import LitCondError
from lit_cond.inspection.attention import Softmax, inputs_of, measured, predicted
from lit_cond.inspection.tokens import TokenNumbers, measure_tokens
from lit_cond.inspection.weights import CORRECTIONS, MatrixNumbers, better_than_chance, measure_matrices
from lit_cond.surgery.apply import condition_, uncondition_
from lit_cond.surgery.rules import WeightRule
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.sites import AttentionSite
from lit_cond.surgery.survey import Survey
from lit_cond.surgery.token_sites import TokenSite
from lit_cond.surgery.weights import conditioned_weights

__all__ = ["AS_IT_IS", "LayerNumbers", "Numbers", "measure_numbers"]

AS_IT_IS = "as it is"
"""The label of a model without a further correction."""

_WITHOUT_VALUES = (
    "the weights are on the meta device and have no values; with --device cpu and without --no-trace they have some"
)


@dataclass(frozen=True)
class LayerNumbers:
    """One attention layer in numbers.

    Args:
        matrices: Its matrices, in the order of the site.
        softmax: The attention as it is and under each correction, by label; why it is not known as a text.
    """

    matrices: tuple[MatrixNumbers, ...]
    softmax: Mapping[str, Softmax | str]


@dataclass(frozen=True)
class Numbers:
    """A model in numbers.

    Args:
        layers: The attention layers, in the order of the survey.
        reason: Why there are no numbers; None where there are.
        carried: The corrections that the weights carry already, one phrase for each kind.
        notes: What could not be measured or computed, and why.
        tokens: The tokens where they enter, in the order of the sites.
        conditioned: Median condition number of weights that carry no correction and are better conditioned than chance
            allows; None otherwise.
    """

    layers: tuple[LayerNumbers, ...] = ()
    reason: str | None = None
    carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tokens: tuple[TokenNumbers, ...] = ()
    conditioned: float | None = None


@torch.no_grad()
def measure_numbers(
    model: nn.Module, survey: Survey, data: Sample | None = None, token_sites: Sequence[TokenSite] = ()
) -> Numbers:
    """Measure the attention layers of a model and what each of `CORRECTIONS` would make of them.

    Where weights carry a correction, a further one is not asked for: their condition numbers are those of the effective
    weights, and those without the correction stand beside them.

    Args:
        model: The model; it is given back as it was.
        survey: Its attention layers.
        data: A batch for the attention entropy; None takes what the model says of its inputs. Layers that can not be
            watched while they run are predicted.
        token_sites: Where tokens enter.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return Numbers(reason=_WITHOUT_VALUES)
    carried = _carried(model)
    labels: Mapping[str, WeightRule] = {} if carried else CORRECTIONS
    matrices = measure_matrices(survey.sites, labels, carried=bool(carried))
    healthy = [
        site
        for site, numbers in zip(survey.sites, matrices, strict=True)
        if numbers and all(n.reason is None for n in numbers)
    ]
    fixed = {id(s) for s, numbers in zip(survey.sites, matrices, strict=True) if any(n.fixed for n in numbers)}
    free = [site for site in healthy if id(site) not in fixed]
    softmax: dict[int, dict[str, Softmax | str]] = defaultdict(dict)
    notes: list[str] = []
    inputs = inputs_of(model, data)
    for label, rule in [(AS_IT_IS, None), *(labels.items() if free else ())] if healthy else []:
        try:
            sites = healthy if rule is None else free
            with _corrected(model, rule, sites):
                seen = measured(sites, inputs)
                for site in sites:
                    found = seen.get(site.name, inputs.left_out)
                    softmax[id(site)][label] = found if isinstance(found, Softmax) else _instead(site, found)
        except LitCondError as error:
            notes.append(f"attention with the correction {label} is not known: {error}")
    layers = zip(survey.sites, matrices, strict=True)
    return Numbers(
        tuple(LayerNumbers(numbers, softmax[id(site)]) for site, numbers in layers),
        None,
        carried,
        tuple(notes),
        tuple(measure_tokens(token_sites, inputs)),
        None if carried else better_than_chance(survey.sites, matrices),
    )


def _instead(site: AttentionSite, why: str | None) -> Softmax | str:
    """Return a prediction for a layer that could not be watched; why there is none, if there is none."""
    prediction = predicted(site)
    if why is None:
        return prediction
    return replace(prediction, reason=why) if isinstance(prediction, Softmax) else f"{why}; {prediction}"


def _carried(model: nn.Module) -> tuple[str, ...]:
    """Return the corrections that the weights of a model carry, live or baked into them."""
    terms = [term for _, weight in conditioned_weights(model) for term in weight.terms]
    return tuple(
        dict.fromkeys(f"{t.rule.correction}, scale {t.rule.scale}, strength {float(t.strength):g}" for t in terms)
    )


@contextmanager
def _corrected(model: nn.Module, rule: WeightRule | None, sites: Sequence[AttentionSite]) -> Iterator[None]:
    """Put a correction on some layers of a model for a while; None leaves it as it is."""
    if rule is None:
        yield
        return
    rule = replace(rule, include=[site.name for site in sites])
    condition_(model, rule)
    try:
        yield
    finally:
        uncondition_(model, rule)
