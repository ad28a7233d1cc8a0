"""The backbones of detectron2 with attention, small; the library has to be importable, and is not on PyPI."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from torch import nn

from scripts.model_zoo import ZooModel
from scripts.model_zoo.timm_models import finish, image

__all__ = ["available", "detectron2_models"]


def available() -> bool:
    """Whether the backbones of detectron2 can be imported, with all that they need."""
    try:
        importlib.import_module("detectron2.modeling.backbone")
    except ImportError:
        return False
    return True


def detectron2_models() -> list[ZooModel]:
    """Return the models; the note is the class of the backbone."""
    made: dict[str, tuple[Callable[[], nn.Module], str]] = {
        "vit": (_vit, "ViT"),
        "vit:no_windows": (partial(_vit, use_rel_pos=False, window_block_indexes=(), qkv_bias=False), "ViT"),
        "vit:residual": (partial(_vit, residual_block_indexes=(1,)), "ViT"),
        "swin": (_swin, "SwinTransformer"),
        "mvit": (_mvit, "MViT"),
        "mvit:no_residual": (partial(_mvit, residual_pooling=False, use_rel_pos=False), "MViT"),
    }
    return [
        ZooModel(name, "detectron2", partial(finish, make, image), image, note) for name, (make, note) in made.items()
    ]


def _vit(**settings: object) -> nn.Module:
    from detectron2.modeling.backbone.vit import ViT

    usual = {"use_rel_pos": True, "rel_pos_zero_init": False, "window_size": 3, "window_block_indexes": (0,)}
    model: nn.Module = ViT(img_size=64, patch_size=8, embed_dim=32, depth=3, num_heads=4, **{**usual, **settings})
    return model


def _swin() -> nn.Module:
    from detectron2.modeling.backbone.swin import SwinTransformer

    model: nn.Module = SwinTransformer(
        patch_size=4, embed_dim=24, depths=(2, 2), num_heads=(3, 6), window_size=5, out_indices=(0, 1)
    )
    return model


def _mvit(**settings: object) -> nn.Module:
    from detectron2.modeling.backbone.mvit import MViT

    model: nn.Module = MViT(
        img_size=64,
        embed_dim=16,
        depth=4,
        num_heads=1,
        last_block_indexes=(0, 1, 3),
        adaptive_kv_stride=2,
        adaptive_window_size=8,
        out_features=("scale2", "scale4"),
        **settings,
    )
    return model
