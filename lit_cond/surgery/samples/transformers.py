"""Samples for the models of Hugging Face transformers, made from their configuration and the signatures of their methods.

Nothing is imported from there: a model has a `config` with attributes and a `forward` with named arguments, and that is
all that the rules use. Towers with a method of their own (`get_image_features`, `get_audio_features`) are called
through it, because the main call would need as many placeholder tokens as the tower makes features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.samples.base import Sample
from lit_cond.surgery.samples.transformers_facts import Facts
from lit_cond.surgery.samples.transformers_inputs import RULES

__all__ = ["transformers_samples"]

# Arguments of each modality, and the methods that run its tower alone.
TOWERS: dict[str, tuple[str, ...]] = {
    "get_image_features": ("pixel_values", "flattened_patches", "image_pixel_values", "high_res_pixel_values"),
    "get_audio_features": ("input_features", "input_values", "audio_input_ids"),
    "get_video_features": ("pixel_values_videos",),
}
TEXT = ("input_ids", "inputs_embeds")


def transformers_samples(model: nn.Module) -> list[Sample]:
    """Make small inputs that run the attention of every tower of a model.

    Args:
        model: A `PreTrainedModel`; it has `config` and a `forward` with named arguments.

    Returns:
        One sample for the main call and one for each tower that the main call does not run.

    Raises:
        ConfigurationError: The model has no configuration, or a required argument is of a kind that no rule makes.
    """
    if getattr(model, "config", None) is None:
        raise ConfigurationError(
            f"{type(model).__name__} has no `config`, so no inputs can be made for it; pass a sample of its inputs"
        )
    facts = Facts(model)
    parameters = _parameters(model.forward)
    samples = []
    separate = _separate_towers(model, parameters)
    left_out = {name for method in separate for name in TOWERS[method]}
    if main := _arguments(facts, parameters, left_out, f"{type(model).__name__}.forward"):
        samples.append(Sample(kwargs=main))
    for method in separate:
        if method == "get_video_features" and "get_image_features" in separate:
            continue  # the same tower
        kwargs = _arguments(facts, _parameters(getattr(model, method)), set(), f"{type(model).__name__}.{method}")
        samples.append(Sample(kwargs=kwargs, method=method))
    if not samples:
        raise ConfigurationError(
            f"{type(model).__name__}.forward takes {', '.join(parameters)}, none of which can be made from its "
            "configuration; pass a sample of its inputs"
        )
    return samples


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a bound method."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: item for name, item in inspect.signature(function).parameters.items() if item.kind not in variadic}


def _separate_towers(model: nn.Module, parameters: dict[str, inspect.Parameter]) -> list[str]:
    """The methods that run a tower whose arguments the main call can do without."""
    if hasattr(model, "get_text_features") or not any(name in parameters for name in TEXT):
        return []
    return [
        method
        for method, names in TOWERS.items()
        if hasattr(model, method)
        and any(name in parameters for name in names)
        and not any(name in parameters and parameters[name].default is inspect.Parameter.empty for name in names)
    ]


def _arguments(
    facts: Facts, parameters: dict[str, inspect.Parameter], left_out: set[str], where: str
) -> dict[str, Any]:
    """A value for every required argument and for those optional ones that carry a modality."""
    call = facts.call(parameters, left_out)
    result: dict[str, Any] = {}
    for name, parameter in parameters.items():
        required = parameter.default is inspect.Parameter.empty
        rule = RULES.get(name)
        if rule is None:
            if required:
                raise ConfigurationError(f"no rule makes the argument {name!r} of {where}; pass a sample of its inputs")
            continue
        if name in left_out or not (required or rule.wanted(call)):
            continue
        value = rule.make(call)
        if value is not None:
            result[name] = value
    return result
