"""What a correction adds to the size of a checkpoint with the state of AdamW."""

import pytest
import torch

from lit_cond.callbacks import SpectralConditioning
from tests.tiny import TinyModule, make_trainer

timm = pytest.importorskip("timm")

# The classifier's rows and the positions are few here: the share of query, key and value weights is that of a ViT-B.
LIMITS = {
    "dense": (lambda: SpectralConditioning(), 1.10),
    "identity": (lambda: SpectralConditioning("identity", scale=0.1), 1.01),
    "of some roles": (lambda: SpectralConditioning(roles=["query", "key"]), 1.07),
}


class Classifier(TinyModule):
    def __init__(self):
        super().__init__(lr=1e-3)
        torch.manual_seed(0)
        self.net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=6, num_classes=10)


def size(tmp_path, callbacks):
    data = torch.utils.data.TensorDataset(torch.randn(4, 3, 32, 32), torch.arange(4))
    trainer = make_trainer(tmp_path, callbacks)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return (tmp_path / "a.ckpt").stat().st_size


@pytest.mark.parametrize("kind", LIMITS)
def test_size_of_a_conditioned_checkpoint(tmp_path, kind):
    callback, limit = LIMITS[kind]
    assert 1 < size(tmp_path, [callback()]) / size(tmp_path, []) <= limit
