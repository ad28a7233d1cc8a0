"""What is observed while attention runs, against what the models themselves say of it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import transformers
from torch import nn

from lit_cond.measuring.install import observe_forward
from lit_cond.measuring.watch import Watch
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.samples import Sample

ROOT = Path(__file__).parents[2]


def observed(model, *args, limit=8, **kwargs):
    """Return what each layer attended to in one pass, by name, and what could not be observed."""
    found = {}
    problems = observe_forward(
        model,
        find_attention(model, sample=[Sample(args, kwargs)]),
        Sample(args, kwargs),
        lambda o: found.setdefault(o.site.name, o),
        limit,
    )
    return found, problems


def tiny(config, **changes):
    values = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return config(**{**values, **changes})


HUGGING_FACE = {
    "bert": lambda: tiny(transformers.BertConfig),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64),
    "llama, grouped heads": lambda: tiny(transformers.LlamaConfig, num_key_value_heads=2),
    "qwen3, normalised queries": lambda: tiny(transformers.Qwen3Config, num_key_value_heads=2, head_dim=8),
    "roberta": lambda: tiny(transformers.RobertaConfig),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=50
    ),
    "bloom": lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=50),
    "t5 encoder": lambda: transformers.T5Config(
        d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=48, vocab_size=50, is_encoder_decoder=False
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_softmax_is_the_one_that_the_model_returns(name, implementation):
    config = HUGGING_FACE[name]()
    cls = transformers.T5EncoderModel if name.startswith("t5") else transformers.AutoModel
    make = cls._from_config if name.startswith("t5") else cls.from_config
    try:
        model = make(config, attn_implementation=implementation).eval()
    except ValueError:
        pytest.skip(f"{name} has no {implementation}")
    ids = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0  # right padding
    found, problems = observed(model, input_ids=ids, attention_mask=mask)
    assert not problems
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for layer, weights in zip(found.values(), expected, strict=True):
        assert len(layer.samples) == 3
        for sample in layer.samples:
            real = mask[sample.index].bool()
            assert sample.queries.tolist() == sample.keys.tolist() == real.nonzero().flatten().tolist()
            torch.testing.assert_close(
                sample.probabilities, weights[sample.index][:, real][:, :, real].double(), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", ["no", "padding", "causal", "both", "per head"])
@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention_of_torch(batch_first, masked, training):
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(16, 4, batch_first=batch_first, kdim=12, vdim=12).train(training)
    query, key = torch.randn(3, 5, 16), torch.randn(3, 7 if masked != "both" else 5, 12)
    kwargs = {}
    if masked in ("padding", "both"):
        kwargs["key_padding_mask"] = torch.zeros(3, key.shape[1], dtype=torch.bool)
        kwargs["key_padding_mask"][1, -2:] = True
    if masked in ("causal", "both"):
        kwargs["attn_mask"] = torch.ones(5, key.shape[1], dtype=torch.bool).triu(1)
    if masked == "per head":
        kwargs["attn_mask"] = torch.randn(12, 5, 7)
    inputs = (query, key, key) if batch_first else tuple(t.transpose(0, 1) for t in (query, key, key))
    _, weights = mha(*inputs, **kwargs, average_attn_weights=False)
    found, problems = observed(mha, *inputs, **kwargs)
    assert not problems
    (layer,) = found.values()
    assert [sample.index for sample in layer.samples] == [0, 1, 2]
    for sample in layer.samples:
        expected = weights[sample.index][:, sample.queries][:, :, sample.keys]
        torch.testing.assert_close(sample.probabilities, expected.double(), rtol=1e-4, atol=1e-6)
        hidden = 2 if masked in ("padding", "both") and sample.index == 1 else 0
        unseen = key.shape[1] - 5 if masked == "causal" else 0
        assert len(sample.keys) == key.shape[1] - max(hidden, unseen)


def test_multi_head_attention_with_added_keys():
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True).eval()
    x = torch.randn(2, 5, 16)
    _, weights = mha(x, x, x, average_attn_weights=False)
    (layer,) = observed(mha, x, x, x)[0].values()
    torch.testing.assert_close(layer.samples[1].probabilities, weights[1].double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "beit_base_patch16_224",
        "xcit_nano_12_p16_224",
        "pvt_v2_b0",
    ],
)
def test_fused_and_plain_kernels_of_timm_show_the_same(name):
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    image = torch.randn(1, 3, 224, 224)
    shown = []
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        shown.append(observed(model, image, limit=2)[0])
    assert shown[0]
    assert shown[0].keys() == shown[1].keys()
    for layer, other in zip(shown[0].values(), shown[1].values(), strict=True):
        for a, b in zip(layer.samples, other.samples, strict=True):
            torch.testing.assert_close(a.probabilities, b.probabilities, rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(a.output, b.output, rtol=1e-3, atol=1e-5)


def test_cross_attention_of_a_decoder():
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage4"]
        ),
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=6,
    )  # fmt: skip
    model = transformers.DetrModel(config).eval()
    found, problems = observed(model, pixel_values=torch.randn(1, 3, 64, 96))
    assert not problems
    assert sorted(len(layer.samples[0].queries) for layer in found.values()) == [6, 6, 6]
    assert {tuple(layer.samples[0].probabilities.shape) for layer in found.values()} == {(4, 6, 6)}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama, grouped heads"])
def test_padding_changes_nothing(name, side, implementation):
    """H1, H2: alone, padded, beside a sequence of one token and an empty one."""
    model = transformers.AutoModel.from_config(HUGGING_FACE[name](), attn_implementation=implementation).eval()
    ids = torch.randint(3, 50, (1, 8), generator=torch.Generator().manual_seed(1))
    alone = observed(model, input_ids=ids)[0]
    batch = torch.zeros(3, 16, dtype=torch.long)
    mask = torch.zeros(3, 16, dtype=torch.long)
    place = slice(8, 16) if side == "left" else slice(0, 8)
    batch[0, place], mask[0, place] = ids[0], 1
    mask[1, place.start if side == "right" else -1] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    padded = observed(model, input_ids=batch, attention_mask=mask, position_ids=positions)[0]
    for name, layer in padded.items():
        assert layer.skipped == 1
        assert [len(sample.queries) for sample in layer.samples] == [8, 1]
        torch.testing.assert_close(
            layer.samples[0].probabilities, alone[name].samples[0].probabilities, rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(layer.samples[0].output, alone[name].samples[0].output, rtol=1e-4, atol=1e-6)
        assert layer.samples[1].probabilities.tolist() == [[[1.0]]] * 4


def test_attention_sinks_take_their_share():
    config = transformers.GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        intermediate_size=16, num_local_experts=2, num_experts_per_tok=1, vocab_size=50, layer_types=["full_attention"],
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        model.layers[0].self_attn.sinks.fill_(1.0)
    ids = torch.randint(3, 50, (2, 6))
    expected = model(input_ids=ids, output_attentions=True).attentions[0]
    (layer,) = observed(model, input_ids=ids)[0].values()
    torch.testing.assert_close(layer.samples[1].probabilities, expected[1].double(), rtol=1e-4, atol=1e-6)
    assert layer.samples[1].probabilities.sum(-1).max() < 0.99


class BothWays(nn.Module):
    """One product of two streams, read along either axis, each with a scale of its own (Grounding DINO)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.va, self.vb = (nn.Linear(8, 8) for _ in range(4))
        self.num_heads = 1

    def forward(self, x, y):
        scores = self.a(x) @ self.b(y).mT
        forth = (scores * 0.5).softmax(-1) @ self.vb(y)
        back = (scores.transpose(1, 2) / 4.0).softmax(-1) @ self.va(x)
        return forth, back


