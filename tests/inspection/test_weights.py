"""Query, key and value matrices in numbers, against numpy."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lit_cond import WeightRule, condition_, fold_
from lit_cond.inspection.numbers import AS_IT_IS, measure_numbers
from lit_cond.inspection.table import format_numbers
from lit_cond.surgery import MatrixLayout, RowSet, WeightView, find_attention
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.sites import AttentionSite
from lit_cond.surgery.survey import Survey
from tests.inspection.helpers import LABELS, RULES, matrix_site, model_of, numbers_of, reference


@pytest.mark.parametrize("attention", ["fused", "functional", "separate", "torch"])
@pytest.mark.parametrize("seed", [0, 1])
def test_matrices_against_numpy(attention, seed):
    model = model_of(attention, seed=seed)
    survey, numbers = numbers_of(model)
    assert len(numbers.layers) == 2
    for site, layer in zip(survey.sites, numbers.layers, strict=True):
        assert [n.role for n in layer.matrices] == [role for role, _ in site] == ["query", "key", "value"]
        for (_, view), found in zip(site, layer.matrices, strict=True):
            got = (found.kappa, found.sigma_max, found.sigma_min, found.stable_rank)
            assert got == pytest.approx(reference(view.matrix()), rel=1e-3)
            assert (found.without, found.reason) == (None, None)


@pytest.mark.parametrize("shape", [(300, 300), (64, 300), (300, 64)])
def test_large_matrices_against_numpy(shape):
    generator = torch.Generator().manual_seed(0)
    module, survey = matrix_site(torch.randn(shape, generator=generator) * 0.02)
    found = measure_numbers(module, survey).layers[0].matrices[0]
    matrix = module.query.weight.detach()
    got = (found.kappa, found.sigma_max, found.sigma_min, found.stable_rank)
    assert got == pytest.approx(reference(matrix), rel=2e-3)
    assert found.after["spectral"] == pytest.approx(2 * found.sigma_max / (found.sigma_max + found.sigma_min), rel=1e-6)
    for label, scale in (("identity 1", 1.0), ("identity 10", 10.0)):
        assert found.after[label] == pytest.approx(reference(matrix + scale * torch.eye(*shape))[0], rel=2e-2)


@pytest.mark.parametrize("attention", ["fused", "separate"])
@pytest.mark.parametrize("label", LABELS)
def test_what_a_correction_leaves_is_what_conditioning_leaves(attention, label):
    model = model_of(attention)
    _, numbers = numbers_of(model)
    condition_(model, RULES[label])
    for site, layer in zip(find_attention(model), numbers.layers, strict=True):
        for (_, view), found in zip(site, layer.matrices, strict=True):
            assert list(found.after) == LABELS
            assert found.after[label] == pytest.approx(reference(effective_matrix(view))[0], rel=1e-3)


def test_a_correction_of_a_grouped_convolution_stays_in_what_its_rows_see():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Conv2d(12, 24, 1, groups=4, bias=False)

    torch.manual_seed(0)
    module = Grouped()
    layout = MatrixLayout(RowSet.span(0, 12), groups=4)
    site = AttentionSite("attn", module, {"query": (WeightView(module.qkv, "weight", layout, "qkv"),)})
    found = measure_numbers(module, Survey(sites=[site])).layers[0].matrices[0]
    weight = module.qkv.weight.detach().double().numpy()[:12, :, 0, 0]
    full = np.zeros((12, 6))
    for row in range(12):
        full[row, 3 * (row // 6) : 3 * (row // 6) + 3] = weight[row]
    seen = full != 0
    assert found.kappa == pytest.approx(np.linalg.cond(full), rel=1e-3)
    corrected = full + np.where(seen, np.eye(12, 6), 0)
    assert found.after["identity 1"] == pytest.approx(np.linalg.cond(corrected), rel=1e-3)
    u, s, vh = np.linalg.svd(full, full_matrices=False)
    assert found.after["spectral"] == pytest.approx(np.linalg.cond(full + np.where(seen, s[0] * u @ vh, 0)), rel=1e-3)


HILBERT = torch.tensor([[1 / (i + j + 1) for j in range(5)] for i in range(5)], dtype=torch.float64)


ORTHOGONAL = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]


@pytest.mark.parametrize(
    ("matrix", "kappa", "stable", "spectral"),
    [
        (torch.eye(6), 1.0, 6.0, 1.0),
        (torch.ones(4, 6), math.inf, 1.0, 2.0),
        (torch.zeros(4, 4), math.inf, 0.0, math.inf),
        (torch.tensor([[3.0, 4.0]]), 1.0, 1.0, 1.0),
        (ORTHOGONAL * 5, 1.0, 7.0, 1.0),
        (torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64)), 1e12, 1.0, 2.0),
        (torch.diag(torch.tensor([1.0, 1e-12])), math.inf, 1.0, 2.0),
        (HILBERT, float(np.linalg.cond(HILBERT.numpy())), 1.0178, 1.9999958),
    ],
)
def test_known_matrices(matrix, kappa, stable, spectral):
    module, survey = matrix_site(matrix)
    found = measure_numbers(module, survey).layers[0].matrices[0]
    assert found.kappa == pytest.approx(kappa, rel=1e-3)
    assert found.stable_rank == pytest.approx(stable, rel=1e-3)
    assert found.after["spectral"] == pytest.approx(spectral, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_as_the_numbers_that_it_holds(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(24, 24).to(dtype)
    module, survey = matrix_site(matrix, matrix, heads=4)
    layer = measure_numbers(module, survey).layers[0]
    assert layer.matrices[0].kappa == pytest.approx(reference(matrix)[0], rel=1e-3)
    corrected = (matrix.float() + torch.eye(24)).to(dtype)
    assert layer.matrices[0].after["identity 1"] == pytest.approx(reference(corrected)[0], rel=1e-3)


def test_a_matrix_that_serves_two_roles_and_layers_has_its_role_in_each():
    torch.manual_seed(0)
    module, survey = matrix_site(torch.randn(8, 8), torch.randn(8, 8))
    site = survey.sites[0]
    twice = AttentionSite("attn", module, {"key": site.views["query"], "value": site.views["query"]})
    layers = measure_numbers(module, Survey(sites=[site, twice])).layers
    assert [n.role for layer in layers for n in layer.matrices] == ["query", "key", "key", "value"]
    assert layers[1].matrices[0].kappa == layers[0].matrices[0].kappa != layers[0].matrices[1].kappa


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "pruned"])
@pytest.mark.parametrize("attention", ["fused", "separate"])
def test_what_a_parametrization_computes_is_measured_as_it_is_read_and_not_corrected(how, attention):
    model = model_of(attention)
    plain = numbers_of(model_of(attention))[1]
    module = model.blocks[0].attn.qkv if attention == "fused" else model.blocks[0].attn.q_proj
    if how == "pruned":
        prune.l1_unstructured(module, "weight", 0.3)
    else:
        getattr(parametrizations, how)(module)
    model.eval()
    survey, numbers = numbers_of(model)
    query = numbers.layers[0].matrices[0]
    assert query.kappa == pytest.approx(reference(module.weight[:32].detach())[0], rel=1e-3)
    assert query.after == {}
    assert query.reason is None
    assert "is not a plain floating-point parameter" in query.fixed
    assert list(numbers.layers[0].softmax) == [AS_IT_IS]
    assert 0 < numbers.layers[0].softmax[AS_IT_IS].share <= 1
    assert numbers.layers[1] == plain.layers[1]
    assert "  blocks.0.attn: no correction: 'weight' of " in "\n".join(format_numbers(survey, numbers))


def test_weights_that_were_not_left_to_chance_are_pointed_out():
    model = model_of("separate")
    survey, numbers = numbers_of(model)
    assert numbers.conditioned is None
    condition_(model, WeightRule())
    fold_(model)
    survey, numbers = numbers_of(model)
    assert numbers.carried == ()
    assert numbers.conditioned == pytest.approx(2, abs=0.1)
    assert "as the effective weights of a conditioned run are" in "\n".join(format_numbers(survey, numbers))
