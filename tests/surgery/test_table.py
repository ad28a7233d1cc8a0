"""The survey as rows, text and JSON."""

import json

import pytest
import torch
from torch import nn

from lit_cond.errors import NoMatchingTargetError, UnknownAttentionError
from lit_cond.surgery import AttentionSite, MatrixLayout, RowSet, TokenSite, WeightView
from lit_cond.surgery.folding import fold, joined_name, ranges
from lit_cond.surgery.survey import Survey, survey_attention
from lit_cond.surgery.table import format_remarks, format_survey, survey_as_dict, survey_rows
from tests.tiny import TinyTransformer


class Fused(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)


def fused_site(name, width=12, **changes):
    module = Fused(width)
    views = {
        role: (WeightView(module.qkv, "weight", MatrixLayout(RowSet(i * 3, 3, 9, 4)), f"{name}.qkv"),)
        for i, role in enumerate(("query", "key", "value"))
    }
    arguments = {"num_heads": 4, "num_kv_heads": 4, "causal": True, "traced": True, **changes}
    return AttentionSite(name, module, {**views, **arguments.pop("views", {})}, **arguments)


def deep(depth=12, **changes):
    return Survey(sites=[fused_site(f"blocks.{i}.attn", **changes) for i in range(depth)])


def body(text):
    """The cells of the table, by line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("#"))
    block = lines[start + 1 :]
    return [line.split() for line in block[: block.index("") if "" in block else None]]


def test_one_row_for_each_matrix():
    rows = survey_rows(deep(2))
    assert [(r.index, r.layer, r.role) for r in rows] == [
        (i, f"blocks.{i}.attn", role) for i in range(2) for role in ("query", "key", "value")
    ]
    key = rows[1]
    assert (key.owner, key.tensor, key.rows, key.shape) == (
        "blocks.0.attn.qkv", "weight", "[3:6) + 9i, i<4", (12, 12),
    )  # fmt: skip
    assert (key.kind, key.causal, key.heads, key.kv_heads, key.found) == ("self", True, 4, 4, "traced")


def test_a_role_may_have_two_matrices_or_none_with_the_reason():
    extra = WeightView(nn.Linear(12, 5), "weight", MatrixLayout(RowSet.span(0, 5)), "latent")
    site = fused_site("attn")
    site = AttentionSite(
        "attn", site.module, {"key": (*site.views["key"], extra), "value": site.views["value"]},
        notes={"query": "it is a parameter"},
    )  # fmt: skip
    survey = Survey(sites=[site])
    rows = survey_rows(survey)
    assert [(r.role, r.owner, r.note) for r in rows] == [
        ("query", None, "it is a parameter"),
        ("key", "attn.qkv", None),
        ("key", "latent", None),
        ("value", "attn.qkv", None),
    ]
    text = format_survey(survey)
    assert "none: it is a parameter" in text
    assert "1 attention layer, 3 matrices" in text
    assert "?" in body(text)[0]  # heads are not known
    assert survey_as_dict(survey)["layers"][0]["without_matrix"] == {"query": "it is a parameter"}
    assert format_remarks(survey, roles=True) == ["without a matrix", "  attn: no query matrix: it is a parameter"]
    assert format_remarks(survey) == []


def test_a_packed_weight_is_listed_without_a_shape():
    packed = nn.Module()
    packed.register_parameter("weight", nn.Parameter(torch.zeros(72, 1, dtype=torch.uint8), requires_grad=False))
    view = WeightView(packed, "weight", MatrixLayout(RowSet.span(0, 12)), "attn.q")
    survey = Survey(sites=[fused_site("attn", views={"query": (view,)})])
    row = survey_rows(survey)[0]
    assert row.shape is None
    assert "not a plain floating-point parameter" in row.note
    assert "not a plain floating-point parameter" in format_survey(survey)
    json.dumps(survey_as_dict(survey))


def test_alike_layers_are_folded_unless_all_are_asked_for():
    survey = deep(12)
    text = format_survey(survey)
    assert body(text)[0][:4] == ["0..11", "blocks.{0..11}.attn", "x", "12"]
    assert len(body(text)) == 3
    full = body(format_survey(survey, full=True))
    assert len(full) == 36
    assert full[33][:2] == ["11", "blocks.11.attn"]


@pytest.mark.parametrize("change", [{"width": 16}, {"num_heads": 2}, {"causal": False}, {"traced": False}])
def test_layers_that_differ_are_not_folded(change):
    survey = deep(4)
    survey.sites[2] = fused_site("blocks.2.attn", **change)
    assert [line[:2] for line in body(format_survey(survey))[::3]] == [
        ["0,1,3", "blocks.{0,1,3}.attn"],
        ["2", "blocks.2.attn"],
    ]


def test_a_parameter_outside_of_the_layer_is_named_in_full():
    sites = []
    for i in range(3):
        view = WeightView(nn.Linear(4, 4), "weight", MatrixLayout(RowSet.span(0, 4)), f"layers.{i}.project_q")
        sites.append(AttentionSite(f"layers.{i}.attn", nn.Identity(), {"query": (view,)}))
    assert "layers.{0..2}.project_q.weight" in format_survey(Survey(sites=sites))


def test_reasons_are_shown_and_folded():
    survey = deep(1)
    survey.left_alone = {f"mixers.{i}": "no softmax" for i in range(4)}
    survey.unknown = {"odd": UnknownAttentionError("the rows are not known")}
    survey.notes = ["'Model' was not traced: it is too large"]
    lines = format_survey(survey).splitlines()
    for title, line in {
        "left alone": "  mixers.{0..3}: no softmax",
        "not understood": "  odd: the rows are not known",
        "notes": "  'Model' was not traced: it is too large",
    }.items():
        assert lines[lines.index(title) + 1] == line
    assert "  mixers.2: no softmax" in format_survey(survey, full=True).splitlines()


def test_where_tokens_enter():
    survey = deep(1)
    site = TokenSite("blocks.0", nn.Identity(), survey.sites[0], 0, 2, False, 5, channels=12)
    lines = format_survey(survey, [site]).splitlines()
    expected = "  blocks.0: argument 0, 12 channels on axis 2, tokens before the batch, 5 learned tokens first"
    assert lines[lines.index("tokens enter at") + 1] == expected
    assert survey_as_dict(survey, [site])["token_sites"][0]["prefix"] == 5
    reason = NoMatchingTargetError("no list of blocks")
    assert "  not known: no list of blocks" in format_survey(survey, reason).splitlines()
    assert survey_as_dict(survey, reason)["token_sites_unknown"] == "no list of blocks"


def test_rows_in_json_index_the_weight():
    survey = deep(2)
    content = json.loads(json.dumps(survey_as_dict(survey)))
    assert [layer["index"] for layer in content["layers"]] == [0, 1]
    entry = content["layers"][1]["matrices"][2]
    assert (entry["role"], entry["parameter"]) == ("value", "blocks.1.attn.qkv.weight")
    weight = survey.sites[1].module.qkv.weight
    expected = survey.sites[1].views["value"][0].matrix()
    assert torch.equal(weight[RowSet(**entry["rows"]).indices()], expected)


def test_no_values_are_needed():
    with torch.device("meta"):
        model = TinyTransformer("separate", depth=3)
    text = format_survey(survey_attention(model))
    assert body(text)[0][:4] == ["0..2", "blocks.{0..2}.attn", "x", "3"]
    assert {row.found for row in survey_rows(survey_attention(model))} == {"table"}


def test_nothing_found_is_an_empty_text():
    assert format_survey(Survey(), []) == ""


def test_fold_takes_the_number_that_joins_most():
    names = [f"stages.{s}.blocks.{b}" for s in range(2) for b in range(3)]
    assert fold([("", name) for name in names]) == [[0, 1, 2], [3, 4, 5]]
    assert fold([("", f"layers.{i}.blocks.0") for i in range(3)]) == [[0, 1, 2]]
    assert fold([("a", "x.0"), ("b", "x.1"), ("a", "x.2")]) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([4], "4"),
        ([0, 1], "0,1"),
        ([0, 1, 2], "0..2"),
        ([3, 7, 11], "3,7,11"),
        ([3, 7, 11, 15], "3,7..15"),
        ([0, 1, 2, 5], "0..2,5"),
        ([2, 9], "2,9"),
    ],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_joined_name_holds_every_name():
    assert joined_name(["a.0.b1", "a.2.b1", "a.1.b1"]) == "a.{0..2}.b1"
    assert joined_name(["whole"]) == "whole"
