import math

import numpy as np
import pytest
import torch

from lit_cond.errors import ConfigurationError
from lit_cond.functional import attention_jacobian_singular_values, attention_probabilities, jacobian_bound
from lit_cond.functional.jacobian_bound import softmax_derivative_range

INF, NAN = float("inf"), float("nan")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ends(p):
    """The same by numpy's eigenvalues of the matrices themselves."""
    values = []
    for row in p.double().numpy():
        row = row[row > 0]
        found = np.linalg.eigvalsh(np.diag(row) - np.outer(row, row))
        values += list(found[0 if row.sum() < 1 - 1e-5 else 1 :])
    return max(values), min(values)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("shape", [(1, 2), (3, 3), (5, 9), (9, 5), (2, 40)])
@pytest.mark.parametrize("keep", [1.0, 0.9])
def test_the_spectrum_of_the_softmax_derivative_equals_numpy(shape, scale, keep):
    p = (draw(*shape) * scale).softmax(dim=-1) * keep
    p[0, 0] = 0 if keep == 1 and shape[1] > 2 else p[0, 0]
    p = p / p.sum(dim=-1, keepdim=True) * keep
    largest, smallest, singular = softmax_derivative_range(p)
    assert (largest, smallest) == pytest.approx(ends(p), rel=1e-7)
    assert singular is (keep == 1)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0.5, 0.5]], (0.5, 0.5, True)),
        ([[0.25] * 4], (0.25, 0.25, True)),
        ([[1.0, 0.0], [0.5, 0.5]], (0.5, 0.5, True)),
        ([[1.0, 0.0]], (0.0, 0.0, True)),
        ([[0.0, 0.0]], (0.0, 0.0, False)),
        ([[0.25, 0.0]], (0.1875, 0.1875, False)),  # a sink has the rest: p (1 - p)
        ([[1 - 1e-30, 1e-30]], (2e-30, 2e-30, True)),  # 2 p q: far below the rounding of an eigensolver
        ([[NAN, 1.0]], (NAN, NAN, False)),
    ],
)
def test_known_rows(rows, expected):
    found = softmax_derivative_range(torch.tensor(rows, dtype=torch.float64))
    assert found[:2] == pytest.approx(expected[:2], rel=1e-9, nan_ok=True)
    assert found[2] is expected[2]


def test_factors_are_condition_numbers():
    x, q, k, v = draw(6, 4), draw(3, 4, seed=1), draw(3, 4, seed=2), draw(2, 4, seed=3)
    p = attention_probabilities(x @ q.T, x @ k.T, 3**-0.5)
    bound = jacobian_bound(x, q, k, v, p)
    for value, matrix in zip(
        (bound.tokens, bound.query, bound.key, bound.value, bound.scores), (x, q, k, v, p), strict=True
    ):
        assert value == pytest.approx(np.linalg.cond(matrix.numpy()), rel=1e-6)
    largest, smallest = ends(p)
    assert bound.softmax_derivative_nonzero == pytest.approx(largest / smallest, rel=1e-7)
    assert bound.softmax_derivative == INF
    assert bound.bound == INF
    by_hand = bound.tokens**3 * largest / smallest * bound.value * (bound.query + bound.key)
    assert bound.bound_nonzero == pytest.approx(by_hand + bound.tokens * bound.scores, rel=1e-7)
    # Not a theorem; for these numbers it holds, and by far.
    measured = attention_jacobian_singular_values(x, x, x, x @ q.T, x @ k.T, x @ v.T, p, 3**-0.5)
    assert measured.condition < bound.bound_nonzero


def test_a_sink_makes_the_derivative_regular():
    x, w = draw(4, 3), draw(3, 3, seed=1)
    bound = jacobian_bound(x, w, w, w, draw(4, 4, seed=2).softmax(dim=-1) * 0.7)
    assert bound.softmax_derivative == bound.softmax_derivative_nonzero < INF
    assert bound.bound == bound.bound_nonzero


def test_singular_saturated_and_bad_inputs():
    x, w, p = draw(4, 3), draw(3, 3, seed=1), torch.eye(4)
    assert jacobian_bound(x, w, w, w, p).bound_nonzero == INF
    assert jacobian_bound(torch.zeros(4, 3), w, w, w, torch.full((4, 4), 0.25)).bound_nonzero == INF
    for index in range(5):
        arguments = [x.clone(), w.clone(), w.clone(), w.clone(), torch.full((4, 4), 0.25)]
        arguments[index][0, 0] = NAN
        assert math.isnan(jacobian_bound(*arguments).bound_nonzero)
        assert math.isnan(jacobian_bound(*arguments).bound)


def test_an_overflow_is_infinity():
    x = torch.diag(torch.tensor([1.0, 1e-150], dtype=torch.float64))
    bound = jacobian_bound(x, x, x, x, torch.full((2, 2), 0.5))
    assert bound.bound_nonzero == INF


def test_bad_arguments():
    with pytest.raises(ConfigurationError, match=r"key of shape \(3,\)"):
        jacobian_bound(draw(4, 3), draw(3, 3), draw(3), draw(3, 3), draw(4, 4))
