"""The functional interface: condition, undo, fold, move the strength; ties and foreign parametrizations."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lit_cond import TokenRule, WeightRule, condition_, fold_, uncondition_
from lit_cond.errors import AlreadyConditionedError, ConfigurationError, LostTargetError, NoMatchingTargetError
from lit_cond.functional import condition_number
from lit_cond.surgery import find_attention, refresh_, set_strength_, strengths
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.scope import InstanceForward
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import ATTENTION, TinyTransformer, largest_difference


def make(attention="fused", **kwargs):
    torch.manual_seed(0)
    return TinyTransformer(attention, **kwargs).eval()


X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(2))


def test_layers_are_chosen_by_position_and_kind():
    model = TinyTransformer(depth=3)

    def found(**kwargs):
        return [site.name for site in find_attention(model, **kwargs)]

    assert found(layers=[0, -1]) == ["blocks.0.attn", "blocks.2.attn"]
    assert found(layers=[1], exclude="blocks.2.*") == ["blocks.1.attn"]
    assert found(kinds=["self"]) == [f"blocks.{i}.attn" for i in range(3)]
    with pytest.raises(ConfigurationError, match=r"`layers` holds 3, and the model has 3 attention layers"):
        found(layers=[3])
    with pytest.raises(NoMatchingTargetError, match=r"kinds=\['channel'\] leave none of the 3.*blocks.0.attn \(self\)"):
        found(kinds=["channel"])
    condition_(model, WeightRule(layers=[1], roles=["key"]))
    assert [name for name, _ in conditioned_weights(model)] == ["blocks.1.attn.qkv.weight"]


@pytest.mark.parametrize("kwargs", [{"layers": [0.5]}, {"layers": [True]}, {"kinds": ["window"]}])
def test_layers_and_kinds_are_checked(kwargs):
    with pytest.raises(ConfigurationError, match=next(iter(kwargs))):
        WeightRule(**kwargs)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("frozen", [False, True])
def test_a11_fold_keeps_the_function_and_uncondition_keeps_the_weights(attention, frozen):
    model = make(attention).requires_grad_(not frozen)
    parameters = dict(model.named_parameters())
    raw = {n: p.detach().clone() for n, p in parameters.items()}
    before = model(X)
    condition_(model, WeightRule())
    conditioned = model(X)
    assert largest_difference(conditioned.detach(), before.detach()) > 1e-3
    uncondition_(model)
    assert largest_difference(model(X).detach(), before.detach()) == 0
    assert all(torch.equal(raw[n], p) for n, p in model.named_parameters())
    condition_(model, WeightRule())
    fold_(model)
    assert largest_difference(model(X).detach(), conditioned.detach()) == 0
    assert all(parameters[n] is p for n, p in model.named_parameters())
    assert not list(conditioned_weights(model))
    assert not any(isinstance(m.__dict__.get("forward"), InstanceForward) for m in model.modules())


def test_fold_leaves_token_corrections_in_place():
    model = make()
    condition_(model, TokenRule())
    condition_(model, WeightRule())
    before = model(X)
    fold_(model)
    assert largest_difference(model(X).detach(), before.detach()) == 0
    assert [name for name, _ in token_forwards(model)] == ["blocks.0"]


def test_a7_the_weight_is_computed_once_for_each_forward_and_follows_the_optimizer(monkeypatch):
    model = make("torch").train()
    condition_(model, WeightRule())
    weight = next(w for _, w in conditioned_weights(model))
    calls = []
    original = type(weight).effective
    monkeypatch.setattr(type(weight), "effective", lambda self, raw: (calls.append(self), original(self, raw))[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model(X)
    assert len(calls) == 2  # one for each of the two layers
    first.square().sum().backward()
    optimizer.step()
    assert largest_difference(model(X).detach(), first.detach()) > 1e-3
    calls.clear()
    with torch.no_grad():
        model.eval()(X)
    assert len(calls) == 2


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a6_torch_encoder_layers_with_and_without_the_fast_path(training, grad):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    condition_(encoder, WeightRule("identity", scale=0.5))
    with contextlib.nullcontext() if grad else torch.no_grad():
        scoped = encoder(x, src_key_padding_mask=padding)
    fold_(encoder)
    merged = encoder(x, src_key_padding_mask=padding)
    keep = ~padding
    assert (
        largest_difference(scoped[:, : merged.shape[1]][keep[:, : merged.shape[1]]].detach(), merged[keep].detach())
        < 1e-5
    )


def test_a6_the_gradient_reaches_the_raw_weight():
    model = make("torch").train()
    condition_(model, WeightRule())
    model(X).square().sum().backward()
    gradient = model.blocks[0].attn.mha.in_proj_weight.grad
    assert gradient is not None
    assert float(gradient.abs().max()) > 0


def test_a12_writing_to_the_weight_after_conditioning_is_not_lost():
    model = make()
    condition_(model, WeightRule("identity", scale=1.0))
    weight = model.blocks[0].attn.qkv.weight
    nn.init.zeros_(weight)
    view = find_attention(model)[0].views["key"][0]
    assert torch.equal(effective_matrix(view), torch.eye(32))
    with torch.no_grad():
        weight.copy_(torch.ones(96, 32))
    assert torch.equal(effective_matrix(view), torch.ones(32, 32) + torch.eye(32))


def test_the_strength_moves_all_corrections_and_zero_is_the_function_before():
    model = make()
    before = model(X).detach()
    condition_(model, WeightRule())
    condition_(model, TokenRule())
    assert set_strength_(model, 0.0) == 3
    assert largest_difference(model(X).detach(), before) == 0
    set_strength_(model, 0.25, "tokens")
    assert sorted(strengths(model)) == [0.0, 0.0, 0.25]
    assert strengths(model, WeightRule()) == [0.0, 0.0]


def test_refresh_follows_the_weight():
    model = make()
    condition_(model, WeightRule())
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.copy_(torch.randn(96, 32))
    view = find_attention(model)[0].views["query"][0]
    assert float(condition_number(effective_matrix(view))) > 2.1
    refresh_(model)
    assert float(condition_number(effective_matrix(view))) <= 2.0001


def test_conditioning_twice_is_refused_and_changes_nothing():
    model = make()
    condition_(model, WeightRule())
    condition_(model, TokenRule())
    before = model(X).detach()
    with pytest.raises(AlreadyConditionedError, match="conditioned already by another rule"):
        condition_(model, WeightRule("identity", scale=1.0))
    with pytest.raises(AlreadyConditionedError, match=r"tokens at 'blocks\.0' are conditioned already"):
        condition_(model, TokenRule())
    assert largest_difference(model(X).detach(), before) == 0


def test_trap_14_tied_weights_are_corrected_once():
    model = make()
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    raw = model.blocks[0].attn.qkv.weight.detach().clone()
    condition_(model, WeightRule("identity", scale=2.0))
    for site in find_attention(model):
        for _, view in site:
            assert torch.allclose(effective_matrix(view) - view.layout.matrix(raw), 2.0 * torch.eye(32), atol=1e-6)
    before = model(X).detach()
    fold_(model)
    assert largest_difference(model(X).detach(), before) == 0
    with pytest.raises(ConfigurationError, match="shared with a module that is not selected"):
        condition_(model, WeightRule(include=["blocks.0.attn"]))


def test_e5_a_tied_embedding_is_left_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    count = len(list(model.parameters()))
    embedding = model.transformer.wte.weight.detach().clone()
    condition_(model, WeightRule())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.arange(10)[None]
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    fold_(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert len(list(model.parameters())) == count
    assert not torch.equal(model.transformer.wte.weight, embedding)


def test_e5_a_folded_model_survives_save_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    condition_(model, WeightRule())
    ids = torch.arange(10)[None]
    before = model(ids).logits
    fold_(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert largest_difference(loaded(ids).logits.detach(), before.detach()) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        lambda layer: parametrizations.spectral_norm(layer, "weight"),
    ],
)
def test_trap_15_a_weight_that_is_no_plain_parameter_is_an_error(spoil):
    model = make()
    spoil(model.blocks[1].attn.qkv)
    with pytest.raises(LostTargetError, match="not a plain floating-point parameter"):
        condition_(model, WeightRule())
    assert not list(conditioned_weights(model))
    condition_(model, WeightRule(exclude=[r"blocks.1.attn"]))


def test_weights_that_are_not_finite_are_refused_by_name():
    model = make()
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3, 4] = float("nan")
    with pytest.raises(ConfigurationError, match=r"weights of 'blocks\.1\.attn' hold NaN or Inf"):
        condition_(model, WeightRule())


def test_moving_under_inference_mode_leaves_a_strength_that_can_be_set():
    model = make()
    condition_(model, WeightRule())
    condition_(model, TokenRule())
    term, (_, forward) = next(conditioned_weights(model))[1].terms[0], next(token_forwards(model))
    with torch.inference_mode():
        term.to_(torch.device("meta"))
        forward.to_(torch.device("meta"))
    assert not term.strength.is_inference()
    assert not forward.strength.is_inference()


def test_meta_weights_are_refused():
    with torch.device("meta"):
        model = TinyTransformer()
    with pytest.raises(ConfigurationError, match="on the meta device"):
        condition_(model, WeightRule())


def test_selection_grammar():
    model = make(depth=3)

    def names(**kwargs):
        return [site.name for site in find_attention(model, **kwargs)]

    assert names() == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert names(include=r"blocks\.[01]\.attn") == ["blocks.0.attn", "blocks.1.attn"]
    assert names(include=["1.attn"]) == ["blocks.1.attn"]
    assert names(include=["blocks.2.attn.qkv"]) == ["blocks.2.attn"]
    assert names(exclude=r".*\.2\..*") == ["blocks.0.attn", "blocks.1.attn"]
    assert names(include=["attn"], exclude=["0.attn"]) == ["blocks.1.attn", "blocks.2.attn"]
    with pytest.raises(NoMatchingTargetError, match=r"include='blocks.*matches none of the 3 attention layers"):
        names(include=r"blocks\.7")
    assert names(include=["blocks.0", "blocks.1"]) == ["blocks.0.attn", "blocks.1.attn"]
    assert names(exclude=["blocks.1"]) == ["blocks.0.attn", "blocks.2.attn"]
    for misspelt in ({"exclude": ["block.1"]}, {"exclude": r"teacher\..*"}, {"include": ["blocks.0", "blocks.9"]}):
        with pytest.raises(NoMatchingTargetError, match="matches none of the 3 attention layers"):
            names(**misspelt)
    with pytest.raises(NoMatchingTargetError, match="leaves none of the 3"):
        names(exclude=["attn"])
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        names(include="blocks.[")


def test_a9_wrapper_parts_of_names_do_not_matter():
    model = make()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    assert [site.name for site in find_attention(model)] == ["blocks.0.attn", "blocks.1.attn"]
    condition_(model, WeightRule(include=["blocks.1.attn"]))
    assert [name for name, _ in conditioned_weights(model)] == ["blocks.1._orig_mod.attn.qkv.weight"]


def test_head_granularity_needs_the_number_of_heads():
    model = make("separate")
    for block in model.blocks:
        block.attn.heads_of_mine, block.attn.num_heads = 4, None
    with pytest.raises(ConfigurationError, match="does not say how many query heads"):
        condition_(model, WeightRule(granularity="head"))
