import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from lit_cond.data import DigitsDataModule
from lit_cond.data.loading import EpochShuffle
from lit_cond.errors import ConfigurationError


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = EpochShuffle(50, seed)
        sampler.set_epoch(epoch)
        torch.rand(7)  # what else is drawn does not matter
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert sorted(order(1, 0)) == list(range(50))
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(5, 0)


def test_the_seed_may_be_any_integer():
    assert len(list(EpochShuffle(3, 2**64 - 1))) == 3
    assert len(list(EpochShuffle(3, -5))) == 3


class Recorder(LightningModule):
    """Remembers the first pixels of each batch, and draws as many random numbers as it is told."""

    def __init__(self, draws=0):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.draws = draws
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        torch.rand(self.draws)
        self.seen.append(images.sum(dim=(1, 2, 3)))
        return nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(tmp_path, seed=0, draws=0, epochs=2, ckpt_path=None, save_at=None):
    seed_everything(seed, verbose=False)
    model = Recorder(draws)
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DigitsDataModule(batch_size=128), ckpt_path=ckpt_path)
    if save_at:
        trainer.save_checkpoint(save_at)
    return model


def test_batches_under_one_seed_are_equal_whatever_the_model_draws(tmp_path):
    first, second, other = run(tmp_path), run(tmp_path, draws=5), run(tmp_path, seed=1)
    assert len(first.seen) == 2 * 7  # 898 // 128 = 7, the incomplete batch is dropped
    assert torch.equal(torch.stack(first.seen), torch.stack(second.seen))
    assert not torch.equal(torch.stack(first.seen), torch.stack(other.seen))
    assert not torch.equal(first.seen[0], first.seen[7])


def test_a_run_resumed_after_an_epoch_is_the_uninterrupted_one(tmp_path):
    whole = run(tmp_path, epochs=3)
    run(tmp_path, epochs=1, save_at=tmp_path / "one.ckpt")
    resumed = run(tmp_path, draws=3, epochs=3, ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(torch.stack(whole.seen[7:]), torch.stack(resumed.seen))
    assert torch.equal(whole.layer.weight, resumed.layer.weight)


def test_a_set_smaller_than_a_batch_is_not_dropped():
    data = DigitsDataModule(batch_size=1000)
    data.setup("fit")
    assert [len(labels) for _, labels in data.train_dataloader()] == [898]


def test_a_loader_before_setup_says_what_to_call():
    with pytest.raises(ConfigurationError, match=r"holds no data set yet: call prepare_data\(\) and setup\(\) first"):
        DigitsDataModule().train_dataloader()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: give at least 1"),
        ({"num_workers": -1}, "num_workers is -1: give 0 or more"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        DigitsDataModule(**arguments)
