"""Converting state dicts between what is trained (raw) and what is computed (effective), exactly in both directions.

A checkpoint holds effective weights under plain names, so that a plain model loads it and computes the same. Beside
them it holds a record: the settings, the strength, and, where training shall go on, C and the exact raw entries
wherever C is not zero (elsewhere raw and effective are equal). The record holds tensors and plain values only:
`weights_only=True` loads it.
"""

from __future__ import annotations

import copy
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_cond.errors import CheckpointMismatchError, LitCondWarning
from lit_cond.surgery.apply import compute_correction, condition_
from lit_cond.surgery.packing import pack_correction, pack_raw, unpack_correction, unpack_raw
from lit_cond.surgery.rules import TokenRule, WeightRule
from lit_cond.surgery.sharding import is_flat_sharded, is_shard
from lit_cond.surgery.sites import MatrixLayout, RowSet, clean_name, own_parameter
from lit_cond.surgery.tokens import STATE_KEY, TokenForward, token_forwards
from lit_cond.surgery.weight_state import SUFFIX, without_marks
from lit_cond.surgery.weights import (
    ConditionedWeight,
    Term,
    conditioned_weight,
    conditioned_weights,
    correct_shards_,
    gathered,
    raw_weight,
)

__all__ = ["RECORD_KEY", "attach_record_", "raw_state", "read_record", "restore_tokens_", "to_effective", "to_raw_"]

RECORD_KEY = "lit_cond"
_VERSION = 2


def read_record(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint records of corrections; empty parts for a plain one.

    Raises:
        CheckpointMismatchError: If the record is damaged, or of a version that is not known.
    """
    record: dict[str, Any] | None = checkpoint.get(RECORD_KEY)
    if record is None:
        return {"version": _VERSION, "weights": {}, "tokens": {}}
    parts = (record.get("weights"), record.get("tokens")) if isinstance(record, dict) else (None,)
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointMismatchError(
            f"what the checkpoint holds under '{RECORD_KEY}' is no record of corrections (damaged, or of another "
            "program); take another checkpoint"
        )
    if not isinstance(record.get("version"), int) or record["version"] != _VERSION:
        raise CheckpointMismatchError(
            f"the checkpoint's record of corrections has version {record.get('version')!r}, this lit_cond reads "
            f"{_VERSION}; load it with the lit_cond that wrote it"
        )
    return record


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what damaged entries of a record raise into one error with the name of the weight or block."""
    try:
        yield
    except CheckpointMismatchError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, zlib.error) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise CheckpointMismatchError(
            f"the checkpoint's record of the correction of '{name}' can not be used "
            f"({type(error).__name__}: {reason}); take another checkpoint"
        ) from error


