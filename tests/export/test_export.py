"""Exported files, read by the programs that they are for, compute what the model computes."""

import json
import os
import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import onnxruntime
import pytest
import timm
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lit_cond import TokenRule, WeightRule, cli, condition_, fold_
from lit_cond.callbacks import SpectralConditioning
from lit_cond.data import DigitsDataModule
from lit_cond.errors import ConfigurationError, ExportMismatchError, MissingExtraError
from lit_cond.export import command, export_model
from lit_cond.runs import load_model
from lit_cond.surgery.weights import conditioned_weights
from lit_cond.tasks import ImageClassification
from tests.cli.helpers import TINY, write_config
from tests.tiny import TinyModule, TinyTransformer, largest_difference, make_loader, make_module, make_trainer, outputs

BACKBONE = TINY["model"]["init_args"]["backbone_args"]
HF_VIT = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 2}  # fmt: skip


def images(number, size=8, channels=1):
    return torch.randn(number, channels, size, size, generator=torch.Generator().manual_seed(1))


def plain_vit():
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **BACKBONE).eval()


def run_onnx(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))[0])


def run_pt2(path, *inputs):
    return torch.export.load(path).module()(*inputs)


def train(folder, **sections):
    """Train on digits by the command line; return the folder of the run."""
    trainer = {**TINY["trainer"], "default_root_dir": str(folder), "logger": False, "max_epochs": 2}
    trainer["callbacks"] = [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": str(folder / "checkpoints")}}]
    folder.mkdir(exist_ok=True)
    config = write_config(folder / "config.yaml", trainer=trainer, **sections)
    cli.main(["fit", "--config", config, "--test_after_fit=false"])
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return train(tmp_path_factory.mktemp("both"), conditioning={"correction": "spectral"}, tokens={})


@pytest.fixture(scope="module")
def exported(both, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    command.main([str(both), str(out)])
    return out


@pytest.fixture
def export(capsys):
    """Run the command; return its exit code and what it printed."""

    def run_words(*words):
        code = 0
        try:
            command.main([str(word) for word in words])
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        if code:
            assert printed.err.startswith("lit_cond: error: ")
            assert printed.err.count("\n") == 1
        return code, printed.out + printed.err

    return run_words


@pytest.fixture(scope="module")
def model(both):
    (path,) = both.rglob("*.ckpt")
    return load_model(path).eval()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_graphs_hold_corrected_tokens_for_every_batch_size(exported, model, batch):
    x = images(batch)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(run_pt2(exported / "model.pt2", x), expected)
    assert largest_difference(run_onnx(exported / "model.onnx", x), expected) < 1e-5 * float(expected.abs().max())


def test_files_are_as_accurate_as_the_test_command_says(exported, both, tmp_path, capsys):
    (path,) = both.rglob("*.ckpt")
    words = ["--trainer.limit_test_batches=1.0", f"--trainer.default_root_dir={tmp_path}", "--trainer.callbacks=[]"]
    cli.main(["test", "--config", str(both / "config.yaml"), "--ckpt_path", str(path), *words])
    told = float(re.search(r"test/acc\W+([\d.]+)", capsys.readouterr().out)[1])
    data = DigitsDataModule()
    data.setup("test")
    run, hits, number = torch.export.load(exported / "model.pt2").module(), {"pt2": 0, "onnx": 0}, 0
    for x, y in data.test_dataloader():
        number += len(y)
        hits["pt2"] += int((run(x).argmax(1) == y).sum())
        hits["onnx"] += int((run_onnx(exported / "model.onnx", x).argmax(1) == y).sum())
    assert number > 300
    assert 0.1 < told < 1
    assert hits == {name: round(told * number) for name in hits}
    assert told == pytest.approx(hits["pt2"] / number, abs=1e-6)


def test_weights_of_a_model_with_corrected_tokens_load_strictly_where_tokens_are_corrected_only(exported, model):
    state = load_file(exported / "model.safetensors")
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"blocks\.0\.conditioned_tokens"'):
        plain_vit().load_state_dict(state)
    saved = json.loads((exported / "export.json").read_text())["tokens"]["blocks.0"]
    backbone = plain_vit()
    condition_(backbone, TokenRule(**saved))
    backbone.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(backbone(images(3)), model(images(3)))


def test_what_is_said_of_the_files(exported, both):
    assert sorted(path.name for path in exported.iterdir()) == [
        "export.json", "model.onnx", "model.pt2", "model.safetensors",
    ]  # fmt: skip
    content = json.loads((exported / "export.json").read_text())
    assert content["checkpoint"] == next(both.rglob("*.ckpt")).name
    assert content["backbone"] == "backbone"
    assert content["weights"] == 2
    assert "VisionTransformer" in content["left_out"]["huggingface"]
    assert all(file["difference"] < 1e-5 for file in content["files"])
    assert not [path for path in exported.parent.iterdir() if path != exported]
    mode = {path.stat().st_mode & 0o777 for path in exported.iterdir()}
    mask = os.umask(0)
    os.umask(mask)
    assert mode == {0o666 & ~mask}
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    for path in exported.iterdir():  # no paths of this machine
        assert not re.search(rb"/[\w./-]+\.py", path.read_bytes()), path


def test_onnx_names_the_batch(exported):
    session = onnxruntime.InferenceSession(exported / "model.onnx", providers=["CPUExecutionProvider"])
    assert [(value.name, value.shape) for value in session.get_inputs()] == [("images", ["batch", 1, 8, 8])]
    assert [value.shape for value in session.get_outputs()] == [["batch", 10]]


def test_corrected_weights_fold_into_a_plain_backbone(tmp_path, export):
    run = train(tmp_path / "run", conditioning={})
    (path,) = run.rglob("*.ckpt")
    code, printed = export(path, tmp_path / "out", "--formats", "safetensors", "pt2")
    assert code == 0
    assert "corrected weights  2, folded\ncorrected tokens   none\n" in printed
    backbone = plain_vit()
    backbone.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    trained = load_model(path).eval()
    assert any(conditioned_weights(trained))
    with torch.no_grad():
        assert torch.equal(backbone(images(3)), trained(images(3)))
        assert torch.equal(run_pt2(tmp_path / "out" / "model.pt2", images(3)), trained(images(3)))


def test_a_checkpoint_of_weights_only_is_exported_with_its_corrections(tmp_path):
    trainer = make_trainer(tmp_path, [SpectralConditioning()], limit_train_batches=2)
    module = make_module()
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    batch = next(iter(make_loader()))[0]
    torch.save(batch, tmp_path / "batch.pt")
    words = [str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--class", "tests.tiny:TinyModule"]
    command.main([*words, "--data", str(tmp_path / "batch.pt"), "--formats", "safetensors", "pt2"])
    plain = TinyTransformer().eval()  # its LightningModule has one child, `net`
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(outputs(plain), outputs(module))
    assert json.loads((tmp_path / "out" / "export.json").read_text())["weights"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("hf/vit", HF_VIT),
     ("torchvision/VisionTransformer", {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2,
                                        "hidden_dim": 32, "mlp_dim": 64})],
)  # fmt: skip
def test_backbones_of_other_libraries(tmp_path, name, arguments):
    torch.manual_seed(0)
    task = ImageClassification(10, name, arguments)
    nn.init.normal_([p for p in task.parameters() if p.ndim == 2][-1])  # torchvision starts with zeros
    condition_(task, WeightRule())
    report = export_model(task, tmp_path / "out")
    assert [file.format for file in report.files] == [
        "safetensors", *(["huggingface"] if name.startswith("hf") else []), "onnx", "pt2",
    ]  # fmt: skip
    fresh = ImageClassification(10, name, arguments).eval()
    fresh.backbone.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    x = images(3, 16, 3)
    with torch.no_grad():
        expected = task.eval()(x)
        assert torch.equal(fresh(x), expected)
    assert largest_difference(run_onnx(tmp_path / "out" / "model.onnx", x), expected) < 1e-4
    if name.startswith("hf"):
        loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out" / "huggingface")
        with torch.no_grad():
            assert torch.equal(loaded(x).logits, expected)


def test_a_hugging_face_folder_could_not_say_that_tokens_are_corrected(tmp_path):
    task = ImageClassification(10, "hf/vit", HF_VIT)
    condition_(task, TokenRule())
    with pytest.raises(ConfigurationError, match=r"tokens at 'vit\.layers\.0' are corrected, and from_pretrained"):
        export_model(task, tmp_path / "out", formats=["safetensors", "huggingface"])
    report = export_model(task, tmp_path / "out", formats=["safetensors", "pt2"])
    assert set(report.tokens) == {"vit.layers.0"}


def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    task = ImageClassification(10, "hf/vit", HF_VIT)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    task.backbone = peft.get_peft_model(task.backbone, config)
    report = export_model(task, tmp_path / "out", formats=["safetensors", "pt2"], example=images(2, 16, 3))
    assert "merge_and_unload" in report.notes[0]
    merged = ImageClassification(10, "hf/vit", HF_VIT)
    merged.backbone = task.backbone.merge_and_unload()
    export_model(merged, tmp_path / "merged", formats=["safetensors", "huggingface"])
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "merged" / "huggingface")
    x = images(2, 16, 3)
    with torch.no_grad():
        assert largest_difference(loaded(x).logits, run_pt2(tmp_path / "out" / "model.pt2", x)) < 1e-5


def test_tied_weights(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=40, n_positions=16)
    language_model = transformers.GPT2LMHeadModel(config).eval()
    condition_(language_model, WeightRule())
    report = export_model(language_model, tmp_path / "out", formats=["safetensors", "huggingface"])
    assert report.notes == ("model.safetensors holds 1 shared tensors twice ('lm_head.weight', ...)",)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = language_model(ids).logits
        fresh = transformers.GPT2LMHeadModel(config).eval()
        fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
        assert fresh.lm_head.weight is fresh.transformer.wte.weight
        assert torch.equal(fresh(ids).logits, expected)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "huggingface")
        assert torch.equal(loaded(ids).logits, expected)


