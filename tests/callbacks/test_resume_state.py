"""What ExactResume puts back beside weights and counters: a tiny run resumed from each of its checkpoints."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricTracker, MinMetric, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import MinMaxMetric

from lit_cond.callbacks import ExactResume
from lit_cond.data.loading import ResumableLoader
from lit_cond.errors import LitCondWarning
from tests.callbacks.test_exact_resume import Rows
from tests.tiny import ResumableLoader as Lazy

BATCHES = 4
EPOCH_END = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
LAST_BATCH = {"every_n_train_steps": BATCHES}
EVERY_STEP = {"every_n_train_steps": 1}


def data(samples=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def generator():
    return torch.Generator().manual_seed(3)


def resumable():
    return ResumableLoader(data(), 4, generator=generator())


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.scale = 1.0

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.scale * F.cross_entropy(self(F.dropout(x, 0.2)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


def run(folder, make, loader, callbacks, every, validate, ckpt_path=None, **settings):
    pl.seed_everything(0, verbose=False)
    module, rows = make(), Rows()
    saver = ModelCheckpoint(folder, "{step}", save_top_k=-1, **every)
    trainer = pl.Trainer(
        default_root_dir=folder, logger=rows, callbacks=[ExactResume(), *callbacks(), saver], max_epochs=3,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1, log_every_n_steps=1,
        **settings,
    )  # fmt: skip
    trainer.fit(module, loader(), DataLoader(data(8, 1), 4) if validate else None, ckpt_path=ckpt_path)
    return trainer, module, rows.rows


def check(folder, make=Model, loader=resumable, callbacks=list, every=EVERY_STEP, validate=True, **settings):
    trainer, module, rows = run(folder / "whole", make, loader, callbacks, every, validate, **settings)
    wrong, paths = [], sorted((folder / "whole").glob("*.ckpt"))
    assert paths
    for path in paths:
        again, resumed, logged = run(folder / "on", make, loader, callbacks, every, validate, path, **settings)
        ends = [(one.global_step, one.current_epoch) for one in (trainer, again)]
        weights, others = module.state_dict(), resumed.state_dict()
        same = all(torch.equal(weights[name], others[name]) for name in weights)
        # What is logged from here on is the end of what the whole run has logged.
        if not same or ends[0] != ends[1] or sorted(logged) != sorted(rows[len(rows) - len(logged) :]):
            wrong.append(f"{path.name}: weights {same}, ends {ends}, {logged[:8]}")
    assert not wrong, "\n".join(wrong)
    return trainer, module


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        yield from data()


class Keeping(IterableDataset):
    """A data set that keeps its place."""

    place = 0

    def __iter__(self):
        while self.place < 16:
            self.place += 1
            yield data()[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Endless(Keeping):
    def __iter__(self):
        while True:
            self.place = self.place % 16 + 1
            yield data()[self.place - 1]


class KeepingLoader(DataLoader):
    """Hands on the state of its data, as torchdata's StatefulDataLoader does."""

    def state_dict(self):
        return self.dataset.state_dict()

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state)


class Draws(pl.Callback):
    """Draws random numbers where a run begins."""

    def on_train_start(self, trainer, pl_module):
        torch.rand(7)


def shuffled(own=True):
    return DataLoader(data(), 4, shuffle=True, generator=generator() if own else None)


