"""Rules for the arguments of transformers models that carry text and images: how to make a small value by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.surgery.samples.transformers_facts import Call

__all__ = ["RULES", "Rule", "argument"]


@dataclass(frozen=True)
class Rule:
    """How one argument is made.

    Args:
        make: Makes the value; None leaves the argument out.
        wanted: Whether the argument is passed even where it is optional.
    """

    make: Callable[[Call], Any]
    wanted: Callable[[Call], bool]


RULES: dict[str, Rule] = {}
Maker = Callable[[Call], Any]


def argument(*names: str, optional: bool | Callable[[Call], bool] = True) -> Callable[[Maker], Maker]:
    """Register a rule.

    Args:
        names: Arguments that it makes.
        optional: Whether it is passed where the method can do without it.
    """

    def register(make: Maker) -> Maker:
        wanted = optional if callable(optional) else lambda call: bool(optional)
        for name in names:
            RULES[name] = Rule(make, wanted)
        return make

    return register


# ---- text

CONTEXT = 5  # states of a model that is assisted


@argument("input_ids", "classes_input_ids", "tasks_input_ids", "qformer_input_ids")
def input_ids(call: Call) -> Tensor:
    """Random ids: (batch, length), or (batch, length, codebooks) for models of several streams."""
    facts = call.facts
    streams = call.streams("input_ids")
    if streams is not None:
        return facts.token_ids(facts.batch, facts.length, streams)
    if call.takes("image_embeds_position_mask"):
        return facts.token_ids(*image_embeds_position_mask(call).shape)
    if call.takes("encoder_inputs_embeds"):  # added to the features of the sound, step by step
        frames = RULES["input_features"].make(call).shape[-1]
        return facts.token_ids(facts.batch, frames // 2 // facts.size("audio", "downsample_factor", default=4))
    text = facts.token_ids(facts.batch, facts.length)
    count, token = call.placeholders
    if not count:
        return text
    return torch.cat((text[:, :2], text.new_full((facts.batch, count), token), text[:, 2:]), 1)


@argument("task_inputs")
def task_inputs(call: Call) -> Tensor:
    """A task as ids of fixed length."""
    return call.facts.token_ids(call.facts.batch, call.facts.size("text", "task_seq_len", default=call.facts.length))


@argument("decoder_input_ids")
def decoder_input_ids(call: Call) -> Tensor:
    facts = call.facts
    if facts.kind("musicgen", "musicgen_melody"):  # the streams one below the other
        return facts.token_ids(facts.batch * facts.size("text", "num_codebooks", default=4), 8)
    streams = call.streams("decoder_input_ids")
    return facts.token_ids(facts.batch, 8) if streams is None else facts.token_ids(facts.batch, 8, streams)


@argument("protein_attention_mask")
def protein_attention_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, call.facts.length)


@argument("qformer_attention_mask", "classes_attention_mask", "tasks_attention_mask", optional=False)
def text_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, call.facts.length)


@argument("attention_mask", optional=lambda call: call.takes("context_hidden_states"))
def attention_mask(call: Call) -> Tensor:
    """All tokens, and the context that stands before them."""
    context = CONTEXT if call.takes("context_hidden_states") else 0
    return call.facts.mask(call.facts.batch, context + call.facts.length)


@argument("classes_structure", optional=False)
def classes_structure(call: Call) -> Tensor:
    """How many classes each image looks for: (batch,), one each."""
    return call.facts.mask(call.facts.batch)


@argument("use_cache")
def use_cache(call: Call) -> bool:
    """A cache costs memory, and some hybrid models can not make one in a single pass."""
    return False


@argument("protein_input_ids")
def protein_input_ids(call: Call) -> Tensor:
    return call.facts.token_ids(call.facts.batch, call.facts.length)


@argument("input_boxes", optional=lambda call: call.takes("text_embeds"))
def input_boxes(call: Call) -> Tensor:
    """One box as centre and size, in parts of the image: (batch, 1, 4)."""
    return call.facts.uniform(call.facts.batch, 1, 4) / 2 + 0.25


@argument("bbox")
def bbox(call: Call) -> Tensor:
    """Boxes x0 <= x1, y0 <= y1 on a page of a few units: (batch, length, 4)."""
    facts = call.facts
    corner = facts.integers(facts.batch, facts.length, 2, high=8)
    return torch.cat((corner, corner + facts.integers(facts.batch, facts.length, 2, high=8)), -1)


def wants_embeddings(call: Call) -> bool:
    """Whether a model reads embeddings only: those of the model that it assists, or that it speaks for."""
    return (call.takes("shared_kv_states") and call.facts.backbone() > 0) or call.takes("talker_input_ids")


@argument("inputs_embeds", "noise_embeds", optional=wants_embeddings)
def inputs_embeds(call: Call) -> Tensor:
    facts = call.facts
    if facts.backbone():  # an embedding and a state of the model that is assisted, side by side; one new token
        return facts.normal(facts.batch, 1, facts.backbone())
    return facts.normal(
        facts.batch, facts.length, facts.size("text", "backbone_hidden_size", "hidden_size", default=64)
    )


@argument("encoder_hidden_states", optional=lambda call: call.facts.cross_width() is not None)
def encoder_hidden_states(call: Call) -> Tensor | None:
    """States that a decoder attends to, as wide as its cross-attention reads."""
    facts = call.facts
    width = facts.cross_width()
    return None if width is None else facts.normal(facts.batch, 7, width)


@argument("entity_ids")
def entity_ids(call: Call) -> Tensor:
    facts = call.facts
    return facts.integers(facts.batch, 3, high=facts.size("text", "entity_vocab_size", default=2))


@argument("entity_position_ids")
def entity_position_ids(call: Call) -> Tensor:
    """Tokens of each entity, padded with -1: (batch, entities, mention length)."""
    facts = call.facts
    positions = facts.integers(facts.batch, 3, 4, high=facts.length)
    positions[:, :, 2:] = -1
    return positions


# ---- images

TILED = ("instructblipvideo", "colmodernvbert", "perception_lm")
INKLING = ("inkling2", "inkling2_loop", "inkling2_vision")


def image_shape(call: Call) -> tuple[int, int, int]:
    """Channels, height, width that the configuration, or the timm model within, asks for."""
    facts = call.facts
    channels = facts.size("vision", "num_channels", "in_channels", "in_chans", "input_channels", default=3)
    size = facts.get(
        "vision", "image_size", "img_size", "max_img_size", "pretrain_image_size", "train_size", "input_size"
    )
    if size is None or facts.timm_size() is not None:
        size = facts.timm_size() or size or 96
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if facts.kind("depth_pro"):  # the smallest of the scaled images is one patch
        height = width = int(facts.config.patch_size / min(facts.config.scaled_images_ratios))
    if facts.kind("janus_vqgan"):
        height = width = facts.config.num_patches * 2 ** (len(facts.config.channel_multiplier) - 1)
    if facts.kind("seggpt"):  # image and prompt, one above the other
        height //= 2
    return channels, int(height), int(width)


def patch_grid(call: Call) -> tuple[int, int]:
    """Height and width, in patches, of the images that are passed as patches: two merged patches each way."""
    merge = call.facts.size(
        "vision",
        "pooling_kernel_size",
        "spatial_merge_size",
        "merge_kernel_size",
        "merge_size",
        "downsample_factor",
        default=2,
    )
    return 2 * merge, 2 * merge


def patches(call: Call) -> Tensor:
    """Patches of all images, one row each: (patches, channels * frames * patch * patch), or not flattened."""
    facts = call.facts
    rows, columns = patch_grid(call)
    patch = facts.size("vision", "patch_size", default=14)
    channels = facts.size("vision", "num_channels", "in_channels", "in_chans", default=3)
    frames = facts.size("vision", "temporal_patch_size", "patch_temporal", default=1)
    first = facts.first_layer(nn.Conv2d, nn.Conv3d, nn.Linear, within=r"vis|patch_embed|patch_proj")
    flat = facts.kind("hunyuan_vl", "hunyuan_vl_vision", "hy_v4_vl", "hy_v4_vl_vision")
    if isinstance(first, nn.Conv2d) and first.kernel_size == (patch, patch) and not flat:
        return facts.normal(facts.batch * rows * columns, channels, patch, patch)
    return facts.normal(facts.batch * rows * columns, channels * frames * patch * patch)


@argument("pixel_values", "pixel_values_images", "prompt_pixel_values", "prompt_masks", "image_pixel_values")
def pixel_values(call: Call) -> Tensor:
    facts = call.facts
    channels, height, width = image_shape(call)
    rows, columns = patch_grid(call)
    patch = facts.size("vision", "patch_size", default=16)
    if facts.kind(*INKLING):  # merged patches, channels last
        side = patch * rows // 2
        return facts.normal(facts.batch * 4, side, side, channels)
    if facts.kind("inkling_mm_model"):  # time, height, width, channels
        return facts.normal(facts.batch, facts.size("vision", "temporal_patch_size", default=2), patch, patch, channels)
    if facts.kind("colqwen2"):  # padded for each image
        return patches(call).view(facts.batch, rows * columns, -1)
    if call.takes("image_grid_thw", "grid_thw", "image_grid_hw"):
        return patches(call)
    if facts.kind("gemma4_unified"):
        patch *= rows // 2
    if call.takes("spatial_shapes", "pixel_position_ids", "image_position_ids"):
        return facts.uniform(facts.batch, rows * columns, channels * patch * patch)
    if call.takes("image_token_pooling"):
        return facts.normal(facts.batch, height // patch * (width // patch), channels * patch * patch)
    if call.takes("target_sizes"):  # all images in one strip of patches
        return facts.normal(1, channels, patch, facts.batch * rows * columns * patch)
    if call.takes("aspect_ratio_ids"):
        return facts.normal(facts.batch, 1, facts.size("vision", "max_num_tiles", default=4), channels, height, width)
    if (pinpoints := facts.get("vision", "image_grid_pinpoints")) is not None:
        tiles = pinpoints[0][0] // height * (pinpoints[0][1] // width) + 1
        return facts.normal(facts.batch, tiles, channels, height, width)
    if call.takes("pixel_attention_mask", "perceiver_embeddings") or facts.kind(*TILED):
        return facts.normal(facts.batch, 1, channels, height, width)
    if facts.kind("lightglue", "superglue", "efficientloftr"):
        return facts.normal(facts.batch, 2, channels, height, width)
    if facts.get("vision", "num_frames", "tubelet_size") is not None and not facts.kind("git"):
        return facts.normal(facts.batch, facts.size("vision", "num_frames", default=4), channels, height, width)
    first = facts.first_layer(nn.Conv2d, nn.Conv3d, nn.Linear, within=r"vis|patch_embed")
    unfolds = facts.kind("llama4", "llama4_vision_model")
    if isinstance(first, nn.Linear) and first.in_features == channels * patch * patch and not unfolds:
        return facts.normal(facts.batch, 4, first.in_features)
    return facts.normal(facts.batch, channels, height, width)


@argument("high_res_pixel_values")
def high_res_pixel_values(call: Call) -> Tensor:
    facts = call.facts
    size = facts.config.high_res_vision_config.image_size
    return facts.normal(facts.batch, 3, size, size)


@argument("pixel_values_videos", optional=lambda call: "pixel_values" not in call.parameters)
def pixel_values_videos(call: Call) -> Tensor:
    facts = call.facts
    channels, height, width = image_shape(call)
    frames = facts.size("vision", "num_frames", "frames_per_clip", default=4)
    return facts.normal(facts.batch, frames, channels, height, width)


@argument("flattened_patches")
def flattened_patches(call: Call) -> Tensor:
    """Patches that begin with their row and column, from 1: (batch, patches, 2 + channels * patch * patch)."""
    facts = call.facts
    patch = facts.size("vision", "patch_size", default=16)
    place = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).to(facts.device, facts.dtype)
    return torch.cat((place.expand(facts.batch, -1, -1), facts.normal(facts.batch, 9, 3 * patch * patch)), -1)


@argument("image_grid_thw", "grid_thw")
def image_grid_thw(call: Call) -> Tensor | None:
    if not call.takes("pixel_values", "hidden_states"):
        return None
    rows, columns = patch_grid(call)
    if call.facts.kind(*INKLING):  # counted in merged patches
        rows, columns = 2, 2
    return call.facts.tensor([[1, rows, columns]] * call.facts.batch)


@argument("merge_sizes", "image_merge_sizes")
def merge_sizes(call: Call) -> Tensor:
    return call.facts.tensor([patch_grid(call)[0] // 2] * call.facts.batch)


@argument("spatial_shapes", "image_grid_hw", "target_sizes", optional=lambda call: call.takes("pixel_values"))
def spatial_shapes(call: Call) -> Tensor:
    return call.facts.tensor([list(patch_grid(call))] * call.facts.batch)


@argument("pixel_position_ids", "image_position_ids", optional=lambda call: call.takes("pixel_values"))
def pixel_position_ids(call: Call) -> Tensor:
    rows, columns = patch_grid(call)
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(call.facts.device)
    return grid.expand(call.facts.batch, -1, -1)


@argument("pixel_attention_mask", optional=lambda call: call.takes("spatial_shapes") or call.facts.kind("pi0"))
def pixel_attention_mask(call: Call) -> Tensor:
    facts = call.facts
    if call.takes("spatial_shapes"):
        rows, columns = patch_grid(call)
        return facts.mask(facts.batch, rows * columns)
    return facts.mask(facts.batch, 1).bool()  # one tile each


@argument("image_sizes", optional=lambda call: call.facts.get("vision", "image_grid_pinpoints") is not None)
def image_sizes(call: Call) -> Tensor:
    """Height and width of each image in pixels: the first that the model cuts into tiles, or one tile."""
    pinpoints = call.facts.get("vision", "image_grid_pinpoints")
    size = list(image_shape(call)[1:]) if pinpoints is None else list(pinpoints[0])
    return call.facts.tensor([size] * call.facts.batch)


@argument("aspect_ratio_ids")
def aspect_ratio_ids(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, 1)


@argument("aspect_ratio_mask")
def aspect_ratio_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, 1, call.facts.size("vision", "max_num_tiles", default=4))


@argument("cross_attention_mask")
def cross_attention_mask(call: Call) -> Tensor:
    facts = call.facts
    return facts.mask(facts.batch, facts.length, 1, facts.size("vision", "max_num_tiles", default=4))


@argument("image_attention_mask", optional=lambda call: call.takes("perceiver_embeddings"))
def image_attention_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, call.facts.length, 1)


@argument("image_embeds_position_mask")
def image_embeds_position_mask(call: Call) -> Tensor:
    """Which tokens stand for the image: as many as the model makes of it, after the first."""
    facts = call.facts
    count = facts.size("vision", "latent_query_num", default=4)
    mask = facts.mask(facts.batch, facts.length + count)
    mask[:, : facts.length - 1] = 0
    mask[:, -1] = 0
    return mask.bool()


@argument("image_token_pooling")
def image_token_pooling(call: Call) -> Tensor:
    """Four patches for each token: (images * tokens, 4), in the flattened patches of all images."""
    _, height, width = image_shape(call)
    patch = call.facts.size("vision", "patch_size", default=14)
    return torch.arange(height // patch * (width // patch), device=call.facts.device).view(-1, 4)


@argument("image_grids")
def image_grids(call: Call) -> Tensor:
    """Rows and columns of the small and the large view of each image."""
    return call.facts.tensor([[1, len(image_token_pooling(call)), 0, 0]])
