"""Jacobians of heads inside real modules, against autograd by the parameters of these modules."""

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.func import functional_call

from lit_cond.errors import ConfigurationError
from lit_cond.functional import condition_number
from lit_cond.measuring.install import observe_forward
from lit_cond.measuring.observe import observe_call
from lit_cond.measuring.quantities import attention_spectra, bounds, jacobian_spectra, score_spectra
from lit_cond.surgery.find import find_attention
from lit_cond.surgery.samples import Sample
from tests.tiny import ATTENTION

WIDTH, HEADS, TOKENS = 12, 3, 5


def heads_of(module, x):
    """Return what the heads return, side by side (tokens, heads * channels), for the first sample."""
    output = module(x)
    return (output[0] if isinstance(output, tuple) else output)[0]


def without_projection(module, name):
    """Make the output projection of an attention module the identity."""
    projection = getattr(module, name)
    with torch.no_grad():
        projection.weight.copy_(torch.eye(len(projection.weight)))
        if projection.bias is not None:
            projection.bias.zero_()
    return module


def bert(**changes):
    config = transformers.BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, vocab_size=9)
    return transformers.AutoModel.from_config(config, **changes).encoder.layer[0].attention.self


def gpt2():
    config = transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=9)
    return without_projection(transformers.AutoModel.from_config(config).h[0].attn, "c_proj")


def timm_attention(fused):
    module = without_projection(timm.layers.Attention(WIDTH, HEADS, qkv_bias=True), "proj")
    module.fused_attn = fused
    return module


