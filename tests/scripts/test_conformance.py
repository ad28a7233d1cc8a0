"""The judge of the conformance sweep: right sites are right, and each kind of mistake is seen."""

import json
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_cond.errors import NoMatchingTargetError, UnknownAttentionError
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.sites import AttentionSite, MatrixLayout, RowSet, WeightView
from scripts import conformance
from scripts.conformance_oracle import Bench, judge_model
from scripts.conformance_oracle.worker import Entry, examine, isolated, load_source
from scripts.model_zoo import ZooModel

WIDTH, HEADS, TOKENS = 12, 3, 5
HEAD = WIDTH // HEADS
ROLES = ("query", "key", "value")


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.make()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.attend(x))


class Separate(Attention):
    def make(self):
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def attend(self, x):
        return joined(F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x))))


class Eager(Separate):
    """Key times query: what stands on the left is the key, and the logits are turned round before the softmax."""

    def attend(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        logits = torch.einsum("bhkd,bhqd->bhkq", k, q).mT * HEAD**-0.5
        logits = logits + torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
        return joined(logits.softmax(-1) @ v)


class Fused(Attention):
    """Three blocks; the keys are normalised."""

    def make(self):
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def attend(self, x):
        q, k, v = (heads(y) for y in self.qkv(x).chunk(3, -1))
        return joined(F.scaled_dot_product_attention(q, F.layer_norm(k, (HEAD,)), v))


class Interleaved(Fused):
    """The rows of a head stand together: [q | k | v] for each head."""

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, HEAD)).permute(3, 0, 2, 1, 4).unbind(0)
        return joined(F.scaled_dot_product_attention(q, k, v))


class Transposed(Attention):
    """Square weights stored as (in, out)."""

    def make(self):
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))

    def attend(self, x):
        flat = x.flatten(0, 1)
        q, k, v = (heads(torch.addmm(torch.zeros(WIDTH), flat, w).view_as(x)) for w in self.weights)
        return joined(F.scaled_dot_product_attention(q, k, v))


class HeadAxes(Attention):
    """Weights (in, heads, head width), read by einsum; a second logit term with keys of positions."""

    def make(self):
        self.q, self.k, self.v, self.r = (nn.Parameter(torch.randn(WIDTH, HEADS, HEAD)) for _ in range(4))
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def attend(self, x):
        q, k, v = (torch.einsum("bnc,chd->bnhd", x, w) for w in (self.q, self.k, self.v))
        logits = torch.einsum("bihd,bjhd->bhij", q, k)
        logits = logits + torch.einsum("bihd,jhd->bhij", q, torch.einsum("nc,chd->nhd", self.positions, self.r))
        return torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v).flatten(2)


class Channels(Fused):
    """Softmax over channels, talking heads around it."""

    def make(self):
        super().make()
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Conv2d(HEADS, HEADS, 1)

    def attend(self, x):
        q, k, v = (heads(y).mT for y in self.qkv(x).chunk(3, -1))
        logits = self.before((q @ k.mT).movedim(1, -1)).movedim(-1, 1)
        return joined((self.after(logits.softmax(-1)) @ v).mT)


class SharedKeyValue(Attention):
    """Keys are the values, one head of them for all queries."""

    def make(self):
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEAD)

    def attend(self, x):
        kv = self.kv(x)[:, None]
        return joined(F.scaled_dot_product_attention(heads(self.q(x)), kv, kv, enable_gqa=True))


class Latent(Attention):
    """Keys have a part by two maps in series and a part from further rows of the first map."""

    def make(self):
        self.q, self.down, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 6 + HEAD), nn.Linear(6, 2 * WIDTH)

    def attend(self, x):
        latent, position = self.down(x).split((6, HEAD), -1)
        k, v = heads(self.up(latent)).split((HEAD, HEAD), -1)
        k = torch.cat((k, position[:, None].expand(-1, HEADS, -1, -1)), -1)
        return joined(F.scaled_dot_product_attention(heads(self.q(x)), k, v))


