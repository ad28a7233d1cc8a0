"""The numbers of `inspect` as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lit_cond.inspection.attention import Softmax
from lit_cond.inspection.numbers import Numbers
from lit_cond.inspection.table import saturation_warnings
from lit_cond.inspection.tokens import TokenNumbers
from lit_cond.inspection.weights import CORRECTIONS, MatrixNumbers
from lit_cond.surgery.survey import Survey

__all__ = ["add_numbers"]


def add_numbers(content: dict[str, Any], survey: Survey, numbers: Numbers) -> dict[str, Any]:
    """Return the survey as plain values with the numbers in their places.

    Args:
        content: What `survey_as_dict` returned. Each matrix gets "numbers", each layer "attention", both None where
            there are none; "numbers" at the top says why.
        survey: The attention layers.
        numbers: Their numbers. In JSON infinity is the text "inf" and what could not be measured is null.
    """
    layers = []
    for index, layer in enumerate(content["layers"]):
        known = numbers.layers[index] if numbers.layers else None
        matrices = [
            {**matrix, "numbers": None if known is None else _matrix_as_dict(known.matrices[place])}
            for place, matrix in enumerate(layer["matrices"])
        ]
        attention = None if known is None else _softmax_as_dict(known.softmax)
        layers.append({**layer, "matrices": matrices, "attention": attention})
    sites = content["token_sites"]
    if numbers.tokens:
        sites = [{**s, "numbers": _tokens_as_dict(t)} for s, t in zip(sites, numbers.tokens, strict=True)]
    top = {
        "reason": numbers.reason,
        "corrections": {
            label: {"correction": rule.correction, "scale": rule.scale, "strength": rule.strength}
            for label, rule in CORRECTIONS.items()
        },
        "carried": list(numbers.carried),
        "conditioned": _plain(numbers.conditioned),
        "warnings": saturation_warnings(survey, numbers) if numbers.layers else [],
        "notes": list(numbers.notes),
    }
    return {**content, "layers": layers, "token_sites": sites, "numbers": top}


def _tokens_as_dict(numbers: TokenNumbers) -> dict[str, Any]:
    return {
        "condition_number": _plain(numbers.kappa),
        "without_correction": _plain(numbers.without),
        "condition_number_after": {label: _plain(value) for label, value in numbers.after.items()},
        "refused": dict(numbers.refused),
        "samples": numbers.samples,
        "reason": numbers.reason,
    }


def _matrix_as_dict(numbers: MatrixNumbers) -> dict[str, Any]:
    return {
        "condition_number": _plain(numbers.kappa),
        "without_correction": _plain(numbers.without),
        "sigma_max": _plain(numbers.sigma_max),
        "sigma_min": _plain(numbers.sigma_min),
        "stable_rank": _plain(numbers.stable_rank),
        "condition_number_after": {label: _plain(value) for label, value in numbers.after.items()},
        "reason": numbers.reason,
        "fixed": numbers.fixed,
    }


def _softmax_as_dict(softmax: Mapping[str, Softmax | str]) -> dict[str, Any]:
    return {
        label: {"reason": value}
        if isinstance(value, str)
        else {**{key: _plain(v) for key, v in asdict(value).items()}, "collapsed": value.collapsed}
        for label, value in softmax.items()
    }


def _plain(value: Any) -> Any:
    """Return a number that strict JSON can hold."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "inf"
