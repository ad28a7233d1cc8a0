"""What users of LightningCLI have stumbled over, one test each (the other C1 and C4 tests are beside this file)."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import SGD, AdamW

from lit_cond.cli import LitCondCLI
from lit_cond.errors import LitCondWarning
from lit_cond.runs import load_run
from lit_cond.surgery import strengths
from tests.cli.helpers import CONFIGS, LearningRates, run_process, write_config

NO_LOGGER = ("--trainer.logger=false",)


def fit(*words):
    return LitCondCLI(["fit", *words])


def last_checkpoint(cli):
    return cli.trainer.checkpoint_callback.best_model_path


EVERY_EPOCH = ("ModelCheckpoint", "--trainer.callbacks.save_top_k=-1")
TWO_EPOCHS = ("--test_after_fit=false", "--trainer.max_epochs=2")


def first_epoch(cli):
    """The checkpoint of the middle of a run over two epochs of two steps."""
    (path,) = Path(cli.trainer.log_dir).rglob("epoch=0-*.ckpt")
    return str(path)


def test_c2_given_learning_rate_wins_over_the_checkpoint(config):
    first = fit("--config", config, *TWO_EPOCHS, "--trainer.callbacks", *EVERY_EPOCH)
    words = ("--config", config, *TWO_EPOCHS, "--ckpt_path", first_epoch(first), "--trainer.callbacks=LearningRates")
    with pytest.warns(LitCondWarning, match=r"lr = 0\.7 \(not 0\.001\)"):
        resumed = fit(*words, "--model.init_args.lr=0.7")
    assert resumed.model.hparams.lr == 0.7
    # Half a cosine over four steps, of which two are done.
    assert LearningRates.seen == pytest.approx([0.7 * 0.5, 0.7 * (1 - 0.5**0.5) / 2])
    fit(*words)
    assert LearningRates.seen == pytest.approx([0.001 * 0.5, 0.001 * (1 - 0.5**0.5) / 2])


def test_c2_given_learning_rate_wins_over_a_checkpoint_named_by_keyword(config):
    words = ("--config", config, "--optimizer=SGD", "--optimizer.lr=0.1", "--trainer.default_root_dir=.", *NO_LOGGER)
    callbacks = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_last=true")
    fit(*words, *callbacks, "--test_after_fit=false")
    resumed = fit(*words, *callbacks, *TWO_EPOCHS, "--ckpt_path=last", "--optimizer.lr=0.7")
    assert resumed.trainer.global_step == 4
    assert [group["lr"] for group in resumed.trainer.optimizers[0].param_groups] == [0.7, 0.7]


def test_c2_given_strength_wins_over_the_checkpoint(tmp_path):
    config = write_config(tmp_path / "job.yaml", conditioning={}, tokens={"strength": 0.75})
    first = fit("--config", config, *TWO_EPOCHS, "--trainer.callbacks", *EVERY_EPOCH)
    words = ("--config", config, *TWO_EPOCHS, "--ckpt_path", first_epoch(first))
    with pytest.warns(LitCondWarning, match=r"was at strength 1 and goes on with 0\.5"):
        resumed = fit(*words, "--conditioning.strength=0.5")
    assert set(strengths(resumed.model, "weights")) == {0.5}
    assert set(strengths(resumed.model, "tokens")) == {0.75}
    checkpoint = torch.load(last_checkpoint(resumed), weights_only=True)["lit_cond"]["weights"]
    assert {term["strength"] for entry in checkpoint.values() for term in entry["terms"]} == {0.5}
    fit(*words)  # without a warning


def test_c2_schedule_decides_the_strength_of_a_resumed_run(tmp_path):
    config = write_config(tmp_path / "job.yaml", conditioning={"strength": 1.0}, schedule={"num_steps": 8})
    first = fit("--config", config, *TWO_EPOCHS, "--trainer.callbacks", *EVERY_EPOCH)
    resumed = fit("--config", config, *TWO_EPOCHS, "--ckpt_path", first_epoch(first))
    assert set(strengths(resumed.model)) == {0.375}  # of the fourth step, counted from 0 to 8


def test_c2_given_options_of_an_optimizer_win_over_its_restored_state(config):
    optimizer = ("--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.momentum=0.9")
    first = fit("--config", config, *optimizer, "--test_after_fit=false")
    resumed = fit(
        "--config", config, *optimizer, "--optimizer.lr=0.05", "--optimizer.momentum=0.5", "--test_after_fit=false",
        "--trainer.max_epochs=2", "--ckpt_path", last_checkpoint(first),
    )  # fmt: skip
    assert [group["lr"] for group in resumed.trainer.optimizers[0].param_groups] == [0.05, 0.05]
    assert [group["momentum"] for group in resumed.trainer.optimizers[0].param_groups] == [0.5, 0.5]


def test_c2_checkpoint_fills_what_is_not_given(config, tmp_path):
    first = fit("--config", config, "--test_after_fit=false", "--model.init_args.label_smoothing=0.3")
    resumed = fit(
        "--config", config, "--test_after_fit=false", "--trainer.max_epochs=2", "--ckpt_path", last_checkpoint(first)
    )
    assert resumed.model.hparams.label_smoothing == 0.3
    saved = yaml.safe_load((tmp_path / "lightning_logs/version_1/config.yaml").read_text())
    assert saved["model"]["init_args"]["label_smoothing"] == 0.3
    assert saved["ckpt_path"] == last_checkpoint(first)


def test_c2_learning_rate_of_a_closed_schedule_is_said_not_to_be_in_force(config):
    schedule = ("--optimizer=SGD", "--optimizer.lr=0.1", "--lr_scheduler=ReduceLROnPlateau")
    schedule += ("--lr_scheduler.monitor=train/loss", "--test_after_fit=false")
    first = fit("--config", config, *schedule)
    with pytest.warns(LitCondWarning, match=r"lr 0\.7 is not in force, ReduceLROnPlateau goes on with .* 0\.1"):
        fit("--config", config, *schedule, "--optimizer.lr=0.7", "--trainer.max_epochs=2",
            "--ckpt_path", last_checkpoint(first))  # fmt: skip


def test_c2_weights_of_the_checkpoint_are_not_fetched_again(config, monkeypatch):
    path = last_checkpoint(fit("--config", config, "--test_after_fit=false"))
    monkeypatch.setattr("socket.socket", None)  # no network
    cli = LitCondCLI(["test", "--config", config, "--ckpt_path", path, "--model.init_args.pretrained=true"])
    assert cli.model.hparams.pretrained is False


def test_c2_checkpoint_written_in_python(config):
    first = fit("--config", config, "--test_after_fit=false", "--model.init_args.label_smoothing=0.3")
    checkpoint = torch.load(last_checkpoint(first), weights_only=True)
    for key in ("_class_path", "_instantiator"):
        del checkpoint["hyper_parameters"][key]
    torch.save(checkpoint, "python.ckpt")
    tested = LitCondCLI(["test", "--config", config, "--ckpt_path", "python.ckpt"])
    assert tested.model.hparams.label_smoothing == 0.3


FIXED_VERSION = ("TensorBoardLogger", "--trainer.logger.save_dir=logs", "--trainer.logger.version=fixed")


@pytest.mark.parametrize("logger", [("false",), FIXED_VERSION], ids=["no logger", "fixed version"])
def test_c3_same_command_twice(logger, run, config, tmp_path):
    words = ("fit", "--config", config, "--trainer.default_root_dir=.", "--trainer.logger", *logger)
    for _ in range(2):
        outcome = run(*words)
        assert outcome.code == 0, outcome.err
    assert len(list(tmp_path.rglob("config.yaml"))) == 1
    assert len(list(tmp_path.rglob("*.ckpt"))) == 2


def test_c3_evaluation_leaves_the_config_of_the_training(run, config, tmp_path):
    words = ("--config", config, "--trainer.default_root_dir=.", *NO_LOGGER)
    cli = fit(*words)
    before = (tmp_path / "config.yaml").read_text()
    assert run("test", *words, "--ckpt_path", last_checkpoint(cli), "--trainer.limit_test_batches=1").code == 0
    assert (tmp_path / "config.yaml").read_text() == before
    assert yaml.safe_load((tmp_path / "config_test.yaml").read_text())["trainer"]["limit_test_batches"] == 1


@pytest.mark.parametrize(
    ("words", "wrong", "right"),
    [
        (["--conditioning.strenght=1"], "'strenght'", "'strength'"),
        (["--model=ImageClasification"], "'ImageClasification'", "'ImageClassification'"),
        (["--trainer.max_epoch=1"], "'max_epoch'", "'trainer.max_epochs'"),
        (["--tokns.strength=1"], "'tokns'", "'tokens'"),
    ],
)
def test_c4_misspelt_key(words, wrong, right, run, config):
    outcome = run("fit", "--config", config, *words)
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert wrong in outcome.err
    assert f"did you mean {right}?" in outcome.err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_c5_shipped_config_parses_elsewhere(path, run):
    outcome = run("fit", "--config", str(path), "--print_config")
    assert outcome.code == 0, outcome.err
    shown = yaml.safe_load(outcome.out)
    assert shown["model"]["class_path"].startswith("lit_cond.")
    assert shown["data"]["class_path"].startswith("lit_cond.")


@pytest.mark.slow
def test_c6_checkpoint_loads_without_a_config(config, tmp_path):
    path = last_checkpoint(fit("--config", config, "--conditioning={}"))
    code = (
        "from lit_cond.tasks import ImageClassification as T\n"
        f"model = T.load_from_checkpoint({path!r})\n"
        "print(model.num_classes, model.hparams.num_classes)"
    )
    done = run_process("-c", code, cwd=tmp_path)
    assert done.stdout.split() == ["10", "10"], done.stderr


def test_c7_optimizer_of_the_command_line(config):
    cli = fit("--config", config, "--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.weight_decay=0.01",
              "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5",
              "--trainer.max_epochs=2", "--test_after_fit=false")  # fmt: skip
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is SGD
    assert [(group["name"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ("decay", 0.01),
        ("no_decay", 0.0),
    ]
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in cli.model.parameter_groups(0.01)
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]  # halved after each epoch


def test_c7_without_an_option_the_task_decides(config):
    (optimizer,) = fit("--config", config, "--test_after_fit=false").trainer.optimizers
    assert type(optimizer) is AdamW


REPORT = """
from pathlib import Path
from lightning.pytorch import Callback

