"""Correcting tokens: where they enter, masks and layouts, causal attention, blocks that are called again."""

import contextlib

import pytest
import torch
from torch import nn

from lit_cond import TokenRule, condition_
from lit_cond.errors import ConfigurationError, NoMatchingTargetError
from lit_cond.functional import condition_number
from lit_cond.surgery import find_token_sites, register_fused
from lit_cond.surgery.scope import InstanceForward
from lit_cond.surgery.tokens import token_forwards
from tests.tiny import ATTENTION, TinyTransformer, largest_difference


def make(attention="fused", **kwargs):
    torch.manual_seed(0)
    return TinyTransformer(attention, **kwargs).eval()


X = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(2))


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


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_block_that_turns_its_tokens_round_is_refused(batch_first):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(32, 4, batch_first=batch_first)

        def forward(self, x):
            turned = x.transpose(0, 1)
            return x + self.attn(turned, turned, turned, need_weights=False)[0].transpose(0, 1)

    model = nn.Sequential(Turned())
    condition_(model, TokenRule())
    with pytest.raises(ConfigurationError, match=f"build the attention with batch_first={not batch_first}"):
        model(torch.randn(2, 6, 32))
    assert not model[0].attn._forward_pre_hooks
