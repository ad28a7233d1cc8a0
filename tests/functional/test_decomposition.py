import math

import pytest
import torch
from torch.linalg import LinAlgError

from lit_cond.functional import decomposition, polar_factor, spectral_correction
from lit_cond.functional.decomposition import polar_and_spectrum


def matrix(shape, values, seed=0):
    """Return a float32 matrix with these singular values, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(shape[0], len(values), generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(shape[1], len(values), generator=generator, dtype=torch.float64))
    return ((u * values) @ v.T).float()


def spectrum(kind, kappa, n):
    if kind == "even":
        return torch.linspace(1, 1 / kappa, n, dtype=torch.float64)
    if kind == "decaying":
        return torch.logspace(0, -math.log10(kappa), n, dtype=torch.float64)
    values = torch.ones(n, dtype=torch.float64)
    values[-1] = 1 / kappa
    return values


# Below and above the size from which float32 does most of the work.
SHAPES = [(96, 96), (280, 280), (300, 260), (260, 300)]
SPECTRA = [(kind, kappa) for kind in ("even", "decaying", "one small") for kappa in (1.0, 30.0, 1e3, 1e5, 1e6, 1e7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "kappa"), SPECTRA)
def test_orthonormal_polar_and_true_values_for_any_spectrum(shape, kind, kappa):
    w = matrix(shape, spectrum(kind, kappa, min(shape)))
    polar, values = polar_and_spectrum(w)
    assert (polar.shape, polar.dtype, values.dtype) == (w.shape, torch.float32, torch.float64)
    tall = polar.double() if shape[0] >= shape[1] else polar.double().T
    assert (tall.T @ tall - torch.eye(min(shape))).abs().max() <= 4e-6
    hermitian = tall.T @ (w.double() if shape[0] >= shape[1] else w.double().T)
    true = torch.linalg.svdvals(w.double())
    assert (hermitian - hermitian.T).abs().max() <= 4e-6 * true[0]
    assert torch.linalg.eigvalsh((hermitian + hermitian.T) / 2)[0] >= -1e-6 * true[0]
    assert (values.diff() <= 0).all()
    torch.testing.assert_close(values, true, rtol=1e-5, atol=3e-7 * float(true[0]))
    after = torch.linalg.svdvals((w + spectral_correction(w)).double())
    assert after[0] / after[-1] <= 2.0001
    torch.testing.assert_close(after, true + true[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(280, 280), (260, 300)])
@pytest.mark.parametrize("kind", ["even", "decaying"])
@pytest.mark.parametrize("kappa", [1e3, 1e6])
def test_small_values_are_relatively_accurate(shape, kind, kappa):
    w = matrix(shape, spectrum(kind, kappa, min(shape)))
    torch.testing.assert_close(polar_and_spectrum(w)[1], torch.linalg.svdvals(w.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [0, 1, 40, 90])
def test_missing_directions_are_completed(shape, rank):
    w = torch.zeros(shape)
    w[:rank, :rank] = torch.randn(rank, rank, generator=torch.Generator().manual_seed(0))
    polar, values = polar_and_spectrum(w)
    gram = (polar @ polar.T if shape[0] <= shape[1] else polar.T @ polar).double()
    torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=4e-6)
    torch.testing.assert_close(
        values, torch.linalg.svdvals(w.double()), rtol=1e-5, atol=1e-6 * float(values[0]) + 1e-30
    )


@pytest.mark.parametrize("shape", [(40, 30), (280, 280)])
@pytest.mark.parametrize("scale", [1e-36, 1e-20, 1e20, 1e36])
def test_size_does_not_matter(shape, scale):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    polar, values = polar_and_spectrum(w * scale)
    expected, expected_values = polar_and_spectrum(w)
    torch.testing.assert_close(polar, expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(values, expected_values * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(2, 3, 20, 30), (2, 1, 270, 260)])
def test_batch_equals_single(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    w[1, 0, 0] = w[1, 0, 1]  # one matrix of the batch has a missing direction
    polar, values = polar_and_spectrum(w)
    for i in range(shape[0]):
        for j in range(shape[1]):
            single, single_values = polar_and_spectrum(w[i, j])
            torch.testing.assert_close(values[i, j], single_values, rtol=1e-6, atol=1e-6)
            # The completing direction of a singular matrix is arbitrary in sign.
            torch.testing.assert_close(polar[i, j] @ w[i, j].T, single @ w[i, j].T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(30, 20), (270, 260)])
def test_where_lapack_gives_up_the_svd_serves(monkeypatch, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected, _ = polar_and_spectrum(w)

    def fail(*args, **kwargs):
        raise LinAlgError("linalg.eigh: the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    torch.testing.assert_close(polar_and_spectrum(w)[0], expected, rtol=0, atol=1e-5)


def test_a_spectral_correction_takes_one_decomposition(monkeypatch):
    calls = []
    for name in ("svd", "eigh", "svdvals", "matrix_norm"):
        original = getattr(torch.linalg, name)

        def counted(a, *args, name=name, original=original, **kwargs):
            if a.shape[-1] == 300:
                calls.append(name)
            return original(a, *args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, counted)
    w = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    spectral_correction(w)
    assert calls == ["eigh"]
    calls.clear()
    spectral_correction(w.requires_grad_())
    assert calls == ["svd"]


def test_the_route_of_the_gradient_gives_the_same_values():
    w = torch.randn(280, 280, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(polar_factor(w), polar_factor(w.clone().requires_grad_()).detach(), rtol=0, atol=1e-4)


def test_no_float32_matrix_of_ordinary_spectrum_needs_the_svd(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("SVD")

    monkeypatch.setattr(decomposition, "_by_svd", fail)
    for kind, kappa in SPECTRA[:-1]:
        polar_and_spectrum(matrix((270, 270), spectrum(kind, kappa, 270)))


@pytest.mark.parametrize("rank", [280, 279])
@pytest.mark.parametrize("precision", ["medium", "high"])
def test_fast_float32_products_do_not_reach_the_result(monkeypatch, precision, rank):
    w = torch.randn(280, rank, generator=torch.Generator().manual_seed(0)) @ torch.eye(rank, 280)
    original = torch.Tensor.__matmul__

    def coarse(a, b):
        # What the setting does where the hardware can.
        if a.dtype == torch.float32:
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return original(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", coarse)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        polar, values = polar_and_spectrum(w)
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.undo()
    polar = polar.double()
    torch.testing.assert_close(polar.T @ polar, torch.eye(280, dtype=torch.float64), rtol=0, atol=4e-6)
    torch.testing.assert_close(values, torch.linalg.svdvals(w.double()), rtol=1e-5, atol=1e-5)