class OptimizerReport(Callback):
    def on_train_end(self, trainer, pl_module):
        (optimizer,) = trainer.optimizers
        groups = [(group["name"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        Path(f"rank{trainer.global_rank}.txt").write_text(f"{trainer.world_size} {type(optimizer).__name__} {groups}")
"""


@pytest.mark.slow
def test_c7_optimizer_of_the_command_line_in_two_processes(config, tmp_path):
    (tmp_path / "report.py").write_text(REPORT)
    done = run_process(
        "-m", "lit_cond", "fit", "--config", config, "--optimizer=SGD", "--optimizer.lr=0.1",
        "--optimizer.weight_decay=0.01", "--conditioning={}", "--trainer.callbacks+=report.OptimizerReport",
        "--trainer.devices=2", "--trainer.strategy=ddp", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = "2 SGD [('decay', 0.1, 0.01), ('no_decay', 0.1, 0.0)]"
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == [expected, expected]
    assert done.stdout.count("tensorboard --logdir") == 1  # the summary comes from the first process alone


GROUPS = {
    "plain": {},
    "weights": {"conditioning": {}},
    "both": {"conditioning": {"correction": "identity", "scale": 0.5}, "tokens": {}, "schedule": {"start": 0.5}},
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_c8_run_is_rebuilt_from_its_folder(group, tmp_path):
    cli = fit("--config", write_config(tmp_path / "job.yaml", **group), "--model.init_args.lr=0.01")
    images = next(iter(cli.datamodule.test_dataloader()))[0]
    with torch.no_grad():
        expected = cli.model.eval()(images)  # the test at the end of fit has loaded the best checkpoint
        run = load_run(cli.trainer.log_dir)
        run.datamodule.setup("test")
        found = run.model(next(iter(run.datamodule.test_dataloader()))[0])
    assert type(run.model) is type(cli.model)
    assert type(run.datamodule) is type(cli.datamodule)
    assert run.config["model"]["init_args"]["lr"] == 0.01
    assert torch.equal(found, expected)
