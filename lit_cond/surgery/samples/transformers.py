"""Samples for the models of Hugging Face transformers, from their configuration and the signatures of their methods.

Nothing is imported from there: a model has a `config` with attributes and a `forward` with named arguments, and that is
all that the rules use. Towers with a method of their own (`get_image_features`, `get_audio_features`) are called
through it, because the main call would need as many placeholder tokens as the tower makes features.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.samples.base import Sample
from lit_cond.surgery.samples.transformers_facts import Call, Facts
from lit_cond.surgery.samples.transformers_signals import RULES

__all__ = ["transformers_samples"]

# Arguments of each modality, and the methods that run its tower alone.
TOWERS: dict[str, tuple[str, ...]] = {
    "get_image_features": (
        "pixel_values",
        "pixel_values_images",
        "flattened_patches",
        "image_pixel_values",
        "high_res_pixel_values",
    ),
    "get_audio_features": ("input_features", "input_values", "audio_input_ids"),
    "get_video_features": ("pixel_values_videos",),
}
# Parts that neither the main call nor a tower method runs, by model type.
UNREACHED: dict[str, tuple[str, ...]] = {
    "csm": ("depth_decoder", "codec_model"),
    "diffusion_gemma": ("encoder",),
    "janus": ("vqmodel",),
    "nemo_speechlm": ("word_timestamp_encoder",),
    "pe_audio_video": ("audio_model", "video_model"),
    "phi4_multimodal": ("embed_tokens_extend.image_embed.img_processor", "embed_tokens_extend.audio_embed.encoder"),
    "seamless_m4t": ("text_encoder",),
    "seamless_m4t_v2": ("text_encoder",),
}
TEXT = ("input_ids", "inputs_embeds")


class PartSample(Sample):
    """A call of a part, or of a method of a part; `method` is a path with dots."""

    def run(self, module: nn.Module) -> Any:
        """Call the part and return what it returns."""
        return operator.attrgetter(self.method or "")(module)(*self.args, **self.kwargs)


def transformers_samples(model: nn.Module) -> list[Sample]:
    """Make small inputs that run the attention of every tower of a model.

    Args:
        model: A `PreTrainedModel`; it has `config` and a `forward` with named arguments.

    Returns:
        One sample for the main call and one for each tower that the main call does not run. Where the main call can not
        be made (a model of models that only generates, or one that wants a session object), its parts are called.

    Raises:
        ConfigurationError: The model has no configuration, or a required argument is of a kind that no rule makes.
    """
    if getattr(model, "config", None) is None:
        raise ConfigurationError(
            f"{type(model).__name__} has no `config`, so no inputs can be made for it; pass a sample of its inputs"
        )
    facts = Facts(model)
    parameters = _parameters(model.forward)
    separate = _separate_towers(model, parameters)
    try:
        samples = [_main_sample(facts, parameters, {name for method in separate for name in TOWERS[method]})]
    except ConfigurationError:
        samples = [sample for name, child in model.named_children() for sample in _part_samples(name, child)]
        separate = [] if samples else separate or _towers(model)[:1]
        if not samples and not separate:
            raise
    if not any(name.endswith("video_tower") for name, _ in model.named_modules()):
        separate = [method for method in separate if method != "get_video_features"]  # the tower of the images
    samples += [_tower_sample(model, method) for method in separate]
    for path in UNREACHED.get(getattr(facts.config, "model_type", ""), ()):
        for name, part in model.named_modules():
            if name == path or name.endswith(f".{path}"):
                samples += _part_samples(name, part)
    return samples


def _main_sample(facts: Facts, parameters: dict[str, inspect.Parameter], left_out: set[str]) -> Sample:
    """The call of the model itself."""
    name = type(facts.model).__name__
    kwargs = _arguments(
        Call(facts, parameters, left_out, _placeholders(facts, parameters, left_out)), f"{name}.forward"
    )
    # The output of llama4 asks its text model for a field that this does not have, so that its forward always fails.
    if not any(isinstance(value, Tensor) for value in kwargs.values()) or facts.kind("llama4"):
        raise ConfigurationError(
            f"{name}.forward takes {', '.join(parameters) or 'nothing by name'}: nothing that can be made from its "
            "configuration; pass a sample of its inputs"
        )
    return Sample(kwargs=kwargs)


def _tower_sample(model: nn.Module, method: str) -> Sample:
    """The call of the method that runs one tower."""
    path, owner = _owner(model, method) or ("", model)
    facts, parameters = Facts(owner), _parameters(getattr(owner, method))
    call = Call(facts, parameters, frozenset(), _placeholders(facts, parameters, set()))
    kwargs = _arguments(call, f"{type(owner).__name__}.{method}")
    return PartSample(kwargs=kwargs, method=f"{path}.{method}") if path else Sample(kwargs=kwargs, method=method)


def _part_samples(name: str, child: nn.Module) -> list[Sample]:
    """The calls of a part of a model that is a model itself; none where they can not be made."""
    if getattr(child, "config", None) is None or not hasattr(child, "save_pretrained"):
        return []
    try:
        samples = transformers_samples(child)
    except ConfigurationError:
        return []
    paths = [name if sample.method is None else f"{name}.{sample.method}" for sample in samples]
    return [PartSample(kwargs=sample.kwargs, method=path) for path, sample in zip(paths, samples, strict=True)]


def _placeholders(facts: Facts, parameters: dict[str, inspect.Parameter], left_out: set[str]) -> tuple[int, int]:
    """How many tokens of each text must stand for its image, and their id; none where image and text are apart.

    The tower itself says it, in one pass without gradients.
    """
    call = Call(facts, parameters, left_out)
    if facts.kind("qwen2_audio", "musicflamingo"):
        frames = RULES["input_features"].make(call).shape[-1]
        return frames // 4, facts.get("audio", "audio_token_id", "audio_token_index")
    token = facts.get("text", "image_token_id", "image_token_index")
    if token is None or not call.takes("pixel_values") or not call.takes("input_ids"):
        return 0, 0
    queries = facts.get("vision", "num_query_tokens")
    if queries is not None:
        frames = facts.size("vision", "num_frames", default=4) if facts.kind("instructblipvideo") else 1
        return int(queries) * frames, token
    for module in facts.model.modules():
        if hasattr(module, "get_image_features") and not hasattr(module, "get_text_features"):
            return _rows(_image_features(module)) // facts.batch, token
    return 0, 0


def _image_features(module: nn.Module) -> Any:
    """What a module makes of a sample image, in evaluation mode, so that nothing random or remembered happens."""
    sample = _tower_sample(module, "get_image_features")
    modes = {item: item.training for item in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            features = sample.run(module)
    finally:
        for item, training in modes.items():
            item.training = training
    return getattr(features, "pooler_output", features)


def _rows(features: Any) -> int:
    """Number of feature vectors in a tensor or a list of tensors."""
    if isinstance(features, Tensor):
        return features.numel() // features.shape[-1]
    return sum(_rows(item) for item in features if item is not None)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a bound method."""
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: item for name, item in inspect.signature(function).parameters.items() if item.kind not in variadic}


