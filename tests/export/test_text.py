"""Graphs of text models: lengths of sequences, caches of keys and values."""

import onnxruntime
import pytest
import torch
import transformers
from torch import nn

from lit_cond import TokenRule, condition_
from lit_cond.errors import ConfigurationError
from lit_cond.export import export_model
from tests.tiny import largest_difference

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}


def run_onnx(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_sequences_of_other_lengths(tmp_path, tokens):
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)).eval()
    if tokens:
        condition_(model, TokenRule())
    report = export_model(model, tmp_path / "out", formats=["onnx", "pt2"] if tokens else ["onnx"])
    # Above 32 tokens their correction is computed in another way, which the graph does not hold.
    assert {file.free for file in report.files} == {("batch", f"length (2 to {32 if tokens else 512})")}
    program = torch.export.load(tmp_path / "out" / "model.pt2").module() if tokens else model
    for length in (2, 9, 25, 40):
        x = torch.randint(0, 40, (3, length))
        with torch.no_grad():
            expected = model(x).logits
            assert largest_difference(run_onnx(tmp_path / "out" / "model.onnx", x), expected) < 1e-5
            if tokens and length > 32:
                with pytest.raises((AssertionError, RuntimeError), match="32"):
                    program(input_ids=x)
            else:
                assert largest_difference(program(input_ids=x).logits, expected) < 1e-6


class FixedLength(nn.Module):
    """Takes any length, and means something else than a graph can hold by it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(40, 4)
        self.example_input_array = torch.randint(0, 40, (2, 12))

    def forward(self, ids):
        return self.layer(ids).sum(1) * (2.0 if ids.shape[1] == 12 else 3.0)


class OneLength(FixedLength):
    def forward(self, ids):
        return self.layer(ids).view(-1, 48)


class WrongOutside(FixedLength):
    """Its graph is right below 20 positions only."""

    def forward(self, ids):
        return self.layer(ids).sum(1) * (2.0 if ids.shape[1] < 20 else 3.0)


@pytest.mark.parametrize(
    ("model", "free", "reasons"),
    [(FixedLength(), {"batch"}, ["torch.export can not", "torch.export can not"]),
     (OneLength(), {"batch"}, ["the model takes no other length", "the model takes no other length"]),
     (WrongOutside(), {"batch", "length (2 to 19)"}, ["for length 20 it would compute something else without an err"])],
)  # fmt: skip
def test_lengths_that_a_graph_can_not_take(tmp_path, model, free, reasons):
    report = export_model(model, tmp_path / "out", formats=["onnx", "pt2"])
    assert set().union(*(file.free for file in report.files)) == free
    assert len(report.notes) == len(reasons)
    for note, reason in zip(report.notes, reasons, strict=True):
        assert "takes sequences of length 12 only: " in note
        assert reason in note
    x = torch.randint(0, 40, (2, 21))  # no silent answer
    with pytest.raises(Exception, match=r"Got: 21 Expected: 12"):
        run_onnx(tmp_path / "out" / "model.onnx", x)


class Around(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, ids):
        return self.net(ids)


def test_a_cache_of_keys_and_values_is_left_out(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=40, n_positions=32)
    model = Around(transformers.GPT2LMHeadModel(config)).eval()
    report = export_model(model, tmp_path / "out", formats=["huggingface", "pt2"], backbone="net")
    assert report.files[1].free == ("batch", "length (2 or more)")
    assert any("(use_cache=False)" in note for note in report.notes)
    assert model.net.config.use_cache
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out" / "huggingface").use_cache
    x = torch.randint(0, 40, (3, 7))
    with torch.no_grad():
        expected = model(x).logits
        found = torch.export.load(tmp_path / "out" / "model.pt2").module()(x)
    assert largest_difference(found.logits, expected) < 1e-5
    assert [key for key, value in found.items() if value is not None] == ["logits"]


class Unknown:
    def __init__(self, value):
        self.value = value


class ReturnsUnknown(FixedLength):
    def forward(self, ids):
        return {"sum": self.layer(ids).sum(1), "more": Unknown(1)}


def test_an_output_that_no_graph_holds_is_one_line(tmp_path):
    with pytest.raises(ConfigurationError, match=r"it returns \S*Unknown, which a graph can not; leave") as caught:
        export_model(ReturnsUnknown(), tmp_path / "out", formats=["pt2"])
    assert len(str(caught.value)) < 250


class MoreThanTensors(FixedLength):
    def forward(self, ids):
        return {"sum": self.layer(ids).sum(1), "n": ids.shape[0], "none": None, "scale": 1.5}


def test_outputs_that_are_no_tensors(tmp_path):
    report = export_model(MoreThanTensors(), tmp_path / "out", formats=["onnx", "pt2"], dynamic_batch=True)
    assert [note for note in report.notes if "('n', 'scale') were not compared; model.onnx does not have them" in note]
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["ids"]
    assert len(session.get_outputs()) == 1
    found = torch.export.load(tmp_path / "out" / "model.pt2").module()(torch.randint(0, 40, (5, 12)))
    assert found["n"] == 5
