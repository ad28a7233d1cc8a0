"""What the softmax of an attention layer does before training: how widely it looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lit_cond.errors import LitCondError
from lit_cond.functional.attention import predicted_attention_entropy
from lit_cond.measuring.install import observe_forward
from lit_cond.measuring.observe import ObservedAttention
from lit_cond.measuring.quantities import entropy_numbers
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.samples import Sample, sampled_parts
from lit_cond.surgery.sites import AttentionSite, WeightView, own_parameter

__all__ = ["COLLAPSED", "PROBE_TOKENS", "Inputs", "Softmax", "first_line", "inputs_of", "measured", "predicted"]

COLLAPSED = 0.25
"""Share of the entropy of uniform attention below which the softmax hardly looks beyond one token."""

PROBE_TOKENS = 64
"""Tokens of the sequences for which the entropy is predicted."""

# Numbers in a sample input, such as an image, up to which a model is run on it for its attention: of 1024 x 1024 pixels
# SAM makes 4096 tokens, whose softmax takes 1.6 GB in float64 for each layer, and minutes.
_LARGEST_SAMPLE = 2**20
# Over 12 heads of 64 tokens the means of two sequences and of eight differ by about a hundredth.
_SEQUENCES = 2


Source = Literal["predicted", "sample", "data"]


@dataclass(frozen=True)
class Softmax:
    """The attention of one layer, mean over samples, heads and tokens.

    Args:
        entropy: Entropy of a row of the softmax matrix in nats.
        share: The same as a share of the entropy of uniform attention over as many tokens as may be seen, in [0, 1].
        source: What it was computed for: LayerNorm'd Gaussian tokens ("predicted"), the input that the model itself
            says it takes ("sample"), or data of the user ("data").
        saturated: Share of rows whose largest probability is at least 0.99; None where it is predicted.
        lowest: Smallest share among the heads; None where it is predicted.
        reason: Why it is predicted although there is an input.
    """

    entropy: float
    share: float
    source: Source
    saturated: float | None = None
    lowest: float | None = None
    reason: str | None = None

    @property
    def collapsed(self) -> bool:
        """Whether the softmax is saturated."""
        return self.share < COLLAPSED


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model is shown.

    Args:
        source: Where it comes from.
        parts: Modules of the model that are run, with what each is called with, one after the other.
        left_out: Why something that the model says it takes is not shown to it.
    """

    source: Source
    parts: tuple[tuple[nn.Module, tuple[Sample, ...]], ...]
    left_out: str | None = None

    @contextmanager
    def evaluating(self, part: nn.Module) -> Iterator[None]:
        """Switch dropout off for a while, without `eval()`, which a user's module may have overridden."""
        modes = [(module, module.training) for module in part.modules()]
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def inputs_of(model: nn.Module, data: Sample | None = None) -> Inputs:
    """Return what to show a model: the data, else what the model, or parts of it, say of their inputs.

    Args:
        model: The model.
        data: A batch of the user.
    """
    if data is not None:
        return Inputs("data", ((model, (data,)),))
    parts = [(part, tuple(s)) for _, part, s in sampled_parts(model) if not isinstance(s, Exception)]
    small = tuple((part, kept) for part, s in parts if (kept := tuple(x for x in s if _size(x) <= _LARGEST_SAMPLE)))
    largest = max((_size(sample) for _, s in parts for sample in s), default=0)
    reason = (
        f"not measured: a sample input of {largest:,} numbers is large; give one with --data to measure all the same"
    )
    return Inputs("sample", small, reason if largest > _LARGEST_SAMPLE else None)


def _size(sample: Sample) -> int:
    """Return the size of the largest tensor among the arguments."""
    values = (*sample.args, *sample.kwargs.values())
    return max((value.numel() for value in values if isinstance(value, Tensor)), default=0)


def measured(sites: Sequence[AttentionSite], inputs: Inputs) -> dict[str, Softmax | str]:
    """Run a model in evaluation mode and return how its layers attend, or why that can not be seen, by name.

    Layers that no part of the inputs reaches are not among them.

    Args:
        sites: The layers.
        inputs: What to show.
    """
    found: dict[str, Softmax | str] = {}

    def note(observed: ObservedAttention) -> None:
        found[observed.site.name] = _summary(observed, inputs.source)

    for part, samples in inputs.parts:
        inside = set(part.modules())
        for sample in samples:
            left = [s for s in sites if s.module in inside and not isinstance(found.get(s.name), Softmax)]
            if not left:
                break
            with inputs.evaluating(part):
                problems = observe_forward(part, left, sample, note)
            for name, problem in problems.items():
                if not isinstance(found.get(name), Softmax):
                    found[name] = f"not measured: {first_line(problem)}"
    return found


def _summary(observed: ObservedAttention, source: Source) -> Softmax | str:
    numbers = [entropy_numbers(sample) for sample in observed.samples]
    if not numbers:
        return "not measured: the input holds no token for it"
    heads = {name: torch.stack([sample[name] for sample in numbers]).nanmean(dim=0) for name in numbers[0]}
    if not bool(heads["entropy_share"].isfinite().any()):
        choice = any(bool((sample.seen >= 2).any()) for sample in observed.samples)
        return "not measured: " + ("its scores are not finite" if choice else "no query sees more than one key")
    entropy, share, saturated = (_mean(heads[name]) for name in ("entropy", "entropy_share", "saturated"))
    return Softmax(entropy, share, source, saturated, float(heads["entropy_share"].nan_to_num(math.inf).min()))


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def first_line(error: Exception) -> str:
    """Return the first line of what went wrong, with its kind where it is not one of ours."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, LitCondError) else f"{type(error).__name__}: {text}"


def predicted(site: AttentionSite) -> Softmax | str:
    """Predict the attention of a layer from its query and key matrices as the forward pass reads them.

    The tokens are independent, which is the hard case: see `predicted_attention_entropy`. Biases, positions, masks and
    a normalisation of queries and keys are left out.

    Args:
        site: The layer.

    Returns:
        The attention, or why it can not be predicted.
    """
    if site.kind != "self":
        return f"not predicted for {site.kind} attention"
    query, key = site.matrix_view("query"), site.matrix_view("key")
    if query is None or key is None:
        return "not predicted without exactly one query and one key matrix"
    if not site.num_heads:
        return "not predicted without the number of heads"
    try:
        entropy = predicted_attention_entropy(
            _read(query),
            _read(key),
            site.num_heads,
            PROBE_TOKENS,
            num_sequences=_SEQUENCES,
        )
    except LitCondError as error:
        return f"not predicted: {error}"
    return Softmax(entropy, entropy / math.log(PROBE_TOKENS), "predicted")


def _read(view: WeightView) -> Tensor:
    """Return a projection (rows, in_features) as the forward pass reads it, corrected, parametrized or neither."""
    if own_parameter(view.module, view.tensor_name) is not None:
        return effective_matrix(view).float()
    return view.layout.matrix(view.as_read().detach()).float()
