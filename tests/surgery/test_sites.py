"""Layouts: a matrix read out of a tensor and written back into its place, against indices written by hand."""

import pytest
import torch
from torch.nn import functional as F

from lit_cond.surgery import MatrixLayout, RowSet, WeightRule, condition_, find_attention
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.sites import WeightView
from lit_cond.surgery.tracing.rows import row_set


def numbered(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


LAYOUTS = {
    # name: (tensor, layout, how the matrix is read by hand)
    "linear": (numbered(6, 4), MatrixLayout(RowSet.span(2, 3)), lambda t: t[2:5]),
    "blocks": (numbered(8, 3), MatrixLayout(RowSet(1, 2, 4, 2)), lambda t: t[[1, 2, 5, 6]]),
    "transposed": (numbered(4, 6), MatrixLayout(RowSet.span(3, 3), True), lambda t: t[:, 3:].T),
    "in, heads": (
        numbered(5, 2, 3),
        MatrixLayout(RowSet(0, 2, 3, 2), True, 2),
        lambda t: t[..., :2].flatten(1).T,
    ),
    "heads, width, in": (numbered(2, 3, 5), MatrixLayout(RowSet.span(3, 3), False, 2), lambda t: t[1]),
    "kernel": (numbered(4, 3, 2, 2), MatrixLayout(RowSet.span(0, 2)), lambda t: t[:2].reshape(2, 12)),
    "grouped": (
        numbered(4, 2, 1),
        MatrixLayout(RowSet.span(0, 4), groups=2),
        lambda t: torch.block_diag(t[:2, :, 0], t[2:, :, 0]),
    ),
    "one group": (numbered(4, 2, 1), MatrixLayout(RowSet.span(2, 2), groups=2), lambda t: t[2:, :, 0]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_is_read_and_written_where_it_stands(name):
    tensor, layout, by_hand = LAYOUTS[name]
    matrix = layout.matrix(tensor)
    assert torch.equal(matrix, by_hand(tensor))
    view = WeightView(torch.nn.ParameterDict({"w": torch.nn.Parameter(tensor)}), "w", layout)
    assert view.in_features == matrix.shape[1]
    written = torch.zeros_like(tensor)
    layout.scatter_(written, torch.where(matrix == 0, 7.0, matrix))
    assert torch.equal(written[written != 0].sort().values, matrix[matrix != 0].sort().values)
    assert torch.equal(layout.matrix(written), matrix)


def test_a_grouped_convolution_is_the_map_that_it_computes():
    weight = torch.randn(6, 2, 1, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(1))
    matrix = MatrixLayout(RowSet.span(0, 6), groups=3).matrix(weight)
    assert torch.allclose(F.conv1d(x, weight, groups=3)[0], matrix @ x[0], atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([0, 1, 2], RowSet.span(0, 3)),
        ([1, 2, 5, 6], RowSet(1, 2, 4, 2)),
        ([7], RowSet.span(7, 1)),
        ([0, 3, 4], None),
        ([*range(0, 80, 3), 79], None),
    ],
)
def test_rows_are_described_by_few_numbers(rows, expected):
    mask = torch.zeros(8 if max(rows) < 8 else 80, dtype=torch.bool)
    mask[rows] = True
    assert row_set(mask) == expected


class GroupedAttention(torch.nn.Module):
    """Projections by grouped 1x1 convolutions, as in SqueezeBERT."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Conv1d(16, 16, 1, groups=4) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(1, (2, 8)).mT for p in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v)


def test_grouped_weights_are_conditioned_to_two_as_one_matrix():
    torch.manual_seed(0)
    model = GroupedAttention()
    model.example_input_array = torch.randn(2, 16, 5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    condition_(model, WeightRule())
    (site,) = find_attention(model)
    for role, view in site:
        assert view.layout.groups == 4, role
        values = torch.linalg.svdvals(effective_matrix(view))
        assert float(values[0] / values[-1]) <= 2.0001
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
