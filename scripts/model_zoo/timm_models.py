"""The timm models of the zoo: all families with softmax attention, every way in which they keep its weights."""

from __future__ import annotations

from collections.abc import Callable
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

__all__ = ["build", "finish", "image", "samples", "timm_models", "zoo_model"]


IMAGE = (3, 64, 64)


def timm_models() -> list[ZooModel]:
    """Return the models, family by family; the note is the family."""
    models = [zoo_model(entry, family) for family, entries in FAMILIES.items() for entry in entries]
    padded = FAMILIES["naflexvit"][0]
    models.append(ZooModel(f"{padded.name}:padded", "timm", partial(build, padded), patches, "naflexvit"))
    return models


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
    return finish(partial(timm.create_model, entry.model, pretrained=False, **arguments), samples)


def finish(make: Callable[[], nn.Module], inputs: Callable[[nn.Module], list[Sample]]) -> nn.Module:
    """Make a model and give it random weights; the global random state comes back as it was.

    Args:
        make: The constructor, all arguments bound.
        inputs: Returns the samples that set its batch normalizations.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    return calibrate_(randomize_(model), inputs(model))


def samples(model: nn.Module) -> list[Sample]:
    """Return one batch of images of the size that the model says.

    Raises:
        ConfigurationError: The model says no size.
    """
    found = image_samples(model)
    if found is None:
        raise ConfigurationError(f"{type(model).__name__} says no image size; give the zoo its samples by hand.")
    return found


def image(model: nn.Module, shape: tuple[int, ...] = IMAGE) -> list[Sample]:
    """Return one batch of two images (or videos) of a given shape, whatever the model says."""
    return [Sample((torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)),))]


def patches(model: nn.Module) -> list[Sample]:
    """Return two images of NaFlexViT's own kind: 4 x 3 and 2 x 5 patches of 16 x 16 pixels, padded to 12, masked."""
    generator = torch.Generator().manual_seed(0)
    coordinates = torch.zeros(2, 12, 2, dtype=torch.long)
    valid = torch.zeros(2, 12, dtype=torch.bool)
    for index, (rows, columns) in enumerate(((4, 3), (2, 5))):
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        coordinates[index, : len(grid)], valid[index, : len(grid)] = grid, True
    values = torch.randn(2, 12, 16 * 16 * 3, generator=generator) * valid[..., None]
    return [Sample(({"patches": values, "patch_coord": coordinates, "patch_valid": valid},))]
