"""The table of layouts against what forward passes show, class by class, and what it says where nothing can run."""

from functools import cache, partial

import pytest
import torch
from torch import nn

from lit_cond.surgery.families import FUSED, class_path, not_attention
from lit_cond.surgery.fused_layouts import apply_layout
from lit_cond.surgery.lookalikes import CLASSES
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.survey import survey_attention

# Every pattern of storage once; names of models in scripts/model_zoo.
PATTERNS = {
    "separate": "transformers bert",
    "separate, few key heads": "transformers llama",
    "separate, keys of an earlier layer": "transformers gemma3n_text",
    "separate, keys that are values": "transformers diffusion_gemma",
    "separate, no query": "transformers aimv2_vision_model",
    "separate, wrapped": "timm gemma4_vit_167m_enc",
    "separate, quantized": "transformers ibert",
    "separate, two scores": "transformers lilt",
    "separate, convolutions": "timm mobilenetv4_hybrid_medium_075",
    "separate, grouped convolution": "transformers squeezebert",
    "separate, two of a role": "transformers conditional_detr",
    "block": "timm cait_xxs24_224",
    "block, read by a function": "timm beit_base_patch16_224:shared_bias",
    "block, unequal": "transformers phi3",
    "block, unequal, convolution": "timm shvit_s2",
    "block, one key head": "transformers gpt_bigcode",
    "block, other order": "timm davit_tiny",
    "block, after a perceptron": "timm vit_base_patch16_xp_224",
    "block, two maps": "timm naflexvit_base_patch16_gap:diff",
    "block or pair": "timm gcvit_xtiny",
    "block, one for each head": "timm efficientvit_m5",
    "block, transposed": "transformers gpt-sw3",
    "four blocks": "transformers codegen",
    "per head": "transformers bloom",
    "per head, unequal": "timm levit_conv_128s",
    "per head or block: per head": "timm test_coatnet",
    "per head or block: block": "timm maxvit_tiny_tf_224",
    "per head, gate": "transformers qwen3_next",
    "query and pair": "timm pvt_v2_b1",
    "query and pair, per head": "timm eca_halonext26ts",
    "pair and value": "timm convit_tiny",
    "value and gate": "timm iformer_t",
    "latent": "transformers deepseek_v3",
    "latent, gate": "transformers axk2",
    "shared keys and values": "transformers deepseek_v4",
    "bare parameters": "transformers xlnet",
    "experts": "transformers jetmoe",
    "torch": "torchvision vit_b_16",
    "torchvision": "torchvision swin_v2_t",
}

# Models that cover the rest of the classes in the table.
OTHERS = {
    "timm": """
        caformer_s18 cpubone_nano crossvit_9_240 csatv2 davit_base_fl deepseek_vit_412m eca_botnext26ts_256
        edgenext_xx_small efficientformer_l1 efficientformerv2_s0 fastvit_sa12 hiera_base_abswin_256
        lowformer_b0 maxxvitv2_nano_rw_256 mvitv2_small_cls naflexvit_base_patch16_map nest_tiny
        nextvit_small resnet50_clip sam2_hiera_tiny samvit_base_patch16 swin_base_patch4_window12_384
        swinv2_cr_tiny_224 swinv2_tiny_window8_256:no_qkv_bias tiny_vit_5m_224 tnt_s_legacy_patch16_224
        twins_svt_small visformer_tiny vit_base_patch16_lingbot vit_dpwee_patch16_reg1_gap_256
        vit_relpos_base_patch16_cls_224 volo_d1_224 xcit_nano_12_p16_224
    """,
    "torchvision": """
        maxvit_t mvit_v1_b swin3d_t swin_s
    """,
    "detectron2": """
        mvit:no_residual swin vit:no_windows
    """,
    "transformers": """
        EvollaModel axk1 bailing_hybrid blip blip-2 cohere_compass_vision colqwen2 dab-detr dbrx deberta
        decision_transformer deepseek_ocr2 deepseek_v2 deepseek_v32 dots3_note dots3_note_text ernie4_5_vl_moe
        grounding-dino mm-grounding-dino
        exaone4_5_vision falcon florence2 gemma4_assistant gemma4_unified_assistant glm4_moe_lite
        glm4v_moe_vision glm4v_vision glm5_next_text glm5_next_vision glm_image_vision glm_moe_dsa
        glm_ocr_vision gpt_neox gpt_neox_japanese granite_speech granite_speech_plus hiera hy_v4
        hy_v4_vl_text imagegpt informer instructblip instructblipvideo kimi_linear levit longcat_flash luke
        mgp-str minicpm3 mistral4 mistral_large4_text modernbert mpt openai-gpt persimmon phi4_multimodal
        pp_chart2table pp_formulanet qwen2_5_vl_vision qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker
        qwen3_vl_moe qwen3_vl_vision qwen4_exp sam2_hiera_det_model sam_hq_vision_model sam_vision_model
        seggpt slanext timesformer unlimited_ocr vitdet youtu zaya
    """,
}


