"""The numbers of `python -m lit_cond inspect`: right, harmless, readable."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from lit_cond import TokenRule, WeightRule, condition_, fold_, uncondition_
from lit_cond.callbacks import SpectralConditioning
from lit_cond.functional import predicted_attention_entropy
from lit_cond.inspection import attention as inspected_attention
from lit_cond.inspection.as_json import add_numbers
from lit_cond.inspection.numbers import AS_IT_IS, measure_numbers
from lit_cond.inspection.table import format_numbers, saturation_warnings
from lit_cond.inspection.weights import CORRECTIONS
from lit_cond.surgery import MatrixLayout, RowSet, WeightView, find_attention, find_token_sites
from lit_cond.surgery.apply import effective_matrix
from lit_cond.surgery.samples import Sample
from lit_cond.surgery.sites import AttentionSite
from lit_cond.surgery.survey import Survey, survey_attention
from lit_cond.surgery.table import survey_as_dict
from tests.cli.test_inspect import BERT, error_of, mine, run  # noqa: F401  (fixtures)
from tests.tiny import HEADS, INPUTS, TOKENS, TinyModule, TinyTransformer, make_loader, make_trainer

LABELS = ["spectral", "identity 1", "identity 10"]
RULES = {
    "spectral": WeightRule(correction="spectral"),
    "identity 1": WeightRule(correction="identity", scale=1.0),
    "identity 10": WeightRule(correction="identity", scale=10.0),
}


def model_of(attention="separate", depth=2, seed=0):
    torch.manual_seed(seed)
    return TinyTransformer(attention, depth=depth)


def numbers_of(model):
    survey = survey_attention(model)
    return survey, measure_numbers(model, survey)


def strict(text):
    """Read JSON as a parser would that knows no Infinity and no NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def matrix_site(*matrices, name="attn", heads=None, roles=("query", "key", "value")):
    """A layer whose matrices are given, each in a Linear of its own."""
    module = nn.Module()
    views = {}
    for role, matrix in zip(roles, matrices, strict=False):
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
        linear.weight = nn.Parameter(matrix.clone())
        setattr(module, role, linear)
        layout = MatrixLayout(RowSet.span(0, matrix.shape[0]))
        views[role] = (WeightView(linear, "weight", layout, f"{name}.{role}"),)
    return module, Survey(sites=[AttentionSite(name, module, views, heads, heads)])


def reference(matrix):
    values = np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)
    return values[0] / values[-1], values[0], values[-1], (values**2).sum() / values[0] ** 2


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


@pytest.mark.parametrize("attention", ["fused", "torch"])
def test_predicted_attention_is_that_of_the_weights_as_they_would_be_read(attention):
    model = model_of(attention)
    _, numbers = numbers_of(model)
    for label in (AS_IT_IS, *LABELS):
        if label != AS_IT_IS:
            condition_(model, RULES[label])
        for site, layer in zip(find_attention(model), numbers.layers, strict=True):
            query, key = (effective_matrix(site.matrix_view(role)).float() for role in ("query", "key"))
            expected = predicted_attention_entropy(query, key, HEADS, 64, normalized=True)
            assert layer.softmax[label].share == pytest.approx(expected, abs=0.03)
            assert layer.softmax[label].entropy == pytest.approx(layer.softmax[label].share * math.log(64))
        uncondition_(model)


