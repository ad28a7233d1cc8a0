import math

import pytest
import torch
from torch.linalg import LinAlgError

from lit_cond.errors import ConfigurationError
from lit_cond.functional import condition_number, condition_of_spectrum, singular_values

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def hilbert(n):
    index = torch.arange(n, dtype=torch.float64)
    return 1 / (index[:, None] + index + 1)


def orthogonal(n, seed=0):
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.eye(5), 1.0),
        (lambda: torch.ones(2, 2), INF),
        (lambda: torch.ones(4, 7), INF),
        (lambda: torch.zeros(3, 3), INF),
        (lambda: torch.zeros(1, 4), INF),
        (lambda: torch.tensor([[1.0, 2.0, 3.0]]), 1.0),
        (lambda: torch.tensor([[1.0, 2.0, 3.0]]).T, 1.0),
        (lambda: torch.tensor([[-4.0]]), 1.0),
        (lambda: torch.diag(torch.tensor([8.0, 2.0, 0.5])), 16.0),
        (lambda: torch.tensor([[3.0, 0.0], [4.0, 5.0]]), 3.0),  # singular values 3 sqrt(5) and sqrt(5)
        (lambda: torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]), INF),
    ],
)
def test_d1_known_matrices(make, expected, dtype):
    result = condition_number(make().to(dtype))
    assert result.dtype == torch.float64
    assert result.shape == ()
    assert float(result) == pytest.approx(expected, rel=1e-12)


def test_d1_diagonal_of_twelve_decades():
    assert float(condition_number(torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64)))) == pytest.approx(
        1e12, rel=1e-3
    )


@pytest.mark.parametrize(
    ("n", "expected"), [(3, 524.0567775860608), (4, 15513.73873892924), (5, 476607.2502425), (6, 14951058.642254)]
)
def test_hilbert(n, expected):
    assert float(condition_number(hilbert(n))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [2, 17, 100])
def test_orthogonal(n):
    assert float(condition_number(orthogonal(n))) == pytest.approx(1, abs=1e-12)
    assert float(condition_number(orthogonal(n).float())) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(2, 2), (16, 16), (64, 768), (300, 200)])
@pytest.mark.parametrize("seed", range(3))
def test_rank_one_rounded_to_float32_is_singular(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(shape[0], 1, generator=generator, dtype=torch.float64)
    v = torch.randn(1, shape[1], generator=generator, dtype=torch.float64)
    assert float(condition_number((u @ v).float())) == INF
    assert float(condition_number(u @ v)) == INF


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_precision_is_measured_as_the_numbers_it_holds(dtype):
    # A tolerance of eps(bfloat16) would call every trained bfloat16 weight singular.
    w = torch.diag(torch.tensor([1.0, 2.0**-12])).to(dtype)
    assert float(condition_number(w)) == pytest.approx(4096, rel=1e-12)


@pytest.mark.parametrize("kappa", [1e1, 1e3, 2.9e4, 3.1e4, 1e6, 1e9, 1e11])
@pytest.mark.parametrize("shape", [(40, 40), (25, 60), (60, 25)])
def test_both_routes_are_accurate(kappa, shape):
    k = min(shape)
    values = torch.logspace(0, -math.log10(kappa), k, dtype=torch.float64) * 1e-3
    a = orthogonal(shape[0])[:, :k] * values @ orthogonal(shape[1], seed=1)[:k]
    assert float(condition_number(a)) == pytest.approx(kappa, rel=1e-6 if kappa < 1e8 else 1e-3)
    torch.testing.assert_close(singular_values(a), values, rtol=1e-6 if kappa < 1e8 else 1e-3, atol=0)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_scale_does_not_matter(scale):
    a = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)) * scale
    assert float(condition_number(a)) == pytest.approx(4, rel=1e-12)


