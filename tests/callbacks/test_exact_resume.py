"""A run resumed from any of its checkpoints is the run that would have been."""

import random
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, EMAWeightAveraging, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lit_cond.callbacks import (
    ConditionedTokens,
    ConditionNumberMonitor,
    ExactResume,
    SpectralConditioning,
    StrengthSchedule,
)
from lit_cond.callbacks.random_state import random_state, set_random_state
from lit_cond.data import DigitsDataModule
from lit_cond.errors import CheckpointMismatchError, LitCondWarning
from tests.tiny import WIDTH, Block, make_loader, make_module, make_trainer


def draw():
    return float(numpy.random.rand())  # noqa: NPY002  (the generator that the callback stores)


class Digits(pl.LightningModule):
    """A small transformer on the rows of a digit that uses all that can go wrong on a resume."""

    def __init__(self, schedule=None, norm=nn.BatchNorm1d):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block("fused"), Block("separate")])
        self.drop = nn.Dropout(0.2)
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        self.train_acc = MulticlassAccuracy(10)
        group = {"f1": MulticlassF1Score(10), "acc": MulticlassAccuracy(10)}
        self.train_more = MetricCollection(group, prefix="train/more_")
        self.train_logged = MetricCollection(group, prefix="train/logged_").clone()
        self.val_acc = MulticlassAccuracy(10)
        self.schedule = schedule
        self.losses = []

    def forward(self, x):
        x = self.embed(x.flatten(1, 2))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(self.norm(x.mean(1)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x + 0.01 * random.random() + 0.01 * draw()
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.train_more.update(logits, y)
        self.train_logged.update(logits, y)
        self.log_dict(self.train_logged, on_step=False, on_epoch=True)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("train/largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        if batch_idx == 0:
            self.log("train/rare", loss * 2, on_step=True, on_epoch=True)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_more.compute())
        self.train_more.reset()

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.val_acc(logits, batch[1])
        self.log("val/acc", self.val_acc)
        self.log("val/loss", F.cross_entropy(logits, batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.schedule is None:
            return optimizer
        if self.schedule == "step":  # asks Lightning for the data before the state of the loader was read
            total = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (total + 1))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
        if self.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}


class Manual(Digits):
    """Makes its steps by itself, one for two batches."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Rows(Logger):
    """Keeps what was logged, in order."""

    name = version = "rows"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows += [((name, step), float(value)) for name, value in metrics.items()]

    def log_hyperparams(self, *args, **kwargs):
        pass


class SaveEverywhere(Checkpoint):
    """Saves in every hook in which Lightning's ModelCheckpoint can, and notes how much was logged before."""

    def __init__(self, folder):
        self.folder = folder
        self.saved = {}

    def save(self, trainer, hook):
        if trainer.sanity_checking:
            return
        path = self.folder / f"{len(self.saved):02}-{hook}-{trainer.current_epoch}-{trainer.global_step}.ckpt"
        self.saved[path] = (len(trainer.logger.rows), len(trainer.lightning_module.losses))
        trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, pl_module):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch")


def callbacks_of(kind):
    if kind in ("none", "manual"):
        return []
    monitor = ConditionNumberMonitor(every_n_steps=2, quantities=["key"])
    schedule = StrengthSchedule("measured", monitor="cond/key/mean", target=2.0, every_n_steps=2, start=0.5)
    average = {
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=1),
        "plain": lambda: None,
    }[kind]()
    found = [SpectralConditioning(refresh_every_n_steps=3), ConditionedTokens(), schedule, monitor, average]
    return [one for one in found if one is not None]


def run(tmp_path, kind="none", saver=None, ckpt_path=None, exact=True, schedule=None, seed=0, workers=0, **kwargs):
    pl.seed_everything(seed, verbose=False)
    module, rows = (
        (Manual if kind == "manual" else Digits)(schedule, nn.LayerNorm if kind == "swa" else nn.BatchNorm1d),
        Rows(),
    )
    callbacks = [*([ExactResume()] if exact else []), *callbacks_of(kind), SaveLast(), *([saver] if saver else [])]
    settings = {"max_epochs": 2, "limit_train_batches": 5, "limit_val_batches": 2, "log_every_n_steps": 1, **kwargs}
    trainer = pl.Trainer(
        default_root_dir=tmp_path, callbacks=callbacks, logger=rows,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1, **settings,
    )  # fmt: skip
    data = DigitsDataModule(batch_size=24, augment=True, num_workers=workers)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module, rows.rows


class SaveLast(Checkpoint):
    """Keeps what a checkpoint at the end of the last epoch holds."""

    content = None

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")
        self.content = torch.load(Path(trainer.default_root_dir) / "last.ckpt", weights_only=True)


def state_of(trainer, module):
    (last,) = (callback for callback in trainer.callbacks if isinstance(callback, SaveLast))
    content = {key: value for key, value in (last.content or {}).items() if key != "callbacks"}
    return {
        "weights": module.state_dict(),
        "steps": (trainer.global_step, trainer.current_epoch),
        "random": (random.random(), draw(), float(torch.rand(()))),
        "watched": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "last": content,
    }


