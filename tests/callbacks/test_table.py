"""The table of a conditioning callback, printed and logged: what was changed, what was left alone and why."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from tests.tiny import SeparateAttention, TinyModule, TinyTransformer, make_loader, make_module, make_trainer

SETTINGS = {"limit_train_batches": 1}


class Mixed(TinyModule):
    """Attention next to what looks like it: a mixer that computes no softmax, a fused weight that nothing runs."""

    def __init__(self) -> None:
        super().__init__("separate")
        self.example_input_array = torch.zeros(1, 6, 12)
        self.net.mixer = NoSoftmax()
        self.net.odd = nn.Module()
        self.net.odd.qkv = nn.Linear(4, 12)

    def forward(self, x):
        return super().forward(x) + 0 * self.net.mixer(self.net.embed(x)).sum()


class NoSoftmax(SeparateAttention):
    def forward(self, x):
        return self.q_proj(x) * self.k_proj(x) * self.v_proj(x)


def texts(folder):
    """The texts in the event files of a folder, by tag."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag.removesuffix("/text_summary"): [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_the_table_is_logged_as_a_text(tmp_path):
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path)
    callbacks = [SpectralConditioning(roles=["key"]), ConditionedTokens()]
    module = make_module()
    make_trainer(tmp_path, callbacks, logger=logger, **SETTINGS).fit(module, make_loader())
    logger.finalize("success")
    found = texts(logger.log_dir)
    (table,) = found["lit_cond/SpectralConditioning"]
    lines = table.splitlines()
    assert lines[0] == lines[-1] == "```"
    rows = [line.split("  ") for line in lines if line.startswith("net.blocks.")]
    assert [row[-1] for row in rows] == ["left alone: not in roles", "spectral x 1", "left alone: not in roles"] * 2
    (tokens,) = found["lit_cond/ConditionedTokens"]
    assert "input of 'net.blocks.0', 32 channels" in tokens


def test_loggers_that_take_no_texts_and_no_logger(tmp_path):
    for logger in (CSVLogger(tmp_path), False):
        module = make_module()
        trainer = make_trainer(tmp_path, [SpectralConditioning()], logger=logger, **SETTINGS)
        trainer.fit(module, make_loader())
        assert trainer.state.finished


def describe(callback, module, tmp_path):
    seen = []

    class Kept(type(callback)):
        def describe(self, pl_module):
            seen.append(super().describe(pl_module))
            return seen[-1]

    callback.__class__ = Kept
    make_trainer(tmp_path, [callback], **SETTINGS).fit(module, make_loader())
    (text,) = seen
    return text.splitlines()


def test_what_was_left_alone_is_listed_with_the_reason(tmp_path):
    lines = describe(SpectralConditioning(exclude=["odd", "blocks.1.attn"]), Mixed(), tmp_path)
    rows = {line.split()[0]: line.split("  ")[-1] for line in lines if line.startswith("net.blocks.")}
    assert rows == {"net.blocks.0.attn": "spectral x 1", "net.blocks.1.attn": "left alone: not selected"}
    reason = lines[lines.index("left alone") + 1]
    assert reason.startswith("  net.mixer: ")
    assert "softmax" in reason
    assert lines[lines.index("not understood") + 1].startswith("  net.odd: ")


def test_layers_outside_of_include_may_be_of_any_kind(tmp_path):
    lines = describe(SpectralConditioning(include=["blocks.0.attn"]), Mixed(), tmp_path)
    assert any(line.startswith("net.blocks.0.attn") and line.endswith("spectral x 1") for line in lines)
    assert "not understood" in lines


def test_weights_that_can_not_be_measured_are_no_obstacle(tmp_path):
    module = make_module(attention="separate")
    query = module.net.blocks[1].attn.q_proj
    nn.utils.parametrizations.orthogonal(query)
    lines = describe(SpectralConditioning(exclude=["blocks.1.attn"]), module, tmp_path)
    assert not any(line.startswith("net.blocks.1.attn") for line in lines)


class KeylessAttention(nn.Module):
    """The query is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 3, 32))
        self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        query = self.query.expand(len(x), -1, -1)
        return nn.functional.scaled_dot_product_attention(query, self.k_proj(x), self.v_proj(x))


def test_roles_without_a_matrix_are_listed_with_the_reason(tmp_path):
    class Pooled(TinyModule):
        def __init__(self) -> None:
            super().__init__("separate")
            self.example_input_array = torch.zeros(1, 6, 12)
            self.net = nn.Sequential(TinyBody(), KeylessAttention(), Mean())

    class TinyBody(TinyTransformer):
        def __init__(self) -> None:
            super().__init__("separate", depth=1)
            self.head = nn.Identity()

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return x

    class Mean(nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 5)

        def forward(self, x):
            return super().forward(x.mean(1))

    lines = describe(SpectralConditioning(), Pooled(), tmp_path)
    assert lines[lines.index("without a matrix") + 1].startswith("  net.1: no query matrix: ")
