"""What every task does with its optimizer: which parameters decay, and the learning rate at a step."""

import math
from collections.abc import Iterable

from torch import nn

__all__ = ["NO_DECAY_NAMES", "split_by_decay", "warmup_cosine"]

NO_DECAY_NAMES = (
    "absolute_pos_embed",
    "cls_token",
    "class_token",
    "dist_token",
    "distillation_token",
    "mask_token",
    "pos_embed",
    "pos_embedding",
    "position_embedding",
    "position_embeddings",
    "reg_token",
    "register_tokens",
    "relative_position_bias_table",
    "temperature",
)
"""Names of parameters, or of modules that hold them, that are positions, extra tokens or scales.

They come from timm, torchvision and transformers. One-dimensional parameters need no name.
"""

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # the ones whose gain may have several dimensions


def split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Sort the trainable parameters into those that weight decay should shrink and those it should not.

    Spared are one-dimensional parameters (biases, gains, layer scales), every parameter of a norm layer,
    those of `NO_DECAY_NAMES` and those a submodule lists in a ``no_weight_decay()`` method (timm's models
    do). A parameter shared by two modules is counted once, under the name it has first.

    Args:
        model: The module whose parameters are sorted.

    Returns:
        The parameters with decay and the parameters without, each in the order of ``model.parameters()``.
    """
    spared = set(_ids_of_norms(model)) | set(_ids_a_model_lists(model))
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # An embedding called position_embeddings holds its table as `position_embeddings.weight`.
        named = name.removesuffix(".weight").split(".")[-1] in NO_DECAY_NAMES
        (no_decay if parameter.ndim <= 1 or named or id(parameter) in spared else decay).append(parameter)
    return decay, no_decay


def _ids_of_norms(model: nn.Module) -> Iterable[int]:
    for module in model.modules():
        if isinstance(module, _NORMS):
            yield from (id(parameter) for parameter in module.parameters(recurse=False))


def _ids_a_model_lists(model: nn.Module) -> Iterable[int]:
    for module in model.modules():
        listing = getattr(module, "no_weight_decay", None)
        if callable(listing):
            listed = set(listing())
            yield from (id(parameter) for name, parameter in module.named_parameters() if name in listed)


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, floor: float = 0.0) -> float:
    """Multiplier of the learning rate: linear rise to 1, then half a cosine down to a floor.

    The first step already trains (multiplier ``1 / warmup_steps``), the multiplier is 1 at step
    ``warmup_steps - 1`` and stays at the floor from ``total_steps`` on.

    Args:
        step: Optimizer steps done so far.
        warmup_steps: Length of the rise in optimizer steps; 0 for none.
        total_steps: Optimizer steps of the whole run.
        floor: Multiplier at the end, between 0 and 1.

    Returns:
        The multiplier, above 0 unless the floor is 0.

    Example:
        >>> [round(warmup_cosine(step, 4, 12, 0.1), 3) for step in (0, 3, 4, 8, 12, 99)]
        [0.25, 1.0, 1.0, 0.55, 0.1, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
