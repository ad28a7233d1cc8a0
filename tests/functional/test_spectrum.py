import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_cond.errors import ConfigurationError
from lit_cond.functional import condition_number, effective_rank, numerical_rank, singular_values, stable_rank

INF, NAN = float("inf"), float("nan")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hilbert(n):
    index = torch.arange(n, dtype=torch.float64)
    return 1 / (index[:, None] + index + 1)


def all_three(a, rtol=None):
    values = singular_values(a)
    ranks = stable_rank(values), effective_rank(values), numerical_rank(values, a.shape, a.dtype, rtol)
    assert all(rank.dtype == torch.float64 and rank.shape == a.shape[:-2] for rank in ranks)
    return [float(rank) for rank in ranks]


@pytest.mark.parametrize(
    ("a", "stable", "effective", "numerical"),
    [
        (torch.eye(5), 5, 5, 5),
        (torch.ones(4, 7), 1, 1, 1),
        (torch.zeros(3, 4), 0, 0, 0),
        (torch.tensor([[3.0, 4.0]]), 1, 1, 1),
        (torch.tensor([[3.0], [4.0]]), 1, 1, 1),
        (torch.linalg.qr(draw(9, 9))[0], 9, 9, 9),
        (torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64)), 1, 1, 2),
        (torch.diag(torch.tensor([1.0, 1e-12])), 1, 1, 1),
        (torch.diag(torch.tensor([2.0, 1.0, 1.0])), 1.5, math.exp(math.log(2) * 1.5), 3),
        (torch.full((2, 2), NAN), NAN, NAN, NAN),
        (torch.zeros(0, 3), NAN, NAN, NAN),
    ],
)
def test_known_matrices(a, stable, effective, numerical):
    # A rank-one matrix in rounded arithmetic has a second singular value of up to 1e-8 through its Gram matrix.
    assert all_three(a) == [
        pytest.approx(stable, rel=1e-9, nan_ok=True),
        pytest.approx(effective, rel=1e-6, nan_ok=True),
        pytest.approx(numerical, nan_ok=True),
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (20, 64)])
def test_equal_numpy(shape, seed):
    a = draw(*shape, seed=seed) @ torch.diag(torch.logspace(0, -3, shape[1], dtype=torch.float64))
    s = np.linalg.svd(a.numpy(), compute_uv=False)
    p = s / s.sum()
    expected = [
        (np.linalg.norm(a.numpy()) / s[0]) ** 2,
        np.exp(-(p * np.log(p)).sum()),
        np.linalg.matrix_rank(a.numpy()),
    ]
    assert all_three(a) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [3, 6, 9, 12, 15])
def test_hilbert(n):
    a = hilbert(n)
    s = np.linalg.svd(a.numpy(), compute_uv=False)
    assert all_three(a)[2] == (s > n * 2.0**-52 * s[0]).sum()


def test_a_batch_keeps_bad_matrices_apart():
    values = torch.tensor([[2.0, 1.0], [0.0, 0.0], [NAN, NAN], [INF, 1.0]])
    expected = torch.tensor([1.25, 0, NAN, NAN], dtype=torch.float64)
    torch.testing.assert_close(stable_rank(values), expected, equal_nan=True)
    expected = torch.tensor([3 / 2 ** (2 / 3), 0, NAN, NAN], dtype=torch.float64)
    torch.testing.assert_close(effective_rank(values), expected, equal_nan=True)
    expected = torch.tensor([2, 0, NAN, NAN], dtype=torch.float64)
    torch.testing.assert_close(numerical_rank(values, (4, 2, 2), torch.float32), expected, equal_nan=True)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1e308])
def test_sizes_that_overflow_when_squared(size):
    values = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64) * size
    assert float(stable_rank(values)) == pytest.approx(1.25, rel=1e-2)
    assert float(effective_rank(values)) == pytest.approx(3 / 2 ** (2 / 3), rel=1e-2)
    assert float(numerical_rank(values, (3, 3), torch.float64)) == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), m=st.integers(1, 8), n=st.integers(1, 8), factor=st.floats(1e-6, 1e6))
def test_rotations_and_units_change_nothing_and_the_order_holds(seed, m, n, factor):
    a = draw(m, n, seed=seed)
    stable, effective, numerical = all_three(a)
    turned = torch.linalg.qr(draw(m, m, seed=seed + 1))[0] @ a * factor
    assert all_three(turned) == pytest.approx([stable, effective, numerical], rel=1e-6)
    assert stable * (1 + 1e-12) >= 1
    assert stable <= effective * (1 + 1e-9)
    assert 1 <= effective <= numerical * (1 + 1e-9)
    assert (numerical == min(m, n)) == bool(condition_number(a) < INF)


def test_the_tolerance_is_the_callers_if_given():
    a = torch.diag(torch.tensor([1.0, 1e-3]))
    assert all_three(a, rtol=1e-2)[2] == 1
    with pytest.raises(ConfigurationError, match=r"rtol=1.0"):
        all_three(a, rtol=1.0)
