"""The closed form of a head's Jacobian against autograd in float64."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_cond.errors import ConfigurationError
from lit_cond.functional import (
    attention_jacobian_gram,
    attention_jacobian_singular_values,
    attention_probabilities,
)
from lit_cond.functional.jacobian import GRAM_LIMIT

INF, NAN = float("inf"), float("nan")


class Head:
    """One head of random weights: what the closed form is given, and J by autograd, which knows nothing of it."""

    def __init__(self, n=5, m=None, width=6, d=3, v=4, cross=False, mask=None, maps=(), bias=False, seed=0, sink=None):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        m = n if m is None else m
        self.scale, self.mask, self.sink = d**-0.5, mask, sink
        tokens = draw(n, width)
        self.tokens = (tokens, draw(m, width + 2), draw(m, width + 1)) if cross else (tokens, tokens, tokens)
        self.weights = [draw(rows, t.shape[1]) / 2 for rows, t in zip((d, d, v), self.tokens, strict=True)]
        self.biases = [draw(rows) if bias else torch.zeros(rows, dtype=torch.float64) for rows in (d, d, v)]
        self.maps = {
            name: draw(t, rows, rows) for name, t, rows in (("q", n, d), ("k", m, d), ("v", m, v)) if name in maps
        }

    def operands(self, *weights):
        for name, x, w, b in zip("qkv", self.tokens, weights, self.biases, strict=True):
            u = x @ w.T + b
            yield torch.einsum("nab,nb->na", self.maps[name], u) if name in self.maps else u

    def softmax(self, q, k):
        scores = self.scale * q @ k.T
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -INF)
        if self.sink is not None:
            return torch.cat([scores, scores.new_full((len(q), 1), self.sink)], dim=1).softmax(dim=1)[:, :-1]
        return scores.softmax(dim=1)

    def output(self, *weights):
        q, k, v = self.operands(*weights)
        return (self.softmax(q, k) @ v).flatten()

    def jacobian(self):
        parts = torch.autograd.functional.jacobian(self.output, tuple(self.weights))
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def arguments(self, **changes):
        q, k, v = self.operands(*self.weights)
        names = ("query_tokens", "key_tokens", "value_tokens")
        given = dict(zip(names, self.tokens, strict=True))
        given |= {"query": q, "key": k, "value": v, "probabilities": self.softmax(q, k), "scale": self.scale}
        long = {"q": "query_maps", "k": "key_maps", "v": "value_maps"}
        return given | {long[name]: maps for name, maps in self.maps.items()} | changes


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


CASES = {
    "plain": {},
    "one token": {"n": 1},
    "one channel": {"d": 1, "v": 1},
    "wide values": {"v": 9},
    "narrow values": {"v": 1},
    "narrow tokens": {"width": 2},
    "wide tokens": {"width": 40},
    "many tokens": {"n": 12, "width": 4},
    "bias": {"bias": True},
    "causal": {"mask": causal(5)},
    "banded": {"mask": causal(5) & ~causal(5).tril(-2)},
    "cross": {"cross": True, "m": 7},
    "cross, one key": {"cross": True, "m": 1},
    "cross, fewer keys": {"cross": True, "m": 2},
    "cross, biased, hidden": {"cross": True, "m": 5, "mask": causal(5), "bias": True},
    "sink": {"sink": 0.5},
    "query maps": {"maps": "q"},
    "key maps": {"maps": "k"},
    "value maps": {"maps": "v"},
    "all maps": {"maps": "qkv"},
    "rotary, causal, biased": {"maps": "qk", "mask": causal(5), "bias": True},
    "cross with maps": {"maps": "qkv", "cross": True, "m": 7},
    "digits": {"n": 9, "width": 32, "d": 8, "v": 8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_gram_equals_autograd(case, seed):
    head = Head(**CASES[case], seed=seed)
    j = head.jacobian()
    torch.testing.assert_close(attention_jacobian_gram(**head.arguments()), j @ j.T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("route", ["gram", "factors"])
def test_singular_values_equal_autograd(case, route, monkeypatch):
    if route == "factors":
        monkeypatch.setattr("lit_cond.functional.jacobian.GRAM_LIMIT", 0.0)
    head = Head(**CASES[case], seed=2)
    j = head.jacobian()
    found = attention_jacobian_singular_values(**head.arguments())
    true = torch.linalg.svdvals(j)
    rank = int((true > 1e-11 * true[0]).sum())
    assert found.exact
    assert found.rows == j.shape[0]
    assert found.parameters == j.shape[1]
    assert found.rank == rank
    torch.testing.assert_close(found.values[:rank], true[:rank], rtol=1e-6, atol=0)
    assert found.condition == (pytest.approx(float(true[0] / true[-1]), rel=1e-6) if rank == len(j) else INF)
    assert found.smallest_nonzero == pytest.approx(float(true[rank - 1]), rel=1e-6)


@pytest.mark.parametrize("maps", ["", "k", "qkv"])
def test_rows_are_a_principal_block(maps):
    head = Head(n=6, v=3, maps=maps)
    chosen = torch.tensor([4, 0, 5])
    index = (chosen[:, None] * 3 + torch.arange(3)).flatten()
    whole = attention_jacobian_gram(**head.arguments())
    block = attention_jacobian_gram(**head.arguments(rows=chosen))
    torch.testing.assert_close(block, whole[index][:, index], rtol=1e-12, atol=1e-13)


def test_sums_over_pairs_of_keys_may_be_cut(monkeypatch):
    head = Head(n=6, maps="k")
    whole = attention_jacobian_gram(**head.arguments())
    monkeypatch.setattr("lit_cond.functional.head_derivatives._PAIRS", 6 * 6 * 4)
    torch.testing.assert_close(attention_jacobian_gram(**head.arguments()), whole, rtol=1e-12, atol=1e-13)


def graded(kappa, seed=0, **sizes):
    """A head whose tokens have singular values over some decades, so that its Jacobian is about as bad."""
    head = Head(**sizes, seed=seed)
    u, _, vh = torch.linalg.svd(head.tokens[0], full_matrices=False)
    k = min(head.tokens[0].shape)
    tokens = u * torch.logspace(0, -math.log10(kappa), k, dtype=torch.float64) @ vh
    head.tokens = (tokens,) * 3
    return head


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kappa", [1, 3, 1e1, 3e1, 1e2, 3e2, 1e3, 3e3, 1e4, 1e5])
def test_ill_conditioned_jacobians(kappa, seed):
    head = graded(kappa, seed, n=8, width=16, d=4, v=4)
    true = torch.linalg.svdvals(head.jacobian())
    found = attention_jacobian_singular_values(**head.arguments())
    measured = float(true[0] / true[-1])  # up to some kappa ** 2
    assert measured < 1e11
    assert found.condition == pytest.approx(measured, rel=1e-3 if measured < 1e6 else 1e-2)
    torch.testing.assert_close(found.values, true, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kappa", [1e9, 1e12])
def test_beyond_float64_is_infinity(kappa):
    # Singular values down to eps(float64) of the largest: what LAPACK returns for them is noise.
    found = attention_jacobian_singular_values(**graded(kappa, seed=1, n=8, width=16, d=4, v=4).arguments())
    assert found.condition == INF or found.condition > 1e13
    assert 20 <= found.rank <= 32


def test_both_routes_are_taken():
    conditions = [
        attention_jacobian_singular_values(**graded(kappa, n=8, width=16, d=4, v=4).arguments()).condition
        for kappa in (1e1, 1e4)
    ]
    assert conditions[0] < GRAM_LIMIT < conditions[1]


def test_more_outputs_than_parameters():
    head = Head(n=12, width=2, d=2, v=2)
    found = attention_jacobian_singular_values(**head.arguments())
    assert (found.rows, found.parameters, found.rank_bound) == (24, 12, 12)
    assert found.condition == INF
    true = torch.linalg.svdvals(head.jacobian())
    rank = int((true > 1e-12 * true[0]).sum())
    assert found.rank == rank
    assert rank <= 12
    assert found.smallest_nonzero == pytest.approx(float(true[rank - 1]), rel=1e-8)


def test_repeated_tokens_make_it_singular():
    head = Head(n=4)
    tokens = head.tokens[0][[0, 1, 1, 2]]
    head.tokens = (tokens,) * 3
    for arguments in (head.arguments(), {k: v.float() if k != "scale" else v for k, v in head.arguments().items()}):
        found = attention_jacobian_singular_values(**arguments)
        assert found.condition == INF
        assert found.rank == 12
        assert found.smallest_nonzero > 1e-3


def test_orthonormal_tokens_under_uniform_attention_have_a_known_spectrum():
    # Queries of zero: M_i = s V^T S K is the same for all i, and L_i q_i^T vanishes.
    n, d = 4, 2
    x = torch.eye(n, dtype=torch.float64)
    key = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]], dtype=torch.float64)
    p = torch.full((n, n), 1 / n, dtype=torch.float64)
    query = torch.zeros(n, d, dtype=torch.float64)
    gram = attention_jacobian_gram(x, x, x, query, key, key, p, 1.0)
    m = key.T @ key / n  # both have mean zero: 0.5 I
    expected = torch.kron(x, m @ m.T) + torch.kron(torch.full((n, n), 1 / n, dtype=torch.float64), torch.eye(d))
    torch.testing.assert_close(gram, expected)
    found = attention_jacobian_singular_values(x, x, x, query, key, key, p, 1.0)
    assert found.condition == pytest.approx(math.sqrt((0.25 + 1) / 0.25))


def test_zero_tokens_have_a_zero_jacobian():
    zeros = torch.zeros(3, 4)
    p = torch.full((3, 3), 1 / 3)
    found = attention_jacobian_singular_values(zeros, zeros, zeros, zeros, zeros, zeros, p, 0.5)
    assert found.condition == INF
    assert found.rank == 0
    assert found.smallest_nonzero == 0
    assert (found.values == 0).all()


@pytest.mark.parametrize("scale", [1e-60, 1e-20, 1e20, 1e60])
def test_units_do_not_matter(scale):
    # W_V and the tokens of the values in another unit: J has one scale only if query and key terms follow.
    head = Head(n=4)
    tokens = head.tokens[0]
    base = attention_jacobian_singular_values(**head.arguments())
    arguments = head.arguments(value_tokens=tokens * scale)
    arguments["value"] = arguments["value"] * scale
    found = attention_jacobian_singular_values(**arguments)
    torch.testing.assert_close(found.values / scale, base.values, rtol=1e-6, atol=0)
    assert found.condition == pytest.approx(base.condition, rel=1e-6)


@pytest.mark.parametrize("size", [1e-120, 1e-38, 1e30, 1e100])
@pytest.mark.parametrize("maps", ["", "qkv"])
def test_sizes_that_overflow_when_squared(size, maps):
    head = Head(n=4, maps=maps)
    arguments = head.arguments()
    for name in ("query_tokens", "key_tokens", "value_tokens"):
        arguments[name] = arguments[name] * size
    found = attention_jacobian_singular_values(**arguments)
    base = attention_jacobian_singular_values(**head.arguments())
    torch.testing.assert_close(found.values / size, base.values, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "name", ["query_tokens", "key_tokens", "value_tokens", "query", "key", "value", "probabilities"]
)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_non_finite_numbers_give_nan(name, bad):
    arguments = Head().arguments()
    arguments[name] = arguments[name].clone()
    arguments[name][1, 0] = bad
    assert attention_jacobian_gram(**arguments).isnan().all()
    found = attention_jacobian_singular_values(**arguments)
    assert found.values.isnan().all()
    assert found.rows == 20
    assert math.isnan(found.condition)
    assert math.isnan(found.rank)
    assert math.isnan(found.smallest_nonzero)


@pytest.mark.parametrize("maps", ["", "qkv"])
def test_h1_padding_changes_nothing(maps):
    head = Head(n=4, maps=maps)
    alone = attention_jacobian_singular_values(**head.arguments())
    for order in (slice(None), slice(None, None, -1)):  # padded right, padded left
        arguments = head.arguments()
        for name, tensor in arguments.items():
            if name == "scale":
                continue
            widths = [2 if dim == 0 or (name == "probabilities" and dim == 1) else 0 for dim in range(tensor.ndim)]
            filler = 0.0 if name == "probabilities" else NAN
            grown = tensor.new_full([size + more for size, more in zip(tensor.shape, widths, strict=True)], filler)
            grown[tuple(slice(size) for size in tensor.shape)] = tensor
            dims = [dim for dim, more in enumerate(widths) if more]
            arguments[name] = grown if order == slice(None) else grown.flip(dims)
        padded = attention_jacobian_singular_values(**arguments)
        assert padded.exact
        assert len(padded.tokens) == 4
        torch.testing.assert_close(padded.values, alone.values, rtol=1e-9, atol=0)


def test_h2_nothing_to_see_is_an_empty_spectrum():
    head = Head(n=3)
    found = attention_jacobian_singular_values(**head.arguments(probabilities=torch.zeros(3, 3)))
    assert found.rows == 0
    assert found.tokens == ()
    assert math.isnan(found.condition)
    assert found.rank == 0


def test_a_sample_is_spread_and_says_so():
    head = Head(n=10, v=4)
    whole = attention_jacobian_singular_values(**head.arguments())
    found = attention_jacobian_singular_values(**head.arguments(), max_rows=15)
    assert found.tokens == (1, 5, 8)
    assert not found.exact
    assert found.rows == 12
    assert found.condition <= whole.condition
    some = attention_jacobian_singular_values(**head.arguments(), max_rows=15, rows=torch.tensor([9, 2, 2]))
    assert some.tokens == (2, 9)
    assert some.exact


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 7), v=st.integers(1, 4), maps=st.sampled_from(["", "qk"]))
def test_blocks_interlace(seed, n, v, maps):
    head = Head(n=n, v=v, seed=seed, maps=maps)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    blocks = [attention_jacobian_singular_values(**head.arguments(), rows=order[:k]) for k in range(1, n + 1)]
    for small, large in itertools.pairwise(blocks):
        assert 1 <= small.condition <= large.condition * (1 + 1e-6)
        assert small.values[0] <= large.values[0] * (1 + 1e-9)
        assert small.values[-1] >= large.values[-1] * (1 - 1e-6) - 1e-12 * large.values[0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), factor=st.floats(1e-3, 1e3))
def test_rotations_of_tokens_and_values_change_nothing(seed, factor):
    head = Head(n=4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    base = attention_jacobian_singular_values(**head.arguments())
    turn = [torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64))[0] for k in (6, 4, 3)]
    given = head.arguments()
    tokens = given["query_tokens"] @ turn[0] * factor
    value, query, key = given["value"] @ turn[1], given["query"] @ turn[2], given["key"] @ turn[2]
    changed = {"value": value, "query": query, "key": key}
    changed |= dict.fromkeys(("query_tokens", "key_tokens", "value_tokens"), tokens)
    found = attention_jacobian_singular_values(**(given | changed))
    torch.testing.assert_close(found.values, base.values * factor, rtol=1e-6, atol=1e-12 * factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_measured_as_the_numbers_they_hold(dtype):
    given = {k: v.to(dtype) if k != "scale" else v for k, v in Head().arguments().items()}
    upcast = {k: v.double() if k != "scale" else v for k, v in given.items()}
    found = attention_jacobian_singular_values(**given)
    assert found.values.dtype == torch.float64
    torch.testing.assert_close(found.values, attention_jacobian_singular_values(**upcast).values, rtol=0, atol=0)
    assert found.rtol == pytest.approx(2**-23)


def test_no_gradient_and_autocast_are_needed():
    head = Head()
    plain = attention_jacobian_gram(**head.arguments())
    head.weights = [w.requires_grad_() for w in head.weights]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gram = attention_jacobian_gram(**head.arguments(**{"query": Head().arguments()["query"].requires_grad_()}))
    assert not gram.requires_grad
    assert gram.dtype == torch.float64
    assert gram.shape == plain.shape


@pytest.mark.parametrize("width", [64, 768])
def test_a_large_head_is_sampled(width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(197, width, generator=generator)
    q, k, v = (x @ torch.randn(width, 64, generator=generator) / width**0.5 for _ in range(3))
    p = attention_probabilities(q, k, 0.125)
    found = attention_jacobian_singular_values(x, x, x, q, k, v, p, 0.125, max_rows=128)
    assert found.rows == 128
    assert 1 < found.condition < 1e5


def test_no_convergence_takes_the_other_route(monkeypatch):
    head = Head()
    base = attention_jacobian_singular_values(**head.arguments())

    def fails(a):
        raise torch.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails)
    torch.testing.assert_close(attention_jacobian_singular_values(**head.arguments()).values, base.values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(5, 2)}, "query and key have 2 and 3 channels"),
        ({"query": torch.zeros(4, 3)}, r"query has 4 rows, .* ask for 5"),
        ({"value_tokens": torch.zeros(2, 3)}, r"value_tokens has 2 rows"),
        ({"value": torch.zeros(2, 5, 3)}, r"value of shape \(2, 5, 3\)"),
        ({"probabilities": torch.zeros(5)}, r"probabilities of shape \(5,\)"),
        ({"probabilities": torch.tensor(0.0)}, r"probabilities of shape \(\)"),
        ({"rows": torch.tensor([5])}, "rows .* from 0 to 4"),
        ({"rows": torch.tensor([0.5])}, "rows .*float32"),
        ({"key_maps": torch.zeros(5, 2, 2)}, r"key_maps .* give \(5, 3, 3\)"),
    ],
)
@pytest.mark.parametrize("function", [attention_jacobian_gram, attention_jacobian_singular_values])
def test_bad_arguments(function, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        function(**Head().arguments(**changes))


def test_max_rows_must_hold_a_token():
    with pytest.raises(ConfigurationError, match=r"max_rows=3 .* at least 4"):
        attention_jacobian_singular_values(**Head().arguments(), max_rows=3)


@pytest.mark.parametrize("kind", ["plain", "tokens of rank one", "key maps"])
def test_memory_of_a_large_head_is_what_is_documented(kind):
    # A process of its own, whose peak nothing else has raised. Tokens of rank one take the route of the factors.
    program = f"""
