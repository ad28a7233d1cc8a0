"""Mistakes in a configuration or a call: one line with the wrong word and the right one, exit code 2."""

import copy

import pytest
import yaml

from tests.cli.helpers import TINY, run_process

OPTION, CLASS, VALUE = (
    "has no option {!r}; did you mean {!r}",
    "no class {!r}; did you mean {!r}",
    "expected {}, got {!r}",
)

# (what to set in the file, what to add to the command line, what the message must hold)
MALFORMED = {
    "top level key": ({"trainr": {"max_epochs": 1}}, [], ["'trainr'", "'trainer'"]),
    "key at the wrong level": ({"max_epochs": 1}, [], ["'max_epochs'", "'trainer.max_epochs'"]),
    "trainer key": ({"trainer.max_epoch": 3}, [], ["'max_epoch'", "'trainer.max_epochs'"]),
    "group": ({"conditionning": {"scale": 1}}, [], ["'conditionning'", "'conditioning'"]),
    "group option": (
        {"conditioning": {"strenght": 0.5}}, [],
        ["conditioning: ", OPTION.format("strenght", "strength")],
    ),
    "token option": ({"tokens": {"detatch": True}}, [], ["tokens: ", OPTION.format("detatch", "detach")]),
    "schedule option": (
        {"schedule": {"num_step": 3}}, [], ["schedule: ", OPTION.format("num_step", "num_steps")]
    ),
    "monitor option": (
        {"monitor": {"every_n_step": 3}}, [], ["monitor: ", OPTION.format("every_n_step", "every_n_steps")]
    ),
    "group is not a mapping": (
        {"monitor": True}, [],
        ["monitor: expected the options of ConditionNumberMonitor or null, got 'True'"],
    ),
    "literal": (
        {"conditioning": {"correction": "identty"}}, [],
        ["conditioning.correction: ", "'spectral' or 'identity', got 'identty'", "did you mean 'identity'"],
    ),
    "literal in a list": (
        {"conditioning": {"roles": ["query", "kye"]}}, [], ["conditioning.roles: ", "got 'kye'; did you mean 'key'?"]
    ),
    "number or literal": (
        {"conditioning": {"scale": "spectrl"}}, [],
        ["conditioning.scale: ", "float", "got 'spectrl'", "did you mean 'spectral'"],
    ),
    "number": ({"tokens": {"strength": "much"}}, [], ["tokens.strength: ", VALUE.format("float", "much")]),
    "whole number": ({"trainer.max_epochs": "ten"}, [], ["trainer.max_epochs: ", "int or null, got 'ten'"]),
    "precision": ({"trainer.precision": "bf16-mixd"}, [], ["trainer.precision: 'bf16-mixd' is not", "'bf16-mixed'"]),
    "truth value": ({"test_after_fit": "maybe"}, [], ["test_after_fit: ", VALUE.format("bool", "maybe")]),
    "model class": (
        {"model.class_path": "ImageClassificaton"}, [],
        ["model: ", CLASS.format("ImageClassificaton", "ImageClassification")],
    ),
    "model class by path": (
        {"model.class_path": "lit_cond.tasks.ImageClassificatoin"}, [],
        ["'lit_cond.tasks.ImageClassificatoin'", "'ImageClassification'"],
    ),
    "module of a class": (
        {"model.class_path": "lit_cond.task.ImageClassification"}, [],
        ["'lit_cond.task.ImageClassification'; did you mean 'lit_cond.tasks.ImageClassification'?"],
    ),
    "not a model": ({"model.class_path": "torch.nn.Linear"}, [], ["'torch.nn.Linear' is not a LightningModule"]),
    "no class named": ({"model": {"lr": 0.1}}, [], ["model: ", "'lr'", "class_path"]),
    "class_path misspelt": ({"data": {"clas_path": "DigitsDataModule"}}, [], ["'clas_path'", "'class_path'"]),
    "model option": (
        {"model.init_args.label_smoothin": 0.1}, [], ["model: ", OPTION.format("label_smoothin", "label_smoothing")]
    ),
    "data class": ({"data.class_path": "DigitDataModule"}, [], [CLASS.format("DigitDataModule", "DigitsDataModule")]),
    "data option": (
        {"data.init_args": {"batchsize": 8}}, [], ["data: ", OPTION.format("batchsize", "batch_size")]
    ),
    "callback class in the list": (
        {"trainer.callbacks": ["ConditionNumberMonitr"]}, [],
        ["trainer.callbacks: ", CLASS.format("ConditionNumberMonitr", "ConditionNumberMonitor")],
    ),
    "callback option in the list": (
        {"trainer.callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"montior": "val/acc"}}]}, [],
        ["trainer.callbacks: ", OPTION.format("montior", "monitor")],
    ),
    "optimizer class": ({}, ["--optimizer", "SDG"], ["optimizer: ", CLASS.format("SDG", "SGD")]),
    "optimizer option": (
        {}, ["--optimizer=SGD", "--optimizer.momentun=0.9"], [OPTION.format("momentun", "momentum")]
    ),
    "abbreviated option": ({}, ["--trainer.max_epoch", "3"], ["'max_epoch'", "'trainer.max_epochs'"]),
    "abbreviated group": ({}, ["--cond.scale", "3"], ["'cond'", "'conditioning'"]),
    "option on the command line": ({}, ["--tokns.strength", "1"], ["'tokns'", "'tokens'"]),
    "group option on the command line": ({}, ["--conditioning.scal", "3"], [OPTION.format("scal", "scale")]),
    "model option on the command line": ({}, ["--model.init_args.lrr=1"], [OPTION.format("lrr", "lr")]),
    "word without an option": ({}, ["quick"], ["'quick'", "--"]),
    "option without a value": ({}, ["--trainer.max_epochs"], ["trainer.max_epochs"]),
    "checkpoint missing": ({}, ["--ckpt_path", "nowhere.ckpt"], ["ckpt_path", "'nowhere.ckpt'"]),
    "checkpoint of another kind": ({}, ["--ckpt_path", "job.yaml"], ["ckpt_path", "'job.yaml' is not a checkpoint"]),
    "accelerator": ({"trainer.accelerator": "gpuu"}, [], ["trainer: ", "gpuu", "cpu"]),
    "value refused by a callback": (
        {"monitor": {"every_n_steps": 0}}, [], ["every_n_steps", "0"]
    ),
    "value refused by the model": ({"model.init_args.lr": -1}, [], ["lr is -1"]),
    "number of classes against the data": ({"model.init_args.num_classes": 5}, [], ["num_classes is 5", "10"]),
    "no number of classes": ({"data": None}, [], ["model.num_classes is missing", "there is no data module"]),
    "data without classes": (
        {"data": {"class_path": "tests.cli.helpers.SequenceData"}}, [],
        ["model.num_classes is missing", "SequenceData has none"],
    ),
    "folder of the user's data": (
        {"data": {"class_path": "ImageFolderDataModule", "init_args": {"root": "no/such/folder"}}}, [],
        ["no/such/folder"],
    ),
}  # fmt: skip


def write(path, changes):
    job = copy.deepcopy(TINY)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = job
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    path.write_text(yaml.safe_dump(job))


def check_one_line(outcome, expected):
    lines = [line for line in outcome.err.splitlines() if line.startswith("lit_cond: error: ")]
    assert outcome.code == 2, outcome.err
    assert len(lines) == 1, outcome.err
    assert "usage:" not in outcome.err
    assert "Traceback" not in outcome.err
    for text in expected:
        assert text in lines[0]
    assert len(lines[0]) < 400


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_job(case, run, tmp_path):
    changes, words, expected = MALFORMED[case]
    write(tmp_path / "job.yaml", changes)
    check_one_line(run("fit", "--config", "job.yaml", *words), expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fit", "--config", "jab.yaml"], ["config: ", "jab.yaml", "did you mean 'job.yaml'"]),
        (["fti", "--config", "job.yaml"], ["'fti'", "'fit'"]),
        (["--config", "job.yaml", "fit"], ["put --config after fit"]),
        (["fit"], ["model is missing", "--config"]),
        (["fit", "--config", "broken.yaml"], ["broken.yaml, line 3", "expected ',' or ']'"]),
        (["fit", "--config", "indented.yaml"], ["indented.yaml, line 3"]),
        (["fit", "--config", "empty.yaml"], ["empty.yaml", "empty"]),
        (["fit", "--config", "prose.yaml"], ["prose.yaml", "'just words'"]),
    ],
    ids=lambda value: " ".join(value) if "--config" in value else "",
)
def test_malformed_call(words, expected, run, tmp_path):
    write(tmp_path / "job.yaml", {})
    (tmp_path / "broken.yaml").write_text("trainer:\n  devices: [1, 2\n  max_epochs: 1\n")
    (tmp_path / "indented.yaml").write_text("trainer:\n  max_epochs: 1\n max_steps: 2\n")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "prose.yaml").write_text("just words")
    check_one_line(run(*words), expected)


