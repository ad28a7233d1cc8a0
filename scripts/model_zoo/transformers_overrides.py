"""Entries of tiny configurations that the rules of `transformers_shrink` do not find, by type."""

from __future__ import annotations

from typing import Any

__all__ = ["CONVOLUTIONAL", "OVERRIDES"]

# Backbones without attention whose widths must agree with those that the parent names: left as they are.
CONVOLUTIONAL = frozenset(
    {
        "bit",
        "dinov3_convnext",
        "efficientnet",
        "hgnet_v2",
        "regnet",
        "resnet",
        "rt_detr_resnet",
        "textnet",
        "timm_backbone",
        "timm_wrapper",
        "uvdoc_backbone",
        "uvdoc",
        "align_vision_model",
        "pp_lcnet",
        "pp_lcnet_v3",
        "pp_lcnet_v4",
    }
)

# A timm tower for the video models.
PERCEPTION: dict[str, Any] = {
    "num_labels": 64,
    "model_args": {"img_size": [56, 56], "embed_dim": 64, "depth": 2, "num_heads": 4, "global_pool": "map"},
}

# Merged into the shrunk entries of every configuration of that type, also within others. `__init__` holds arguments of
# the configuration class, for types whose default is not valid.
OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 120,
        "audio_token_offset": 136,
        "vision_config": {"codebook_size": 16, "base_channels": 32, "num_res_blocks": 1, "resolution": 64},
        "audio_config": {"codebook_size": 16},
    },
    "blt": {
        "encoder_config": {"hidden_size_global": 128},
        "decoder_config": {"hidden_size_global": 128},
        "global_config": {"hidden_size": 128, "head_dim": 32, "encoder_cross_output_size": None},
    },
    "align_vision_model": {"image_size": 64},
    "efficientnet": {"image_size": 64},
    "textnet": {"image_size": [64, 64]},
    "dots3_note_vision_encoder": {"num_experts_per_tok": 1},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 2]},
    "llama4_vision_model": {"intermediate_size": 256},
    "phi4_multimodal_audio": {"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64},
    "clap": {"audio_config": {"patch_embeds_hidden_size": 16, "hidden_size": 128}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_audio_encoder": {"conv_output_size": 1024, "adapter_input_size": 64},
    "edgetam_vision_model": {
        "backbone_config": {"architecture": "repvit_m1"},  # the default has a misspelt name
        "backbone_channel_list": [384, 192, 96, 48],
    },
    "efficientloftr": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "gemma3n_vision": {"hidden_size": 2048, "model_args": {"channel_multiplier": 0.125}},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192},
    "molmo2_vision": {"num_position_embeddings": 16},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "neucodec": {"quantization_dim": 128},
    "xcodec2": {"quantization_dim": 128},
    "pi0": {"dit_config": {"head_dim": 32}, "vlm_config": {"text_config": {"head_dim": 32}}},
    "xcodec": {"codebook_dim": 128},
    "omdet-turbo": {
        "vision_features_channels": [64, 64, 64],
        "text_projection_in_dim": 64,
        "text_projection_out_dim": 32,
        "class_embed_dim": 32,
    },
    "pe_video_encoder": {"vision_config": PERCEPTION},
    "pe_audio_video_encoder": {"video_config": {"vision_config": PERCEPTION}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_lang_large_patch14_448",
            "model_args": {"img_size": [56, 56], "embed_dim": 64, "depth": 2, "num_heads": 4},
        }
    },
    "sam2_hiera_det_model": {"global_attention_blocks": [4]},
    "seggpt": {"image_size": [128, 64]},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "step3p5": {"sliding_window": 8},
    "superglue": {"hidden_size": 256},
    "align": {"projection_dim": 640},
    "aria": {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4},
    "blip-2": {"image_token_index": 100},
    "instructblip": {"image_token_index": 100},
    "instructblipvideo": {"video_token_index": 100},
    "bros": {"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2, "dim_bbox_projection": 16},
    "clvp_encoder": {"num_attention_heads": 2},
    "clvp": {"text_config": {"num_attention_heads": 2}, "speech_config": {"num_attention_heads": 2}},
    "depth_pro": {
        "intermediate_hook_ids": [1, 0],
        "patch_size": 64,
        "image_size": 256,
        "scaled_images_ratios": [0.25, 0.5, 1],
    },
    "emu3_vqgan": {"codebook_size": 16, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2], "hidden_size": 64},
    "embedding_gemma2": {"__init__": {"vision_config": {}, "audio_config": {}}},
    "gemma4": {"__init__": {"vision_config": {}, "audio_config": {}}},
    "gemma4_unified": {"__init__": {"vision_config": {}, "audio_config": {}}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mistral4": {"head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 64},
    "paddleocr_vl_text": {"rope_parameters": {"mrope_section": [6, 6, 4]}},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "zoedepth": {"bottleneck_features": 64},
    "autoformer": {"prediction_length": 16, "context_length": 16},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {
        "vocabulary_map": {"<image>": 90} | {f"IMGIMG{letter}Z": 91 + n for n, letter in enumerate("ABCDEFGH")}
    },
    "chameleon_vqgan": {"num_embeddings": 8, "base_channels": 32, "channel_multiplier": [1, 2]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "cvt": {"depth": [1, 2, 3]},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4},
    "dory": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {
        "vocabulary_map": {"<|extra_200|>": 90, "<image>": 91}
        | {f"<|visual token {index:06d}|>": 92 + index for index in range(16)}
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": [128] * 4,
    },
    "gemma4_assistant": {
        "__init__": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
        "text_config": {"num_kv_shared_layers": 2},
    },
    "granite4_vision": {"deepstack_layer_map": [[-2, 0], [-1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "informer": {"prediction_length": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lw_detr": {"projector_scale_factors": [1.0], "num_feature_levels": 1, "projector_in_channels": [64]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8], "max_position_embeddings": 64},
    "squeezebert": {"embedding_size": 64},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": {"prediction_length": 8},
    "timm_backbone": {"__init__": {"backbone": "resnet18"}},
    "timm_wrapper": {"architecture": "vit_tiny_patch16_224", "model_args": {"img_size": 64, "depth": 2}},
    "tvp": {"max_img_size": 256, "visual_prompt_size": 16},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
    },
}
