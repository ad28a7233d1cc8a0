"""Condition numbers of the tokens that enter, against numpy."""

import numpy as np
import pytest
import torch

from lit_cond import TokenRule, condition_
from lit_cond.inspection.numbers import measure_numbers
from lit_cond.inspection.table import format_numbers
from lit_cond.surgery import find_token_sites
from lit_cond.surgery.survey import survey_attention
from tests.inspection.helpers import model_of
from tests.tiny import INPUTS, TOKENS, TinyTransformer


class Scaled(TinyTransformer):
    """Tokens on very different scales."""

    def forward(self, x):
        return super().forward(x * torch.logspace(0, -4, INPUTS))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_against_numpy(seed):
    torch.manual_seed(seed)
    model = Scaled("separate")
    model.example_input_array = torch.randn(3, TOKENS, INPUTS)
    survey = survey_attention(model)
    sites = find_token_sites(model)
    (found,) = measure_numbers(model, survey, token_sites=sites).tokens
    with torch.no_grad():
        entered = model.embed(model.example_input_array * torch.logspace(0, -4, INPUTS)).double().numpy()
    assert (found.name, found.samples, found.reason, found.without) == ("blocks.0", 3, None, None)
    assert found.kappa == pytest.approx(np.mean([np.linalg.cond(x) for x in entered]), rel=1e-3)
    corrected = []
    for x in entered:
        u, s, vh = np.linalg.svd(x, full_matrices=False)
        corrected.append(x + s[0] * u @ vh)
    assert found.after["exact"] == pytest.approx(np.mean([np.linalg.cond(x) for x in corrected]), rel=1e-3)
    identity = [np.linalg.cond(x + np.eye(*x.shape)) for x in entered]
    assert found.after["identity 1"] == pytest.approx(np.mean(identity), rel=1e-3)


def test_tokens_that_are_corrected_stand_beside_the_raw_ones():
    model = model_of("separate")
    model.example_input_array = torch.randn(3, TOKENS, INPUTS)
    plain = measure_numbers(model, survey_attention(model), token_sites=find_token_sites(model)).tokens[0]
    condition_(model, TokenRule())
    survey = survey_attention(model)
    numbers = measure_numbers(model, survey, token_sites=find_token_sites(model))
    assert numbers.tokens[0].without == pytest.approx(plain.kappa, rel=1e-4)
    assert numbers.tokens[0].kappa == pytest.approx(plain.after["exact"], rel=1e-4)
    assert numbers.tokens[0].after == {}
    assert "corrected and without the correction" in "\n".join(format_numbers(survey, numbers))


def test_tokens_without_an_input_say_so():
    model = model_of("separate")
    survey = survey_attention(model)
    numbers = measure_numbers(model, survey, token_sites=find_token_sites(model))
    assert numbers.tokens[0].reason == "not measured: no input reaches it"
    assert "  blocks.0: tokens not measured: no input reaches it" in format_numbers(survey, numbers)
