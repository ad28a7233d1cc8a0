"""Running a model for its structure only, and leaving it, and the random numbers, as they were."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.surgery.scope import bypassed

__all__ = ["as_it_was"]


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without corrections, and give every attribute of its modules back afterwards.

    Some models keep caches or swap modules while they run (LeViT, BigBird): attributes, buffers and the contents of
    plain lists and dictionaries that hang on modules are restored. Values of tensors that a forward pass overwrites in
    evaluation mode are restored for buffers.

    Args:
        model: Any module.
    """
    modules = list(model.modules())
    saved = [(module, _snapshot(module)) for module in modules]
    modes = [(module, module.training) for module in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[d for d in devices if d.index is not None]))
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(bypassed(modules))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            # Not `model.eval()`, which a user's module may have overridden.
            for module in modules:
                module.training = False
            for parameter, _ in flags:
                if parameter.is_floating_point() and parameter.is_leaf:
                    parameter.requires_grad_(True)
            yield
        finally:
            for parameter, flag in flags:
                if parameter.is_leaf:
                    parameter.requires_grad_(flag)
            for module, snapshot in saved:
                _restore(module, snapshot)
            for module, mode in modes:  # scripted modules keep theirs elsewhere
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    if not _same(buffer, value):
                        buffer.copy_(value)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.is_meta or torch.equal(a, b)


def _snapshot(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a module, containers with a shallow copy of their contents."""
    return {
        name: (
            value,
            value.copy() if type(value) in _CONTAINERS or (name in _TABLES and isinstance(value, dict)) else None,
        )
        for name, value in module.__dict__.items()
    }


# Hooks stand in ordered dictionaries: transformers installs some at the first forward pass, and notes that it has.
_CONTAINERS = (dict, OrderedDict, list, set)
# Where `nn.Module` keeps its own contents (torch 2.14): swapped modules and replaced buffers are found here.
_TABLES = ("_modules", "_buffers", "_parameters")


def _restore(module: nn.Module, snapshot: dict[str, tuple[Any, Any]]) -> None:
    attributes = module.__dict__
    for name in attributes.keys() - snapshot.keys():
        del attributes[name]
    for name, (value, contents) in snapshot.items():
        attributes[name] = value
        if contents is None:
            continue
        if isinstance(value, list):
            value[:] = contents
        else:
            value.clear()
            value.update(contents)
