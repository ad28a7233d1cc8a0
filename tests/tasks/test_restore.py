"""A task's own `load_from_checkpoint` brings the corrections back."""

import torch

from lit_cond.callbacks import ConditionedTokens, SpectralConditioning
from lit_cond.data import DigitsDataModule
from lit_cond.surgery.tokens import token_forwards
from lit_cond.surgery.weights import conditioned_weights
from lit_cond.tasks import ImageClassification
from tests.tiny import make_trainer

SMALL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2}


def test_load_from_checkpoint_computes_what_was_trained(tmp_path):
    torch.manual_seed(0)
    task = ImageClassification(backbone="timm/vit_tiny_patch16_224", num_classes=10, backbone_args=SMALL)
    trainer = make_trainer(tmp_path, [SpectralConditioning(), ConditionedTokens()], limit_train_batches=4)
    trainer.fit(task, datamodule=DigitsDataModule())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = ImageClassification.load_from_checkpoint(tmp_path / "a.ckpt", strict=True)
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), task.eval()(x))
    assert [name for name, _ in token_forwards(loaded)] == ["backbone.blocks.0"]
    raw = {name: weight.current_raw for name, weight in conditioned_weights(task)}
    assert raw
    for name, weight in conditioned_weights(loaded):
        assert torch.equal(weight.current_raw, raw[name])
    # And training goes on where it stopped, also from a loaded model.
    trainer = make_trainer(tmp_path, [SpectralConditioning(), ConditionedTokens()], limit_train_batches=2)
    trainer.fit(loaded, datamodule=DigitsDataModule())