class Gated(Attention):
    """Half of the rows of the query's weight are a gate."""

    def make(self):
        self.q, self.k, self.v = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x):
        q, gate = heads(self.q(x)).split((HEAD, HEAD), -1)
        return joined(F.scaled_dot_product_attention(q, heads(self.k(x)), heads(self.v(x))) * gate.sigmoid())


class Torch(Attention):
    def make(self):
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def attend(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


class TorchWithWeights(Torch):
    def attend(self, x):
        return self.mha(x, x, x)[0]


class Terms(Separate):
    """Logits with a second term of other, narrower queries and keys; the largest logit is subtracted."""

    def make(self):
        super().make()
        self.q2, self.k2 = nn.Linear(WIDTH, 2 * HEADS), nn.Linear(WIDTH, 2 * HEADS)

    def attend(self, x):
        logits = heads(self.q(x)) @ heads(self.k(x)).mT + heads(self.q2(x)) @ heads(self.k2(x)).mT
        return joined((logits - logits.max()).softmax(-1) @ heads(self.v(x)))


class BothWays(Separate):
    """The logits of one attention, turned round, are those of a second one."""

    def make(self):
        super().make()
        self.v2 = nn.Linear(WIDTH, WIDTH)

    def attend(self, x):
        logits = heads(self.q(x)) @ heads(self.k(x)).mT
        back = logits.mT - logits.max()
        return joined(logits.softmax(-1) @ heads(self.v(x)) + back.softmax(-1) @ heads(self.v2(x)))


class Chosen(Separate):
    """Only the queries that differ most from the mean key are used."""

    def attend(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        best = (q @ k.mean(2, keepdim=True).mT).squeeze(-1).topk(2, -1).indices
        few = q.gather(2, best[..., None].expand(-1, -1, -1, HEAD))
        return joined(
            v.mean(2, keepdim=True)
            .expand_as(v)
            .scatter(2, best[..., None].expand(-1, -1, -1, HEAD), F.scaled_dot_product_attention(few, k, v))
        )


class FromZeros(Separate):
    """What is projected is zero, up to a position that the query and the key get."""

    def make(self):
        super().make()
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def attend(self, x):
        zeros = x * 0
        q, k, v = heads(self.q(zeros) + self.position), heads(self.k(zeros + self.position)), heads(self.v(zeros))
        return joined(F.scaled_dot_product_attention(q, k, v))


class Bare(Separate):
    """The layer's own attention, then one without any weight."""

    def forward(self, x):
        x = super().forward(x)
        return x + self.refine(x)

    def make(self):
        super().make()
        self.refine = BarePooling()


class BarePooling(nn.Module):
    def forward(self, x):
        return joined(F.scaled_dot_product_attention(heads(x), heads(x), heads(x)))


class Pooling(Attention):
    """The query is a parameter."""

    def make(self):
        self.kv, self.query = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))

    def attend(self, x):
        k, v = (heads(y) for y in self.kv(x).chunk(2, -1))
        return joined(F.scaled_dot_product_attention(heads(self.query.expand(len(x), -1, -1)), k, v))


class Model(nn.Module):
    def __init__(self, layer, depth=2, calls=1):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.calls = calls

    def forward(self, x):
        x = self.embed(x)
        for _ in range(self.calls):
            for layer in self.layers:
                x = layer(x)
        return x


def view(module, rows, name="weight", **layout):
    rows = rows if isinstance(rows, RowSet) else RowSet.span(*rows)
    return WeightView(module, name, MatrixLayout(rows, **layout), type(module).__name__)


def thirds(module, order=(0, 1, 2), **kwargs):
    return [view(module, (i * WIDTH, WIDTH), **kwargs) for i in order]


def whole(*modules, rows=WIDTH):
    return [view(module, (0, rows)) for module in modules]