def test_the_model_stays_as_it_was():
    model = model_of("fused")
    model.blocks[0].attn.qkv.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    generator = torch.get_rng_state()
    numbers_of(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    assert not any("_lit_cond_weights" in module.__dict__ for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_what_is_not_finite_is_named_and_the_rest_is_measured():
    model = model_of("separate", depth=3)
    with torch.no_grad():
        model.blocks[1].attn.k_proj.weight[0, 0] = math.nan
    survey, numbers = numbers_of(model)
    assert [[n.reason for n in layer.matrices] for layer in numbers.layers] == [
        [None] * 3, [None, "it holds NaN or Inf", None], [None] * 3,
    ]  # fmt: skip
    assert [set(layer.softmax) for layer in numbers.layers] == [{AS_IT_IS, *LABELS}, set(), {AS_IT_IS, *LABELS}]
    assert numbers.notes == ()
    lines = format_numbers(survey, numbers)
    assert lines[lines.index("not measured, or not possible") + 1] == "  blocks.1.attn: key: it holds NaN or Inf"
    content = add_numbers(survey_as_dict(survey), survey, numbers)
    broken = content["layers"][1]["matrices"][1]["numbers"]
    assert broken["condition_number"] is broken["stable_rank"] is None
    assert broken["reason"] == "it holds NaN or Inf"


def test_a_weight_that_stands_elsewhere_too_can_not_be_corrected_and_is_measured_all_the_same():
    model = model_of("separate")
    model.extra = nn.Linear(32, 32, bias=False)
    model.extra.weight = model.blocks[0].attn.q_proj.weight
    survey, numbers = numbers_of(model)
    assert [len(layer.matrices[0].after) for layer in numbers.layers] == [3, 3]
    assert all(set(layer.softmax) == {AS_IT_IS} for layer in numbers.layers)
    assert len(numbers.notes) == 3
    assert "shared with a module that is not selected" in numbers.notes[0]
    text = "\n".join(format_numbers(survey, numbers))
    assert "attention with the correction identity 10 is not known: a weight of" in text


def test_layers_without_a_prediction_say_why():
    torch.manual_seed(0)
    module, survey = matrix_site(torch.randn(8, 8), torch.randn(8, 8))
    layer = measure_numbers(module, survey).layers[0]
    assert layer.softmax[AS_IT_IS] == "not predicted without the number of heads"
    module, survey = matrix_site(torch.randn(8, 8), heads=2)
    lines = format_numbers(survey, measure_numbers(module, survey))
    assert "  attn: attention not predicted without exactly one query and one key matrix" in lines
    decoder = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True)
    survey = survey_attention(decoder, (torch.randn(2, 5, 16), torch.randn(2, 7, 16)))
    cross = [site.kind == "cross" for site in survey.sites]
    assert sum(cross) == 1
    layers = measure_numbers(decoder, survey).layers
    assert [s.softmax[AS_IT_IS] == "not predicted for cross attention" for s in layers] == cross


def test_warnings_name_the_worst_layer_and_how_many():
    model = model_of("separate", depth=3)
    with torch.no_grad():
        for weight in (model.blocks[1].attn.q_proj.weight, model.blocks[1].attn.k_proj.weight):
            weight.mul_(10)
    survey, numbers = numbers_of(model)
    warnings = saturation_warnings(survey, numbers)
    assert warnings[0].startswith("warning: as the model is the softmax would be saturated: attention entropy 0.")
    assert "in 'blocks.1.attn', below 0.25 in 1 of 3 layers" in warnings[0]
    assert "StrengthSchedule" not in warnings[0]
    assert warnings[-1].startswith("warning: with identity 10 the softmax would be saturated")
    assert "below 0.25 in 3 of 3 layers; lower `scale` or `strength`" in warnings[-1]


def test_a_tame_model_has_no_warning_as_it_is():
    survey, numbers = numbers_of(model_of("separate"))
    assert [line.split("the softmax")[0] for line in saturation_warnings(survey, numbers)] == [
        "warning: with identity 10 "
    ]


def rows_of(text, title):
    """The cells of the table that follows a title."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    start = next(i for i in range(start, len(lines)) if lines[i].startswith("#"))
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return [line.split() for line in lines[start + 1 : end]]


def test_layers_that_are_alike_show_ranges(run, tmp_path):  # noqa: F811
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    outcome = run("config.json")
    assert outcome.code == 0, outcome.err
    content = strict(run("config.json", "--json").out)
    rows = rows_of(outcome.out, "condition numbers of the weights")
    assert [row[-7] for row in rows] == ["query", "key", "value"]
    assert rows[0][:2] == ["0..2", "encoder.layer.{0..2}.attention.self"]
    numbers = [layer["matrices"][0]["numbers"] for layer in content["layers"]]
    low, high = rows[0][-6].split("..")
    kappas = sorted(n["condition_number"] for n in numbers)
    assert float(low.replace(",", "")) == pytest.approx(kappas[0], rel=6e-3)
    assert float(high.replace(",", "")) == pytest.approx(kappas[-1], rel=6e-3)
    full = rows_of(run("config.json", "--full").out, "condition numbers of the weights")
    assert [row[0] for row in full] == ["0", "key", "value", "1", "key", "value", "2", "key", "value"]
    attention = rows_of(outcome.out, "attention entropy")
    assert attention[0][:2] == ["0..2", "encoder.layer.{0..2}.attention.self"]
    assert len(attention) == 1


def test_json_has_every_number(run, mine):  # noqa: F811
    outcome = run(f"{mine}:build", "--json")
    assert outcome.code == 0, outcome.err
    content = strict(outcome.out)
    assert content["numbers"]["reason"] is None
    assert content["numbers"]["corrections"]["identity 10"] == {
        "correction": "identity", "scale": 10.0, "strength": 1.0,
    }  # fmt: skip
    assert content["numbers"]["carried"] == []
    for layer in content["layers"]:
        assert set(layer["attention"]) == {AS_IT_IS, *CORRECTIONS}
        assert 0 <= layer["attention"][AS_IT_IS]["share"] <= 1
        for matrix in layer["matrices"]:
            numbers = matrix["numbers"]
            ratio = numbers["sigma_max"] / numbers["sigma_min"]
            assert numbers["condition_number"] == pytest.approx(ratio, rel=1e-6)
            assert list(numbers["condition_number_after"]) == LABELS
            assert 1 <= numbers["condition_number_after"]["spectral"] <= 2


def test_infinity_is_a_text_in_json(run, tmp_path):  # noqa: F811
    (tmp_path / "singular.py").write_text(
        "import torch\nfrom tests.tiny import TinyTransformer\n"
        "def build():\n    model = TinyTransformer('separate', depth=1)\n"
        "    torch.nn.init.zeros_(model.blocks[0].attn.v_proj.weight)\n    return model\n"
    )
    content = strict(run("singular:build", "--json").out)
    value = content["layers"][0]["matrices"][2]["numbers"]
    assert value["condition_number"] == "inf"
    assert float(value["condition_number"]) == math.inf
    assert value["stable_rank"] == 0
    assert " inf " in run("singular:build").out


@pytest.mark.parametrize("words", [("--no-trace",), ("--device", "meta")])
def test_without_values_there_are_no_numbers_and_a_line_says_why(run, words):  # noqa: F811
    pytest.importorskip("timm")
    outcome = run("timm/vit_tiny_patch16_224", *words)
    assert outcome.code == 0, outcome.err
    assert "no condition numbers: the weights are on the meta device and have no values" in outcome.out
    assert "kappa" not in outcome.out
    content = strict(run("timm/vit_tiny_patch16_224", *words, "--json").out)
    assert "meta device" in content["numbers"]["reason"]
    assert {m["numbers"] for layer in content["layers"] for m in layer["matrices"]} == {None}


def test_numbers_can_be_left_out(run, mine):  # noqa: F811
    text = run(f"{mine}:build", "--no-numbers").out
    assert "kappa" not in text
    assert "condition numbers" not in text
    content = strict(run(f"{mine}:build", "--no-numbers", "--json").out)
    assert "numbers" not in content
    assert "numbers" not in content["layers"][0]["matrices"][0]


def test_a_model_without_attention_has_none(run):  # noqa: F811
    pytest.importorskip("timm")
    content = strict(run("timm/resnet18", "--json").out)
    assert content["layers"] == []
    assert content["numbers"]["reason"] is None


def test_a_checkpoint_of_a_conditioned_run_shows_the_effective_weights(run, tmp_path):  # noqa: F811
    pytest.importorskip("jsonargparse")
    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, [SpectralConditioning()], max_steps=2)
    module = TinyModule("separate")
    trainer.fit(module, make_loader(32))
    trainer.save_checkpoint(tmp_path / "tiny.ckpt")
    (tmp_path / "config.yaml").write_text(
        "model:\n  class_path: tests.tiny.TinyModule\n  init_args: {attention: separate}\ndata: null\n"
    )
    outcome = run("tiny.ckpt")
    assert outcome.code == 0, outcome.err
    assert "the weights carry a correction already (spectral, scale spectral, strength 1)" in outcome.out
    assert "identity 10" not in outcome.out
    content = strict(run("tiny.ckpt", "--json").out)
    saved = torch.load(tmp_path / "tiny.ckpt", weights_only=True)["state_dict"]
    for layer in content["layers"]:
        for matrix in layer["matrices"]:
            kappa = reference(saved[matrix["parameter"]])[0]
            assert matrix["numbers"]["condition_number"] == pytest.approx(kappa, rel=1e-3)
            assert kappa < 3 < matrix["numbers"]["without_correction"]
            assert matrix["numbers"]["condition_number_after"] == {}
        assert list(layer["attention"]) == [AS_IT_IS]


def test_a_model_of_the_user_that_is_conditioned_is_read_as_its_forward_pass_reads_it():
    model = model_of("fused")
    plain = numbers_of(model)[1]
    condition_(model, WeightRule(roles=["query"]))
    _, numbers = numbers_of(model)
    assert numbers.carried == ("spectral, scale spectral, strength 1",)
    for before, after in zip(plain.layers, numbers.layers, strict=True):
        assert after.matrices[0].kappa == pytest.approx(before.matrices[0].after["spectral"], rel=1e-3)
        assert after.matrices[0].without == pytest.approx(before.matrices[0].kappa, rel=1e-3)
        assert after.matrices[1].kappa == pytest.approx(before.matrices[1].kappa, rel=1e-3)


@pytest.mark.parametrize("words", [("--no-numbers",), ("--no-trace",), ("--device", "meta")])
def test_data_needs_values(run, mine, words):  # noqa: F811
    assert "--data needs a model with values" in error_of(run(f"{mine}:build", "--data", "x.pt", *words))


def test_data_that_can_not_be_read(run, mine, tmp_path):  # noqa: F811
    assert "there is no file 'absent.pt'" in error_of(run(f"{mine}:build", "--data", "absent.pt"))
    (tmp_path / "text.pt").write_text("no")
    assert "'text.pt' can not be read as tensors" in error_of(run(f"{mine}:build", "--data", "text.pt"))
    torch.save(TinyTransformer("separate"), tmp_path / "model.pt")
    assert "'model.pt' can not be read as tensors" in error_of(run(f"{mine}:build", "--data", "model.pt"))
    torch.save({"a": 1}, tmp_path / "plain.pt")
    assert "'plain.pt' holds dict without any tensor" in error_of(run(f"{mine}:build", "--data", "plain.pt"))
    torch.save({1: torch.zeros(2)}, tmp_path / "keys.pt")
    assert "keys are no names of arguments" in error_of(run(f"{mine}:build", "--data", "keys.pt"))
    (tmp_path / "text.npy").write_text("no")
    assert "'text.npy' is no array of numbers" in error_of(run(f"{mine}:build", "--data", "text.npy"))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    assert "'words.npy' is no array of numbers" in error_of(run(f"{mine}:build", "--data", "words.npy"))
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object))
    assert "'objects.npy' is no array of numbers" in error_of(run(f"{mine}:build", "--data", "objects.npy"))
    torch.save(torch.zeros(2, 3), tmp_path / "shape.pt")
    assert "TinyTransformer can not run on 'shape.pt'" in error_of(run(f"{mine}:build", "--data", "shape.pt"))


def test_data_shows_what_a_silent_model_computes(run, mine, tmp_path):  # noqa: F811
    np.save(tmp_path / "batch.npy", np.random.default_rng(0).normal(size=(2, TOKENS, INPUTS)))
    outcome = run(f"{mine}:build", "--data", "batch.npy")
    assert outcome.code == 0, outcome.err
    assert next(line.split()[-1] for line in outcome.out.splitlines() if " .q_proj.weight " in line) == "traced"


def softmax_of(model, x):
    """The share of uniform attention, by layer and head, of a tiny model: float64, from its own weights and tokens."""
    shares = []
    hooks = [
        block.attn.register_forward_pre_hook(lambda module, args, site=site: shares.append(share_of(args[0], site)))
        for block, site in zip(model.blocks, find_attention(model), strict=True)
    ]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        model(x)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return shares


def share_of(x, site):
    operands = []
    for role in ("query", "key"):
        view = site.matrix_view(role)
        biases = [b for name, b in view.module.named_parameters(recurse=False) if name.endswith("bias")]
        rows = view.layout.rows.indices()
        tokens = x.double() @ effective_matrix(view).double().T + biases[0].double()[rows]
        operands.append(tokens.unflatten(-1, (HEADS, -1)).transpose(1, 2))
    query, key = operands
    p = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return -(p * p.log()).sum(-1).mean(dim=(0, 2)) / math.log(x.shape[1])


@pytest.mark.parametrize("attention", ["fused", "functional", "separate", "torch"])
def test_measured_attention_against_the_weights_and_tokens(attention):
    model = model_of(attention)
    model.example_input_array = torch.randn(4, TOKENS, INPUTS, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, numbers = numbers_of(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for label in (AS_IT_IS, *LABELS):
        if label != AS_IT_IS:
            condition_(model, RULES[label])
        expected = softmax_of(model, model.example_input_array)
        for layer, heads in zip(numbers.layers, expected, strict=True):
            softmax = layer.softmax[label]
            assert softmax.source == "sample"
            assert softmax.share == pytest.approx(float(heads.mean()), rel=1e-3, abs=1e-6)
            assert softmax.lowest == pytest.approx(float(heads.min()), rel=1e-3, abs=1e-6)
            assert softmax.entropy == pytest.approx(softmax.share * math.log(TOKENS), rel=1e-6)
            assert 0 <= softmax.saturated <= 1
        uncondition_(model)


def test_cross_attention_is_measured_where_an_input_is_known():
    torch.manual_seed(0)
    decoder = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True)
    decoder.example_input_array = (torch.randn(2, 5, 16), torch.randn(2, 7, 16))
    survey, numbers = numbers_of(decoder)
    for site, layer in zip(survey.sites, numbers.layers, strict=True):
        tokens = 7 if site.kind == "cross" else 5
        assert layer.softmax[AS_IT_IS].source == "sample"
        assert layer.softmax[AS_IT_IS].entropy <= math.log(tokens)
        assert layer.softmax[AS_IT_IS].share == pytest.approx(layer.softmax[AS_IT_IS].entropy / math.log(tokens))


def test_the_data_of_the_user_come_before_the_sample(run, mine, tmp_path):  # noqa: F811
    torch.save(torch.zeros(2, TOKENS, INPUTS), tmp_path / "equal.pt")
    for target in (f"{mine}:talkative", f"{mine}:build"):
        outcome = run(target, "--data", "equal.pt", "--json")
        assert outcome.code == 0, outcome.err
        for layer in strict(outcome.out)["layers"]:
            for softmax in layer["attention"].values():
                # Equal tokens are looked at alike, whatever the weights are.
                assert softmax["source"] == "data"
                assert softmax["share"] == pytest.approx(1)
                assert softmax["saturated"] == 0
    assert "measured on --data" in run(f"{mine}:build", "--data", "equal.pt").out
    assert "measured on the model's own sample input" in run(f"{mine}:talkative").out


def test_data_that_the_model_can_not_take_are_an_error(run, mine, tmp_path):  # noqa: F811
    torch.save(torch.zeros(2, 3), tmp_path / "shape.pt")
    assert "TinyTransformer can not run on 'shape.pt'" in error_of(run(f"{mine}:talkative", "--data", "shape.pt"))


def test_data_by_name_and_in_double_precision(run, mine, tmp_path):  # noqa: F811
    torch.save({"x": torch.randn(2, TOKENS, INPUTS, dtype=torch.float64)}, tmp_path / "named.pt")
    content = strict(run(f"{mine}:build", "--data", "named.pt", "--json").out)
    assert {s["source"] for layer in content["layers"] for s in layer["attention"].values()} == {"data"}


def test_layers_that_the_input_does_not_reach_are_predicted_and_said_to_be():
    model = model_of("separate", depth=2)
    model.example_input_array = torch.randn(2, TOKENS, INPUTS)
    wrapper = nn.ModuleDict({"seen": model, "unseen": model_of("separate", depth=1)})
    survey, numbers = numbers_of(wrapper)
    sources = [layer.softmax[AS_IT_IS].source for layer in numbers.layers]
    assert sources == ["sample", "sample", "predicted"]
    text = "\n".join(format_numbers(survey, numbers))
    assert "sample: measured on the model's own sample input; predicted: predicted for" in text
    assert [row[-1] for row in rows_of(text, "attention entropy")] == ["sample", "predicted"]


def test_a_layer_that_can_not_be_watched_is_predicted_with_the_reason():
    model = model_of("separate", depth=2)
    model.example_input_array = torch.randn(2, TOKENS, INPUTS)
    survey = survey_attention(model)
    model.blocks[1].attn.forward = lambda x: x  # the softmax is gone
    numbers = measure_numbers(model, survey)
    assert [layer.softmax[AS_IT_IS].source for layer in numbers.layers] == ["sample", "predicted"]
    text = "\n".join(format_numbers(survey, numbers))
    assert "  blocks.1.attn: attention not measured: " in text


def test_a_large_sample_input_is_not_run_and_the_attention_predicted(monkeypatch):
    monkeypatch.setattr(inspected_attention, "_LARGEST_SAMPLE", 4 * TOKENS * INPUTS - 1)
    model = model_of("separate", depth=1)
    for samples, source in ((3, "sample"), (4, "predicted")):
        model.example_input_array = torch.randn(samples, TOKENS, INPUTS)
        survey, numbers = numbers_of(model)
        assert numbers.layers[0].softmax[AS_IT_IS].source == source
    text = "\n".join(format_numbers(survey, numbers))
    assert f"blocks.0.attn: attention not measured: a sample input of {4 * TOKENS * INPUTS} numbers is large" in text
    shown = measure_numbers(model, survey, Sample((model.example_input_array,)))
    assert shown.layers[0].softmax[AS_IT_IS].source == "data"


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


class Scaled(TinyTransformer):
    """Tokens on very different scales."""

    def forward(self, x):
        return super().forward(x * torch.logspace(0, -4, INPUTS))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_against_numpy(seed):
    torch.manual_seed(seed)
    model = Scaled("separate")
    model.example_input_array = torch.randn(3, TOKENS, INPUTS)
    survey = survey_attention(model)
    sites = find_token_sites(model)
    (found,) = measure_numbers(model, survey, token_sites=sites).tokens
    with torch.no_grad():
        entered = model.embed(model.example_input_array * torch.logspace(0, -4, INPUTS)).double().numpy()
    assert (found.name, found.samples, found.reason, found.without) == ("blocks.0", 3, None, None)
    assert found.kappa == pytest.approx(np.mean([np.linalg.cond(x) for x in entered]), rel=1e-3)
    corrected = []
    for x in entered:
        u, s, vh = np.linalg.svd(x, full_matrices=False)
        corrected.append(x + s[0] * u @ vh)
    assert found.after["exact"] == pytest.approx(np.mean([np.linalg.cond(x) for x in corrected]), rel=1e-3)
    identity = [np.linalg.cond(x + np.eye(*x.shape)) for x in entered]
    assert found.after["identity 1"] == pytest.approx(np.mean(identity), rel=1e-3)


def test_tokens_that_are_corrected_stand_beside_the_raw_ones():
    model = model_of("separate")
    model.example_input_array = torch.randn(3, TOKENS, INPUTS)
    plain = measure_numbers(model, survey_attention(model), token_sites=find_token_sites(model)).tokens[0]
    condition_(model, TokenRule())
    survey = survey_attention(model)
    numbers = measure_numbers(model, survey, token_sites=find_token_sites(model))
    assert numbers.tokens[0].without == pytest.approx(plain.kappa, rel=1e-4)
    assert numbers.tokens[0].kappa == pytest.approx(plain.after["exact"], rel=1e-4)
    assert numbers.tokens[0].after == {}
    assert "corrected and without the correction" in "\n".join(format_numbers(survey, numbers))


def test_repeated_tokens_have_no_finite_condition_number_in_either_state(run, mine, tmp_path):  # noqa: F811
    torch.save(torch.ones(2, TOKENS, INPUTS), tmp_path / "same.pt")
    content = strict(run(f"{mine}:build", "--data", "same.pt", "--json").out)
    tokens = content["token_sites"][0]["numbers"]
    assert tokens["condition_number"] == "inf"
    assert tokens["condition_number_after"]["exact"] == "inf"
    assert tokens["condition_number_after"]["identity 1"] != "inf"
    assert tokens["samples"] == 2


def test_tokens_of_causal_attention_are_not_offered_the_exact_correction(run, tmp_path):  # noqa: F811
    pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    vision = {**small, "image_size": 16, "patch_size": 4}
    text = {**small, "vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    config = {"model_type": "clip", "vision_config": vision, "text_config": text, "projection_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = run("config.json", "--json")
    by_name = {site["name"]: site["numbers"] for site in strict(outcome.out)["token_sites"]}
    assert set(by_name["vision_model.encoder.layers.0"]["condition_number_after"]) == {"exact", "identity 1"}
    assert set(by_name["text_model.encoder.layers.0"]["condition_number_after"]) == {"identity 1"}
    assert by_name["text_model.encoder.layers.0"]["refused"] == {"exact": "its attention is causal"}


def test_tokens_without_an_input_say_so():
    model = model_of("separate")
    survey = survey_attention(model)
    numbers = measure_numbers(model, survey, token_sites=find_token_sites(model))
    assert numbers.tokens[0].reason == "not measured: no input reaches it"
    assert "  blocks.0: tokens not measured: no input reaches it" in format_numbers(survey, numbers)


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
