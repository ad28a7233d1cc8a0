"""Many heads at once against head by head."""

import pytest
import torch

from lit_cond.errors import ConfigurationError
from lit_cond.functional import (
    attention_jacobian_singular_values,
    attention_jacobian_spectra,
    attention_probabilities,
    jacobian_heads,
)

NAN = float("nan")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(heads=3, n=5, m=None, width=8, d=3, v=4, shared_keys=False, mask=None, seed=0):
    m = n if m is None else m
    x = draw(n, width, seed=seed)
    y = x if m == n else draw(m, width + 1, seed=seed + 1)
    front = () if shared_keys else (heads,)
    q = x @ draw(heads, width, d, seed=seed + 2) / width**0.5
    k, value = (y @ draw(*front, y.shape[1], size, seed=seed + 3) / width**0.5 for size in (d, v))
    p = attention_probabilities(q, k, 0.5, mask)
    names = ("query_tokens", "key_tokens", "value_tokens", "query", "key", "value", "probabilities")
    return dict(zip(names, (x, y, y, q, k, value, p), strict=True)) | {"scale": 0.5}


def one_by_one(arguments, **options):
    heads = len(arguments["probabilities"])
    ndim = {name: 3 if name.endswith("maps") else 2 for name in arguments}
    for head in range(heads):
        yield attention_jacobian_singular_values(
            **{k: t if k == "scale" or t.ndim == ndim[k] else t[head] for k, t in arguments.items()}, **options
        )


def check(arguments, **options):
    found = attention_jacobian_spectra(**arguments, **options)
    for ours, one in zip(found, one_by_one(arguments, **options), strict=True):
        torch.testing.assert_close(ours.values, one.values, rtol=1e-7, atol=0, equal_nan=True)
        assert (ours.tokens, ours.exact, ours.parameters, ours.rtol) == (
            one.tokens,
            one.exact,
            one.parameters,
            one.rtol,
        )
    return found


@pytest.fixture
def no_single_heads(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("head by head")

    monkeypatch.setattr(jacobian_heads, "attention_jacobian_singular_values", refuse)


SIZES = {
    "plain": {},
    "one head": {"heads": 1},
    "cross": {"m": 7},
    "fewer keys": {"m": 2, "v": 2, "n": 3},
    "shared keys and values": {"shared_keys": True},
    "causal": {"mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "digits": {"heads": 4, "n": 17, "width": 64, "d": 16, "v": 16},
}


@pytest.mark.parametrize("size", SIZES)
def test_heads_are_measured_as_alone(size):
    check(layer(**SIZES[size]))


@pytest.mark.parametrize("size", ["plain", "cross", "shared keys and values", "causal", "digits"])
def test_these_are_measured_together(size, no_single_heads):
    attention_jacobian_spectra(**layer(**SIZES[size]))


@pytest.mark.parametrize("together", [1, 400, 801])
def test_memory_is_cut_into_pieces(together, monkeypatch, no_single_heads):
    whole = attention_jacobian_spectra(**layer(heads=5))
    monkeypatch.setattr(jacobian_heads, "_TOGETHER", together)
    for ours, one in zip(attention_jacobian_spectra(**layer(heads=5)), whole, strict=True):
        torch.testing.assert_close(ours.values, one.values, rtol=1e-9, atol=0)


def test_tokens_may_differ_between_heads():
    arguments = layer()
    for name in ("query_tokens", "key_tokens", "value_tokens"):
        arguments[name] = draw(3, 5, 8, seed=7)
    check(arguments)


@pytest.mark.parametrize("bad", ["not finite", "ill-conditioned", "hidden", "blind", "zero", "huge", "tiny"])
def test_one_unusual_head_leaves_its_neighbours_alone(bad):
    arguments = layer()
    plain = attention_jacobian_spectra(**arguments)
    if bad == "not finite":
        arguments["query"][1, 0, 0] = NAN
    elif bad == "ill-conditioned":
        arguments["value"][1] *= 1e-9
        arguments["probabilities"][1] = 0.2
    elif bad == "hidden":
        arguments["probabilities"][1, :, 2] = 0
        arguments["value"][1, 2] = NAN
    elif bad == "blind":
        arguments["probabilities"][1, 3] = 0
    else:
        arguments["value"][1] *= {"zero": 0, "huge": 1e80, "tiny": 1e-80}[bad]
    found = check(arguments)
    for head in (0, 2):
        torch.testing.assert_close(found[head].values, plain[head].values, rtol=1e-7, atol=0)


@pytest.mark.parametrize("options", [{"max_rows": 8}, {"rows": torch.tensor([1, 4])}])
def test_samples(options):
    assert all(spectrum.rows == 8 for spectrum in check(layer(), **options))


@pytest.mark.parametrize("each", [True, False])
def test_maps(each):
    arguments = layer()
    front = (3,) if each else ()
    arguments |= {"query_maps": draw(*front, 5, 3, 3, seed=8), "value_maps": draw(*front, 5, 4, 4, seed=9)}
    check(arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(dtype):
    check({k: t if k == "scale" else t.to(dtype) for k, t in layer().items()})


def test_no_heads():
    arguments = {k: t[:0] if getattr(t, "ndim", 0) == 3 else t for k, t in layer().items()}
    assert attention_jacobian_spectra(**arguments) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probabilities": draw(5, 5)}, r"probabilities of shape \(5, 5\)"),
        ({"query": draw(2, 5, 3)}, r"\(2, 5, 3\) does not fit 3 heads"),
        ({"query": draw(3)}, r"\(3,\) does not fit 3 heads"),
        ({"key": draw(3, 4, 3)}, "key has 4 rows"),
        ({"key": draw(3, 5, 2)}, "3 and 2 channels"),
        ({"max_rows": 3}, "max_rows=3"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        attention_jacobian_spectra(**(layer() | changes))