def has_detectron2():
    return pytest.importorskip("scripts.model_zoo.detectron2_models").available()


@cache
def zoo(source):
    module = pytest.importorskip(f"scripts.model_zoo.{source}_models")
    return {entry.name: entry for entry in getattr(module, f"{source}_models")()}


def of_zoo(source, name):
    if source == "transformers":  # the list of all types takes long
        builder = pytest.importorskip("scripts.model_zoo.transformers_models")
        samples = pytest.importorskip("lit_cond.surgery.samples.transformers").transformers_samples
        model = builder.build(name)
        return model, samples(model)
    if source == "detectron2" and not has_detectron2():
        pytest.skip("detectron2 is not installed")
    entry = zoo(source)[name]
    model = entry.build().eval()
    return model, entry.samples(model)


def of_transformers(name, cls=None, *, attention="sdpa", samples=None, **settings):
    """A model of transformers with a configuration of the zoo and other settings; a class of another head."""
    transformers = pytest.importorskip("transformers")
    config = pytest.importorskip("scripts.model_zoo.transformers_models").tiny_config(name)
    for key, value in settings.items():
        setattr(config, key, value)
    make = getattr(transformers, cls or "AutoModel")
    model = make(config) if cls else make.from_config(config, attn_implementation=attention)
    if samples is None:
        from lit_cond.surgery.samples.transformers import transformers_samples as samples
    return randomized(model), samples(model)


def randomized(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(0))
    return model.eval()


def bark():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 64, "block_size": 32}
    config = transformers.BarkSemanticConfig(input_vocab_size=50, output_vocab_size=50, **sizes)
    return randomized(transformers.BarkSemanticModel(config)), ids(None)


def ids(_model, **more):
    return [Sample((torch.arange(10)[None],), more)]


def crossed(_model):
    return ids(_model, encoder_hidden_states=torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)))


def lines_of_text(_model, height=48):
    return [Sample((torch.randn(1, 3, height, 320, generator=torch.Generator().manual_seed(0)),))]


def layoutlm(fast):
    module = pytest.importorskip("transformers.models.layoutlmv2.modeling_layoutlmv2")
    config = pytest.importorskip("transformers").LayoutLMv2Config(
        hidden_size=64,
        num_attention_heads=4,
        fast_qkv=fast,
        has_relative_attention_bias=False,
        has_spatial_attention_bias=False,
    )
    tokens = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 1, 5)
    return randomized(module.LayoutLMv2SelfAttention(config)), [Sample((tokens, mask))]


# Layouts that no model of the zoo has.
MADE = {
    "falcon, per head": partial(of_transformers, "falcon", multi_query=False, new_decoder_architecture=False),
    "falcon, one key head": partial(of_transformers, "falcon", multi_query=True, new_decoder_architecture=False),
    "falcon, groups": partial(of_transformers, "falcon", new_decoder_architecture=True, num_kv_heads=2),
    "bigcode, per head": partial(of_transformers, "gpt_bigcode", multi_query=False),
    "gpt2, crossed": partial(of_transformers, "gpt2", add_cross_attention=True, samples=crossed),
    "sam, eager": partial(of_transformers, "sam_vision_model", attention="eager"),
    "sam_hq, eager": partial(of_transformers, "sam_hq_vision_model", attention="eager"),
    "deepseek_ocr2, eager": partial(of_transformers, "deepseek_ocr2", attention="eager"),
    "unlimited_ocr, eager": partial(of_transformers, "unlimited_ocr", attention="eager"),
    "bark": bark,
    "layoutlmv2": partial(layoutlm, False),
    "layoutlmv2, fast": partial(layoutlm, True),
    "mobile_rec": partial(
        of_transformers,
        "pp_ocrv5_mobile_rec",
        "PPOCRV5MobileRecForTextRecognition",
        samples=partial(lines_of_text, height=96),
    ),
    "server_rec": partial(
        of_transformers, "pp_ocrv5_server_rec", "PPOCRV5ServerRecForTextRecognition", samples=lines_of_text
    ),
    "small_rec": partial(
        of_transformers, "pp_ocrv6_small_rec", "PPOCRV6SmallRecForTextRecognition", samples=lines_of_text
    ),
}


