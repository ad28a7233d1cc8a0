"""`python -m lit_cond inspect`: every way to name a model, what is printed, and the exit codes."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_cond import named_models
from lit_cond.__main__ import main
from lit_cond.named_models import build_named
from tests.cli.conftest import Outcome
from tests.cli.helpers import run_process
from tests.tiny import TinyModule, TinyTransformer, make_loader, make_trainer

KEYS = {"model", "layers", "token_sites", "token_sites_unknown", "left_alone", "not_understood", "notes", "numbers"}
LAYER_KEYS = {
    "index", "name", "class", "kind", "causal", "heads", "kv_heads", "batch_first", "found", "matrices",
    "without_matrix", "attention",
}  # fmt: skip

BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip

MINE = r"""
from torch import nn
import torch
from lit_cond.surgery import register_fused
from tests.tiny import INPUTS, TOKENS, FusedAttention, TinyTransformer, TinyModule, SeparateAttention
number = 3
ready = TinyTransformer("separate", depth=1)
def build():
    return TinyTransformer("separate", depth=2)
def talkative():
    model = build()
    model.example_input_array = torch.zeros(1, TOKENS, INPUTS)
    return model
def wrong():
    return {"a": 1}
class Turned(FusedAttention):
    pass
register_fused(Turned, "qkv", order=("key", "query", "value"))
class Liar(nn.Module):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(1, TOKENS, 32)
        self.attn = Turned()
    def forward(self, x):
        return x + self.attn(x)
class Shy(TinyTransformer):
    def __init__(self):
        super().__init__("separate")
    @property
    def example_input_array(self):
        raise RuntimeError("first line\nsecond line")
def broken():
    raise KeyError("no such thing")
class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.known = SeparateAttention()
        self.odd = nn.Module()
        self.odd.qkv = nn.Linear(4, 12)
class Late(TinyModule):
    def __init__(self):
        super().__init__()
        self.net = None
    def configure_model(self):
        self.net = TinyTransformer("separate", depth=1)
"""


@pytest.fixture
def run(capsys):
    """Run `inspect` like a process would."""

    def run_words(*words):
        capsys.readouterr()
        code = 0
        try:
            main(["inspect", *words])
        except SystemExit as error:
            code = error.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run_words


@pytest.fixture
def as_json(run):
    def run_words(*words):
        outcome = run(*words, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return run_words


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user in the working directory, under a name of its own."""
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


def error_of(outcome, code=2):
    assert outcome.code == code
    assert outcome.out == ""
    assert outcome.err.startswith("lit_cond: error: ")
    assert len(outcome.err.splitlines()) == 1
    return outcome.err


def test_timm(run):
    pytest.importorskip("timm")
    outcome = run("timm/vit_tiny_patch16_224")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == "timm/vit_tiny_patch16_224: VisionTransformer, 5.7 million parameters"
    assert "12 attention layers, 36 matrices" in lines
    table = [line.split() for line in lines if ".qkv.weight" in line]
    assert table[0] == [
        "0..11", "blocks.{0..11}.attn", "x", "12", "self", "3", "query", ".qkv.weight", "[0:192)", "192x192", "traced",
    ]  # fmt: skip
    assert table[1:] == [
        ["key", ".qkv.weight", "[192:384)", "192x192"],
        ["value", ".qkv.weight", "[384:576)", "192x192"],
    ]
    entry = lines[lines.index("tokens enter at") + 1]
    assert entry.startswith("  blocks.0: argument 0")
    assert entry.endswith("1 learned token first")


def test_full_lists_every_layer(run):
    pytest.importorskip("timm")
    lines = run("timm/vit_tiny_patch16_224", "--full", "--no-trace").out.splitlines()
    assert [line.split()[1] for line in lines if " query " in line] == [f"blocks.{i}.attn" for i in range(12)]


def test_torchvision_on_the_meta_device(as_json):
    pytest.importorskip("torchvision")
    content = as_json("torchvision/vit_b_16", "--device", "meta")
    assert content.keys() == KEYS
    assert content["model"] == {
        "name": "torchvision/vit_b_16",
        "class": "torchvision.models.vision_transformer.VisionTransformer",
        "parameters": 86567656,
        "device": "meta",
        "others": [],
    }
    assert len(content["layers"]) == 12
    first = content["layers"][0]
    assert first.keys() == LAYER_KEYS
    assert first["found"] == "table"
    assert first["matrices"][1] == {
        "role": "key",
        "parameter": "encoder.layers.encoder_layer_0.self_attention.in_proj_weight",
        "rows": {"offset": 768, "block": 768, "period": 768, "count": 1},
        "transposed": False,
        "groups": 1,
        "shape": [768, 768],
        "note": None,
        "numbers": None,
    }
    assert content["token_sites"][0]["name"] == "encoder.layers.encoder_layer_0"
    assert "meta device" in content["notes"][0]


