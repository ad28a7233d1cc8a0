"""Going back to a finished run: the model and the data from its folder, in Python."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from lit_cond.checkpoint import load_checkpoint
from lit_cond.checkpoint_file import read_checkpoint
from lit_cond.cli_errors import explain
from lit_cond.errors import CheckpointFileError, ConfigurationError, DataError
from lit_cond.extras import optional_imports

with optional_imports("lit_cond.runs"):
    from jsonargparse import ArgumentError, ArgumentParser

__all__ = ["LoadedRun", "find_checkpoint", "load_model", "load_run"]

_CONFIG_NAME = "config.yaml"


class LoadedRun(NamedTuple):
    """What `load_run` returns.

    Attributes:
        model: The trained model, in eval mode, with the corrections of the checkpoint.
        datamodule: The data of the run, not set up yet; None when the run had no data module.
        config: The content of the run's config.yaml.
        checkpoint: The checkpoint that was loaded.
    """

    model: LightningModule
    datamodule: LightningDataModule | None
    config: dict[str, Any]
    checkpoint: Path


def load_run(run_dir: str | Path, checkpoint: str | Path = "best") -> LoadedRun:
    """Build the model and the data module of a run of ``python -m lit_cond fit`` again.

    Relative paths in the configuration, such as the folder of a data set, count from the present working
    directory, as they did on the command line.

    Args:
        run_dir: The folder that holds the run's config.yaml, for example ``lightning_logs/version_0``.
        checkpoint: ``"best"``, ``"last"``, or the path of a checkpoint.

    Returns:
        The model with the weights of the checkpoint, the data module, the configuration and the path.

    Raises:
        DataError: The folder holds no config.yaml or no checkpoint.
        ConfigurationError: The configuration names a class or an option that does not exist.

    Example:
        ``model, data, config, path = load_run("lightning_logs/version_0")``
    """
    folder = Path(run_dir)
    config = _read_config(folder)
    path = find_checkpoint(folder, checkpoint)
    datamodule = _build_data(config, folder)
    model = _load_model(path, config, folder, getattr(datamodule, "num_classes", None))
    return LoadedRun(model.eval(), datamodule, config, path)


def load_model(checkpoint: str | Path) -> LightningModule:
    """Load the model of a checkpoint, whose class it records itself or a config.yaml up to two folders above.

    Args:
        checkpoint: A checkpoint of Lightning.

    Returns:
        The model with the weights of the checkpoint. Trained weights that its constructor would fetch are not fetched.

    Raises:
        ConfigurationError: The class is recorded nowhere, can not be imported, or needs arguments that are recorded
            nowhere.
        CheckpointFileError: The file is not a checkpoint.
    """
    path = Path(checkpoint)
    saved = _arguments_in(path)
    folder = next((f for f in list(path.resolve().parents)[:3] if (f / _CONFIG_NAME).is_file()), None)
    config = {"model": None} if folder is None else _read_config(folder)
    if not (saved.get("_class_path") or (config["model"] or {}).get("class_path")):
        raise ConfigurationError(
            f"'{path}' does not record the class of its model, and there is no {_CONFIG_NAME} beside it or above: "
            "write a function that loads it, and name that as package.module:function"
        )
    kwargs = {"pretrained": False} if "pretrained" in saved else {}
    return _load_model(path, config, folder or path.parent, None, **kwargs)


def _load_model(
    path: Path, config: dict[str, Any], folder: Path, num_classes: int | None, **kwargs: Any
) -> LightningModule:
    saved = _arguments_in(path)
    spec = config.get("model") or {}
    model_class = _class_at(saved.get("_class_path") or spec.get("class_path"), folder)
    arguments: dict[str, Any] = {}
    if not saved:  # a model that does not call save_hyperparameters
        arguments = dict(spec.get("init_args") or {})
        if num_classes is not None and "num_classes" in inspect.signature(model_class).parameters:
            arguments["num_classes"] = num_classes
    return load_checkpoint(model_class, path, map_location="cpu", **arguments, **kwargs)


def find_checkpoint(run_dir: str | Path, checkpoint: str | Path = "best") -> Path:
    """Find a checkpoint of a run.

    Args:
        run_dir: The folder of the run; its subfolders are searched.
        checkpoint: ``"best"`` (by the metric that the run's ModelCheckpoint watched; the last where it
            watched none), ``"last"`` (with the most optimizer steps), or a path.

    Returns:
        The path of the checkpoint.

    Raises:
        DataError: There is none.
    """
    folder = Path(run_dir)
    if checkpoint not in ("best", "last"):
        path = Path(checkpoint)
        if not path.is_file():
            raise DataError(f"there is no checkpoint '{path}': give a path, 'best' or 'last'")
        return path
    paths = [path for path in sorted(folder.rglob("*.ckpt")) if path.is_file()]
    if not paths:
        raise DataError(f"'{folder}' holds no checkpoint (*.ckpt): give the path of one")
    states = {path: state for path in paths if (state := _peek(path))}
    if not states:
        read_checkpoint(paths[0], mmap=True)  # says what is wrong with it
    paths = list(states)
    last = max(paths, key=lambda path: (states[path].get("global_step", 0), path.stat().st_mtime))
    if checkpoint == "last":
        return last
    # The folder may have been moved since: only the name of the recorded path counts.
    callbacks = [one for one in states[last].get("callbacks", {}).values() if isinstance(one, dict)]
    # One that watches nothing calls its newest checkpoint the best.
    for state in sorted(callbacks, key=lambda one: one.get("monitor") is None):
        best = state.get("best_model_path")
        for path in paths:
            if best and path.name == Path(best).name:
                return path
    return last


def _peek(path: Path) -> dict[str, Any]:
    """Read what surrounds the weights; nothing from a file that is no checkpoint."""
    try:
        return read_checkpoint(path, mmap=True)
    except CheckpointFileError:
        return {}


def _arguments_in(path: Path) -> dict[str, Any]:
    return read_checkpoint(path, mmap=True).get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG_NAME
    if not path.is_file():
        raise DataError(f"'{folder}' is no folder of a run: it holds no {_CONFIG_NAME}")
    config = yaml.safe_load(path.read_text())
    if not isinstance(config, dict) or "model" not in config:
        raise DataError(f"'{path}' is not the configuration of a run: it names no model")
    return config


def _build_data(config: dict[str, Any], folder: Path) -> LightningDataModule | None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=LightningDataModule | None, default=None)
    try:
        parsed = parser.parse_object({"data": config.get("data")})
    except ArgumentError as error:
        raise ConfigurationError(f"{folder / _CONFIG_NAME}: {explain(str(error), {})}") from error
    datamodule: LightningDataModule | None = parser.instantiate_classes(parsed)["data"]
    return datamodule


def _class_at(class_path: str | None, folder: Path) -> type[LightningModule]:
    module, _, name = (class_path or "").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{folder / _CONFIG_NAME}: the class of the model can not be imported: {class_path!r}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LightningModule)):
        raise ConfigurationError(f"{folder / _CONFIG_NAME}: {class_path!r} is not a LightningModule")
    return found
