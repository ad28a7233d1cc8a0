"""Storing a correction, and the raw weight behind an effective one, exactly and in few bytes.

A corrected entry has three numbers: raw W, C, and the effective W + strength * C that stands in the state dict. C is
stored as it is, without its zeros. W is stored as its distance from what subtracting the correction leaves, counted in
floating-point numbers: mostly 0 or 1 and hardly ever above 127, which zlib packs into about half a byte.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["pack_correction", "pack_raw", "unpack_correction", "unpack_raw"]

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_NEAR = 127

Scaled = tuple[Tensor, float]
"""A correction and its strength."""


def _squeeze(values: Tensor) -> Tensor:
    """Return bytes (bool or int8, flat, on the CPU) without their repetitions."""
    return torch.frombuffer(bytearray(zlib.compress(values.numpy().tobytes(), 1)), dtype=torch.uint8)


def _expand(squeezed: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(squeezed.cpu().numpy().tobytes(), count + 1)
    if len(data) != count:
        raise ValueError(f"{len(data)} bytes where {count} are expected")
    return torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)


def pack_correction(correction: Tensor) -> dict[str, Tensor]:
    """Return what `unpack_correction` needs: the values that are not zero and where they stand.

    Args:
        correction: C, of any shape.
    """
    flat = correction.detach().flatten().cpu()
    where = flat != 0
    return {"where": _squeeze(where), "values": flat[where]}


def unpack_correction(packed: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return the correction, of the given shape, on the CPU.

    Raises:
        ValueError, zlib.error, RuntimeError: If what is stored does not make a correction of this shape.
    """
    where = _expand(packed["where"], torch.bool, shape.numel())
    values = packed["values"].cpu()
    if values.ndim != 1 or len(values) != int(where.sum()):
        raise ValueError(f"{tuple(values.shape)} values for {int(where.sum())} places")
    full = torch.zeros(shape.numel(), dtype=values.dtype)
    full[where] = values
    return full.view(shape)


def pack_raw(raw: Tensor, effective: Tensor, corrections: Sequence[Scaled]) -> dict[str, Tensor]:
    """Return what `unpack_raw` needs beside the effective weight and the corrections.

    Args:
        raw: W.
        effective: W with its corrections, of the shape and dtype of `raw`.
        corrections: Each C with its strength.
    """
    where = _changed(corrections)
    values = raw.detach().flatten().cpu()[where]
    if raw.dtype not in _BITS:  # float64: what subtraction leaves depends on the processor
        return {"values": values}
    steps = _position(values) - _position(_subtracted(effective, corrections, where))
    far = (steps.abs() > _NEAR).nonzero().flatten()
    distances = steps[far]
    steps[far] = 0
    return {"steps": _squeeze(steps.to(torch.int8)), "far": far.to(torch.int32), "far_steps": distances}


def unpack_raw(packed: Mapping[str, Tensor], effective: Tensor, corrections: Sequence[Scaled]) -> Tensor:
    """Return the raw weight, of the dtype and on the device of `effective`.

    Raises:
        ValueError, zlib.error, RuntimeError, IndexError: If what is stored does not fit the corrections.
    """
    where = _changed(corrections)
    full = effective.detach().flatten().cpu().clone()
    if "values" in packed:
        full = full.to(packed["values"].dtype)
        full[where] = packed["values"].cpu()
        return full.view(effective.shape).to(effective.device)
    steps = _expand(packed["steps"], torch.int8, int(where.sum())).to(torch.int64)
    steps[packed["far"].cpu().long()] = packed["far_steps"].cpu()
    full[where] = _at(_position(_subtracted(effective, corrections, where)) + steps, full.dtype)
    return full.view(effective.shape).to(effective.device)


def _changed(corrections: Sequence[Scaled]) -> Tensor:
    """Return where raw and effective differ (flat, on the CPU)."""
    where = torch.zeros(corrections[0][0].numel(), dtype=torch.bool)
    for correction, _ in corrections:
        where |= correction.flatten().cpu() != 0
    return where


def _subtracted(effective: Tensor, corrections: Sequence[Scaled], where: Tensor) -> Tensor:
    """Return the effective entries without their corrections.

    In float64 the products of two float32 numbers are exact, so every processor computes the same.
    """
    value = effective.detach().flatten().cpu()[where].to(torch.float64)
    for correction, strength in corrections:
        value -= correction.detach().flatten().cpu()[where].to(torch.float64) * strength
    return value.to(effective.dtype)


def _position(values: Tensor) -> Tensor:
    """Return the place of floating-point numbers in the order of all numbers of their dtype."""
    kind = _BITS[values.dtype]
    bits = values.contiguous().view(kind).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def _at(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floating-point numbers at the given places."""
    kind = _BITS[dtype]
    bits = torch.where(positions < 0, torch.iinfo(kind).min - positions, positions)
    return bits.to(kind).view(dtype)
