"""Confirming at the first training batch what the table of layouts said when no forward pass could be run.

The model's own call gives the inputs; the traced pass runs apart from the training step, in evaluation mode with the
random numbers as they were, and changes nothing. It runs in each process on its own, without communication.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_cond.errors import UnknownAttentionError
from lit_cond.measuring.values import mapped
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.scope import InstanceForward
from lit_cond.surgery.sites import AttentionSite
from lit_cond.surgery.survey import survey_attention, trace_and_remember

__all__ = ["FirstBatch"]

_BATCH = 2


class FirstBatch:
    """Keeps what the parts of a model are called with, then compares what they compute with what was conditioned.

    Args:
        pl_module: A module whose attention was found without running it.
        sites: The layers to confirm.
    """

    def __init__(self, pl_module: LightningModule, sites: Sequence[AttentionSite]) -> None:
        self._pl_module = pl_module
        self._sites = list(sites)
        self._calls: list[tuple[nn.Module, Sample]] = []
        self._open: nn.Module | None = None
        self._handles: list[Any] = []
        for module in _around(pl_module, self._sites):
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._pl_module and not isinstance(module.__dict__.get("forward"), (InstanceForward, type(None))):
            return  # a strategy passes its call of `training_step` through the wrapper's forward, and so through here
        if self._open is None:
            self._open = module
            if all(seen is not module for seen, _ in self._calls):
                self._calls.append((module, Sample(_detached(args), _detached(kwargs))))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open is module:
            self._open = None

    def close(self) -> None:
        """Take the hooks away and forget the inputs."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._calls = [], []

    def confirm(self) -> None:
        """Trace the parts on what they were called with.

        Raises:
            UnknownAttentionError: If a layer computes with other rows than those that were conditioned, or is no
                attention at all.
        """
        calls = list(self._calls)
        self.close()
        for module, sample in calls:
            _trace(module, sample)
        survey = survey_attention(self._pl_module)
        mine = [site.name for site in self._sites]
        contradicted = next((name for name in mine if name in survey.unknown), None)
        if contradicted is not None:
            raise UnknownAttentionError(f"'{contradicted}': {survey.unknown[contradicted]}")
        wrong = next((name for name in mine if name in survey.left_alone), None)
        if wrong is not None:
            raise UnknownAttentionError(
                f"'{wrong}' was conditioned as attention, and {survey.left_alone[wrong]}; leave it out with `exclude`"
            )
        seen = {site.name for site in survey.sites if site.traced}
        missed = [site.name for site in self._sites if site.name not in seen]
        said = f"attention: {len(self._sites) - len(missed)} of {len(self._sites)} layers confirmed at the first batch"
        rank_zero_info(said + (f"; not reached: {', '.join(missed)}" if missed else ""))


def _around(pl_module: LightningModule, sites: Sequence[AttentionSite]) -> list[nn.Module]:
    """Return the modules that hold one of the layers, outermost first."""
    inside = {site.module for site in sites}
    return [module for module in pl_module.modules() if any(child in inside for child in module.modules())]


def _trace(module: nn.Module, sample: Sample) -> None:
    if any(isinstance(p, DTensor) for p in module.parameters()):
        rank_zero_info("attention: not confirmed at the first batch, its weights are sharded")
        return
    problem: Exception | None = None
    for candidate in (_smaller(sample), sample):
        try:
            trace_and_remember(module, [candidate])
        except Exception as error:  # whatever a foreign forward raises
            problem = error
        else:
            return
    rank_zero_info(f"attention: {type(module).__name__} could not be traced at the first batch: {problem}")


def _smaller(sample: Sample) -> Sample:
    """Return the first entries of a batch, if all tensors have the same first axis."""
    sizes = {t.shape[0] if t.ndim else 0 for t in _tensors((sample.args, dict(sample.kwargs)))}
    if len(sizes) != 1 or min(sizes) <= _BATCH:
        return sample
    return replace(sample, args=mapped(sample.args, _cut), kwargs=mapped(dict(sample.kwargs), _cut))


def _cut(tensor: Tensor) -> Tensor:
    return tensor[:_BATCH]


def _detached(value: Any) -> Any:
    # Clones: the model may change its input in place.
    return mapped(value, lambda tensor: tensor.detach().clone())


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, found.append)
    return found
