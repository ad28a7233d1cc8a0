"""Condition numbers, spectra and entropies of attention that was observed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_cond.errors import ConfigurationError
from lit_cond.functional.attention import row_entropy, saturated_share
from lit_cond.functional.condition_number import condition_of_spectrum, singular_tolerance, singular_values
from lit_cond.functional.jacobian import JacobianSpectrum
from lit_cond.functional.jacobian_bound import JacobianBound, jacobian_bounds
from lit_cond.functional.jacobian_heads import attention_jacobian_spectra
from lit_cond.functional.spectrum import effective_rank, numerical_rank, stable_rank
from lit_cond.measuring.head_inputs import HeadInputs, changed_softmax, head_inputs
from lit_cond.measuring.heads import per_query_head
from lit_cond.measuring.observe import ObservedAttention, ObservedSample
from lit_cond.measuring.values import where_decomposed
from lit_cond.surgery.apply import existing
from lit_cond.surgery.parallel import side_by_side
from lit_cond.surgery.report import spectra
from lit_cond.surgery.sites import ROLES, AttentionSite, Role, WeightView

__all__ = [
    "OBSERVED_FLOOR",
    "STATISTICS",
    "Spectrum",
    "attention_spectra",
    "bounds",
    "entropy_numbers",
    "finite_mean",
    "jacobian_spectra",
    "score_spectra",
    "spectra_of",
    "spectra_of_each",
    "statistics_of",
]


# Softmax matrices, outputs and Jacobians are computed here in float64 from float32 operands, and their small singular
# values come from small differences and products that are as right, in parts of themselves, as the operands: between a
# float32 and a float64 run of one ViT condition numbers up to 5e11 differ by 5e-4. A softmax that the model itself took
# in float32 adds its own rounding, a few percent at 3e8.
OBSERVED_FLOOR = 1e-9


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The singular values of one matrix.

    Args:
        values: Singular values, descending, float64 (k,).
        condition: Condition number, dimensionless, >= 1; inf for a singular matrix, NaN for one with a NaN or infinity.
        rtol: Ratio of singular values up to which they count as zero.
        head: Which head of the layer the matrix belongs to.
    """

    values: Tensor
    condition: float
    rtol: float
    head: int = 0


def spectra_of(matrices: Tensor, dtype: torch.dtype, floor: float = torch.finfo(torch.float32).eps) -> list[Spectrum]:
    """Return the spectra of matrices (heads, m, n).

    Args:
        matrices: One for each head.
        dtype: Type of the numbers that they were computed from.
        floor: Ratio of singular values up to which a matrix counts as singular where that type is narrower than
            float64.
    """
    values = singular_values(where_decomposed(matrices))
    rtol = max(max(matrices.shape[-2:]) * torch.finfo(torch.float64).eps, floor if dtype != torch.float64 else 0.0)
    conditions = condition_of_spectrum(values, matrices.shape, dtype, rtol).tolist()
    return [Spectrum(v, c, rtol, head) for head, (v, c) in enumerate(zip(values.cpu(), conditions, strict=True))]


def spectra_of_each(matrices: Sequence[Tensor]) -> list[Spectrum]:
    """Return the spectra of matrices of any shape, small ones of one shape computed together."""
    found = spectra([where_decomposed(matrix) for matrix in matrices])
    return [
        Spectrum(values.cpu(), condition, singular_tolerance(matrix.shape, matrix.dtype))
        for matrix, (condition, values) in zip(matrices, found, strict=True)
    ]


def score_spectra(sample: ObservedSample, max_queries: int) -> list[Spectrum]:
    """Return the spectrum of the softmax matrix (n, m) of each head, or of some of its rows where it has more.

    By interlacing the condition number of some rows is a lower bound of that of all, unless there are more queries than
    keys.
    """
    return spectra_of(sample.rows(sample.spread(max_queries)), sample.query.dtype, OBSERVED_FLOOR)


def attention_spectra(observed: ObservedAttention, sample: ObservedSample) -> list[Spectrum]:
    """Return the spectrum of what each head returns (n, v), before the output projection.

    Raises:
        ConfigurationError: If that is not the product of the softmax and the values (talking heads, gates).
    """
    if observed.attended.after is not None:
        raise ConfigurationError(f"'{observed.site.name}': {changed_softmax(observed.attended.after)}")
    return spectra_of(sample.output, sample.query.dtype, OBSERVED_FLOOR)