def in_heads(module, part, parts, period):
    return view(module, RowSet(part * HEAD, parts * HEAD, period, HEADS))


def sites_of(model, make, **kwargs):
    kwargs = {"num_heads": HEADS, "num_kv_heads": HEADS, **kwargs}
    result = []
    for number, layer in enumerate(model.layers):
        views = [v if isinstance(v, tuple) else (v,) for v in make(layer)]
        result.append(AttentionSite(f"layers.{number}", layer, dict(zip(ROLES, views, strict=True)), **kwargs))
    return result


def judged(layer, make, *, calls=1, change=lambda sites: sites, **kwargs):
    torch.manual_seed(0)
    model = Model(layer, calls=calls)
    sites = change(sites_of(model, make, **kwargs))
    return judge_model(Bench(model, [Sample((torch.randn(2, TOKENS, 4),))]), sites)


def latent_views(layer):
    nope = in_heads(layer.up, 0, 1, 2 * HEAD)
    return view(layer.q, (0, 2 * WIDTH)), (nope, view(layer.down, (6, HEAD))), in_heads(layer.up, 1, 1, 2 * HEAD)


CASES = {
    "separate": (Separate, lambda m: whole(m.q, m.k, m.v), {}),
    "eager": (Eager, lambda m: whole(m.q, m.k, m.v), {}),
    "fused": (Fused, lambda m: thirds(m.qkv), {}),
    "interleaved": (Interleaved, lambda m: [in_heads(m.qkv, i, 1, 3 * HEAD) for i in range(3)], {}),
    "transposed": (
        Transposed,
        lambda m: [view(m.weights, (0, WIDTH), str(i), transposed=True) for i in range(3)],
        {},
    ),
    "head axes": (
        HeadAxes,
        lambda m: [view(m, (0, WIDTH), name, transposed=True, out_axes=2) for name in "qkv"],
        {},
    ),
    "channels": (Channels, lambda m: thirds(m.qkv), {"kind": "channel"}),
    "shared": (SharedKeyValue, lambda m: [*whole(m.q), *whole(m.kv, m.kv, rows=HEAD)], {"num_kv_heads": 1}),
    "latent": (Latent, latent_views, {"kind": "latent"}),
    "gated": (Gated, lambda m: [in_heads(m.q, 0, 1, 2 * HEAD), *whole(m.k, m.v)], {}),
    "torch": (Torch, lambda m: thirds(m.mha, name="in_proj_weight"), {}),
    "zeros": (FromZeros, lambda m: whole(m.q, m.k, m.v), {}),
    "terms": (
        Terms,
        lambda m: [
            (*whole(m.q), *whole(m.q2, rows=2 * HEADS)),
            (*whole(m.k), *whole(m.k2, rows=2 * HEADS)),
            *whole(m.v),
        ],
        {},
    ),
    "torch with weights": (TorchWithWeights, lambda m: thirds(m.mha, name="in_proj_weight"), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_right_sites_are_right(name):
    layer, make, kwargs = CASES[name]
    judgement = judged(layer, make, **kwargs)
    assert judgement.verdict == "right", judgement.findings
    assert (judgement.sites, judgement.cores, judgement.deep, judgement.dtype) == (2, 2, 2, "float64")
    assert judgement.evidence.total() == 2 * sum(len(v) if isinstance(v, tuple) else 1 for v in make(layer()))
    assert not judgement.findings


def test_a_site_that_uses_the_rows_of_another_in_other_roles():
    def change(sites, order=("k", "q", "v2")):
        views = [[(view,) for view in whole(*(getattr(site.module, name) for name in order))] for site in sites]
        more = [
            AttentionSite(f"{site.name}:2", site.module, dict(zip(ROLES, v, strict=True)), HEADS, HEADS)
            for site, v in zip(sites, views, strict=True)
        ]
        return [*sites, *more]

    judgement = judged(BothWays, lambda m: whole(m.q, m.k, m.v), change=change)
    assert (judgement.verdict, judgement.cores) == ("right", 4), judgement.findings
    judgement = judged(BothWays, lambda m: whole(m.q, m.k, m.v), change=lambda s: change(s, ("q", "k", "v2")))
    assert judgement.verdict == "wrong"


def test_a_choice_of_tokens_by_the_keys_is_no_mistake_and_swapped_roles_are():
    judgement = judged(Chosen, lambda m: whole(m.q, m.k, m.v))
    assert judgement.verdict == "right", judgement.findings
    assert any("a small one does not" in text for text in judgement.of("note"))
    assert judged(Chosen, lambda m: whole(m.k, m.q, m.v)).verdict == "wrong"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("shared", "latent", "terms")])
