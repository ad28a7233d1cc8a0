"""The batch that exported files are made and checked with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError
from lit_cond.export.compare import tensors_in
from lit_cond.inspection.data import fit_to_model, read_data
from lit_cond.surgery.samples import Sample, as_samples, sampled_parts

__all__ = ["batch_size", "describe", "find_example", "jittered", "relengthed", "resized", "sequences"]

_GIVE_ONE = "give one with --data, or leave onnx and pt2 out with --formats"


def find_example(model: nn.Module, data: Any = None) -> Sample | None:
    """Return a batch of at least two samples that a model takes.

    Args:
        model: The model, in evaluation mode.
        data: A batch or the path of one, as `inspect --data` takes it; None makes a small one of what the model or a
            part of it says that it takes.

    Returns:
        The batch; None if the model does not say what it takes.

    Raises:
        ConfigurationError: If the model can not run on it.
        DataError: If there is no batch in the file.
    """
    if data is not None:
        path = Path(data) if isinstance(data, (str, Path)) else None
        sample = as_samples(data)[0] if path is None else read_data(path)
        if batch_size(sample) == 0 or any(not tensor.numel() for tensor in tensors_in((sample.args, sample.kwargs))):
            raise ConfigurationError(f"the example is empty ({describe(sample)}): give one sample or more")
        return _two_at_least(fit_to_model(sample, model, path or Path("example")))
    reason: Exception | None = None
    for name, _, samples in sampled_parts(model):
        if isinstance(samples, Exception):
            reason = samples
            continue
        for sample in samples:
            if sample.method is not None:
                continue
            # What a part of the model takes by name, the model around it may take under another one.
            tries = [sample] if not name or not sample.kwargs else [sample, _by_position(sample)]
            for attempt in tries:
                try:
                    with torch.no_grad():
                        attempt.run(model)
                    return _two_at_least(attempt)
                except Exception as error:  # whatever a foreign forward raises
                    reason = reason or error
    if reason is None:
        return None
    text = next(iter(str(reason).strip().splitlines()), "")
    raise ConfigurationError(
        f"{type(model).__name__} can not run on a batch made for it ({type(reason).__name__}: {text}); {_GIVE_ONE}"
    )


def _by_position(sample: Sample) -> Sample:
    return Sample((*sample.args, *(value for value in sample.kwargs.values() if isinstance(value, Tensor))))


def _two_at_least(sample: Sample) -> Sample:
    # torch.export takes a size of one for a property of the model.
    return sample if batch_size(sample) > 1 else resized(sample, 2)


def batch_size(sample: Sample) -> int:
    """Return the size of the first axis of the first tensor.

    Raises:
        ConfigurationError: If no tensor has an axis.
    """
    for tensor in tensors_in((sample.args, sample.kwargs)):
        if tensor.ndim:
            return tensor.shape[0]
    raise ConfigurationError(f"the example holds no tensor with an axis for the batch; {_GIVE_ONE}")


def resized(sample: Sample, size: int) -> Sample:
    """Return other values for a batch of another size: its samples in turn, floating-point ones mirrored.

    Args:
        sample: A batch; what has its size on the first axis counts as a part of it.
        size: The number of samples.
    """
    old = batch_size(sample)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != old:
            return tensor
        taken = tensor[torch.arange(size, device=tensor.device) % old]
        return taken.flip(-1) if taken.is_floating_point() and taken.ndim > 1 else taken

    return Sample(_mapped(sample.args, change), _mapped(sample.kwargs, change))


def sequences(sample: Sample) -> list[Tensor]:
    """Return the tensors of a batch of token numbers whose second axis may be the length of the sequences.

    Args:
        sample: A batch; what has its size on the first axis and as many entries on the second one as a matrix of whole
            numbers belongs to the sequences, as masks and embeddings do.
    """
    size, tensors = batch_size(sample), list(tensors_in((sample.args, sample.kwargs)))
    lengths = {
        tensor.shape[1]
        for tensor in tensors
        if tensor.ndim == 2 and tensor.shape[0] == size and tensor.dtype in (torch.int64, torch.int32)
    }
    lengths.discard(1)
    return [t for t in tensors if t.ndim in (2, 3) and t.shape[0] == size and t.shape[1] in lengths]


def relengthed(sample: Sample, change: int) -> Sample:
    """Return a batch whose sequences are longer or shorter; their entries come in turn.

    Args:
        sample: A batch.
        change: How many positions come to each sequence, negative to take some away; one stays at least.
    """
    chosen = {id(tensor) for tensor in sequences(sample)}

    def stretch(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen:
            return tensor
        old = tensor.shape[1]
        return tensor[:, torch.arange(max(1, old + change), device=tensor.device) % old]

    return Sample(_mapped(sample.args, stretch), _mapped(sample.kwargs, stretch))


def jittered(sample: Sample) -> Sample:
    """Return a batch whose floating-point numbers are each moved by one rounding, up and down in turn."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = 1 - 2 * (torch.arange(tensor.numel(), device=tensor.device) % 2).to(tensor.dtype).view(tensor.shape)
        return tensor * (1 + torch.finfo(tensor.dtype).eps * signs)

    return Sample(_mapped(sample.args, change), _mapped(sample.kwargs, change))


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(part, function) for key, part in value.items()}
    return type(value)(_mapped(part, function) for part in value) if type(value) in (list, tuple) else value


def describe(sample: Sample) -> str:
    """Return types and shapes of a batch, such as `float32 (2, 3, 32, 32)`."""
    return ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for tensor in tensors_in((sample.args, sample.kwargs))
    )