class Grouped(nn.Module):
    """Six query heads, two key and value heads."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads = 6, 2
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(12, 24), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class Rotary(nn.Module):
    """Attention of a language model with its rotary positions, causal, without the output projection."""

    def __init__(self, config, implementation):
        super().__init__()
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
        self.attn, self.rotary = model.layers[0].self_attn, model.rotary_emb
        without_projection(self.attn, "o_proj")

    def forward(self, x):
        positions = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype).masked_fill(
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf
        )
        return self.attn(x, position_embeddings=positions, attention_mask=mask[None, None].expand(len(x), 1, -1, -1))


LANGUAGE = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 1, "num_hidden_layers": 1,
    "intermediate_size": 8, "vocab_size": 9, "head_dim": 4,
}  # fmt: skip

MODULES = {
    "llama, rotary, eager": lambda: Rotary(transformers.LlamaConfig(**LANGUAGE), "eager"),
    "llama, rotary, sdpa": lambda: Rotary(transformers.LlamaConfig(**LANGUAGE), "sdpa"),
    "qwen3, rotary and normalised": lambda: Rotary(transformers.Qwen3Config(**LANGUAGE), "sdpa"),
    "timm, fused": lambda: timm_attention(True),
    "timm, plain": lambda: timm_attention(False),
    "torch": lambda: without_projection(ATTENTION["torch"](WIDTH, HEADS), "mha.out_proj"),
    "bert, sdpa": lambda: bert(attn_implementation="sdpa"),
    "bert, eager": lambda: bert(attn_implementation="eager"),
    "gpt2": gpt2,
    "separate": lambda: ATTENTION["separate"](WIDTH, HEADS),
    "grouped": Grouped,
}


def observe(module, x):
    (site,) = find_attention(module, sample=[Sample((x,))])
    found = []
    call = lambda: module(x)  # noqa: E731
    _, problem = observe_call([site], site.module, call, found.append, 8)
    assert problem is None
    return site, found[0]


@pytest.mark.parametrize("name", MODULES)
def test_the_jacobian_of_each_head_is_that_of_autograd(name):
    torch.manual_seed(0)
    if name == "torch":
        module = ATTENTION["torch"](WIDTH, HEADS)
        without_projection(module.mha, "out_proj")
    else:
        module = MODULES[name]()
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.normal_()  # biases, and the scales of normalisations
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    site, layer = observe(module, x)
    measured = jacobian_spectra(layer, layer.samples[0], 512)
    parameters = dict(module.named_parameters())
    names = {id(p): n for n, p in parameters.items()}
    blocks = {}
    for role, view in site:
        full = names[id(view.parameter)]

        def output(weight, full=full):
            return functional_call(module, {**parameters, full: weight}, (x,))

        def first(weight, output=output):
            result = output(weight)
            return (result[0] if isinstance(result, tuple) else result)[0]

        jacobian = torch.autograd.functional.jacobian(first, view.parameter.detach())
        # (tokens, channels, out, in), by the rows of this role.
        oriented = torch.stack([torch.stack([view.layout.matrix(j) for j in token]) for token in jacobian])
        blocks[role] = oriented
    heads = len(measured)
    for head, spectrum in enumerate(measured):
        columns = []
        width = blocks["query"].shape[1] // heads
        for role, block in blocks.items():
            own = block.shape[2] // (site.heads(role) or heads)
            group = head * (site.heads(role) or heads) // heads
            mine = block[:, head * width : (head + 1) * width, group * own : (group + 1) * own]
            columns.append(mine.reshape(TOKENS * width, -1))
        expected = torch.linalg.svdvals(torch.cat(columns, dim=1))
        size = min(len(expected), len(spectrum.values))
        torch.testing.assert_close(spectrum.values[:size], expected[:size], rtol=1e-6, atol=1e-9 * expected[0].item())


@pytest.mark.parametrize("name", ["timm, fused", "timm, plain", "bert, eager", "gpt2"])
def test_scores_output_and_bound_are_those_of_a_plain_computation(name):
    torch.manual_seed(0)
    module = MODULES[name]().double().eval()
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    site, layer = observe(module, x)
    weights = {role: view.matrix().detach() for role, view in site}
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if name == "gpt2" else torch.zeros(5, 5).bool()
    for sample in layer.samples:
        projected = {
            role: (x[sample.index] @ w.T + _bias(view)).view(TOKENS, HEADS, -1).transpose(0, 1)
            for (role, view), w in zip(site, weights.values(), strict=True)
        }
        logits = projected["query"] @ projected["key"].mT / (WIDTH // HEADS) ** 0.5
        expected = logits.masked_fill(causal, -torch.inf).softmax(dim=-1)
        torch.testing.assert_close(sample.probabilities, expected)
        kappas = [s.condition for s in score_spectra(sample, 256)]
        assert kappas == pytest.approx(torch.linalg.cond(expected).tolist(), rel=1e-6)
        outputs = expected @ projected["value"]
        assert [s.condition for s in attention_spectra(layer, sample)] == pytest.approx(
            torch.linalg.cond(outputs).tolist(), rel=1e-6
        )
        for head, bound in enumerate(bounds(layer, sample, 256)):
            block = slice(head * 4, head * 4 + 4)
            assert bound.tokens == pytest.approx(float(torch.linalg.cond(x[sample.index])), rel=1e-6)
            for role in ("query", "key", "value"):
                assert getattr(bound, role) == pytest.approx(float(condition_number(weights[role][block])), rel=1e-6)
            assert bound.scores == pytest.approx(float(torch.linalg.cond(expected[head])), rel=1e-6)


def _bias(view):
    bias = view.module.bias if hasattr(view.module, "bias") else None
    return 0 if bias is None else bias.detach()[view.layout.rows.indices()]


DECLINED = {
    "a normalisation over all heads": (
        lambda: transformers.AutoModel.from_config(
            transformers.Olmo2Config(
                hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=9
            )
        ),
        {"input_ids": torch.arange(4).view(1, 4)},
        r"its query is more than a product .*heads or tokens are mixed",
    ),
    "channels": (
        lambda: timm.create_model("xcit_nano_12_p16_224", img_size=64, depth=1),
        {"x": torch.randn(1, 3, 64, 64)},
        r"softmax runs over channels",
    ),
    "a scale for each head": (
        lambda: timm.create_model("swinv2_tiny_window8_256", img_size=64, window_size=2, depths=(1, 1, 1, 1)),
        {"x": torch.randn(1, 3, 64, 64)},
        r"pass `mul` before the softmax",
    ),
    "relative positions": (
        lambda: transformers.AutoModel.from_config(
            transformers.DebertaV2Config(
                hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=9,
                relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False,
            )
        ),
        {"input_ids": torch.ones(1, 4, dtype=torch.long)},
        r"(scores hold a term that is made of tokens|sum of several products)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "inputs", "reason"),
    [
        ("cait_xxs24_224", {"img_size": 64, "depth": 1}, "a weight"),
        ("convit_tiny", {"img_size": 64, "depth": 1}, "`(mul|__rmul__|__mul__)`"),
    ],
)
def test_a_softmax_that_is_changed_before_the_values_is_said(name, inputs, reason):
    model = timm.create_model(name, **inputs).eval()
    x = torch.randn(1, 3, 64, 64)
    site = find_attention(model, sample=[Sample((x,))])[0]
    seen = []

    def note(layer):
        assert len(score_spectra(layer.samples[0], 64))
        with pytest.raises(ConfigurationError, match=f"its softmax passes {reason} before it meets the values"):
            attention_spectra(layer, layer.samples[0])
        seen.append(layer)

    assert not observe_forward(model, [site], Sample((x,)), note)
    assert seen


@pytest.mark.parametrize("name", DECLINED)
def test_where_the_closed_form_does_not_hold_is_said(name):
    make, inputs, reason = DECLINED[name]
    model = make().eval()
    said = []

    def note(layer):
        for quantity in (
            lambda: jacobian_spectra(layer, layer.samples[0], 64),
            lambda: bounds(layer, layer.samples[0], 256),
        ):
            with pytest.raises(ConfigurationError, match=f"'{layer.site.name}': .*{reason}"):
                quantity()
        said.append(layer.site.name)

    sites = [s for s in find_attention(model, sample=[Sample((), inputs)]) if "cls_attn" not in s.name]
    assert not observe_forward(model, sites, Sample((), inputs), note)
    assert said
