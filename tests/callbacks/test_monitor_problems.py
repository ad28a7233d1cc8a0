"""Problems D and G of people who monitor spectra, with all quantities."""

import json
import math

import lightning.pytorch as pl
import numpy as np
import pytest
import timm
import torch
import transformers
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lit_cond.callbacks import ConditionNumberMonitor
from lit_cond.errors import ConfigurationError, LitCondWarning
from lit_cond.measuring.step import MeasuredStep
from lit_cond.surgery import find_attention
from tests.callbacks.test_monitor import Record, numpy_kappa
from tests.tiny import ATTENTION, TinyModule, make_loader, make_module, make_trainer

QUANTITIES = ("query", "key", "value", "tokens", "scores", "attention", "jacobian", "jacobian_bound")


class Wrapped(pl.LightningModule):
    """Trains any network on the mean square of what it returns."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        result = self.net(**batch) if isinstance(batch, dict) else self.net(batch)
        tensors = result.values() if isinstance(result, dict) else [result]
        return sum(t.float().square().mean() for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def first_row(tmp_path, module, data, monitor, **settings):
    logger = Record()
    make_trainer(tmp_path, [monitor], max_steps=1, logger=logger, **settings).fit(module, data)
    return next(row for _, row in logger.rows if any(key.startswith(("cond/", "entropy/")) for key in row))


def alone(item):
    return DataLoader([item], batch_size=None)


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
MODELS = {
    "BERT": (
        lambda: transformers.AutoModel.from_config(transformers.BertConfig(**SMALL, vocab_size=20)),
        {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])},
        2,
    ),
    "ViT": (
        lambda: transformers.AutoModel.from_config(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)),
        {"pixel_values": torch.rand(2, 3, 32, 32)},
        2,
    ),
    "GPT-2": (
        lambda: transformers.AutoModel.from_config(
            transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=20)
        ),
        {"input_ids": torch.arange(12).view(2, 6)},
        2,
    ),
    "DETR": (
        lambda: transformers.DetrModel(
            transformers.DetrConfig(
                use_timm_backbone=False,
                use_pretrained_backbone=False,
                backbone=None,
                backbone_config=transformers.ResNetConfig(
                    embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"]
                ),
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                num_queries=5,
            )
        ),
        {"pixel_values": torch.rand(1, 3, 64, 96)},
        3,
    ),
    "timm": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=3),
        torch.rand(2, 3, 64, 64),
        2,
    ),
    "nn.MultiheadAttention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 32, batch_first=True), 2),
        torch.rand(2, 6, 32),
        2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_d5_attention_is_measured_with_default_settings(tmp_path, name):
    torch.manual_seed(0)
    make, batch, layers = MODELS[name]
    quantities = ["scores", "attention", "entropy"]
    row = first_row(
        tmp_path, Wrapped(make()), alone(batch), ConditionNumberMonitor(quantities=quantities, prog_bar=None)
    )
    for group in ("cond/scores", "cond/attention", "entropy/scores", "entropy_share/scores", "saturated/scores"):
        values = [v for k, v in row.items() if k.startswith(f"{group}/net.")]
        assert len(values) == layers, (group, sorted(row))
        assert not any(math.isnan(v) for v in values)
    assert 0 < row["entropy_share/scores/mean"] <= 1
    assert row["cond/scores/mean"] >= 1


def test_d5_what_can_not_be_measured_is_one_error_that_names_the_layer(tmp_path):
    net = transformers.AutoModel.from_config(transformers.Olmo2Config(**SMALL, vocab_size=20))
    batch = {"input_ids": torch.arange(12).view(2, 6)}
    with pytest.raises(ConfigurationError, match=r"^jacobian can not be measured: 'net.layers.0.self_attn': .*mixed"):
        first_row(tmp_path, Wrapped(net), alone(batch), ConditionNumberMonitor(quantities=["jacobian"], prog_bar=None))
    assert not any("forward" in module.__dict__ for module in net.modules())
    with pytest.warns(LitCondWarning, match=r"^jacobian(_bound)?: not measured: .*mixed"):
        row = first_row(tmp_path, Wrapped(net), alone(batch), ConditionNumberMonitor())
    assert {"cond/scores/mean", "cond/tokens/mean", "entropy/scores/min"} <= set(row)
    assert not any(key.startswith("cond/jacobian") for key in row)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "bf16-mixed", "64-true"])
def test_d2_all_quantities_in_every_precision(tmp_path, precision):
    row = first_row(tmp_path, make_module(), make_loader(), ConditionNumberMonitor(), precision=precision)
    for quantity in QUANTITIES:
        if quantity != "jacobian_bound":
            assert math.isfinite(row[f"cond/{quantity}/mean"]), quantity


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_d3_a_bad_sample_leaves_the_others_and_the_training_alone(tmp_path, bad):
    loader = make_loader()
    loader.dataset.tensors[0][1, 0, 0] = bad
    logger = Record()
    monitor = ConditionNumberMonitor(every_n_steps=1, matrix_samples=4)
    make_trainer(tmp_path, [monitor], logger=logger).fit(make_module(), loader)
    row = logger.rows[0][1]
    for quantity in ("tokens", "scores", "attention", "jacobian"):
        assert math.isfinite(row[f"cond/{quantity}/mean"]), quantity
    assert math.isfinite(row["entropy/scores/mean"])


def test_d4_nothing_is_measured_between_the_intervals_and_the_share_is_printed(tmp_path, monkeypatch, caplog):
    steps, spectra = [], []
    inner, svd = MeasuredStep.__init__, torch.linalg.eigvalsh

    def counted(self, sites, token_sites, due, full, settings):
        steps.append((trainer.global_step, set(due), full))
        inner(self, sites, token_sites, due, full, settings)

    monkeypatch.setattr(MeasuredStep, "__init__", counted)
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda a: spectra.append(trainer.global_step) or svd(a))
    monitor = ConditionNumberMonitor(every_n_steps=3, intervals={"entropy": 2})
    trainer = make_trainer(tmp_path, [monitor], max_epochs=2)
    with caplog.at_level("INFO"):
        trainer.fit(make_module(), make_loader())
    assert steps == [
        (0, set(QUANTITIES) | {"entropy"}, True),
        (2, {"entropy"}, False),
        (3, {"query", "key", "value", "tokens"}, False),
        (4, {"entropy"}, False),
        (6, {"query", "key", "value", "tokens", "entropy"}, False),
    ]
    assert set(spectra) <= {0, 3, 6}
    assert "condition numbers: measured in 5 steps, which took" in caplog.text


def test_d7_spectra_of_nothing_but_nan_do_not_end_a_training(tmp_path):
    loader = make_loader()
    loader.dataset.tensors[0].fill_(math.nan)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    make_trainer(tmp_path, [ConditionNumberMonitor(every_n_steps=1)], logger=logger).fit(make_module(), loader)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert math.isnan(events.Scalars("cond/tokens/mean")[0].value)
    assert events.Scalars("cond/tokens/nonfinite")[0].value == 1


def test_d10_the_jacobian_of_a_fused_kernel_against_finite_differences(tmp_path):
    flags = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )
    module = make_module(attention="separate").double()
    attention = module.net.blocks[0].attn
    seen = []
    handle = attention.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    monitor = ConditionNumberMonitor(
        quantities=["jacobian"], per_head=True, include=["net.blocks.0.attn"], prog_bar=None
    )
    row = first_row(tmp_path, module, make_loader(), monitor, precision="64-true")
    handle.remove()
    start = make_module(attention="separate").double().net.blocks[0].attn
    x, width = seen[0][:1], 8
    for head in range(4):
        columns = []
        for projection in (start.q_proj, start.k_proj, start.v_proj):
            weight = projection.weight
            for i in range(head * width, (head + 1) * width):
                for j in range(weight.shape[1]):
                    results = []
                    for step in (1e-6, -2e-6):
                        with torch.no_grad():
                            weight[i, j] += step
                            results.append(start(x)[0, :, head * width : (head + 1) * width].flatten())
                    with torch.no_grad():
                        weight[i, j] += 1e-6
                    columns.append((results[0] - results[1]) / 2e-6)
        expected = numpy_kappa(torch.stack(columns, dim=1))
        assert row[f"cond/jacobian/net.blocks.0.attn/head_{head}"] == pytest.approx(expected, rel=1e-4)
    assert flags == (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


class Mixed(nn.Module):
    """A module of every kind."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(12, 32, 1)
        self.positions = nn.Embedding(6, 32)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        x = self.conv(x.mT).mT + self.positions.weight
        x = self.norm(x + self.attn(x, x, x)[0])
        return self.head(self.linear(x).mean(1))


