"""A tiny random model of every configuration type of transformers that has an Auto class."""

from __future__ import annotations

import logging
import zlib
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lit_cond.surgery.samples.transformers import transformers_samples
from scripts.model_zoo import ZooModel
from scripts.model_zoo.transformers_overrides import OVERRIDES
from scripts.model_zoo.transformers_shrink import merge, shrink

__all__ = ["all_types", "build", "models", "tiny_config"]

# Types that AutoModel maps to a class of a part of theirs.
PREFERRED = {
    "musicgen": ("MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",),
    "musicgen_melody": ("MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",),
}

logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of token ids beyond the small vocabulary


@cache
def all_types() -> tuple[str, ...]:
    """Names of the configuration types that some Auto class builds a model of."""
    return tuple(name for name in CONFIG_MAPPING if _model_class(name) is not None)


def models() -> list[ZooModel]:
    """One entry for each type."""
    return [ZooModel(name, "transformers", partial(build, name), transformers_samples) for name in all_types()]


def tiny_config(name: str) -> Any:
    """The shrunk configuration of a type."""
    config_class = CONFIG_MAPPING[name]
    override = OVERRIDES.get(name, {})
    entries = shrink(config_class(**override.get("__init__", {})).to_dict())
    entries.pop("dtype", None)
    merge(entries, override)
    config = config_class.from_dict(entries)
    _fit_rotary_sections(config)
    return config


def _fit_rotary_sections(config: Any) -> None:
    """Multimodal rotary sections add up to half of the rotated width; their defaults fit full-size heads only."""
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            _fit_rotary_sections(value)
    if "mrope_section" not in getattr(config, "ignore_keys_at_rope_validation", ()):
        return
    parameters = config.rope_parameters
    for rope in [item for item in parameters.values() if isinstance(item, dict)] or [parameters]:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        if sum(rope.get("mrope_section", [0])) != half:
            spatial = (half + 2) // 3
            rope["mrope_section"] = [spatial, spatial, half - 2 * spatial]


def build(name: str) -> nn.Module:
    """The tiny model of a type: float32, CPU, evaluation mode, the same weights at every call; no download."""
    model_class = _model_class(name)
    if model_class is None:
        raise KeyError(f"transformers has no Auto class for {name!r}; see all_types()")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = model_class(tiny_config(name))
    model = model.float().eval()
    _initialize(model)
    return model


@cache
def _model_class(name: str) -> Any:
    """The class of AutoModel, else of the first Auto class that knows the type; None without one."""
    try:
        config_class = CONFIG_MAPPING[name]
    except (ImportError, KeyError, AttributeError):
        return None
    mappings = [
        *PREFERRED.get(name, ()),
        "MODEL_MAPPING",
        *(key for key in dir(modeling_auto) if key.startswith("MODEL_FOR_")),
    ]
    for mapping in mappings:
        if not mapping.endswith("_MAPPING"):
            continue
        try:
            found = getattr(modeling_auto, mapping).get(config_class, None)
        except ValueError:  # an entry of the table that names a class that is not there
            continue
        if found is not None:
            return found[0] if isinstance(found, tuple | list) else found
    return None


def _initialize(model: nn.Module) -> None:
    """Weights from which every mistake in rows shows: nothing zero, constant or not finite.

    Matrices are normal with standard deviation 0.02 to 0.1, vectors uniform in 0.5 to 1.5, biases normal with 0.02.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            if parameter.ndim >= 2:
                fan_in = max(1, parameter.numel() // max(1, parameter.shape[0]))
                parameter.normal_(0.0, min(0.1, max(0.02, fan_in**-0.5)), generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.02, generator=generator)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif not torch.isfinite(parameter).all():
                parameter.fill_(1.0)