def test_data_error_in_a_worker_process(run):
    words = ("--model=tests.tiny.TinyModule", "--data=tests.cli.helpers.BrokenData", "--trainer.fast_dev_run=1")
    outcome = run("fit", *words, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
    check_one_line(outcome, [])
    assert "lit_cond: error: the image a.png can not be read: replace or remove it\n" in outcome.err


@pytest.mark.slow
def test_malformed_in_a_process(tmp_path):
    write(tmp_path / "job.yaml", {"conditioning": {"strenght": 0.5}})
    done = run_process("-m", "lit_cond", "fit", "--config", "job.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "lit_cond: error: conditioning: SpectralConditioning has no option 'strenght'; did you mean 'strength'?"
    ]


def test_traceback_on_demand(run, tmp_path, monkeypatch):
    write(tmp_path / "job.yaml", {"model.init_args.lr": -1})
    monkeypatch.setenv("LIT_COND_TRACEBACK", "1")
    with pytest.raises(ValueError, match="lr is -1"):
        run("fit", "--config", "job.yaml")


def test_other_exceptions_pass(run, tmp_path, monkeypatch):
    write(tmp_path / "job.yaml", {})

    def fail(*args, **kwargs):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("lit_cond.tasks.ImageClassification.training_step", fail)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        run("fit", "--config", "job.yaml")
