import pytest
import torch

from lit_cond.errors import ConfigurationError
from lit_cond.functional import identity_correction, polar_factor, spectral_correction


def kappa(w):
    values = torch.linalg.svdvals(w.double())
    return values[..., 0] / values[..., -1]


def random(*shape, seed=0, std=0.02):
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_identity_by_hand():
    expected = torch.tensor([[2.0, 0, 0], [0, 2, 0]])
    assert torch.equal(identity_correction(random(2, 3), 2.0), expected)
    assert torch.equal(identity_correction(random(3, 2), 2.0), expected.T)


def test_identity_per_head_starts_again_in_every_block():
    expected = torch.tensor([[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0]])
    assert torch.equal(identity_correction(random(4, 3), 1.0, num_blocks=2), expected)


def test_identity_ignores_the_entries_when_the_scale_is_a_number():
    w = torch.full((3, 3), float("nan"))
    assert torch.equal(identity_correction(w, 10.0), 10 * torch.eye(3))


def test_identity_with_spectral_scale_uses_each_block():
    w = torch.cat([3 * torch.eye(2, 4), 5 * torch.eye(2, 4)])
    whole = identity_correction(w)
    torch.testing.assert_close(whole, 34**0.5 * torch.eye(4))  # the rows of both blocks are parallel
    heads = identity_correction(w, num_blocks=2)
    torch.testing.assert_close(heads, torch.cat([3 * torch.eye(2, 4), 5 * torch.eye(2, 4)]))


def test_spectral_adds_sigma_max_to_every_singular_value():
    w = random(12, 20)
    before = torch.linalg.svdvals(w.double())
    after = torch.linalg.svdvals((w + spectral_correction(w)).double())
    torch.testing.assert_close(after, before + before[0], rtol=1e-5, atol=0)
    after = torch.linalg.svdvals((w + spectral_correction(w, scale=7.0)).double())
    torch.testing.assert_close(after, before + 7, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["svd", "products"])
@pytest.mark.parametrize("shape", [(768, 768), (64, 768), (256, 64)])
def test_spectral_bound_on_a_fresh_weight(backend, shape):
    w = torch.nn.init.trunc_normal_(torch.empty(shape), std=0.02, generator=torch.Generator().manual_seed(0))
    assert kappa(w + spectral_correction(w, backend=backend)) <= 2.0001


@pytest.mark.parametrize("backend", ["svd", "products"])
def test_spectral_per_block_equals_the_blocks_alone(backend):
    w = random(3, 12, 10)
    result = spectral_correction(w, num_blocks=4, backend=backend)
    assert result.shape == w.shape
    for sample in range(3):
        for head in range(4):
            rows = slice(3 * head, 3 * head + 3)
            alone = spectral_correction(w[sample, rows], backend=backend)
            torch.testing.assert_close(result[sample, rows], alone, rtol=0, atol=1e-6)
            assert kappa(w[sample, rows] + result[sample, rows]) <= 2.0001


def test_spectral_conditions_a_rank_deficient_weight():
    w = torch.ones(5, 8)
    assert kappa(w + spectral_correction(w)) <= 2.0001


@pytest.mark.parametrize("correction", [identity_correction, spectral_correction])
def test_a_zero_weight_gets_a_zero_correction(correction):
    assert torch.equal(correction(torch.zeros(4, 4)), torch.zeros(4, 4))


@pytest.mark.parametrize("correction", [identity_correction, spectral_correction])
@pytest.mark.parametrize("scale", ["spectral", 2.0])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_result_type(correction, scale, given, expected):
    w = random(6, 4).to(given)
    result = correction(w, scale)
    assert result.dtype == expected
    torch.testing.assert_close(result, correction(w.to(expected), scale))


def test_half_precision_is_not_rounded_on_the_way():
    # A polar factor rounded to bfloat16 would leave kappa at about 2.02.
    w = random(64, 64).bfloat16()
    assert kappa(w.float() + spectral_correction(w)) <= 2.0001


def test_autocast_does_not_reach_inside():
    w = random(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(spectral_correction(w, backend="products"), spectral_correction(w, backend="products"))
        result = spectral_correction(w, backend="products")
    assert torch.equal(result, spectral_correction(w, backend="products"))


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("scale", ["spectral", 3.0])
def test_gradients(num_blocks, scale):
    w = random(4, 3, std=1.0).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: spectral_correction(w, scale, num_blocks), (w,))
    if scale == "spectral":
        assert torch.autograd.gradcheck(lambda w: identity_correction(w, scale, num_blocks), (w,))


def test_the_input_is_not_changed_and_not_aliased():
    w = random(4, 4)
    before = w.clone()
    for result in (identity_correction(w, 1.0), identity_correction(w, num_blocks=2), spectral_correction(w)):
        result.add_(1)
        assert torch.equal(w, before)


@pytest.mark.parametrize("correction", [identity_correction, spectral_correction])
@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (torch.ones(6, 4), {"num_blocks": 4}, "6 rows can not be cut into num_blocks=4"),
        (torch.ones(6, 4), {"num_blocks": 0}, "num_blocks=0"),
        (torch.ones(6, 4), {"num_blocks": -2}, "num_blocks=-2"),
        (torch.ones(6, 4), {"scale": "frobenius"}, "scale='frobenius' is unknown; give 'spectral' or a number"),
        (torch.ones(6, 4), {"scale": float("nan")}, "scale=nan is not finite"),
        (torch.ones(6), {}, r"shape \(6,\)"),
        (torch.ones(6, 4, dtype=torch.int32), {}, "torch.int32"),
        (torch.full((2, 2), float("nan")), {}, "4 of 4 entries"),
    ],
)
def test_bad_arguments(correction, w, options, message):
    with pytest.raises(ConfigurationError, match=message):
        correction(w, **options)


def test_the_polar_factor_is_the_spectral_correction_at_scale_one():
    w = random(5, 7)
    torch.testing.assert_close(spectral_correction(w, 1.0), polar_factor(w))