def jacobian_spectra(observed: ObservedAttention, sample: ObservedSample, max_rows: int) -> list[Spectrum]:
    """Return the spectrum of the Jacobian of each head's output by its query, key and value weights.

    Of a head with more than `max_rows` outputs (tokens times channels) some tokens are measured: the condition number
    is then a lower bound.

    Raises:
        ConfigurationError: If the closed form does not hold in this layer.
    """
    inputs = _inputs(observed, sample)
    most = max(max_rows, sample.value.shape[-1])
    rows = sample.spread(most // sample.value.shape[-1])
    probabilities = sample.rows(rows)
    x, y, z = inputs.tokens["query"][rows], inputs.tokens["key"], inputs.tokens["value"]
    query_maps, key_maps, value_maps = (inputs.maps.get(role) for role in ROLES)
    query_maps = None if query_maps is None else query_maps[:, rows]
    operands = [where_decomposed(t).double() for t in (sample.query[:, rows], sample.key, sample.value, probabilities)]
    scale = 1.0 if observed.attended.scale is None else observed.attended.scale

    def of_heads(heads: slice) -> list[JacobianSpectrum]:
        query, key, value, p = (t[heads] for t in operands)
        maps = [None if t is None else t[heads] for t in (query_maps, key_maps, value_maps)]
        return attention_jacobian_spectra(
            x, y, z, query, key, value, p, scale, max_rows=most,
            query_maps=maps[0], key_maps=maps[1], value_maps=maps[2],
        )  # fmt: skip

    count = len(probabilities)
    size = -(-count // min(count, torch.get_num_threads()))
    parts = side_by_side(of_heads, [slice(i, i + size) for i in range(0, count, size)], operands)
    result = []
    for head, spectrum in enumerate(s for part in parts for s in part):
        rtol = max(spectrum.rtol, OBSERVED_FLOOR if sample.query.dtype != torch.float64 else 0.0)
        shape = (spectrum.rows, spectrum.parameters)
        condition = float(condition_of_spectrum(spectrum.values, shape, torch.float64, rtol))
        result.append(Spectrum(spectrum.values.cpu(), condition, rtol, head))
    return result


def bounds(observed: ObservedAttention, sample: ObservedSample, max_queries: int) -> list[JacobianBound]:
    """Return Theorem 3.4's bound on the condition number of each head's Jacobian, with its factors.

    Where there are more queries, those of some rows of the softmax.

    Raises:
        ConfigurationError: If the layer is none that the theorem speaks of.
    """
    inputs = _inputs(observed, sample)
    site = observed.site
    tokens = inputs.tokens
    if tokens["query"].shape != tokens["value"].shape or site.kind == "cross":
        raise ConfigurationError(f"'{site.name}': the theorem is about self-attention")
    if inputs.maps:
        raise ConfigurationError(f"'{site.name}': the theorem is about heads without rotary positions or normalisation")
    query, key, value = (_head_weights(site, role, sample.query.shape[0]) for role in ROLES)
    # One matrix X: what the values are made of, in the precision in which the model computed it.
    probabilities = sample.rows(sample.spread(max_queries))
    given = (tokens["value"].to(sample.value.dtype), query, key, value, probabilities)
    return jacobian_bounds(*(where_decomposed(t) for t in given))


def _inputs(observed: ObservedAttention, sample: ObservedSample) -> HeadInputs:
    # The Jacobian and its bound share them, and maps are costly.
    if sample.index not in observed.inputs:
        observed.inputs[sample.index] = head_inputs(observed, sample)
    found: HeadInputs | str = observed.inputs[sample.index]
    if isinstance(found, str):
        raise ConfigurationError(f"'{observed.site.name}': {found}")
    return found


def _head_weights(site: AttentionSite, role: Role, heads: int) -> Tensor:
    """Return the weight of a role as the forward pass reads it, one matrix for each query head (heads, d, width)."""
    view = site.matrix_view(role)
    if view is None:
        raise ConfigurationError(f"'{site.name}': its {role} has no one weight")
    matrix = view.layout.matrix(_effective(view, site))
    split = matrix.unflatten(0, (site.heads(role) or heads, -1))  # type: ignore[no-untyped-call]
    return per_query_head(split.unsqueeze(0), heads)[0]


def _effective(view: WeightView, site: AttentionSite) -> Tensor:
    weight = existing(view.module, view.tensor_name)
    read = view.as_read()
    if isinstance(read, DTensor):
        raise ConfigurationError(f"'{site.name}': its weights are sharded while the forward pass runs")
    return read.detach() if weight is None else weight.current_effective


def entropy_numbers(sample: ObservedSample, max_queries: int = 256) -> dict[str, Tensor]:
    """Return how concentrated attention is, head by head; queries that can see one key only have no choice.

    Args:
        sample: The sample.
        max_queries: How many queries to look at, evenly spread.

    Returns:
        `entropy`: mean entropy of a query's row, in nats (heads,). `entropy_share`: the same divided by the logarithm
        of how many keys the query may see, so that uniform attention has 1. `saturated`: share of queries whose largest
        probability is at least 0.99. NaN where no query has a choice.
    """
    chosen = sample.spread(max_queries)
    probabilities, seen = sample.rows(chosen), sample.seen[chosen]
    choice = seen >= 2
    rows = row_entropy(probabilities[:, choice])
    return {
        "entropy": rows.mean(dim=-1),
        "entropy_share": (rows / seen[choice].double().log()).mean(dim=-1),
        "saturated": saturated_share(probabilities, visible=seen),
    }


STATISTICS: dict[str, Callable[[Spectrum], float]] = {
    "sigma_max": lambda s: float(s.values[0]) if len(s.values) else math.nan,
    "sigma_min": lambda s: float(s.values[-1]) if len(s.values) else math.nan,
    "stable_rank": lambda s: float(stable_rank(s.values)),
    "effective_rank": lambda s: float(effective_rank(s.values)),
    "numerical_rank": lambda s: float(numerical_rank(s.values, s.values.shape * 2, torch.float64, s.rtol)),
}


def statistics_of(spectra: Iterable[Spectrum], names: Iterable[str]) -> dict[str, float]:
    """Return statistics of matrices, by name of `STATISTICS`, each the mean over those that have a finite one."""
    kept = list(spectra)
    return {name: finite_mean(STATISTICS[name](s) for s in kept) for name in names}


def finite_mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; without one inf if there is an infinite value, else NaN."""
    kept = list(values)
    finite = [v for v in kept if math.isfinite(v)]
    if finite:
        return sum(finite) / len(finite)
    return math.inf if any(v == math.inf for v in kept) else math.nan