LOADERS = {
    "without a length, last batch": {"loader": lambda: DataLoader(Stream(), 4), "validate": False, "every": LAST_BATCH},
    "without a length, epoch end": {"loader": lambda: DataLoader(Stream(), 4), "every": EPOCH_END},
    "keeps its place": {"loader": lambda: KeepingLoader(Keeping(), 4, generator=generator()), "validate": False},
    "keeps its place, validation": {"loader": lambda: KeepingLoader(Keeping(), 4, generator=generator())},
    "keeps its place, epoch end": {"loader": lambda: KeepingLoader(Keeping(), 4), "every": EPOCH_END},
    "endless": {"loader": lambda: KeepingLoader(Endless(), 4, generator=generator()), "limit_train_batches": 3},
    "a generator function": {"loader": lambda: Lazy(data(), 4, generator=generator()), "validate": False},
    "a generator function, validation": {"loader": lambda: Lazy(data(), 4, generator=generator())},
    "own generator, epoch end": {"loader": shuffled, "every": EPOCH_END},
    "own generator, last batch": {"loader": shuffled, "every": LAST_BATCH},
    "made anew, epoch end": {
        "loader": lambda: shuffled(False), "every": EPOCH_END, "reload_dataloaders_every_n_epochs": 1,
    },
    "made anew, last batch": {
        "loader": lambda: shuffled(False), "every": LAST_BATCH, "reload_dataloaders_every_n_epochs": 2,
    },
    "draws where the run begins": {
        "loader": lambda: shuffled(False), "every": EPOCH_END, "callbacks": lambda: [Draws()],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", LOADERS)
def test_loaders(case, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*resuming from a checkpoint that ended before.*")
        check(tmp_path, **LOADERS[case])


class Sets(Model):
    """Sets a weight of the loss where an epoch begins, changes a buffer and logs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("epochs", torch.zeros(()))
        self.started = MeanMetric()

    def on_train_epoch_start(self):
        self.scale = 1 / (1 + self.current_epoch)
        self.epochs += 1
        self.started.update(torch.rand(()))
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
        self.log("started", self.started.compute())

    def training_step(self, batch, batch_idx):
        self.log("epochs", self.epochs)
        return super().training_step(batch, batch_idx)


class Counts(pl.Callback):
    """Counts epochs, and stores it."""

    def __init__(self):
        self.count = 0

    def on_train_epoch_start(self, trainer, pl_module):
        self.count += 1
        pl_module.log("count", float(self.count))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_what_is_set_where_an_epoch_begins(tmp_path):
    check(tmp_path, Sets, callbacks=lambda: [Counts(), LearningRateMonitor("epoch")])


@pytest.mark.parametrize("every", [EVERY_STEP, EPOCH_END], ids=["step", "epoch"])
def test_accumulation_by_a_schedule(every, tmp_path):
    check(tmp_path, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})], every=every)


class Finetuning(BackboneFinetuning):
    def __init__(self):
        super().__init__(1, verbose=False, train_bn=False)


@pytest.mark.parametrize("every", [EVERY_STEP, EPOCH_END], ids=["step", "epoch"])
def test_what_was_unfrozen_trains(every, tmp_path):
    check(tmp_path, callbacks=lambda: [Finetuning()], every=every)


def test_frozen_by_hand_is_said(tmp_path):
    class Frozen(Model):
        def __init__(self):
            super().__init__()
            self.backbone[0].requires_grad_(False)
            self.new = nn.Parameter(torch.zeros(2), requires_grad=False)

        def configure_optimizers(self):
            return torch.optim.AdamW([p for n, p in self.named_parameters() if n != "new"], 1e-2)

    run(tmp_path, Model, resumable, list, EPOCH_END, True)
    with pytest.warns(LitCondWarning, match=r"2 parameters, 'backbone.0.weight' the first, were frozen or unfrozen"):
        _, module, _ = run(tmp_path, lambda: loose(Frozen), resumable, list, EPOCH_END, True, tmp_path / "step=4.ckpt")
    assert module.backbone[0].weight.requires_grad
    assert not module.new.requires_grad


def loose(make):
    module = make()
    module.strict_loading = False
    return module


class Measured(Model):
    """Metrics of a step, of an epoch and of the whole run; logged as metrics and as values."""

    def __init__(self):
        super().__init__()
        self.seen, self.running = SumMetric(), RunningMean(3)
        self.both = MeanMetric() + SumMetric()
        self.best, self.worst = MinMetric(), MaxMetric()
        self.val_acc, self.by_hand = MulticlassAccuracy(3), MulticlassAccuracy(3)
        self.range = MinMaxMetric(MulticlassAccuracy(3))
        self.val_range = MinMaxMetric(MulticlassAccuracy(3))
        self.tracker = MetricTracker(MulticlassAccuracy(3))

    def on_train_start(self):
        # As in many templates, for what the sanity check has left.
        self.best.reset()
        self.worst.reset()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for metric in (self.seen, self.running, self.both):
            metric.update(loss.detach())
        self.log_dict({"seen": self.seen.compute(), "running": self.running.compute(), "both": self.both.compute()})
        self.range.update(self(batch[0]), batch[1])
        self.log_dict({f"range_{name}": value for name, value in self.range.compute().items()})
        return loss

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        logits = self(batch[0])
        for metric in (self.val_acc, self.by_hand, self.val_range, self.tracker):
            metric.update(logits, batch[1])
        self.log("val_acc", self.val_acc)

    def on_validation_epoch_end(self):
        self.best.update(self.trainer.callback_metrics["val_loss"])
        self.worst.update(self.trainer.callback_metrics["val_loss"])
        # With values alone: the names of a dictionary of values are not those of the metric.
        ranges = {f"val_range_{name}": value for name, value in self.val_range.compute().items()}
        self.val_range.reset()
        self.log_dict({"best": self.best.compute(), "worst": self.worst.compute(), **ranges})
        self.log_dict({"by_hand": self.by_hand.compute(), "tracked": self.tracker.best_metric()})
        self.by_hand.reset()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"val_check_interval": 2},
        {"every": EPOCH_END},
        {"every": {"every_n_epochs": 1}},
    ],
    ids=["step", "validation within", "epoch end", "validation end"],
)
def test_metrics_of_any_length(settings, tmp_path):
    check(tmp_path, Measured, **settings)


def test_modules_are_walked_through_a_few_times_for_a_checkpoint(tmp_path, monkeypatch):
    trainer, module = check(tmp_path, Measured, every=EPOCH_END)
    walks = []
    real = nn.Module.named_modules

    def counting(self, memo=None, prefix="", remove_duplicate=True):
        if self is module and not prefix:
            walks.append(self)
        return real(self, memo, prefix, remove_duplicate)

    monkeypatch.setattr(nn.Module, "named_modules", counting)
    (exact,) = (callback for callback in trainer.callbacks if isinstance(callback, ExactResume))
    exact.on_save_checkpoint(trainer, module, {"callbacks": {}, "loops": {"fit_loop": {"state_dict": {}}}})
    assert 0 < len(walks) <= 8
