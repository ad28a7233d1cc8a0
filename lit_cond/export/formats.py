"""What can be written, and what is known of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["FILES", "FORMATS", "ExportedFile", "Format"]

Format = Literal["safetensors", "huggingface", "onnx", "pt2"]

FORMATS: tuple[Format, ...] = get_args(Format)
"""All formats, in the order in which they are written."""

FILES: dict[Format, str] = {
    "safetensors": "model.safetensors",
    "huggingface": "huggingface",
    "onnx": "model.onnx",
    "pt2": "model.pt2",
}
"""What each is called in the folder."""


@dataclass(frozen=True)
class ExportedFile:
    """One exported file or folder.

    Args:
        format: Its format.
        name: Its name in the folder.
        difference: The largest difference of its outputs from those of the model, in parts of the largest output; None
            if there was no example to run.
    """

    format: Format
    name: str
    difference: float | None
