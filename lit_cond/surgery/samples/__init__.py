"""Small inputs for a model, made from what it says of itself: one forward pass of each kind reaches all its towers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lit_cond.surgery.samples.base import Sample
from lit_cond.surgery.samples.images import image_samples
from lit_cond.surgery.samples.transformers import transformers_samples

__all__ = ["Sample", "as_samples", "sample_inputs", "sampled_parts"]


def sample_inputs(module: nn.Module) -> list[Sample] | None:
    """Return small inputs for a model, None if it does not say what it takes.

    A module says so by `example_input_array` (Lightning's convention), by a Hugging Face configuration, by timm's
    `pretrained_cfg`, or by its image size.

    Args:
        module: Any module.

    Raises:
        ConfigurationError: If it says so, and no input can be made of that.
    """
    example = getattr(module, "example_input_array", None)
    if example is not None:
        return [_moved(sample, module) for sample in as_samples(example)]
    if hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "model_type"):
        return transformers_samples(module)
    return image_samples(module)


def _moved(sample: Sample, module: nn.Module) -> Sample:
    """Return a sample on the device of a module, as Lightning moves its example."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, (list, tuple)):
            return type(value)(move(item) for item in value) if not hasattr(value, "_fields") else value
        return {key: move(item) for key, item in value.items()} if isinstance(value, dict) else value

    return replace(sample, args=move(sample.args), kwargs=move(dict(sample.kwargs)))


def as_samples(value: Any) -> list[Sample]:
    """Return samples for what a user may give: one, a list of them, a tuple or dictionary of arguments, a tensor."""
    if isinstance(value, Sample):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, Sample) for item in value):
        return value
    if isinstance(value, Mapping):
        return [Sample(kwargs=value)]
    return [Sample(value if isinstance(value, tuple) else (value,))]


def sampled_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Sample] | Exception]]:
    """Yield the outermost modules that say what they take, by name, with inputs or the reason why there are none.

    Args:
        model: Any module.
    """
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(outer == "" or name.startswith(f"{outer}.") for outer in taken):
            continue
        try:
            samples = sample_inputs(module)
        except Exception as error:  # a foreign configuration may hold anything
            taken.append(name)
            yield name, module, error
            continue
        if samples:
            taken.append(name)
            yield name, module, samples
