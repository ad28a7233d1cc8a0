"""The data of `inspect --data`: one batch from a file, as the arguments of a forward pass."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError, DataError
from lit_cond.surgery.samples import Sample, as_samples, sampled_parts
from lit_cond.surgery.survey import trace_and_remember
from lit_cond.surgery.tracing.quiet import as_it_was

__all__ = ["fit_to_model", "read_data"]

_FORMS = "give what torch.save has written of a tensor, a tuple of arguments or a dictionary of them, or a .npy file"


def read_data(path: Path) -> Sample:
    """Read a batch; nothing but tensors and plain values is unpickled.

    Args:
        path: A .npy file, or one that `torch.save` has written: a tensor or a list is the first argument of the model,
            a tuple holds its arguments, a dictionary those by name.

    Raises:
        DataError: If the file is not there, is neither, or holds something else.
    """
    if not path.is_file():
        raise DataError(f"there is no file '{path}': {_FORMS}")
    value = _numpy(path) if path.suffix == ".npy" else _torch(path)
    if not _tensors(value):
        raise DataError(f"'{path}' holds {type(value).__name__} without any tensor: {_FORMS}")
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        raise DataError(f"'{path}' holds a dictionary whose keys are no names of arguments: {_FORMS}")
    return as_samples(value)[0]


def _numpy(path: Path) -> Tensor:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
        return torch.from_numpy(array)
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise DataError(f"'{path}' is no array of numbers ({_first_line(error)}): {_FORMS}") from error


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"'{path}' can not be read as tensors and plain values ({_first_line(error)}): {_FORMS}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def fit_to_model(sample: Sample, model: nn.Module, path: Path) -> Sample:
    """Return a batch with its floating-point tensors in the type and all in the place of a model's parameters.

    Where the model does not say what it takes, the batch also shows what it computes, as a sample input would have.

    Args:
        sample: The batch.
        model: The model.
        path: Where the batch came from, for the error.

    Raises:
        ConfigurationError: If the weights of the model have no values, or it can not run on the batch.
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    if like.is_meta:
        raise ConfigurationError(
            f"'{path}' can not be shown to a model without values: it is built on the meta device; use --device cpu"
        )

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Mapping):
            return {key: move(part) for key, part in value.items()}
        return type(value)(move(part) for part in value) if isinstance(value, (list, tuple)) else value

    sample = replace(sample, args=move(sample.args), kwargs=move(sample.kwargs))
    try:
        if next(sampled_parts(model), None) is None:
            trace_and_remember(model, [sample])
        else:
            with as_it_was(model), torch.no_grad():
                sample.run(model)
    except Exception as error:  # whatever a foreign forward raises
        raise ConfigurationError(
            f"{type(model).__name__} can not run on '{path}': {type(error).__name__}: {_first_line(error)}"
        ) from error
    return sample
