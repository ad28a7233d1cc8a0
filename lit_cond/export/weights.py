"""The backbone's weights alone: safetensors, and the folder of Hugging Face. Each is read back and compared."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.errors import ConfigurationError, ExportMismatchError
from lit_cond.export.formats import writing
from lit_cond.extras import optional_imports
from lit_cond.surgery.tokens import token_forwards

__all__ = ["is_hugging_face", "read_huggingface", "read_safetensors", "write_huggingface", "write_safetensors"]


def write_safetensors(backbone: nn.Module, path: Path, metadata: Mapping[str, str]) -> list[str]:
    """Write a state dict; names that share a tensor are written with a copy each, so that a strict load finds all.

    Args:
        backbone: The model, its corrections folded.
        path: The file.
        metadata: What stands in the file's header.

    Returns:
        The names that share their tensor with an earlier one.

    Raises:
        ConfigurationError: If an entry of the state dict is no tensor that the format can hold.
        MissingExtraError: If safetensors is not installed.
    """
    with optional_imports("model.safetensors", extra="export"):
        from safetensors.torch import save_file
    state = backbone.state_dict()
    seen: dict[tuple[Any, ...], str] = {}
    shared = []
    written = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = type(value).__name__ if not isinstance(value, Tensor) else f"{value.layout} on {value.device}"
            raise ConfigurationError(
                f"'{name}' in the state_dict of {type(backbone).__name__} is {kind}, which safetensors can not hold; "
                "leave safetensors out with --formats"
            )
        key = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and seen.setdefault(key, name) != name:
            shared.append(name)
        written[name] = value.detach().contiguous().clone()
    with writing(path.name):
        save_file(written, path, {"format": "pt", **metadata})
    return shared


def read_safetensors(backbone: nn.Module, path: Path) -> None:
    """Load a file strictly into a model whose weights were wiped, and compare every entry bit for bit.

    Raises:
        ExportMismatchError: If an entry is missing or differs.
    """
    from safetensors.torch import load_file

    expected = {name: value.clone() for name, value in backbone.state_dict().items()}
    with torch.no_grad():
        for value in backbone.state_dict().values():
            value.zero_()
        backbone.load_state_dict(load_file(path), strict=True)
    _require_equal(expected, backbone.state_dict(), path)


def _require_equal(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    for name, value in expected.items():
        other = found.get(name)
        # Bits, so that NaN equals itself.
        if other is None or value.dtype != other.dtype or not torch.equal(_bits(value), _bits(other)):
            raise ExportMismatchError(f"'{name}' read back from '{path.name}' is not what was written")


def _bits(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8)


def is_hugging_face(backbone: nn.Module) -> bool:
    """Whether a model is one of transformers, as `from_pretrained` of its class returns it."""
    library = sys.modules.get("transformers")  # where it was not imported, no model is of it
    try:
        return library is not None and isinstance(backbone, library.PreTrainedModel)
    except ImportError:  # what transformers needs for its models is not there, so none was made
        return False


def write_huggingface(backbone: nn.Module, folder: Path) -> None:
    """Write the folder that `from_pretrained` reads.

    Raises:
        ConfigurationError: If tokens are corrected, of which that folder could say nothing.
    """
    for name, _ in token_forwards(backbone):
        raise ConfigurationError(
            f"the tokens at '{name}' are corrected, and from_pretrained, which knows no such correction, would compute "
            "something else without an error; leave huggingface out with --formats safetensors onnx pt2"
        )
    saved: Any = backbone
    with _quiet(), writing(folder.name):
        saved.save_pretrained(folder)


def read_huggingface(backbone: nn.Module, folder: Path) -> nn.Module:
    """Return the model that `from_pretrained` makes of a folder, its weights compared bit for bit.

    Raises:
        ExportMismatchError: If a weight is missing or differs.
    """
    cls: Any = type(backbone)
    with _quiet():
        loaded, info = cls.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise ExportMismatchError(f"from_pretrained reports {kind.replace('_', ' ')}: {sorted(info[kind])[:3]}")
    _require_equal(backbone.state_dict(), loaded.state_dict(), folder)
    model: nn.Module = loaded.eval()
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars of transformers off the terminal."""
    with optional_imports("huggingface/"):
        from transformers.utils import logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
