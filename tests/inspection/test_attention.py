"""How widely the softmax looks, against the weights and tokens."""

import math

import pytest
import torch
from torch import nn

from lit_cond import condition_, uncondition_
from lit_cond.functional import predicted_attention_entropy
from lit_cond.inspection import attention as inspected_attention
from lit_cond.inspection.numbers import AS_IT_IS, measure_numbers
from lit_cond.inspection.table import format_numbers
from lit_cond.surgery import find_attention
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.survey import survey_attention
from tests.inspection.helpers import LABELS, RULES, matrix_site, model_of, numbers_of, rows_of
from tests.tiny import HEADS, INPUTS, TOKENS


@pytest.mark.parametrize("attention", ["fused", "torch"])
def test_predicted_attention_is_that_of_the_weights_as_they_would_be_read(attention):
    model = model_of(attention)
    _, numbers = numbers_of(model)
    for label in (AS_IT_IS, *LABELS):
        if label != AS_IT_IS:
            condition_(model, RULES[label])
        for site, layer in zip(find_attention(model), numbers.layers, strict=True):
            query, key = (effective_matrix(site.matrix_view(role)).float() for role in ("query", "key"))
            expected = predicted_attention_entropy(query, key, HEADS, 64, normalized=True)
            assert layer.softmax[label].share == pytest.approx(expected, abs=0.03)
            assert layer.softmax[label].entropy == pytest.approx(layer.softmax[label].share * math.log(64))
        uncondition_(model)


def test_layers_without_a_prediction_say_why():
    torch.manual_seed(0)
    module, survey = matrix_site(torch.randn(8, 8), torch.randn(8, 8))
    layer = measure_numbers(module, survey).layers[0]
    assert layer.softmax[AS_IT_IS] == "not predicted without the number of heads"
    module, survey = matrix_site(torch.randn(8, 8), heads=2)
    lines = format_numbers(survey, measure_numbers(module, survey))
    assert "  attn: attention not predicted without exactly one query and one key matrix" in lines
    decoder = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True)
    survey = survey_attention(decoder, (torch.randn(2, 5, 16), torch.randn(2, 7, 16)))
    cross = [site.kind == "cross" for site in survey.sites]
    assert sum(cross) == 1
    layers = measure_numbers(decoder, survey).layers
    assert [s.softmax[AS_IT_IS] == "not predicted for cross attention" for s in layers] == cross


def softmax_of(model, x):
    """The share of uniform attention, by layer and head, of a tiny model: float64, from its own weights and tokens."""
    shares = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda module, args, site=site: shares.append(share_of(args[0], site)))
        for block, site in zip(model.blocks, find_attention(model), strict=True)
    ]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        model(x)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return shares


def share_of(x, site):
    operands = []
    for role in ("query", "key"):
        view = site.matrix_view(role)
        biases = [b for name, b in view.module.named_parameters(recurse=False) if name.endswith("bias")]
        rows = view.layout.rows.indices()
        tokens = x.double() @ effective_matrix(view).double().T + biases[0].double()[rows]
        operands.append(tokens.unflatten(-1, (HEADS, -1)).transpose(1, 2))
    query, key = operands
    p = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return -(p * p.log()).sum(-1).mean(dim=(0, 2)) / math.log(x.shape[1])


