"""Which timm models are in the zoo, and the arguments that make each small, by family (module of timm.models)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "TimmEntry"]


@dataclass(frozen=True)
class TimmEntry:
    """One timm model.

    Args:
        model: Name in timm's registry.
        size: Height and width of the images.
        variant: What makes it another layout than the plain model of that name; empty if nothing does.
        arguments: Of `timm.create_model`, beside the number of classes.
    """

    model: str
    size: int
    variant: str
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name within the zoo."""
        return f"{self.model}:{self.variant}" if self.variant else self.model


def _entry(model: str, size: int, variant: str = "", **arguments: Any) -> TimmEntry:
    return TimmEntry(model, size, variant, arguments)


def _fixed(model: str, size: int, variant: str = "", **arguments: Any) -> TimmEntry:
    """Return the entry of a class whose constructor wants to know the size of the images."""
    return TimmEntry(model, size, variant, {"img_size": size, **arguments})


VIT: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 4}
SWIN: dict[str, Any] = {"depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)}
MAXX: dict[str, Any] = {"embed_dim": (32, 64, 96, 128), "depths": (1, 1, 2, 2), "stem_width": (16, 32)}

MAXX_NEXT: dict[str, Any] = {**MAXX, "embed_dim": (32, 64, 128, 256)}
FAMILIES: dict[str, tuple[TimmEntry, ...]] = {
    "beit": (
        _fixed("beit_base_patch16_224", 64, **VIT),
        _fixed("beitv2_base_patch16_224", 64, **VIT),
        _fixed("beit_base_patch16_224", 64, "shared_bias", use_rel_pos_bias=False, use_shared_rel_pos_bias=True, **VIT),
        _fixed("beit_base_patch16_224", 64, "no_qkv_bias", qkv_bias=False, **VIT),
    ),
    "byoanet": (
        _fixed("botnet26t_256", 64, width_factor=0.25),
        _fixed("eca_botnext26ts_256", 64, width_factor=0.25),
        _fixed("sebotnet33ts_256", 64, width_factor=0.25),
        _entry("halonet_h1", 256, width_factor=0.25),
        _entry("halonet26t", 256, width_factor=0.25),
        _entry("eca_halonext26ts", 256, width_factor=0.25),
        _fixed("halo2botnet50ts_256", 256, width_factor=0.25),
        _fixed("lamhalobotnet50ts_256", 256, width_factor=0.25),
        _entry("haloregnetz_b", 224),
    ),
    "byobnet": (
        _fixed("resnet50_clip", 64, width_factor=0.25),
        _fixed("resnet50x4_clip", 64, width_factor=0.25),
    ),
    "cait": (
        _fixed("cait_xxs24_224", 64, **VIT, depth_token_only=2),
        _fixed("cait_s24_224", 64, **VIT, depth_token_only=1),
    ),
    "convit": (
        _fixed("convit_tiny", 64, depth=3, local_up_to_layer=2),
        _fixed("convit_small", 64, depth=2, local_up_to_layer=1, qkv_bias=True),
    ),
    "cpubone": (
        _entry("cpubone_nano", 64),
        _entry("cpubone_b1_dwnorm", 64),
    ),
    "crossvit": (
        _fixed("crossvit_tiny_240", 120, depth=((1, 1, 0), (1, 2, 0))),
        _fixed("crossvit_9_240", 120, depth=((1, 1, 0),)),
        _fixed("crossvit_9_dagger_240", 120, depth=((1, 1, 0),)),
    ),
    "csatv2": (_entry("csatv2", 256),),
    "davit": (
        _entry("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(32, 64, 96, 128), num_heads=(2, 4, 6, 8)),
        _entry("davit_base_fl", 64, depths=(1, 1, 1, 1), embed_dims=(32, 64, 96, 128), num_heads=(2, 4, 6, 8)),
    ),
    "deepseek_vit": (
        _fixed("deepseek_vit_412m", 56, **VIT),
        _fixed("deepseek_vit_412m_enc", 56, **VIT),
        _fixed("deepseek_vit_412m_align", 56, **VIT),
    ),
    "deit": (
        _fixed("deit_tiny_patch16_224", 64, depth=2),
        _fixed("deit_tiny_distilled_patch16_224", 64, depth=2),
        _fixed("deit3_small_patch16_224", 64, **VIT),
    ),
    "edgenext": (
        _entry("edgenext_xx_small", 64),
        _entry("edgenext_small_rw", 64),
        _entry("edgenext_base", 64, depths=(1, 1, 2, 1), dims=(32, 48, 64, 96)),
    ),
    "efficientformer": (_entry("efficientformer_l1", 224),),
    "efficientformer_v2": (
        _fixed("efficientformerv2_s0", 64),
        _fixed("efficientformerv2_s1", 128),
    ),
    "efficientvit_msra": (
        _fixed("efficientvit_m0", 224),
        _fixed("efficientvit_m2", 128),
        _fixed("efficientvit_m5", 128, depth=(1, 1, 1)),
    ),
    "eva": (
        _fixed("eva02_tiny_patch14_224", 56, depth=2),
        _fixed("eva02_base_patch14_224", 56, **VIT),
        _fixed("eva02_base_patch14_224", 56, "fused", qkv_fused=True, **VIT),
        _fixed("eva02_base_patch16_clip_224", 64, **VIT),
        _fixed("eva_giant_patch14_224", 56, **VIT),
        _fixed("eva_giant_patch14_224", 56, "separate", qkv_fused=False, **VIT),
        _fixed("eva02_enormous_patch14_clip_224", 56, **VIT),
        _fixed("vit_small_patch16_rope_224", 64, depth=2),
        _fixed("vit_small_patch16_rope_mixed_224", 64, depth=2),
        _fixed("vit_medium_patch16_rope_reg1_gap_256", 64, depth=2),
        _fixed("vit_base_patch16_dinov3", 64, **VIT),
        _fixed("vit_tiny_patch16_dinov3_qkvb", 64, depth=2),
        _fixed("vit_base_patch16_sapiens2", 64, num_kv_heads=(4, 2), **VIT),
        _fixed("vit_base_patch16_sapiens2", 64, "grouped", num_kv_heads=2, **VIT),
        _fixed("vit_base_patch16_lingbot", 64, **VIT),
        _fixed("vit_pe_core_tiny_patch16_384", 64, depth=2),
        _fixed("vit_pe_spatial_base_patch16_512", 64, **VIT),
    ),
    "fastvit": (
        _entry("fastvit_sa12", 64, layers=(1, 1, 1, 2), embed_dims=(16, 32, 64, 128)),
        _entry("fastvit_mci0", 64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 64, 128)),
        _entry("fastvit_mci3", 128, layers=(1, 1, 1, 1, 1), embed_dims=(16, 32, 64, 128, 256)),
    ),
    "gcvit": (
        _fixed("gcvit_xxtiny", 64, embed_dim=32),
        _fixed("gcvit_xtiny", 64, embed_dim=32, qkv_bias=False),
    ),
    "gemma4_vit": (
        _fixed("gemma4_vit_167m", 96, **VIT, head_dim=16, intermediate_size=128, position_embedding_size=64),
        _fixed("gemma4_vit_167m_enc", 96, **VIT, head_dim=16, intermediate_size=128, position_embedding_size=64),
        _fixed(
            "gemma4_vit_570m",
            96,
            "grouped_clipped",
            **VIT,
            head_dim=32,
            num_kv_heads=2,
            intermediate_size=128,
            position_embedding_size=64,
            use_clipped_linears=True,
        ),
    ),
    "hiera": (
        _fixed("hiera_tiny_224", 64, embed_dim=32, stages=(1, 2, 2, 1)),
        _fixed("hiera_base_abswin_256", 64, embed_dim=32, stages=(1, 2, 3, 1)),
    ),
    "hieradet_sam2": (
        _entry("sam2_hiera_tiny", 64, embed_dim=32, stages=(1, 2, 3, 2), global_att_blocks=(4, 5)),
        _entry("hieradet_small", 64, stages=(1, 1, 2, 1), global_att_blocks=(3,)),
    ),
    "iformer": (
        _entry("iformer_t", 64),
        _entry("iformer_m", 64),
        _entry("iformer_l2", 64),
    ),
    "levit": (
        _fixed("levit_128s", 128),
        _fixed("levit_192", 64),
        _fixed("levit_256d", 64),
        _fixed("levit_conv_128s", 64),
        _fixed("levit_conv_256", 64),
    ),
    "lowformer": (
        _entry("lowformer_b0", 64),
        _entry("lowformer_b1", 64),
    ),
    "maxxvit": (
        _fixed("test_maxvit", 64),
        _fixed("test_coatnet", 64),
        _fixed("maxvit_tiny_tf_224", 64, **MAXX),
        _fixed("maxvit_pico_rw_256", 64, **MAXX),
        _fixed("maxvit_rmlp_pico_rw_256", 64, **MAXX),
        _fixed("maxvit_tiny_pm_256", 64, **MAXX),
        _fixed("maxxvit_rmlp_nano_rw_256", 64, **MAXX_NEXT),
        _fixed("maxxvitv2_nano_rw_256", 64, **MAXX_NEXT),
        _fixed("coatnet_pico_rw_224", 64, **MAXX),
        _fixed("coatnet_0_224", 64, **{**MAXX, "stem_width": 16}),
        _fixed("coatnet_bn_0_rw_224", 64, **MAXX),
        _fixed("coatnet_rmlp_nano_rw_224", 64, **MAXX),
        _fixed("coatnet_nano_cc_224", 64, **MAXX),
        _fixed("coatnext_nano_rw_224", 64, **MAXX),
    ),
    "metaformer": (_entry("caformer_s18", 64),),
    "mobilenetv3": (
        _entry("mobilenetv4_hybrid_medium_075", 128),
        _entry("mobilenetv4_hybrid_medium", 128),
        _entry("mobilenetv4_hybrid_large_075", 128),
    ),
    "mobilenetv5": (_entry("mobilenetv5_base", 128, channel_multiplier=0.25),),
    "mobilevit": (
        _entry("mobilevit_xxs", 64),
        _entry("mobilevit_xs", 64),
        _entry("mobilevit_s", 96),
    ),
    "mvitv2": (
        _fixed("mvitv2_tiny", 64),
        _fixed("mvitv2_small_cls", 64),
    ),
    "naflexvit": (
        _entry("naflexvit_base_patch16_gap", 64, **VIT),
        _entry("naflexvit_base_patch16_map", 64, **VIT),
        _entry("naflexvit_base_patch16_siglip", 64, **VIT),
        _entry("naflexvit_base_patch16_parfac_gap", 64, **VIT),
        _entry("naflexvit_base_patch16_gap", 64, "eva", attn_type="eva", rope_type="axial", **VIT),
        _entry("naflexvit_base_patch16_gap", 64, "rope", attn_type="rope", rope_type="dinov3", **VIT),
        _entry("naflexvit_base_patch16_gap", 64, "diff", attn_layer="diff", **VIT),
        _entry("naflexvit_base_patch16_gap", 64, "gated", attn_type="rope", attn_gated=True, rope_type="axial", **VIT),
        _entry("naflexvit_base_patch16_gap", 64, "gated_eva", attn_type="eva", attn_gated=True, **VIT),
        _entry("naflexvit_base_patch16_gap", 64, "grouped", attn_type="rope", num_kv_heads=2, qkv_fused=False, **VIT),
        _entry("naflexvit_base_patch16_radio_v3", 64, **VIT),
    ),
    "nest": (_fixed("nest_tiny", 64), _fixed("nest_tiny_jx", 64)),
    "nextvit": (
        _entry("nextvit_small", 64, depths=(1, 1, 5, 1)),
        _entry("nextvit_base", 128, depths=(1, 1, 5, 1)),
    ),
    "pit": (
        _fixed("pit_ti_224", 64, depth=(1, 1, 1)),
        _fixed("pit_ti_distilled_224", 64, depth=(1, 1, 1)),
    ),
    "pvt_v2": (
        _entry("pvt_v2_b0", 64),
        _entry("pvt_v2_b1", 64, depths=(1, 1, 1, 1)),
        _entry("pvt_v2_b2_li", 64, depths=(1, 1, 1, 1)),
    ),
    "qwen3_vit": (
        _fixed("qwen3_vit_88m", 64, **VIT),
        _fixed("qwen3_vit_88m_enc", 64, **VIT),
        _fixed("qwen3_vit_88m_merge", 64, **VIT),
    ),
    "shvit": (
        _entry("shvit_s1", 64),
        _entry("shvit_s2", 128, depth=(1, 1, 2)),
        _entry("shvit_s4", 128, depth=(1, 1, 1)),
    ),
    "swin_transformer": (
        _fixed("swin_tiny_patch4_window7_224", 56, **SWIN),
        _fixed("swin_base_patch4_window12_384", 96, **SWIN),
        _fixed("swin_s3_tiny_224", 56, **{**SWIN, "window_size": (7, 7)}),
    ),
    "swin_transformer_v2": (
        _fixed("swinv2_tiny_window8_256", 64, **SWIN),
        _fixed("swinv2_base_window12_192", 96, **SWIN),
        _fixed("swinv2_tiny_window8_256", 64, "no_qkv_bias", qkv_bias=False, **SWIN),
    ),
    "swin_transformer_v2_cr": (
        _fixed("swinv2_cr_tiny_224", 64, **SWIN),
        _fixed("swinv2_cr_tiny_ns_224", 64, **SWIN),
        _fixed("swinv2_cr_tiny_224", 64, "sequential", sequential_attn=True, **SWIN),
    ),
    "tiny_vit": (
        _entry("tiny_vit_5m_224", 64, depths=(1, 1, 2, 1)),
        _entry("tiny_vit_11m_224", 128, depths=(1, 1, 1, 1)),
    ),
    "tnt": (
        _fixed("tnt_s_patch16_224", 64, depth=2, embed_dim=64, inner_dim=16, num_heads_outer=4, num_heads_inner=2),
        _fixed("tnt_s_legacy_patch16_224", 64, depth=2, embed_dim=64, inner_dim=16, num_heads_outer=4),
    ),
    "twins": (
        _fixed("twins_pcpvt_small", 64, depths=(1, 1, 2, 1)),
        _fixed("twins_svt_small", 64, depths=(1, 1, 2, 2)),
    ),
    "visformer": (
        _fixed("visformer_tiny", 64, depth=(1, 2, 1)),
        _fixed("visformer_small", 64, depth=(1, 1, 1)),
    ),
    "vision_transformer": (
        _fixed("test_vit", 64),
        _fixed("test_vit2", 64),
        _fixed("test_vit3", 64),
        _fixed("test_vit4", 64),
        _fixed("vit_tiny_patch16_224", 64, depth=2),
        _fixed("vit_base_patch32_224", 64, **VIT),
        _fixed("vit_base_patch16_siglip_224", 64, **VIT),
        _fixed("vit_base_patch16_clip_quickgelu_224", 64, **VIT),
        _fixed("vit_base_patch16_rpn_224", 64, **VIT),
        _fixed("vit_base_patch16_xp_224", 64, **VIT),
        _fixed("vit_small_patch14_dinov2", 56, **VIT),
        _fixed("vit_small_patch14_reg4_dinov2", 56, **VIT),
        _fixed("vit_small_patch16_18x2_224", 64, **VIT),
        _fixed("vit_pwee_patch16_reg1_gap_256", 64, **VIT),
        _fixed("vit_pwee_patch16_reg1_gap_256", 64, "no_qkv_bias", qkv_bias=False, **VIT),
        _fixed("vit_dwee_patch16_reg1_gap_256", 64, **VIT),
        _fixed("vit_dpwee_patch16_reg1_gap_256", 64, **VIT),
        _fixed("vit_tiny_patch16_224", 64, "qk_norm", qk_norm=True, depth=2),
        _fixed("aimv2_large_patch14_224", 56, **VIT),
        _fixed("beit3_base_patch16_224", 64, **VIT),
        _fixed("flexivit_small", 64, **VIT),
        _fixed("vit_tiny_patch16_224", 64, "prr", depth=2, global_pool="prr"),
    ),
    "vision_transformer_hybrid": (
        _fixed("vit_tiny_r_s16_p8_224", 64, depth=2),
        _fixed("vit_small_r26_s32_224", 64, **VIT),
        _fixed("vit_small_resnet26d_224", 64, **VIT),
        _fixed("vit_base_mci_224", 64, depth=2),
    ),
    "vision_transformer_relpos": (
        _fixed("test_vit_relpos", 64),
        _fixed("vit_relpos_base_patch16_cls_224", 64, **VIT),
        _fixed("vit_relpos_small_patch16_rpn_224", 64, **VIT),
        _fixed("vit_srelpos_small_patch16_224", 64, **VIT),
    ),
    "vision_transformer_sam": (
        _fixed("samvit_base_patch16_224", 64, **VIT, global_attn_indexes=(1,), window_size=2),
        _fixed("samvit_base_patch16", 64, **VIT, global_attn_indexes=(1,), window_size=3, neck_chans=32),
        _fixed("samvit_base_patch16_224", 64, "rope", **VIT, use_rope=True, use_rel_pos=False),
    ),
    "vitamin": (_fixed("vitamin_small_224", 64),),
    "volo": (_fixed("volo_d1_224", 64), _fixed("volo_d1_384", 96)),
    "xcit": (
        _fixed("xcit_nano_12_p8_224", 64, depth=2),
        _fixed("xcit_nano_12_p16_224", 64, depth=2),
        _fixed("xcit_tiny_12_p16_224", 64, depth=2),
    ),
}
