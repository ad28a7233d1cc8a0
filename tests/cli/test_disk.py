"""What the disk refuses is said in one line."""

import os
import resource
import signal
import sys

import pytest

from tests.cli.helpers import write_config


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of the size of files")
def test_a_full_disk(run, config, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        outcome = run("fit", "--config", config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert outcome.code == 2
    last = outcome.err.splitlines()[-1]
    assert last.startswith("lit_cond: error: 'lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt': ")
    assert "make room" in last
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".ckpt", ".part")]


@pytest.mark.parametrize("place", ["a file", "below a file"])
@pytest.mark.parametrize("logger", [True, False])
def test_a_file_in_the_place_of_the_folder(place, logger, run, tmp_path):
    config = write_config(tmp_path / "job.yaml")
    (tmp_path / "r").write_text("")
    root = "r" if place == "a file" else "r/below"
    outcome = run("fit", "--config", config, "--trainer.default_root_dir", root, f"--trainer.logger={logger}".lower())
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("lit_cond: error: 'r")
    assert "Traceback" not in outcome.err
    assert (tmp_path / "r").read_text() == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_not_be_written_to(run, config, tmp_path):
    (tmp_path / "r").mkdir(mode=0o500)
    outcome = run("fit", "--config", config, "--trainer.default_root_dir=r")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("lit_cond: error: 'r")