def test_padding_in_a_batch_of_the_users(tmp_path):
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, vocab_size=40
    )
    classifier = transformers.BertForSequenceClassification(config).eval()
    condition_(classifier, TokenRule())
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 5:] = mask[2, 2:] = 0
    batch = {"input_ids": torch.arange(27).view(3, 9), "attention_mask": mask}
    export_model(classifier, tmp_path / "out", formats=["pt2"], example=batch)
    other = {"input_ids": batch["input_ids"].flip(1)[:2], "attention_mask": mask[1:].flip(0)}
    with torch.no_grad():
        expected = classifier(**other).logits
        found = torch.export.load(tmp_path / "out" / "model.pt2").module()(**other).logits
    assert largest_difference(found, expected) < 1e-6


def test_a13_merged_and_unmerged_models_are_captured_alike():
    torch.manual_seed(0)
    live, x = TinyTransformer().eval(), next(iter(make_loader()))[0]
    condition_(live, WeightRule())
    with torch.no_grad():
        unmerged = torch.export.export(live, (x,)).module()(x)
        expected = live(x)
        fold_(live)
        merged = torch.export.export(live, (x,)).module()(x)
    assert largest_difference(unmerged, expected) < 1e-5
    assert largest_difference(merged, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(tmp_path, dtype):
    torch.manual_seed(0)
    network, x = TinyTransformer().to(dtype).eval(), next(iter(make_loader()))[0].to(dtype)
    condition_(network, WeightRule())
    export_model(network, tmp_path / "out", formats=["safetensors", "pt2"], example=x)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in state.values()} == {dtype}
    with torch.no_grad():
        assert torch.equal(run_pt2(tmp_path / "out" / "model.pt2", x), network(x))


