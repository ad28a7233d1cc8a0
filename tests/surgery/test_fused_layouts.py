"""The words in which a layout is written, and projections in all their wrappings."""

import pytest
from torch import nn
from torch.ao.nn.quantized import dynamic
from torch.nn.utils import prune

from lit_cond.errors import ConfigurationError, LostTargetError, UnknownAttentionError
from lit_cond.surgery import families
from lit_cond.surgery.families import FUSED, FusedLayout, describe, register_fused
from lit_cond.surgery.fused_layouts import apply_layout


class Heads(nn.Module):
    """Children of given numbers of rows, and attributes."""

    def __init__(self, rows, **attributes):
        super().__init__()
        for name, count in rows.items():
            self.add_module(name, nn.Linear(8, count) if isinstance(count, int) else count)
        for name, value in attributes.items():
            setattr(self, name, value)


def rows(module, text, role, **settings):
    return [str(view.layout.rows) for view in apply_layout(module, FusedLayout(text, **settings)).views[role]]


def test_rows_are_divided_as_the_text_says():
    module = Heads({"qkv": 48}, num_heads=2, kv_heads=1, head_dim=4, num_key_value_heads=1)
    assert rows(module, "qkv: q k v", "key") == ["[16:32)"]
    assert rows(module, "qkv: v q k", "key") == ["[32:48)"]
    assert rows(module, "qkv: heads * (q k v)", "key") == ["[8:16) + 24i, i<2"]
    assert rows(module, "qkv: heads * (q=head_dim gate k=head_dim v=2*head_dim)", "value") == ["[16:24) + 24i, i<2"]
    assert rows(module, "qkv: q k=kv_heads*head_dim v=kv_heads*head_dim", "query") == ["[0:40)"]
    assert rows(module, "qkv: 4 * (q,k v)", "key") == rows(module, "qkv: 4 * (q,k v)", "query") == ["[0:6) + 12i, i<4"]


def test_a_module_without_the_weights_or_under_another_condition_is_not_of_this_layout():
    module = Heads({"q": 8}, fused=False)
    assert apply_layout(module, FusedLayout("q: q; kv: k v")) is None
    assert apply_layout(module, FusedLayout("q: q", when="fused")) is None
    assert apply_layout(module, FusedLayout("q: q", when="not missing")) is None
    (view,) = apply_layout(module, FusedLayout("q: q; kv?: k v", when="not fused")).views["query"]
    assert view.module is module.q


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("qkv: q k v", "'qkv' has 20 rows, which do not divide into query key value"),
        ("qkv: heads * (q k v)", "do not divide into heads x"),
        ("qkv: q=8 k=8 v=8", "do not divide"),
        ("qkv: q=16 k=8 v", "do not divide"),
        ("qkv: q k=latent v", "says no 'latent'"),
        ("qkv: groups_of_keys * (q k v)", "says no 'groups_of_keys'"),
    ],
)
def test_rows_that_do_not_fit_are_an_error_that_says_both_numbers(text, complaint):
    with pytest.raises(UnknownAttentionError, match=complaint):
        apply_layout(Heads({"qkv": 20}, num_heads=3), FusedLayout(text))


@pytest.mark.parametrize("text", ["", "qkv", "qkv:", "qkv: (q k v)", "qkv: q k=", "qkv: gate mlp", "q k v: qkv"])
def test_a_text_that_is_no_layout_is_refused(text):
    with pytest.raises(ConfigurationError, match="rows"):
        FusedLayout(text)


def test_a_class_of_ones_own_is_declared_by_the_text(monkeypatch):
    monkeypatch.setattr(families, "FUSED", dict(FUSED))
    module = Heads({"both": 24, "value": 8}, num_heads=2)
    assert describe(module) is None
    register_fused(Heads, rows="both: heads * (q gate k); value: v")
    assert {role: str(view.layout.rows) for role, view in describe(module)} == {
        "query": "[0:4) + 12i, i<2",
        "key": "[8:12) + 12i, i<2",
        "value": "[0:8)",
    }


def test_a_query_with_more_rows_than_its_heads_need_is_not_taken_for_a_whole_query():
    gated = Heads({"q_proj": 32, "k_proj": 16, "v_proj": 16}, num_heads=4, head_dim=4)
    with pytest.raises(UnknownAttentionError, match="'q_proj' has 32 rows where 4 heads of 4 need 16"):
        describe(gated)


def test_wrapped_projections_are_found_inside():
    inner = Heads({"base_layer": 16, "lora_A": 2})
    module = Heads({"q_proj": inner, "k_proj": Heads({"linear": 16}), "v_proj": Heads({"conv": 16})}, num_heads=4)
    views = dict(describe(module))
    assert [view.module for view in views.values()] == [inner.base_layer, module.k_proj.linear, module.v_proj.conv]


def test_a_weight_that_is_quantized_or_pruned_is_lost_and_not_overlooked():
    module = Heads({"q_proj": 16, "k_proj": 16, "v_proj": 16}, num_heads=4)
    prune.l1_unstructured(module.q_proj, "weight", 0.5)
    module.k_proj = dynamic.Linear(8, 16)
    views = dict(describe(module))
    for role in ("query", "key"):
        with pytest.raises(LostTargetError):
            views[role].matrix()
    assert views["value"].parameter is module.v_proj.weight
