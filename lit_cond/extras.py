"""Imports of optional libraries: a missing one is named together with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lit_cond.errors import MissingExtraError

__all__ = ["optional_imports"]


@contextmanager
def optional_imports(purpose: str, extra: str = "tasks") -> Iterator[None]:
    """Turn the absence of a library into an error that says how to get it.

    Import statements go inside the ``with`` block. A module of lit_cond itself that can not be found is a
    defect of the installation and passes unchanged.

    Args:
        purpose: What needs the library, as the subject of the sentence.
        extra: The extra of the package that holds the library.

    Raises:
        MissingExtraError: A library imported in the block is not installed.

    Example:
        >>> with optional_imports("a timm backbone"):
        ...     import no_such_library
        Traceback (most recent call last):
        ...
        lit_cond.errors.MissingExtraError: a timm backbone needs 'no_such_library', which is not installed: \
pip install "lit_cond[tasks]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or str(error)).split(".")[0]
        if missing == "lit_cond":
            raise
        raise MissingExtraError(
            f'{purpose} needs {missing!r}, which is not installed: pip install "lit_cond[{extra}]"'
        ) from error
