"""What tells a raw weight from an effective one in a `state_dict`, and what a live model takes."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from lit_cond import WeightRule, condition_, effective_state_dict, fold_, uncondition_
from lit_cond.surgery import bake_, refresh_, set_strength_, strengths, unbake_, weight_state
from lit_cond.surgery.weight_state import SUFFIX, checksum
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import ATTENTION, TinyTransformer, largest_difference

NAME = "blocks.0.attn.qkv.weight_without_correction"


def network(seed=0, rule=None, attention="fused"):
    torch.manual_seed(seed)
    model = TinyTransformer(attention).eval()
    if rule is not None:
        condition_(model, rule)
    return model


@torch.no_grad()
def computed(model):
    return model(torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0)))


def marks(model):
    return [name for name in model.state_dict() if name.endswith(SUFFIX)]


def refused(model, state, match):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=match) as caught:
        model.load_state_dict(state)
    model.load_state_dict(before)  # torch copies what fits before it complains
    return str(caught.value)


@pytest.mark.parametrize("attention", list(ATTENTION))
def test_each_live_weight_has_one_entry_and_others_none(attention):
    model = network(attention=attention)
    plain, parameters = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    condition_(model, WeightRule())
    expected = [name + SUFFIX for name, _ in conditioned_weights(model)]
    assert len(expected) == (6 if attention == "separate" else 2)
    assert sorted(marks(model)) == sorted(expected)
    assert [name for name, _ in model.named_parameters()] == parameters
    assert not any(model.named_buffers())
    assert list(effective_state_dict(model)) == plain
    bake_(model)
    assert list(model.state_dict()) == plain
    unbake_(model)
    assert sorted(marks(model)) == sorted(expected)
    for undo in (fold_, uncondition_):
        copied = copy.deepcopy(model)
        undo(copied)
        assert list(copied.state_dict()) == plain
        assert not any(SUFFIX in key for module in copied.modules() for key in module.__dict__)
        assert not any(module._state_dict_hooks or module._load_state_dict_pre_hooks for module in copied.modules())
    assert sorted(marks(model)) == sorted(expected)


def test_a_live_state_fails_by_name_in_a_plain_model(tmp_path):
    state = network(rule=WeightRule()).state_dict()
    save_file(state, tmp_path / "live.safetensors")
    for given in (state, load_file(tmp_path / "live.safetensors")):
        refused(network(), given, rf'Unexpected key\(s\) in state_dict: "{NAME}", "blocks.1')
    baked = network(rule=WeightRule())
    bake_(baked)
    refused(baked, state, rf'Unexpected key\(s\) in state_dict: "{NAME}", "blocks.1')


@pytest.mark.parametrize("seed", [0, 1])
def test_effective_and_plain_weights_fail_by_name_in_a_live_model(seed):
    trained = network(seed, WeightRule())
    live = network(rule=WeightRule())
    for state in (effective_state_dict(trained), network(seed).state_dict()):
        refused(live, state, rf'Missing key\(s\) in state_dict: "{NAME}", "blocks.1')


def test_a_load_that_is_not_strict_takes_them_as_raw_weights():
    state = network(1).state_dict()
    live = network(rule=WeightRule())
    missing, unexpected = live.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (marks(live), [])
    assert torch.equal(live.state_dict()["blocks.0.attn.qkv.weight"], state["blocks.0.attn.qkv.weight"])
    missing, unexpected = network().load_state_dict(live.state_dict(), strict=False)
    assert NAME in unexpected


def test_a_live_state_loads_where_the_correction_is_the_same():
    live, fresh = network(rule=WeightRule()), network(rule=WeightRule())
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.mul_(1.1)  # trained on
    fresh.load_state_dict(live.state_dict())
    assert torch.equal(computed(fresh), computed(live))
    # The identity with a number for its scale does not depend on the weights.
    rule = WeightRule("identity", 0.5)
    first, second = network(0, rule), network(1, rule)
    second.load_state_dict(first.state_dict())
    assert torch.equal(computed(second), computed(first))


@pytest.mark.parametrize("strict", [True, False])
def test_a_live_state_of_another_correction_fails_by_name(strict):
    live = network(rule=WeightRule())
    others = [network(1, WeightRule()), network(0, WeightRule("identity", 0.5)), network(0, WeightRule())]
    nn.init.normal_(others[2].blocks[0].attn.qkv.weight)
    refresh_(others[2])
    for other in others:
        with pytest.raises(RuntimeError, match=r"'blocks\.0\.attn\.qkv\.weight' .*another correction") as caught:
            live.load_state_dict(other.state_dict(), strict=strict)  # like another shape, which is never taken either
        assert str(caught.value).count("effective_state_dict") == 1


def test_two_corrections_of_one_weight_are_not_one():
    two = network(rule=WeightRule(roles=["query", "key"]))
    condition_(two, WeightRule("identity", 0.5, roles=["value"]))
    assert marks(two) == marks(network(rule=WeightRule()))
    refused(network(rule=WeightRule(roles=["query", "key"])), two.state_dict(), "another correction")
    fresh = network(1, rule=WeightRule(roles=["query", "key"]))
    condition_(fresh, WeightRule("identity", 0.5, roles=["value"]))
    refused(fresh, two.state_dict(), "another correction")
    copied = copy.deepcopy(two)
    copied.load_state_dict(two.state_dict())


def test_the_strength_comes_with_the_weights():
    live, fresh = network(rule=WeightRule()), network(rule=WeightRule())
    set_strength_(live, 0.3)
    fresh.load_state_dict(live.state_dict())
    assert strengths(fresh) == strengths(live)
    assert torch.equal(computed(fresh), computed(live))


def test_copies_keep_their_own_entries():
    live = network(rule=WeightRule())
    expected = live.state_dict()
    for copied in (copy.deepcopy(live), pickle.loads(pickle.dumps(live))):
        assert list(copied.state_dict()) == list(expected)
        copied.load_state_dict(expected)
        set_strength_(copied, 0.5)
        assert torch.equal(copied.state_dict()[NAME][:, 0], expected[NAME][:, 0])
        assert torch.equal(live.state_dict()[NAME], expected[NAME])
        bake_(copied)
        assert marks(copied) == []
    assert list(live.state_dict()) == list(expected)


def test_refreshing_makes_another_correction():
    live = network(rule=WeightRule())
    before = live.state_dict()
    live.load_state_dict(before)
    nn.init.normal_(live.blocks[0].attn.qkv.weight)
    refresh_(live)
    refused(live, before, r"'blocks\.0\.attn\.qkv\.weight' .*another correction")


def test_wrappers_and_modules_in_two_places():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.two = network()

        def forward(self, x):
            return self.one(x)

    model = Twice()
    condition_(model, WeightRule())
    assert len(marks(model)) == 4
    assert not any(SUFFIX in name for name in effective_state_dict(model))
    model.load_state_dict(model.state_dict())
    compiled = torch.compile(network(rule=WeightRule()), backend="eager")
    assert marks(compiled) == [f"_orig_mod.{name}" for name in marks(network(rule=WeightRule()))]
    compiled.load_state_dict(compiled.state_dict())
    assert not any(SUFFIX in name for name in effective_state_dict(compiled))


def test_distributed_checkpoints_find_the_entry():
    live, fresh = network(rule=WeightRule()), network(rule=WeightRule())
    nn.init.normal_(live.blocks[0].attn.qkv.weight)
    state = get_model_state_dict(live)
    assert NAME in state
    set_model_state_dict(fresh, state)
    assert largest_difference(computed(fresh), computed(live)) == 0


def test_the_checksum_is_of_the_values_and_computed_once(monkeypatch):
    correction = torch.randn(8, 6)
    correction[0] = 0.0
    other = correction.clone()
    other[0] = -0.0
    transposed = correction.t().contiguous().t()
    assert checksum(correction) == checksum(other) == checksum(transposed)
    assert checksum(correction) != checksum(correction * (1 + 1e-6))

    live = network(rule=WeightRule())
    first = live.state_dict()
    monkeypatch.setattr("lit_cond.surgery.weights.checksum", lambda correction: pytest.fail("computed again"))
    for _, weight in conditioned_weights(live):
        weight.terms[0].to_(torch.device("cpu"))
    assert torch.equal(copy.deepcopy(live).state_dict()[NAME], first[NAME])
    assert weight_state.SUFFIX in NAME


def test_what_an_initialiser_writes_becomes_the_raw_weight():
    live = network(rule=WeightRule())
    nn.init.eye_(live.blocks[0].attn.qkv.weight)
    assert torch.equal(live.state_dict()["blocks.0.attn.qkv.weight"], torch.eye(96, 32))
    live.load_state_dict(live.state_dict())
