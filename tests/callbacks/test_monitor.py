"""What the monitor logs, where, and when; the problems of section D."""

import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.errors import ConfigurationError, LitCondWarning, NoMatchingTargetError
from lit_cond.surgery import find_attention, strengths
from tests.tiny import ATTENTION, TinyModule, make_loader, make_module, make_trainer


class Record(pl.loggers.Logger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = "record"
    version = 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def series(self, key):
        return [(step, row[key]) for step, row in self.rows if key in row]


def numpy_kappa(matrix):
    values = np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)
    return values[0] / values[-1]


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_first_values_are_those_of_numpy(tmp_path, attention):
    module, logger = make_module(attention=attention), Record()
    expected = {}
    for site in find_attention(module):
        for role, view in site:
            expected[f"cond/{role}/{site.name}"] = numpy_kappa(view.matrix())
    make_trainer(tmp_path, [ConditionNumberMonitor()], logger=logger).fit(module, make_loader())
    step, first = next((s, r) for s, r in logger.rows if "cond/query/mean" in r)
    assert step == 0
    for key, value in expected.items():
        assert first[key] == pytest.approx(value, rel=1e-5)
    queries = [v for k, v in expected.items() if k.startswith("cond/query")]
    assert first["cond/query/mean"] == pytest.approx(np.mean(queries), rel=1e-5)
    assert first["cond/query/max"] == pytest.approx(np.max(queries), rel=1e-5)
    tokens = make_module(attention=attention).net.embed(next(iter(make_loader()))[0][:8])
    assert first["cond/tokens/mean"] == pytest.approx(np.mean([numpy_kappa(t) for t in tokens]), rel=1e-4)
    assert not any(key.startswith("cond_raw") for key in first)


def test_raw_and_effective_values(tmp_path):
    module, logger = make_module(), Record()
    expected = numpy_kappa(module.net.blocks[0].attn.qkv.weight[32:64])
    callbacks = [ConditionNumberMonitor(), SpectralConditioning(), ConditionedTokens()]
    make_trainer(tmp_path, callbacks, logger=logger).fit(module, make_loader())
    first = next(r for _, r in logger.rows if "cond/query/mean" in r)
    assert first["cond_raw/key/net.blocks.0.attn"] == pytest.approx(expected, rel=1e-5)
    assert first["cond/key/net.blocks.0.attn"] <= 2.0001
    assert first["cond/tokens/net.blocks.0"] <= 2.001 < first["cond_raw/tokens/net.blocks.0"]


@pytest.mark.parametrize(
    ("accumulate", "every", "steps"), [(1, 1, [0, 1, 2, 3]), (3, 1, [0, 1]), (1, 3, [0, 3]), (2, 2, [0])]
)
def test_d8_the_x_axis_is_the_optimizer_step_without_duplicates(tmp_path, accumulate, every, steps):
    logger = Record()
    make_trainer(
        tmp_path, [ConditionNumberMonitor(every_n_steps=every)], logger=logger, accumulate_grad_batches=accumulate
    ).fit(make_module(), make_loader())
    assert [step for step, _ in logger.series("cond/query/mean")] == steps
    assert [step for step, _ in logger.series("cond/tokens/mean")] == steps


@pytest.mark.parametrize("resumed", [False, True])
def test_d11_a_checkpoint_can_monitor_a_rare_value(tmp_path, resumed):
    def callbacks():
        saver = ModelCheckpoint(tmp_path, monitor="cond/key/mean", save_top_k=2, save_last=True)
        return [saver, ConditionNumberMonitor(every_n_steps=50)]

    chosen = callbacks()
    trainer = make_trainer(tmp_path, chosen, enable_checkpointing=True)
    trainer.fit(make_module(), make_loader(), make_loader())
    first = float(chosen[0].best_model_score)
    assert math.isfinite(first)
    if resumed:
        again = callbacks()
        trainer = make_trainer(tmp_path, again, enable_checkpointing=True, max_epochs=2)
        trainer.fit(make_module(), make_loader(), make_loader(), ckpt_path=chosen[0].last_model_path)
        assert float(trainer.callback_metrics["cond/key/mean"]) == pytest.approx(first)


def test_trap_18_loggers_of_every_kind(tmp_path):
    class Bar(pl.callbacks.TQDMProgressBar):
        seen = ()

        def get_metrics(self, trainer, pl_module):
            metrics = super().get_metrics(trainer, pl_module)
            self.seen = (*self.seen, *metrics)
            return metrics

    for logger in (
        False,
        CSVLogger(tmp_path),
        TensorBoardLogger(tmp_path),
        [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)],
    ):
        bar = Bar()
        trainer = make_trainer(
            tmp_path, [ConditionNumberMonitor(every_n_steps=2), bar], logger=logger, enable_progress_bar=True
        )
        trainer.fit(make_module(), make_loader())
        assert math.isfinite(float(trainer.callback_metrics["cond/value/max"]))
        assert "cond/query/mean" in bar.seen
    make_trainer(tmp_path, [ConditionNumberMonitor()], fast_dev_run=True).fit(make_module(), make_loader())
    make_trainer(
        tmp_path,
        [SpectralConditioning(), ConditionNumberMonitor()],
        barebones=True,
        logger=None,
        enable_checkpointing=None,
        log_every_n_steps=None,
        num_sanity_val_steps=None,
        enable_progress_bar=None,
        enable_model_summary=None,
    ).fit(make_module(), make_loader())


