"""Measuring the query, key and value matrices of a model, with and without the corrections it carries."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_cond.errors import LostTargetError
from lit_cond.functional.condition_number import condition_of_spectrum, singular_values
from lit_cond.surgery.apply import existing
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.selection import Pattern
from lit_cond.surgery.sites import AttentionSite, Role, WeightView
from lit_cond.surgery.weights import gathered

__all__ = [
    "WeightMatrix",
    "WeightReport",
    "format_table",
    "is_plain",
    "measure_weights",
    "spectra",
    "weight_matrices",
    "well_conditioned",
]

# Random n x n matrices have a condition number of about 2.6 n; below this factor of n a square matrix was not left to
# chance. Rectangular ones are well conditioned by nature and say nothing.
_SUSPICIOUS = 0.15
# Entries of matrices that are stacked: copies in float64 that stay in the cache, and no second model in memory.
_CHUNK = 2**19


@dataclass(frozen=True, eq=False)
class WeightReport:
    """One projection matrix in numbers.

    Args:
        name: Name of the attention layer.
        role: Which matrix.
        shape: (out_features, in_features).
        heads: Heads in the matrix, None if the module does not say.
        stored: Parameter and rows where the matrix stands.
        raw: Condition number without the corrections, dimensionless, >= 1.
        effective: Condition number as the forward pass reads it.
        spectrum: Singular values as the forward pass reads it, descending, float64.
        corrections: One phrase for each correction that it carries.
    """

    name: str
    role: Role
    shape: tuple[int, int]
    heads: int | None
    stored: str
    raw: float
    effective: float
    spectrum: Tensor
    corrections: tuple[str, ...]


def spectra(matrices: Sequence[Tensor], rtol: float = 1e-6) -> list[tuple[float, Tensor]]:
    """Return the condition number and the singular values of each matrix, small ones of one shape in one go.

    Args:
        matrices: Matrices of any shape.
        rtol: Relative error that does no harm, see `singular_values`.
    """
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[tuple(matrix.shape)].append(index)
    result: dict[int, tuple[float, Tensor]] = {}
    for shape, indices in _chunks(by_shape):
        stacked = torch.stack([matrices[i] for i in indices])
        values = singular_values(stacked, rtol)
        numbers = condition_of_spectrum(values, shape, stacked.dtype).tolist()
        result.update(zip(indices, zip(numbers, values, strict=True), strict=True))
    return [result[index] for index in range(len(matrices))]


def _chunks(by_shape: dict[tuple[int, ...], list[int]]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield a shape and as many of its matrices as may be copied at once."""
    for shape, indices in by_shape.items():
        size = max(1, _CHUNK // max(1, math.prod(shape)))
        yield from ((shape, indices[i : i + size]) for i in range(0, len(indices), size))


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """One projection matrix of an attention layer.

    Args:
        site: The layer.
        role: Which matrix.
        view: Where it stands.
        raw: Without the corrections (out_features, in_features).
        effective: As the forward pass reads it, where it carries a correction.
        corrections: One phrase for each correction.
    """

    site: AttentionSite
    role: Role
    view: WeightView
    raw: Tensor
    effective: Tensor | None
    corrections: tuple[str, ...]

    @property
    def read(self) -> Tensor:
        """The matrix as the forward pass reads it."""
        return self.raw if self.effective is None else self.effective


@torch.no_grad()
def weight_matrices(sites: Iterable[AttentionSite]) -> list[WeightMatrix]:
    """Return the query, key and value matrices of layers, whole ones where the parameters are sharded."""
    views = [(site, role, view) for site in sites for role, view in site]
    weights = [existing(view.module, view.tensor_name) for _, _, view in views]
    # The matrices of a fused weight share what is computed of it.
    effective = {id(weight): weight.current_effective for weight in weights if weight is not None}
    result = []
    for (site, role, view), weight in zip(views, weights, strict=True):
        parameter = view.as_read().detach() if weight is None else weight.current_raw
        terms = () if weight is None else weight.terms
        rows = view.layout.rows.indices()
        corrected = weight is not None and any(torch.isin(rows, t.rows).any() for t in terms)
        result.append(
            WeightMatrix(
                site,
                role,
                view,
                view.layout.matrix(gathered(parameter)),
                view.layout.matrix(gathered(effective[id(weight)])) if corrected else None,
                tuple(f"{t.rule.correction} x {float(t.strength):g}" for t in terms if torch.isin(rows, t.rows).all()),
            )
        )
    return result


def measure_weights(
    model: nn.Module,
    include: Pattern = None,
    exclude: Pattern = None,
    *,
    sites: Iterable[AttentionSite] | None = None,
) -> list[WeightReport]:
    """Return the condition numbers of the query, key and value matrices of a model.

    Args:
        model: Any module that holds attention, conditioned or not.
        include: Which layers, in the grammar of `find_attention`.
        exclude: Which layers to leave out.
        sites: The layers, when they are known already.

    Raises:
        NoMatchingTargetError: If there is no such layer.
        UnknownAttentionError: If a layer is stored in a way that no family knows.
    """
    matrices = weight_matrices(find_attention(model, include, exclude) if sites is None else sites)
    before = spectra([m.raw for m in matrices])
    corrected = [i for i, m in enumerate(matrices) if m.effective is not None]
    # The table shows four digits, and a corrected matrix is cheaper to measure to five.
    measured = dict(enumerate(before)) | dict(
        zip(corrected, spectra([matrices[i].read for i in corrected], 1e-5), strict=True)
    )
    return [
        WeightReport(
            name=m.site.name,
            role=m.role,
            shape=(len(m.view.layout.rows), m.view.in_features),
            heads=m.site.heads(m.role),
            stored=f"{m.view.owner_name}.{m.view.tensor_name}{m.view.layout.rows}",
            raw=before[i][0],
            effective=measured[i][0],
            spectrum=measured[i][1],
            corrections=m.corrections,
        )
        for i, m in enumerate(matrices)
    ]


def well_conditioned(reports: Iterable[WeightReport]) -> float | None:
    """Return the median raw condition number if square-like matrices are too well conditioned for chance, else None.

    That is how a checkpoint looks that was trained with a correction and loaded as a plain one.
    """
    square = [(r.raw, min(r.shape)) for r in reports if min(r.shape) >= 16 and 2 * min(r.shape) > max(r.shape)]
    if not square:
        return None
    ratio = statistics.median(raw / size for raw, size in square)
    return statistics.median(raw for raw, _ in square) if ratio < _SUSPICIOUS else None


def is_plain(site: AttentionSite) -> bool:
    """Whether all weights of a layer are floating-point parameters, so that they can be measured."""
    try:
        return all(view.parameter.is_floating_point() for _, view in site)
    except LostTargetError:
        return False


def format_table(reports: Sequence[WeightReport], reasons: Mapping[str, str] | None = None) -> str:
    """Return the reports as a plain text table.

    Args:
        reports: The reports.
        reasons: Why matrices of a layer without a correction were left alone, by the layer's name.
    """
    reasons = reasons or {}
    header = ("layer", "matrix", "shape", "heads", "stored in", "kappa W", "kappa W+C", "correction")
    rows = [
        (
            r.name,
            r.role,
            f"{r.shape[0]}x{r.shape[1]}",
            "?" if r.heads is None else str(r.heads),
            r.stored,
            f"{r.raw:.4g}",
            f"{r.effective:.4g}" if r.corrections else "-",
            ", ".join(r.corrections) or "left alone" + (f": {reasons[r.name]}" if r.name in reasons else ""),
        )
        for r in reports
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
