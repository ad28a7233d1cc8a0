"""Projection matrices in numbers: only the ends of their spectra, or all of them."""

from __future__ import annotations

from collections.abc import Collection as Roles
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_cond.functional.condition_number import condition_of_spectrum
from lit_cond.functional.extremes import extreme_singular_values
from lit_cond.measuring.collection import Collection
from lit_cond.measuring.quantities import Spectrum, spectra_of_each, statistics_of
from lit_cond.measuring.values import where_decomposed
from lit_cond.surgery.parallel import side_by_side
from lit_cond.surgery.report import weight_matrices
from lit_cond.surgery.sites import AttentionSite

__all__ = ["FROM_ENDS", "measure_weights"]

FROM_ENDS = ("sigma_max", "sigma_min", "stable_rank")
"""The statistics that do not need all singular values."""


def measure_weights(
    into: Collection,
    sites: Iterable[AttentionSite],
    roles: Roles[str],
    *,
    raw: bool,
    full: bool,
    statistics: Sequence[str],
) -> None:
    """Measure the query, key and value matrices of layers, as the forward pass reads them.

    Args:
        into: Takes the numbers.
        sites: The layers. Their sharded parameters are gathered: call this in every process.
        roles: Which matrices.
        raw: Whether to measure also what they are without their corrections.
        full: Whether to compute all singular values; else condition numbers are right to 1 %, and statistics that need
            all values are left out.
        statistics: Which other numbers of each matrix.
    """
    matrices = [m for m in weight_matrices(sites) if m.role in roles]
    for matrix, spectrum in zip(
        matrices, (spectra_of_each if full else _ends)([m.read for m in matrices]), strict=True
    ):
        role, layer = matrix.role, matrix.site.name
        into.add("cond", role, layer, spectrum.condition)
        if full:
            for name, value in statistics_of([spectrum], statistics).items():
                into.add(name, role, layer, value)
            into.spectra.setdefault(role, {}).setdefault(layer, []).append(spectrum.values)
        else:
            numbers = {"sigma_max": spectrum.values[0], "sigma_min": spectrum.values[-1]}
            numbers["stable_rank"] = (matrix.read.double().norm() / spectrum.values[0]) ** 2
            for name in statistics:
                if name in FROM_ENDS:
                    into.add(name, role, layer, float(numbers[name]))
    corrected = [m for m in matrices if raw and m.effective is not None]
    for matrix, spectrum in zip(corrected, _ends([m.raw for m in corrected]), strict=True):
        into.add("cond_raw", matrix.role, matrix.site.name, spectrum.condition)


def _ends(matrices: Sequence[Tensor]) -> list[Spectrum]:
    """Return the largest and smallest singular value of each matrix."""
    matrices = [where_decomposed(matrix) for matrix in matrices]
    result = []
    for matrix, (largest, smallest) in zip(
        matrices, side_by_side(extreme_singular_values, matrices, matrices), strict=True
    ):
        ends = torch.stack((largest, smallest)).cpu()
        result.append(Spectrum(ends, float(condition_of_spectrum(ends, matrix.shape, matrix.dtype)), 0.0))
    return result