class ExportsItself(SpectralConditioning):
    """Exports the model in the middle of a fit."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if batch_idx == 1:
            folder = Path(trainer.default_root_dir) / "out"
            export_model(pl_module, folder, formats=["safetensors", "pt2"], example=batch[0])
            pl_module.eval()
            with torch.no_grad():
                self.expected = pl_module(batch[0])
            pl_module.train()
            self.found = run_pt2(folder / "model.pt2", batch[0])


def test_a_model_in_training_is_exported_as_it_computes_and_stays_as_it_is(tmp_path):
    untouched, exporting = make_module(), make_module()
    make_trainer(tmp_path, [SpectralConditioning()], max_epochs=2).fit(untouched, make_loader())
    callback = ExportsItself()
    trainer = make_trainer(tmp_path, [callback])
    trainer.fit(exporting, make_loader())
    assert exporting.losses == untouched.losses[: len(exporting.losses)]
    assert torch.equal(callback.found, callback.expected)


def test_random_numbers_stay_as_they_are(tmp_path):
    torch.manual_seed(3)
    task = ImageClassification(10, TINY["model"]["init_args"]["backbone"], BACKBONE)
    before = torch.get_rng_state()
    export_model(task, tmp_path / "out", formats=["safetensors"])
    assert torch.equal(torch.get_rng_state(), before)
    assert task.training


class Late(pl.LightningModule):
    """Builds its network in configure_model and has no forward of its own."""

    def __init__(self):
        super().__init__()
        self.network = None

    def configure_model(self):
        if self.network is None:
            self.network = TinyTransformer()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_module_built_late_and_without_a_forward_is_run_through_its_backbone(tmp_path):
    torch.manual_seed(0)
    module, batch = Late(), next(iter(make_loader()))[0]
    trainer = make_trainer(tmp_path, [SpectralConditioning()])
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.save(batch, tmp_path / "batch.pt")
    words = [str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--class", f"{__name__}:Late"]
    command.main([*words, "--data", str(tmp_path / "batch.pt"), "--formats", "safetensors", "pt2"])
    assert json.loads((tmp_path / "out" / "export.json").read_text())["backbone"] == "network"
    with torch.no_grad():
        assert torch.equal(run_pt2(tmp_path / "out" / "model.pt2", batch), module.network.eval()(batch))


class NoCounterpart(nn.Module):
    """Holds an operation that ONNX does not know."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.example_input_array = torch.randn(2, 4)

    def forward(self, x):
        return torch.linalg.eigvalsh(torch.diag_embed(self.layer(x)))


