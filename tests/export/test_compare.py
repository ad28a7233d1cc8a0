"""How differences of outputs are judged."""

import math

import pytest
import torch

from lit_cond.errors import ConfigurationError
from lit_cond.export.compare import largest_difference, tensors_in
from lit_cond.export.example import batch_size, resized
from lit_cond.functional.tokens import token_correction
from lit_cond.surgery.samples import Sample


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([1.0, -4.0], [1.0, -4.0], 0.0), ([1.0, -4.0], [1.0, -3.0], 0.25), ([0.0], [0.5], 0.5),
     ([math.nan, 1.0], [math.nan, 1.0], 0.0), ([math.nan, 1.0], [0.0, 1.0], math.inf),
     ([math.inf, 2.0], [math.inf, 1.0], 0.5), ([math.inf], [-math.inf], math.inf), ([1.0], [math.inf], math.inf),
     ([1.0, 2.0], [1.0], math.inf), ([], [], 0.0), ([3], [3], 0.0), ([True], [False], 1.0)],
)  # fmt: skip
def test_difference_in_parts_of_the_largest_output(a, b, expected):
    assert largest_difference([torch.tensor(a)], [torch.tensor(b)]) == expected


def test_another_number_of_outputs():
    assert largest_difference([torch.ones(2)], [torch.ones(2), torch.ones(2)]) == math.inf


def test_tensors_in_nested_outputs():
    values = {"a": torch.ones(1), "b": (torch.ones(2), [None, torch.ones(3)]), "c": 4}
    assert [len(tensor) for tensor in tensors_in(values)] == [1, 2, 3]


def test_a_batch_of_another_size_has_other_values():
    scale = torch.ones(3)
    sample = Sample((torch.arange(8.0).view(2, 4), torch.tensor([5, 6])), {"scale": scale, "flag": True})
    longer = resized(sample, 3)
    assert longer.args[0].tolist() == [[3, 2, 1, 0], [7, 6, 5, 4], [3, 2, 1, 0]]
    assert longer.args[1].tolist() == [5, 6, 5]
    assert longer.kwargs == {"scale": scale, "flag": True}
    with pytest.raises(ConfigurationError, match="no tensor with an axis"):
        batch_size(Sample((torch.tensor(1.0),)))


def tokens_of(condition):
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(4, n, 17, dtype=torch.float64))[0] for n in (17, 64))
    return ((u * torch.logspace(0, -math.log10(condition), 17, dtype=torch.float64)) @ v.mT).float()


@pytest.mark.parametrize(("condition", "lost"), [(1e2, 1e-6), (1e4, 5e-5), (1e5, 5e-4)])
def test_why_tokens_are_corrected_in_float64_in_onnx(condition, lost):
    tokens = tokens_of(condition)
    exact = token_correction(tokens, backend="gram")
    scale = float(exact.abs().max())
    in_float32 = float((token_correction(tokens, backend="products") - exact).abs().max()) / scale
    in_float64 = float((token_correction(tokens.double(), backend="products") - exact).abs().max()) / scale
    assert in_float64 < 1e-6
    assert in_float32 > lost
