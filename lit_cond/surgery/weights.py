"""A weight that is trained as W while the forward pass reads W + sum_i strength_i * C_i: the scoped forward.

Inside the forward of its readers, and only there, the corrected tensor shadows the parameter in the owner's `__dict__`.
Outside, `owner.weight` is the ordinary parameter: optimizers, initialisers, `state_dict`, DDP and EMA see what they
saw. A weight is *live* while its readers are wrapped, and *baked* when the parameter itself holds the corrected value
and the exact raw one is kept beside it, so that training can go on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_cond.errors import LostTargetError
from lit_cond.surgery.rules import WeightRule
from lit_cond.surgery.scope import InstanceForward, install, remove, wrappers
from lit_cond.surgery.sharding import ShardedValue, is_unit, local_parts
from lit_cond.surgery.sites import MatrixLayout, own_parameter
from lit_cond.surgery.weight_state import Marking, checksum, keep_marks

__all__ = [
    "ConditionedWeight",
    "ScopedForward",
    "Term",
    "attach",
    "conditioned_weight",
    "conditioned_weights",
    "correct_shards_",
    "detach",
    "forget",
    "gathered",
    "is_attached",
    "mark_",
]

_RECORD = "_lit_cond_weights"


class Term:
    """One correction of one parameter.

    Args:
        rule: The rule it comes from.
        blocks: The matrices that the rule corrects and the number of row blocks (heads) in each.
        correction: C, of the parameter's shape, zero outside the corrected rows. Never changed in place.
        strength: A tensor without axes, shared by the terms of one rule, so that moving it recompiles nothing.
    """

    _summed: tuple[Tensor, int] | None = None

    def __init__(
        self,
        rule: WeightRule,
        blocks: Sequence[tuple[MatrixLayout, int]],
        correction: Tensor,
        strength: Tensor,
    ) -> None:
        self.rule = rule
        self.blocks = tuple(blocks)
        self.correction = correction
        self.strength = strength

    @property
    def rows(self) -> Tensor:
        """The output channels that the rule claims."""
        return torch.cat([layout.rows.indices() for layout, _ in self.blocks])

    @property
    def checksum(self) -> int:
        """A checksum of C, computed once for each C."""
        if self._summed is None or self._summed[0] is not self.correction:
            self._summed = self.correction, checksum(self.correction)
        return self._summed[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Term:
        # Copies of a network (EMA) move their strength on their own but need no second C.
        strength = memo.setdefault(id(self.strength), self.strength.clone())
        copied = Term(self.rule, self.blocks, self.correction, strength)
        copied._summed = self._summed
        return copied

    def to_(self, device: torch.device) -> None:
        """Move to the device of the weight."""
        with torch.inference_mode(False):  # a tensor made under inference mode could not be changed any more
            before, self.correction = self.correction, self.correction.to(device)
            if self._summed is not None and self._summed[0] is before:
                self._summed = self.correction, self._summed[1]
            self.strength = self.strength.to(device)


def effective_weight(raw: Tensor, terms: Sequence[Term]) -> Tensor:
    """Return `raw + sum strength * C`, computed in float32 at least and rounded once to the dtype of `raw`."""
    value = raw.to(torch.promote_types(raw.dtype, torch.float32))
    for term in terms:
        value = torch.addcmul(value, laid_out_like(term.correction, raw), term.strength.to(raw.device, value.dtype))
    return value.to(raw.dtype)


def raw_weight(effective: Tensor, terms: Sequence[Term], kept: Tensor | None = None) -> Tensor:
    """Return the raw weight behind an effective one: the kept entry where it explains it, else by subtraction.

    Args:
        effective: The weight with its corrections.
        terms: The corrections.
        kept: The raw weight as it was stored, if it was.
    """
    value = effective.to(torch.promote_types(effective.dtype, torch.float32))
    for term in terms:
        value = value - laid_out_like(term.correction, effective) * term.strength.to(value.device, value.dtype)
    value = value.to(effective.dtype)
    if kept is None:
        return value
    kept = laid_out_like(kept, effective)
    return torch.where(effective_weight(kept, terms) == effective, kept, value)


def laid_out_like(full: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor on the device, and with the sharding, of another; needs no communication."""
    if isinstance(like, DTensor):
        if isinstance(full, DTensor):
            return full
        full = full.to(like.device_mesh.device_type)
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return full.to(like.device)


