"""The conformance judge on a part of the zoo that has every layout and trap; the whole is `scripts/conformance.py`."""

import pytest

from scripts.conformance_oracle.worker import examine, load_source

# Right, every operand accounted for.
RIGHT = {
    "timm": [
        "beit_base_patch16_224",
        "cait_xxs24_224",
        "convit_tiny",
        "crossvit_9_240",
        "davit_tiny",
        "eca_botnext26ts_256",
        "edgenext_xx_small",
        "efficientformer_l1",
        "efficientformerv2_s0",
        "efficientvit_m5",
        "eva02_tiny_patch14_224",
        "gemma4_vit_167m",
        "hiera_tiny_224",
        "iformer_t",
        "levit_128s",
        "lowformer_b0",
        "maxvit_pico_rw_256",
        "mobilenetv4_hybrid_medium_075",
        "mobilevit_xxs",
        "naflexvit_base_patch16_gap:diff",
        "nextvit_small",
        "pvt_v2_b0",
        "shvit_s4",
        "swinv2_tiny_window8_256",
        "tiny_vit_11m_224",
        "tnt_s_patch16_224",
        "twins_svt_small",
        "visformer_tiny",
        "vit_pwee_patch16_reg1_gap_256",
        "vit_tiny_patch16_224",
        "xcit_nano_12_p16_224",
    ],
    "transformers": [
        "albert",
        "bert",
        "bloom",
        "clip",
        "codegen",
        "deberta",
        "deberta-v2",
        "deepseek_v3",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "jamba",
        "llama",
        "longformer",
        "mask2former",
        "modernbert",
        "nystromformer",
        "phi3",
        "qwen3_next",
        "squeezebert",
        "swin",
        "t5",
        "vit",
        "wavlm",
        "whisper",
        "xlnet",
        "zamba",
    ],
    "torchvision": ["vit_b_16", "swin_t", "swin_v2_t", "swin3d_t", "maxvit_t", "mvit_v2_s"],
    "negatives": [
        "timm/test_resnet",
        "timm/coat_tiny",
        "timm/mixer_s32_224",
        "timm/mobilevitv2_050",
        "timm/swiftformer_xs",
        "transformers/mamba",
        "transformers/fnet",
    ],
}
# An operand that no weight of the layer makes, and that the finder leaves without a view for that reason.
PARTIAL = {
    "timm": {"gcvit_xxtiny": "query", "vit_tiny_patch16_224:prr": "attn_pool"},
    "transformers": {"aimv2": "a parameter itself"},
}


@pytest.fixture(scope="module")
def zoo():
    for name in ("timm", "transformers", "torchvision"):
        pytest.importorskip(name)
    return {source: {entry.name: entry for entry in load_source(source)} for source in RIGHT}


@pytest.mark.parametrize(("source", "name"), [(source, name) for source, names in RIGHT.items() for name in names])
def test_what_is_found_is_what_the_model_computes(zoo, source, name):
    record = examine(zoo[source][name], seconds=20)
    assert record["verdict"] == "right", record["reason"]


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [(source, name, reason) for source, names in PARTIAL.items() for name, reason in names.items()],
)
def test_an_operand_without_a_weight_of_the_layer_is_named(zoo, source, name, reason):
    record = examine(zoo[source][name], seconds=20)
    assert record["verdict"] == "partial", record["reason"]
    assert reason in record["reason"]
