"""Forward passes of a model with and without changed weights, compared core by core."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from scripts.conformance_oracle.capture import Capture
from scripts.conformance_oracle.records import ROLES, Core, Use
from scripts.conformance_oracle.weights import Change, changed_weights

__all__ = ["Bench", "Outcome"]


class _Enough(BaseException):
    """Ends a forward pass once it has shown what was asked; no `except Exception` of a model holds it up."""


@dataclass(eq=False)
class Outcome:
    """What a changed run differed in.

    Args:
        core: The core where the run ended: the first that differs, or the one that it was to end at.
        touched: Roles of which an operand differs, by number of the core.
        uses: Projections that read a watched parameter, by id of the parameter, in order of execution.
        first: Number of the sample that the run began with.
    """

    core: Core | None = None
    first: int = 0
    touched: dict[int, frozenset[str]] = field(default_factory=dict)
    uses: dict[int, list[Use]] = field(default_factory=lambda: defaultdict(list))

    @property
    def roles(self) -> frozenset[str]:
        """Roles that differ at the core where the run ended."""
        return frozenset() if self.core is None else self.touched.get(self.core.index, frozenset())


class Bench:
    """A model, its inputs, and what its attention multiplies when no weight is changed.

    Args:
        model: The model; it is put into evaluation mode, and into float64 if it runs that way.
        samples: One for each forward pass; anything with `args`, `kwargs` and `run`.
        double: Whether to try float64.
    """

    def __init__(self, model: nn.Module, samples: Sequence[Any], *, double: bool = True) -> None:
        self.model = model.eval()
        self.samples: list[Any] = list(samples)
        self.dtype = torch.float32
        self.base: list[Core] = []
        self.uses: list[dict[int, list[Use]]] = []
        self.guessed = 0
        self._sides: list[list[list[str]]] = []
        self._starts: list[int] = []
        self._modules: list[nn.Module] = []
        self._singles = self.samples
        self.doubling_problem = self._double() if double else ""
        self._listen()
        if self.dtype == torch.float64 and not self.finite:
            self._single()
            self._listen()
            self.doubling_problem = "not finite in float64"

    @property
    def finite(self) -> bool:
        """Whether all operands of all cores are finite numbers."""
        return all(bool(t.isfinite().all()) for core in self.base for role in ROLES for t in core.tensors(role))

    def _single(self) -> None:
        self.model.float()
        self.samples, self.dtype = self._singles, torch.float32

    def _double(self) -> str:
        """Go to float64; if the model can not run in it, come back and return why."""
        self.model.double()
        self.samples = [replace(s, args=_cast(s.args), kwargs=_cast(s.kwargs)) for s in self._singles]
        self.dtype = torch.float64
        try:
            with self._quiet(), torch.no_grad():
                for sample in self.samples:
                    _seed()
                    sample.run(self.model)
        except Exception as error:
            self._single()
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return ""

    def _listen(self) -> None:
        """Learn which factor is the query of each softmax, then record what an unchanged run multiplies."""
        self._sides, self.guessed = [], 0
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        for sample in self.samples:
            capture = self._capture()
            with torch.enable_grad():
                self._forward(sample, capture)
            self._sides.append(capture.decided)
            self.guessed += capture.guessed
        self.watch(())

    def watch(self, parameters: Collection[nn.Parameter]) -> None:
        """Run without changes and keep the cores and the projections that read these parameters."""
        self.base, self._starts, self.uses = [], [], []

        def keep(core: Core) -> None:
            # The output is cloned since later steps may write into it.
            self.base.append(replace(core, index=len(self.base), output=core.output.detach().clone()))

        watched = frozenset(map(id, parameters))
        for number, sample in enumerate(self.samples):
            self._starts.append(len(self.base))
            uses: dict[int, list[Use]] = defaultdict(list)
            capture = self._capture(number, watched, on_core=keep, on_use=lambda use, seen=uses: _note(seen, use))
            with torch.no_grad():
                self._forward(sample, capture)
            self.uses.append(uses)

    def uses_of(self, parameter: nn.Parameter, first: int = 0) -> list[Use]:
        """Return the projections by a watched parameter in the unchanged run, from one sample on."""
        return [use for uses in self.uses[first:] for use in uses.get(id(parameter), ())]

    def run(
        self,
        changes: Sequence[Change],
        *,
        begin: int = 0,
        end: int | None = None,
        clamp: bool = False,
        full: bool = False,
        frozen: Collection[nn.Parameter] = (),
    ) -> Outcome:
        """Run with changed weights up to the first core that differs.

        Args:
            changes: What to add to which weights.
            begin: Differences at cores before this one do not end the run.
            end: Core where the run ends whether it differs or not.
            clamp: Give every core its unchanged output, so that a change shows only where it arrives by itself.
            full: Run to the end in any case.
            frozen: Parameters whose projections stay as in the unchanged run.
        """
        outcome = Outcome()
        stays = frozenset(map(id, frozen))
        watched = stays | {id(change.parameter) for change in changes}

        def on_core(core: Core, start: int) -> Tensor | None:
            core = replace(core, index=start + core.index)
            if core.index >= len(self.base):
                return None
            roles = core.changed(self.base[core.index])
            if roles:
                outcome.touched[core.index] = roles
            if not full and ((roles and core.index >= begin) or (end is not None and core.index >= end)):
                outcome.core = core
                raise _Enough
            return self.base[core.index].output if clamp else None

        def on_use(use: Use, counts: dict[int, int]) -> Tensor | None:
            replacement = None
            for key in use.parameters & watched:
                number = counts[key] = counts.get(key, -1) + 1
                if number < len(known[key]):
                    old = known[key][number]
                    use = use if key in stays else use.imagine(old)
                    replacement = old.output if key in stays else use.output if use.imagined else replacement
            _note(outcome.uses, use)
            return replacement

        first = 0 if full else max(i for i, start in enumerate(self._starts) if start <= begin)
        parameters = [*frozen, *(change.parameter for change in changes)]
        known = {id(parameter): self.uses_of(parameter, first) for parameter in parameters}
        outcome.first = first
        counts: dict[int, int] = {}
        with changed_weights(changes), torch.no_grad():
            for number in range(first, len(self.samples)):
                start = self._starts[number]
                capture = self._capture(
                    number,
                    watched,
                    on_core=lambda core, start=start: on_core(core, start),
                    on_use=lambda use: on_use(use, counts),
                )
                try:
                    self._forward(self.samples[number], capture)
                except _Enough:
                    break
        return outcome

    def _capture(self, number: int | None = None, watched: frozenset[int] = frozenset(), **handlers: Any) -> Capture:
        weights = [*self.model.parameters(), *(b for b in self.model.buffers() if b.is_floating_point())]
        sides = None if number is None else self._sides[number]
        return Capture(weights, watched, modules=self._modules, sides=sides, **handlers)

    def _forward(self, sample: Any, capture: Capture) -> None:
        self._modules.clear()
        _seed()
        with self._quiet(), self._stacked(), capture:
            sample.run(self.model)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Make new tensors of the model's type, and take no fused path that hides what is multiplied."""
        dtype, fused = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
        torch.set_default_dtype(self.dtype)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.backends.mha.set_fastpath_enabled(fused)

    @contextmanager
    def _stacked(self) -> Iterator[None]:
        """Keep the list of the modules that are running."""

        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(module)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._modules:
                self._modules.pop()

        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(enter),
                register_module_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
            yield


def _note(uses: dict[int, list[Use]], use: Use) -> None:
    for key in use.parameters:
        uses.setdefault(key, []).append(use)


def _seed() -> None:
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002 (models draw from the global generator)
    torch.manual_seed(0)


def _cast(value: Any) -> Any:
    """Return nested arguments with float32 tensors as float64."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype == torch.float32 else value
    if isinstance(value, Mapping):
        return {key: _cast(entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(entry) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(entry) for entry in value)
    return value
