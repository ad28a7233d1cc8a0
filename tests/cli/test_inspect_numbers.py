"""The numbers that `python -m lit_cond inspect` prints, as text and as JSON."""

import json
import math

import numpy as np
import pytest
import torch

from lit_cond.callbacks import SpectralConditioning
from lit_cond.inspection.numbers import AS_IT_IS
from lit_cond.inspection.weights import CORRECTIONS
from tests.cli.test_inspect import BERT, error_of, mine, run  # noqa: F401  (fixtures)
from tests.inspection.helpers import LABELS, reference, rows_of, strict
from tests.tiny import INPUTS, TOKENS, TinyModule, TinyTransformer, make_loader, make_trainer


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
