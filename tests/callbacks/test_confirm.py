"""What was found without running the model is confirmed by the first training batch."""

import pytest
import torch
from torch import nn

from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.errors import UnknownAttentionError
from lit_cond.surgery import find_attention, register_fused, strengths
from lit_cond.surgery.families import FUSED, class_path
from tests.tiny import Block, FusedAttention, TinyModule, make_loader, make_module, make_trainer


class InterleavedAttention(FusedAttention):
    """Query, key and value rows of each head stand together."""

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Impostor(nn.Module):
    """Has the names of attention and computes none."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return torch.sigmoid(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x)


@pytest.fixture
def described(request):
    """A class with a wrong description, taken back afterwards."""
    register_fused(InterleavedAttention, "qkv")
    yield
    del FUSED[f"{InterleavedAttention.__module__}.{InterleavedAttention.__qualname__}"]


def with_attention(make):
    module = make_module()
    for block in module.net.blocks:
        block.attn = make()
    return module


def fit(tmp_path, module, callback, **kwargs):
    make_trainer(tmp_path, [callback], max_steps=3, **kwargs).fit(module, make_loader())


@pytest.mark.parametrize("callback", [SpectralConditioning, ConditionedTokens])
def test_layers_of_the_table_are_confirmed(tmp_path, callback, caplog):
    module = make_module()
    assert not any(site.traced for site in find_attention(module))
    with caplog.at_level("INFO"):
        fit(tmp_path, module, callback())
    count = 2 if callback is SpectralConditioning else 1
    assert f"{count} of {count} layers confirmed at the first batch" in caplog.text
    assert all(site.traced for site in find_attention(module))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


def test_a_wrong_description_stops_the_run_with_both_rows(tmp_path, described):
    module = with_attention(InterleavedAttention)
    with pytest.raises(UnknownAttentionError, match=r"reads its query from .*qkv.*\+ 24i.*table of layouts says"):
        fit(tmp_path, module, SpectralConditioning())
    assert class_path(module.net.blocks[0].attn) in FUSED
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


def test_what_has_the_names_of_attention_and_is_none_stops_the_run(tmp_path):
    module = with_attention(Impostor)
    with pytest.raises(UnknownAttentionError, match=r"net.blocks.0.attn.*computes no softmax.*exclude"):
        fit(tmp_path, module, SpectralConditioning())


def test_confirming_changes_no_loss(tmp_path):
    losses = []
    for confirmed in (True, False):
        module = make_module()
        if not confirmed:  # traced at setup instead
            module.example_input_array = torch.randn(2, 6, 12)
        fit(tmp_path, module, SpectralConditioning("identity", scale=0.5))
        losses.append(module.losses)
    assert losses[0] == losses[1]


def test_an_example_input_is_traced_at_setup(tmp_path):
    """The layout of this class is described nowhere; the model's own example shows it."""
    module = with_attention(InterleavedAttention)
    with pytest.raises(UnknownAttentionError):
        find_attention(module)
    module.example_input_array = torch.randn(2, 6, 12)
    fit(tmp_path, module, SpectralConditioning())
    assert [str(v.layout.rows) for _, v in find_attention(module)[0]] == [
        f"[{8 * i}:{8 * i + 8}) + 24i, i<4" for i in range(3)
    ]


def test_tokens_of_a_module_made_by_the_user_are_traced(tmp_path):
    assert isinstance(make_module().net.blocks[0], Block)
    module = TinyModule()
    module.example_input_array = (torch.randn(2, 6, 12),)
    fit(tmp_path, module, ConditionedTokens())


def test_the_default_dtype_of_lightning_does_not_round_the_strength(tmp_path):
    module = make_module()
    fit(tmp_path, module, SpectralConditioning(strength=0.3), precision="bf16-true")
    assert strengths(module) == pytest.approx([0.3, 0.3], rel=1e-6)
    assert torch.get_default_dtype() == torch.float32
