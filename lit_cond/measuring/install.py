"""Looking at modules while a model trains, and changing nothing in what it computes.

A probe stands in for the forward of one module for one step. What torch runs as usual is watched while it runs. Two
things can not be watched without changing them: compiled modules, whose graph would be compiled anew, and the fused
kernels that torch's own encoder layers take in evaluation mode. They are run a second time on the side, eagerly, on the
same input, without gradients, random numbers and buffers as they were; the model's own call goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from lit_cond.errors import ConfigurationError
from lit_cond.measuring.observe import ObservedAttention
from lit_cond.measuring.probes import AttentionProbe, PassingForward, Probe, sites_by_module
from lit_cond.measuring.values import mapped, random_numbers_kept
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.scope import install, remove
from lit_cond.surgery.sites import AttentionSite

__all__ = ["Probes", "compiled_method", "observe_forward", "run_on_the_side"]

# The name that torch.compile gives to the module inside.
_COMPILED = "_orig_mod"


def observe_forward(
    model: nn.Module,
    sites: Iterable[AttentionSite],
    sample: Sample,
    note: Callable[[ObservedAttention], None],
    max_samples: int = 8,
) -> dict[str, Exception]:
    """Run a model once for what its attention layers attend to, and leave it as it was.

    The mode (training or evaluation) is the model's own. Without gradients; random numbers and buffers are given back.

    Args:
        model: The model.
        sites: Layers of it, from `find_attention`.
        sample: What to call it with.
        note: Called with each layer as soon as it has run; keep numbers rather than tensors where memory is short.
        max_samples: How many samples of the batch to look at.

    Returns:
        Why layers could not be observed, by name. A layer that did not run is among them.
    """
    problems: dict[str, Exception] = {}
    seen: set[str] = set()

    def noted(observed: ObservedAttention) -> None:
        note(observed)
        seen.add(observed.site.name)

    def probe(group: list[AttentionSite]) -> AttentionProbe:
        def failed(error: Exception) -> None:
            problems.update((site.name, error) for site in group if site.name not in seen)

        return AttentionProbe(group, noted, failed, max_samples)

    chosen = list(sites)

    def call(*args: Any, **kwargs: Any) -> Any:
        return replace(sample, args=args, kwargs=kwargs).run(model)

    run_on_the_side(model, call, [probe(g) for g in sites_by_module(chosen)], sample.args, dict(sample.kwargs))
    for site in chosen:
        if site.name not in seen and site.name not in problems:
            problems[site.name] = ConfigurationError(f"'{site.name}' did not run in this pass")
    return problems


class _OnTheSide(PassingForward):
    """Runs a module a second time, its parts watched, before it runs as usual.

    Args:
        module: The module.
        probes: Probes of its parts.
    """

    def __init__(self, module: nn.Module, probes: Sequence[Probe]) -> None:
        super().__init__(module)
        self.probes = probes
        self.aside = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Look, then run."""
        if not self.aside and not torch.compiler.is_compiling():
            self.aside = True
            try:
                # Looked up when it is called: a probe of the module itself stands there then.
                run_on_the_side(self.module, lambda *a, **k: self.module.forward(*a, **k), self.probes, args, kwargs)
            finally:
                self.aside = False
        return self.call_inner(*args, **kwargs)


class Probes:
    """Probes of a model for one step; a context.

    Args:
        model: The model.
        probes: What to look at in it.
    """

    def __init__(self, model: nn.Module, probes: Iterable[Probe]) -> None:
        self._stack = ExitStack()
        self._hidden: dict[nn.Module, list[Probe]] = {}
        around = _hiding(model)
        self._open: list[Probe] = []
        for probe in probes:
            outer = around.get(probe.module)
            if outer is None:
                self._open.append(probe)
            else:
                self._hidden.setdefault(outer, []).append(probe)

    def __enter__(self) -> Probes:
        for probe in self._open:
            _put_on(probe)
            self._stack.callback(remove, probe)
        for module, probes in self._hidden.items():
            self._stack.enter_context(_looked_into(module, probes))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _put_on(probe: Probe) -> None:
    """Install a probe above whatever stands on its module by now."""
    probe.inner = probe.module.__dict__.get("forward")
    install(probe)


