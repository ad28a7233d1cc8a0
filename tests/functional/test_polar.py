import math

import pytest
import torch
from torch import Tensor

from lit_cond.errors import ConfigurationError, LitCondError
from lit_cond.functional import largest_singular_value, polar_factor


def matrix(rows: int, columns: int, kappa: float = 10.0, seed: int = 0) -> Tensor:
    """Return a float64 matrix with singular values from 1 down to 1/kappa."""
    generator = torch.Generator().manual_seed(seed)
    k = min(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, k, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, k, generator=generator, dtype=torch.float64))
    return (u * torch.logspace(0, -math.log10(kappa), k, dtype=torch.float64)) @ v.T


def kappa_after(w: Tensor, polar: Tensor) -> float:
    """Return kappa(W + sigma_max * polar), by numbers that the package did not compute."""
    w, polar = w.double(), polar.double()
    values = torch.linalg.svdvals(w + torch.linalg.svdvals(w)[0] * polar)
    return float(values[0] / values[-1])


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("backend", ["svd", "products"])
def test_known_polar_factor(shape, backend):
    # W = Q H with a known orthonormal Q and a known positive definite H.
    rows, columns = shape
    generator = torch.Generator().manual_seed(3)
    k, n = min(shape), max(shape)
    q, _ = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64))
    h = torch.randn(k, k, generator=generator, dtype=torch.float64)
    w = q @ (h @ h.T + 0.1 * torch.eye(k, dtype=torch.float64))
    if rows < columns:
        q, w = q.T, w.T
    torch.testing.assert_close(polar_factor(w, backend), q, rtol=0, atol=1e-9)


@pytest.mark.parametrize("backend", ["svd", "products"])
def test_random_768_is_conditioned_to_two(backend):
    w = torch.randn(768, 768, generator=torch.Generator().manual_seed(0))
    assert kappa_after(w, polar_factor(w, backend)) <= 2.0001


@pytest.mark.parametrize("shape", [(40, 40), (64, 20), (20, 64)])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e4, 1e6])
def test_the_backends_agree(shape, kappa):
    w = matrix(*shape, kappa=kappa)
    by_svd, by_products = polar_factor(w), polar_factor(w, "products")
    torch.testing.assert_close(by_products, by_svd, rtol=0, atol=1e-16 * kappa * 100 + 1e-12)
    assert kappa_after(w, by_products) <= 2.0001


def test_products_in_float32_stay_orthonormal_where_the_directions_are_noise():
    w = matrix(64, 64, kappa=1e6).float()
    polar = polar_factor(w, "products").double()
    torch.testing.assert_close(polar @ polar.T, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-4)
    assert kappa_after(w, polar) <= 2.001


def test_products_leave_a_zero_direction_and_svd_completes_it():
    w = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(polar_factor(w, "products"), expected, rtol=0, atol=1e-6)
    completed = polar_factor(w)
    torch.testing.assert_close(completed @ completed.T, torch.eye(3), rtol=0, atol=1e-6)
    assert kappa_after(w, completed) <= 2.0001


def test_too_few_steps_are_not_exact():
    # Five steps, as some optimizers use, do not condition a weight: the default must be larger.
    w = torch.randn(768, 768, generator=torch.Generator().manual_seed(0))
    assert kappa_after(w, polar_factor(w, "products", num_steps=5)) > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["svd", "products"])
def test_type_is_kept_and_half_is_rounded_once(dtype, backend):
    w = matrix(12, 8).to(dtype)
    result = polar_factor(w, backend)
    assert result.dtype == dtype
    expected = polar_factor(w.double()).to(dtype)
    spacing = torch.finfo(dtype).eps
    assert (result.double() - expected.double()).abs().max() <= max(spacing, 1e-13 if spacing < 1e-10 else 2e-6)


@pytest.mark.parametrize("backend", ["svd", "products"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_scale_does_not_matter(backend, scale):
    w = matrix(10, 10).float()
    torch.testing.assert_close(polar_factor(w * scale, backend), polar_factor(w, backend), rtol=0, atol=3e-6)


@pytest.mark.parametrize("backend", ["svd", "products"])
def test_batch_equals_single(backend):
    w = torch.stack([matrix(7, 5, seed=seed) for seed in range(6)]).reshape(2, 3, 7, 5)
    result = polar_factor(w, backend)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(result[i, j], polar_factor(w[i, j], backend), rtol=0, atol=1e-12)


def test_autocast_does_not_reach_inside():
    w = matrix(32, 32, kappa=100).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = polar_factor(w, "products")
    assert torch.equal(result, polar_factor(w, "products"))


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
@pytest.mark.parametrize("backend", ["svd", "products"])
def test_gradient(shape, backend):
    w = matrix(*shape).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: polar_factor(w, backend), (w,))


def test_gradient_with_repeated_singular_values():
    # The textbook derivative of the SVD divides by s_i - s_j = 0 here.
    w = matrix(5, 4, kappa=1.0)[None].repeat(2, 1, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: polar_factor(w), (w,))


def test_gradient_of_a_rank_deficient_matrix_is_finite():
    w = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    (polar_factor(w) * torch.arange(9.0).reshape(3, 3)).sum().backward()
    assert w.grad.isfinite().all()
    assert w.grad.abs().max() < 100


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_is_named(bad):
    w = torch.eye(3)
    w[0, 1] = w[2, 2] = bad
    with pytest.raises(ConfigurationError, match=r"2 of 9 entries .* \(3, 3\) are NaN or infinite") as caught:
        polar_factor(w)
    assert isinstance(caught.value, LitCondError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: polar_factor(torch.ones(3)), r"shape \(3,\).*give \(\.\.\., rows, columns\)"),
        (lambda: polar_factor(torch.ones(3, 3, dtype=torch.long)), "torch.int64"),
        (lambda: polar_factor(torch.eye(3), "qr"), "backend='qr' is unknown; choose 'svd' or 'products'"),
        (lambda: polar_factor(torch.eye(3), "products", 0), "num_steps=0 is too small"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty(shape):
    assert polar_factor(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("shape", [(30, 30), (50, 7), (7, 50), (1, 4)])
@pytest.mark.parametrize("backend", ["svd", "products"])
def test_largest_singular_value(shape, backend):
    w = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(w)[:, 0]
    torch.testing.assert_close(largest_singular_value(w, backend), expected, rtol=1e-5, atol=0)


def test_largest_singular_value_of_a_cluster_is_within_the_documented_error():
    values = torch.linspace(1, 1 - 1e-3, 200, dtype=torch.float64)
    rotated = matrix(200, 200, kappa=1.0)
    found = float(largest_singular_value(rotated * values, "products"))
    assert 1 - 2e-4 <= found <= 1 + 1e-12


def test_largest_singular_value_of_zero_is_zero():
    assert float(largest_singular_value(torch.zeros(3, 4), "products")) == 0.0
