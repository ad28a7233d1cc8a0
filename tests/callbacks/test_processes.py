"""Conditioning with two processes on a CPU: launchers, resume, sharded parameters (traps 10 to 12)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp_spawn", "ddp_fork", "ddp", "monitored", "model_parallel"])
def test_two_processes(tmp_path, case):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.process_cases", case, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "case passed" in done.stdout
