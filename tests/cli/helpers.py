"""A tiny job for the command line, and callbacks that look into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lit_cond.errors import DataError
from tests.tiny import make_loader

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))

TINY = {
    "model": {
        "class_path": "ImageClassification",
        "init_args": {
            "backbone": "timm/vit_tiny_patch16_224",
            "backbone_args": {
                "img_size": 8, "patch_size": 2, "in_chans": 1, "depth": 2, "embed_dim": 32, "num_heads": 2,
            },
            "confusion_matrix": False,
        },
    },
    "data": {"class_path": "DigitsDataModule"},
    "trainer": {
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "limit_test_batches": 2,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}  # fmt: skip


def write_config(path: Path, **sections) -> str:
    """Write the tiny job with some sections added or replaced; return the path."""
    path.write_text(yaml.safe_dump({**TINY, **sections}, sort_keys=False))
    return str(path)


def run_process(*words: str, cwd: Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with some words after it, in another folder than the repository."""
    paths = os.pathsep.join([str(REPOSITORY), str(cwd)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


class LearningRates(Callback):
    """Notes the learning rate that each step uses, and the base of its schedule."""

    seen: list[float] = []  # noqa: RUF012  (jsonargparse makes the instance, the test reads the class)

    def on_train_start(self, trainer, pl_module):
        self.seen.clear()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(optimizer.param_groups[0]["lr"])


class SequenceData(LightningDataModule):
    """Data of a user's own, which says nothing of classes."""

    def train_dataloader(self):
        return make_loader(32)

    def test_dataloader(self):
        return make_loader(16, seed=1)


class BrokenImages(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise DataError("the image a.png can not be read: replace or remove it")


class BrokenData(LightningDataModule):
    """Data that fails in a worker process."""

    def train_dataloader(self):
        return DataLoader(BrokenImages(), batch_size=2, num_workers=1)
