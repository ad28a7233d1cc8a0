"""A checkpoint is whole or not there, whatever ends the write."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_cond.atomic_io import AtomicCheckpointIO
from lit_cond.errors import CheckpointFileError
from tests.tiny import make_loader, make_module, make_trainer

KILLED = """
import os, signal, sys, torch
from lit_cond.atomic_io import AtomicCheckpointIO

class Poison:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)

AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(1 << 20), "last": Poison()}, sys.argv[1])
"""
KILLED_LATE = """
import os, signal, sys, torch
from lit_cond.atomic_io import AtomicCheckpointIO
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(1 << 20)}, sys.argv[1])
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed(program, path):
    root = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("program", [KILLED, KILLED_LATE], ids=["while it writes", "before the new name"])
def test_a_kill_leaves_the_previous_checkpoint_whole_and_the_next_save_cleans_up(program, tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    before = path.read_bytes()
    killed(program, path)
    assert path.read_bytes() == before
    assert len(names(tmp_path)) == 2  # what the killed process has left, under no name that is taken for a checkpoint
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    AtomicCheckpointIO().save_checkpoint({"step": 2}, tmp_path / "other.ckpt")
    assert names(tmp_path) == ["last.ckpt", "other.ckpt"]
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_an_error_leaves_the_previous_checkpoint_and_nothing_else(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(9), "bad": lambda: 0}, path)
    assert names(tmp_path) == ["last.ckpt"]
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_a_write_that_is_still_going_on_is_left_alone(tmp_path):
    program = """
import sys, time, torch
from lit_cond.atomic_io import AtomicCheckpointIO
class Slow:
    def __reduce__(self):
        print("writing", flush=True)
        sys.stdin.readline()
        return __import__('collections').OrderedDict, ()
AtomicCheckpointIO().save_checkpoint({"slow": Slow()}, sys.argv[1])
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", program, str(tmp_path / "a.ckpt")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=env, text=True, **pipes) as process:
        assert process.stdout.readline() == "writing\n"
        AtomicCheckpointIO().save_checkpoint({"step": 2}, tmp_path / "b.ckpt")
        process.communicate("\n")
    assert process.returncode == 0
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]
    assert torch.load(tmp_path / "a.ckpt", weights_only=True) == {"slow": {}}


def test_other_places_go_lightnings_way():
    AtomicCheckpointIO().save_checkpoint({"step": 3}, "memory://folder/a.ckpt")
    assert AtomicCheckpointIO().load_checkpoint("memory://folder/a.ckpt") == {"step": 3}
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, "a.ckpt", storage_options={})


def test_in_a_trainer_with_a_link_to_the_last_checkpoint(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_last="link", save_top_k=-1)
    plugins = [AtomicCheckpointIO()]
    trainer = make_trainer(tmp_path, [checkpoint], plugins=plugins, enable_checkpointing=True, max_epochs=2)
    module = make_module()
    trainer.fit(module, make_loader())
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "epoch=1.ckpt"
    trainer = Trainer(plugins=plugins, logger=False, accelerator="cpu", enable_progress_bar=False)
    trainer.validate(module, make_loader(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:5000])
    with pytest.raises(CheckpointFileError, match=r"cut\.ckpt' is not a whole checkpoint"):
        trainer.validate(module, make_loader(), ckpt_path=tmp_path / "cut.ckpt", verbose=False)