@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (1, 2, 0)])
def test_swapped_roles_are_wrong(name, order):
    layer, make, kwargs = CASES[name]
    judgement = judged(layer, lambda m: [make(m)[i] for i in order], **kwargs)
    assert judgement.verdict == "wrong"
    first = ROLES.index(next(role for role, i in zip(ROLES, order, strict=True) if role != ROLES[i]))
    assert f"a change reaches {ROLES[order[first]]} of core 0, not {ROLES[first]}" in judgement.of("wrong")[0]


def rows_of(module, *spans):
    return lambda m: [view(module(m), span) for span in spans]


MISTAKES = {
    "thirds of an interleaved weight": (Interleaved, lambda m: thirds(m.qkv), {}, "reaches query and key and value"),
    "interleaved rows of thirds": (
        Fused,
        lambda m: [in_heads(m.qkv, i, 1, 3 * HEAD) for i in range(3)],
        {},
        "reaches query and key and value",
    ),
    "one row too far": (
        Fused,
        rows_of(lambda m: m.qkv, (1, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH)),
        {},
        "reaches key of core 0, not query and key",
    ),
    "last row missing": (
        Fused,
        rows_of(lambda m: m.qkv, (0, WIDTH - 1), (WIDTH, WIDTH), (2 * WIDTH, WIDTH)),
        {"num_heads": None},
        f"row {WIDTH - 1} reaches the query too",
    ),
    "a head missing": (
        Interleaved,
        lambda m: [
            *(in_heads(m.qkv, i, 1, 3 * HEAD) for i in range(2)),
            view(m.qkv, RowSet(2 * HEAD, HEAD, 3 * HEAD, HEADS - 1)),
        ],
        {"num_kv_heads": None},
        f"row {3 * WIDTH - HEAD} reaches the value too",
    ),
    "the gate as query": (
        Gated,
        lambda m: [view(m.q, (0, 2 * WIDTH)), *whole(m.k, m.v)],
        {"num_heads": None},
        "reaches no attention",
    ),
    "the gate instead of the query": (
        Gated,
        lambda m: [in_heads(m.q, 1, 1, 2 * HEAD), *whole(m.k, m.v)],
        {},
        "reaches query and key and value of core 1",
    ),
    "the output for the value": (
        Separate,
        lambda m: whole(m.q, m.k, m.out),
        {},
        "reaches query and key and value of core 1, not value",
    ),
    "transposed, and it is not": (
        Separate,
        lambda m: [view(m.q, (0, WIDTH), transposed=True), *whole(m.k, m.v)],
        {},
        "axes swapped?",
    ),
    "not transposed, and it is": (
        Transposed,
        lambda m: [view(m.weights, (0, WIDTH), str(i), transposed=i != 1) for i in range(3)],
        {},
        "axes swapped?",
    ),
    "fewer output axes": (
        HeadAxes,
        lambda m: [
            view(m, (0, HEAD), "q", transposed=True),
            *(view(m, (0, WIDTH), name, transposed=True, out_axes=2) for name in "kv"),
        ],
        {},
        "inputs",
    ),
    "rows beyond the weight": (
        Separate,
        lambda m: [view(m.q, (1, WIDTH)), *whole(m.k, m.v)],
        {},
        "do not fit",
    ),
    "no such parameter": (
        Separate,
        lambda m: [view(m.q, (0, WIDTH), "kernel"), *whole(m.k, m.v)],
        {},
        "no parameter 'kernel'",
    ),
    "value rows for the key too": (
        Fused,
        lambda m: [thirds(m.qkv)[i] for i in (0, 2, 2)],
        {},
        "reaches value of core 0, not key and value",
    ),
    "tokens called channels": (Eager, lambda m: whole(m.q, m.k, m.v), {"kind": "channel"}, "sums over channels"),
    "channels called tokens": (Channels, lambda m: thirds(m.qkv), {}, "sums over tokens"),
    "too few heads": (Separate, lambda m: whole(m.q, m.k, m.v), {"num_heads": 2}, "12 rows as 2 heads"),
    "too many key heads": (Fused, lambda m: thirds(m.qkv), {"num_kv_heads": 4}, "12 rows as 4 heads"),
    "without the latent's own rows": (
        Latent,
        lambda m: [latent_views(m)[0], latent_views(m)[1][:1], latent_views(m)[2]],
        {"num_kv_heads": 2},
        "12 rows as 2 heads",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_wrong(name):
    layer, make, kwargs, words = MISTAKES[name]
    judgement = judged(layer, make, **kwargs)
    assert judgement.verdict == "wrong"
    assert any(words in text for text in judgement.of("wrong")), judgement.findings


def test_an_attention_without_a_site_is_wrong():
    judgement = judged(Separate, lambda m: whole(m.q, m.k, m.v), change=lambda sites: sites[:1])
    assert judgement.verdict == "wrong"
    assert judgement.of("wrong") == ["core 1 in layers.1 (Separate): no site for this attention"]


def test_a_layer_without_a_site_is_wrong_also_where_it_runs_several_times():
    judgement = judged(Separate, lambda m: whole(m.q, m.k, m.v), calls=2, change=lambda sites: sites[:1])
    assert judgement.of("wrong") == [f"core {i} in layers.1 (Separate): no site for this attention" for i in (1, 3)]


def test_an_operand_without_a_view_is_for_a_person_to_look_at():
    judgement = judged(Separate, lambda m: [(), *whole(m.k, m.v)])
    assert judgement.verdict == "partial"
    assert judgement.of("partial") == [
        f"core {i} in layers.{i} (Separate) query: no view changes this operand, though layers.{i}.q.weight does; "
        f"the other operands are of layers.{i}"
        for i in range(2)
    ]


def test_an_attention_without_weights_is_for_a_person_to_look_at():
    judgement = judged(Bare, lambda m: whole(m.q, m.k, m.v))
    assert judgement.verdict == "partial"
    assert judgement.of("partial") == [
        f"core {2 * i + 1} in layers.{i}.refine (BarePooling) {role}: made by no weight of this layer"
        for i in range(2)
        for role in ROLES
    ]


def test_a_learned_query_is_named_as_what_it_is():
    judgement = judged(Pooling, lambda m: [(), *thirds(m.kv, (0, 1))])
    assert judgement.verdict == "partial"
    assert all("a parameter itself" in text for text in judgement.of("partial"))
    assert len(judgement.of("partial")) == 2


def test_a_tower_that_did_not_run_is_for_a_person_to_look_at():
    def change(sites):
        spare = Separate()
        return [
            *sites,
            AttentionSite("spare", spare, dict(zip(ROLES, zip(whole(spare.q, spare.k, spare.v)), strict=True))),
        ]

    judgement = judged(Separate, lambda m: whole(m.q, m.k, m.v), change=change)
    assert judgement.verdict == "partial"
    assert len(judgement.of("partial")) == 3
    assert "not seen to be used" in judgement.of("partial")[0]


def test_what_there_was_no_time_for_is_an_open_point():
    torch.manual_seed(0)
    model = Model(Separate, depth=3)
    bench = Bench(model, [Sample((torch.randn(2, TOKENS, 4),))])
    sites = sites_of(model, lambda m: whole(m.q, m.k, m.v))
    judgement = judge_model(bench, sites, deep_until=0.0)
    assert (judgement.verdict, judgement.deep) == ("right", 0)
    judgement = judge_model(bench, sites, until=0.0)
    assert judgement.verdict == "partial"
    assert judgement.of("partial")[0] == "layers.0: not checked, nor 2 others"


def test_a_layer_that_runs_several_times_is_accounted_for_each_time():
    judgement = judged(Fused, lambda m: thirds(m.qkv), calls=3)
    assert (judgement.verdict, judgement.cores) == ("right", 6), judgement.findings


def test_no_weight_is_changed_for_good():
    torch.manual_seed(0)
    model = Model(Interleaved).double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    judge_model(Bench(model, [Sample((torch.randn(2, TOKENS, 4),))]), sites_of(model, lambda m: thirds(m.qkv)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_needs_float32_runs_in_float32():
    class Single(Separate):
        def attend(self, x):
            return (
                super().attend(x) + F.linear(x.float(), torch.ones(WIDTH, WIDTH, dtype=torch.float32)) @ self.out.weight
            )

    judgement = judged(Single, lambda m: whole(m.q, m.k, m.v))
    assert (judgement.verdict, judgement.dtype) == ("right", "float32"), judgement.findings
    judgement = judged(Single, lambda m: whole(m.k, m.q, m.v))
    assert judgement.verdict == "wrong"


def entry(name="toy", build=lambda: Model(Separate), source="timm", samples=None):
    make = samples or (lambda model: [Sample((torch.randn(2, TOKENS, 4),))])
    return Entry(source, ZooModel(name, "timm", build, make))


def find(model, sample):
    return sites_of(model, lambda m: whole(m.q, m.k, m.v))


def find_nothing(model, sample):
    raise NoMatchingTargetError("nothing")


def refuse(model, sample):
    raise UnknownAttentionError("what is this")


def forever():
    while True:
        pass


def broken():
    raise RuntimeError("can not be built")


def test_verdicts_of_a_worker():
    assert examine(entry(), find)["verdict"] == "right"
    record = examine(entry(), refuse)
    assert (record["verdict"], record["reason"]) == ("refused", "UnknownAttentionError: what is this")
    record = examine(entry(), find_nothing)
    assert (record["verdict"], record["cores"]) == ("refused", 2)
    assert "2 attention cores ran" in record["reason"]
    assert examine(entry(build=lambda: nn.Linear(4, 4)), find_nothing)["verdict"] == "none"
    assert examine(entry(samples=lambda model: [Sample((torch.randn(2, 3),))]), find)["verdict"] == "no input"
    record = examine(entry(build=broken), find)
    assert record["verdict"] == "error"
    assert "can not be built" in record["reason"]
    record = examine(entry(), lambda model, sample: sites_of(model, lambda m: whole(m.k, m.q, m.v)))
    assert record["verdict"] == "wrong"
    assert "not query" in record["reason"]
    assert record["findings"]["wrong"]


def test_a_negative_is_right_when_nothing_is_found():
    assert examine(entry(source="negatives", build=lambda: nn.Linear(4, 4)), find_nothing)["verdict"] == "right"
    record = examine(entry(source="negatives"), find)
    assert (record["verdict"], record["reason"]) == ("wrong", "found layers.0, layers.1")
    assert record["findings"]["note"] == ["the judge sees 2 attention cores"]
    assert examine(entry(source="negatives"), refuse)["verdict"] == "refused"


def test_a_crash_and_a_long_wait_are_recorded():
    def run(build, seconds=30.0):
        return isolated(entry(build=build), seconds=seconds, gigabytes=12, finder=find)

    assert run(lambda: Model(Separate))["verdict"] == "right"
    assert run(lambda: Model(Separate))["peak_megabytes"] > 50
    record = run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert (record["verdict"], record["reason"]) == ("error", "the process died: SIGKILL")
    record = run(lambda: os._exit(7))
    assert (record["verdict"], record["reason"]) == ("error", "the process died: exit code 7")
    record = run(lambda: time.sleep(60), seconds=0.1)
    assert (record["verdict"], record["reason"]) == ("error", "not done after waiting 1 s")
    record = run(forever, seconds=1)
    assert (record["verdict"], record["reason"]) == ("error", "not done after 1 s")


@pytest.fixture
def zoo(monkeypatch):
    """A sweep over three toy models; the list holds which of them were examined."""
    seen = []
    entries = [entry("a"), entry("b", lambda: Model(Eager)), entry("c", lambda: nn.Linear(4, 4), "negatives")]

    def run(one, *, seconds, gigabytes):
        seen.append(one.name)
        finder = find if one.source == "timm" else find_nothing
        return examine(one, finder, seconds=seconds)

    monkeypatch.setattr(conformance, "load_source", lambda source: [e for e in entries if e.source == source])
    monkeypatch.setattr(conformance, "isolated", run)
    return seen, entries


def test_the_sweep_resumes_reports_and_says_whether_anything_is_wrong(zoo, tmp_path, capsys):
    seen, entries = zoo
    out, report = tmp_path / "results.jsonl", tmp_path / "report.md"
    assert conformance.main(["--out", str(out), "--source", "timm", "--only", "a"]) == 0
    out.write_text(out.read_text() + '{"source": "timm", "na')  # interrupted while it wrote
    assert conformance.main(["--out", str(out), "--report", str(report)]) == 0
    assert seen == ["a", "b", "timm/c"]
    assert conformance.main(["--out", str(out)]) == 0
    assert seen == ["a", "b", "timm/c"]
    assert conformance.main(["--out", str(out), "--again"]) == 0
    assert len(seen) == 6
    assert [json.loads(line)["name"] for line in out.read_text().splitlines() if line.endswith("}")][:3] == [
        "a",
        "b",
        "timm/c",
    ]
    text = report.read_text()
    assert "| timm | 2 | 0 | 0 | 0 | 0 | 0 | 0 | 2 |" in text
    assert "| all | 3 | 0 | 0 | 0 | 0 | 0 | 0 | 3 |" in text
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    capsys.readouterr()

    entries.append(entry("d", broken))
    assert conformance.main(["--out", str(out), "--report", str(report)]) == 0
    assert "can not be built" in report.read_text()
    assert conformance.main(["--out", str(out), "--only", "nothing"]) == 2


def test_a_wrong_model_ends_the_sweep_with_one(zoo, tmp_path, capsys, monkeypatch):
    def run(one, *, seconds, gigabytes):
        return examine(one, lambda model, sample: sites_of(model, lambda m: whole(m.k, m.q, m.v)))

    monkeypatch.setattr(conformance, "isolated", run)
    assert conformance.main(["--out", str(tmp_path / "r"), "--only", "a"]) == 1
    assert "WRONG timm a" in capsys.readouterr().out


def test_other_sources_of_the_finder_make_results_old(zoo, tmp_path, monkeypatch):
    seen, _ = zoo
    arguments = ["--out", str(tmp_path / "r"), "--only", "a"]
    conformance.main(arguments)
    stamp = conformance.fingerprints(conformance.ROOT)
    monkeypatch.setattr(conformance, "fingerprints", lambda root: {**stamp, "finder": "other"})
    conformance.main(arguments)
    assert seen == ["a", "a"]


def test_the_zoo_is_found():
    pytest.importorskip("timm")
    names = [one.name for one in load_source("timm")]
    assert len(names) == len(set(names)) >= 51