def test_g1_the_table_has_a_row_for_every_module_with_a_reason(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitor = ConditionNumberMonitor(quantities=["query", "key", "value", "entropy"])
    make_trainer(tmp_path, [monitor], logger=logger).fit(Wrapped(Mixed()), alone(torch.rand(2, 6, 12)))
    events = EventAccumulator(str(tmp_path)).Reload()
    (shown,) = events.Tensors("conditioning/measured/text_summary")
    text = shown.tensor_proto.string_val[0].decode()
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("net.")}
    assert rows["net.attn"].endswith("query, key, value")
    for name, kind in (
        ("conv", "Conv1d"), ("positions", "Embedding"), ("norm", "LayerNorm"), ("linear", "Linear"), ("head", "Linear")
    ):  # fmt: skip
        assert kind in rows[f"net.{name}"]
        assert rows[f"net.{name}"].endswith("no: makes no query, key or value")
    assert "query: 1 of 1 layers" in text


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_g2_a_weight_that_is_computed_is_measured_as_it_is_read(tmp_path, norm):
    def make():
        module = make_module(attention="separate")
        norm(module.net.blocks[0].attn.q_proj)
        return module

    def run(monitors):
        module, logger = make(), Record()
        make_trainer(tmp_path, monitors, logger=logger).fit(module, make_loader())
        return module, logger.rows

    plain, _ = run([])
    # Nothing else may be read of the weight: reading is a step of spectral normalisation.
    module, rows = run([ConditionNumberMonitor(every_n_steps=1)])
    assert module.losses == plain.losses
    weight = make().eval().net.blocks[0].attn.q_proj.weight
    assert rows[0][1]["cond/query/net.blocks.0.attn"] == pytest.approx(numpy_kappa(weight), rel=1e-2)
    assert math.isfinite(rows[0][1]["cond/jacobian/net.blocks.0.attn"])


