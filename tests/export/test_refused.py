"""What is not exported, or not under the names that wrappers give: each in one line, with nothing left behind."""

import resource
import sys

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_cond import WeightRule, condition_
from lit_cond.errors import ConfigurationError, ExportMismatchError, MissingExtraError
from lit_cond.export import export_model
from lit_cond.export.command import main
from tests.tiny import TinyModule, TinyTransformer, largest_difference, make_loader, make_module

X = next(iter(make_loader()))[0]
WEIGHTS = ["safetensors", "pt2"]


def test_a_model_with_nan_in_its_weights(tmp_path):
    module = make_module()
    with torch.no_grad():
        module.net.head.weight[0] = float("nan")
    for formats in (None, ["safetensors"]):
        with pytest.raises(ConfigurationError, match=r"holds NaN or infinities, as 'net\.head\.weight' does"):
            export_model(module, tmp_path / "out", formats=formats, example=X)
    module.example_input_array = None
    with pytest.raises(ConfigurationError, match=r"'net\.head\.weight' of TinyModule holds NaN"):
        export_model(module, tmp_path / "out", formats=["safetensors"])
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_is_not_used_may_hold_nan(tmp_path):
    module = make_module()
    module.net.unused = nn.Parameter(torch.full((2,), float("nan")))
    report = export_model(module, tmp_path / "out", formats=WEIGHTS, example=X)
    assert report.notes == ("1 parameters hold NaN or infinities ('net.unused', ...)",)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_example_that_is_not_finite(tmp_path, value):
    with pytest.raises(ConfigurationError, match=r"holds NaN or infinities, and so does the example itself: .*--data"):
        export_model(make_module(), tmp_path / "out", formats=["safetensors"], example=torch.full_like(X, value))


class Overflows(TinyModule):
    def forward(self, x):
        return super().forward(x) * torch.tensor(float("inf"))


def test_outputs_that_overflow(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Overflows computes of the example holds NaN.*give another one"):
        export_model(Overflows(), tmp_path / "out", formats=["safetensors"], example=X)


class OtherWhenCaptured(TinyModule):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        y = super().forward(x)
        if not torch.compiler.is_exporting():
            return y
        return {"number": (y, y), "shape": y[:, :1], "nan": y * float("nan")}[self.kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("number", "it returns 2 tensors and the model 1"), ("shape", r"output 0 has the shape \(16, 1\) and the model's"),
     ("nan", "output 0 holds NaN or infinities where")],
)  # fmt: skip
def test_how_outputs_differ_where_no_tolerance_helps(tmp_path, kind, reason):
    with pytest.raises(ExportMismatchError, match=reason) as caught:
        export_model(OtherWhenCaptured(kind), tmp_path / "out", formats=["pt2"], example=X, tolerance=1e9)
    assert "--tolerance" not in str(caught.value)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped(kind):
    module = make_module()
    condition_(module.net, WeightRule())
    if kind == "ddp":
        module.net = DistributedDataParallel(module.net)
    elif kind == "data parallel":
        module.net = nn.DataParallel(module.net)
    elif kind == "block":
        module.net.blocks[0] = torch.compile(module.net.blocks[0], backend="eager")
    elif kind == "compiled ddp":
        module.net = torch.compile(DistributedDataParallel(module.net), backend="eager")
    else:
        module.net = torch.compile(module.net, backend="eager")
    return torch.compile(module, backend="eager") if kind == "all" else module


@pytest.mark.parametrize("kind", ["compiled", "block", "all", "ddp", "data parallel", "compiled ddp"])
def test_names_of_wrappers_are_not_in_the_file(tmp_path, kind, one_process):
    module = wrapped(kind).eval()
    names = list(module.state_dict())
    report = export_model(module, tmp_path / "out", formats=WEIGHTS, example=X)
    assert (report.backbone, report.weights) == ("net", 2)
    assert report.backbone_class.endswith("TinyTransformer")
    plain = TinyTransformer().eval()
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    with torch.no_grad():
        assert largest_difference(plain(X), module(X)) < 1e-6
    assert list(module.state_dict()) == names  # the model stays as it is


def test_a_hugging_face_folder_of_a_compiled_model(tmp_path):
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=40
    )
    model = torch.compile(transformers.BertForSequenceClassification(config).eval(), backend="eager")
    export_model(model, tmp_path / "out", formats=["safetensors", "huggingface"])
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out" / "huggingface").eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_bfloat16_goes_without_onnx_unless_it_is_asked_for(tmp_path):
    module = make_module().to(torch.bfloat16)
    report = export_model(module, tmp_path / "out", example=X)
    assert [file.format for file in report.files] == ["safetensors", "pt2"]
    assert report.left_out["onnx"].startswith("onnxruntime can not run model.onnx: ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "export.json", "model.pt2", "model.safetensors",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"onnxruntime can not run model\.onnx: .*leave onnx out"):
        export_model(module, tmp_path / "asked", example=X, formats=["onnx"])
    assert not (tmp_path / "asked").exists()


@pytest.fixture
def small_files():
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("format_", ["safetensors", "huggingface", "onnx", "pt2"])
def test_a_full_disk(tmp_path, format_, small_files):
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=40
    )
    model = transformers.BertForSequenceClassification(config)
    with pytest.raises(ConfigurationError, match=r"'(model\.\w+|huggingface)' can not be written: .+") as caught:
        export_model(model, tmp_path / "out", formats=[format_])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def command_fails(tmp_path, capsys, *words):
    torch.save({"pytorch-lightning_version": "2.6.6", "state_dict": make_module().state_dict()}, tmp_path / "a.ckpt")
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--class", "tests.tiny:TinyModule", *words])
    assert caught.value.code == 2
    assert not (tmp_path / "out").exists()
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed


def test_an_empty_batch(tmp_path, capsys):
    np.save(tmp_path / "empty.npy", X[:0].numpy())
    printed = command_fails(tmp_path, capsys, "--data", str(tmp_path / "empty.npy"))
    assert "the example is empty (float32 (0, 6, 12)): give one sample or more" in printed


def test_safetensors_is_missing(tmp_path, monkeypatch):
    class WithoutModels:
        def __getattr__(self, name):
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")

    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "transformers", WithoutModels())
    with pytest.raises(MissingExtraError, match=r"model\.safetensors needs 'safetensors'.*lit_cond\[export\]"):
        export_model(make_module(), tmp_path / "out", example=X)
    assert not list(tmp_path.iterdir())
