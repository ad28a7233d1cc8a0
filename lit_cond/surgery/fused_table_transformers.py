"""Which class of transformers keeps its attention weights in which layout.

Every class was checked by gradients of the forward pass of a model (scripts/model_zoo). Attention with three whole
matrices under usual names is not listed. Names are short: `gpt2.GPT2Attention` is
`transformers.models.gpt2.modeling_gpt2.GPT2Attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_cond.surgery.fused_layouts import FusedLayout

__all__ = ["TRANSFORMERS"]

_GROUPED = "q k=kv_heads*head_dim v=kv_heads*head_dim"
_PER_HEAD = "query_key_value: heads * (q k v)"
_LATENT = "kv_b_proj: heads * (k=qk_nope_head_dim v=v_head_dim)"
_ROTARY = "kv_a_proj_with_mqa: latent=kv_lora_rank k"

_SEPARATE = FusedLayout("q_proj: q; k_proj: k; v_proj: v")

_Layouts = tuple[FusedLayout, ...]
_TABLE: Sequence[tuple[_Layouts, str]] = (
    (
        (FusedLayout("qkv: q k v"),),
        """blip.BlipAttention blip_2.Blip2Attention cohere_compass.CohereCompassVisionAttention
        dots3_note.Dots3NoteVisionAttention
        deepseek_ocr2.DeepseekOcr2SamVisionAttention deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention
        ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention florence2.Florence2VisionWindowAttention
        glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeVisionAttention glm5_next.Glm5NextVisionAttention
        glm_image.GlmImageVisionAttention glm_ocr.GlmOcrVisionAttention got_ocr2.GotOcr2VisionAttention
        hiera.HieraMaskUnitAttention instructblip.InstructBlipAttention
        instructblipvideo.InstructBlipVideoAttention mgp_str.MgpstrAttention
        pp_formulanet.PPFormulaNetVisionAttention pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention
        pp_ocrv5_server_rec.PPOCRV5ServerRecAttention pp_ocrv6_small_rec.PPOCRV6SmallRecAttention
        qwen2_5_vl.Qwen2_5_VLVisionAttention qwen2_vl.VisionAttention qwen3_5.Qwen3_5VisionAttention
        qwen3_5_moe.Qwen3_5MoeVisionAttention qwen3_omni_moe.Qwen3OmniMoeVisionAttention
        qwen3_vl.Qwen3VLVisionAttention qwen3_vl_moe.Qwen3VLMoeVisionAttention qwen4_exp.Qwen4ExpVisionAttention
        sam.SamVisionAttention sam.SamVisionSdpaAttention sam2.Sam2MultiScaleAttention sam_hq.SamHQVisionAttention
        sam_hq.SamHQVisionSdpaAttention seggpt.SegGptAttention slanext.SLANeXtVisionAttention
        timesformer.TimesformerSelfAttention
        unlimited_ocr.UnlimitedOcrSamVisionAttention unlimited_ocr.UnlimitedOcrSamVisionSdpaAttention
        vitdet.VitDetAttention""",
    ),
    ((FusedLayout("qkv: q k v", kind="channel"),), "florence2.Florence2VisionChannelAttention"),
    ((FusedLayout(f"qkv: {_GROUPED}"),), "exaone4_5.Exaone4_5_VisionAttention"),
    ((FusedLayout("Wqkv: q k v"),), "modernbert.ModernBertAttention"),
    ((FusedLayout("Wqkv: q k v", causal=True),), "mpt.MptAttention"),
    ((FusedLayout(f"Wqkv: {_GROUPED}"),), "dbrx.DbrxAttention"),
    ((FusedLayout(f"qkv_proj: {_GROUPED}"),), "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention"),
    ((FusedLayout("att_proj: q k v"),), "bark.BarkSelfAttention"),
    (
        (FusedLayout("qkv_linear: q k v", when="fast_qkv"), FusedLayout("query: q; key: k; value: v")),
        "layoutlmv2.LayoutLMv2SelfAttention",
    ),
    (
        (
            FusedLayout("q_attn: q; c_attn: k v", kind="cross", when="is_cross_attention"),
            FusedLayout("c_attn: q k v", kind="self", causal=True, when="not is_cross_attention"),
        ),
        "gpt2.GPT2Attention decision_transformer.DecisionTransformerGPT2Attention imagegpt.ImageGPTAttention",
    ),
    ((FusedLayout("c_attn: q k v", causal=True),), "openai.Attention"),
    (
        (
            FusedLayout("q_attn: q; c_attn: k v", kind="cross", when="is_cross_attention"),
            FusedLayout(f"c_attn: {_GROUPED.replace('kv_heads*head_dim', 'kv_dim')}", when="multi_query"),
            FusedLayout("c_attn: heads * (q k v)", when="not multi_query"),
        ),
        "gpt_bigcode.GPTBigCodeAttention",
    ),
    ((FusedLayout(_PER_HEAD),), "gpt_neox.GPTNeoXAttention persimmon.PersimmonAttention"),
    (
        (FusedLayout(_PER_HEAD, causal=True),),
        "bloom.BloomAttention gpt_neox_japanese.GPTNeoXJapaneseAttention",
    ),
    ((FusedLayout("in_proj: heads * (q k v)"),), "deberta.DisentangledSelfAttention"),
    # Three layouts in one class.
    (
        (
            FusedLayout("query_key_value: kv_heads * (q k=head_dim v=head_dim)", when="new_decoder_architecture"),
            FusedLayout("query_key_value: q k=head_dim v=head_dim", when="multi_query"),
            FusedLayout(_PER_HEAD, when="not multi_query"),
        ),
        "falcon.FalconAttention",
    ),
    # Four parts for four devices, each with its own query, value and key.
    ((FusedLayout("qkv_proj: 4 * (q v k)", causal=True),), "codegen.CodeGenAttention"),
    (
        (FusedLayout("to_q: q; to_kv: k v"),),
        """evolla.EvollaSequenceCompressorAttention granite_speech.GraniteSpeechConformerAttention
        granite_speech_plus.GraniteSpeechPlusConformerAttention""",
    ),
    # Query and output gate of a head side by side in one `q_proj`.
    (
        (FusedLayout("q_proj: heads * (q=head_dim gate=head_dim); k_proj: k; v_proj: v"),),
        """qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention
        qwen4_exp.Qwen4ExpTextAttention""",
    ),
    # Multi-head latent attention: keys are a part for each head and a rotary part that all heads share.
    (
        (
            FusedLayout(f"q_b_proj: q; {_LATENT}; {_ROTARY}", "latent", when="qk_rope_head_dim"),
            FusedLayout(f"q_proj: q; {_LATENT}; {_ROTARY}", "latent", when="qk_rope_head_dim"),
            FusedLayout(f"q_b_proj: q; {_LATENT}", "latent", when="not qk_rope_head_dim"),
            FusedLayout(f"q_proj: q; {_LATENT}", "latent", when="not qk_rope_head_dim"),
        ),
        """axk1.AXK1Attention bailing_hybrid.BailingHybridAttention deepseek_v2.DeepseekV2Attention
        deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention dots3_note.Dots3NoteTextAttention
        glm4_moe_lite.Glm4MoeLiteAttention glm5_next.Glm5NextTextAttention glm_moe_dsa.GlmMoeDsaAttention
        hy_v4.HYV4Attention hy_v4_vl.HYV4VLAttention kimi_linear.KimiLinearAttention
        longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention mistral4.Mistral4Attention
        mistral_large4.MistralLarge4TextAttention youtu.YoutuAttention""",
    ),
    (
        (FusedLayout(f"q_gate_proj: heads * (q=qk_head_dim gate); {_LATENT}; {_ROTARY}", "latent"),),
        "axk2.AXK2Attention",
    ),
    (
        (
            FusedLayout(
                "q_content_proj: q; q_pos_proj?: q; q_pos_sine_proj?: q; k_content_proj: k; k_pos_proj: k; v_proj: v"
            ),
        ),
        "conditional_detr.ConditionalDetrDecoderSelfAttention conditional_detr.ConditionalDetrDecoderCrossAttention",
    ),
    (
        (
            FusedLayout(
                "self_attn_query_content_proj: q; self_attn_query_pos_proj: q; "
                "self_attn_key_content_proj: k; self_attn_key_pos_proj: k; self_attn_value_proj: v"
            ),
        ),
        "dab_detr.DabDetrDecoderLayerSelfAttention",
    ),
    (
        (
            FusedLayout(
                "cross_attn_query_content_proj: q; cross_attn_query_pos_proj?: q; cross_attn_query_pos_sine_proj: q; "
                "cross_attn_key_content_proj: k; cross_attn_key_pos_proj: k; cross_attn_value_proj: v",
                heads="decoder_attention_heads",
            ),
        ),
        "dab_detr.DabDetrDecoderLayerCrossAttention",
    ),
    # Layers that take keys and values from an earlier one, and layers whose keys are their values.
    (
        (_SEPARATE, FusedLayout("q_proj: q; k_proj: k,v"), FusedLayout("q_proj: q")),
        """gemma3n.Gemma3nTextAttention gemma4.Gemma4TextAttention gemma4_unified.Gemma4UnifiedTextAttention
        diffusion_gemma.DiffusionGemmaEncoderTextAttention diffusion_gemma.DiffusionGemmaDecoderTextAttention""",
    ),
    ((FusedLayout("k_proj: k; v_proj: v"),), "aimv2.Aimv2AttentionPoolingHead"),  # its query is a parameter
    ((FusedLayout("q_b_proj: q; kv_proj: k,v"),), "deepseek_v4.DeepseekV4Attention"),
    ((FusedLayout("queries_keys_values.linear: heads * (q=key_dim k=key_dim v)"),), "levit.LevitAttention"),
    ((FusedLayout("queries.linear: q; keys_values.linear: heads * (k=key_dim v)"),), "levit.LevitAttentionSubsample"),
    (
        (
            FusedLayout(
                "query: q; key_protein?: k; key_structure?: k; key_msa?: k; "
                "value_protein?: v; value_structure?: v; value_msa?: v"
            ),
        ),
        "evolla.EvollaSequenceAlignerCrossAttention",
    ),
    # Words and entities have queries of their own for each other.
    (
        (FusedLayout("query: q; w2e_query?: q; e2w_query?: q; e2e_query?: q; key: k; value: v"),),
        "luke.LukeSelfAttention",
    ),
    # Two attentions with the same scores: each side is the query of the one and the key of the other.
    (
        (
            FusedLayout(
                "vision_proj: q,k; text_proj: q,k; values_vision_proj: v; values_text_proj: v",
                kind="cross",
            ),
        ),
        """grounding_dino.GroundingDinoBiMultiHeadAttention mm_grounding_dino.MMGroundingDinoBiMultiHeadAttention""",
    ),
    # Two attentions whose scores are added.
    (
        (FusedLayout("query: q; layout_query: q; key: k; layout_key: k; value: v; layout_value: v"),),
        "lilt.LiltSelfAttention",
    ),
    (
        (
            FusedLayout(
                "experts.input_linear.weight: q; kv_proj: k v",
                out_axes=2,
                heads="num_local_experts*num_key_value_heads",
            ),
        ),
        "jetmoe.JetMoeAttention",
    ),
    (
        (
            FusedLayout(
                "qkv_proj.q_proj: q,k; qkv_proj.k_proj: q,k; qkv_proj.v_proj_current: v; qkv_proj.v_proj_delayed: v"
            ),
        ),
        "zaya.ZayaAttention",
    ),
    ((FusedLayout(_SEPARATE.rows, kind="approximate"),), "informer.InformerProbSparseAttention"),
    ((FusedLayout("q: q; k: k; v: v", transposed=True, out_axes=2),), "xlnet.XLNetRelativeAttention"),
)


def _path(short: str) -> str:
    package, _, name = short.partition(".")
    return f"transformers.models.{package}.modeling_{package}.{name}"


TRANSFORMERS: dict[str, _Layouts] = {_path(name): layouts for layouts, names in _TABLE for name in names.split()}