@pytest.mark.parametrize("attention", ["fused", "functional"])
def test_g2_a_fused_weight_that_is_computed_is_found_in_a_traced_model(tmp_path, attention):
    module = make_module(attention=attention)
    module.example_input_array = torch.rand(2, 6, 12)
    parametrizations.weight_norm(module.net.blocks[0].attn.qkv)
    weight = module.net.blocks[0].attn.qkv.weight[32:64]
    row = first_row(tmp_path, module, make_loader(), ConditionNumberMonitor())
    assert row["cond/key/net.blocks.0.attn"] == pytest.approx(numpy_kappa(weight), rel=1e-2)


def test_g3_a_collapsed_layer_stops_the_run_and_writes_a_report(tmp_path):
    rule = "numerical_rank/query/min < 8 or cond/tokens/max > 1e6 for 3 steps"
    settings = {"every_n_steps": 1, "statistics": ["numerical_rank"], "intervals": {"spectrum": 1}, "stop_when": rule}

    def run(folder, collapsed):
        module = make_module(attention="separate")
        if collapsed:
            with torch.no_grad():
                module.net.blocks[1].attn.q_proj.weight[3:] = 0
        trainer = make_trainer(folder, [ConditionNumberMonitor(**settings)], max_epochs=2)
        trainer.fit(module, make_loader())
        return trainer

    trainer = run(tmp_path / "healthy", collapsed=False)
    assert trainer.global_step == 8
    assert not list((tmp_path / "healthy").rglob("condition_stop.json"))
    trainer = run(tmp_path / "collapsed", collapsed=True)
    assert trainer.global_step == 1
    (path,) = (tmp_path / "collapsed").rglob("condition_stop.json")
    report = json.loads(path.read_text())
    assert report["reason"].startswith("numerical_rank/query/min is 3, which is < 8 since step 0")
    assert report["values"]["numerical_rank/query/net.blocks.1.attn"] == 3
    assert report["values"]["cond/query/net.blocks.1.attn"] == "inf"


def test_a_stop_rule_that_reads_what_is_not_measured_is_refused(tmp_path):
    monitor = ConditionNumberMonitor(quantities=["query"], stop_when="cond/token/max > 1e6")
    with pytest.raises(ConfigurationError, match=r"'cond/token/max', and nothing of 'cond/token' is measured"):
        make_trainer(tmp_path, [monitor]).fit(make_module(), make_loader())