def test_tensorboard_gets_scalars_histograms_and_heat_maps(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    make_trainer(tmp_path, [ConditionNumberMonitor(every_n_steps=1)], logger=logger).fit(make_module(), make_loader())
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    assert {"cond/query/mean", "cond/tokens/net.blocks.0", "cond/value/net.blocks.1.attn"} <= set(tags["scalars"])
    assert {"spectrum/query", "spectrum/tokens"} <= set(tags["histograms"])
    assert {"heatmap/query", "heatmap/tokens"} <= set(tags["images"])
    assert [e.step for e in events.Scalars("cond/key/max")] == [0, 1, 2, 3]
    # The relative singular values end at log10(1) = 0.
    assert events.Histograms("spectrum/query")[0].histogram_value.max == pytest.approx(0.0)


def test_d3_a_bad_matrix_is_counted_and_the_others_are_reported(tmp_path):
    class Break(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.net.blocks[0].attn.qkv.weight[:32] = math.nan
                pl_module.net.blocks[1].attn.qkv.weight[32:64] = 1.0

    class Frozen(TinyModule):
        def training_step(self, batch, batch_idx):
            return self.net.head.weight.square().sum()

    torch.manual_seed(0)
    logger = Record()
    trainer = make_trainer(
        tmp_path, [Break(), ConditionNumberMonitor(every_n_steps=1, quantities=["query", "key"])], logger=logger
    )
    trainer.fit(Frozen(), make_loader())
    _, first = logger.rows[0]
    assert math.isnan(first["cond/query/net.blocks.0.attn"])
    assert first["cond/query/nonfinite"] == 1
    assert first["cond/query/mean"] == first["cond/query/net.blocks.1.attn"]
    assert first["cond/key/net.blocks.1.attn"] == math.inf
    assert math.isfinite(first["cond/key/net.blocks.0.attn"])
    assert trainer.global_step == 4


def test_nothing_to_measure_is_an_error_or_said(tmp_path):
    with pytest.raises(NoMatchingTargetError, match="matches none of the 2 attention layers"):
        make_trainer(tmp_path, [ConditionNumberMonitor(include=["nothing"])]).fit(make_module(), make_loader())

    class Single(TinyModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(12, 12)
            self.attn = ATTENTION["fused"](12, 4)

        def training_step(self, batch, batch_idx):
            return self.attn(self.net(batch[0])).square().mean()

    with pytest.warns(LitCondWarning, match="tokens: not measured"):
        make_trainer(tmp_path, [ConditionNumberMonitor()]).fit(Single(), make_loader())
    with pytest.raises(NoMatchingTargetError, match="no list of blocks"):
        make_trainer(tmp_path, [ConditionNumberMonitor(quantities=["tokens"])]).fit(Single(), make_loader())


def test_tokens_that_can_not_be_read_do_not_end_a_training_that_did_not_ask_for_them(tmp_path):
    class Square(TinyModule):
        def __init__(self):
            super().__init__()
            self.net.blocks = torch.nn.ModuleList([Odd(block) for block in self.net.blocks])

        def forward(self, x):
            x = self.net.embed(x)
            x = self.net.blocks[0](x[:, :, None, :].expand(-1, 32, 3, 32)[:, :, :3])
            return self.net.head(x.flatten(1, 2).mean(1))

    class Odd(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.attn = block.attn

        def forward(self, x):
            return self.attn(x.flatten(1, 2)).unflatten(1, x.shape[1:3])

    def run(**kwargs):
        torch.manual_seed(0)
        module = Square()
        make_trainer(tmp_path, [ConditionNumberMonitor(every_n_steps=1, **kwargs)]).fit(module, make_ambiguous())
        return module

    def make_ambiguous():
        loader = make_loader()
        x = torch.randn(64, 32, 12)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, loader.dataset.tensors[1]), batch_size=16)

    with pytest.warns(LitCondWarning, match="tokens: not measured: axes 1 and 3"):
        module = run()
    assert len(module.losses) == 4
    with pytest.raises(ConfigurationError, match="axes 1 and 3"):
        run(quantities=["tokens"])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_d8_a_schedule_counts_optimizer_steps_and_reaches_its_end(tmp_path, accumulate):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append((trainer.global_step, set(strengths(pl_module))))

    callbacks = [StrengthSchedule("linear", start=0.0, end=1.0), SpectralConditioning(), ConditionedTokens(), Look()]
    trainer = make_trainer(tmp_path, callbacks, max_epochs=3, accumulate_grad_batches=accumulate)
    trainer.fit(make_module(), make_loader())
    total = trainer.global_step
    assert total == {1: 12, 3: 6}[accumulate]
    # The strength of a batch belongs to the step that it is part of: steps done before it over all steps.
    batches = 3 * 4
    done = [b if accumulate == 1 else 2 * (b // 4) + (b % 4) // 3 for b in range(batches)]
    assert [value for _, (value,) in seen] == pytest.approx([d / total for d in done])


def test_a_measured_schedule_moves_the_quantity_to_its_target(tmp_path):
    logger = Record()
    callbacks = [
        StrengthSchedule(
            "measured", start=0.05, end=4.0, every_n_steps=1, monitor="cond/key/mean", target=4.0, gain=0.2
        ),
        SpectralConditioning(),
        ConditionNumberMonitor(every_n_steps=1),
    ]
    make_trainer(tmp_path, callbacks, logger=logger, max_epochs=10).fit(make_module(lr=1e-4), make_loader())
    values = [value for _, value in logger.series("cond/key/mean")]
    assert values[0] > 8
    assert values[-1] == pytest.approx(4.0, rel=0.1)


def test_schedules_say_what_is_wrong(tmp_path):
    def run(*callbacks, **kwargs):
        make_trainer(tmp_path, callbacks, **kwargs).fit(make_module(), make_loader())

    with pytest.raises(ConfigurationError, match="finds no correction to move"):
        run(StrengthSchedule())
    with pytest.raises(ConfigurationError, match="finds no correction to move"):
        run(SpectralConditioning(), StrengthSchedule(applies_to="tokens"))
    with pytest.raises(ConfigurationError, match="the training has no last step"):
        run(SpectralConditioning(), StrengthSchedule(), max_epochs=-1, max_time={"seconds": 1})
    with pytest.raises(ConfigurationError, match=r"monitor='cond/keys/mean'.*cond/key/mean"):
        run(
            SpectralConditioning(),
            ConditionNumberMonitor(),
            StrengthSchedule("measured", monitor="cond/keys/mean", target=2.0),
        )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConditionNumberMonitor(every_n_steps=0), "`every_n_steps` must be a whole number >= 1, got 0"),
        (lambda: ConditionNumberMonitor(max_samples=0), "`max_samples` must be a whole number >= 1, got 0"),
        (lambda: ConditionNumberMonitor(quantities=["keys"]), "got 'keys'"),
        (lambda: ConditionNumberMonitor(quantities=[]), "`quantities` is empty"),
        (
            lambda: SpectralConditioning("spectrum"),
            "`correction` must be one of 'spectral', 'identity', got 'spectrum'",
        ),
        (lambda: SpectralConditioning(scale=-1.0), "`scale` must be > 0, got -1.0"),
        (lambda: SpectralConditioning(scale="big"), "`scale` must be one of 'spectral', got 'big'"),
        (lambda: SpectralConditioning(strength=-0.1), "`strength` must be >= 0, got -0.1"),
        (lambda: SpectralConditioning(strength=math.nan), "`strength` must be a finite number, got nan"),
        (lambda: SpectralConditioning(granularity="heads"), "`granularity` must be one of"),
        (lambda: SpectralConditioning(roles=["keys"]), "`roles` must be one of 'query', 'key', 'value', got 'keys'"),
        (lambda: SpectralConditioning(roles=[]), "`roles` is empty"),
        (lambda: SpectralConditioning(refresh_every_n_steps=0), "`refresh_every_n_steps` must be >= 1"),
        (lambda: ConditionedTokens("spectral"), "`correction` must be one of 'exact', 'identity', got 'spectral'"),
        (lambda: ConditionedTokens(backend="qr"), "`backend` must be one of"),
        (lambda: ConditionedTokens(scale=0.0), "`scale` must be > 0, got 0.0"),
        (lambda: StrengthSchedule("ramp"), "`schedule` must be one of"),
        (lambda: StrengthSchedule(start=-1.0), "`start` must be a finite number >= 0, got -1.0"),
        (lambda: StrengthSchedule(num_steps=0), "`num_steps` must be >= 1, got 0"),
        (lambda: StrengthSchedule("measured"), "needs `monitor` and a `target` > 0"),
        (lambda: StrengthSchedule(applies_to="heads"), "`applies_to` must be one of"),
    ],
)
def test_arguments_are_checked_when_a_callback_is_built(build, message):
    with pytest.raises(ConfigurationError) as caught:
        build()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
