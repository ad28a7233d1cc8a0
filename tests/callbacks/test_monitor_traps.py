"""What a hostile review of the monitor found."""

import copy
import io

import lightning.pytorch as pl
import pytest
import timm
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from lit_cond.callbacks import ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.errors import ConfigurationError, LitCondWarning
from lit_cond.surgery import find_attention, register_fused
from tests.callbacks.test_monitor import Record
from tests.callbacks.test_monitor_problems import Wrapped, alone, first_row
from tests.tiny import TinyModule, make_loader, make_module, make_trainer


def losses_of(tmp_path, make, data, monitors, steps=3):
    torch.manual_seed(0)
    module = Wrapped(make())
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(float(outputs["loss"]))

    trainer = make_trainer(tmp_path, [*monitors, Look()], max_steps=steps, max_epochs=-1)
    trainer.fit(module, data)
    return seen, {k: v.clone() for k, v in module.state_dict().items()}, torch.random.get_rng_state()


class Noisy(nn.Module):
    """Draws random numbers between the projection and the scores."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(8, 24)
        self.num_heads = 2

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.attn(x).chunk(3, dim=-1))
        q = F.dropout(q, 0.3, self.training) + 0.01 * torch.randn_like(q)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


register_fused(Noisy, "attn")


class NoisyWeight(nn.Module):
    def forward(self, weight):
        return weight + 0.01 * torch.randn_like(weight)


def noisy_attention():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    parametrize.register_parametrization(module, "in_proj_weight", NoisyWeight())
    return SelfAttention(module)


def normalised_attention():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    parametrizations.spectral_norm(module, "in_proj_weight")
    return SelfAttention(module)


class SelfAttention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: timm.create_model("levit_128s"), (2, 3, 224, 224)),
        (lambda: nn.Sequential(Noisy()), (2, 5, 8)),
        (noisy_attention, (2, 5, 8)),
        (normalised_attention, (2, 5, 8)),
    ],
    ids=["batch statistics", "random operands", "random weights", "spectral norm of a fused weight"],
)
@pytest.mark.filterwarnings("ignore::lit_cond.errors.LitCondWarning")
def test_a_jacobian_moves_no_statistics_and_no_random_numbers(tmp_path, make, shape):
    data = torch.utils.data.DataLoader([torch.randn(shape)] * 3, batch_size=None)
    plain = losses_of(tmp_path, make, data, [])
    monitor = ConditionNumberMonitor(every_n_steps=1, intervals={"jacobian": 1})
    measured = losses_of(tmp_path, make, data, [monitor])
    assert plain[0] == measured[0]
    assert all(torch.equal(v, measured[1][k]) for k, v in plain[1].items())
    assert torch.equal(plain[2], measured[2])


def test_padded_keys_of_cross_attention_drop_no_queries(tmp_path):
    """H1 for a decoder whose source is padded to the length of its target."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
    target, memory = torch.randn(1, 10, 16), torch.randn(1, 6, 16)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, memory, mask):
            return self.layer(target, memory, memory_key_padding_mask=mask)

    rows = []
    for length in (6, 10, 12):
        padded = torch.zeros(1, length, 16)
        padded[:, :6] = memory
        mask = torch.arange(length).expand(1, length) >= 6
        monitor = ConditionNumberMonitor(quantities=["scores", "entropy", "attention"], prog_bar=None)
        rows.append(first_row(tmp_path, Wrapped(Decoder()), alone({"memory": padded, "mask": mask}), monitor))
    for row in rows[1:]:
        for key in ("cond/scores/net.layer.multihead_attn", "entropy/scores/net.layer.multihead_attn"):
            assert row[key] == pytest.approx(rows[0][key], rel=1e-4), key


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_whatever_the_size_of_the_batch(tmp_path, batch, kv_heads):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=1, intermediate_size=16,
        vocab_size=20,
    )  # fmt: skip
    net = transformers.AutoModel.from_config(config)
    ids = torch.arange(5).expand(batch, 5)
    monitor = ConditionNumberMonitor(quantities=["scores", "jacobian", "entropy"], prog_bar=None)
    row = first_row(tmp_path, Wrapped(net), alone({"input_ids": ids}), monitor)
    torch.manual_seed(0)
    again = transformers.AutoModel.from_config(config)
    monitor = ConditionNumberMonitor(quantities=["scores", "jacobian", "entropy"], prog_bar=None)
    single = first_row(tmp_path, Wrapped(again), alone({"input_ids": ids[:1]}), monitor)
    for key in ("cond/scores/mean", "cond/jacobian/mean", "entropy/scores/mean"):
        assert row[key] == pytest.approx(single[key], rel=1e-3), key


