"""In-process runs of the command line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lit_cond import cli
from tests.cli.helpers import write_config


@dataclass
class Outcome:
    code: int | None
    out: str
    err: str


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIT_COND_TRACEBACK", raising=False)
    monkeypatch.setattr("sys.argv", ["lit_cond"])  # LightningCLI warns of arguments of its own beside `args`


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "tiny.yaml")


@pytest.fixture
def run(capsys):
    """Run the command line like a process would, and return its exit code and output."""

    def run_words(*words: str) -> Outcome:
        code = 0
        try:
            cli.main(list(words))
        except SystemExit as error:
            code = error.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run_words