@torch.no_grad()
def to_effective(
    model: nn.Module, state: dict[str, Any], *, resumable: bool, averaged: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state dict with effective weights under plain names, and the record that undoes it.

    Args:
        model: The conditioned model, live or baked.
        state: A state dict of the model, or of a copy of it that averages its weights.
        resumable: Whether the record shall hold what exact resuming needs.
        averaged: Whether `state` is of a copy that averages raw weights and is no longer those of the model.

    Raises:
        CheckpointMismatchError: If it can not be told whether a weight in `state` is raw or effective.
    """
    converted = copy.copy(state)
    # Strategies that gather the weights on another process leave no entries here, or those of hooks.
    elsewhere = _is_of_hooks(state)
    weights: dict[str, Any] = {}
    for full_name, weight in conditioned_weights(model):
        held = _held(weight, state)
        without_marks(converted, [full_name])
        if elsewhere:
            continue
        name = _key(full_name, state)
        raw, converted[name] = _both(weight, state[name], name, held, averaged=averaged)
        entry: dict[str, Any] = {"terms": []}
        for term in weight.terms:
            saved: dict[str, Any] = {"rule": term.rule.settings(), "strength": float(term.strength)}
            if resumable:
                saved["correction"] = pack_correction(term.correction)
                saved["blocks"] = [
                    [*astuple(layout.rows), int(layout.transposed), num_blocks] for layout, num_blocks in term.blocks
                ]
            entry["terms"].append(saved)
        if resumable and not is_shard(raw):
            # A sharded file has no place for what other processes hold: there the raw weight comes by subtraction.
            entry["raw"] = pack_raw(raw, converted[name], _scaled(weight.terms))
        weights[name] = entry
    tokens: dict[str, Any] = {}
    for name, forward in token_forwards(model):
        tokens[clean_name(name)] = {"rule": forward.rule.settings(), "strength": float(forward.strength)}
        # A copy of the model that averages its weights holds the strength of the time when it was made.
        if not elsewhere:
            converted[_token_key(name, state)] = forward.strength.detach().clone()
    return converted, {"version": _VERSION, "weights": weights, "tokens": tokens}


def _key(name: str, state: Mapping[str, Any]) -> str:
    """Return the name under which a state dict holds a weight; strategies leave the parts of their wrappers out."""
    for candidate in (name, clean_name(name)):
        if candidate in state:
            return candidate
    raise CheckpointMismatchError(
        f"'{name}' carries a correction and is not in the state to be saved; a checkpoint without it would compute "
        "something else: save it, or call lit_cond.surgery.fold_ on the model first"
    )


def _is_of_hooks(state: Mapping[str, Any]) -> bool:
    """Say whether a state dict holds nothing but what corrections have added to it."""
    return all(key.endswith((STATE_KEY, SUFFIX)) for key in state)


def _token_key(name: str, state: Mapping[str, Any]) -> str:
    """Return the name of a token correction's entry in a state dict, as `_key` does for weights."""
    full, clean = f"{name}.{STATE_KEY}", f"{clean_name(name)}.{STATE_KEY}"
    return clean if full not in state and clean in state else full


def raw_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of a model with raw weights and nothing that says so, whether the model is live or baked."""
    converted = dict(state)
    for full_name, weight in conditioned_weights(model):
        without_marks(converted, [full_name])
        if weight.baked and not _is_of_hooks(state):
            name = _key(full_name, state)
            converted[name] = weight.raw_of(state[name].detach())
    return converted


def _held(weight: ConditionedWeight, state: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the effective and the raw weight that a baked weight holds: whole ones unless the state has parts of them.

    Where they are sharded, every process must call this.
    """
    if weight.raw is None:
        return None
    held = weight.parameter.detach(), weight.raw
    return held if any(is_shard(value) for value in state.values()) else (gathered(held[0]), gathered(held[1]))


def _same(value: Tensor, other: Tensor) -> bool:
    """Say whether two weights, or the parts of them that this process has, are equal."""
    value, other = (t.to_local() if isinstance(t, DTensor) else t for t in (value, other))
    other = other.to(value.device)
    # A weight of a diverged run holds NaN, which is not equal to itself.
    return value.shape == other.shape and bool(((value == other) | (value.isnan() & other.isnan())).all())


def _both(
    weight: ConditionedWeight, value: Tensor, name: str, held: tuple[Tensor, Tensor] | None, *, averaged: bool
) -> tuple[Tensor, Tensor]:
    """Return the raw and the effective weight of a value in a state dict, which may be either."""
    if hasattr(value, "local_shards"):
        if not weight.baked:
            correct_shards_(value, weight.terms)
        return value, value
    value = value.detach()
    if held is None:
        return value, weight.effective(value)
    if _same(value, held[0]):
        return raw_weight(value, weight.terms, held[1]), value
    if averaged or _same(value, held[1]):
        return value, weight.effective(value)
    raise CheckpointMismatchError(
        f"'{name}' in the state to be saved is neither the model's raw nor its effective weight; save during `fit`, "
        "or call lit_cond.surgery.fold_ on the model first"
    )


@torch.no_grad()
def to_raw_(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Turn the effective weights of a checkpoint into what a conditioned model loads, and take its corrections over.

    A live model gets raw weights; a baked one keeps effective weights and remembers the raw ones for the next `fit`.

    Args:
        model: A model with weight corrections.
        checkpoint: A checkpoint; its state dict is changed in place. Without one (a strategy has loaded the weights
            already) the parameters of the model are.
    """
    entries: Mapping[str, Any] = read_record(checkpoint)["weights"]
    state: dict[str, Any] | None = checkpoint.get("state_dict")
    if state is not None:
        state = checkpoint["state_dict"] = copy.copy(state)
    known = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    strangers = [name for name in entries if clean_name(name) not in known]
    if strangers:
        raise CheckpointMismatchError(
            f"the checkpoint corrects '{strangers[0]}', which is no parameter of the model; where names of the state "
            f"dict are changed, change those in checkpoint['{RECORD_KEY}']['weights'] as well"
        )
    plain: list[str] = []
    changed: list[str] = []
    for full_name, weight in conditioned_weights(model):
        name = full_name if state is not None and full_name in state else clean_name(full_name)
        if state is not None and name not in state:
            continue  # Lightning's own strict load names what is missing
        value = weight.parameter.detach() if state is None else state[name]
        entry = entries.get(name)
        if weight.baked and "raw" not in (entry or {}):
            continue
        if entry is None:
            plain.append(name)
            raw = value
        else:
            raw = _take_over(weight, entry, value, changed, name)
        if weight.baked:
            weight.raw = raw.to(weight.parameter.device)
        elif state is None:
            weight.parameter.copy_(raw)
        else:
            state[name] = raw
        if entry is None or name in changed:
            for term in weight.terms:
                term.correction = compute_correction(term.rule, term.blocks, raw.to(weight.parameter.device))
    if plain:
        _warn(
            f"the checkpoint was made without a correction of {len(plain)} weights ('{plain[0]}', ...): they are "
            "taken as raw weights and corrected from here on"
        )
    if changed:
        _warn(
            f"the checkpoint was made with other settings of the correction of {len(changed)} weights "
            f"('{changed[0]}', ...): it is undone with those and made anew with the present ones"
        )


def _take_over(
    weight: ConditionedWeight, entry: Mapping[str, Any], effective: Tensor, changed: list[str], name: str
) -> Tensor:
    """Set a weight's corrections to the recorded ones where the rules agree; return the raw weight."""
    with _reading(name):
        if not all("correction" in stored for stored in entry["terms"]):
            raise CheckpointMismatchError(
                f"the checkpoint holds weights only, without what undoes the correction of '{name}'; resume from a "
                "full checkpoint, or load it into a plain model"
            )
        whole = gathered(effective)
        restored = _terms(entry, whole)
        kept = unpack_raw(entry["raw"], whole, _scaled(restored)) if "raw" in entry else None
    if [term.rule.settings() for term in weight.terms] == [term.rule.settings() for term in restored]:
        for term, other in zip(weight.terms, restored, strict=True):
            term.correction = other.correction
            term.strength.fill_(float(other.strength))
    else:
        changed.append(name)
    return raw_weight(effective, restored, kept)


def _terms(entry: Mapping[str, Any], like: Tensor) -> list[Term]:
    """Return the corrections of a record for a parameter of the shape of `like`."""
    return [
        Term(
            WeightRule(**{**saved["rule"], "strength": saved["strength"]}),
            [(MatrixLayout(RowSet(*numbers[:4]), bool(numbers[4])), numbers[5]) for numbers in saved["blocks"]],
            unpack_correction(saved["correction"], like.shape).to(like.device),
            torch.tensor(saved["strength"]),
        )
        for saved in entry["terms"]
    ]


def _scaled(terms: Sequence[Term]) -> list[tuple[Tensor, float]]:
    return [(term.correction, float(term.strength)) for term in terms]


def _clean_token_forwards(model: nn.Module) -> dict[str, TokenForward]:
    """Return the token corrections of a model by the names of their blocks, without the parts that wrappers put in."""
    return {clean_name(name): forward for name, forward in token_forwards(model)}


def restore_tokens_(model: nn.Module, record: Mapping[str, Any], *, add: bool) -> None:
    """Make the token corrections of a model those that a checkpoint was made with.

    Args:
        model: The model that shall load the checkpoint.
        record: The record of the checkpoint.
        add: Whether to add corrections that the model lacks.

    Raises:
        CheckpointMismatchError: If the model corrects tokens and the checkpoint does not, or the other way round.
    """
    saved: Mapping[str, Any] = {clean_name(str(name)): entry for name, entry in record["tokens"].items()}
    present = _clean_token_forwards(model)
    for name in present.keys() - saved.keys():
        raise CheckpointMismatchError(
            f"the model corrects the tokens at '{name}' and the checkpoint was made without; load its weights into "
            "the plain model (load_from_checkpoint), then call fit without ckpt_path"
        )
    for name, entry in saved.items():
        with _reading(name):
            rule = TokenRule(**{**entry["rule"], "strength": entry["strength"]})
        if name not in present:
            if not add:
                raise CheckpointMismatchError(
                    f"the checkpoint was made with corrected tokens at '{name}'; add "
                    f"ConditionedTokens(correction={rule.correction!r}, scale={rule.scale!r}) to the callbacks, or "
                    "load it with lit_cond.load_checkpoint"
                )
            if is_flat_sharded(model):
                raise CheckpointMismatchError(
                    f"the checkpoint was made with corrected tokens at '{name}', which can not be added to a model "
                    "that FSDP has wrapped; give the Trainer what lit_cond.load_checkpoint makes of a full checkpoint"
                )
            condition_(model, replace(rule, include=re.escape(name)))
            _clean_token_forwards(model)[name].rule = rule
        elif present[name].rule.settings() != rule.settings():
            _warn(
                f"the checkpoint's tokens at '{name}' were corrected with {rule.settings()}; from here on the "
                f"present settings {present[name].rule.settings()} apply"
            )


@torch.no_grad()
def attach_record_(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Let a plain model remember the corrections in its effective weights, so that a later `fit` goes on exactly.

    The model is then in the state that `fit` leaves behind: its parameters hold effective weights, before or after this
    call. A record without raw weights (of a checkpoint of weights only) leaves the model plain.

    Args:
        model: A model without corrections.
        checkpoint: The checkpoint.

    Raises:
        CheckpointMismatchError: If the record does not fit the model.
    """
    for name, entry in read_record(checkpoint)["weights"].items():
        owner_name, _, tensor_name = name.rpartition(".")
        owner = dict(model.named_modules(remove_duplicate=False)).get(owner_name)
        parameter = None if owner is None else own_parameter(owner, tensor_name)
        if owner is None or parameter is None:
            raise CheckpointMismatchError(f"the checkpoint corrects '{name}', which is no parameter of the model")
        with _reading(name):
            if "raw" not in entry:
                continue
            terms = _terms(entry, parameter)
            effective = checkpoint["state_dict"][name].to(parameter.device)
            raw = unpack_raw(entry["raw"], effective, _scaled(terms))
        weight = conditioned_weight(owner, tensor_name)
        weight.terms, weight.raw = terms, raw


def _warn(message: str) -> None:
    warnings.warn(message, LitCondWarning, stacklevel=3)