def test_rtol_is_the_callers_if_given():
    a = torch.diag(torch.tensor([1.0, 1e-3]))
    assert float(condition_number(a, rtol=1e-2)) == INF
    tiny = torch.diag(torch.tensor([1.0, 1e-10]))
    assert float(condition_number(tiny)) == INF
    assert float(condition_number(tiny, rtol=0.0)) == pytest.approx(1e10, rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_d3_one_bad_matrix_leaves_its_neighbours_alone(dtype):
    good = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
    with_nan, with_inf, repeated = good.clone(), good.clone(), good.clone()
    with_nan[1, 2] = NAN
    with_inf[0, 0] = -INF
    repeated[2] = repeated[0]
    batch = torch.stack([good, with_nan, with_inf, repeated, 2 * good]).to(dtype)
    result = condition_number(batch)
    torch.testing.assert_close(result, torch.tensor([4.0, NAN, NAN, INF, 4.0], dtype=torch.float64), equal_nan=True)
    values = singular_values(batch)
    expected = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(values[0], expected)
    torch.testing.assert_close(values[4], 2 * expected)
    assert values[1].isnan().all()
    assert values[2].isnan().all()
    torch.testing.assert_close(values[3], torch.tensor([32**0.5, 2.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-7)


def fails(monkeypatch, name, when):
    original = getattr(torch.linalg, name)

    def flaky(a, *args, **kwargs):
        if when(a):
            raise LinAlgError(f"{name}: the algorithm failed to converge")
        return original(a, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, name, flaky)


def test_d3_no_convergence_on_a_batch_is_retried_one_by_one(monkeypatch):
    fails(monkeypatch, "eigvalsh", lambda a: True)
    fails(monkeypatch, "svdvals", lambda a: a.shape[0] > 1)
    batch = torch.stack([torch.diag(torch.tensor([float(k), 1.0])) for k in (2, 3, 5)])
    torch.testing.assert_close(condition_number(batch), torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64))


def test_d3_no_convergence_of_the_svd_takes_the_other_route(monkeypatch):
    fails(monkeypatch, "svdvals", lambda a: True)
    a = torch.diag(torch.tensor([1.0, 1e-5], dtype=torch.float64))  # beyond the limit of the first route
    assert float(condition_number(a)) == pytest.approx(1e5, rel=1e-4)


def test_d3_no_convergence_at_all_is_nan_for_that_matrix_only(monkeypatch):
    hopeless = torch.diag(torch.tensor([7.0, 1.0], dtype=torch.float64))
    fails(monkeypatch, "svdvals", lambda a: (a == 7).any())
    fails(monkeypatch, "eigvalsh", lambda a: a.shape[0] > 1 or bool(a[0, 0, 0] - a[0, 1, 1] > 0.9))
    batch = torch.stack([hopeless, torch.eye(2, dtype=torch.float64)])
    torch.testing.assert_close(condition_number(batch), torch.tensor([NAN, 1.0], dtype=torch.float64), equal_nan=True)


@pytest.mark.parametrize("shape", [(300, 300), (64, 200), (200, 64)])
@pytest.mark.parametrize("kappas", [(2.0, 2.0, 3.9), (2.0, 1e3, 2.0), (1e6, 2.0, 1.0), (30.0, 4.5, 1.0)])
def test_a_tolerance_is_kept(shape, kappas):
    k = min(shape)
    batch = torch.stack(
        [
            orthogonal(shape[0])[:, :k]
            * torch.linspace(3, 3 / kappa, k, dtype=torch.float64)
            @ orthogonal(shape[1], seed=1)[:k]
            for kappa in kappas
        ]
    ).float()
    true = torch.linalg.svdvals(batch.double())
    torch.testing.assert_close(singular_values(batch, rtol=1e-5), true, rtol=1e-5, atol=0)
    torch.testing.assert_close(singular_values(batch), true, rtol=1e-6, atol=0)


def test_a_tolerance_spares_float64_where_the_spectrum_allows(monkeypatch):
    seen = []
    original = torch.linalg.eigvalsh

    def recorded(a):
        seen.append(a.dtype)
        return original(a)

    monkeypatch.setattr(torch.linalg, "eigvalsh", recorded)
    narrow, wide = torch.diag(torch.tensor([1.5, 1.0])), torch.diag(torch.tensor([9.0, 1.0]))
    singular_values(torch.stack([narrow, narrow, wide, narrow]), rtol=1e-5)
    assert seen == [torch.float32] * 3 + [torch.float64]
    seen.clear()
    singular_values(narrow)
    singular_values(narrow.double(), rtol=1e-5)
    assert seen == [torch.float64] * 2


def test_a_tolerance_changes_nothing_for_bad_matrices(monkeypatch):
    good, bad = torch.eye(3), torch.full((3, 3), NAN)
    values = singular_values(torch.stack([good, bad, torch.zeros(3, 3), 2 * good]), rtol=1e-5)
    torch.testing.assert_close(values[:, 0], torch.tensor([1, NAN, 0, 2], dtype=torch.float64), equal_nan=True)
    fails(monkeypatch, "eigvalsh", lambda a: True)
    assert float(singular_values(good, rtol=1e-5)[0]) == pytest.approx(1)


def test_condition_of_a_known_spectrum_follows_the_same_rule():
    values = torch.tensor([[1.0, 0.5], [1.0, 1e-7], [0.0, 0.0], [NAN, NAN]], dtype=torch.float64)
    expected = torch.tensor([2.0, INF, INF, NAN], dtype=torch.float64)
    found = condition_of_spectrum(values, (4, 2, 2), torch.float32)
    torch.testing.assert_close(found, expected, equal_nan=True)
    expected[1] = 1e7
    found = condition_of_spectrum(values, (4, 2, 2), torch.float64)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert condition_of_spectrum(torch.zeros(3, 0), (3, 0, 2), torch.float32).isnan().all()


def test_batch_dimensions_are_kept():
    a = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert condition_number(a).shape == (2, 3)
    values = singular_values(a)
    assert values.shape == (2, 3, 4)
    assert (values.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(values, torch.linalg.svdvals(a.double()), rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 3, 3)])
def test_empty_is_nan(shape):
    a = torch.zeros(shape)
    result = condition_number(a)
    assert result.shape == shape[:-2]
    assert result.isnan().all()
    assert singular_values(a).shape == (*shape[:-2], min(shape[-2:]))


def test_integers_and_gradients_are_accepted():
    assert float(condition_number(torch.tensor([[2, 0], [0, 1]]))) == pytest.approx(2)
    result = condition_number(torch.eye(2, requires_grad=True))
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: condition_number(torch.ones(3)), r"shape \(3,\)"),
        (lambda: singular_values(torch.tensor(1.0)), r"shape \(\)"),
        (lambda: condition_number(torch.eye(2, dtype=torch.complex64)), "complex64"),
        (lambda: condition_number(torch.eye(2), rtol=-1.0), r"rtol=-1.0 is no ratio.*\[0, 1\)"),
        (lambda: condition_number(torch.eye(2), rtol=NAN), "rtol=nan"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()
