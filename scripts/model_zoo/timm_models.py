"""The timm models of the zoo: all families with softmax attention, every way in which they keep its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch
from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.samples.images import image_samples
from scripts.model_zoo import ZooModel
from scripts.model_zoo.timm_table import FAMILIES, TimmEntry
from scripts.model_zoo.weights import calibrate_, randomize_

__all__ = ["build", "timm_models"]


def timm_models() -> list[ZooModel]:
    """Return the models, family by family."""
    return [zoo_model(entry, family) for family, entries in FAMILIES.items() for entry in entries]


def zoo_model(entry: TimmEntry, note: str = "") -> ZooModel:
    """Return the zoo's entry of one timm model."""
    return ZooModel(entry.name, "timm", partial(build, entry), samples, note)


def build(entry: TimmEntry) -> nn.Module:
    """Build a model with random weights; the global random state comes back as it was.

    Args:
        entry: Which model, and how small.
    """
    shape = (3, entry.size, entry.size)
    arguments: dict[str, Any] = {"num_classes": 3, "pretrained_cfg_overlay": {"input_size": shape}, **entry.arguments}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(entry.model, pretrained=False, **arguments)
    return calibrate_(randomize_(model), samples(model))


def samples(model: nn.Module) -> list[Sample]:
    """Return one batch of images of the size that the model says.

    Raises:
        ConfigurationError: The model says no size.
    """
    found = image_samples(model)
    if found is None:
        raise ConfigurationError(f"{type(model).__name__} says no image size; give the zoo its samples by hand.")
    return found
