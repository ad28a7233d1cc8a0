import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.linalg import LinAlgError

from lit_cond.errors import ConfigurationError
from lit_cond.functional import condition_number, is_prefix_safe, token_correction

BACKENDS = ["gram", "svd", "products"]
# One matrix per shape class: fewer tokens than channels, more, and as many.
SHAPES = [(17, 64), (65, 24), (20, 20)]


def tokens(batch: int, length: int, width: int, kappa: float = 100.0, seed: int = 0) -> Tensor:
    """Return float64 tokens whose matrices have singular values from 10 down to 10/kappa."""
    generator = torch.Generator().manual_seed(seed)
    k = min(length, width)
    u, _ = torch.linalg.qr(torch.randn(batch, length, k, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(batch, width, k, generator=generator, dtype=torch.float64))
    return (u * torch.logspace(1, 1 - math.log10(kappa), k, dtype=torch.float64)) @ v.mT


def kappa(a: Tensor) -> float:
    values = torch.linalg.svdvals(a.double())
    return float((values[..., 0] / values[..., -1]).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_singular_value_is_raised_by_the_largest(backend, shape):
    x = tokens(3, *shape)
    before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(x + token_correction(x, backend=backend))
    torch.testing.assert_close(after, before + before[:, :1], rtol=1e-7, atol=0)
    after = torch.linalg.svdvals(x + token_correction(x, scale=3.0, backend=backend))
    torch.testing.assert_close(after, before + 3, rtol=1e-7, atol=0)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("shape", [*SHAPES, (197, 768)])
@pytest.mark.parametrize("before", [10.0, 1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_condition_number_after(backend, shape, before, dtype):
    x = tokens(2, *shape, kappa=before).to(dtype)
    correction = token_correction(x, backend=backend)
    assert correction.dtype == dtype
    assert kappa(x + correction) <= 2.001


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_correction_is_the_polar_factor_times_sigma_max(backend):
    x = tokens(2, 9, 14)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(token_correction(x, backend=backend), s[:, :1, None] * (u @ vh), rtol=0, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("correction", "scale"), [("exact", "spectral"), ("exact", 2.0), ("identity", "spectral")])
def test_samples_do_not_see_each_other(backend, correction, scale):
    x = tokens(4, 7, 12).float()
    together = token_correction(x, None, correction, scale, backend)
    for i in range(4):
        alone = token_correction(x[i : i + 1], None, correction, scale, backend)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize(("correction", "scale"), [("exact", "spectral"), ("identity", "spectral"), ("identity", 1.5)])
def test_h1_padding_changes_nothing(backend, padding, correction, scale):
    # Eight rows of sixteen channels, padded to more rows than channels: the smaller Gram matrix changes
    # sides.
    x = tokens(1, 8, 16).float()
    expected = token_correction(x, None, correction, scale, backend)
    for extra in (1, 4, 8, 24):
        before = {"left": extra, "right": 0, "both": extra // 2}[padding]
        padded = torch.full((1, 8 + extra, 16), 37.0)
        padded[:, before : before + 8] = x
        mask = torch.zeros(1, 8 + extra, dtype=torch.bool)
        mask[:, before : before + 8] = True
        result = token_correction(padded, mask, correction, scale, backend)
        torch.testing.assert_close(result[mask][None], expected, rtol=0, atol=2e-5)
        assert (result[~mask] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_h1_what_the_padding_holds_does_not_matter(backend, garbage):
    x = tokens(2, 6, 9).float().requires_grad_()
    mask = torch.tensor([[True] * 6, [False, True, True, True, False, False]])
    clean = token_correction(x, mask, backend=backend)
    dirty = x.detach().clone()
    dirty[~mask] = garbage
    dirty.requires_grad_()
    result = token_correction(dirty, mask, backend=backend)
    assert torch.equal(result, clean)
    (result**2).sum().backward()
    assert dirty.grad.isfinite().all()
    assert (dirty.grad[~mask] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_h1_one_token_and_none(backend):
    x = tokens(3, 5, 8).float()
    mask = torch.tensor([[True] * 5, [False, False, True, False, False], [False] * 5])
    result = token_correction(x, mask, backend=backend)
    torch.testing.assert_close(result[1, 2], x[1, 2])  # a single row is its own polar factor times its norm
    assert (result[2] == 0).all()
    assert kappa(x[0] + result[0]) <= 2.001


@pytest.mark.parametrize("backend", BACKENDS)
def test_h1_repeated_tokens_stay_equal(backend):
    x = tokens(1, 6, 9).float()
    x[:, 4] = x[:, 1]
    result = token_correction(x, backend=backend)
    torch.testing.assert_close(result[:, 4], result[:, 1], rtol=0, atol=1e-5)
    values = torch.linalg.svdvals((x + result).double())[0]
    assert values[0] / values[-2] <= 2.001  # conditioned but for the direction that is missing
    assert values[-1] < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shift_of_a_missing_direction_by_rounding_changes_little(backend):
    # Without the rank tolerance a repeated token's rounding error would be blown up to the size of sigma_max.
    x = tokens(1, 6, 9).float()
    x[:, 4] = x[:, 1]
    nudged = x.clone()
    nudged[:, 4] *= 1 + 2e-14  # below float32 rounding: nothing
    torch.testing.assert_close(token_correction(nudged, backend=backend), token_correction(x, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("correction", "scale"), [("exact", "spectral"), ("exact", 1.0), ("identity", "spectral")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_d3_a_non_finite_sample_is_nan_alone(backend, correction, scale, bad):
    x = tokens(3, 5, 7).float()
    expected = token_correction(x, None, correction, scale, backend)
    x[1, 2, 3] = bad
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, 4] = False
    result = token_correction(x, None, correction, scale, backend)
    assert result[1].isnan().all()
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-6)
    masked = token_correction(x, mask, correction, scale, backend)
    assert masked[1, :4].isnan().all()
    assert (masked[1, 4] == 0).all()


def test_d3_no_convergence_falls_back_to_products(monkeypatch):
    def diverges(*args, **kwargs):
        raise LinAlgError("eigh: the algorithm failed to converge")

    x = tokens(2, 9, 14).float().requires_grad_()
    expected = token_correction(x, backend="svd")
    monkeypatch.setattr(torch.linalg, "eigh", diverges)
    result = token_correction(x, backend="gram")
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    result.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-20, 1e-6, 1e6, 1e18])
def test_size_does_not_matter(backend, size):
    x = tokens(2, 9, 14).float()
    scaled = token_correction(x * size, backend=backend) / size
    torch.testing.assert_close(scaled, token_correction(x, backend=backend), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_float64_does_not_overflow(backend):
    for size in (1e-200, 1e200):
        x = tokens(2, 5, 7) * size
        assert kappa((x + token_correction(x, backend=backend)) / size) <= 2.001


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(backend, dtype):
    x = tokens(2, 9, 14).to(dtype)
    result = token_correction(x, backend=backend)
    assert result.dtype == torch.float32
    assert torch.equal(result, token_correction(x.float(), backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_reach_inside(backend):
    x = tokens(2, 9, 14).float().requires_grad_()
    expected = token_correction(x, backend=backend)
    (expected**3).sum().backward()
    gradient, x.grad = x.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = token_correction(x, backend=backend)
    assert torch.equal(result, expected)
    (result**3).sum().backward()
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (5, 5)])
@pytest.mark.parametrize(("correction", "scale"), [("exact", "spectral"), ("exact", 2.0), ("identity", "spectral")])
def test_gradient(backend, shape, correction, scale):
    x = tokens(2, *shape, kappa=10).requires_grad_()
    mask = torch.ones(2, shape[0], dtype=torch.bool)
    mask[1, -2:] = False
    assert torch.autograd.gradcheck(lambda x: token_correction(x, mask, correction, scale, backend), (x,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_with_repeated_singular_values(backend):
    x = tokens(2, 4, 6, kappa=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_correction(x, None, "exact", 2.0, backend), (x,))


@pytest.mark.parametrize("backend", ["gram", "svd", "auto"])
def test_gradient_with_repeated_tokens_does_not_explode(backend):
    x = tokens(1, 6, 9).float()
    x[:, 4] = x[:, 1]
    x.requires_grad_()
    weights = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(0))
    (token_correction(x, backend=backend) * weights).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() < 1e4


@pytest.mark.parametrize("backend", BACKENDS)
def test_function_transforms(backend):
    def loss(x: Tensor) -> Tensor:
        return (token_correction(x[None], backend=backend) ** 3).sum()

    x = tokens(3, 5, 7, kappa=10).requires_grad_()
    (token_correction(x, backend=backend) ** 3).sum().backward()
    per_sample = torch.func.vmap(torch.func.grad(loss))(x.detach())
    torch.testing.assert_close(per_sample, x.grad, rtol=1e-9, atol=1e-6)


def test_detached_input_gives_a_constant():
    x = tokens(1, 5, 7).requires_grad_()
    assert not token_correction(x.detach()).requires_grad
    with torch.no_grad():
        assert not token_correction(x).requires_grad


def test_identity_by_hand():
    x = torch.zeros(2, 4, 3)
    mask = torch.tensor([[True] * 4, [False, True, False, True]])
    expected = torch.zeros(2, 4, 3)
    for row in range(3):  # the fourth token lies beyond the width
        expected[0, row, row] = 5
    expected[1, 1, 0] = expected[1, 3, 1] = 5
    assert torch.equal(token_correction(x, mask, "identity", 5.0), expected)


@pytest.mark.parametrize(
    ("correction", "scale", "safe"),
    [
        ("identity", 1.0, True),
        ("identity", "spectral", False),
        ("exact", 1.0, False),
        ("exact", "spectral", False),
    ],
)
def test_prefix_safety_is_what_it_says(correction, scale, safe):
    assert is_prefix_safe(correction, scale) is safe
    x = tokens(1, 6, 9)
    changed = x.clone()
    changed[:, -1] += 3
    before, after = (token_correction(t, None, correction, scale)[:, :-1] for t in (x, changed))
    assert torch.equal(before, after) is safe


def test_prefix_safe_identity_survives_a_later_nan():
    x = torch.zeros(1, 3, 4)
    x[0, 2, 0] = float("nan")
    assert torch.equal(token_correction(x, None, "identity", 1.0)[0], torch.eye(3, 4))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 10**6),
    backend=st.sampled_from(BACKENDS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_any_mask_and_any_shape(shape, seed, backend, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    mask = torch.rand(shape[:2], generator=generator) < 0.7
    correction = token_correction(x, mask, backend=backend)
    assert (correction[~mask] == 0).all()
    for sample, rows, change in zip(x, mask, correction, strict=True):
        valid, added = sample[rows].to(correction.dtype), change[rows]
        before = torch.linalg.svdvals(valid.double())
        if before.numel() and before[-1] * 1e4 > before[0]:
            assert kappa(valid + added) <= 2.001
            torch.testing.assert_close(added, token_correction(valid[None], backend="svd")[0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
@pytest.mark.parametrize("correction", ["exact", "identity"])
def test_empty(shape, correction):
    assert token_correction(torch.zeros(shape), None, correction).shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_without_a_graph_break(backend, grad):
    def conditioned(x: Tensor, mask: Tensor) -> Tensor:
        return x + token_correction(x, mask, backend=backend)

    x = tokens(2, 6, 9).float().requires_grad_(grad)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    torch.compiler.reset()
    compiled = torch.compile(conditioned, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), conditioned(x, mask))


def test_the_measured_token_matrix_of_the_probe():
    # user_problems H1: pads make the token matrix look singular; masked, the number is that of the valid
    # rows.
    x = tokens(1, 8, 16, kappa=4.1)
    padded = torch.cat([x, x[:, -1:].expand(1, 4, 16)], dim=1)
    mask = torch.tensor([[True] * 8 + [False] * 4])
    conditioned = padded + token_correction(padded, mask)
    assert float(condition_number(padded)[0]) == math.inf
    assert float(condition_number(conditioned[mask])) == pytest.approx(2 * 4.1 / 5.1, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: token_correction(x[0]), r"shape \(4, 3\).*\(batch, tokens, width\)"),
        (lambda x: token_correction(x.long()), "torch.int64"),
        (lambda x: token_correction(x, torch.ones(2, 4)), r"torch.float32 does not fit.*boolean of shape \(2, 4\)"),
        (lambda x: token_correction(x, torch.ones(2, 3, dtype=torch.bool)), r"shape \(2, 3\)"),
        (lambda x: token_correction(x, correction="spectral"), "correction='spectral' is unknown"),
        (lambda x: token_correction(x, backend="qr"), "backend='qr' is unknown"),
        (lambda x: token_correction(x, scale="big"), "scale='big' is unknown"),
        (lambda x: token_correction(x, scale=math.inf), "scale=inf is not finite"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call(torch.zeros(2, 4, 3))
