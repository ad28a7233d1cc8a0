"""Replacing one module's forward on the instance, in a way that can be stacked, found again and undone.

An instance attribute `forward` is what `nn.Module.__call__` looks up, so the class, the parameters and their names stay
what they were; the wrapper travels with `copy.deepcopy` and `pickle`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from lit_cond.errors import LostTargetError

__all__ = ["InstanceForward", "bypassed", "install", "remove", "wrappers"]


class InstanceForward:
    """A callable that stands in for the forward of one module.

    Args:
        module: The module whose forward is wrapped.
    """

    bypassed = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Another instance-level forward (of a second wrapper, of accelerate, ...) stays in charge underneath.
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")

    def call_inner(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the wrapper covers."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        # Hugging Face's Trainer and `generate` read the argument names of a model's forward.
        if self.inner is not None:
            return inspect.signature(self.inner)
        parameters = list(inspect.signature(type(self.module).forward).parameters.values())
        return inspect.Signature(parameters[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, and what the subclass adds unless it is bypassed."""
        return self.call_inner(*args, **kwargs) if self.bypassed else self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; subclasses add what happens around it."""
        return self.call_inner(*args, **kwargs)


W = TypeVar("W", bound=InstanceForward)


def install(wrapper: InstanceForward) -> None:
    """Put a wrapper in charge of its module's forward."""
    wrapper.module.__dict__["forward"] = wrapper


def wrappers(module: nn.Module, kind: type[W]) -> Iterator[W]:
    """Yield the wrappers of one kind on a module, outermost first."""
    current = module.__dict__.get("forward")
    while isinstance(current, InstanceForward):
        if isinstance(current, kind):
            yield current
        current = current.inner


@contextmanager
def bypassed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules as if they carried no wrappers, to look at the model itself.

    Args:
        modules: All modules of the model.
    """
    found = [wrapper for module in modules for wrapper in wrappers(module, InstanceForward) if not wrapper.bypassed]
    try:
        for wrapper in found:
            wrapper.bypassed = True
        yield
    finally:
        for wrapper in found:
            wrapper.bypassed = False


def remove(wrapper: InstanceForward) -> None:
    """Take a wrapper out and leave those above and below it in charge.

    Raises:
        LostTargetError: If something else has replaced the forward since, so that it can not be undone.
    """
    module = wrapper.module
    current = module.__dict__.get("forward")
    if current is wrapper:
        if wrapper.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = wrapper.inner
        return
    while isinstance(current, InstanceForward):
        if current.inner is wrapper:
            current.inner = wrapper.inner
            return
        current = current.inner
    raise LostTargetError(
        f"the forward of {type(module).__name__} was replaced after conditioning; undo that replacement first"
    )
