"""Entries of tiny configurations that the rules of `transformers_shrink` do not find, by type.

A value is merged into the shrunk entries; `__init__` holds arguments of the configuration class, for types whose
default is not valid or has no attention; a function makes the configuration alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["OVERRIDES"]

OVERRIDES: dict[str, Any] = {}
