"""Models that once misled the tracer: what their authors may write, and what may go wrong while they run."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_cond.callbacks import SpectralConditioning
from lit_cond.errors import NoMatchingTargetError
from lit_cond.surgery import find_attention
from lit_cond.surgery.survey import survey_attention
from tests.tiny import make_loader, make_module, make_trainer

WIDTH = 16


def heads(x, count=2):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attend(q, k, v, count=2):
    q, k, v = (heads(x, count) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Named(nn.Module):
    """Three projections under the usual names."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return self.mix(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def mix(self, q, k, v):
        return attend(q, k, v)


def tokens(*shape, seed=0):
    return torch.randn(*(shape or (2, 5, WIDTH)), generator=torch.Generator().manual_seed(seed))


def rows(model, x=None):
    (site,) = find_attention(model, sample=tokens() if x is None else x)
    return {role: [(v.owner_name, str(v.layout.rows)) for v in views] for role, views in site.views.items()}


WHOLE = {role: [(f"{role[0]}_proj", f"[0:{WIDTH})")] for role in ("query", "key", "value")}


class Joined(nn.Module):
    """Reads three weights as one."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        weight = torch.cat([self.a.weight, self.b.weight, self.c.weight])
        return attend(*F.linear(x, weight).chunk(3, -1), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_joined_weight_do_not_depend_on_what_its_numbers_can_hold(dtype):
    found = rows(Joined(512).to(dtype), tokens(2, 4, 512).to(dtype))
    assert found == {r: [(n, "[0:512)")] for r, n in zip(("query", "key", "value"), "abc", strict=True)}


def test_rows_of_a_wide_fused_weight_in_bfloat16():
    model = nn.MultiheadAttention(303, 3, batch_first=True).bfloat16()
    x = tokens(2, 4, 303).bfloat16()
    assert [group[0][1] for group in rows(model, (x, x, x)).values()] == ["[0:303)", "[303:606)", "[606:909)"]


class Rectified(Named):
    def mix(self, q, k, v):
        return attend(F.relu(q), F.relu(k), F.relu(v))


class Dropped(Named):
    """Forgets to say that it is not training."""

    def mix(self, q, k, v):
        return attend(F.dropout(q, 0.5), k, v)


@pytest.mark.parametrize("make", [Rectified, Dropped])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_units_that_are_off_hide_no_rows(make, length):
    for seed in range(3):
        torch.manual_seed(seed)
        assert rows(make(), tokens(1, length, WIDTH, seed=seed)) == WHOLE


class Gated(Named):
    """A gain that begins at zero, some of it."""

    def __init__(self, zeros):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.gain.data[:zeros] = 0

    def mix(self, q, k, v):
        return attend(q * self.gain, k, v)


@pytest.mark.parametrize("zeros", [0, WIDTH])
def test_a_gate_of_zeros_hides_nothing_that_the_table_knows(zeros):
    assert rows(Gated(zeros)) == WHOLE


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Rotated(Named):
    def mix(self, q, k, v):
        return attend(Custom.apply(q), Custom.apply(k), v)


def test_a_function_with_its_own_gradient_is_followed():
    assert rows(Rotated()) == WHOLE


class Heads(nn.Module):
    """One Linear for each head and role."""

    def __init__(self, count=12, width=48):
        super().__init__()
        self.count = count
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(width, width // count) for _ in range(count)) for _ in range(3)
        )

    def forward(self, x):
        joined = [torch.cat([layer(x) for layer in layers], -1) for layers in (self.q, self.k, self.v)]
        return attend(*joined, self.count)


def test_many_projections_before_one_attention_are_all_found():
    found = rows(Heads(), tokens(2, 4, 48))
    assert [len(group) for group in found.values()] == [12, 12, 12]


@torch.library.custom_op("lit_cond_tests::flash", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v).contiguous()


@flash.register_fake
def _(q, k, v):
    return torch.empty_like(q)


flash.register_autograd(lambda ctx, gradient: (gradient, gradient, gradient))


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        q, k, v = (heads(p(x), 4) for p in (self.q_proj, self.k_proj, self.v_proj))
        return flash(q, k, v).transpose(1, 2).flatten(2)


def test_a_kernel_that_can_not_be_looked_into_leaves_the_table_in_charge(tmp_path, caplog):
    survey = survey_attention(Opaque(), tokens(2, 5, 32))
    assert [site.traced for site in survey.sites] == [False]
    assert "kernel" in survey.notes[0]
    module = make_module()
    module.net.blocks[0].attn = Opaque()
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, [SpectralConditioning()], max_steps=2).fit(module, make_loader())
    assert "1 of 2 layers confirmed at the first batch; not reached: net.blocks.0.attn" in caplog.text


def test_a_contradicted_layer_can_be_left_out():
    class Wrong(Named):
        def mix(self, q, k, v):
            return attend(q[..., :8], k[..., :8], v)

    model = nn.ModuleDict({"wrong": Wrong(), "right": Named()})
    model.forward = lambda x: model["right"](model["wrong"](x))
    assert [s.name for s in find_attention(model, exclude="wrong", sample=tokens())] == ["right"]


class Remembers(Named):
    """Keeps a running mean and a cache, without gradients."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.cache = torch.zeros(2, 10, WIDTH)

    def mix(self, q, k, v):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(k.mean((0, 1)), alpha=0.1)
            self.cache[:, : k.shape[1]] = k
        return attend(q, k, v)


def test_buffers_and_caches_keep_no_trace_of_a_pass():
    model = Remembers()
    assert rows(model) == WHOLE
    for tensor in (model.mean, model.cache):
        assert tensor.grad_fn is None
        assert not tensor.any()
    copy.deepcopy(model)


def test_why_nothing_was_found_is_in_the_error():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.example_input_array = tokens().double()

        def forward(self, x):
            return attend(self.one(x), *self.two(x).chunk(2, -1))

    with pytest.raises(NoMatchingTargetError, match=r"no attention layers.*'Plain' was not traced: RuntimeError"):
        find_attention(Plain())


class Residual(Named):
    def forward(self, x):
        return x + super().forward(x)


class Tries(nn.Module):
    """Catches what a fast path raises."""

    class Fast(nn.Module):
        def forward(self, x):
            raise RuntimeError("no kernel")

    def __init__(self):
        super().__init__()
        self.fast = self.Fast()
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            x = self.fast(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_call_that_failed_and_was_caught_leaves_nothing_behind():
    survey = survey_attention(Tries(), tokens())
    assert [site.name for site in survey.sites] == ["blocks.0", "blocks.1"]
    assert list(survey.entrances) == ["blocks.0"]


def test_a_scripted_part_is_no_obstacle():
    model = nn.Sequential(Named(), torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))).train()
    (site,) = find_attention(model, sample=tokens())
    assert site.traced
    assert model[1].training
