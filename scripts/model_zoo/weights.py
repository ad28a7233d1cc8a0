"""Random weights under which no part of a model is negligible, the same at every call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_cond.surgery.samples import Sample

__all__ = ["calibrate_", "randomize_"]

SMALLEST_STD, LARGEST_STD = 0.02, 0.1
BIAS = (0.05, 0.15)
SCALE = (0.5, 1.5)


def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Overwrite every floating parameter with values that are neither zero nor negligible, and switch to evaluation.

    Many models start with zeros, or with layer scales of 1e-6, and then nothing that happens in a layer can be seen at
    the output. Matrices and kernels become normal with a standard deviation between 0.02 and 0.1 that keeps the size of
    what they map; scales (parameters with one axis longer than 1) become uniform in 0.5 .. 1.5; biases get a magnitude
    of 0.05 .. 0.15 and either sign. The global random state is not read and not changed.

    Args:
        model: Changed in place.
        seed: Of the generator that makes all values.

    Returns:
        The same model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                parameter.copy_(_values(name, parameter, generator))
    return model.eval()


def calibrate_(model: nn.Module, samples: Sequence[Sample]) -> nn.Module:
    """Give every batch normalization the statistics of what it sees, and switch to evaluation.

    Without it a deep convolutional model with random weights loses its signal within a few layers. Each layer is set
    just before it runs, so that the next ones see what they will see later.

    Args:
        model: Changed in place.
        samples: Forward passes to run; a layer keeps the statistics of the last call.

    Returns:
        The same model.
    """
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    handles = [norm.register_forward_pre_hook(_observe) for norm in norms]
    try:
        with torch.no_grad():
            for sample in samples if norms else ():
                sample.run(model)
    finally:
        for handle in handles:
            handle.remove()
    # Some models keep tables that they made without gradients until they are trained.
    return model.train().eval()


def _observe(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Store mean and variance of each channel (axis 1) of what a batch normalization is about to read."""
    mean, variance = norm.running_mean, norm.running_var
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        return
    values = args[0].detach().movedim(1, 0).flatten(1)
    mean.copy_(values.mean(1))
    # A channel that is nearly the same everywhere would be blown up; few values say little about it.
    measured = values.var(1, correction=0)
    variance.copy_(measured.clamp(min=0.1 * float(measured.mean()) + 1e-6))


def _values(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Return new float32 values for a parameter, on the CPU."""
    if parameter.numel() == max(parameter.shape, default=1):
        uniform = torch.rand(parameter.shape, generator=generator)
        if "bias" in name.rpartition(".")[2] or "lambda" in name:
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            return sign * (BIAS[0] + (BIAS[1] - BIAS[0]) * uniform)
        return SCALE[0] + (SCALE[1] - SCALE[0]) * uniform
    inputs = parameter.numel() // parameter.shape[0]
    std = min(max(1 / math.sqrt(inputs), SMALLEST_STD), LARGEST_STD)
    return torch.randn(parameter.shape, generator=generator) * std
