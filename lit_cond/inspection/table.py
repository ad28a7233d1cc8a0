"""The numbers of `inspect` as lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lit_cond.inspection.attention import COLLAPSED, Softmax
from lit_cond.inspection.numbers import AS_IT_IS, LayerNumbers, Numbers
from lit_cond.inspection.tokens import TOKEN_CORRECTIONS
from lit_cond.inspection.weights import CORRECTIONS, MatrixNumbers
from lit_cond.surgery.folding import fold, joined_name, ranges
from lit_cond.surgery.survey import Survey
from lit_cond.surgery.table import aligned, layer_groups, survey_rows

__all__ = ["format_numbers", "saturation_warnings"]

_CONDITIONED = (
    "square matrices are better conditioned than random ones (median {:.3g}), as the effective weights of a "
    "conditioned run are: SpectralConditioning would refuse them"
)
_SOURCES = {
    "predicted": "predicted for LayerNorm'd Gaussian tokens, without biases, positions and masks",
    "sample": "measured on the model's own sample input",
    "data": "measured on --data",
}


def format_numbers(survey: Survey, numbers: Numbers, *, full: bool = False) -> list[str]:
    """Return the numbers as lines: the weights, the attention, warnings, notes.

    Args:
        survey: The attention layers.
        numbers: Their numbers.
        full: Whether each layer gets rows of its own; else layers that stand in one row show ranges.
    """
    if not survey.sites:
        return []
    if numbers.reason is not None:
        return [f"no condition numbers: {numbers.reason}"]
    groups = layer_groups(survey_rows(survey), full)
    names = [joined_name([survey.sites[i].name for i in group]) or "the model itself" for group in groups]
    lines = [
        *_weight_lines(groups, names, numbers),
        *_token_lines(numbers),
        *_softmax_lines(groups, names, numbers),
        *_block("", saturation_warnings(survey, numbers)),
        *_block("not measured, or not possible", [*_reasons(survey, numbers), *numbers.notes]),
    ]
    return lines[1:]


def _block(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["", title, *(f"  {line}" for line in lines)] if title else ["", *lines]


def _weight_lines(groups: Sequence[Sequence[int]], names: Sequence[str], numbers: Numbers) -> list[str]:
    labels = [] if numbers.carried else list(CORRECTIONS)
    columns: list[tuple[str, Callable[[MatrixNumbers], float | None]]] = [("kappa", lambda n: n.kappa)]
    if numbers.carried:
        columns.append(("kappa without", lambda n: n.without))
    columns += [("sigma max", lambda n: n.sigma_max), ("stable rank", lambda n: n.stable_rank)]
    columns += [(label, _after(label)) for label in labels]
    cells = [["#", "layer", "matrix", *(title for title, _ in columns)]]
    for group, name in zip(groups, names, strict=True):
        for place, first in enumerate(numbers.layers[group[0]].matrices):
            same = [numbers.layers[i].matrices[place] for i in group]
            cells.append(
                [
                    *((ranges(group), name) if place == 0 else ("", "")),
                    first.role,
                    *(_span([value for n in same if (value := read(n)) is not None]) for _, read in columns),
                ]
            )
    if numbers.carried:
        title = [
            f"the weights carry a correction already ({'; '.join(numbers.carried)}): kappa is that of the effective "
            "weights, W + C, as the forward pass reads them; without it, of W alone",
        ]
    else:
        title = ["condition numbers of the weights (largest over smallest singular value), and after each correction"]
        if numbers.conditioned is not None:
            title.append(_CONDITIONED.format(numbers.conditioned))
    return ["", *title, "", *aligned(cells)]


def _after(label: str) -> Callable[[MatrixNumbers], float | None]:
    return lambda numbers: numbers.after.get(label)


def _token_lines(numbers: Numbers) -> list[str]:
    known = [tokens for tokens in numbers.tokens if tokens.reason is None]
    if not known:
        return []
    carried = any(tokens.without is not None for tokens in known)
    header = ["tokens that enter", "kappa", *(["kappa without"] if carried else TOKEN_CORRECTIONS)]
    cells = [header]
    for tokens in known:
        others = [tokens.without] if carried else [tokens.after.get(label) for label in TOKEN_CORRECTIONS]
        shown = [_span([tokens.kappa]), *("-" if value is None else _span([value]) for value in others)]
        cells.append([tokens.name or "the model itself", *shown])
    title = "condition numbers of the tokens, mean over samples" + (
        ", corrected and without the correction" if carried else ", and after each correction"
    )
    return ["", title, "", *aligned(cells)]


def _softmax_lines(groups: Sequence[Sequence[int]], names: Sequence[str], numbers: Numbers) -> list[str]:
    known = [
        (group, name, [numbers.layers[i] for i in group])
        for group, name in zip(groups, names, strict=True)
        if any(isinstance(s, Softmax) for i in group for s in numbers.layers[i].softmax.values())
    ]
    if not known:
        return []
    labels = list(dict.fromkeys(label for _, _, layers in known for layer in layers for label in layer.softmax))
    sources = list(dict.fromkeys(s.source for _, _, layers in known for s in _softmaxes(layers)))
    cells = [["#", "layer", *labels, *(["of"] if len(sources) > 1 else [])]]
    for group, name, layers in known:
        row = [ranges(group), name]
        for label in labels:
            found = [s for layer in layers if isinstance(s := layer.softmax.get(label), Softmax)]
            row.append(_span([s.share for s in found], _share) + (" !" if any(s.collapsed for s in found) else ""))
        if len(sources) > 1:
            row.append(", ".join(dict.fromkeys(s.source for s in _softmaxes(layers))))
        cells.append(row)
    title = "attention entropy as a share of uniform attention (1: looks at all tokens alike, 0: at a single one)"
    how = "; ".join(f"{s}: {_SOURCES[s]}" for s in sources) if len(sources) > 1 else _SOURCES[sources[0]]
    return ["", title, how, "", *aligned(cells)]


def _softmaxes(layers: Sequence[LayerNumbers]) -> list[Softmax]:
    return [s for layer in layers for s in layer.softmax.values() if isinstance(s, Softmax)]


def saturation_warnings(survey: Survey, numbers: Numbers) -> list[str]:
    """Return one line for each state of the model in which the softmax of some layer hardly looks beyond one token.

    Args:
        survey: The attention layers.
        numbers: Their numbers.
    """
    lines = []
    for label in (AS_IT_IS, *CORRECTIONS):
        found = [
            (softmax, site.name)
            for site, layer in zip(survey.sites, numbers.layers, strict=True)
            if isinstance(softmax := layer.softmax.get(label), Softmax)
        ]
        bad = [pair for pair in found if pair[0].collapsed]
        if not bad:
            continue
        worst, name = min(bad, key=lambda pair: pair[0].share)
        how = "as the model is the softmax is" if label == AS_IT_IS else f"with {label} the softmax would be"
        advice = "" if label == AS_IT_IS else "; lower `scale` or `strength`, or ramp it up with StrengthSchedule"
        lines.append(
            f"warning: {how} saturated: attention entropy {worst.share:.2f} of uniform in "
            f"'{name}', below {COLLAPSED:g} in {len(bad)} of {len(found)} layers{advice}"
        )
    return lines


def _reasons(survey: Survey, numbers: Numbers) -> list[str]:
    """Return why matrices and softmaxes have no numbers, equal reasons of layers that are alike in one line."""
    reasons = []
    for site, layer in zip(survey.sites, numbers.layers, strict=True):
        reasons += [(f"{n.role}: {n.reason}", site.name) for n in layer.matrices if n.reason is not None]
        fixed = dict.fromkeys(n.fixed for n in layer.matrices if n.fixed is not None)
        reasons += [(f"no correction: {why}", site.name) for why in fixed]
        texts = [s if isinstance(s, str) else s.reason for s in layer.softmax.values()]
        reasons += [(f"attention {text}", site.name) for text in dict.fromkeys(texts) if text is not None]
    for tokens in numbers.tokens:
        texts = [tokens.reason, *(f"no {label} correction: {why}" for label, why in tokens.refused.items())]
        reasons += [(f"tokens {text}", tokens.name) for text in texts if text is not None]
    return [
        f"{joined_name([reasons[i][1] for i in group]) or 'the model itself'}: {reasons[group[0]][0]}"
        for group in fold(reasons)
    ]


def _span(values: Sequence[float], write: Callable[[float], str] | None = None) -> str:
    """Return the smallest and the largest of some numbers as text, one where they look alike; NaN is left out."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return "-"
    low, high = ((write or _number)(value) for value in (known[0], known[-1]))
    return low if low == high else f"{low}..{high}"


def _number(value: float) -> str:
    """Return a positive number in three digits, in four with a comma from a thousand on: 1.99, 250, 15,260, 1.5e+07."""
    if not math.isfinite(value) or value < 1000 or value >= 1e6:
        return f"{value:.3g}"
    return f"{float(f'{value:.4g}'):,.0f}"


def _share(value: float) -> str:
    return f"{value:.2f}"
