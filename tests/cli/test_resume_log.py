"""The log of a run that goes on, and runs that another process holds."""

import csv
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from lit_cond import cli_lock
from lit_cond.cli_log import ROWS_KEY, logged_step
from lit_cond.errors import ConfigurationError, LitCondWarning
from tests.cli.test_resume import BATCHES, LAST, job, same, table, tensorboard  # noqa: F401


def rows(path):
    return [sorted((k, float(v)) for k, v in row.items() if v) for row in csv.DictReader(path.open())]


@pytest.mark.parametrize("stored", [True, False], ids=["number of rows stored", "older checkpoint"])
def test_no_row_of_a_table_is_written_twice(stored, job, tmp_path, monkeypatch):  # noqa: F811
    settings = {"trainer": {"logger": table()}}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    job(**settings)
    monkeypatch.chdir(tmp_path / "killed")
    job(kill=7, **settings)
    path = Path("tables/version_0/metrics.csv")
    for file in Path.cwd().rglob("*.ckpt"):
        content = torch.load(file, weights_only=True)
        assert content[ROWS_KEY][0] < len(path.read_text().splitlines()) - 1  # what a kill leaves behind the checkpoint
        if not stored:
            del content[ROWS_KEY]
            torch.save(content, file)
    job(LAST, **settings)
    expected, found = rows(tmp_path / "whole" / path), rows(path)
    assert len(expected) > 3 * BATCHES
    if not stored:  # one row belongs to the step that the checkpoint has behind it
        found = [row for k, row in enumerate(found) if row not in found[:k]]
    assert found == expected


@pytest.mark.parametrize("logger", [table(), tensorboard()], ids=["CSV", "TensorBoard"])
def test_a_log_that_goes_further_than_the_checkpoint_is_said(logger, job, capsys):  # noqa: F811
    settings = {"trainer": {"logger": logger}}
    job(kill=7, **settings)
    (folder,) = {path.parent for path in Path.cwd().rglob("*") if path.name == "metrics.csv" or "tfevents" in path.name}
    assert logged_step(folder) == 6
    capsys.readouterr()
    job(LAST, kill=5, **settings)
    assert "ckpt_path: the log of the run goes on to step 6: what came after step 4" in capsys.readouterr().out


def test_nothing_is_said_of_a_log_that_ends_with_the_checkpoint(job, capsys):  # noqa: F811
    job(kill=BATCHES)
    job(LAST)
    assert "the log of the run goes on" not in capsys.readouterr().out


def test_a_flipped_bit_in_the_newest_checkpoint(job, tmp_path):  # noqa: F811
    whole = job()
    job(kill=10)
    newest = tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    with pytest.warns(LitCondWarning, match=r"ckpt_path: passed over: .*last\.ckpt' is damaged"):
        again = job(LAST)
    assert again.trainer.ckpt_path != str(newest)
    assert same(whole, again)


def test_a_second_process_in_the_same_run_is_refused(job, tmp_path, monkeypatch):  # noqa: F811
    job(kill=6)
    lock = tmp_path / "lightning_logs/version_0/.lit_cond.lock"
    assert lock.is_file()  # of the run itself
    monkeypatch.setattr(cli_lock, "_held", {})  # as in another process; the first one still lives
    with pytest.raises(ConfigurationError, match=r"another process is training in 'lightning_logs/version_0'"):
        job(LAST)


def test_a_worker_that_outlives_a_killed_run_does_not_hold_it(job, tmp_path):  # noqa: F811
    job(kill=6)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"1")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        cli_lock._let_go()  # what the end of the process does
        with (tmp_path / "lightning_logs/version_0/.lit_cond.lock").open("ab") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(go_on[1], b"1")
        os.waitpid(child, 0)


def test_two_starts_at_once_of_which_one_left_no_checkpoint(job, tmp_path, capsys):  # noqa: F811
    """Both found nothing to go on from, and the newer one was killed first."""
    job(LAST, kill=6)
    older, newer = (tmp_path / f"lightning_logs/version_{number}" for number in (0, 1))
    newer.mkdir()
    shutil.copy(older / "config.yaml", newer)
    cli = job(LAST)
    said = capsys.readouterr().out
    assert (
        f"'{os.path.relpath(newer)}' has no checkpoint: the newest run that has one is '{os.path.relpath(older)}'"
        in said
    )
    assert Path(cli.trainer.log_dir).name == "version_0"
    assert Path(cli.trainer.ckpt_path).is_relative_to(older)


def test_a_run_that_was_begun_anew_is_not_mixed_with_an_older_one(job, tmp_path, capsys):  # noqa: F811
    job(kill=6)
    job(kill=2)
    capsys.readouterr()
    cli = job(LAST, kill=5)
    said = capsys.readouterr().out
    assert cli is None
    assert (
        "'lightning_logs/version_1', was begun anew and has no checkpoint; to go on with 'lightning_logs/version_0'"
        in said
    )
    assert "the run begins at the beginning" in said