def test_a_product_that_is_read_along_both_axes():
    model = BothWays()
    x, y = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    seen = []
    with Watch(model, seen.append, 2):
        model(x, y)
    forth, back = seen
    assert (forth.scale, back.scale) == (0.5, 0.25)
    assert [o.tensor.shape[o.tokens] for o in (forth.query, forth.key, forth.value)] == [3, 5, 5]
    assert [o.tensor.shape[o.tokens] for o in (back.query, back.key, back.value)] == [5, 3, 3]
    torch.testing.assert_close(back.logits, (model.b(y) @ model.a(x).mT / 4).detach())


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 8
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_long_sequence_is_measured_at_some_queries_within_bounded_memory():
    # The whole softmax of one of the samples would take 4.3 GB in float64.
    program = """
import resource, torch
from tests.measuring.test_observe import Long
from lit_cond.measuring.observe import observe_call
from lit_cond.measuring.quantities import *
from lit_cond.surgery import register_fused, find_attention
register_fused(Long, "qkv")
model = Long()
x = torch.randn(4, 8192, 64)
(site,) = find_attention(model)
with torch.no_grad():
    model(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    def note(layer):
        assert len(layer.samples) == 1
        sample = layer.samples[0]
        entropy_numbers(sample, 64), score_spectra(sample, 64), jacobian_spectra(layer, sample, 64)
        assert sample.spread(64).tolist() == [64 + 128 * i for i in range(64)]
    _, problem = observe_call([site], model, lambda: model(x), note, 8)
    assert problem is None, problem
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 800  # MiB


class Opaque(nn.Module):
    """Attention whose softmax runs where no torch function shows."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.num_heads = 2

    def forward(self, x):
        return _Kernel.apply(self.q_proj(x), self.k_proj(x), self.v_proj(x))


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        with torch._C.DisableTorchFunction():
            return (q @ k.mT).softmax(-1) @ v


def test_a_kernel_that_can_not_be_looked_into_is_named():
    model = nn.Sequential(Opaque())
    (site,) = [replace(s, name="0") for s in find_attention(model)]
    problems = observe_forward(model, [site], Sample((torch.randn(2, 3, 8),)), lambda _: None)
    assert str(problems["0"]).startswith("'0' (Opaque) computes its softmax where it can not be looked into")
    assert "exclude" in str(problems["0"])


def test_approximate_attention_is_declined_by_name():
    config = tiny(
        transformers.NystromformerConfig, segment_means_seq_len=16, num_landmarks=4, max_position_embeddings=16
    )
    model = transformers.AutoModel.from_config(config).eval()
    found, problems = observed(model, input_ids=torch.randint(3, 50, (2, 16)))
    assert not found
    assert all(f"'{name}'" in str(p) and "3 softmaxes for 1 attention layer" in str(p) for name, p in problems.items())
    assert len(problems) == 2


def test_a_layer_that_did_not_run_is_named():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x):
            return self.a(x, x, x)[0]

    model = Two()
    x = torch.randn(2, 3, 8)
    sites = find_attention(model)
    problems = observe_forward(model, sites, Sample((x,)), lambda _: None)
    assert list(problems) == ["b"]
    assert "'b' did not run" in str(problems["b"])


def test_observing_leaves_the_model_the_buffers_and_the_random_numbers_alone():
    model = timm.create_model("levit_128s")  # batch normalisation, caches of positions
    sites = find_attention(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert not observe_forward(model, sites, Sample((torch.randn(2, 3, 224, 224),)), lambda _: None)
    torch.random.set_rng_state(state)
    observe_forward(model, sites, Sample((torch.zeros(2, 3, 224, 224),)), lambda _: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
