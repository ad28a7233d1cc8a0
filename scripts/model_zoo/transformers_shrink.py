"""Make the configuration of a transformers model tiny, by the names of its entries.

The rules keep what decides how attention is stored: fewer key than query heads, head widths that differ from the model
width, every kind of layer of a pattern. Everything else becomes as small as the code allows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from scripts.model_zoo.transformers_overrides import CONVOLUTIONAL, LIMITS, OVERRIDES, VOCAB, WIDTH

__all__ = ["merge", "shrink"]

HEADS = 4
HEAD_DIM = 16

LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|num_(encoder|decoder|hidden|global|temporal|spatial|auxiliary)_layers"
    r"|(encoder|decoder|speech_encoder|t2u_encoder|t2u_decoder|text_encoder|pred|mit|memory_attention|conf)"
    r"_(num_)?(hidden_)?layers|(pred|mit|conf|encoder|decoder)_num_hidden_layers|[lxr]_layers|depth|layers|num_blocks"
    r"|resampler_depth|num_adapter_layers|perceiver_resampler_num_layers|memory_fuser_num_layers|num_residual_layers"
    r"|num_self_attends_per_block|n_(input|recurrent|output)_layers|num_layers_per_stack|num_attention_layers"
    r"|text_encoder_num_layers|query_dec_layers|num_pooler_layers|num_mel_attn_blocks|decoder_num_layers)$"
)
WIDTHS = re.compile(
    r"^(d_model|n_embd|embed_dim|dim|emb_dim|embedding_dim|projection_dim|out_hidden_size|word_embed_proj_dim"
    r"|cross_hidden_size|(\w+_)?hidden_size|(\w+_)?hidden_dim|encoder_hidden_dim|d_latents|mask_feature_size|fpn_hidden_size"
    r"|output_hidden_size|lru_width|condition_dim|adapter_out_dim|adapter_in_dim|output_proj_dims|hidden_size_per_layer_input"
    r"|\w+_embed_dim|pooler_hidden_size|projection_size|vision_output_dim|text_encoder_width|output_size|output_channels|vit_dim)$"
)
FEED_FORWARD = re.compile(
    r"^((\w+_)?intermediate_size(_mlp)?|(\w+_)?ffn_dim|d_ff|dff|n_inner|ffn_hidden_size|(\w+_)?feed_?forward_(size|dim)"
    r"|dim_feedforward|(\w+_)?mlp_dim|d_inner|mlp_hidden_size|(\w+_)?linear_units|expert_ffn_hidden_size|dim_ff|feed_forward_size"
    r"|(\w+_)?intermediate_dim|encoder_dim_feedforward|decoder_dim_feedforward|moe_hidden_size|share_expert_dim"
    r"|memory_attention_feed_forward_hidden_size|memory_attention_mlp_hidden_size)$"
)
HEAD_COUNTS = re.compile(
    r"^((\w+_)?num_(\w+_)?attention_heads|(\w+_)?attention_heads|n_heads?|num_heads|(\w+_)?num_heads|decoder_num_heads"
    r"|(\w+_)?n_heads|n_head|num_attn_heads|resampler_heads|encoder_heads)$"
)
KV_HEAD_COUNTS = re.compile(r"^((\w+_)?num_(\w+_)?(key_value|kv)(_attention)?_heads|kv_n_heads|num_query_groups)$")
HEAD_DIMS = re.compile(r"^((\w+_)?head_dim|kv_channels|d_kv|d_head|attention_head_size|attention_head_dim|dim_head)$")
TOKEN_IDS = re.compile(r"(token_ids?|token_index|token_indices|_token_idx|^_pad_token_id)$")

EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num)$")


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """A tiny version of a configuration as `to_dict` writes it, sub-configurations included."""
    return _shrink(config, _TokenIds())


def merge(entries: dict[str, Any], override: dict[str, Any]) -> None:
    """Write overriding entries into others, dictionary by dictionary."""
    for key, value in override.items():
        if key == "__init__":
            continue
        if isinstance(value, dict) and isinstance(entries.get(key), dict):
            merge(entries[key], value)
        else:
            entries[key] = value


class _TokenIds:
    """New ids for those beyond the small vocabulary: the same for the same old one, all different."""

    def __init__(self) -> None:
        self.new: dict[int, int] = {}

    def __call__(self, value: int) -> int:
        if value < VOCAB // 2:
            return value
        return self.new.setdefault(value, VOCAB // 2 + len(self.new))


def _shrink(config: dict[str, Any], ids: _TokenIds) -> dict[str, Any]:
    model_type = config.get("model_type")
    if model_type in CONVOLUTIONAL:
        result = dict(config)
        merge(result, OVERRIDES.get(model_type, {}) if model_type != "timm_wrapper" else {})  # its parents say which
        return result
    config = _fewer_layers(config)
    result = {}
    for key, value in config.items():
        if key == "rope_parameters" and isinstance(value, dict):
            result[key] = _shrink_rope(value, config)
        elif isinstance(value, dict) and key not in ("id2label", "label2id", "per_layer_config"):
            result[key] = _shrink(value, ids)
        else:
            result[key] = _entry(str(key), value, config, ids)
    layers = result.get("per_layer_config")
    if isinstance(layers, dict):
        result["per_layer_config"] = {
            index: {name: _scaled(name, value, config, result) for name, value in layer.items()}
            for index, layer in layers.items()
        }
    if isinstance(result.get("depths"), list) and isinstance(result.get("embed_dim"), int):  # widths double
        result["embed_dim"] = min(result["embed_dim"], 16)
        result["hidden_size"] = result["embed_dim"] * 2 ** (len(result["depths"]) - 1)
    if "embed_dim_per_stage" in result:
        result["hidden_size"] = result["embed_dim_per_stage"][0]
    if result.get("sliding_window", 0) is None and "sliding_attention" in (result.get("layer_types") or ()):
        result["sliding_window"] = 8
    if result.get("head_dim", 0) is None and isinstance(result.get("num_attention_heads"), int):
        result["head_dim"] = HEAD_DIM
    merge(result, OVERRIDES.get(model_type, {}) if isinstance(model_type, str) else {})
    return result


def _scaled(name: str, value: Any, old: dict[str, Any], new: dict[str, Any]) -> Any:
    """An entry of one layer, in proportion to that of all layers."""
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(old.get(name), int):
        return value
    return max(1, new[name] * value // old[name])


def _entry(key: str, value: Any, config: dict[str, Any], ids: _TokenIds) -> Any:
    """The small value of one entry."""
    if TOKEN_IDS.search(key):
        return [_token(item, ids) for item in value] if isinstance(value, list) else _token(value, ids)
    if isinstance(value, bool) or not isinstance(value, int | list):
        return value
    if key == "image_grid_pinpoints" and isinstance(value, list):
        vision = config["vision_config"]
        old, new = vision["image_size"], _image("image_size", vision["image_size"], vision)
        return [[new * (side // old) for side in size] for size in value]
    if isinstance(value, list):
        return _list_entry(key, value)
    if key in LIMITS:
        return min(value, LIMITS[key])
    if key == "window_size":
        if "spatial_merge_size" in config:
            return 2 * int(config["spatial_merge_size"]) * int(config["patch_size"])
        return min(value, 4) if "patch_size" in config else value
    if key == "codebook_dim":
        return min(value, WIDTH) if value == config.get("hidden_size") else value
    for pattern, rule in RULES:
        if pattern.match(key):
            return rule(key, value, config)
    return value


def _token(value: Any, ids: _TokenIds) -> Any:
    return ids(value) if isinstance(value, int) else value


def _list_entry(key: str, values: list[Any]) -> list[Any]:
    """A list with one entry for each stage: same length, same proportions."""
    if key == "backbone_feature_sizes":
        return [[4 * size[0] // values[-1][0], 4 * size[1] // values[-1][1]] for size in values]
    if not values or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return values
    if key == "vision_feature_layer":
        return [-1 - index % 2 for index in range(len(values))]
    if key.endswith("heads_per_layer"):
        largest = max(values)
        return [max(1, value * HEADS // largest) for value in values]
    if key == "image_size":
        return [min(value, 64 * round(value / min(values))) for value in values]
    if key == "downsample_channels":
        return [WIDTH // 2, WIDTH]
    if key == "decoder_in_channels":
        return [min(value, WIDTH) for value in values]
    if key in ("depths", "num_blocks", "blocks_per_stage", "layers", "depth", "num_layers"):
        return [min(value, 2) for value in values]
    if key in (
        "hidden_sizes",
        "embed_dim",
        "embed_dims",
        "neck_hidden_sizes",
        "embed_dim_per_stage",
        "backbone_channel_list",
        "encoder_hidden_sizes",
    ):
        unit = math.gcd(*values)
        return [min(value, 16 * value // unit) for value in values]
    if HEAD_COUNTS.match(key) or key == "num_attention_heads_per_stage":
        unit = math.gcd(*values)
        return [min(value, 2 * value // unit) for value in values]
    return values


def _heads(key: str, value: int, config: dict[str, Any]) -> int:
    return min(value, HEADS)


def _kv_heads(key: str, value: int, config: dict[str, Any]) -> int:
    """Half of the query heads where there are fewer by default, else all."""
    partner = re.sub(r"(key_value_attention|key_value|kv)_heads", "attention_heads", key)
    heads = next(
        (config[name] for name in (partner, "num_attention_heads", "n_heads", "num_heads") if name in config), value
    )
    if not isinstance(heads, int) or value >= heads:
        return min(value, HEADS)
    return min(value, HEADS // 2)


def _head_dim(key: str, value: int, config: dict[str, Any]) -> int:
    """Keeps whether heads times width is the model width."""
    if "qk_rope_head_dim" in config:
        rope, nope = int(config["qk_rope_head_dim"]), int(config.get("qk_nope_head_dim", 0))
        if value == rope:
            return min(rope, 8)
        if value == rope + nope:
            return min(rope, 8) + min(nope, 16)
    width = next((config[name] for name in ("hidden_size", "d_model", "n_embd", "dim") if name in config), None)
    heads = next(
        (config[name] for name in ("num_attention_heads", "num_heads", "n_heads", "n_head") if name in config), None
    )
    if isinstance(heads, int) and isinstance(width, int) and heads * value == width:
        return WIDTH // min(heads, HEADS)
    return min(value, 2 * HEAD_DIM) if isinstance(heads, int) else min(value, HEAD_DIM)


def _limit(limit: int) -> Callable[[str, int, dict[str, Any]], int]:
    return lambda key, value, config: min(value, limit)


def _image(key: str, value: int, config: dict[str, Any]) -> int:
    """Four patches each way; eight windows for pyramids."""
    if key == "input_size" and "patch_size" not in config:  # of something else
        return value
    patch = config.get("patch_size", 16)
    patch = patch[0] if isinstance(patch, list) else patch
    smallest = 128 if isinstance(config.get("depths"), list) else 4 * patch if patch > 12 else 64
    return min(value, smallest)


RULES: tuple[tuple[re.Pattern[str], Callable[[str, int, dict[str, Any]], int]], ...] = (
    (KV_HEAD_COUNTS, _kv_heads),
    (HEAD_COUNTS, _heads),
    (HEAD_DIMS, _head_dim),
    (FEED_FORWARD, _limit(2 * WIDTH)),
    (WIDTHS, _limit(WIDTH)),
    (EXPERTS, _limit(4)),
    (re.compile(r"(^|_)vocab_size$"), _limit(VOCAB)),
    (re.compile(r"^(image_size|img_size|max_img_size|pretrain_image_size|input_size)$"), _image),
)


def _shrink_rope(rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Multimodal rotary sections share half of the head width: same proportions, new sum."""
    result = {key: _shrink_rope(value, config) if isinstance(value, dict) else value for key, value in rope.items()}
    section = rope.get("mrope_section")
    if isinstance(section, list) and section:
        heads, width = config.get("num_attention_heads", 1), config.get("hidden_size", WIDTH)
        old = config.get("head_dim") or width // heads
        new = _head_dim("head_dim", old, config) * sum(section) // old
        scaled = [max(1, value * new // sum(section)) for value in section]
        scaled[0] += new - sum(scaled)
        result["mrope_section"] = scaled
    return result


def _fewer_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Two layers, or as many as have each kind of layer of the pattern once; patterns are cut to the same layers."""
    result = dict(config)
    for key, count in config.items():
        if not LAYER_COUNTS.match(str(key)) or not isinstance(count, int) or isinstance(count, bool) or count <= 2:
            continue
        patterns = {
            name: value
            for name, value in config.items()
            if isinstance(value, list) and len(value) == count and count > 4 and not isinstance(value[0], list | dict)
        }
        numbers = [name for name, value in patterns.items() if isinstance(value[0], int) and len(set(value)) == count]
        patterns = {name: value for name, value in patterns.items() if name not in numbers}  # layers, not kinds
        kinds = [tuple(item) for item in zip(*patterns.values(), strict=True)] if patterns else [()] * count
        layers = {int(index): layer for index, layer in (config.get("per_layer_config") or {}).items()}
        if any("num_local_experts" not in layer for layer in layers.values()):
            kinds = [(*kind, str(layers.get(index))) for index, kind in enumerate(kinds)]
        keep = _one_of_each(kinds)
        stages = config.get("out_indices")
        if key == "num_hidden_layers" and isinstance(stages, list) and len(stages) > len(keep):
            keep = list(range(len(stages)))
        result |= {name: [value[index] for index in keep] for name, value in patterns.items()}
        if layers:
            result["per_layer_config"] = {new: layers[old] for new, old in enumerate(keep) if old in layers}
        result |= {name: list(range(len(keep))) for name in numbers}
        result[key] = len(keep)
        if key in ("num_hidden_layers", "depth", "num_layers", "n_layers"):
            result |= _layer_indices(config, len(keep))
    return result


def _layer_indices(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Entries that name layers by number, in a model of `count` layers."""
    result: dict[str, Any] = {}
    if isinstance(config.get("out_indices"), list) and "depths" not in config:
        stages = len(config["out_indices"])
        result["out_indices"] = list(range(count - stages + 1, count + 1))
        result["out_features"] = [f"stage{index}" for index in result["out_indices"]]
        result["stage_names"] = ["stem"] + [f"stage{index + 1}" for index in range(count)]
    for name in ("global_attn_indexes", "fullatt_block_indexes", "full_attn_idxs"):
        if isinstance(config.get(name), list):
            result[name] = [count - 1]
    for name in ("window_block_indexes", "window_block_indices"):
        if config.get(name):
            result[name] = [0]
    if config.get("deepstack_visual_indexes"):
        result["deepstack_visual_indexes"] = [0, 1]
    return result


def _one_of_each(pattern: list[tuple[Any, ...]]) -> list[int]:
    """Indices of the first layer of each kind, at least two."""
    seen: dict[Any, int] = {}
    for index, kind in enumerate(pattern):
        seen.setdefault(repr(kind), index)
    keep = sorted(seen.values()) if len(seen) <= 6 else [0, 1]
    return keep if len(keep) > 1 else [0, 1]