class Biased(nn.Module):
    """Eager attention with a position bias."""

    def __init__(self, bias=0.0, hidden=None, after=None):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.num_heads = 2
        self.register_buffer("bias", bias * torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))
        self.hidden = hidden
        self.after = after

    def forward(self, x, mask=None):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        logits = q @ k.mT * 8**-0.5
        if bool(self.bias.any()):
            logits = logits + self.bias
        if mask is not None:
            logits = logits.masked_fill(mask[:, None, None, :], self.hidden)
        p = logits.softmax(-1)
        self.shown = p.detach()
        if self.after is not None:
            p = p.masked_fill(self.after, 0.0)
        return (p @ v).transpose(1, 2).flatten(2)


def entropy_of(p):
    return float(torch.special.entr(p.double()).sum(-1).mean())


def test_a_bias_counts_in_bfloat16(tmp_path):
    torch.manual_seed(0)
    net = Biased(bias=2.0)
    with torch.no_grad():
        net.q_proj.weight.mul_(8)
    monitor = ConditionNumberMonitor(quantities=["entropy"], prog_bar=None)
    row = first_row(tmp_path, Wrapped(net), alone(torch.randn(1, 6, 16)), monitor, precision="bf16-mixed")
    assert row["entropy/scores/mean"] == pytest.approx(entropy_of(net.shown), rel=1e-2)
    without = (net.shown.log() - net.bias).softmax(-1)
    assert abs(entropy_of(without) - entropy_of(net.shown)) > 0.015


def test_a_normalised_query_is_no_factor_in_bfloat16(tmp_path):
    values = []
    for precision in ("32-true", "bf16-mixed"):
        torch.manual_seed(0)
        net = timm.layers.Attention(128, 2, qk_norm=True, norm_layer=nn.LayerNorm)
        monitor = ConditionNumberMonitor(quantities=["jacobian"], prog_bar=None)
        row = first_row(tmp_path, Wrapped(net), alone(torch.randn(1, 5, 128)), monitor, precision=precision)
        values.append(row["cond/jacobian/mean"])
    assert values[1] == pytest.approx(values[0], rel=0.05)


@pytest.mark.parametrize("hidden", [-1e4, -1e9, -torch.inf])
def test_any_number_that_hides_hides(tmp_path, hidden):
    rows = []
    for length in (4, 6):
        torch.manual_seed(0)
        net = Biased(hidden=hidden)
        x = torch.randn(1, 6, 16)[:, :length]
        mask = torch.arange(length).expand(1, length) >= 4
        monitor = ConditionNumberMonitor(quantities=["scores", "entropy", "attention"], prog_bar=None)
        rows.append(first_row(tmp_path, Wrapped(net), alone({"x": x, "mask": mask}), monitor))
    for key in ("cond/scores/mean", "entropy/scores/mean", "entropy_share/scores/mean", "cond/attention/mean"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=1e-3), key


def test_a_softmax_that_is_masked_afterwards_is_no_attention_matrix(tmp_path):
    net = Biased(after=torch.ones(6, 6, dtype=torch.bool).triu(1))
    monitor = ConditionNumberMonitor(quantities=["attention"], prog_bar=None)
    with pytest.raises(ConfigurationError, match="passes `masked_fill` before it meets the values"):
        first_row(tmp_path, Wrapped(net), alone(torch.randn(1, 6, 16)), monitor)


