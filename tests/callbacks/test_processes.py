"""Conditioning with two processes on a CPU: launchers, resume, shards (traps 10 to 12; A4, A10, B3, D6, H7)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 120

# What may share its processes does: most of the time of a case is the start of two interpreters.
CASES = [
    "ddp_spawn",
    "ddp_fork",
    "ddp+siamese+monitored+unequal",
    "unequal_streams",
    "model_parallel+again+tensor_parallel",
    "flat_sharded+flat_refusals+evaluated",
]


def run_processes(cases: str, folder: Path) -> None:
    """Run cases of `tests.process_cases`; what hangs is ended with all that it has started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.process_cases", cases, str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = program.communicate(timeout=TIMEOUT)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 0, output[-2000:] + errors[-4000:]
    assert "case passed" in output


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
def test_two_processes(tmp_path, cases):
    run_processes(cases, tmp_path)