def test_transformers_type_and_its_alias(as_json):
    pytest.importorskip("transformers")
    content = as_json("transformers/bert", "--no-trace")
    assert content["model"]["class"] == "transformers.models.bert.modeling_bert.BertModel"
    assert [layer["name"] for layer in content["layers"]] == [f"encoder.layer.{i}.attention.self" for i in range(12)]
    assert as_json("hf/bert", "--no-trace") == content


def test_type_with_heads_only(as_json):
    pytest.importorskip("transformers")
    assert as_json("transformers/speecht5", "--no-trace")["layers"]
    vits = as_json("transformers/pix2struct", "--no-trace")["model"]["class"]
    assert vits == "transformers.models.pix2struct.modeling_pix2struct.Pix2StructForConditionalGeneration"


@pytest.mark.parametrize("inside", ["", "config.json"])
def test_folder_of_hugging_face(as_json, tmp_path, inside):
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BERT))
    content = as_json(str(tmp_path / "model" / inside))
    assert content["model"]["class"].endswith(".BertModel")
    assert [layer["found"] for layer in content["layers"]] == ["traced"] * 3
    assert content["layers"][2]["matrices"][0]["shape"] == [32, 32]


def test_half_precision_of_a_folder_does_not_matter(as_json, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**BERT, "torch_dtype": "float16", "dtype": "float16"}))
    assert {layer["found"] for layer in as_json(str(tmp_path))["layers"]} == {"traced"}


def test_folder_of_timm(as_json, tmp_path):
    pytest.importorskip("timm")
    config = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"input_size": [3, 224, 224]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(as_json(str(tmp_path), "--no-trace")["layers"]) == 12


def test_checkpoint_and_folder_of_a_run(as_json, tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(tmp_path / "run" / "checkpoints", "{epoch}")
    trainer = make_trainer(tmp_path, [callback], enable_checkpointing=True)
    trainer.fit(TinyModule("separate"), make_loader(32))
    config = "model:\n  class_path: tests.tiny.TinyModule\n  init_args: {attention: separate}\ndata: null\n"
    (tmp_path / "run" / "config.yaml").write_text(config)
    by_file = as_json(callback.best_model_path)
    assert by_file["model"]["class"] == "tests.tiny.TinyModule"
    assert [layer["name"] for layer in by_file["layers"]] == ["net.blocks.0.attn", "net.blocks.1.attn"]
    assert as_json(str(tmp_path / "run"))["layers"] == by_file["layers"]
    saved = torch.load(callback.best_model_path, weights_only=True)["state_dict"]
    loaded = build_named(callback.best_model_path).model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())


def test_checkpoint_without_a_class(run, tmp_path):
    pytest.importorskip("jsonargparse")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "plain.ckpt")
    assert "does not record the class" in error_of(run("plain.ckpt"))
    (tmp_path / "text.ckpt").write_text("no")
    assert "is not a checkpoint" in error_of(run("text.ckpt"))


@pytest.mark.parametrize("attribute", ["build", "ready", "TinyTransformer", "TinyModule", "Late"])
def test_the_user_s_own(as_json, mine, attribute):
    content = as_json(f"{mine}:{attribute}")
    assert content["layers"][-1]["name"].endswith(f"blocks.{len(content['layers']) - 1}.attn")
    assert content["model"]["device"] == "cpu"


def test_the_user_s_own_says_what_it_takes_to_be_traced(run, mine):
    silent, talkative = run(f"{mine}:build").out, run(f"{mine}:talkative").out
    assert "example_input_array" in silent
    assert "example_input_array" not in talkative
    rows = [
        [line.split()[-1] for line in out.splitlines() if " .q_proj.weight " in line] for out in (silent, talkative)
    ]
    assert rows == [["table"], ["traced"]]


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("absent", "has no attribute 'absent'"),
        ("number", "is int: give a function"),
        ("wrong", "returned dict, not a torch.nn.Module"),
        ("broken", "KeyError: 'no such thing'"),
        ("Needy", "missing a required argument: 'width'"),
    ],
)
def test_the_user_s_mistakes(run, mine, attribute, reason):
    assert reason in error_of(run(f"{mine}:{attribute}"))