def differences(a, b, path=""):
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [f"{path}: {(a - b).abs().max()}"]
    if isinstance(a, dict):
        keys = [f"{path}.{key} is missing" for key in a.keys() ^ b.keys()]
        return keys + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [
            d
            for index, (one, two) in enumerate(zip(a, b, strict=True))
            for d in differences(one, two, f"{path}[{index}]")
        ]
    return [] if a == b or (a != a and b != b) else [f"{path}: {a} is {b}"]


def check(tmp_path, which=lambda path: True, **kwargs):
    saver = SaveEverywhere(tmp_path)
    trainer, module, rows = run(tmp_path, saver=saver, **kwargs)
    expected, losses = state_of(trainer, module), module.losses
    wrong = {}
    paths = [path for path in saver.saved if which(path)]
    assert paths
    for path in paths:
        logged, done = saver.saved[path]
        trainer, module, again = run(tmp_path, ckpt_path=path, **kwargs)
        state = state_of(trainer, module)
        if not state["last"]:  # the run had ended
            state["last"] = expected["last"]
        found = differences(expected, state)
        found += differences(losses[done:], module.losses, "losses")
        found += differences(dict(rows), dict([*rows[:logged], *again]), "logged")
        if found:
            wrong[path.name] = found
    assert not wrong, "\n".join(f"{name}: {len(found)}, {'; '.join(found[-3:])}" for name, found in wrong.items())


