"""Trained models for other programs: folded weights, Hugging Face folders, ONNX and torch.export, each checked."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_cond.export.formats import FORMATS, ExportedFile, Format
    from lit_cond.export.run import ExportReport, export_checkpoint, export_model

__all__ = ["FORMATS", "ExportReport", "ExportedFile", "Format", "export_checkpoint", "export_model"]

# Imported on first use: `export --help` does not wait for torch.
_HOMES = {
    "FORMATS": "formats",
    "ExportedFile": "formats",
    "Format": "formats",
    "ExportReport": "run",
    "export_checkpoint": "run",
    "export_model": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_cond.export' has no attribute {name!r}")
    return getattr(import_module(f"lit_cond.export.{_HOMES[name]}"), name)