class OtherGraph(NoCounterpart):
    """Computes something else when it is captured."""

    def forward(self, x):
        return self.layer(x) + (0.01 if torch.compiler.is_exporting() else 0)


class FixedBatch(NoCounterpart):
    """Takes batches of two only."""

    def forward(self, x):
        return self.layer(x) if x.shape[0] == 2 else self.layer(x)[:, :1]


def test_nothing_is_written_when_one_format_fails(tmp_path):
    with pytest.raises(ConfigurationError, match=r"ONNX can not hold the model: .*linalg_eigh.*--formats"):
        export_model(NoCounterpart(), tmp_path / "deep" / "er" / "out", formats=["safetensors", "onnx", "pt2"])
    assert not list(tmp_path.iterdir())


def test_a_format_that_was_not_asked_for_and_does_not_fit_is_left_out(tmp_path):
    report = export_model(NoCounterpart(), tmp_path / "out")
    assert [file.format for file in report.files] == ["safetensors", "pt2"]
    assert re.fullmatch(r"ONNX can not hold the model: .*linalg_eigh.*", report.left_out["onnx"])
    assert "--formats" not in report.left_out["onnx"]


def test_a_file_that_computes_something_else_is_not_written(tmp_path):
    with pytest.raises(ExportMismatchError, match=r"'model\.pt2' does not compute .*; nothing was written"):
        export_model(OtherGraph(), tmp_path / "out", formats=["safetensors", "pt2"])
    assert not list(tmp_path.iterdir())
    report = export_model(OtherGraph(), tmp_path / "out", formats=["safetensors", "pt2"], tolerance=1.0)
    assert report.files[1].difference > 1e-4


class Random(NoCounterpart):
    def forward(self, x):
        return self.layer(x) + torch.rand(())


class NoOutput(NoCounterpart):
    def forward(self, x):
        return None


def test_models_that_can_not_be_compared(tmp_path):
    for network, message in ((Random(), "something else at every call"), (NoOutput(), "returns no tensor")):
        with pytest.raises(ConfigurationError, match=message):
            export_model(network, tmp_path / "out", formats=["safetensors"])


