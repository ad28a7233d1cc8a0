"""Backbones by name, from timm, torchvision or transformers, or as a module built in Python."""

import difflib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.extras import optional_imports

__all__ = ["build_backbone", "logits_of"]

_HEAD_ARGUMENTS = ("num_classes", "num_labels")


def build_backbone(name: str | nn.Module, num_classes: int, pretrained: bool | None = None, **kwargs: Any) -> nn.Module:
    """Build an image classifier.

    Args:
        name: One of

            - ``timm/<model>``: a name of `timm.list_models`, a pretrained tag (``name.tag``) included;
            - ``torchvision/<model>``: a name of `torchvision.models.list_models`, or one of its classes such
              as ``torchvision/VisionTransformer`` with all sizes in ``kwargs``;
            - ``hf/<model>``: a model type of transformers (``hf/vit``, sizes in ``kwargs``), a local folder
              written by ``save_pretrained`` or a hub id (``hf/google/vit-base-patch16-224``);
            - a module, which is returned as it is.
        num_classes: Width of the logits.
        pretrained: Whether to load trained weights, the head aside when its width differs. None means what
            the name suggests: a folder or hub id is loaded with its weights, any other name starts at random.
        **kwargs: Passed to the constructor of the model.

    Returns:
        The model. Use `logits_of` on its output, which is not a tensor for every library.

    Raises:
        ConfigurationError: The name, or an argument for the model, is unknown; the nearest names are given.
        MissingExtraError: The library is not installed.

    Example:
        >>> import torch
        >>> backbone = build_backbone("timm/vit_tiny_patch16_224", 10, img_size=32, depth=1)
        >>> backbone(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if num_classes < 1:
        raise ConfigurationError(f"num_classes is {num_classes}: give at least 1")
    for argument in _HEAD_ARGUMENTS:
        if argument in kwargs:
            raise ConfigurationError(
                f"backbone_args sets {argument} to {kwargs[argument]}: set num_classes of the task instead"
            )
    if isinstance(name, nn.Module):
        if kwargs or pretrained:
            given = ", ".join([*kwargs, *(["pretrained"] if pretrained else [])])
            raise ConfigurationError(f"the backbone is a module already built: {given} can not be applied to it")
        return name
    library, _, model = name.partition("/")
    builder = _BUILDERS.get(library)
    if builder is None or not model:
        raise ConfigurationError(
            f"backbone {name!r} is not of the form timm/<name>, torchvision/<name> or hf/<name>"
            + _nearest(library, _BUILDERS)
        )
    backbone: nn.Module = builder(model, num_classes, pretrained, kwargs)
    return backbone


def logits_of(output: Any, num_classes: int) -> torch.Tensor:
    """Take the logits out of what a classifier returns.

    Args:
        output: A tensor, or an object with an attribute ``logits`` (transformers, some of torchvision).
        num_classes: Expected width.

    Returns:
        Logits of shape (batch, num_classes).

    Raises:
        ConfigurationError: There are no logits in the output, or they have another width.
    """
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ConfigurationError(
            f"the backbone returned {type(output).__name__}: return a tensor of logits, or an object with .logits"
        )
    if logits.ndim != 2 or logits.shape[1] != num_classes:
        raise ConfigurationError(
            f"the backbone returned logits of shape {tuple(logits.shape)}: "
            f"expected (batch, {num_classes}), the number of classes"
        )
    return logits


def _build_timm(name: str, num_classes: int, pretrained: bool | None, kwargs: dict[str, Any]) -> Any:
    with optional_imports(f"the backbone timm/{name}"):
        import timm

    if ":" not in name and not timm.is_model(name):  # hf-hub:<id> and local-dir:<path> are timm's own forms
        raise ConfigurationError(f"timm has no model {name!r}" + _nearest(name, timm.list_models()))
    return _construct(
        f"timm/{name}",
        timm.create_model,
        name,
        pretrained=bool(pretrained),
        num_classes=num_classes,
        **kwargs,
    )


def _build_torchvision(name: str, num_classes: int, pretrained: bool | None, kwargs: dict[str, Any]) -> Any:
    with optional_imports(f"the backbone torchvision/{name}"):
        from torchvision import models

    full_name = f"torchvision/{name}"
    names = models.list_models(module=models)
    classes = {key: value for key, value in vars(models).items() if _is_module_class(value)}
    if name in classes:
        if pretrained:
            raise ConfigurationError(f"{full_name} is a class without trained weights: set pretrained to false")
        return _construct(full_name, classes[name], num_classes=num_classes, **kwargs)
    if name not in names:
        raise ConfigurationError(f"torchvision has no classifier {name!r}" + _nearest(name, [*names, *classes]))
    model = _construct(full_name, models.get_model, name, weights=None, num_classes=num_classes, **kwargs)
    if pretrained:
        weights = models.get_model_weights(name).DEFAULT
        state = _construct(full_name, weights.get_state_dict, progress=False)
        _load_all_but_the_head(model, state, num_classes, full_name)
    return model


def _load_all_but_the_head(model: nn.Module, state: dict[str, torch.Tensor], num_classes: int, name: str) -> None:
    # torchvision refuses another number of classes together with weights, timm and transformers do not.
    own = model.state_dict()
    kept = {key: value for key, value in state.items() if key not in own or own[key].shape == value.shape}
    left = state.keys() - kept.keys()
    not_head = sorted(key for key in left if own[key].shape[0] != num_classes)
    if not_head:
        raise ConfigurationError(
            f"the trained weights of {name} do not fit the given backbone_args, first {not_head[0]!r}: "
            "remove the argument that changes its shape, or set pretrained to false"
        )
    missing, unexpected = model.load_state_dict(kept, strict=False)
    if unexpected or set(missing) != left:
        wrong = sorted({*unexpected, *(set(missing) - left)})[0]
        raise ConfigurationError(f"the trained weights of {name} do not fit the given backbone_args: {wrong!r}")


def _build_hf(name: str, num_classes: int, pretrained: bool | None, kwargs: dict[str, Any]) -> Any:
    with optional_imports(f"the backbone hf/{name}"):
        import transformers

    full_name = f"hf/{name}"
    types = sorted({config.model_type for config in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING})
    auto = transformers.AutoModelForImageClassification
    is_type = name in types
    if is_type and pretrained:
        raise ConfigurationError(
            f"{full_name} is a model type without trained weights: give a folder or hub id, or set pretrained to false"
        )
    if not is_type and not os.path.isdir(name) and name.count("/") != 1:
        raise ConfigurationError(
            f"{full_name} is neither a folder, nor a hub id (owner/name), nor a model type of transformers "
            "for image classification" + _nearest(name, types)
        )
    configure = transformers.AutoConfig.for_model if is_type else transformers.AutoConfig.from_pretrained
    default = _construct(full_name, configure, name)
    # A configuration keeps any keyword it is given: a misspelt size would change nothing, in silence.
    for key in kwargs:
        if not hasattr(default, key):
            raise ConfigurationError(f"{full_name} has no option {key!r}" + _nearest(key, default.to_dict()))
    config = _construct(full_name, configure, name, num_labels=num_classes, **kwargs)
    if is_type or pretrained is False:
        return _construct(full_name, auto.from_config, config)
    model = _construct(full_name, auto.from_pretrained, name, config=config, ignore_mismatched_sizes=True)
    # from_pretrained returns a model in evaluation mode, and Lightning keeps the mode it finds.
    return model.train()


_BUILDERS: dict[str, Callable[[str, int, bool | None, dict[str, Any]], Any]] = {
    "timm": _build_timm,
    "torchvision": _build_torchvision,
    "hf": _build_hf,
}


def _construct(name: str, constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a constructor of a library; what it says about the arguments becomes one line."""
    try:
        return constructor(*args, **kwargs)
    except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        # Without a network or a file it is an OSError; what remains is about the arguments.
        problem = "can not be loaded" if isinstance(error, OSError) else "can not be built with the given backbone_args"
        raise ConfigurationError(f"{name} {problem}: {reason}") from error


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""
