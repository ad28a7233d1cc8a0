"""The functional interface: condition, undo, fold, move the strength; masks, ties and foreign parametrizations."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lit_cond import TokenRule, WeightRule, condition_, fold_, uncondition_
from lit_cond.errors import AlreadyConditionedError, ConfigurationError, LostTargetError, NoMatchingTargetError
from lit_cond.functional import condition_number
from lit_cond.surgery import find_attention, find_token_sites, refresh_, register_fused, set_strength_, strengths
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.scope import InstanceForward
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import ATTENTION, TinyTransformer, largest_difference


def make(attention="fused", **kwargs):
    torch.manual_seed(0)
    return TinyTransformer(attention, **kwargs).eval()


X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(2))


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
    view = find_attention(model)[0].views["key"]
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
    view = find_attention(model)[0].views["query"]
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


def test_tokens_enter_at_the_first_block_and_are_conditioned_to_two():
    model = make()
    assert [site.name for site in find_token_sites(model)] == ["blocks.0"]
    condition_(model, TokenRule())
    seen = []
    model.blocks[0].norm1.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    model(X)
    assert float(condition_number(seen[0]).max()) <= 2.001
    raw = model.embed(X).detach()
    assert float(condition_number(raw).min()) > 3


def test_tokens_are_conditioned_under_autocast_in_float32():
    model = make()
    condition_(model, TokenRule())
    seen = []
    model.blocks[0].norm1.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(X)
    assert float(condition_number(seen[0].float()).max()) <= 2.1
    assert seen[0].dtype == torch.bfloat16


class MaskedBlocks(nn.Module):
    """torch encoder layers called with a padding mask, batch first or not."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, **masks):
        return self.encoder(x, **masks)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("grad", [True, False])
def test_h1_padding_changes_no_token(batch_first, side, grad):
    model = MaskedBlocks(batch_first).eval()
    condition_(model, TokenRule())
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(3))
    rest = torch.full((1, 4, 16), 7.0)
    padded = torch.cat([rest, x] if side == "left" else [x, rest], dim=1)
    padding = torch.tensor([[True] * 4 + [False] * 5]) if side == "left" else torch.tensor([[False] * 5 + [True] * 4])

    def run(tokens, **masks):
        out = model(tokens if batch_first else tokens.transpose(0, 1), **masks)
        return out if batch_first else out.transpose(0, 1)

    with contextlib.nullcontext() if grad else torch.no_grad():
        alone = run(x)
        together = run(padded, src_key_padding_mask=padding)
    assert largest_difference(together[:, ~padding[0]].detach(), alone.detach()) < 1e-5


def test_h1_padding_of_transformers_masks():
    transformers = pytest.importorskip("transformers")
    settings = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_size": 32}
    torch.manual_seed(0)
    for implementation in ("eager", "sdpa"):
        config = transformers.BertConfig(vocab_size=50, attn_implementation=implementation, **settings)
        model = transformers.BertModel(config, add_pooling_layer=False).eval()
        plain = model(torch.arange(1, 7)[None]).last_hidden_state
        condition_(model, TokenRule())
        alone = model(torch.arange(1, 7)[None]).last_hidden_state
        ids = torch.cat([torch.arange(1, 7), torch.zeros(5, dtype=torch.long)])[None]
        mask = torch.tensor([[1] * 6 + [0] * 5])
        padded = model(ids, attention_mask=mask).last_hidden_state[:, :6]
        assert largest_difference(padded.detach(), alone.detach()) < 1e-5
        assert largest_difference(plain.detach(), alone.detach()) > 1e-3


def test_causal_attention_refuses_corrections_that_see_the_future():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    for rule in (TokenRule(), TokenRule("identity")):
        with pytest.raises(ConfigurationError, match="let a position see later tokens"):
            condition_(model, rule)
    condition_(model, TokenRule("identity", scale=0.5))
    a, b = torch.arange(10)[None], torch.arange(10)[None].clone()
    b[0, -1] = 40
    assert largest_difference(model(a).logits[:, :-1].detach(), model(b).logits[:, :-1].detach()) == 0


def test_a_decoder_with_a_causal_mask_is_refused():
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).eval()
    condition_(model, TokenRule())
    x, memory = torch.randn(1, 5, 16), torch.randn(1, 3, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for kwargs in ({"tgt_mask": mask}, {"tgt_mask": mask, "tgt_is_causal": True}):
        with pytest.raises(ConfigurationError, match="let a position see later tokens"):
            model(x, memory, **kwargs)


@pytest.mark.parametrize("how", ["buffer", "boolean buffer", "name", "declared"])
def test_causal_attention_of_a_users_own_is_refused(how):
    class Plain(ATTENTION["fused"]):
        def __init__(self):
            super().__init__()
            if how == "buffer":
                self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))
            if how == "boolean buffer":
                self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).triu(1))

    Plain.__qualname__ = {"name": "CausalSelfAttention"}.get(how, "Plain")
    Plain.__name__ = Plain.__qualname__
    register_fused(Plain, "qkv", causal=how == "declared")
    model = make()
    for block in model.blocks:
        block.attn = Plain()
    with pytest.raises(ConfigurationError, match="let a position see later tokens"):
        condition_(model, TokenRule())
    condition_(model, TokenRule("identity", scale=0.5))


