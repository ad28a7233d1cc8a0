"""Small random models of many libraries, built without a download, and what to call them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lit_cond.surgery.samples import Sample

__all__ = ["ZooModel"]


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo.

    Args:
        name: Name within its source, as in `vit_tiny_patch16_224` or `bert`.
        source: Library that it comes from: `timm`, `transformers`, `torchvision`, `detectron2`.
        build: Makes the model: float32, CPU, the same weights at every call.
        samples: Makes the inputs that reach the attention of all its towers.
        note: What is special about it, for the table; empty if nothing is.
    """

    name: str
    source: str
    build: Callable[[], nn.Module]
    samples: Callable[[nn.Module], list[Sample]]
    note: str = ""
