"""What stands in for the forward of a module for one step and looks at its first call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lit_cond.measuring.observe import ObservedAttention, observe_call
from lit_cond.surgery.scope import InstanceForward
from lit_cond.surgery.sites import AttentionSite

__all__ = ["AttentionProbe", "InputProbe", "PassingForward", "Probe", "sites_by_module"]


def _plain() -> InstanceForward:
    return InstanceForward.__new__(InstanceForward)


class PassingForward(InstanceForward):
    """A forward that copies of the model get as a plain one, without what looks at it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceForward:
        plain = _plain()
        memo[id(self)] = plain
        plain.module, plain.inner = copy.deepcopy(self.module, memo), copy.deepcopy(self.inner, memo)
        return plain

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (), {"module": self.module, "inner": self.inner}


class Probe(PassingForward):
    """Looks at the first call of a module.

    Args:
        module: The module.
        failed: Called with what went wrong in looking; the module's call is not disturbed.
    """

    def __init__(self, module: nn.Module, failed: Callable[[Exception], None]) -> None:
        super().__init__(module)
        self.failed = failed
        self.done = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, watched if it is the first time."""
        if self.done or torch.compiler.is_compiling():
            return self.call_inner(*args, **kwargs)
        self.done = True
        return self.look(args, kwargs)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module and look."""
        raise NotImplementedError


class InputProbe(Probe):
    """Shows what a module is called with.

    Args:
        module: The module.
        see: Called with the arguments, without gradients.
        failed: Called with what `see` raises.
    """

    def __init__(
        self,
        module: nn.Module,
        see: Callable[[tuple[Any, ...], dict[str, Any]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(module, failed)
        self.see = see

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Show the arguments, then run the module."""
        try:
            with torch.no_grad():
                self.see(args, kwargs)
        except Exception as error:  # handed on: a measurement that fails must not break the step
            self.failed(error)
        return self.call_inner(*args, **kwargs)


class AttentionProbe(Probe):
    """Shows what an attention module attends to.

    Args:
        sites: The layers that the module holds.
        note: Called with each one when it has run, without gradients.
        failed: Called with what looking or `note` raises.
        max_samples: How many samples to look at, see `observe_call`.
        needed: How many in any case.
    """

    def __init__(
        self,
        sites: Sequence[AttentionSite],
        note: Callable[[ObservedAttention], None],
        failed: Callable[[Exception], None],
        max_samples: int,
        needed: int = 1,
    ) -> None:
        super().__init__(sites[0].module, failed)
        self.sites = sites
        self.note = note
        self.max_samples = max_samples
        self.needed = needed

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module under watch."""
        if isinstance(self.module, nn.MultiheadAttention) and not self.module.training:
            # It may take a kernel that it does not take while it is watched.
            result = self.call_inner(*args, **kwargs)
            with torch.no_grad():
                self._observe(args, kwargs)
            return result
        return self._observe(args, kwargs)

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, problem = observe_call(
            self.sites,
            self.module,
            lambda: self.call_inner(*args, **kwargs),
            self.note,
            self.max_samples,
            self.needed,
        )
        if problem is not None:
            self.failed(problem)
        return result


def sites_by_module(sites: Iterable[AttentionSite]) -> list[list[AttentionSite]]:
    """Return layers grouped by the module that holds them, in their order."""
    groups: dict[nn.Module, list[AttentionSite]] = {}
    for site in sites:
        groups.setdefault(site.module, []).append(site)
    return list(groups.values())
