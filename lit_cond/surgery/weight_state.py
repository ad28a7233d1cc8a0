"""One more entry of a `state_dict` beside each live weight, so that a raw weight is never taken for an effective one.

While a weight is live, its parameter holds the raw value and a `state_dict` holds that under the plain name. The entry
`<weight>_without_correction` says so: a strict load into a plain model fails by its name, and a live model takes no
state without it, or of another correction C. It holds a checksum of C and the strength of each correction.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lit_cond.surgery.sites import clean_name
from lit_cond.surgery.strength_state import Named

__all__ = ["SUFFIX", "Marking", "checksum", "keep_marks", "without_marks"]

SUFFIX = "_without_correction"
# Said once for a whole model.
_OTHER = (
    "and perhaps others were trained with another correction than the model has, one of other weights or settings; "
    "save lit_cond.effective_state_dict(model), and load that into a model whose weights are not corrected"
)

Marking = Literal["strict", "lenient", "hidden"]
"""What the state of a live weight says of it.

"strict": it has the entry, and a strict load asks for it. "lenient": a load does without it, while a checkpoint, which
holds none, is loaded by those who know that its weights are raw. "hidden": besides, there is no entry, where the names
of the state are those that are looked for in the checkpoint.
"""


class Summed(Protocol):
    """A correction as a mark needs it."""

    strength: Tensor

    @property
    def checksum(self) -> int:
        """A checksum of C."""
        ...


class Markable(Protocol):
    """What a mark is about: a weight with its corrections."""

    tensor_name: str
    marking: Marking

    @property
    def terms(self) -> Sequence[Summed]:
        """The corrections."""
        ...


def checksum(correction: Tensor) -> int:
    """Return a checksum of C that is the same on every device; waits for it."""
    # Zeros have a sign, which neither the sum nor a stored C keeps.
    values = (correction.detach() + 0.0).cpu().contiguous()
    return zlib.crc32(values.view(torch.uint8).numpy().data)


def _mark(terms: Iterable[Summed]) -> Tensor:
    """Return the checksum of each C and the bits of its strength (corrections, 2); waits for no device."""
    rows = []
    for term in terms:
        row = torch.full((2,), term.checksum, dtype=torch.int64, device=term.strength.device)
        row[1] = term.strength.detach().to(torch.float32).view(torch.int32)
        rows.append(row)
    return torch.stack(rows)


class _Save:
    """State-dict hook: writes the entry beside the weight."""

    def __init__(self, target: Markable) -> None:
        self.target = target

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        if self.target.marking != "hidden":
            state[prefix + self.target.tensor_name + SUFFIX] = _mark(self.target.terms)


class _Load:
    """Load hook: takes the entry out of the incoming state, reports it missing, or made of another correction."""

    def __init__(self, target: Markable) -> None:
        self.target = target

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        name = prefix + self.target.tensor_name
        value = state.pop(name + SUFFIX, None)
        if value is None:
            # torch drops what is missing if the load as a whole is not strict.
            if strict and self.target.marking == "strict":
                missing.append(name + SUFFIX)
            return
        own = _mark(self.target.terms).cpu()
        given = torch.zeros_like(own)
        if tuple(value.shape) == tuple(own.shape):
            given.copy_(value)  # also of a tensor that Lightning has not read from the file yet
        if not torch.equal(given[:, 0], own[:, 0]):
            if not any(error.endswith(_OTHER) for error in errors):
                errors.append(f"'{name}' {_OTHER}")
            return
        with torch.no_grad():
            for term, bits in zip(self.target.terms, given[:, 1].to(torch.int32).view(torch.float32), strict=True):
                term.strength.copy_(bits)


def keep_marks(module: nn.Module, target: Markable) -> list[Any]:
    """Save and load the mark of a weight with its owner; return the handles of the hooks."""
    return [
        Named(module, target.tensor_name + SUFFIX, target),
        module.register_state_dict_post_hook(_Save(target)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_Load(target)),  # type: ignore[no-untyped-call]
    ]


def without_marks(state: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Take the marks of weights out of a state dict, in place.

    Args:
        state: The state dict.
        names: The names of the weights; wrappers may have put parts in that the state leaves out.
    """
    for name in names:
        for full in (name, clean_name(name)):
            state.pop(full + SUFFIX, None)
