"""`fit --ckpt_path last`: where a run goes on, and with what."""

import csv
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_cond.atomic_io import AtomicCheckpointIO
from lit_cond.callbacks import ExactResume
from lit_cond.cli import LitCondCLI
from lit_cond.errors import LitCondWarning
from lit_cond.report.reading import read_run
from tests.cli.helpers import TINY, write_config

BATCHES = 4


class Killed(BaseException):
    """Goes through Lightning as a kill does: no checkpoint is written."""


class Kill(Callback):
    """Ends the run before a batch, counted over the epochs."""

    at: int | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.at:
            raise Killed


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Write a small job, and return a function that runs it."""
    trainer = {**TINY["trainer"], "max_epochs": 3, "limit_train_batches": BATCHES, "limit_val_batches": 2}
    trainer["callbacks"] = [
        {"class_path": "tests.cli.test_resume.Kill"},
        {
            "class_path": "ModelCheckpoint",
            "init_args": {"monitor": "val/loss", "save_top_k": 2, "save_last": True},
        },
    ]
    data = {"class_path": "DigitsDataModule", "init_args": {"augment": True, "batch_size": 16}}

    def fit(*words, kill=None, **sections):
        settings = {**trainer, **sections.pop("trainer", {})}
        config = write_config(tmp_path / "job.yaml", trainer=settings, data=data, conditioning={}, **sections)
        monkeypatch.setattr(Kill, "at", kill)
        words = ["fit", "--config", config, "--test_after_fit=false", *words]
        if kill is None:
            return LitCondCLI(words)
        with pytest.raises(Killed):
            LitCondCLI(words)
        return None

    return fit


LAST = "--ckpt_path=last"


def final(cli):
    return cli.model.state_dict(), cli.trainer.optimizers[0].state_dict()["state"]


def same(a, b):
    flat_a, flat_b = (torch.utils._pytree.tree_leaves(final(cli)) for cli in (a, b))
    return len(flat_a) == len(flat_b) and all(torch.equal(x, y) for x, y in zip(flat_a, flat_b, strict=True))


def best(cli):
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, ModelCheckpoint))
    scores = {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    return scores, Path(callback.best_model_path).name, Path(callback.last_model_path).name


def tensorboard(folder="."):
    return {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(folder), "name": None}}


def table(folder="."):
    return {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "tables"}}


LOGGERS = {
    "default": True,
    "TensorBoard": tensorboard("logs"),
    "CSV": table("logs"),
    "both": [tensorboard("logs"), table("other")],
    "a fixed version": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": ".", "version": "mine"}},
    "none": False,
}


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_killed_run_goes_on_in_its_place_and_is_the_whole_one(logger, job, tmp_path, monkeypatch, capsys):
    settings = {"trainer": {"logger": LOGGERS[logger], "default_root_dir": "."}}
    runs, folders = {}, {}
    for name in ("whole", "killed"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        monkeypatch.chdir(folders[name])
        if name == "killed":
            job(kill=6, **settings)
            before = sorted(path.relative_to(folders[name]) for path in Path.cwd().rglob("version_*"))
            capsys.readouterr()
            runs[name] = job(LAST, **settings)
            said = capsys.readouterr().out
            assert "ckpt_path: going on from '" in said
            assert "epoch 0, step 4" in said
            assert before == sorted(path.relative_to(folders[name]) for path in Path.cwd().rglob("version_*"))
        else:
            runs[name] = job(**settings)
    assert same(runs["whole"], runs["killed"])
    assert best(runs["whole"]) == best(runs["killed"])
    files = [
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".ckpt", ".yaml", ".csv"))
        for folder in folders.values()
    ]
    assert files[0] == files[1]
    logs = sorted(
        {path.parent for path in folders["whole"].rglob("*") if "tfevents" in path.name or path.suffix == ".csv"}
    )
    assert len(logs) == {"none": 0, "both": 2}.get(logger, 1)
    for log in logs:
        whole, killed = (read_run(folder / log.relative_to(folders["whole"])).scalars for folder in folders.values())
        assert whole == killed
        assert whole


def test_within_an_epoch_with_checkpoints_every_few_steps(job, tmp_path, monkeypatch):
    callbacks = [
        {"class_path": "tests.cli.test_resume.Kill"},
        {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_last": True}},
    ]
    settings = {"trainer": {"callbacks": callbacks, "accumulate_grad_batches": 2, "log_every_n_steps": 2}}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = job(**settings)
    monkeypatch.chdir(tmp_path / "killed")
    job(kill=2, **settings)
    for batch in (3, 5, 7, 10):
        job(LAST, kill=batch, **settings)
    again = job(LAST, **settings)
    assert same(whole, again)
    # Lightning keeps a file from which a run went on; it writes none twice.
    kept = {path.name for path in (tmp_path / "killed").rglob("*.ckpt")}
    assert {path.name for path in (tmp_path / "whole").rglob("*.ckpt")} <= kept
    assert not [name for name in sorted(kept) if "-v" in name], sorted(kept)
    logged = [read_run(tmp_path / name / "lightning_logs/version_0").scalars for name in ("whole", "killed")]
    assert logged[0] == logged[1]


def test_nothing_there_yet_begins_at_the_beginning(job, capsys, tmp_path):
    cli = job(LAST)
    said = capsys.readouterr().out
    assert said.count("ckpt_path: no checkpoint to go on from yet in '.': the run begins at the beginning") == 1
    assert cli.trainer.global_step == 3 * BATCHES
    assert (tmp_path / "lightning_logs/version_0").is_dir()


def test_the_saved_configuration_holds_the_command(job, tmp_path):
    job(kill=6)
    job(LAST)
    saved = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    assert saved["ckpt_path"] == "last"
    assert saved["trainer"]["logger"] is True or saved["trainer"]["logger"] is None


def test_a_truncated_checkpoint_is_passed_over(job, tmp_path):
    job(kill=10)
    folder = tmp_path / "lightning_logs/version_0/checkpoints"
    newest = folder / "last.ckpt"
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    by_step = folder / f"epoch=1-step={2 * BATCHES}.ckpt"
    by_step.write_bytes(b"")
    with pytest.warns(LitCondWarning, match=r"ckpt_path: passed over: .*") as warned:
        job(LAST, kill=5)
    passed = [str(one.message) for one in warned if one.category is LitCondWarning]
    assert {Path(text.split("'")[1]).name for text in passed} == {"last.ckpt", by_step.name}
    assert newest.read_bytes() == content[: len(content) // 2]


def test_an_evaluation_in_between_is_not_taken_for_the_newest_run(job, tmp_path, run):
    job(kill=6)
    config = str(tmp_path / "job.yaml")
    assert run("validate", "--config", config, "--trainer.callbacks=null").code == 0
    assert (tmp_path / "lightning_logs/version_1").is_dir()
    cli = job(LAST)
    assert Path(cli.trainer.log_dir).name == "version_0"


@pytest.mark.parametrize("which", ["best", "last"])
def test_an_evaluation_of_the_newest_run(which, job, tmp_path, run):
    config = str(tmp_path / "job.yaml")
    (callback,) = (one for one in job().trainer.callbacks if isinstance(one, ModelCheckpoint))
    outcome = run("validate", "--config", config, f"--ckpt_path={which}", "--trainer.callbacks=null")
    assert outcome.code == 0, outcome.err
    path = callback.best_model_path if which == "best" else callback.last_model_path
    assert f"ckpt_path: the {which} checkpoint of the newest run is '{os.path.relpath(path)}'" in outcome.out
    assert run("test", "--config", config, f"--ckpt_path={which}", "--trainer.callbacks=null").code == 0


def test_an_evaluation_without_a_run(job, config, run):
    outcome = run("validate", "--config", config, "--ckpt_path=best")
    assert outcome.code == 2
    assert outcome.err.startswith("lit_cond: error: ckpt_path: there is no checkpoint in '")


def test_a_run_killed_before_its_first_checkpoint_begins_anew_and_leaves_older_ones_alone(job, tmp_path):
    job()
    job(kill=2)
    cli = job(LAST)
    assert cli.trainer.ckpt_path is None
    assert cli.trainer.global_step == 3 * BATCHES
    assert Path(cli.trainer.log_dir).name == "version_2"


def test_checkpoints_in_a_folder_of_their_own_belong_to_the_run_that_wrote_them(job, tmp_path):
    callbacks = [{"class_path": "tests.cli.test_resume.Kill"},
                 {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept", "save_top_k": -1}}]  # fmt: skip
    settings = {"trainer": {"callbacks": callbacks}}
    job(**settings)
    job(kill=6, **settings)
    cli = job(LAST, **settings)
    assert Path(cli.trainer.log_dir).name == "version_1"
    assert Path(cli.trainer.ckpt_path).name == f"epoch=0-step={BATCHES}-v1.ckpt"


def test_weights_alone_are_passed_over(job, capsys):
    callbacks = [{"class_path": "tests.cli.test_resume.Kill"},
                 {"class_path": "ModelCheckpoint", "init_args": {"save_weights_only": True}}]  # fmt: skip
    job(kill=6, trainer={"callbacks": callbacks})
    cli = job(LAST, trainer={"callbacks": callbacks})
    assert "holds weights alone" in capsys.readouterr().out
    assert cli.trainer.ckpt_path is None


def test_the_run_may_have_moved(job, tmp_path, monkeypatch):
    job(kill=6)
    (tmp_path / "new").mkdir()
    shutil.move(tmp_path / "lightning_logs", tmp_path / "new/lightning_logs")
    monkeypatch.chdir(tmp_path / "new")
    with pytest.warns(UserWarning, match="The dirpath has changed"):
        cli = job(LAST)
    assert cli.trainer.global_step == 3 * BATCHES
    assert Path(cli.trainer.log_dir).resolve() == (tmp_path / "new/lightning_logs/version_0").resolve()


def test_an_explicit_path_is_a_new_run(job, tmp_path):
    job(kill=6)
    cli = job("--ckpt_path", str(tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"))
    assert Path(cli.trainer.log_dir).name == "version_1"


def test_a_table_of_which_a_kill_has_cut_off_a_row_goes_on(job, tmp_path):
    settings = {"trainer": {"logger": table()}}
    job(kill=6, **settings)
    path = tmp_path / "tables/version_0/metrics.csv"
    before = list(csv.reader(path.open()))
    with path.open("a") as file:
        file.write("0.1,9")
    # As after a kill between the two moves.
    os.replace(path, path.with_name("metrics.before.csv"))
    job(LAST, **settings)
    rows = list(csv.DictReader(path.open()))
    assert len(rows) > len(before)
    assert all(row["step"].isdigit() for row in rows)
    first = {tuple(sorted((k, float(v)) for k, v in zip(before[0], row, strict=True) if v)) for row in before[1:]}
    assert first <= {tuple(sorted((k, float(v)) for k, v in row.items() if v)) for row in rows}
    assert not path.with_name("metrics.before.csv").exists()


def test_the_command_line_adds_what_a_resume_needs_once(job):
    cli = job("--trainer.max_epochs=1")
    assert type(cli.trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    assert sum(isinstance(one, ExactResume) for one in cli.trainer.callbacks) == 1
    cli = job("--trainer.max_epochs=1", "--trainer.callbacks+=lit_cond.callbacks.ExactResume",
              "--trainer.plugins=lightning.pytorch.plugins.io.AsyncCheckpointIO")  # fmt: skip
    assert type(cli.trainer.strategy.checkpoint_io).__name__ == "AsyncCheckpointIO"
    assert sum(isinstance(one, ExactResume) for one in cli.trainer.callbacks) == 1
