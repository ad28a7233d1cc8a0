"""The ends of a spectrum against numpy's SVD in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_cond.errors import ConfigurationError
from lit_cond.functional import condition_of_spectrum, extreme_singular_values, extremes, singular_values

INF, NAN = float("inf"), float("nan")
SIZE = 320  # the smallest that is iterated


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(n, seed=0):
    return torch.linalg.qr(draw(n, n, seed=seed))[0]


def with_values(values, shape=None, seed=0):
    k = len(values)
    m, n = shape or (k, k)
    left, right = torch.linalg.qr(draw(m, k, seed=seed))[0], torch.linalg.qr(draw(n, k, seed=seed + 1))[0]
    return left * torch.as_tensor(values, dtype=torch.float64) @ right.mT


def hilbert(n):
    index = torch.arange(n, dtype=torch.float64)
    return 1 / (index[:, None] + index + 1)


def check(a, rtol=1e-2):
    found = extreme_singular_values(a, rtol)
    values = np.linalg.svd(a.double().numpy(), compute_uv=False)
    for end, true in zip(found, (values[0], values[-1]), strict=True):
        assert end.dtype == torch.float64
        assert float(end) == pytest.approx(true, rel=rtol)
    return [float(end) for end in found]


@pytest.fixture
def no_fallback(monkeypatch):
    def refuse(*args):
        raise AssertionError("fell back")

    monkeypatch.setattr(extremes, "singular_values", refuse)


SPECTRA = {
    "linear to 2": torch.linspace(2, 1, SIZE, dtype=torch.float64),
    "linear to 3": torch.linspace(3, 1, SIZE, dtype=torch.float64),
    "linear to 5": torch.linspace(5, 1, SIZE, dtype=torch.float64),
    "all equal": torch.ones(SIZE),
    "one large": torch.cat([torch.tensor([1e3]), torch.ones(SIZE - 1)]),
    "one small": torch.cat([torch.ones(SIZE - 1), torch.tensor([1e-6])]),
    "one slightly large": torch.cat([torch.tensor([1.03]), torch.ones(SIZE - 1)]),
    "one slightly small": torch.cat([torch.ones(SIZE - 1), torch.tensor([0.97])]),
    "one small beside many that are not": torch.cat([torch.linspace(2, 1, SIZE - 1), torch.tensor([0.3])]),
    "two small that are near": torch.cat([torch.ones(SIZE - 2), torch.tensor([1.02e-5, 1e-5])]),
    "half of them small": torch.cat([torch.ones(SIZE // 2), torch.full((SIZE // 2,), 1e-5)]),
} | {f"decades {d}": torch.logspace(0, -d, SIZE, dtype=torch.float64) for d in (1, 2, 3, 4, 5, 6, 7, 8, 9)}


@pytest.mark.parametrize("name", SPECTRA)
def test_spectra(name):
    check(with_values(SPECTRA[name]))


@pytest.mark.parametrize("name", ["linear to 2", "all equal", "one large", "one small", "decades 3", "decades 6"])
@pytest.mark.usefixtures("no_fallback")
def test_these_need_no_decomposition(name):
    check(with_values(SPECTRA[name]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(320, 320), (400, 400), (320, 500), (900, 330)])
@pytest.mark.parametrize("rtol", [1e-2, 1e-3])
def test_random_weights(shape, seed, rtol):
    check(draw(*shape, seed=seed).float() * 0.02, rtol)


STRUCTURED = {
    "identity": torch.eye(SIZE),
    "permutation": torch.eye(SIZE)[torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))],
    "orthogonal": orthogonal(SIZE),
    "diagonal": torch.diag(torch.linspace(1, 1e-4, SIZE, dtype=torch.float64)),
    "diagonal, one small": torch.diag(torch.cat([torch.ones(SIZE - 1), torch.tensor([1e-3])])),
    "triangular": torch.ones(SIZE, SIZE).tril(),
    "blocks": torch.block_diag(draw(160, 160), 1e-3 * draw(160, 160, seed=1)),
    "unequal rows": draw(SIZE, SIZE) * torch.logspace(0, -5, SIZE, dtype=torch.float64)[:, None],
    "unequal columns": draw(SIZE, SIZE) * torch.logspace(0, -5, SIZE, dtype=torch.float64),
    "with a large mean": draw(SIZE, SIZE) + 100,
    "identity added": draw(SIZE, SIZE) * 0.02 + torch.eye(SIZE),
    "heavy tails": torch.tan(draw(SIZE, SIZE).clamp(-1.57, 1.57)),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_matrices(name):
    check(STRUCTURED[name])


SINGULAR = {
    "zeros": torch.zeros(SIZE, SIZE),
    "rank one": torch.ones(SIZE, SIZE),
    "rank one, random": (draw(SIZE, 1) @ draw(1, SIZE, seed=1)).float(),
    "a row of zeros": torch.cat([torch.zeros(1, SIZE), draw(SIZE - 1, SIZE).float()]),
    "two equal rows": torch.cat([draw(SIZE - 1, SIZE), draw(1, SIZE)]).float(),
    "two equal columns of a tall one": draw(400, SIZE)[:, [0, *range(SIZE - 1)]],
    "half rank": (draw(SIZE, 160) @ draw(160, SIZE, seed=1)).float(),
    "nilpotent": torch.diag(torch.ones(SIZE - 1), 1),
    "Hilbert": hilbert(SIZE),
    "fifteen decades": with_values(torch.logspace(0, -15, SIZE, dtype=torch.float64)).float(),
    "Kahan": torch.diag(0.95 ** torch.arange(SIZE)) @ (torch.eye(SIZE) - 0.3 * torch.ones(SIZE, SIZE).triu(1)),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_matrices_are_seen_as_such(name):
    a = SINGULAR[name]
    largest, smallest = extreme_singular_values(a)
    assert float(largest) == pytest.approx(float(np.linalg.norm(a.double().numpy(), 2)), rel=1e-2)
    ends = torch.stack([largest, smallest])
    assert float(condition_of_spectrum(ends, a.shape, a.dtype)) == INF


@pytest.mark.parametrize("scale", [1e-300, 1e-38, 1e-20, 1e-6, 1e6, 1e20, 1e38, 1e300])
@pytest.mark.parametrize("decades", [0.2, 5])
@pytest.mark.usefixtures("no_fallback")
def test_scale_does_not_matter(scale, decades):
    a = with_values(torch.logspace(0, -decades, SIZE, dtype=torch.float64)) * scale
    largest, smallest = extreme_singular_values(a)
    assert float(largest) / scale == pytest.approx(1, rel=1e-2)
    assert float(smallest) / scale == pytest.approx(10**-decades, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_types_are_measured_as_the_numbers_they_hold(dtype):
    check(draw(SIZE, SIZE).to(dtype))


def test_integers_and_gradients_are_accepted():
    check((draw(SIZE, SIZE) * 100).long())
    a = draw(SIZE, SIZE).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ends = extreme_singular_values(a)
    assert not ends[0].requires_grad
    torch.testing.assert_close(ends, extreme_singular_values(a.detach()), rtol=0, atol=0)


def test_d3_one_bad_matrix_leaves_its_neighbours_alone():
    good = draw(SIZE, SIZE)
    with_nan, with_inf = good.clone(), good.clone()
    with_nan[3, 5], with_inf[0, 0] = NAN, -INF
    batch = torch.stack([good, with_nan, with_inf, 0 * good, 2 * good]).reshape(5, 1, SIZE, SIZE)
    largest, smallest = extreme_singular_values(batch)
    assert largest.shape == smallest.shape == (5, 1)
    alone = extreme_singular_values(good)
    for end, one in zip((largest, smallest), alone, strict=True):
        expected = torch.stack([one, one * NAN, one * NAN, one * 0, 2 * one]).unsqueeze(1)
        torch.testing.assert_close(end, expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 3, 3), (0, 400, 400)])
def test_empty_is_nan(shape):
    for end in extreme_singular_values(torch.zeros(shape)):
        assert end.shape == shape[:-2]
        assert end.isnan().all()


@pytest.mark.parametrize("shape", [(1, 400), (400, 1), (3, 3), (64, 768)])
def test_small_ones_are_decomposed(shape):
    a = draw(*shape)
    largest, smallest = extreme_singular_values(a)
    assert (largest, smallest) == (singular_values(a)[0], singular_values(a)[-1])


@pytest.mark.parametrize("cause", ["steps", "rtol", "progress"])
def test_what_is_not_settled_is_decomposed(cause, monkeypatch):
    a = draw(SIZE, SIZE)
    if cause == "steps":
        monkeypatch.setattr(extremes, "_MAX_STEPS", 6)
    elif cause == "progress":
        monkeypatch.setattr(extremes, "_certainty", lambda *args: 0.9)
    largest, smallest = extreme_singular_values(a, 1e-4 if cause == "rtol" else 1e-2)
    values = singular_values(a)
    assert float(largest) == pytest.approx(float(values[0]), rel=1e-6)
    assert float(smallest) == pytest.approx(float(values[-1]), rel=1e-6)


def test_equal_matrices_have_equal_results_and_random_numbers_are_left_alone():
    a = draw(SIZE, SIZE)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = extreme_singular_values(a)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert extreme_singular_values(a) == first


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    m=st.integers(2, 40),
    n=st.integers(2, 40),
    decades=st.floats(0, 6),
    shape=st.sampled_from(["even", "top", "bottom", "ends"]),
)
def test_any_spectrum_of_any_shape(seed, m, n, decades, shape):
    k = min(m, n)
    position = torch.linspace(0, 1, k, dtype=torch.float64)
    position = {"even": position, "top": position**8, "bottom": position ** (1 / 8), "ends": position.round()}[shape]
    a = with_values(10 ** (-decades * position), (m, n), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extremes, "_SMALL", 2)
        largest, smallest = check(a)
        turned = extreme_singular_values(orthogonal(m, seed) @ a)
    assert largest >= smallest
    assert float(turned[0]) == pytest.approx(largest, rel=2e-2)
    assert float(turned[1]) == pytest.approx(smallest, rel=2e-2)


def test_the_certainty_is_the_polynomial_of_the_iteration():
    # One step on diag(3, 1) from (1, 1) / sqrt 2: alpha = 2, beta = 1, p(t) = t - 2. The second ends: beta = 0.
    one = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64)
    limit = 1 / (extremes._FAILURE * math.sqrt(math.pi / 4))
    expected = math.log(limit) / math.log(2 * limit)
    assert extremes._certainty(*one, 2, 1e-9, 2 + limit / 2) == pytest.approx(expected)
    assert extremes._certainty(*one, 2, 1e-9, 2 + limit) == pytest.approx(1)
    two = torch.tensor([[2.0, 2.0]], dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert extremes._ritz_values(*two) == pytest.approx((1, 3))
    assert extremes._certainty(*two, 2, 1e-9, 3.06) == pytest.approx(1)  # (1.06 ** 2 - 1) / 2e-9


def test_a_missed_end_is_as_improbable_as_promised(monkeypatch):
    # With a promise of one in five, the large value must be missed in at most a fifth of all rotations.
    monkeypatch.setattr(extremes, "_FAILURE", 0.2)
    monkeypatch.setattr(extremes, "_STARTS", 1)
    values = torch.ones(60, dtype=torch.float64)
    values[0] = 1.05
    monkeypatch.setattr(extremes, "_SMALL", 2)
    missed = sum(
        float(extreme_singular_values(with_values(values, seed=seed))[0]) < 1.05 * 0.99 for seed in range(0, 200, 2)
    )
    assert missed <= 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: extreme_singular_values(torch.ones(3)), r"shape \(3,\)"),
        (lambda: extreme_singular_values(torch.eye(2, dtype=torch.complex64)), "complex64"),
        (lambda: extreme_singular_values(torch.eye(2), rtol=0.5), r"rtol=0.5 .*\[0, 0.5\)"),
        (lambda: extreme_singular_values(torch.eye(2), rtol=NAN), "rtol=nan"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()