def test_what_is_not_understood_exits_with_1_and_says_what_to_do(run, mine):
    outcome = run(f"{mine}:Odd")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    line = lines[lines.index("not understood") + 1]
    assert line.startswith("  odd: ")
    assert "register_fused" in line
    assert "known" in json.loads(run(f"{mine}:Odd", "--json").out)["layers"][0]["name"]


def test_a_table_that_is_wrong_is_an_error_and_can_be_seen_without_a_pass(run, mine):
    outcome = run(f"{mine}:Liar")
    assert outcome.code == 1
    assert "attn: the forward pass reads its query from attn.qkv.weight[0:32), the table of layouts says" in outcome.out
    assert run(f"{mine}:Liar", "--no-trace").code == 0


def test_a_model_that_fails_when_it_is_asked_for_its_inputs(run, mine):
    outcome = run(f"{mine}:Shy")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[lines.index("notes") + 1] == "  'Shy' was not traced: RuntimeError: first line"
    assert lines[lines.index("tokens enter at") + 1].startswith("  blocks.0: its first tensor argument")
    assert any(line.endswith("table") for line in lines)


def test_model_without_attention_is_an_answer(run):
    pytest.importorskip("timm")
    outcome = run("timm/resnet18")
    assert outcome.code == 0
    assert outcome.out.splitlines()[1:] == ["no attention: nothing here makes queries, keys and values for a softmax"]


def test_a_name_of_two_libraries(run):
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    lines = run("resnet18", "--no-trace").out.splitlines()
    assert lines[0].startswith("timm/resnet18: ")
    assert lines[1] == "the name could also mean torchvision/resnet18"


def test_detectors_fetch_no_weights_of_their_backbone(run):
    pytest.importorskip("torchvision")
    outcome = run("fcn_resnet50", "--no-trace")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("torchvision/fcn_resnet50: FCN, ")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("timm/vit_tny_patch16_224", "timm has no model 'vit_tny_patch16_224'; nearest: vit_tiny_patch16_224"),
        ("vit_tny_patch16_224", "nearest: timm/vit_tiny_patch16_224"),
        ("torchvision/vit_b16", "nearest: vit_b_16"),
        ("transformers/brt", "nearest: "),
        ("zzz", "give timm/NAME"),
        ("google/vit-base-patch16-224", "nothing is downloaded"),
        ("absent.ckpt", "there is no 'absent.ckpt' here"),
        (".", "holds no config.json"),
    ],
)
def test_unknown_names(run, name, nearest):
    for library in ("timm", "torchvision", "transformers"):
        pytest.importorskip(library)
    assert nearest in error_of(run(name))


def test_config_of_an_unknown_type(run, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bort"}')
    assert "'bort'" in error_of(run("config.json"))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in error_of(run("config.json"))


def test_missing_libraries_are_named(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    assert 'pip install "lit_cond[tasks]"' in error_of(run("timm/vit_tiny_patch16_224"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "lit_cond[tasks]"' in error_of(run("vit_tiny_patch16_224"))


def test_large_models_are_built_without_values(as_json, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.setattr(named_models, "META_ABOVE", 1_000_000)
    content = as_json("timm/vit_tiny_patch16_224")
    assert content["model"]["device"] == "meta"
    assert as_json("timm/vit_tiny_patch16_224", "--device", "cpu")["layers"][0]["found"] == "traced"


def test_models_that_need_values_to_be_built():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = TinyTransformer("separate")
            self.scale = float(torch.ones(1).sum())

    source = named_models._Source("stubborn", Stubborn)
    assert named_models._on_meta_or_none(source) is None
    assert not next(named_models._built(source, "cpu").parameters()).is_meta


def test_random_numbers_and_environment_are_left_alone(run, mine, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    run(f"{mine}:build")
    assert torch.equal(torch.rand(3), expected)
    assert "HF_HUB_OFFLINE" not in os.environ


def test_options_are_checked(run):
    assert "inspect: the following arguments are required: NAME_OR_PATH" in error_of(run())
    assert "invalid choice: 'tpu'" in error_of(run("bert", "--device", "tpu"))
    help_text = run("--help")
    assert help_text.code == 0
    assert "package.module:callable" in help_text.out


def test_as_a_process(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    done = run_process("-m", "lit_cond", "inspect", "mine:build", "--json", cwd=Path(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["layers"]) == 2