@pytest.mark.parametrize("attention", ["fused", "functional", "separate", "torch"])
def test_measured_attention_against_the_weights_and_tokens(attention):
    model = model_of(attention)
    model.example_input_array = torch.randn(4, TOKENS, INPUTS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, numbers = numbers_of(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for label in (AS_IT_IS, *LABELS):
        if label != AS_IT_IS:
            condition_(model, RULES[label])
        expected = softmax_of(model, model.example_input_array)
        for layer, heads in zip(numbers.layers, expected, strict=True):
            softmax = layer.softmax[label]
            assert softmax.source == "sample"
            assert softmax.share == pytest.approx(float(heads.mean()), rel=1e-3, abs=1e-6)
            assert softmax.lowest == pytest.approx(float(heads.min()), rel=1e-3, abs=1e-6)
            assert softmax.entropy == pytest.approx(softmax.share * math.log(TOKENS), rel=1e-6)
            assert 0 <= softmax.saturated <= 1
        uncondition_(model)


def test_cross_attention_is_measured_where_an_input_is_known():
    torch.manual_seed(0)
    decoder = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True)
    decoder.example_input_array = (torch.randn(2, 5, 16), torch.randn(2, 7, 16))
    survey, numbers = numbers_of(decoder)
    for site, layer in zip(survey.sites, numbers.layers, strict=True):
        tokens = 7 if site.kind == "cross" else 5
        assert layer.softmax[AS_IT_IS].source == "sample"
        assert layer.softmax[AS_IT_IS].entropy <= math.log(tokens)
        assert layer.softmax[AS_IT_IS].share == pytest.approx(layer.softmax[AS_IT_IS].entropy / math.log(tokens))


def test_layers_that_the_input_does_not_reach_are_predicted_and_said_to_be():
    model = model_of("separate", depth=2)
    model.example_input_array = torch.randn(2, TOKENS, INPUTS)
    wrapper = nn.ModuleDict({"seen": model, "unseen": model_of("separate", depth=1)})
    survey, numbers = numbers_of(wrapper)
    sources = [layer.softmax[AS_IT_IS].source for layer in numbers.layers]
    assert sources == ["sample", "sample", "predicted"]
    text = "\n".join(format_numbers(survey, numbers))
    assert "sample: measured on the model's own sample input; predicted: predicted for" in text
    assert [row[-1] for row in rows_of(text, "attention entropy")] == ["sample", "predicted"]


def test_a_layer_that_can_not_be_watched_is_predicted_with_the_reason():
    model = model_of("separate", depth=2)
    model.example_input_array = torch.randn(2, TOKENS, INPUTS)
    survey = survey_attention(model)
    model.blocks[1].attn.forward = lambda x: x  # the softmax is gone
    numbers = measure_numbers(model, survey)
    assert [layer.softmax[AS_IT_IS].source for layer in numbers.layers] == ["sample", "predicted"]
    text = "\n".join(format_numbers(survey, numbers))
    assert "  blocks.1.attn: attention not measured: " in text


def test_a_large_sample_input_is_not_run_and_the_attention_predicted(monkeypatch):
    monkeypatch.setattr(inspected_attention, "_LARGEST_SAMPLE", 4 * TOKENS * INPUTS - 1)
    model = model_of("separate", depth=1)
    for samples, source in ((3, "sample"), (4, "predicted")):
        model.example_input_array = torch.randn(samples, TOKENS, INPUTS)
        survey, numbers = numbers_of(model)
        assert numbers.layers[0].softmax[AS_IT_IS].source == source
    text = "\n".join(format_numbers(survey, numbers))
    assert f"blocks.0.attn: attention not measured: a sample input of {4 * TOKENS * INPUTS} numbers is large" in text
    shown = measure_numbers(model, survey, Sample((model.example_input_array,)))
    assert shown.layers[0].softmax[AS_IT_IS].source == "data"


def test_attention_without_a_choice_or_without_numbers_says_so():
    model = model_of("separate", depth=1)
    model.example_input_array = torch.randn(2, 1, INPUTS)
    softmax = numbers_of(model)[1].layers[0].softmax[AS_IT_IS]
    assert (softmax.source, softmax.reason) == ("predicted", "not measured: no query sees more than one key")
    model.example_input_array = torch.full((2, TOKENS, INPUTS), math.inf)
    softmax = numbers_of(model)[1].layers[0].softmax[AS_IT_IS]
    assert (softmax.source, softmax.reason) == ("predicted", "not measured: its scores are not finite")