def made(name):
    if name in MADE:
        return MADE[name]()
    return of_zoo(*name.split(" ", 1))


# Weights behind a projection that mix what it made, which the table leaves alone.
BEHIND = ("conv_qk_grouped",)


def rows_by_role(sites):
    """All rows that serve a role, by role and parameter."""
    rows = {}
    for role, view in (pair for site in sites for pair in site if not pair[1].owner_name.endswith(BEHIND)):
        rows.setdefault((role, view.parameter), set()).update(view.layout.rows.indices().tolist())
    return rows


@cache
def compared(name):
    """Compare both descriptions of a model; return the layouts of the table that were used by modules that ran."""
    model, samples = made(name)
    static = survey_attention(model, trace=False)
    shown = survey_attention(model, sample=samples)
    traced = [site for site in shown.sites if site.traced]
    assert traced
    said, seen = rows_by_role(static.sites), rows_by_role(traced)
    for (role, parameter), found in seen.items():
        assert said.get((role, parameter)) == found, (role, [n for n, p in model.named_parameters() if p is parameter])
    known = {site.module for site in static.sites}
    ran = {site.module for site in traced} & known
    assert not {site.name for site in static.sites} & shown.left_alone.keys()
    return frozenset((class_path(module), used(module)) for module in ran)


def used(module):
    return next((layout for layout in FUSED.get(class_path(module), ()) if apply_layout(module, layout)), None)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_table_says_the_rows_that_reach_the_softmax(pattern):
    assert compared(PATTERNS[pattern])


OTHER_NAMES = [f"{source} {name}" for source, names in OTHERS.items() for name in names.split()] + list(MADE)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_the_table_says_the_rows_of_every_other_class(name):
    assert compared(name)


@pytest.mark.slow
def test_every_class_and_every_layout_of_the_table_is_used_by_a_model_that_ran():
    sources = ("timm", "torchvision", "transformers", "detectron2")[: 4 if has_detectron2() else 3]
    ran = set().union(*(compared(n) for n in [*PATTERNS.values(), *OTHER_NAMES] if n in MADE or n.startswith(sources)))
    shipped = {path: layouts for path, layouts in FUSED.items() if path.startswith(sources)}
    assert shipped.keys() - {path for path, _ in ran} == set()
    assert {layout for layouts in shipped.values() for layout in layouts} - {layout for _, layout in ran} == set()


def described(model):
    return [
        (
            site.name,
            site.num_heads,
            site.num_kv_heads,
            site.kind,
            [(r, v.owner_name, v.tensor_name, v.layout) for r, v in site],
        )
        for site in survey_attention(model, trace=False).sites
    ]


@pytest.mark.parametrize(
    "name",
    ["timm vit_tiny_patch16_224", "timm maxxvitv2_nano_rw_256", "transformers deepseek_v3", "transformers falcon"],
)
def test_a_model_on_the_meta_device_is_described_by_the_table_alone(name):
    source, name = name.split(" ")
    real, _ = of_zoo(source, name)
    if source == "timm":
        timm = pytest.importorskip("timm")
        table = pytest.importorskip("scripts.model_zoo.timm_table")
        entry = next(e for entries in table.FAMILIES.values() for e in entries if e.name == name)
        with torch.device("meta"):
            empty = timm.create_model(entry.model, num_classes=3, **entry.arguments)
    else:
        config = pytest.importorskip("scripts.model_zoo.transformers_models").tiny_config(name)
        with torch.device("meta"):
            empty = pytest.importorskip("transformers").AutoModel.from_config(config)
    survey = survey_attention(empty)
    assert all(p.is_meta for p in empty.parameters())
    assert survey.sites
    assert not any(site.traced for site in survey.sites)
    assert not survey.unknown
    assert described(empty) == described(real)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mamba", "a state space layer"),
        ("qwen3_next", "a delta-rule layer"),
        ("minimax", "linear attention"),
        ("deformable_detr", "deformable attention"),
        ("mra", "a multi-resolution approximation"),
        ("reformer", "attention by hashes"),
    ],
)
def test_what_computes_no_softmax_of_products_is_left_alone_with_its_reason(name, expected):
    model, _ = of_zoo("transformers", name)
    survey = survey_attention(model, trace=False)
    assert any(reason.startswith(expected) for reason in survey.left_alone.values())
    assert not survey.unknown
    assert not {site.name for site in survey.sites} & survey.left_alone.keys()


def test_reasons_are_given_for_nothing_that_the_table_describes():
    assert not CLASSES.keys() & FUSED.keys()
    assert not_attention(nn.MultiheadAttention(8, 2)) is None
