"""The numbers of `inspect`: how the weights are conditioned, and what each correction would make of them.

Nothing is trained and the model stays as it was: a correction is put on by `condition_`, looked at, and taken back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lit_cond.errors import LitCondError, LostTargetError
from lit_cond.functional.condition_number import condition_of_spectrum, singular_values
from lit_cond.functional.corrections import identity_correction
from lit_cond.functional.extremes import extreme_singular_values
from lit_cond.inspect_entropy import Softmax, inputs_of, measured, predicted
from lit_cond.surgery.apply import compute_correction, condition_, existing, uncondition_
from lit_cond.surgery.parallel import side_by_side
from lit_cond.surgery.rules import WeightRule
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.sites import AttentionSite, Role, WeightView
from lit_cond.surgery.survey import Survey
from lit_cond.surgery.weights import conditioned_weights, gathered

__all__ = ["AS_IT_IS", "CORRECTIONS", "LayerNumbers", "MatrixNumbers", "Numbers", "measure_numbers"]

AS_IT_IS = "as it is"
"""The label of a model without a further correction."""

CORRECTIONS: Mapping[str, WeightRule] = {
    "spectral": WeightRule(),
    "identity 1": WeightRule("identity", 1.0),
    "identity 10": WeightRule("identity", 10.0),
}
"""The corrections whose effect is computed: the default, and the practical variant at 1 and at the paper's 10."""

_WITHOUT_VALUES = (
    "the weights are on the meta device and have no values; with --device cpu and without --no-trace they have some"
)
# Entries of the matrices that are decomposed in one go: copies in float64 that stay in the cache.
_CHUNK = 2**19
# Relative errors that do no harm: of singular values as they are, and of those that a correction would leave.
_RTOL = 1e-3
_RTOL_AFTER = 1e-2