import resource, torch
from lit_cond.functional import attention_jacobian_singular_values, attention_probabilities
kind, max_rows, m, width, d = {kind!r}, 1024, 197, 768, 64
x = torch.randn(m, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
if kind == "tokens of rank one":
    x = x[:1] * torch.linspace(1, 2, m, dtype=torch.float64)[:, None]
q, k, v = (x @ torch.randn(width, d, dtype=torch.float64) / width for _ in range(3))
p = attention_probabilities(q, k, 0.125)
maps = torch.eye(d, dtype=torch.float64).repeat(m, 1, 1) if kind == "key maps" else None
torch.linalg.eigvalsh(torch.eye(300, dtype=torch.float64))  # libraries that load late
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = attention_jacobian_singular_values(x, x, x, q, k, v, p, 0.125, max_rows=max_rows, key_maps=maps)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
assert found.rows == max_rows
inputs = 8 * (3 * x.numel() + 3 * q.numel() + p.numel()) + (0 if maps is None else 16 * maps.numel())
documented = 8 * max_rows * (14 * max_rows + 3 * m + 2 * min(m, width) + (0 if maps is None else m)) + inputs
print(used / 2**20, documented / 2**20)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    used, documented = map(float, result.stdout.split())
    assert used < documented + 16
    assert documented < 1000
