"""The models of timm, torchvision and transformers by name, with random weights and without any download."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.extras import optional_imports

__all__ = ["LIBRARIES", "Builder", "Library", "as_module", "build_of_file"]

Builder = Callable[[], nn.Module]


class Library(NamedTuple):
    """What is asked of a library.

    Attributes:
        find: Returns what builds the model of a name, None if there is no such model.
        names: Returns the names of all models.
    """

    find: Callable[[str], Builder | None]
    names: Callable[[], list[str]]


def as_module(value: Any) -> nn.Module:
    """Return a model that something foreign has made.

    Raises:
        ConfigurationError: If it is no module.
    """
    if not isinstance(value, nn.Module):
        raise ConfigurationError(
            f"what was called returned {type(value).__name__}, not a torch.nn.Module: return the model"
        )
    return value


def _find_timm(name: str) -> Builder | None:
    with optional_imports(f"timm/{name}"):
        import timm
    return (lambda: as_module(timm.create_model(name, pretrained=False))) if timm.is_model(name) else None


def _timm_names() -> list[str]:
    import timm

    return list(timm.list_models())


def _find_torchvision(name: str) -> Builder | None:
    with optional_imports(f"torchvision/{name}"):
        from torchvision import models
    if name not in models.list_models():
        return None
    # Detectors would fetch the weights of their backbone.
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    kwargs = {"weights_backbone": None} if "weights_backbone" in accepted else {}
    return lambda: as_module(models.get_model(name, weights=None, **kwargs))


def _torchvision_names() -> list[str]:
    from torchvision import models

    return list(models.list_models())


def _find_transformers(name: str) -> Builder | None:
    with optional_imports(f"transformers/{name}"):
        import transformers
    if name not in transformers.CONFIG_MAPPING:
        return None
    return lambda: _build_of_config(transformers.AutoConfig.for_model(name))


def _transformers_names() -> list[str]:
    import transformers

    return list(transformers.CONFIG_MAPPING.keys())


LIBRARIES: dict[str, Library] = {
    "timm": Library(_find_timm, _timm_names),
    "torchvision": Library(_find_torchvision, _torchvision_names),
    "transformers": Library(_find_transformers, _transformers_names),
}
"""The libraries, those first whose names say most precisely which model is meant."""


def build_of_file(path: Path) -> nn.Module:
    """Build the model of a config.json that `save_pretrained` of transformers or timm has written.

    Args:
        path: The file.

    Raises:
        ConfigurationError: If it names no model that transformers knows.
        MissingExtraError: If the library is not installed.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{str(path)!r} is not JSON: {error}") from error
    content = content if isinstance(content, dict) else {}
    if "model_type" not in content and "architecture" in content:
        with optional_imports(f"the model of {path}"):
            import timm
        return as_module(timm.create_model(f"local-dir:{path.parent}", pretrained=False))
    with optional_imports(f"the model of {path}"):
        import transformers
    if content.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ConfigurationError(
            f"{str(path)!r} has the model_type {content.get('model_type')!r}, which transformers does not know: write "
            "a function that builds the model, and name that as package.module:function"
        )
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return _build_of_config(config)


def _build_of_config(config: Any) -> nn.Module:
    """Build the bare model of a configuration of transformers; one with a head where there is no other."""
    import transformers

    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False
    heads = sorted(name for name in dir(transformers) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING"))
    recorded = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    found = _mapped(config, "MODEL_MAPPING") or next((cls for cls in recorded if cls is not None), None)
    found = found or next((cls for name in heads if (cls := _mapped(config, name)) is not None), None)
    if found is None:
        raise ConfigurationError(
            f"transformers has no model of its own for {config.model_type!r}: it is a part of another"
        )
    # A recorded half precision would only blur what is traced.
    return as_module(found(config)).float()


def _mapped(config: Any, mapping: str) -> Any:
    import transformers

    try:
        found = getattr(transformers, mapping).get(type(config), None)
    except (ImportError, ValueError):  # an entry that names a class that is not there
        return None
    return found[0] if isinstance(found, (tuple, list)) else found
