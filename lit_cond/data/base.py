"""What all image data modules share: loaders whose order depends on the seed and the epoch alone."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_cond.errors import ConfigurationError

__all__ = ["EpochShuffle", "ImageDataModule"]


class EpochShuffle(Sampler[int]):
    """A permutation of the data set that is a function of a seed and the epoch.

    The order does not depend on random numbers that the model draws in between, so two models are compared
    on the same batches, and a run resumed at an epoch sees what the uninterrupted run saw. Lightning calls
    `set_epoch`; with several processes it puts a sampler of its own in this place, with the same property.

    Args:
        length: Number of samples.
        seed: Any integer.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of an epoch, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        return iter(torch.randperm(self.length, generator=generator).tolist())


class ImageDataModule(LightningDataModule):
    """Loaders for a training, a validation and a test set of (image, label) pairs.

    A subclass fills `train_set`, `val_set` and `test_set` in `setup`, and sets or overrides `num_classes`,
    which is known before `setup` so that the command line can link it to the model.

    Args:
        batch_size: Samples per batch; the last batch of a training epoch is dropped when it is incomplete.
        num_workers: Processes that load data; 0 loads in the main process.

    Raises:
        ConfigurationError: A value is out of range.
    """

    num_classes: int

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}: give at least 1")
        if num_workers < 0:
            raise ConfigurationError(f"num_workers is {num_workers}: give 0 or more")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_set: Dataset[Any] | None = None
        self.val_set: Dataset[Any] | None = None
        self.test_set: Dataset[Any] | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of the training set."""
        size = len(_after_setup(self.train_set))
        # torch.initial_seed is what seed_everything has set, and a fresh random number without it.
        order = EpochShuffle(size, torch.initial_seed())
        return self._loader(self.train_set, sampler=order, drop_last=size >= self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of the validation set, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """Batches of the test set, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of the test set, in order."""
        return self._loader(self.test_set)

    def _loader(self, dataset: Dataset[Any] | None, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(
            _after_setup(dataset),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            **kwargs,
        )


def _after_setup(dataset: Dataset[Any] | None) -> Any:
    if dataset is None:
        raise ConfigurationError("the data module holds no data set yet: call prepare_data() and setup() first")
    return dataset
