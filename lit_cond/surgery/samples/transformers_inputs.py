"""One rule for each argument name of the forward methods in transformers: how to make a small value for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.surgery.samples.transformers_facts import Call

__all__ = ["RULES", "Rule"]


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


def argument(*names: str, optional: bool | Callable[[Call], bool] = True) -> Callable[[Callable[[Call], Any]], Any]:
    """Register a rule.

    Args:
        names: Arguments that it makes.
        optional: Whether it is passed where the method can do without it.
    """

    def register(make: Callable[[Call], Any]) -> Callable[[Call], Any]:
        wanted = optional if callable(optional) else lambda call: bool(optional)
        for name in names:
            RULES[name] = Rule(make, wanted)
        return make

    return register


# ---- text


@argument("input_ids", "classes_input_ids", "text_inputs")
def input_ids(call: Call) -> Tensor:
    facts = call.facts
    return facts.token_ids(facts.batch, facts.length)


@argument("decoder_input_ids")
def decoder_input_ids(call: Call) -> Tensor:
    facts = call.facts
    return facts.token_ids(facts.batch, 8)


@argument("attention_mask", "qformer_attention_mask", "classes_attention_mask", optional=False)
def attention_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, call.facts.length)


@argument("qformer_input_ids")
def qformer_input_ids(call: Call) -> Tensor:
    facts = call.facts
    return facts.token_ids(facts.batch, facts.length)


@argument("bbox")
def bbox(call: Call) -> Tensor:
    """Boxes x0 <= x1, y0 <= y1 on a page of a few units: (batch, length, 4)."""
    facts = call.facts
    corner = facts.integers(facts.batch, facts.length, 2, high=8)
    return torch.cat((corner, corner + facts.integers(facts.batch, facts.length, 2, high=8)), -1)


# ---- images


def image_shape(call: Call) -> tuple[int, int, int]:
    """Channels, height, width that the configuration asks for."""
    facts = call.facts
    size = facts.get("vision", "image_size", "img_size", "pretrain_image_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return facts.size("vision", "num_channels", "in_channels", "in_chans", default=3), int(height), int(width)


def patch_grid(call: Call) -> tuple[int, int]:
    """Height and width, in patches, of the images that are passed as patches: two merged patches each way."""
    merge = call.facts.get(
        "vision", "spatial_merge_size", "merge_kernel_size", "merge_size", "downsample_factor", default=2
    )
    merge = merge[0] if isinstance(merge, list | tuple) else merge
    return 2 * int(merge), 2 * int(merge)


@argument("pixel_values", "pixel_values_images", "image_pixel_values")
def pixel_values(call: Call) -> Tensor:
    facts = call.facts
    if call.takes("image_grid_thw", "grid_thw"):
        return flattened_images(call)
    channels, height, width = image_shape(call)
    if call.takes("spatial_shapes"):
        rows, columns = patch_grid(call)
        patch = facts.size("vision", "patch_size", default=16)
        return facts.normal(facts.batch, rows * columns, channels * patch * patch)
    if facts.get("vision", "num_frames", "tubelet_size") is not None:
        return facts.normal(facts.batch, facts.size("vision", "num_frames", default=4), channels, height, width)
    return facts.normal(facts.batch, channels, height, width)


@argument("pixel_values_videos", optional=lambda call: not call.takes("pixel_values"))
def pixel_values_videos(call: Call) -> Tensor:
    facts = call.facts
    channels, height, width = image_shape(call)
    frames = facts.size("vision", "num_frames", "frames_per_clip", default=4)
    return facts.normal(facts.batch, frames, channels, height, width)


def flattened_images(call: Call) -> Tensor:
    """Patches of all images, one row each: (patches, channels * frames * patch * patch)."""
    facts = call.facts
    rows, columns = patch_grid(call)
    patch = facts.size("vision", "patch_size", default=14)
    frames = facts.size("vision", "temporal_patch_size", default=1)
    channels = facts.size("vision", "num_channels", "in_channels", "in_chans", default=3)
    return facts.normal(facts.batch * rows * columns, channels * frames * patch * patch)


@argument("image_grid_thw", "grid_thw")
def image_grid_thw(call: Call) -> Tensor | None:
    if not call.takes("pixel_values", "hidden_states"):
        return None
    rows, columns = patch_grid(call)
    return call.facts.tensor([[1, rows, columns]] * call.facts.batch)


@argument("hidden_states")
def hidden_states(call: Call) -> Tensor:
    if call.takes("grid_thw"):
        return flattened_images(call)
    facts = call.facts
    return facts.normal(facts.batch, facts.size("text", "hidden_size", default=64), 16)


@argument("spatial_shapes")
def spatial_shapes(call: Call) -> Tensor:
    return call.facts.tensor([list(patch_grid(call))] * call.facts.batch)


@argument("pixel_attention_mask", optional=lambda call: call.takes("spatial_shapes"))
def pixel_attention_mask(call: Call) -> Tensor:
    facts = call.facts
    if call.takes("spatial_shapes"):
        rows, columns = patch_grid(call)
        return facts.mask(facts.batch, rows * columns)
    _, height, width = image_shape(call)
    return facts.mask(facts.batch, height, width)


@argument("image_sizes", optional=lambda call: call.takes("pixel_values"))
def image_sizes(call: Call) -> Tensor:
    _, height, width = image_shape(call)
    return call.facts.tensor([[height, width]] * call.facts.batch)


# ---- sound


@argument("input_features", "audio_mel")
def input_features(call: Call) -> Tensor:
    """Mel spectrogram, channels before time where the first layer is a convolution over time."""
    facts = call.facts
    bins = facts.size("audio", "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    frames = 2 * facts.size("audio", "max_source_positions", default=64)
    first = facts.first_layer(nn.Conv1d, nn.Conv2d, nn.Linear, within=r"audio|speech|encoder|^\w+$|subsampl|conv")
    if isinstance(first, nn.Conv1d) and first.in_channels == bins:
        return facts.normal(facts.batch, bins, frames)
    return facts.normal(facts.batch, min(frames, 256), bins)


@argument("input_features_mask", "audio_mel_mask", "feature_attention_mask", optional=False)
def input_features_mask(call: Call) -> Tensor:
    features = input_features(call)
    facts = call.facts
    bins = facts.size("audio", "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    return facts.mask(facts.batch, features.shape[2] if features.shape[1] == bins else features.shape[1])


@argument("input_values")
def input_values(call: Call) -> Tensor:
    facts = call.facts
    if call.takes("padding_mask", "n_quantizers", "audio_codes"):
        return facts.normal(facts.batch, 1, 7680)
    return facts.normal(facts.batch, 4000)


# ---- time series


@argument("past_values")
def past_values(call: Call) -> Tensor:
    facts = call.facts
    length = facts.size("text", "context_length", default=32)
    return facts.normal(facts.batch, length, facts.size("text", "num_input_channels", default=1))
