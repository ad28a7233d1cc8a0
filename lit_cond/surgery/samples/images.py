"""Images for the models of timm and torchvision, of the size that the model itself says."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.surgery.samples.base import Sample

__all__ = ["image_samples"]

LARGE = 3 * 160 * 160
SEED = 0


def image_samples(model: nn.Module) -> list[Sample] | None:
    """Return one small batch of random images that the model takes.

    A timm model is known by its `pretrained_cfg`. That keeps the size of the pretrained weights after
    `create_model(..., img_size=...)`, so the size is what timm has recorded since, where its version does so; else that
    of the first submodule which keeps an `img_size`; else what the configuration declares. Of torchvision the
    transformers whose modules fix or bound the size are known; nothing says the size of the others.

    Args:
        model: Looked at and not run. Nothing is imported: what counts is what the model has.

    Returns:
        One sample with images (B, C, H, W), or videos (B, C, T, H, W), where B is 2, or 1 for large ones: normal values
        from a generator of their own, on the device and of the type of the first floating parameter; None for a model
        of another kind.
    """
    shape = _timm_shape(model) or _torchvision_shape(model)
    if shape is None:
        return None
    # Two images tell the axis of the batch from others; a large one is slow enough alone.
    batch = 1 if math.prod(shape) > LARGE else 2
    return [Sample((_values(model, (batch, *shape)),))]


def _values(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    return values.to(device=like.device, dtype=like.dtype)


def _timm_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Return (C, H, W) of a timm model."""
    for name in ("pretrained_cfg", "default_cfg"):
        settings = getattr(model, name, None)
        declared = (
            settings.get("input_size") if isinstance(settings, Mapping) else getattr(settings, "input_size", None)
        )
        if isinstance(declared, (tuple, list)) and len(declared) == 3:
            break
    else:
        return None
    channels = _channels(model) or int(declared[0])
    size = _recorded_size(model) or _built_size(model) or (int(declared[1]), int(declared[2]))
    return (channels, *size)


def _built_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width that a timm model was built for, where one of its modules keeps them."""
    for module in model.modules():
        for name in ("img_size", "default_img_size"):
            size = _pair(getattr(module, name, None))
            if size is not None:
                return size
    return None


def _recorded_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width that timm has recorded at construction or at a change of size."""
    # Who has one of timm's models has imported timm; older versions record nothing.
    traits = getattr(sys.modules.get("timm.models"), "get_model_traits", None)
    return None if traits is None else _pair(traits(model).get("img_size"))


def _channels(model: nn.Module) -> int | None:
    """Return the number of input channels that the model keeps, or that its first convolution reads."""
    kept = getattr(model, "in_chans", None)
    if isinstance(kept, int):
        return kept
    first = next((module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))), None)
    return None if first is None else first.in_channels


def _torchvision_shape(model: nn.Module) -> tuple[int, ...] | None:
    """Return (C, H, W) or (C, T, H, W) of a torchvision transformer."""
    if type(model).__module__.partition(".")[0] != "torchvision":
        return None
    channels = _channels(model)
    size = _pair(getattr(model, "image_size", None)) or _video_size(model) or _grid_size(model) or _window_size(model)
    return None if channels is None or size is None else (channels, *size)


def _video_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return the length, height and width of an MViT: its encoding of positions counts patches."""
    encoding, projection = getattr(model, "pos_encoding", None), getattr(model, "conv_proj", None)
    space, time = _pair(getattr(encoding, "spatial_size", None)), getattr(encoding, "temporal_size", None)
    if space is None or not isinstance(time, int) or not isinstance(projection, nn.Conv3d):
        return None
    return tuple(count * step for count, step in zip((time, *space), projection.stride, strict=True))


def _grid_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width of a MaxViT: its stem and each of its blocks halve the image."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, (nn.Sequential, nn.ModuleList)) or not len(blocks):
        return None
    size = _pair(getattr(blocks[-1], "grid_size", None))
    return None if size is None else (size[0] << (len(blocks) + 1), size[1] << (len(blocks) + 1))


def _window_size(model: nn.Module) -> tuple[int, ...] | None:
    """Return two windows of patches along each axis for a Swin transformer, which pads what does not fit."""
    windows = (getattr(module, "window_size", None) for module in model.modules())
    window = next((w for w in windows if isinstance(w, (list, tuple)) and all(isinstance(n, int) for n in w)), None)
    first = next((module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))), None)
    if window is None or first is None or len(window) != len(first.stride):
        return None
    return tuple(2 * count * step for count, step in zip(window, first.stride, strict=True))


def _pair(value: Any) -> tuple[int, int] | None:
    """Return a size as height and width; None if it is not one."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1]
    return None
