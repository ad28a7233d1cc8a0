"""E4: a correction that the dtype of the weights can not hold is counted and said, once."""

import warnings

import pytest
import torch

import lit_cond
from lit_cond.callbacks import SpectralConditioning
from lit_cond.errors import LitCondWarning
from lit_cond.surgery.rounding import rounded_away
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import TinyTransformer, make_loader, make_module, make_trainer


def conditioned(dtype, strength):
    torch.manual_seed(0)
    model = TinyTransformer().to(dtype)
    rule = lit_cond.WeightRule(strength=strength)
    lit_cond.condition_(model, rule)
    return model, rule


def test_entries_are_counted():
    model, rule = conditioned(torch.bfloat16, 1e-3)
    expected = total = 0
    for _, weight in conditioned_weights(model):
        raw = weight.parameter.detach()
        summed = (raw.double() + 1e-3 * weight.terms[0].correction.double()).to(torch.bfloat16)
        expected += int((summed == raw).sum())
        total += raw.numel()
    assert rounded_away(model, rule) == (expected, total)
    assert 0.5 < expected / total < 1


def test_float32_holds_what_bfloat16_does_not():
    lost, total = rounded_away(*conditioned(torch.float32, 1e-3))
    assert lost < 1e-3 * total
    assert rounded_away(*conditioned(torch.bfloat16, 0.0)) == (0, 0)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_e4_a_correction_lost_to_rounding_is_said_once(tmp_path, precision):
    def fit(strength):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(
                tmp_path, [SpectralConditioning(strength=strength)], precision=precision, max_epochs=2
            )
            trainer.fit(make_module(), make_loader())
        return [str(w.message) for w in caught if issubclass(w.category, LitCondWarning)]

    said = fit(1e-3)
    assert fit(1.0) == []
    if precision == "bf16-mixed":  # the weights are float32
        assert said == []
    else:
        assert len(said) == 1
        assert "corrected entries stay as they were" in said[0]
