"""kill -9 at any moment, the same command with `--ckpt_path last`, and the run is the one that would have been."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch

from lit_cond.report.reading import read_run
from tests.cli.helpers import REPOSITORY, TINY, write_config

KILLS = 20
REAL = 2  # of them with `python -m lit_cond` itself, which takes many seconds to import its libraries

TRAINER = {
    **TINY["trainer"],
    "max_epochs": 3,
    "limit_train_batches": 21,
    "limit_val_batches": 2,
    "accumulate_grad_batches": 2,
    "val_check_interval": 10,
    "callbacks": [
        {"class_path": "EMAWeightAveraging", "init_args": {"decay": 0.9}},
        {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 3, "save_last": True}},
        {
            "class_path": "ModelCheckpoint",
            "init_args": {"monitor": "val/acc", "mode": "max", "save_top_k": 2, "filename": "best-{epoch}-{step}"},
        },
    ],
}
JOB = {
    "seed_everything": 0,
    "model": {
        "class_path": "ImageClassification",
        "init_args": {
            **TINY["model"]["init_args"],
            "backbone_args": {**TINY["model"]["init_args"]["backbone_args"], "proj_drop_rate": 0.1},
            "warmup_epochs": 1,
            "mixup_alpha": 0.2,
        },
    },
    "data": {"class_path": "DigitsDataModule", "init_args": {"batch_size": 32, "augment": True}},
    "conditioning": {"refresh_every_n_steps": 3},
    "tokens": {},
    "monitor": {"every_n_steps": 2, "quantities": ["key", "value"]},
    "schedule": {"schedule": "measured", "monitor": "cond/key/mean", "target": 2.0, "every_n_steps": 2, "start": 0.5},
    "test_after_fit": False,
    "trainer": TRAINER,
}


class Starter:
    """Starts the command line in processes that are forked from one that has imported it."""

    def __enter__(self):
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-W", "ignore", str(REPOSITORY / "tests/cli/starter.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, env=env, text=True, **pipes)
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def start(self, folder, words):
        print(json.dumps([str(folder), words, str(folder / "output.txt")]), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def wait(self, pid):
        return int(self.process.stdout.readline())


class Real:
    """Starts `python -m lit_cond`."""

    def start(self, folder, words):
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with (folder / "output.txt").open("a") as output:
            words = [sys.executable, "-W", "ignore", "-m", "lit_cond", *words]
            self.process = subprocess.Popen(words, cwd=folder, env=env, stdout=output, stderr=output)
        return self.process.pid

    def wait(self, pid):
        return self.process.wait()


def begun(folder, pid):
    """Wait until a run has a folder; say when."""
    run = folder / "lightning_logs/version_0/config.yaml"
    while not run.is_file():
        os.kill(pid, 0)
        time.sleep(0.002)
    return time.monotonic()


def new_folder(path):
    path.mkdir()
    return path, ["fit", "--config", write_config(path / "job.yaml", **JOB)]


def finished(folder):
    """Return the folder of the run that has come to its end, and all that it has left."""
    run = sorted((folder / "lightning_logs").iterdir())[-1]
    # A kill between the last two writes leaves an older last.ckpt beside the checkpoint of the end.
    content = torch.load(run / "checkpoints/epoch=2-step=33.ckpt", weights_only=True)
    content["callbacks"]["ExactResume"]["versions"] = None
    return plain(content), read_run(run).scalars, run


def plain(value):
    """Return a value with the names of files in the place of their paths."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and "lightning_logs" in value else value


def differences(a, b, path=""):
    if isinstance(a, dict) and isinstance(b, dict):
        lost = [f"{path}: {a.keys() ^ b.keys()}"] if a.keys() != b.keys() else []
        return lost + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for k, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, f"{path}[{k}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    return [] if a == b else [f"{path}: {a} is {b}"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments(tmp_path, record_property):
    moments = random.Random(0)
    counts = {"before a checkpoint": 0, "in a write": 0, "after the end": 0}
    wrong = {}
    with Starter() as starter:
        whole, words = new_folder(tmp_path / "whole")
        pid = starter.start(whole, words)
        start = begun(whole, pid)
        assert starter.wait(pid) == 0, (whole / "output.txt").read_text()
        duration = time.monotonic() - start
        expected, logged, _ = finished(whole)
        assert expected["global_step"] == 33
        assert len(logged["train/loss"]) == 33
        for kill in range(KILLS):
            folder, words = new_folder(tmp_path / f"killed_{kill}")
            how = Real() if kill < REAL else starter
            share = 0.8 * moments.random()  # a machine that is busy differs from one moment to the next
            pid = how.start(folder, words)
            begun(folder, pid)
            time.sleep(share * duration)
            with suppress(ProcessLookupError):  # it was faster than the first one
                os.kill(pid, signal.SIGKILL)
            ended = how.wait(pid)
            counts["after the end"] += ended == 0
            assert ended in (0, -signal.SIGKILL), (folder / "output.txt").read_text()
            counts["in a write"] += bool(list(folder.rglob(".*.part")))
            counts["before a checkpoint"] += not list(folder.rglob("*.ckpt"))
            assert how.wait(how.start(folder, [*words, "--ckpt_path", "last"])) == 0, (
                folder / "output.txt"
            ).read_text()
            found, rows, run = finished(folder)
            difference = differences(expected, found) + differences(logged, rows, "logged")
            if list(run.rglob(".*.part")):
                difference.append("a part of a file is left")
            if difference:
                wrong[f"killed_{kill} at {share:.2f}"] = difference[:5]
    record_property("kills", json.dumps({"of": KILLS, "uninterrupted, s": round(duration, 2), **counts}))
    print(counts, f"the uninterrupted run took {duration:.2f} s")
    assert not wrong
    # A test that kills at the wrong moments shows nothing.
    assert counts["before a checkpoint"] + counts["after the end"] < KILLS / 2