class Parts(nn.Module):
    """Queries in two parts, one softmax each."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.num_heads = 2

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        parts = [F.scaled_dot_product_attention(part, k, v) for part in q.chunk(2, dim=2)]
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)


class Packed(Parts):
    """Two sequences behind one another, one softmax each (Qwen-VL)."""

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        parts = [F.scaled_dot_product_attention(*(t[:, :, i : i + 3] for t in (q, k, v))) for i in (0, 3)]
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)


def test_sequence_after_sequence_is_measured(tmp_path):
    torch.manual_seed(0)
    net, x = Packed(), torch.randn(1, 6, 16)
    start = copy.deepcopy(net)
    monitor = ConditionNumberMonitor(quantities=["scores"], prog_bar=None)
    row = first_row(tmp_path, Wrapped(net), alone(x), monitor)
    q, k = (proj(x[:, :3]).unflatten(-1, (2, 8)).transpose(1, 2) for proj in (start.q_proj, start.k_proj))
    p = (q.double() @ k.double().mT * 8**-0.5).softmax(-1)
    assert row["cond/scores/mean"] == pytest.approx(float(torch.linalg.cond(p).mean()), rel=1e-4)


@pytest.mark.parametrize("make", [Parts, lambda: timm.layers.DiffAttention(16, 2)], ids=["parts", "difference"])
def test_several_softmaxes_of_one_sequence_are_declined(tmp_path, make):
    monitor = ConditionNumberMonitor(quantities=["scores"], prog_bar=None)
    with pytest.raises(ConfigurationError, match="ran 2 softmaxes for 1 attention layer"):
        first_row(tmp_path, Wrapped(make()), alone(torch.randn(1, 6, 16)), monitor)


@pytest.mark.parametrize("where", ["net", "attention"])
def test_a_compiled_forward_is_looked_into_on_the_side(tmp_path, where):
    def run(monitors):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module, logger = make_module(), Record()
        part = module.net if where == "net" else module.net.blocks[0].attn
        part.forward = torch.compile(part.forward, backend="aot_eager")
        make_trainer(tmp_path, monitors, logger=logger, max_epochs=2).fit(module, make_loader())
        return module, logger, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain, _, graphs = run([])
    intervals = {"scores": 1, "tokens": 1}
    module, logger, now = run([ConditionNumberMonitor(quantities=list(intervals), intervals=intervals, prog_bar=None)])
    assert module.losses == plain.losses
    assert len(logger.series("cond/scores/net.blocks.0.attn")) == 8
    assert now == graphs > 0


def test_a_compiled_method_is_named(tmp_path):
    class Method(TinyModule):
        def __init__(self):
            super().__init__()
            self.loss = torch.compile(self.compute, backend="aot_eager")

        def compute(self, x, y):
            return F.cross_entropy(self(x), y)

        def training_step(self, batch, batch_idx):
            return self.loss(*batch)

    with pytest.warns(LitCondWarning, match="loss is compiled"):
        make_trainer(tmp_path, [ConditionNumberMonitor()]).fit(Method(), make_loader())


def test_a_schedule_behind_the_monitor_is_refused(tmp_path):
    callbacks = [SpectralConditioning(), ConditionNumberMonitor(), StrengthSchedule("linear")]
    with pytest.raises(ConfigurationError, match="list StrengthSchedule first"):
        make_trainer(tmp_path, callbacks).fit(make_module(), make_loader())


def test_two_monitors_of_one_quantity_are_refused(tmp_path):
    callbacks = [ConditionNumberMonitor(include=["net.blocks.0.attn"]), ConditionNumberMonitor(quantities=["query"])]
    with pytest.raises(ConfigurationError, match="two ConditionNumberMonitors measure query"):
        make_trainer(tmp_path, callbacks).fit(make_module(), make_loader())
    callbacks = [ConditionNumberMonitor(quantities=["key"]), ConditionNumberMonitor(quantities=["query"])]
    make_trainer(tmp_path, callbacks).fit(make_module(), make_loader())


def test_copies_made_in_a_measured_step_carry_no_probe(tmp_path):
    class Copying(TinyModule):
        def training_step(self, batch, batch_idx):
            self.copies = [copy.deepcopy(self.net)]
            torch.save(self.net, buffer := io.BytesIO())
            buffer.seek(0)
            self.copies.append(torch.load(buffer, weights_only=False))
            return F.cross_entropy(self(batch[0]), batch[1])

    module = Copying()
    make_trainer(tmp_path, [ConditionNumberMonitor()], max_steps=1).fit(module, make_loader())
    x = next(iter(make_loader()))[0]
    for other in module.copies:
        kinds = {type(m.__dict__["forward"]).__name__ for m in other.modules() if "forward" in m.__dict__}
        assert kinds == {"InstanceForward"}
        assert other(x).shape == (16, 5)


def test_names_of_layers_fit_into_keys(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleDict({"rgb/left": nn.MultiheadAttention(8, 2, batch_first=True)})
            self.max = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = self.towers["rgb/left"](x, x, x)[0]
            return self.max(x, x, x)[0]

    assert len(find_attention(Named())) == 2
    monitor = ConditionNumberMonitor(quantities=["query", "entropy"])
    row = first_row(tmp_path, Wrapped(Named()), alone(torch.randn(1, 4, 8)), monitor)
    layers = [row["cond/query/net.towers.rgb:left"], row["cond/query/net.max"]]
    assert row["cond/query/max"] == max(layers)
    assert row["entropy/scores/min"] == min(row["entropy/scores/net.max"], row["entropy/scores/net.towers.rgb:left"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 1.5}, "`every_n_steps` must be a whole number >= 1, got 1.5"),
        ({"every_n_steps": "10"}, "`every_n_steps` must be a whole number >= 1, got '10'"),
        ({"quantities": "query"}, "`quantities` is a list, got 'query'"),
    ],
)
def test_arguments_of_another_kind_are_named(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ConditionNumberMonitor(**arguments)


def test_a_stop_rule_may_read_factors_of_the_bound(tmp_path):
    trainer = make_trainer(tmp_path, [ConditionNumberMonitor(stop_when="bound/tokens/max > 1")])
    trainer.fit(make_module(), make_loader())
    assert trainer.global_step == 1
