import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_cond.errors import ConfigurationError
from lit_cond.functional import attention_probabilities, row_entropy, saturated_share

INF, NAN = float("inf"), float("nan")


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(q, k, scale, seen=None, bias=0.0):
    """The softmax in numpy float64, row by row over what is seen."""
    scores = scale * q.double().numpy() @ k.double().numpy().T + bias
    result = np.zeros_like(scores)
    for i, row in enumerate(scores):
        which = np.full(len(row), True) if seen is None else seen[i]
        if which.any():
            e = np.exp(row[which] - row[which].max())
            result[i, which] = e / e.sum()
    return torch.from_numpy(result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 7, 3), (7, 4, 8), (17, 17, 16)])
@pytest.mark.parametrize("scale", [0.0, 0.3, 50.0])
def test_equals_numpy(shape, dtype, scale):
    n, m, d = shape
    q, k = draw(n, d, dtype=dtype), draw(m, d, seed=1, dtype=dtype)
    p = attention_probabilities(q, k, scale)
    assert p.dtype == torch.float64
    torch.testing.assert_close(p, reference(q, k, scale), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("kind", ["boolean", "minus infinity", "lowest float32", "lowest bfloat16"])
def test_masks_hide(kind):
    q, k = draw(5, 3), draw(6, 3, seed=1)
    seen = torch.rand(5, 6, generator=torch.Generator().manual_seed(2)) < 0.6
    seen[3] = False
    seen[4] = True
    dtype = torch.bfloat16 if "bf" in kind else torch.float32
    lowest = -INF if "inf" in kind else torch.finfo(dtype).min
    mask = seen if kind == "boolean" else torch.zeros(5, 6, dtype=dtype).masked_fill(~seen, lowest)
    p = attention_probabilities(q, k, 0.5, mask)
    torch.testing.assert_close(p, reference(q, k, 0.5, seen.numpy()), rtol=1e-12, atol=0)
    assert (p[3] == 0).all()


def test_position_biases_are_added():
    q, k, bias = draw(5, 3), draw(6, 3, seed=1), draw(5, 6, seed=2) * 100
    expected = reference(q, k, 0.5, bias=bias.double().numpy())
    torch.testing.assert_close(attention_probabilities(q, k, 0.5, bias), expected, rtol=1e-12, atol=1e-300)


def test_leading_dimensions_are_broadcast():
    q, k = draw(2, 4, 5, 3), draw(2, 1, 6, 3, seed=1)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    p = attention_probabilities(q, k, 0.5, mask)
    assert p.shape == (2, 4, 5, 6)
    torch.testing.assert_close(p[1, 3], reference(q[1, 3], k[1, 0], 0.5, mask[1, 0].expand(5, 6).numpy()))


@pytest.mark.parametrize("additive", [False, True])
def test_h1_what_a_hidden_token_holds_does_not_matter(additive):
    q, k = draw(3, 4), draw(5, 4, seed=1)
    k[3], k[4] = NAN, INF
    seen = torch.tensor([True, True, True, False, False])
    mask = torch.zeros(5).masked_fill(~seen, -INF) if additive else seen
    p = attention_probabilities(q, k, 0.5, mask)
    torch.testing.assert_close(p[:, :3], attention_probabilities(q, k[:3], 0.5))
    assert (p[:, 3:] == 0).all()


def test_d3_a_bad_query_leaves_the_others_alone():
    q, k = draw(3, 4), draw(5, 4, seed=1)
    good = attention_probabilities(q, k, 0.5)
    q[1, 0] = NAN
    p = attention_probabilities(q, k, 0.5)
    assert p[1].isnan().all()
    torch.testing.assert_close(p[[0, 2]], good[[0, 2]])


def test_huge_scores_saturate_without_overflow():
    q = torch.full((1, 1), 1e30)
    p = attention_probabilities(q, torch.tensor([[1e30], [-1e30], [1e30]]), 1.0)
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64))


def test_nothing_to_attend_to():
    assert attention_probabilities(draw(3, 2), draw(0, 2), 1.0).shape == (3, 0)
    assert attention_probabilities(draw(0, 2), draw(3, 2), 1.0).shape == (0, 3)


def test_no_gradient_and_no_autocast():
    q = draw(3, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = attention_probabilities(q, q, 1.0)
    assert not p.requires_grad
    torch.testing.assert_close(p, reference(q.detach(), q.detach(), 1.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.25] * 4, math.log(4)),
        ([1.0, 0, 0], 0.0),
        ([0.5, 0.5, 0], math.log(2)),
        ([0.0, 0, 0], NAN),
        ([NAN, 0.5, 0.5], NAN),
        ([], NAN),
        ([1.0 + 1e-7, 0.0], 0.0),
        ([1.0, 1e-320], 0.0),
    ],
)
def test_entropy_of_known_rows(row, expected):
    assert float(row_entropy(torch.tensor(row, dtype=torch.float64))) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), m=st.integers(1, 9), scale=st.floats(0, 1e3))
def test_entropy_is_between_zero_and_the_logarithm(seed, m, scale):
    p = attention_probabilities(draw(4, 3, seed=seed), draw(m, 3, seed=seed + 1), scale)
    entropy = row_entropy(p)
    assert entropy.shape == (4,)
    assert (entropy >= 0).all()
    assert (entropy <= math.log(m) + 1e-12).all()
    expected = [-sum(x * math.log(x) for x in row if x > 0) for row in p.tolist()]
    torch.testing.assert_close(entropy, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_saturated_rows_are_counted():
    p = torch.tensor([[0.99, 0.01], [0.5, 0.5], [1.0, 0.0], [0.0, 0.0]])
    assert float(saturated_share(p)) == pytest.approx(2 / 3)
    assert float(saturated_share(p, threshold=0.995)) == pytest.approx(1 / 3)
    assert float(saturated_share(p, threshold=0.5)) == 1
    assert float(saturated_share(p, visible=torch.tensor([2, 2, 1, 2]))) == pytest.approx(1 / 2)


def test_saturation_where_nothing_counts_is_nan():
    assert math.isnan(saturated_share(torch.zeros(3, 2)))
    assert math.isnan(saturated_share(torch.zeros(0, 2)))
    assert math.isnan(saturated_share(torch.zeros(2, 0)))
    both = saturated_share(torch.tensor([[[NAN, 0.5], [1.0, 0]], [[0.5, 0.5], [1.0, 0]]]))
    torch.testing.assert_close(both, torch.tensor([NAN, 0.5], dtype=torch.float64), equal_nan=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_probabilities(draw(3, 2), draw(3, 4), 1.0), r"\(3, 2\) and key \(3, 4\)"),
        (lambda: attention_probabilities(draw(3), draw(3, 4), 1.0), r"query \(3,\)"),
        (lambda: attention_probabilities(draw(3, 2), draw(4, 2), 1.0, torch.ones(3, 3)), r"mask of shape \(3, 3\)"),
        (lambda: attention_probabilities(draw(3, 2), draw(4, 2), 1.0, torch.ones(2, 3, 4)), r"\(2, 3, 4\) does not"),
        (lambda: attention_probabilities(draw(3, 2), draw(4, 2), 1.0, torch.ones(3, 4).long()), "int64 is ambiguous"),
        (lambda: saturated_share(torch.ones(2, 2), threshold=0.0), "threshold=0.0"),
        (lambda: saturated_share(torch.ones(2, 2), threshold=NAN), "threshold=nan"),
        (lambda: saturated_share(torch.ones(2)), r"shape \(2,\)"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()