def _separate_towers(model: nn.Module, parameters: dict[str, inspect.Parameter]) -> list[str]:
    """The methods that run a tower whose arguments the main call can do without."""
    if hasattr(model, "get_text_features") or not any(name in parameters for name in TEXT):
        return []
    if "image_embeds_position_mask" in parameters or "encoder_inputs_embeds" in parameters:
        return []
    return [
        method
        for method in _towers(model)
        if any(name in parameters for name in TOWERS[method])
        and not any(
            name in parameters and parameters[name].default is inspect.Parameter.empty for name in TOWERS[method]
        )
    ]


def _towers(model: nn.Module) -> list[str]:
    """The methods of towers that are there."""
    return [method for method in TOWERS if _owner(model, method) is not None]


def _owner(model: nn.Module, method: str) -> tuple[str, nn.Module] | None:
    """Who has the method of a tower, and its path; None if no one.

    The model that a head is put on comes first: the method of the head may take any arguments and hand them on.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    for path, module in ((prefix, getattr(model, prefix, None) if prefix else None), ("", model)):
        if isinstance(module, nn.Module) and hasattr(module, method) and _has_tower(module, method):
            return path, module
    return None


def _has_tower(model: nn.Module, method: str) -> bool:
    """Whether the tower of a method is there; models that were built without it hold None."""
    names = ("audio_tower",) if method == "get_audio_features" else ("vision_tower", "vision_encoder", "embed_vision")
    return all(getattr(model, name, model) is not None for name in names)


def _arguments(call: Call, where: str) -> dict[str, Any]:
    """A value for every required argument and for those optional ones that carry a modality."""
    result: dict[str, Any] = {}
    for name, parameter in call.parameters.items():
        required = parameter.default is inspect.Parameter.empty
        rule = RULES.get(name)
        if rule is None:
            if required:
                raise ConfigurationError(f"no rule makes the argument {name!r} of {where}; pass a sample of its inputs")
            continue
        if name in call.left_out or not (required or rule.wanted(call)):
            continue
        value = rule.make(call)
        if value is not None:
            result[name] = value
    return result
