"""A whole model in numbers: harmless, complete, with reasons where something is missing."""

import math

import pytest
import torch
from torch import nn

from lit_cond import WeightRule, condition_
from lit_cond.inspection.as_json import add_numbers
from lit_cond.inspection.numbers import AS_IT_IS
from lit_cond.inspection.table import format_numbers, saturation_warnings
from lit_cond.surgery.table import survey_as_dict
from tests.inspection.helpers import LABELS, model_of, numbers_of


def test_the_model_stays_as_it_was():
    model = model_of("fused")
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    generator = torch.get_rng_state()
    numbers_of(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    assert not any("_lit_cond_weights" in module.__dict__ for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_what_is_not_finite_is_named_and_the_rest_is_measured():
    model = model_of("separate", depth=3)
    with torch.no_grad():
        model.blocks[1].attn.k_proj.weight[0, 0] = math.nan
    survey, numbers = numbers_of(model)
    assert [[n.reason for n in layer.matrices] for layer in numbers.layers] == [
        [None] * 3, [None, "it holds NaN or Inf", None], [None] * 3,
    ]  # fmt: skip
    assert [set(layer.softmax) for layer in numbers.layers] == [{AS_IT_IS, *LABELS}, set(), {AS_IT_IS, *LABELS}]
    assert numbers.notes == ()
    lines = format_numbers(survey, numbers)
    assert lines[lines.index("not measured, or not possible") + 1] == "  blocks.1.attn: key: it holds NaN or Inf"
    content = add_numbers(survey_as_dict(survey), survey, numbers)
    broken = content["layers"][1]["matrices"][1]["numbers"]
    assert broken["condition_number"] is broken["stable_rank"] is None
    assert broken["reason"] == "it holds NaN or Inf"


def test_a_weight_that_stands_elsewhere_too_can_not_be_corrected_and_is_measured_all_the_same():
    model = model_of("separate")
    model.extra = nn.Linear(32, 32, bias=False)
    model.extra.weight = model.blocks[0].attn.q_proj.weight
    survey, numbers = numbers_of(model)
    assert [len(layer.matrices[0].after) for layer in numbers.layers] == [3, 3]
    assert all(set(layer.softmax) == {AS_IT_IS} for layer in numbers.layers)
    assert len(numbers.notes) == 3
    assert "shared with a module that is not selected" in numbers.notes[0]
    text = "\n".join(format_numbers(survey, numbers))
    assert "attention with the correction identity 10 is not known: a weight of" in text


def test_warnings_name_the_worst_layer_and_how_many():
    model = model_of("separate", depth=3)
    with torch.no_grad():
        for weight in (model.blocks[1].attn.q_proj.weight, model.blocks[1].attn.k_proj.weight):
            weight.mul_(10)
    survey, numbers = numbers_of(model)
    warnings = saturation_warnings(survey, numbers)
    assert warnings[0].startswith("warning: as the model is the softmax is saturated: attention entropy 0.")
    assert "in 'blocks.1.attn', below 0.25 in 1 of 3 layers" in warnings[0]
    assert "StrengthSchedule" not in warnings[0]
    assert warnings[-1].startswith("warning: with identity 10 the softmax would be saturated")
    assert "below 0.25 in 3 of 3 layers; lower `scale` or `strength`" in warnings[-1]


def test_a_tame_model_has_no_warning_as_it_is():
    survey, numbers = numbers_of(model_of("separate"))
    assert [line.split("the softmax")[0] for line in saturation_warnings(survey, numbers)] == [
        "warning: with identity 10 "
    ]


def test_a_model_of_the_user_that_is_conditioned_is_read_as_its_forward_pass_reads_it():
    model = model_of("fused")
    plain = numbers_of(model)[1]
    condition_(model, WeightRule(roles=["query"]))
    _, numbers = numbers_of(model)
    assert numbers.carried == ("spectral, scale spectral, strength 1",)
    for before, after in zip(plain.layers, numbers.layers, strict=True):
        assert after.matrices[0].kappa == pytest.approx(before.matrices[0].after["spectral"], rel=1e-3)
        assert after.matrices[0].without == pytest.approx(before.matrices[0].kappa, rel=1e-3)
        assert after.matrices[1].kappa == pytest.approx(before.matrices[1].kappa, rel=1e-3)
