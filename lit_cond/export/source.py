"""The trained model of a checkpoint, and which part of it is the backbone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from lit_cond.checkpoint import load_checkpoint, load_weights_
from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.errors import ConfigurationError, LitCondError
from lit_cond.named_models import offline
from lit_cond.surgery.sites import clean_name

__all__ = ["find_backbone", "load_trained"]


def load_trained(checkpoint: str | Path, model_class: str | None = None) -> tuple[Path, nn.Module]:
    """Load the model of a checkpoint, with the corrections that it records; nothing is downloaded.

    Args:
        checkpoint: A checkpoint of Lightning, or the folder of a run, of which the best one is taken.
        model_class: `package.module:Class`, or `package.module:function` for a function that returns the model; None
            takes what the checkpoint or the run's config.yaml records.

    Returns:
        The path of the checkpoint and the model, in evaluation mode.

    Raises:
        LitCondError: If there is no such checkpoint, its class is not known, or does not fit it.
    """
    with offline():
        path = Path(checkpoint)
        if path.is_dir():
            from lit_cond.runs import find_checkpoint

            path = find_checkpoint(path)
        else:
            read_checkpoint(path, mmap=True)
        if model_class is None:
            from lit_cond.runs import load_model

            model: nn.Module = _built(str(path), lambda: load_model(path))
        else:
            model = _of_class(_imported(model_class), path, model_class)
    return path, model.eval()


def _built(name: str, build: Any) -> Any:
    try:
        return build()
    except LitCondError:
        raise
    except Exception as error:  # whatever a foreign constructor raises
        reason = next(iter(str(error).strip().splitlines()), "")
        raise ConfigurationError(
            f"the model of {name!r} can not be built: {type(error).__name__}: {reason}; name a function that returns "
            "it with --class package.module:function"
        ) from error


def _of_class(source: Any, path: Path, name: str) -> nn.Module:
    if isinstance(source, type) and hasattr(source, "load_from_checkpoint"):
        loaded: nn.Module = _built(name, lambda: load_checkpoint(source, path, map_location="cpu"))
        return loaded
    if not callable(source):
        raise ConfigurationError(f"{name!r} is no class and no function: name one that makes the model")
    model = _built(name, source)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{name!r} returned {type(model).__name__}, not a model")
    load_weights_(model, read_checkpoint(path))
    return model


def _imported(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigurationError(f"--class {name!r} is not of the form package.module:Class")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:  # whatever the user's module raises
        raise ConfigurationError(f"--class {name!r} can not be imported: {type(error).__name__}: {error}") from error
    return value


def find_backbone(model: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Return the part of a model whose weights are written, with its name.

    Args:
        model: The model, such as a LightningModule.
        name: Name of the part, "" for the whole model. None takes the attribute `backbone`, else the only child that
            holds parameters, else the whole model.

    Raises:
        ConfigurationError: If there is no such part.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if name is not None:
        name = clean_name(name)
        if name not in modules:
            known = ", ".join(repr(child) for child, _ in model.named_children())
            raise ConfigurationError(f"the model has no part {name!r}: give one of {known}, or '' for all of it")
        return name, modules[name]
    if not hasattr(model, "configure_optimizers"):  # no LightningModule around a model
        return "", model
    if isinstance(getattr(model, "backbone", None), nn.Module):
        return "backbone", modules["backbone"]
    own = next(model.parameters(recurse=False), None)
    children = [child for child, module in model.named_children() if next(module.parameters(), None) is not None]
    if own is None and len(children) == 1:
        return children[0], modules[children[0]]
    return "", model
