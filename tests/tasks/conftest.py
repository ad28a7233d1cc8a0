import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_cond.tasks import ImageClassification

TINY_VIT = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture
def make_task():
    def make(**arguments):
        defaults = {"num_classes": 3, "backbone": "timm/vit_tiny_patch16_224", "backbone_args": TINY_VIT}
        return ImageClassification(**(defaults | arguments))

    return make


@pytest.fixture
def make_loader():
    def make(samples=12, batch_size=4, classes=3):
        images = torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images, torch.arange(samples) % classes), batch_size=batch_size)

    return make


@pytest.fixture
def make_trainer(tmp_path):
    def make(**arguments):
        defaults = {
            "default_root_dir": tmp_path,
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**(defaults | arguments))

    return make