def correct_shards_(value: ShardedValue, terms: Sequence[Term]) -> None:
    """Add the corrections to the pieces that this process holds of a sharded raw weight, in place.

    Args:
        value: An entry of a state dict, which FSDP's first version copies from the parameters.
        terms: The corrections.
    """
    for part, place in local_parts(value):
        pieces = [Term(term.rule, term.blocks, term.correction[place], term.strength) for term in terms]
        part.copy_(effective_weight(part, pieces))


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor: the condition number of a shard means nothing."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ConditionedWeight:
    """One parameter with its corrections.

    Args:
        owner: Module that holds the parameter.
        tensor_name: Name of the parameter on the owner.
    """

    def __init__(self, owner: nn.Module, tensor_name: str) -> None:
        self.owner = owner
        self.tensor_name = tensor_name
        self.terms: list[Term] = []
        self.raw: Tensor | None = None
        self.readers: list[nn.Module] = []
        self.marking: Marking = "strict"
        self.handles: list[Any] = []
        self._shadowing = False
        self._beneath: Tensor | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, whatever shadows it.

        Raises:
            LostTargetError: If the owner no longer holds it.
        """
        value = own_parameter(self.owner, self.tensor_name)
        if value is None:
            raise LostTargetError(
                f"'{self.tensor_name}' of a conditioned {type(self.owner).__name__} is no longer a parameter "
                "(pruned, parametrized or quantized after conditioning, or flattened by FSDP: use_orig_params=True?)"
            )
        return value

    @property
    def baked(self) -> bool:
        """Whether the parameter itself holds the corrected value."""
        return self.raw is not None

    def effective(self, raw: Tensor) -> Tensor:
        """Return what the forward pass reads where the parameter holds `raw`."""
        return effective_weight(raw, self.terms)

    def raw_of(self, effective: Tensor) -> Tensor:
        """Return the raw weight behind an effective one, exactly where the kept one explains it."""
        return raw_weight(effective, self.terms, self.raw)

    @property
    def current_raw(self) -> Tensor:
        """The raw weight, live or baked."""
        value = self.parameter.detach()
        return self.raw_of(value) if self.baked else value

    @property
    def current_effective(self) -> Tensor:
        """The weight that the forward pass reads, live or baked."""
        value = self.parameter.detach()
        return value if self.baked else self.effective(value)

    def enter(self, reader: nn.Module) -> bool:
        """Shadow the parameter by the effective weight; False if there is nothing to do in this reader's forward.

        Args:
            reader: Whose forward begins: the owner, or a parent that may read the weight instead of calling the owner.
        """
        if self._shadowing or self.raw is not None:
            return False
        if reader is not self.owner and is_unit(self.owner):
            return False  # still sharded, as a parent could not read it: the owner's own forward has the whole
        raw = getattr(self.owner, self.tensor_name)
        if reader is not self.owner and raw.ndim == 1 < self.terms[0].correction.ndim:
            return False  # the same under FSDP's first version, where a shard is a piece of a flat vector
        self._shadowing = True
        # FSDP's first version keeps a view of its flat parameter in this very place.
        self._beneath = self.owner.__dict__.get(self.tensor_name)
        for term in self.terms:
            if term.correction.device != raw.device:
                term.to_(raw.device)
        self.owner.__dict__[self.tensor_name] = self.effective(raw)
        return True

    def leave(self) -> None:
        """Take the shadow away."""
        self.owner.__dict__.pop(self.tensor_name, None)
        if self._beneath is not None:
            self.owner.__dict__[self.tensor_name] = self._beneath
            self._beneath = None
        self._shadowing = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shadowing": False, "_beneath": None}


class ScopedForward(InstanceForward):
    """Runs a module's forward while the given weights are shadowed by their effective values.

    Args:
        module: The reader.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weights: list[ConditionedWeight] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; the shadows are gone afterwards, also after an exception."""
        entered = []
        try:
            for weight in self.weights:
                if weight.enter(self.module):
                    entered.append(weight)
            return self.call_inner(*args, **kwargs)
        finally:
            for weight in entered:
                weight.leave()


def conditioned_weights(model: nn.Module) -> Iterator[tuple[str, ConditionedWeight]]:
    """Yield every conditioned weight below a module with its name in the module's `state_dict`.

    A module that stands in two places yields its weights under both names.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        for tensor_name, weight in module.__dict__.get(_RECORD, {}).items():
            yield (f"{name}.{tensor_name}" if name else tensor_name), weight


def conditioned_weight(owner: nn.Module, tensor_name: str) -> ConditionedWeight:
    """Return the conditioned weight of a parameter, made on first use."""
    weights: dict[str, ConditionedWeight] = owner.__dict__.setdefault(_RECORD, {})
    return weights.setdefault(tensor_name, ConditionedWeight(owner, tensor_name))


def forget(weight: ConditionedWeight) -> None:
    """Drop the record of a weight from its owner."""
    weights: dict[str, ConditionedWeight] = weight.owner.__dict__.get(_RECORD, {})
    weights.pop(weight.tensor_name, None)
    if not weights:
        weight.owner.__dict__.pop(_RECORD, None)


def attach(weight: ConditionedWeight, readers: list[nn.Module]) -> None:
    """Make readers see the effective weight: the owner, for when it is called, and parents that read the weight."""
    weight.readers = readers
    if not weight.handles:
        weight.marking, weight.handles = "strict", keep_marks(weight.owner, weight)
    for reader in readers:
        scope = next(wrappers(reader, ScopedForward), None)
        if scope is None:
            scope = ScopedForward(reader)
            install(scope)
        if weight not in scope.weights:
            scope.weights.append(weight)


def detach(weight: ConditionedWeight) -> None:
    """Let the readers see the parameter again."""
    for reader in weight.readers:
        for scope in list(wrappers(reader, ScopedForward)):
            if weight in scope.weights:
                scope.weights.remove(weight)
            if not scope.weights:
                remove(scope)
    for handle in weight.handles:
        handle.remove()
    weight.handles = []


def mark_(model: nn.Module, marking: Marking) -> None:
    """Set what the states of live weights say of them: see `weight_state`."""
    for _, weight in conditioned_weights(model):
        weight.marking = marking


def is_attached(weight: ConditionedWeight, model: nn.Module) -> bool:
    """Say whether a live weight is where it was put: its readers in the model and wrapped, its parameter in place."""
    present = set(model.modules())
    return (
        weight.owner in present
        and own_parameter(weight.owner, weight.tensor_name) is not None
        and any(
            reader in present and weight in scope.weights
            for reader in weight.readers
            for scope in wrappers(reader, ScopedForward)
        )
    )
