"""What a recorded forward pass shows, for every trap of row layouts: expected rows are written by hand."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_cond.errors import UnknownAttentionError
from lit_cond.surgery import WeightRule, condition_, find_attention, register_fused
from lit_cond.surgery.families import FUSED
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.survey import survey_attention
from lit_cond.surgery.weights import conditioned_weights
from tests.tiny import TinyTransformer

IDS = Sample((torch.arange(24).reshape(2, 12),))
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 100}
WITH_MLP = {**SMALL, "intermediate_size": 64}


def transformers_model(kind, **kwargs):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **kwargs)).eval()


def timm_model(name, **kwargs):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3, **kwargs).eval()


def zoo(kind, source="transformers"):
    pytest.importorskip(source)
    from scripts.model_zoo import timm_models, transformers_models

    models = timm_models.timm_models() if source == "timm" else transformers_models.models()
    found = next(model for model in models if model.name == kind)
    model = found.build().eval()
    return model, found.samples(model)


def rows(site):
    """Return {role: [(last part of the owner, rows), ...]}."""
    return {
        role: [(view.owner_name.rpartition(".")[2], str(view.layout.rows)) for view in views]
        for role, views in site.views.items()
    }


def fused(name, query, key, value):
    return {"query": [(name, query)], "key": [(name, key)], "value": [(name, value)]}


def separate(query, key, value, rows, kv_rows=None):
    kv = f"[0:{kv_rows or rows})"
    return {"query": [(query, f"[0:{rows})")], "key": [(key, kv)], "value": [(value, kv)]}


FALCON = "query_key_value"
QWEN = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 1,
    "layer_types": ["linear_attention", "full_attention"],
}
TRAPS = {
    "falcon, one key": (
        lambda: transformers_model("falcon", multi_query=True, **SMALL),
        fused(FALCON, "[0:32)", "[32:40)", "[40:48)"),
        (4, 1),
    ),
    "falcon, a key for each head": (
        lambda: transformers_model("falcon", multi_query=False, **SMALL),
        fused(FALCON, "[0:8) + 24i, i<4", "[8:16) + 24i, i<4", "[16:24) + 24i, i<4"),
        (4, 4),
    ),
    "falcon, groups": (
        lambda: transformers_model("falcon", new_decoder_architecture=True, num_kv_heads=2, **SMALL),
        fused(FALCON, "[0:16) + 32i, i<2", "[16:24) + 32i, i<2", "[24:32) + 32i, i<2"),
        (4, 2),
    ),
    "codegen, query value key in four blocks": (
        lambda: transformers_model(
            "codegen", n_layer=1, n_embd=64, n_head=8, vocab_size=100, rotary_dim=4, n_positions=64
        ),
        fused("qkv_proj", "[0:16) + 48i, i<4", "[32:48) + 48i, i<4", "[16:32) + 48i, i<4"),
        (8, 8),
    ),
    "qwen3_next, query and gate": (
        lambda: transformers_model("qwen3_next", **QWEN, **WITH_MLP),
        {**separate("q_proj", "k_proj", "v_proj", 32, 16), "query": [("q_proj", "[0:8) + 16i, i<4")]},
        (4, 2),
    ),
    "gpt_bigcode, one key": (
        lambda: transformers_model("gpt_bigcode", n_layer=1, n_embd=32, n_head=4, vocab_size=100, multi_query=True),
        fused("c_attn", "[0:32)", "[32:40)", "[40:48)"),
        (4, 1),
    ),
    "gpt_bigcode, a key for each head": (
        lambda: transformers_model("gpt_bigcode", n_layer=1, n_embd=32, n_head=4, vocab_size=100, multi_query=False),
        fused("c_attn", "[0:8) + 24i, i<4", "[8:16) + 24i, i<4", "[16:24) + 24i, i<4"),
        (4, 4),
    ),
    "phi3, grouped keys": (
        lambda: transformers_model("phi3", num_key_value_heads=2, pad_token_id=0, **WITH_MLP),
        fused("qkv_proj", "[0:32)", "[32:48)", "[48:64)"),
        (4, 2),
    ),
    "gpt2, transposed": (
        lambda: transformers_model("gpt2", n_layer=1, n_embd=32, n_head=4, vocab_size=100),
        fused("c_attn", "[0:32)", "[32:64)", "[64:96)"),
        (4, 4),
    ),
    "albert, one layer used twice": (
        lambda: transformers_model("albert", embedding_size=16, **WITH_MLP),
        separate("query", "key", "value", 32),
        (4, 4),
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_rows_of_a_layout_that_names_do_not_show(name):
    build, expected, heads = TRAPS[name]
    survey = survey_attention(build(), IDS)
    assert survey.sites
    assert not survey.unknown
    for site in survey.sites:
        assert rows(site) == expected
        assert (site.num_heads, site.num_kv_heads) == heads
        assert site.traced
    assert len(survey.sites) == (1 if name.startswith(("albert", "qwen", "codegen", "gpt")) else 2)


def test_gpt2_is_stored_as_in_out():
    (site,) = find_attention(TRAPS["gpt2, transposed"][0](), sample=IDS)
    assert all(view.layout.transposed for _, view in site)
    assert site.causal


def test_multi_head_latent_attention():
    model, samples = zoo("deepseek_v3")
    site = find_attention(model, sample=samples)[0]
    config = model.config
    heads, nope, rope, value = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    period = nope + value
    assert site.kind == "latent"
    assert site.causal
    assert rows(site) == {
        "query": [("q_b_proj", f"[0:{heads * (nope + rope)})")],
        "key": [
            ("kv_a_proj_with_mqa", f"[{config.kv_lora_rank}:{config.kv_lora_rank + rope})"),
            ("kv_b_proj", f"[0:{nope}) + {period}i, i<{heads}"),
        ],
        "value": [("kv_b_proj", f"[{nope}:{period}) + {period}i, i<{heads}")],
    }


def test_gcvit_has_no_query_of_its_own_in_odd_blocks():
    sites = find_attention(timm_model("gcvit_xxtiny"))
    assert rows(sites[0]) == fused("qkv", "[0:64)", "[64:128)", "[128:192)")
    assert rows(sites[1]) == {"key": [("qkv", "[0:64)")], "value": [("qkv", "[64:128)")]}
    assert "outside of the layer" in sites[1].notes["query"]


def test_levit_has_wider_values_and_downsamples_with_a_query_of_its_own():
    sites = {site.name: site for site in find_attention(timm_model("levit_128s"))}
    assert rows(sites["stages.0.blocks.0.attn"]) == fused(
        "linear", "[0:16) + 64i, i<4", "[16:32) + 64i, i<4", "[32:64) + 64i, i<4"
    )
    assert rows(sites["stages.1.downsample.attn_downsample"]) == {
        "query": [("linear", "[0:128)")],
        "key": [("linear", "[0:16) + 80i, i<8")],
        "value": [("linear", "[16:80) + 80i, i<8")],
    }


def test_a_traced_levit_can_be_copied():
    model = timm_model("levit_128s")
    find_attention(model)
    copy.deepcopy(model)


def test_squeezebert_has_grouped_convolutions():
    model, samples = zoo("squeezebert")
    for site in find_attention(model, sample=samples):
        assert {view.layout.groups for _, view in site} == {model.config.q_groups}


@pytest.mark.parametrize(
    ("name", "first"), [("vit_pwee_patch16_reg1_gap_256", 320), ("vit_dwee_patch16_reg1_gap_256", None)]
)
def test_parallel_and_differential_attention(name, first):
    model, samples = zoo(name, "timm")
    sites = find_attention(model, sample=samples)
    assert len(sites) == 2
    for site in sites:
        width = site.width
        if first is None:  # two products for each layer, each with half of the query rows, make one layer
            assert rows(site) == fused("qkv", f"[0:{width})", f"[{width}:{2 * width})", f"[{2 * width}:{3 * width})")
        else:
            ranges = [f"[{first + i * width}:{first + (i + 1) * width})" for i in range(3)]
            assert rows(site) == fused("in_proj", *ranges)


@pytest.mark.parametrize(
    ("kind", "source", "calls"),
    [
        ("beit_base_patch16_224", "timm", 0),
        ("swinv2_tiny_window8_256", "timm", 0),
        ("vit_tiny_patch16_224", "timm", 2),
    ],
)
def test_weights_that_are_read_and_not_called_are_found(kind, source, calls):
    model, samples = zoo(kind, source)
    sites = find_attention(model, sample=samples)
    counted = []
    owners = {view.module for site in sites for _, view in site}
    handles = [owner.register_forward_hook(lambda *_: counted.append(1)) for owner in owners]
    with torch.no_grad():
        samples[0].run(model)
    for handle in handles:
        handle.remove()
    assert len(counted) == calls
    for site in sites:
        width = len(site.views["query"][0].layout.rows)
        assert rows(site) == fused("qkv", *(f"[{i * width}:{(i + 1) * width})" for i in range(3)))


def test_torchvision_swin_reads_its_weight_in_a_free_function():
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    model = swin.SwinTransformer([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=3)
    sites = find_attention(model, sample=torch.randn(1, 3, 32, 32))
    assert [rows(site) for site in sites] == [
        fused("qkv", *(f"[{i * w}:{(i + 1) * w})" for i in range(3))) for w in (16, 32)
    ]


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_zamba_shares_one_parameter_between_layers_and_is_corrected_once(kind):
    model, samples = zoo(kind)
    model.example_input_array = samples
    sites = find_attention(model)
    parameters = {id(site.views["query"][0].parameter) for site in sites}
    assert len(sites) > len(parameters) == 1
    assert not [name for name in survey_attention(model).left_alone if "self_attn" in name]
    condition_(model, WeightRule("identity", scale=1.0))
    weights = [w for name, w in conditioned_weights(model) if name.endswith("q_proj.weight")]
    assert len(weights) >= len(sites)
    assert len({id(w.terms[0]) for w in weights}) == 1
    raw, effective = weights[0].current_raw, weights[0].current_effective
    assert torch.allclose(effective - raw, torch.eye(*raw.shape), atol=1e-6)


def test_conditional_detr_has_two_projections_for_query_and_key():
    model, samples = zoo("conditional_detr")
    sites = {site.name: site for site in find_attention(model, sample=samples)}
    layer = sites["decoder.layers.0.self_attn"]
    assert [name for name, _ in rows(layer)["query"]] == ["q_content_proj", "q_pos_proj"]
    assert [name for name, _ in rows(layer)["key"]] == ["k_content_proj", "k_pos_proj"]
    assert [name for name, _ in rows(layer)["value"]] == ["v_proj"]
    assert layer.kind == "self"
    assert sites["decoder.layers.0.encoder_attn"].kind == "cross"


def test_layers_that_share_keys_have_a_query_only():
    model, samples = zoo("gemma3n_text")
    sites = find_attention(model, sample=samples)
    assert set(rows(sites[0])) == {"query", "key", "value"}
    assert set(rows(sites[-1])) == {"query"}
    assert set(sites[-1].notes) == {"key", "value"}


def test_davit_computes_with_value_query_and_key_in_this_order():
    sites = find_attention(timm_model("davit_tiny", depths=(1, 1), embed_dims=(32, 64), num_heads=(2, 4)))
    assert [site.kind for site in sites] == ["self", "channel"] * 2
    assert rows(sites[1]) == fused("qkv", "[32:64)", "[64:96)", "[0:32)")


def test_state_space_and_delta_layers_are_left_alone_with_a_reason():
    model, samples = zoo("qwen3_next")
    survey = survey_attention(model, samples)
    linear = [n for n in survey.left_alone if "linear_attn" in n]
    assert linear
    assert all("softmax" in survey.left_alone[name] for name in linear)


def test_lora_keeps_its_base_layer():
    class LoraLinear(nn.Module):
        """As PEFT builds it: a base layer and a low-rank detour."""

        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

        def forward(self, x):
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    model = transformers_model("llama", num_key_value_heads=2, **WITH_MLP)
    for layer in model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)
    for site in find_attention(model, sample=IDS):
        assert rows(site) == separate("base_layer", "k_proj", "v_proj", 32, 16)


def test_a_weight_computed_from_parameters_is_not_taken():
    model = TinyTransformer("separate")
    nn.utils.parametrizations.weight_norm(model.blocks[0].attn.q_proj)
    survey = survey_attention(model, torch.randn(2, 6, 12))
    assert "query" not in survey.sites[0].views
    assert "computed from parameters" in survey.sites[0].notes["query"]


@pytest.mark.parametrize("wrapper", ["compile", "parallel", "fabric"])
def test_prefixes_of_wrappers_do_not_matter(wrapper):
    model = TinyTransformer("separate")
    if wrapper == "compile":
        wrapped = torch.compile(model, backend="eager")
    elif wrapper == "parallel":
        wrapped = nn.DataParallel(model, device_ids=[])
    else:
        wrapped = nn.ModuleDict({"_forward_module": model})
        wrapped.forward = model.forward
    x = torch.randn(2, 6, 12)
    plain = find_attention(model, sample=x)
    assert [rows(site) for site in find_attention(wrapped, sample=x)] == [rows(site) for site in plain]
    for pattern in (r"blocks\.0\..*", ["blocks.0.attn"]):
        (site,) = find_attention(wrapped, pattern, sample=x)
        assert site.name.endswith("blocks.0.attn")


def test_a_pass_leaves_the_model_and_the_random_numbers_as_they_were():
    class Busy(TinyTransformer):
        """Keeps caches, counts calls, draws numbers and swaps a module while it runs."""

        def __init__(self):
            super().__init__("separate")
            self.register_buffer("count", torch.zeros(()))
            self.cache, self.seen = {}, []
            self.drop = nn.Dropout()

        def forward(self, x):
            self.count += 1
            self.cache["x"] = x
            self.seen.append(x)
            self.extra = self.count * 2
            torch.rand(3)
            self.drop = nn.Identity()
            return super().forward(x)

    model = Busy().train()
    model.blocks[0].attn.q_proj.weight.requires_grad_(False)
    drop, state = model.drop, torch.get_rng_state()
    sites = find_attention(model, sample=torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0)))
    assert len(sites) == 2
    assert torch.equal(state, torch.get_rng_state())
    assert (float(model.count), model.cache, model.seen, hasattr(model, "extra")) == (0.0, {}, [], False)
    assert model.drop is drop
    assert all(module.training for module in model.modules())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["blocks.0.attn.q_proj.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_conditioned_model_is_traced_as_if_it_were_plain():
    model = TinyTransformer("fused")
    x = torch.randn(2, 6, 12)
    before = [rows(site) for site in find_attention(model, sample=x)]
    condition_(model, WeightRule())
    assert [rows(site) for site in find_attention(model, sample=x)] == before
    assert len([name for name, _ in conditioned_weights(model)]) == 2


def test_gradient_checkpointing_and_frozen_towers_hide_nothing():
    class Frozen(TinyTransformer):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    assert len(find_attention(Frozen("separate", checkpointing=True), sample=torch.randn(2, 6, 12))) == 2


class TalkingHeads(nn.Module):
    """Mixes heads before and after the softmax, and asks with the second operand of its product."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        k, q, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = k @ q.mT  # (batch, heads, keys, queries)
        scores = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(dim=-2)
        scores = self.after(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return scores.mT @ v


def test_who_asks_is_read_off_the_softmax_and_not_the_order_of_operands():
    (site,) = find_attention(TalkingHeads(), sample=torch.randn(2, 5, 16))
    assert rows(site) == fused("qkv", "[16:32)", "[0:16)", "[32:48)")
    assert site.num_heads == 4


class Router(nn.Module):
    """A softmax that chooses experts, and a product with its weights: no attention."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x):
        chosen = self.gate(x).softmax(-1)
        return torch.einsum("bne,beni->bni", chosen, torch.einsum("bni,eio->beno", x, self.experts))


def test_a_softmax_over_experts_is_no_attention():
    survey = survey_attention(Router(), torch.randn(2, 5, 16))
    assert survey.sites == []


def test_a_description_that_the_pass_contradicts_is_an_error():
    class Interleaved(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (-1, 3)).unbind(-1)
            return F.scaled_dot_product_attention(q, k, v)

    register_fused(Interleaved)
    try:
        with pytest.raises(UnknownAttentionError, match=r"reads its query from .*\+ 3i.*says .*\[0:8\)"):
            find_attention(nn.Sequential(Interleaved()), sample=torch.randn(2, 4, 8))
    finally:
        del FUSED[f"{Interleaved.__module__}.{Interleaved.__qualname__}"]


def test_a_model_that_can_not_run_says_so_and_is_served_by_the_table():
    class Broken(TinyTransformer):
        def forward(self, x):
            raise RuntimeError("no such luck")

    model = Broken("separate")
    model.example_input_array = torch.randn(2, 6, 12)
    survey = survey_attention(model)
    assert [site.traced for site in survey.sites] == [False, False]
    assert "no such luck" in survey.notes[0]


def test_tracing_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_attention(TinyTransformer("separate"), sample=torch.randn(2, 6, 12))