def test_a_stop_rule_counts_on_after_a_resume(tmp_path):
    def trainer(steps):
        rule = "cond/query/max > 1 for 6 steps"
        return make_trainer(
            tmp_path, [ConditionNumberMonitor(every_n_steps=1, stop_when=rule)], max_epochs=4, max_steps=steps
        )

    first = trainer(4)
    first.fit(make_module(), make_loader())
    first.save_checkpoint(tmp_path / "part.ckpt")
    rest = trainer(-1)
    rest.fit(make_module(), make_loader(), ckpt_path=tmp_path / "part.ckpt")
    assert rest.global_step == 7


@pytest.mark.parametrize("attention", ATTENTION)
def test_numbers_of_heads_and_statistics_have_their_keys(tmp_path, attention):
    module = make_module(attention=attention)
    expected = {site.name: view.matrix() for site in find_attention(module) for role, view in site if role == "query"}
    names = ["sigma_max", "sigma_min", "stable_rank", "effective_rank", "numerical_rank"]
    row = first_row(tmp_path, module, make_loader(), ConditionNumberMonitor(statistics=names, per_head=True))
    site = next(iter(expected))
    values = np.linalg.svd(
        next(v.matrix() for s in find_attention(make_module(attention=attention)) for r, v in s if r == "query")
        .detach()
        .double()
        .numpy(),
        compute_uv=False,
    )
    share = values / values.sum()
    truth = {
        "sigma_max": values[0],
        "sigma_min": values[-1],
        "stable_rank": (values**2).sum() / values[0] ** 2,
        "effective_rank": np.exp(-(share * np.log(share)).sum()),
        "numerical_rank": 32,
    }
    for name, value in truth.items():
        assert row[f"{name}/query/{site}"] == pytest.approx(value, rel=1e-2)
    heads = [row[f"cond/jacobian/{site}/head_{i}"] for i in range(4)]
    assert row[f"cond/jacobian/{site}"] == pytest.approx(np.mean(heads))
    assert row["cond/jacobian/max"] == max(row[f"cond/jacobian/{s}"] for s in expected)
    factors = [row[f"bound/{name}/{site}"] for name in ("tokens", "query", "key", "value", "scores")]
    assert all(factor >= 1 for factor in factors)
    assert row[f"cond/jacobian_bound/{site}"] > row[f"cond/jacobian/{site}"]


def test_a_layer_that_runs_sometimes_is_no_error(tmp_path):
    class Sometimes(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2 == 0:
                self.net.blocks[1].forward = lambda x: x
            else:
                self.net.blocks[1].__dict__.pop("forward", None)
            return F.cross_entropy(self(batch[0]), batch[1])

    module = Sometimes()
    logger = Record()
    monitor = ConditionNumberMonitor(every_n_steps=1, quantities=["entropy"], prog_bar=None)
    make_trainer(tmp_path, [monitor], logger=logger).fit(module, make_loader())
    have = [step for step, _ in logger.series("entropy/scores/net.blocks.0.attn")]
    assert have == [0, 1, 2, 3]


def test_h2_an_empty_sequence_is_skipped_and_counted(tmp_path):
    torch.manual_seed(0)
    net = transformers.AutoModel.from_config(transformers.BertConfig(**SMALL, vocab_size=20))
    start = net.state_dict()
    rows = []
    for mask in ([[1] * 6], [[1] * 6, [0] * 6]):
        module = Wrapped(transformers.AutoModel.from_config(net.config).eval())
        module.net.load_state_dict(start)
        batch = {"input_ids": torch.arange(6).expand(len(mask), 6), "attention_mask": torch.tensor(mask)}
        monitor = ConditionNumberMonitor(quantities=["scores", "entropy", "tokens"], prog_bar=None)
        rows.append(first_row(tmp_path, module, alone(batch), monitor))
    assert not any(key.startswith("skipped/") for key in rows[0])
    for quantity in ("scores", "entropy", "tokens"):
        assert rows[1][f"skipped/{quantity}"] == 1
    for key in ("cond/scores/mean", "entropy/scores/mean", "cond/tokens/mean"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=1e-5), key