def test_a_first_call_with_one_token_does_not_settle_that_attention_is_not_causal():
    model = MaskedBlocks(True).eval()
    condition_(model, TokenRule())
    model(torch.randn(1, 1, 16))
    with pytest.raises(ConfigurationError, match="let a position see later tokens"):
        model(torch.randn(1, 5, 16), mask=nn.Transformer.generate_square_subsequent_mask(5))


def test_a_cache_of_earlier_tokens_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    condition_(model, TokenRule("identity", scale=0.5))
    ids = torch.arange(1, 6)[None]
    with pytest.raises(ConfigurationError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=False).shape[1] <= 8


@pytest.mark.parametrize("name", ["tgt_key_padding_mask", "padding_mask"])
def test_h1_padding_by_other_names(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attn = ATTENTION["fused"]()

        def forward(self, x, **masks):
            return x + self.attn(x)

    model = nn.Sequential(Named())
    condition_(model, TokenRule())
    _, forward = next(token_forwards(model))
    x = torch.randn(1, 5, 32)
    padded = torch.cat([x, torch.full((1, 3, 32), 9.0)], dim=1)
    mask = torch.tensor([[False] * 5 + [True] * 3])
    found = forward.find_mask((padded,), {name: mask}, padded)
    assert largest_difference(forward.correct(padded, found)[:, :5], forward.correct(x)) < 1e-5
    with pytest.raises(ConfigurationError, match="`strange_mask` looks like a mask of padding"):
        forward.find_mask((padded,), {"strange_mask": mask}, padded)


def test_a_causal_mask_at_the_call_is_refused():
    model = MaskedBlocks(True).eval()
    condition_(model, TokenRule())
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with pytest.raises(ConfigurationError, match="let a position see later tokens"):
        model(torch.randn(1, 5, 16), mask=mask)


def test_a_block_that_is_called_many_times_gets_corrected_tokens_once():
    transformers = pytest.importorskip("transformers")
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
    )
    torch.manual_seed(0)
    model = transformers.AlbertModel(config, add_pooling_layer=False).eval()
    condition_(model, TokenRule())
    _, forward = next(token_forwards(model))
    calls = []
    original = forward.correct
    forward.correct = lambda *a: (calls.append(1), original(*a))[1]
    ids = torch.arange(8)[None]
    model(ids)
    model(ids)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "davit_tiny"])
def test_tokens_of_other_layouts(name):
    timm = pytest.importorskip("timm")
    kwargs = {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8), "img_size": 56}
    if name == "davit_tiny":
        kwargs = {"embed_dims": (32, 64), "depths": (1, 1), "num_heads": (2, 4)}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **kwargs).eval()
    for parameter in model.parameters():  # LayerNorm at its start leaves one direction without any variation
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    condition_(model, TokenRule())
    path, forward = next(token_forwards(model))
    seen = []
    forward.module.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    model(torch.randn(2, 3, 56, 56))
    corrected = forward.matrices(forward.correct(seen[0]))
    assert corrected.shape[-1] == 32, path
    assert float(condition_number(corrected).max()) <= 2.001
    assert forward.correct(seen[0]).shape == seen[0].shape


def test_the_channel_axis_is_asked_for_where_it_is_ambiguous():
    model = make()
    condition_(model, TokenRule())
    _, forward = next(token_forwards(model))
    with pytest.raises(ConfigurationError, match="axes 1 and 3"):
        forward.correct(torch.randn(2, 32, 4, 32))
    with pytest.raises(ConfigurationError, match="no axis of the tokens"):
        forward.correct(torch.randn(2, 4, 5))
    with pytest.raises(ConfigurationError, match="got no floating-point tensor with 32 channels"):
        model.blocks[0](torch.randint(0, 5, (2, 6, 32)))
    other = make()
    condition_(other, TokenRule(channel_axis=1))
    with pytest.raises(ConfigurationError, match="channel_axis=1"):
        other(X)


def test_tokens_need_a_known_place():
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2)

    with pytest.raises(NoMatchingTargetError, match="name the block with `include`"):
        condition_(Lone(), TokenRule())

    class Pairs(nn.Module):  # a list that holds attention and MLP in turn has no block whose input could be corrected
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleList([ATTENTION["fused"](), nn.Linear(32, 32)])])

    with pytest.raises(NoMatchingTargetError, match="name the block with `include`"):
        condition_(Pairs(), TokenRule())
    with pytest.raises(NoMatchingTargetError, match="holds no attention layer"):
        condition_(make(), TokenRule(include=["embed"]))
    model = make()
    condition_(model, TokenRule(include=["blocks.1"]))
    assert [name for name, _ in token_forwards(model)] == ["blocks.1"]


def test_huggingface_trainer_sees_the_argument_names():
    import inspect

    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config)
    before = list(inspect.signature(model.transformer.h[0].forward).parameters)
    condition_(model, TokenRule("identity", scale=0.5))
    block = model.transformer.h[0]
    assert isinstance(block.__dict__["forward"], InstanceForward)
    assert list(inspect.signature(block.forward).parameters) == before