CASES = {
    "plain": {},
    "validation within the epoch": {"val_check_interval": 2},
    "no validation": {"limit_val_batches": 0},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation, validation within": {"accumulate_grad_batches": 2, "val_check_interval": 2},
    "rows seldom": {"log_every_n_steps": 3},
    "schedule by step": {"schedule": "step"},
    "schedule by epoch": {"schedule": "epoch"},
    "schedule by plateau": {"schedule": "plateau", "max_epochs": 3},
    # Not the checkpoint of the very last step: Lightning sees that nothing is left to do and does not end the epoch.
    "steps": {"max_steps": 13, "max_epochs": -1, "which": lambda path: not path.name.endswith("batch-2-13.ckpt")},
    "manual optimization": {"kind": "manual", "val_check_interval": 2},
    "all of lit_cond, EMA": {"kind": "ema", "accumulate_grad_batches": 2, "val_check_interval": 2},
    "all of lit_cond": {"kind": "plain"},
    "SWA": {"kind": "swa", "max_epochs": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_from_every_checkpoint(case, tmp_path):
    check(tmp_path, **CASES[case])


def test_the_run_is_the_same_with_and_without_the_callback(tmp_path):
    case = CASES["accumulation, validation within"]
    runs = [run(tmp_path, saver=SaveEverywhere(tmp_path), exact=exact, **case) for exact in (True, False)]
    (with_it, without) = [(module.losses, dict(rows), module.state_dict(), trainer.optimizers[0].state_dict())
                          for trainer, module, rows in runs]  # fmt: skip
    assert not differences(with_it, without)


@pytest.mark.parametrize("hook", ["batch-1-8", "validation-1-10", "epoch-1-10"])
def test_without_the_callback_a_resumed_run_is_another_one(hook, tmp_path):
    with pytest.raises(AssertionError, match=f"{hook}.ckpt"):
        check(tmp_path, lambda path: hook in path.name, exact=False)


def test_a_checkpoint_of_weights_carries_nothing(tmp_path):
    trainer, _, _ = run(tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "callbacks" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_a_checkpoint_that_was_written_without_the_callback(tmp_path, caplog):
    saver = SaveEverywhere(tmp_path)
    run(tmp_path, saver=saver, exact=False, max_epochs=1)
    with caplog.at_level("INFO"):
        trainer, _, _ = run(tmp_path, ckpt_path=list(saver.saved)[-1])
    assert trainer.global_step == 10
    assert "the checkpoint was written without this callback: random numbers start anew" in caplog.text


def test_with_workers_that_load_the_data(tmp_path):
    check(tmp_path, lambda path: path.name[:2] in ("02", "05", "13"), workers=2)


def test_loggers_write_before_a_checkpoint_is_written(tmp_path):
    class Buffered(Rows):
        buffer = ()

        def log_metrics(self, metrics, step=None):
            self.buffer = (*self.buffer, metrics)

        def save(self):
            self.buffer = ()

    trainer = pl.Trainer(
        default_root_dir=tmp_path, callbacks=[ExactResume()], logger=Buffered(), max_steps=2, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Digits(), DigitsDataModule())
    trainer.logger.log_metrics({"direct": 1.0})
    assert trainer.logger.buffer
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not trainer.logger.buffer


@pytest.mark.parametrize("values", [[1.5], [2.5, 0.5]])
def test_random_states_come_back(values):
    random.seed(3)
    random.gauss(0, 1)  # leaves a second value for the next call
    numpy.random.seed(3)  # noqa: NPY002
    numpy.random.randn(len(values))  # noqa: NPY002
    state = random_state(torch.device("cpu"))

    def draws():
        return random.gauss(0, 1), random.random(), float(numpy.random.randn()), float(torch.rand(()))  # noqa: NPY002

    first = draws()
    assert draws() != first
    set_random_state(state, torch.device("cpu"))
    assert draws() == first


class Note(pl.Callback):
    """Writes the losses of each process."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        torch.save((pl_module.losses, pl_module.state_dict()), self.folder / f"rank{trainer.global_rank}.pt")


class SaveAt(Checkpoint):
    def __init__(self, path, batch):
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_processes(tmp_path):
    def fit(name, ckpt_path=None):
        folder = tmp_path / name
        folder.mkdir()
        callbacks = [ExactResume(), Note(folder), SaveAt(tmp_path / "a.ckpt", 7)]
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            default_root_dir=folder, callbacks=callbacks, logger=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=2, strategy="ddp_fork",
            max_epochs=2, limit_train_batches=5, limit_val_batches=1, accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(Digits(norm=nn.LayerNorm), DigitsDataModule(batch_size=24, augment=True), ckpt_path=ckpt_path)
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]

    whole, resumed = fit("whole"), fit("resumed", tmp_path / "a.ckpt")
    for (losses, weights), (again, others) in zip(whole, resumed, strict=True):
        assert losses[8:] == again
        assert not differences(weights, others)
    assert whole[0][0] != whole[1][0]
    states = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["ExactResume"]["processes"]
    assert len(states) == 2
    assert "gradients" in states[1]  # in the middle of an accumulation


@pytest.mark.parametrize(
    ("added", "outcome"),
    [
        (SpectralConditioning, "warning"),
        (ConditionedTokens, "error"),
        (lambda: ConditionNumberMonitor(every_n_steps=2, quantities=["key"]), "same"),
        (lambda: EMAWeightAveraging(decay=0.9), "same"),
    ],
    ids=["weights", "tokens", "monitor", "EMA"],
)
def test_b5_a_callback_added_only_on_the_resume(added, outcome, tmp_path, monkeypatch):
    saver = SaveEverywhere(tmp_path)
    _, whole, _ = run(tmp_path, saver=saver, max_epochs=2)
    path = list(saver.saved)[2]
    monkeypatch.setitem(globals(), "callbacks_of", lambda kind: [added()])
    if outcome == "error":
        with pytest.raises(CheckpointMismatchError, match=r"corrects the tokens at 'blocks\.0' and the ch.* without"):
            run(tmp_path, ckpt_path=path, max_epochs=2)
        return
    expected = (
        pytest.warns(LitCondWarning, match="made without a correction") if outcome == "warning" else nullcontext()
    )
    with expected:
        _, resumed, _ = run(tmp_path, ckpt_path=path, max_epochs=2)
    assert (whole.losses[3:] == resumed.losses) == (outcome == "same")
    assert len(resumed.losses) == 7


def test_lightnings_finders_are_left_alone(tmp_path):
    learning_rates = []
    for exact in (True, False):
        pl.seed_everything(0, verbose=False)
        finder = LearningRateFinder(num_training_steps=5)
        module = Digits()
        module.lr = 1e-3
        callbacks = [finder, *([ExactResume()] if exact else [])]
        trainer = pl.Trainer(
            default_root_dir=tmp_path, callbacks=callbacks, max_steps=3, logger=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, enable_checkpointing=False,
            accelerator="cpu",
        )  # fmt: skip
        trainer.fit(module, DigitsDataModule())
        learning_rates.append((finder.optimal_lr.results["loss"], module.losses))
    assert learning_rates[0] == learning_rates[1]


def test_a_metric_that_is_gone_is_said(tmp_path, monkeypatch):
    saver = SaveEverywhere(tmp_path)
    run(tmp_path, saver=saver)

    class Fewer(Digits):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.gone, self.train_acc = None, self.train_logged["acc"]

    monkeypatch.setitem(globals(), "Digits", Fewer)
    with pytest.warns(LitCondWarning, match=r"state of metrics .* does not have: 'train_logged\.acc': they"):
        run(tmp_path, ckpt_path=list(saver.saved)[2])


OF_TWO = {"processes": [{"random": random_state(torch.device("cpu"))}] * 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "state of ExactResume is damaged or of another version"),
        (OF_TWO, "written by 2 processes, now there are 1: random numbers, .* are not those"),
    ],
    ids=["another format", "another number of processes"],
)
def test_a_state_that_does_not_fit(change, message, tmp_path):
    saver = SaveEverywhere(tmp_path)
    run(tmp_path, saver=saver)
    path = list(saver.saved)[2]
    content = torch.load(path, weights_only=True)
    state = content["callbacks"]["ExactResume"]
    state.update(change)
    torch.save(content, path)
    refused = pytest.raises(CheckpointMismatchError, match=message)
    with refused if "format" in change else pytest.warns(LitCondWarning, match=message):
        run(tmp_path, ckpt_path=path)


def test_another_lightning_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.__version__", "2.7.1")
    with pytest.warns(LitCondWarning, match=r"as they are in 2\.6, and this is 2\.7\.1"):
        make_trainer(tmp_path, [ExactResume()]).fit(make_module(), make_loader())
