"""What can be written, and what is known of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from lit_cond.errors import ConfigurationError, LitCondError

__all__ = ["FILES", "FORMATS", "ExportedFile", "Format", "UnfitFormatError", "first_line", "writing"]

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
        free: The axes of a graph whose size may differ from the example's, such as "batch" or "length (2 to 512)".
    """

    format: Format
    name: str
    difference: float | None
    free: Sequence[str] = ()


class UnfitFormatError(ConfigurationError):
    """A format can not hold a model, or what it holds can not be checked.

    Args:
        reason: Why not.
        advice: What to do.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Turn what a library raises while it writes a file, as for a full disk, into one line.

    Args:
        name: Name of the file.

    Raises:
        ConfigurationError: If the file can not be written.
    """
    try:
        yield
    except LitCondError:
        raise
    except Exception as error:  # each library has its own; safetensors' is no OSError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise ConfigurationError(f"'{name}' can not be written: {reason}; is there room in that folder?") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, 200 characters at most; its class where there is none."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= 200 else f"{line[:200]} ..."
