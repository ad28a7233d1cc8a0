"""Copies of models without what compilers and strategies put around their parts."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lit_cond.surgery.sites import clean_name

__all__ = ["unwrapped_copy"]


def unwrapped_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which each wrapper is replaced by what it wraps, so that names are plain ones.

    Wrappers are those of `torch.compile`, DDP, `DataParallel` and the ones that `clean_name` knows. The copy of a
    compiled model computes the same without the compiler.

    Args:
        model: Any model; it stays as it is.
    """
    # A copy is looked up here before it is made: the copy of a wrapper is the copy of what it wraps.
    known: dict[int, Any] = {}
    for module in reversed(list(model.modules())):
        inner = _wrapped(module)
        if inner is not None:
            known[id(module)] = copy.deepcopy(inner, known)
    copied: nn.Module = copy.deepcopy(model, known)
    return copied


def _wrapped(module: nn.Module) -> nn.Module | None:
    if isinstance(module, (DataParallel, DistributedDataParallel)):
        inner: nn.Module = module.module
        return inner
    return next((child for name, child in module.named_children() if not clean_name(name)), None)