@dataclass(frozen=True)
class MatrixNumbers:
    """One projection matrix in numbers.

    Args:
        role: Which matrix.
        kappa: Condition number as the forward pass reads the matrix, dimensionless, >= 1; inf where it is singular, NaN
            where it holds what is not finite. To 0.2 %, what corrections leave to 2 %, and far better in practice.
        sigma_max: Largest singular value.
        sigma_min: Smallest singular value.
        stable_rank: Squared Frobenius norm over squared largest singular value, dimensionless, between 1 and the rank;
            0 for a matrix of zeros.
        without: Condition number without the correction that the model carries; None where it carries none.
        after: Condition number that each correction would leave, by its label.
        reason: Why the matrix was not measured; its numbers are NaN then.
    """

    role: Role
    kappa: float = math.nan
    sigma_max: float = math.nan
    sigma_min: float = math.nan
    stable_rank: float = math.nan
    without: float | None = None
    after: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None


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
    """

    layers: tuple[LayerNumbers, ...] = ()
    reason: str | None = None
    carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@torch.no_grad()
def measure_numbers(model: nn.Module, survey: Survey, data: Sample | None = None) -> Numbers:
    """Measure the attention layers of a model and what each of `CORRECTIONS` would make of them.

    Where weights carry a correction, a further one is not asked for: their condition numbers are those of the effective
    weights, and those without the correction stand beside them.

    Args:
        model: The model; it is given back as it was.
        survey: Its attention layers.
        data: A batch for the attention entropy; None takes what the model says of its inputs. Layers that can not be
            watched while they run are predicted.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return Numbers(reason=_WITHOUT_VALUES)
    carried = _carried(model)
    labels: Mapping[str, WeightRule] = {} if carried else CORRECTIONS
    matrices = _measure_sites(survey.sites, labels, carried=bool(carried))
    healthy = [
        site
        for site, numbers in zip(survey.sites, matrices, strict=True)
        if numbers and all(n.reason is None for n in numbers)
    ]
    softmax: dict[int, dict[str, Softmax | str]] = defaultdict(dict)
    notes: list[str] = []
    inputs = inputs_of(model, data)
    for label, rule in [(AS_IT_IS, None), *labels.items()] if healthy else []:
        try:
            with _corrected(model, rule, healthy):
                seen = measured(healthy, inputs)
                for site in healthy:
                    found = seen.get(site.name, inputs.left_out)
                    softmax[id(site)][label] = found if isinstance(found, Softmax) else _instead(site, found)
        except LitCondError as error:
            notes.append(f"attention with the correction {label} is not known: {error}")
    layers = zip(survey.sites, matrices, strict=True)
    return Numbers(
        tuple(LayerNumbers(numbers, softmax[id(site)]) for site, numbers in layers), None, carried, tuple(notes)
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


def _measure_sites(
    sites: Sequence[AttentionSite], labels: Mapping[str, WeightRule], *, carried: bool
) -> list[tuple[MatrixNumbers, ...]]:
    """Return the numbers of all matrices, by layer; a matrix that serves several layers or roles is measured once."""
    readable: dict[object, WeightView] = {}
    keys: list[list[tuple[Role, object]]] = []
    lost: dict[object, str] = {}
    for site in sites:
        keys.append([])
        for role, view in site:
            try:
                key: object = view.key
                readable.setdefault(key, view)
            except LostTargetError as error:
                key = view
                lost[key] = str(error)
            keys[-1].append((role, key))
    chunks = _chunks(readable)
    results = side_by_side(
        lambda chunk: _measure_chunk([readable[key] for key in chunk], labels, carried),
        chunks,
        [readable[chunk[0]].parameter for chunk in chunks],
    )
    measured = {
        key: numbers
        for chunk, found in zip(chunks, results, strict=True)
        for key, numbers in zip(chunk, found, strict=True)
    }
    return [
        tuple(
            MatrixNumbers(role, reason=lost[key]) if key in lost else replace(measured[key], role=role)
            for role, key in layer
        )
        for layer in keys
    ]


def _chunks(views: Mapping[object, WeightView]) -> list[list[object]]:
    """Return the keys of matrices of one shape and kind, as many together as may be copied at once."""
    alike: dict[object, list[object]] = defaultdict(list)
    for key, view in views.items():
        parameter = view.parameter
        shape = (len(view.layout.rows), view.in_features)
        alike[shape, parameter.dtype, parameter.device, view.layout.groups > 1].append(key)
    chunks = []
    for mark, keys in alike.items():
        (rows, columns), grouped = mark[0], mark[3]  # type: ignore[index]
        size = 1 if grouped else max(1, _CHUNK // max(1, rows * columns))
        chunks += [keys[i : i + size] for i in range(0, len(keys), size)]
    return chunks


def _measure_chunk(views: Sequence[WeightView], labels: Mapping[str, WeightRule], carried: bool) -> list[MatrixNumbers]:
    weights = [existing(view.module, view.tensor_name) if carried else None for view in views]
    plain = torch.stack(
        [
            view.layout.matrix(gathered(view.parameter.detach() if weight is None else weight.current_effective))
            for view, weight in zip(views, weights, strict=True)
        ]
    )
    largest, smallest, kappa = _ends(plain, _RTOL)
    stable = torch.where(largest == 0, 0.0, plain.double().square().sum(dim=(-2, -1)) / largest.square())
    after = {label: _after(rule, views, plain, largest, smallest) for label, rule in labels.items()}
    without = [
        None if weight is None else float(_ends(view.layout.matrix(gathered(weight.current_raw)), _RTOL)[2])
        for view, weight in zip(views, weights, strict=True)
    ]
    return [
        MatrixNumbers(
            "query",
            float(kappa[i]),
            float(largest[i]),
            float(smallest[i]),
            float(stable[i]),
            without[i],
            {label: float(values[i]) for label, values in after.items()},
            "it holds NaN or Inf" if math.isnan(kappa[i]) else None,
        )
        for i in range(len(views))
    ]


def _ends(matrices: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest and the smallest singular value and the condition number of matrices (..., m, n)."""
    if matrices.shape[-2] == matrices.shape[-1]:
        largest, smallest = extreme_singular_values(matrices, rtol)
    else:
        # Measured on one core: 25 ms for all singular values of 512 x 768 against 43 ms for the two ends.
        values = singular_values(matrices, _RTOL)
        largest, smallest = values[..., 0], values[..., -1]
    ends = torch.stack([largest, smallest], dim=-1)
    return largest, smallest, condition_of_spectrum(ends, matrices.shape, matrices.dtype)


def _after(rule: WeightRule, views: Sequence[WeightView], plain: Tensor, largest: Tensor, smallest: Tensor) -> Tensor:
    """Return the condition numbers that a correction would leave of matrices (count, m, n)."""
    if views[0].layout.groups > 1:
        # What a row does not see stays zero, so that C is not the one of the whole matrix.
        view, raw = views[0], gathered(views[0].parameter.detach())
        if not raw.isfinite().all():
            return torch.full_like(largest, math.nan)
        full = compute_correction(rule, [(view.layout, 1)], raw)
        return _ends(view.layout.matrix((raw.to(full.dtype) + full).to(raw.dtype)).unsqueeze(0), _RTOL_AFTER)[2]
    if rule.correction == "spectral":
        # Every singular value s becomes s + s_1.
        return torch.where(largest == 0, math.inf, 2 * largest / (largest + smallest))
    corrected = plain + identity_correction(plain, rule.scale)
    return _ends(corrected.to(plain.dtype), _RTOL_AFTER)[2]
