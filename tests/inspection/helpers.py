"""Small models and references that the tests of the numbers share."""

import json

import numpy as np
import torch
from torch import nn

from lit_cond import WeightRule
from lit_cond.inspection.numbers import measure_numbers
from lit_cond.surgery import MatrixLayout, RowSet, WeightView
from lit_cond.surgery.sites import AttentionSite
from lit_cond.surgery.survey import Survey, survey_attention
from tests.tiny import TinyTransformer

LABELS = ["spectral", "identity 1", "identity 10"]


RULES = {
    "spectral": WeightRule(correction="spectral"),
    "identity 1": WeightRule(correction="identity", scale=1.0),
    "identity 10": WeightRule(correction="identity", scale=10.0),
}


def model_of(attention="separate", depth=2, seed=0):
    torch.manual_seed(seed)
    return TinyTransformer(attention, depth=depth)


def numbers_of(model):
    survey = survey_attention(model)
    return survey, measure_numbers(model, survey)


def matrix_site(*matrices, name="attn", heads=None, roles=("query", "key", "value")):
    """A layer whose matrices are given, each in a Linear of its own."""
    module = nn.Module()
    views = {}
    for role, matrix in zip(roles, matrices, strict=False):
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
        linear.weight = nn.Parameter(matrix.clone())
        setattr(module, role, linear)
        layout = MatrixLayout(RowSet.span(0, matrix.shape[0]))
        views[role] = (WeightView(linear, "weight", layout, f"{name}.{role}"),)
    return module, Survey(sites=[AttentionSite(name, module, views, heads, heads)])


def reference(matrix):
    values = np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)
    return values[0] / values[-1], values[0], values[-1], (values**2).sum() / values[0] ** 2


def strict(text):
    """Read JSON as a parser would that knows no Infinity and no NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows_of(text, title):
    """The cells of the table that follows a title."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    start = next(i for i in range(start, len(lines)) if lines[i].startswith("#"))
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return [line.split() for line in lines[start + 1 : end]]
