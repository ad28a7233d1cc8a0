"""The 17 torchvision models with attention, narrow and shallow, and four of them in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torchvision
from torch import nn
from torchvision.models import maxvit, swin_transformer
from torchvision.models.video import mvit
from torchvision.models.video import swin_transformer as video_swin

from scripts.model_zoo import ZooModel
from scripts.model_zoo.timm_models import finish, samples

__all__ = ["torchvision_models"]

CLASSES = 3
FULL = ("swin_t", "swin_v2_t", "maxvit_t", "vit_b_32")


def torchvision_models() -> list[ZooModel]:
    """Return the models; those in full have the library's own width and depth."""
    return [_zoo_model(name, make) for name, make in {**_small(), **_full()}.items()]


def _zoo_model(name: str, make: Callable[[], nn.Module]) -> ZooModel:
    return ZooModel(name, "torchvision", partial(finish, make, samples), samples)


def _full() -> dict[str, Callable[[], nn.Module]]:
    """Return the constructors of the models that are built as the library builds them."""
    sizes = {"vit_b_32": {"image_size": 64}}
    get = torchvision.models.get_model
    return {
        f"{name}:full": partial(get, name, weights=None, num_classes=CLASSES, **sizes.get(name, {})) for name in FULL
    }


def _small() -> dict[str, Callable[[], nn.Module]]:
    """Return the constructors of all 17: few layers and channels, their own patches, windows and blocks."""
    made: dict[str, Callable[[], nn.Module]] = {}
    for name, patch, heads, layers in (
        ("vit_b_16", 16, 6, 2),
        ("vit_b_32", 32, 6, 3),
        ("vit_l_16", 16, 8, 2),
        ("vit_l_32", 32, 8, 3),
        ("vit_h_14", 14, 4, 2),
    ):
        made[name] = partial(_vit, patch, heads, layers)
    for name, width, depths in (
        ("swin_t", 24, (2, 2, 1)),
        ("swin_s", 24, (2, 2, 2)),
        ("swin_b", 32, (2, 2, 2)),
    ):
        counts = (3, 6, 12) if width == 24 else (4, 8, 16)
        made[name] = partial(_swin, width, depths, counts)
        made[name.replace("_", "_v2_")] = partial(_swin_v2, width, depths, counts)
        made[name.replace("_", "3d_")] = partial(_swin3d, width, depths, counts)
    made["maxvit_t"] = _maxvit
    made["mvit_v1_b"] = partial(_mvit, second=False)
    made["mvit_v2_s"] = partial(_mvit, second=True)
    return made


def _vit(patch: int, heads: int, layers: int) -> nn.Module:
    model: nn.Module = torchvision.models.VisionTransformer(
        image_size=4 * patch,
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=8 * heads,
        mlp_dim=64,
        num_classes=CLASSES,
    )
    return model


def _swin(width: int, depths: Sequence[int], heads: Sequence[int]) -> nn.Module:
    model: nn.Module = swin_transformer.SwinTransformer(
        [4, 4], width, list(depths), list(heads), window_size=[7, 7], num_classes=CLASSES
    )
    return model


def _swin_v2(width: int, depths: Sequence[int], heads: Sequence[int]) -> nn.Module:
    model: nn.Module = swin_transformer.SwinTransformer(
        [4, 4],
        width,
        list(depths),
        list(heads),
        window_size=[8, 8],
        num_classes=CLASSES,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )
    return model


def _swin3d(width: int, depths: Sequence[int], heads: Sequence[int]) -> nn.Module:
    model: nn.Module = video_swin.SwinTransformer3d(
        [2, 4, 4], width, list(depths), list(heads), window_size=[2, 7, 7], num_classes=CLASSES
    )
    return model


def _maxvit() -> nn.Module:
    model: nn.Module = maxvit.MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[32, 64],
        block_layers=[1, 2],
        head_dim=16,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    return model


def _mvit(second: bool) -> nn.Module:
    """Return the first or second version, with strided queries, and heads that double with the width."""
    blocks = [
        mvit.MSBlockConfig(1, 32, 64, [3, 3, 3] if second else [], [3, 3, 3], [1, 1, 1] if second else [], [1, 4, 4]),
        mvit.MSBlockConfig(2, 64, 64, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
        mvit.MSBlockConfig(2, 64, 64, [3, 3, 3] if second else [], [3, 3, 3], [1, 1, 1] if second else [], [1, 1, 1]),
    ]
    model: nn.Module = mvit.MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=blocks,
        residual_pool=second,
        residual_with_cls_embed=False,
        rel_pos_embed=second,
        proj_after_attn=second,
        num_classes=CLASSES,
    )
    return model
