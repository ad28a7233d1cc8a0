import math

import pytest
import torch
from sklearn.datasets import load_digits

from lit_cond.errors import ConfigurationError
from lit_cond.functional import attention_entropy, predicted_attention_entropy, spectral_correction


def fresh(width, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.init.trunc_normal_(torch.empty(width, width), std=0.02, generator=generator)


def digit_tokens(width):
    """Return LayerNorm'd tokens of digits, embedded as a freshly built vision transformer does."""
    generator = torch.Generator().manual_seed(0)
    images = torch.tensor(load_digits().images[:64], dtype=torch.float32)
    images = (images - images.mean()) / images.std()
    patches = images.reshape(64, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, 16, 4)
    # The default initialisation of a convolution with four inputs: uniform in +-1/sqrt(4).
    embedding, bias = (torch.rand(n, width, generator=generator) - 0.5 for n in (4, 1))
    x = torch.cat([torch.zeros(64, 1, width), patches @ embedding + bias], dim=1)
    x = x + 0.02 * torch.randn(17, width, generator=generator)
    return torch.nn.functional.layer_norm(x, (width,))


def with_identity(width, heads, strength, num_tokens, **options):
    shift = strength * torch.eye(width)
    return predicted_attention_entropy(fresh(width, 0) + shift, fresh(width, 1) + shift, heads, num_tokens, **options)


def test_zero_weights_attend_uniformly():
    zero = torch.zeros(8, 8)
    assert predicted_attention_entropy(zero, zero, 2, 17) == pytest.approx(math.log(17), rel=1e-6)
    assert predicted_attention_entropy(zero, zero, 2, 17, normalized=True) == pytest.approx(1, rel=1e-6)


def test_two_tokens_by_hand():
    # Width 2: LayerNorm leaves (1, -1) or (-1, 1), so the logits of a head of one channel are +-strength^2.
    w = torch.tensor([[0.5, 0.0]])
    p = 1 / (1 + math.exp(-0.5))
    unequal = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    entropy = predicted_attention_entropy(w, w, 1, 2, num_sequences=4000)
    assert entropy == pytest.approx((unequal + math.log(2)) / 2, abs=3e-3)


def test_the_trap_of_lambda_ten_at_vit_base():
    # Computed independently for the design: width 768, 12 heads, 197 LayerNorm'd Gaussian tokens.
    entropy = {s: with_identity(768, 12, s, 197, num_sequences=1) for s in (0.0, 0.5, 1.0, 2.0, 10.0)}
    assert entropy[0.0] == pytest.approx(math.log(197), abs=0.15)
    assert entropy[0.5] == pytest.approx(5.1, abs=0.15)
    assert 1.1 <= entropy[1.0] <= 1.5
    assert entropy[2.0] < 5e-3
    assert entropy[10.0] < 5e-4


@pytest.mark.parametrize(
    ("width", "heads", "expected"),
    [(64, 4, [2.83, 2.71, 2.03, 1.24, 0.22]), (768, 12, [2.81, 2.48, 1.56, 0.95, 0.22])],
)
def test_the_trap_on_digits(width, heads, expected):
    # Seen in a vision transformer at initialisation: 16 patches of 2 x 2 pixels and a class token, log 17 = 2.83.
    x = digit_tokens(width)
    for strength, seen in zip((0.0, 0.5, 1.0, 2.0, 10.0), expected, strict=True):
        shift = strength * torch.eye(width)
        entropy = attention_entropy(x, fresh(width, 0) + shift, fresh(width, 1) + shift, heads)
        assert entropy == pytest.approx(seen, abs=0.12)


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (768, 12)])
def test_the_trap_closes_monotonically(width, heads):
    entropy = [with_identity(width, heads, s, 17, normalized=True) for s in (0.0, 0.5, 1.0, 2.0, 10.0)]
    assert entropy == sorted(entropy, reverse=True)
    assert entropy[0] > 0.97
    assert entropy[1] > 0.8
    assert entropy[3] < 0.05
    assert entropy[4] < 1e-3


def test_the_exact_correction_is_no_trap():
    q, k = fresh(64, 0), fresh(64, 1)
    corrected = predicted_attention_entropy(q + spectral_correction(q), k + spectral_correction(k), 4, normalized=True)
    assert corrected > 0.9


def test_saturated_and_finite():
    huge = 1e4 * torch.eye(16)
    assert predicted_attention_entropy(huge, huge, 2) == pytest.approx(0, abs=1e-6)


def test_grouped_heads_equal_repeated_heads():
    q = fresh(64, 0) * 20
    k = fresh(64, 1)[:32] * 20
    repeated = k.reshape(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)
    assert predicted_attention_entropy(q, k, 4) == predicted_attention_entropy(q, repeated, 4)


def test_deterministic_and_silent_about_the_global_generator():
    q, k = fresh(32, 0), fresh(32, 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = predicted_attention_entropy(q, k, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert predicted_attention_entropy(q, k, 2) == first
    assert predicted_attention_entropy(q * 20, k * 20, 2, seed=1) != predicted_attention_entropy(q * 20, k * 20, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    q, k = fresh(32, 0) * 20, fresh(32, 1) * 20
    expected = predicted_attention_entropy(q, k, 2)
    assert predicted_attention_entropy(q.to(dtype), k.to(dtype), 2) == pytest.approx(expected, rel=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert predicted_attention_entropy(q, k, 2) == expected


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 7), (0, 3, 8), (1, 1, 8)])
def test_tokens_that_do_not_fit(shape):
    with pytest.raises(ConfigurationError, match=r"can not attend by weights of width 8; give \(batch, tokens, 8\)"):
        attention_entropy(torch.zeros(shape), torch.zeros(8, 8), torch.zeros(8, 8), 2)


def test_parameters_stay_out_of_the_graph():
    q = torch.nn.Parameter(fresh(32, 0))
    assert isinstance(predicted_attention_entropy(q, q, 2), float)


def test_nan_in_nan_out():
    q = fresh(32, 0)
    q[0, 0] = float("nan")
    assert math.isnan(predicted_attention_entropy(q, fresh(32, 1), 2))


@pytest.mark.parametrize(
    ("query", "key", "heads", "options", "message"),
    [
        ((8, 8), (8, 8), 3, {}, "8 query rows can not be cut into num_heads=3"),
        ((8, 8), (8, 8), 0, {}, "num_heads=0"),
        ((8, 8), (8, 6), 2, {}, r"query \(8, 8\) and key \(8, 6\)"),
        ((8,), (8, 8), 2, {}, r"query \(8,\)"),
        ((8, 8), (6, 8), 2, {}, "6 key rows do not hold heads of 4 rows"),
        ((12, 8), (8, 8), 3, {}, "8 key rows .* divides num_heads=3"),
        ((8, 8), (0, 8), 2, {}, "0 key rows"),
        ((8, 8), (8, 8), 2, {"num_tokens": 1}, "num_tokens=1"),
        ((8, 8), (8, 8), 2, {"num_sequences": 0}, "num_sequences=0"),
    ],
)
def test_bad_arguments(query, key, heads, options, message):
    with pytest.raises(ConfigurationError, match=message):
        predicted_attention_entropy(torch.zeros(query), torch.zeros(key), heads, **options)
