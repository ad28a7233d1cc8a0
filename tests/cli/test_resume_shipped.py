"""The shipped configurations go on where they were, and end with their best checkpoint."""

from pathlib import Path

import pytest
import torch
import yaml

from lit_cond.cli import LitCondCLI
from lit_cond.runs import find_checkpoint
from tests.cli.helpers import CONFIGS

DIGITS = next(path for path in CONFIGS if path.stem == "digits_vit")
EPOCHS = 4
# The accuracy does not improve after the first epoch.
WORDS = ("fit", "--config", str(DIGITS), "--model.lr=1e-12", f"--trainer.max_epochs={EPOCHS}",
         "--trainer.limit_train_batches=2", "--trainer.enable_progress_bar=false", "--trainer.limit_test_batches=2",
         "--model.warmup_epochs=0")  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_one_writes_a_checkpoint_every_epoch_beside_the_best(path):
    listed = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
    best, last = (one["init_args"] for one in listed if one["class_path"].endswith("ModelCheckpoint"))
    assert best["monitor"] == "val/acc"
    assert last == {"filename": "last", "enable_version_counter": False}


def test_a_finished_run_has_nothing_more_to_do_than_to_end(tmp_path, capsys):
    first = LitCondCLI([*WORDS])
    folder = tmp_path / "runs/digits_vit/version_0"
    files = {path.name: torch.load(path, weights_only=True)["epoch"] for path in folder.rglob("*.ckpt")}
    (best,) = (name for name in files if name != "last.ckpt")
    assert files == {best: 0, "last.ckpt": EPOCHS - 1}
    assert find_checkpoint(folder).name == best
    assert find_checkpoint(folder, "last").name == "last.ckpt"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.ckpt")}
    told = summary(capsys.readouterr().out)
    assert told["checkpoint"].endswith(best)

    again = LitCondCLI([*WORDS, "--ckpt_path=last"])
    said = capsys.readouterr().out
    assert f"last.ckpt' (epoch {EPOCHS - 1}, step {2 * EPOCHS})" in said
    assert "the log of the run goes on" not in said
    assert again.trainer.fit_loop.total_batch_idx + 1 == 2 * EPOCHS
    assert again.trainer.fit_loop.epoch_loop.batch_progress.total.started == 2 * EPOCHS
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.ckpt")} == before
    assert summary(said) == told
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))


def test_a_stopped_run_goes_on_behind_its_last_epoch(tmp_path, capsys):
    LitCondCLI([*WORDS, "--trainer.max_epochs=2", "--test_after_fit=false"])
    cli = LitCondCLI([*WORDS, "--ckpt_path=last", "--test_after_fit=false"])
    assert "last.ckpt' (epoch 1, step 4)" in capsys.readouterr().out
    assert Path(cli.trainer.checkpoint_callbacks[1].best_model_path).name == "last.ckpt"
    assert len(list((tmp_path / "runs").rglob("*.ckpt"))) == 2
    best = torch.load(cli.trainer.checkpoint_callbacks[0].best_model_path, weights_only=True)
    assert best["epoch"] == 0


def summary(out):
    """Return the last lines of a fit."""
    lines = [line.split(None, 1) for line in out.splitlines() if line.startswith(("test/", "checkpoint"))]
    return {line[0]: line[1] for line in lines}