def test_a_place_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"'.*out' can not be written: (Not a directory|File exists)"):
        export_model(OtherGraph(), tmp_path / "file" / "out", formats=["safetensors"])


class Sensitive(OtherGraph):
    def forward(self, x):
        return super().forward(x) + 1e6 * (x - x.sum(-1, keepdim=True))


def test_a_model_that_is_as_sensitive_itself_is_told(tmp_path):
    with pytest.raises(ExportMismatchError) as plain:
        export_model(OtherGraph(), tmp_path / "out", formats=["pt2"])
    assert "own outputs" not in str(plain.value)
    with pytest.raises(ExportMismatchError, match=r"own outputs change by [\d.e-]+ where its input .* one rounding"):
        export_model(Sensitive(), tmp_path / "out", formats=["pt2"], tolerance=1e-9)


def other_graph():
    return OtherGraph()


def test_exit_code_of_a_file_that_computes_something_else(tmp_path, export):
    checkpoint = {"pytorch-lightning_version": "2.6.6", "state_dict": OtherGraph().state_dict()}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    words = (tmp_path / "a.ckpt", tmp_path / "out", "--class", f"{__name__}:other_graph", "--formats", "pt2")
    code, printed = export(*words)
    assert code == 1
    assert "nothing was written" in printed
    assert not (tmp_path / "out").exists()
    assert export(*words, "--tolerance", 1)[0] == 0


def test_a_model_that_takes_one_batch_size_only(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--fixed-batch exports it for batches of 2 only"):
        export_model(FixedBatch(), tmp_path / "out", formats=["pt2"])
    export_model(FixedBatch(), tmp_path / "out", formats=["pt2"], dynamic_batch=False)
    assert run_pt2(tmp_path / "out" / "model.pt2", torch.ones(2, 4)).shape == (2, 4)


def test_out_exists(tmp_path, both, export):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    code, printed = export(both, tmp_path / "out")
    assert code == 2
    assert "exists already: give another folder, or remove it" in printed
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_library_is_named_with_what_installs_it(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=rf'needs \'{missing}\'.*pip install "lit_cond\[export\]"'):
        export_model(OtherGraph(), tmp_path / "out", formats=["onnx"])
    assert not list(tmp_path.iterdir())


def needs_an_argument(width):
    return TinyModule()


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "does not record the class of its model"), ("tests.tiny", "not of the form package.module:Class"),
     ("tests.tiny:Nothing", "can not be imported: AttributeError"), ("no_such:Module", "No module named 'no_such'"),
     ("tests.tiny:WIDTH", "is no class and no function"), (f"{__name__}:plain_vit", "does not fit VisionTransformer"),
     (f"{__name__}:needs_an_argument", "can not be built: TypeError"),
     ("lit_cond.tasks:ImageClassification", "can not be built: TypeError: .*num_classes"),
     ("tests.tiny:TinyModule", "does not say what it takes: give a batch with --data")],
)  # fmt: skip
def test_the_class_of_the_model(tmp_path, export, name, message):
    module = make_module()
    checkpoint = {"pytorch-lightning_version": "2.6.6", "state_dict": module.state_dict()}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    code, printed = export(tmp_path / "a.ckpt", tmp_path / "out", *(["--class", name] if name else []))
    assert code == 2
    assert re.search(message, printed)
    assert not (tmp_path / "out").exists()


def test_words_that_are_wrong(tmp_path, both, export):
    for words, message in {
        ("nowhere.ckpt", "out"): "there is no checkpoint 'nowhere.ckpt'",
        (both, "out", "--formats", "onx"): "invalid choice: 'onx'",
        (both, "out", "--tolerance", "-1"): "give 0 or more",
        (both, "out", "--backbone", "bckbone"): "the model has no part 'bckbone': give one of 'backbone'",
        (both, "out", "--formats", "huggingface"): "the backbone is VisionTransformer, no model of transformers",
        (both, "out", "--data", "nowhere.pt"): "there is no file 'nowhere.pt'",
        (both,): "OUT",
    }.items():
        code, printed = export(*words)
        assert code == 2
        assert message in printed