def _hiding(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return for each module that can not be watched where it stands the outermost one that hides it."""
    hidden: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        # No public way tells a module that `Module.compile` has compiled in place (torch 2.14).
        in_place = module._compiled_call_impl is not None or is_compiled(module.forward)
        fused = isinstance(module, nn.TransformerEncoderLayer) and not module.training
        if in_place or fused or _inside(module) is not None:
            for part in module.modules():
                if part is not module or in_place:
                    hidden.setdefault(part, module)
    return hidden


def is_compiled(function: Any) -> bool:
    """Whether `torch.compile` has made a function, which it notes in a private attribute only (torch 2.14)."""
    return hasattr(function, "_torchdynamo_orig_callable")


def compiled_method(model: nn.Module) -> str | None:
    """Return the name of a method of a module that `torch.compile` has made, other than forward; None without any."""
    for name, module in model.named_modules():
        for attribute, value in (*vars(type(module)).items(), *module.__dict__.items()):
            if attribute.startswith("_") or attribute == "forward" or isinstance(value, nn.Module):
                continue
            if callable(value) and is_compiled(value):
                return f"{name}.{attribute}".lstrip(".")
    return None


def _inside(module: nn.Module) -> nn.Module | None:
    """Return what `torch.compile` has wrapped into a module, None for any other module."""
    return next((child for name, child in module.named_children() if name == _COMPILED), None)


@contextmanager
def _looked_into(module: nn.Module, probes: Sequence[Probe]) -> Iterator[None]:
    inner = _inside(module)
    if inner is not None:
        # The hooks of the wrapper itself are not compiled.
        handle = module.register_forward_pre_hook(_side_hook(inner, probes), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
    elif module._compiled_call_impl is not None:
        compiled = module._compiled_call_impl

        def both(*args: Any, **kwargs: Any) -> Any:
            # Looked up when it is called: a probe of the module itself stands there then.
            run_on_the_side(module, lambda *a, **k: module.forward(*a, **k), probes, args, kwargs)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = both
        try:
            yield
        finally:
            module._compiled_call_impl = compiled
    else:
        forward = _OnTheSide(module, probes)
        install(forward)
        try:
            yield
        finally:
            remove(forward)


def _side_hook(inner: nn.Module, probes: Sequence[Probe]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run_on_the_side(inner, inner, probes, args, kwargs)

    return hook


def run_on_the_side(
    module: nn.Module,
    call: Callable[..., Any],
    probes: Sequence[Probe],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run a module eagerly with its parts watched, and leave it and the random numbers as they were.

    Args:
        module: The module.
        call: What runs it.
        probes: Probes of its parts; they are told if it fails.
        args: What it is called with.
        kwargs: Likewise by name.
    """
    if all(probe.done for probe in probes):
        return
    try:
        with _unchanged(module), ExitStack() as stack:
            for probe in probes:
                _put_on(probe)
                stack.callback(remove, probe)
            call(*mapped(args, _copied), **mapped(kwargs, _copied))
    except Exception as error:  # handed on: a measurement that fails must not break the step
        for probe in probes:
            probe.done = True
            probe.failed(error)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Run eagerly, without gradients, and give back buffers and random numbers."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = {t.device.type for t in module.parameters()} - {"meta"}
    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept((*module.parameters(), *module.buffers())))
        stack.enter_context(torch.no_grad())
        # A mode that does nothing: torch's encoder layers leave their fused kernel aside under any mode.
        stack.enter_context(BaseTorchFunctionMode())
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for device in {"cpu", *devices}:
            if torch.is_autocast_enabled(device):
                # What autocast keeps of weights without gradients would be used by the step itself.
                dtype = torch.get_autocast_dtype(device)
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        try:
            yield
        finally:
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
