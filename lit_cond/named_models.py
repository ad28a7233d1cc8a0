"""Models by name, without their weights: from a library, a folder, a checkpoint or a function of the user."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lit_cond.errors import ConfigurationError, LitCondError, MissingExtraError
from lit_cond.model_libraries import LIBRARIES, as_module, build_of_file

__all__ = ["META_ABOVE", "NamedModel", "build_named", "offline"]

META_ABOVE = 300_000_000
"""Parameters from which on a model is built on the meta device unless asked otherwise."""

_FORMS = (
    "timm/NAME, torchvision/NAME, transformers/TYPE, a folder or config.json of Hugging Face, a checkpoint (.ckpt), a "
    "folder of a run, or package.module:function"
)


@dataclass(frozen=True, eq=False)
class NamedModel:
    """A model and where it came from.

    Args:
        model: The model, with random weights unless it came from a checkpoint or a function.
        name: Its full name, such as ``timm/resnet18``.
        others: Full names of other models that the name could have meant.
        parameters: Number of parameters.
    """

    model: nn.Module
    name: str
    others: tuple[str, ...]
    parameters: int

    @property
    def is_meta(self) -> bool:
        """Whether there are no values behind the weights."""
        return any(p.is_meta for p in self.model.parameters())


@dataclass(frozen=True, eq=False)
class _Source:
    """How a model is built: `build` may be called twice, on the meta device first, unless it is the user's own."""

    name: str
    build: Callable[[], nn.Module]
    others: tuple[str, ...] = ()
    own: bool = False


def build_named(name: str, device: Literal["meta", "cpu"] | None = None, *, values: bool = True) -> NamedModel:
    """Build the model that a name means; nothing is downloaded.

    Args:
        name: ``timm/NAME``, ``torchvision/NAME``, ``transformers/TYPE``, one of these names alone, a folder or config
            of Hugging Face, a checkpoint of Lightning, a folder of a run, or ``package.module:callable``.
        device: "cpu" for weights with values, "meta" for none; None takes "meta" for models of more than `META_ABOVE`
            parameters, other than those that a function of the user builds.
        values: Whether anything will read the values; if not, "meta" is taken wherever the model can be built there.

    Raises:
        ConfigurationError: If there is no such model, or it can not be built.
        DataError: If a folder holds no checkpoint.
        MissingExtraError: If the library that is named is not installed.
    """
    # The caller's random numbers stay as they are.
    with offline(), torch.random.fork_rng(devices=[]):
        source = _source(name)
        if device is None and not source.own:
            model = _on_meta_or_none(source)
            if model is not None and (not values or _size(model) > META_ABOVE):
                return NamedModel(model, source.name, source.others, _size(model))
        model = _built(source, device or "cpu")
    return NamedModel(model, source.name, source.others, _size(model))


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _on_meta_or_none(source: _Source) -> nn.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            return _built(source, "meta")
    except LitCondError:  # some models can not be built without values
        return None


def _built(source: _Source, device: str) -> nn.Module:
    try:
        with torch.device(device) if device != "cpu" else nullcontext():
            torch.manual_seed(0)
            return source.build()
    except LitCondError:
        raise
    except Exception as error:  # whatever a foreign constructor raises
        if os.environ.get("LIT_COND_TRACEBACK"):
            raise
        reason = next(iter(str(error).strip().splitlines()), "")
        where = " on the meta device" if device == "meta" else ""
        raise ConfigurationError(
            f"{source.name!r} can not be built{where}: {type(error).__name__}: {reason}"
        ) from error


@contextmanager
def offline() -> Iterator[None]:
    """Keep the hub's client from the network, and let modules of the working directory be imported."""
    before, path = os.environ.get("HF_HUB_OFFLINE"), list(sys.path)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = path
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _source(name: str) -> _Source:
    prefix, _, rest = name.partition("/")
    library = "transformers" if prefix == "hf" else prefix
    if library in LIBRARIES and rest:
        build = LIBRARIES[library].find(rest)
        if build is None:
            close = difflib.get_close_matches(rest, LIBRARIES[library].names(), n=3)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise ConfigurationError(f"{library} has no model {rest!r}{hint}")
        return _Source(f"{library}/{rest}", build)
    path = Path(name).expanduser()
    if path.exists() and (found := _from_path(path)) is not None:
        return found
    module, colon, attribute = name.partition(":")
    if colon and not path.exists():
        return _from_import(module, attribute)
    if "/" not in name and (found := _from_any_library(name)) is not None:
        return found
    raise ConfigurationError(_unknown(name, path))


def _unknown(name: str, path: Path) -> str:
    if path.is_dir():
        return f"the folder {name!r} holds no config.json and no checkpoint (*.ckpt)"
    if path.exists():
        return f"the file {name!r} is neither a checkpoint (.ckpt) nor a config.json"
    if "/" in name or path.suffix in (".ckpt", ".json", ".py"):
        return f"there is no {name!r} here, and nothing is downloaded: give {_FORMS}"
    known = {one: f"{library}/{one}" for library in reversed(_installed()) for one in LIBRARIES[library].names()}
    close = [known[one] for one in difflib.get_close_matches(name, known, n=3)]
    hint = f"; nearest: {', '.join(close)}" if close else f": give {_FORMS}"
    return f"there is no model {name!r} in {', '.join(_installed())}{hint}"


def _installed() -> list[str]:
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]


def _from_any_library(name: str) -> _Source | None:
    installed = _installed()
    if not installed:
        raise MissingExtraError(
            f'to look up {name!r}, timm, torchvision or transformers is needed: pip install "lit_cond[tasks]"'
        )
    found = [(f"{one}/{name}", build) for one in installed if (build := LIBRARIES[one].find(name)) is not None]
    return _Source(*found[0], tuple(full for full, _ in found[1:])) if found else None


def _from_path(path: Path) -> _Source | None:
    if path.suffix == ".ckpt" and path.is_file():
        return _Source(str(path), lambda: _of_checkpoint(path))
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        return _Source(str(path), lambda: build_of_file(config))
    if path.is_dir() and next(path.rglob("*.ckpt"), None) is not None:
        return _of_run(path)
    return None


def _of_checkpoint(path: Path) -> nn.Module:
    from lit_cond.runs import load_model

    return load_model(path)


def _of_run(folder: Path) -> _Source:
    from lit_cond.runs import find_checkpoint

    checkpoint = find_checkpoint(folder)
    return _Source(str(checkpoint), lambda: _of_checkpoint(checkpoint))


def _from_import(module: str, attribute: str) -> _Source:
    name = f"{module}:{attribute}"
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:  # whatever the user's module raises
        if os.environ.get("LIT_COND_TRACEBACK"):
            raise
        raise ConfigurationError(
            f"{name!r} can not be imported: {type(error).__name__}: {error}; give package.module:function"
        ) from error
    if isinstance(value, nn.Module):
        return _Source(name, lambda: value, own=True)
    if not callable(value):
        raise ConfigurationError(f"{name!r} is {type(value).__name__}: give a function or class that makes a model")
    return _Source(name, lambda: _called(name, value), own=True)


def _called(name: str, function: Callable[..., Any]) -> nn.Module:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name!r} can not be called without arguments ({error}): write a function that calls it"
        ) from error
    model = as_module(function())
    # Where a LightningModule may make its layers. Importing Lightning takes seconds, so it is asked by duck typing.
    configure: Any = getattr(model, "configure_model", None)
    if callable(configure) and hasattr(model, "configure_optimizers"):
        configure()
    return model
