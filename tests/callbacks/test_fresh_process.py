"""B2: a checkpoint of a conditioned model loads in a process that has never heard of lit_cond."""

import subprocess
import sys

import pytest
import torch

from lit_cond.callbacks import SpectralConditioning
from tests.tiny import make_trainer

MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn


class Classifier(pl.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
"""

PROGRAM = """
import sys

sys.modules["lit_cond"] = None  # importing it is an error
import torch
from their_module import Classifier

model = Classifier.load_from_checkpoint("a.ckpt", strict=True).eval()
with torch.no_grad():
    torch.save(model(torch.load("x.pt")), "y.pt")
"""


@pytest.mark.slow
def test_b2_a_fresh_process_without_lit_cond_predicts_the_same(tmp_path, monkeypatch):
    (tmp_path / "their_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    from their_module import Classifier

    torch.manual_seed(0)
    module = Classifier()
    x, y = torch.randn(32, 6, 32), torch.randint(0, 5, (32,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    trainer = make_trainer(tmp_path, [SpectralConditioning()])
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.save(x, tmp_path / "x.pt")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        expected = module.eval()(x)
    assert float((torch.load(tmp_path / "y.pt") - expected).abs().max()) < 1e-6
