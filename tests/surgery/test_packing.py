"""Corrections and raw weights come back bit for bit from few bytes."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_cond.functional import identity_correction, spectral_correction
from lit_cond.surgery.packing import pack_correction, pack_raw, unpack_correction, unpack_raw
from lit_cond.surgery.rules import WeightRule
from lit_cond.surgery.weights import Term, effective_weight


def effective(raw, corrections):
    terms = [Term(WeightRule(), [], c, torch.tensor(s)) for c, s in corrections]
    return effective_weight(raw, terms)


def same_bits(a, b):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("strength", [0.0, 1e-3, 0.37, 1.0, 10.0])
@pytest.mark.parametrize("kind", ["spectral", "identity", "two"])
def test_raw_weights_come_back_bit_for_bit(dtype, strength, kind):
    torch.manual_seed(0)
    raw = (torch.randn(48, 32) * 0.05).to(dtype)
    raw[0, :4] = torch.tensor([1e-30, 3.0, -5e-7, 65000.0]).to(dtype)
    make = identity_correction if kind == "identity" else spectral_correction
    dense = make(torch.randn(48, 32, dtype=torch.promote_types(dtype, torch.float32)), 0.3)
    corrections = [(dense, strength)]
    if kind == "two":
        upper, lower = dense.clone(), dense.clone()
        upper[16:], lower[:32] = 0, 0
        corrections = [(upper, strength), (lower, 0.5)]
    whole = effective(raw, corrections)
    restored = [(unpack_correction(pack_correction(c), c.shape), s) for c, s in corrections]
    assert all(same_bits(a, b) for (a, _), (b, _) in zip(restored, corrections, strict=True))
    assert same_bits(unpack_raw(pack_raw(raw, whole, corrections), whole, restored), raw)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6),
    st.lists(st.floats(width=32, min_value=-1e6, max_value=1e6), min_size=6, max_size=6),
    st.floats(width=32, min_value=0, max_value=16),
)
def test_any_numbers_come_back(raw, correction, strength):
    raw, correction = torch.tensor(raw), torch.tensor(correction)
    whole = effective(raw, [(correction, strength)])
    back = unpack_raw(pack_raw(raw, whole, [(correction, strength)]), whole, [(correction, strength)])
    assert torch.equal(back, raw)  # a zero may have lost its sign


def test_a_dense_correction_takes_less_than_five_bytes_for_an_entry():
    torch.manual_seed(0)
    start = torch.randn(256, 256) * 0.02
    correction = spectral_correction(start)
    raw = start + 0.01 * torch.randn(256, 256)
    whole = effective(raw, [(correction, 1.0)])
    packed = [pack_correction(correction), pack_raw(raw, whole, [(correction, 1.0)])]
    assert sum(t.nbytes for part in packed for t in part.values()) < 4.7 * raw.numel()


def test_a_correction_of_some_rows_takes_the_bytes_of_its_rows():
    correction = torch.zeros(300, 100)
    correction[100:200] = torch.randn(100, 100)
    assert sum(t.nbytes for t in pack_correction(correction).values()) < 4.1 * 100 * 100


@pytest.mark.parametrize("spoil", ["where", "values", "steps", "far"])
def test_what_does_not_fit_raises(spoil):
    raw, correction = torch.randn(8, 8), torch.randn(8, 8)
    whole = effective(raw, [(correction, 1.0)])
    packed, kept = pack_correction(correction), pack_raw(raw, whole, [(correction, 1.0)])
    part = packed if spoil in packed else kept
    part[spoil] = torch.full((3,), 99, dtype=part[spoil].dtype)

    def unpack():
        unpack_correction(packed, correction.shape)
        unpack_raw(kept, whole, [(correction, 1.0)])

    with pytest.raises((ValueError, IndexError, RuntimeError, zlib.error)):
        unpack()
