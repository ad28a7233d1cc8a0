"""The commands, the general help, and what a training run ends with."""

import io
import shlex

import pytest
import torch
from rich.console import Console

from lit_cond.__main__ import COMMANDS
from lit_cond.cli import LitCondCLI
from lit_cond.summary import ConditionNumbers, RunSummary, condition_numbers, finish_fit, render
from lit_cond.surgery.report import measure_weights
from tests.cli.helpers import run_process, write_config
from tests.tiny import make_loader, make_module, make_trainer

IMPORTED = """
import runpy, sys
sys.argv = ["lit_cond", "--help"]
try:
    runpy.run_module("lit_cond", run_name="__main__")
except SystemExit as error:
    print("code", error.code)
print("heavy", sorted({"timm", "transformers", "torchvision", "lightning", "sklearn"} & set(sys.modules)))
"""


def summary_lines(out):
    return dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)


def value(lines, key):
    return lines[key].strip()


def test_general_help_imports_nothing_heavy(tmp_path):
    done = run_process("-c", IMPORTED, cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["code 0", "heavy []"]
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


def test_commands_of_the_help_are_those_of_the_parser():
    assert set(COMMANDS) == {*LitCondCLI.subcommands(), "inspect", "export", "report"}


def test_summary_of_a_conditioned_run(run, tmp_path):
    config = write_config(tmp_path / "job.yaml", conditioning={}, tokens={}, monitor={"every_n_steps": 1})
    outcome = run("fit", "--config", config)
    assert outcome.code == 0, outcome.err
    lines = summary_lines(outcome.out)
    assert 0 <= float(value(lines, "test/acc")) <= 1
    for quantity in ("query", "key", "value", "tokens"):
        corrected, _, raw = value(lines, f"mean condition number, {quantity}").partition(" (without the correction ")
        assert 1 <= float(corrected.replace(",", "")) <= 2.001
        assert float(raw.rstrip(")").replace(",", "")) > 2.001
    checkpoint = tmp_path / value(lines, "checkpoint")
    assert checkpoint.is_file()
    program, flag, folder = shlex.split(value(lines, "to see the curves"))
    assert (program, flag) == ("tensorboard", "--logdir")
    assert list((tmp_path / folder).glob("events.out.tfevents.*"))


def test_summary_without_monitor_measures_the_weights(run, tmp_path):
    outcome = run("fit", "--config", write_config(tmp_path / "job.yaml", conditioning={}))
    corrected = value(summary_lines(outcome.out), "mean condition number, key").split()[0]
    assert 1 <= float(corrected) <= 2.1  # the weight has moved since the correction was made
    assert "condition number, tokens" not in outcome.out


@pytest.mark.parametrize(
    ("words", "checkpoint", "curves", "tested"),
    [
        (["--trainer.logger=false"], True, False, True),
        (["--trainer.enable_checkpointing=false"], False, True, False),
        (["--trainer.fast_dev_run=true"], False, False, False),
        (["--test_after_fit=false"], True, True, False),
        (["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"], True, False, True),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_summary_says_what_is_missing(words, checkpoint, curves, tested, run, config, tmp_path):
    outcome = run("fit", "--config", config, *words)
    assert outcome.code == 0, outcome.err
    lines = summary_lines(outcome.out)
    assert (tmp_path / value(lines, "checkpoint")).is_file() == checkpoint
    assert ("to see the curves" in lines) == curves
    assert ("test/acc" in lines) == tested
    assert ("not done: " in lines.get("test", "")) == (not tested)


def test_summary_of_a_model_and_data_of_the_users_own(tmp_path, capsys):
    module, trainer = make_module(), make_trainer(tmp_path, enable_checkpointing=True)
    trainer.fit(module, make_loader())
    summary = finish_fit(trainer, module, None, test=True)
    assert summary.untested == "there is no test set"
    assert set(summary.numbers) == {"query", "key", "value"}
    reports = [report.effective for report in measure_weights(module) if report.role == "query"]
    assert summary.numbers["query"].corrected == pytest.approx(sum(reports) / len(reports))
    assert "(no correction)" in capsys.readouterr().out


def test_model_and_data_of_the_users_own_on_the_command_line(run):
    words = ("--model=tests.tiny.TinyModule", "--data=tests.cli.helpers.SequenceData", "--trainer.max_epochs=1")
    outcome = run(
        "fit", *words, "--model.attention=separate", "--conditioning.strength=0.5", "--trainer.accelerator=cpu"
    )
    assert outcome.code == 0, outcome.err
    lines = summary_lines(outcome.out)
    assert float(value(lines, "test_loss")) > 0
    assert "(without the correction " in value(lines, "mean condition number, key")


def test_summary_of_a_model_without_attention(tmp_path):
    module = make_module()
    module.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(72, 5))
    trainer = make_trainer(tmp_path)
    trainer.fit(module, make_loader())
    summary = finish_fit(trainer, module, None, test=True)
    assert summary.numbers == {}
    assert summary.unmeasured


def test_monitored_numbers_are_preferred():
    logged = {"cond/key/mean": 1.5, "cond_raw/key/mean": 80.0, "cond/tokens/mean": 2.0, "train/loss": 1.0}
    found = condition_numbers(logged, make_module())
    assert found == {"key": ConditionNumbers(1.5, 80.0), "tokens": ConditionNumbers(2.0)}


def test_numbers_are_readable():
    console = Console(width=80, record=True, file=io.StringIO())
    numbers = {"query": ConditionNumbers(1.98765, 11970.4), "key": ConditionNumbers(float("inf"))}
    render(RunSummary(numbers=numbers), console)
    text = console.export_text()
    assert "query  1.988 (without the correction 11,970)\n" in text
    assert "key    inf\n" in text


def test_long_paths_are_not_cut(tmp_path):
    console = Console(width=40, record=True, file=io.StringIO())
    path = str(tmp_path / ("long" * 30) / "with space.ckpt")
    render(RunSummary({"test/acc": 0.5}, checkpoint=path, log_dir=str(tmp_path / "with space")), console)
    text = console.export_text()
    assert "with space.ckpt\n" in text
    assert "tensorboard --logdir 'with space'\n" in text


def test_evaluation_commands_take_the_config_of_a_run(run, config):
    cli = LitCondCLI(["fit", "--config", config, "--trainer.max_epochs=2", "--model.init_args.lr=0.02"])
    (acc,) = [float(metric) for name, metric in cli.trainer.callback_metrics.items() if name == "test/acc"]
    saved, path = f"{cli.trainer.log_dir}/config.yaml", cli.trainer.checkpoint_callback.best_model_path
    tested = LitCondCLI(["test", "--config", saved, "--ckpt_path", path])
    assert float(tested.trainer.callback_metrics["test/acc"]) == acc
    for command in ("validate", "predict"):
        assert run(command, "--config", saved, "--ckpt_path", path).code == 0


def test_help_of_a_command_and_of_a_class(run):
    outcome = run("fit", "--help")
    assert outcome.code == 0
    for text in ("--conditioning", "--tokens", "--schedule", "--monitor", "--test_after_fit", "--trainer.max_epochs"):
        assert text in outcome.out
    outcome = run("fit", "--model.help", "ImageClassification")
    assert outcome.code == 0
    assert "--model.label_smoothing" in outcome.out
