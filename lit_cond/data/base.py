"""What all image data modules share: loaders whose batches depend on the seed and the epoch alone."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lit_cond.data.loading import EpochShuffle, ResumableLoader, SeededSamples
from lit_cond.errors import ConfigurationError

__all__ = ["ImageDataModule"]


class ImageDataModule(LightningDataModule):
    """Loaders for a training, a validation and a test set of (image, label) pairs.

    A subclass fills `train_set`, `val_set` and `test_set` in `setup`, and sets or overrides `num_classes`,
    which is known before `setup` so that the command line can link it to the model.

    The training batches, random augmentation included, are a function of the seed of the run, the epoch and their
    number in it. A run resumed from a checkpoint goes on with the batches of the run that wrote it, within an epoch
    too, with any number of workers.

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
        self._seed: int | None = None
        self._loaded_seed: int | None = None
        self.train_set: Dataset[Any] | None = None
        self.val_set: Dataset[Any] | None = None
        self.test_set: Dataset[Any] | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of the training set; each process of several gets its share."""
        # What seed_everything has set, and a fresh random number without it; a resumed run has that of the checkpoint.
        self._seed = torch.initial_seed() % 2**63 if self._loaded_seed is None else self._loaded_seed
        share = (getattr(self.trainer, "distributed_sampler_kwargs", None) if self.trainer else None) or {}
        order = EpochShuffle(len(_after_setup(self.train_set)), self._seed, **share)
        samples = SeededSamples(self.train_set, self._seed)
        return self._loader(samples, loader=ResumableLoader, sampler=order, drop_last=len(order) >= self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of the validation set, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """Batches of the test set, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of the test set, in order."""
        return self._loader(self.test_set)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the batches, which a resumed run takes over."""
        return {} if self._seed is None else {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the seed of the batches."""
        self._loaded_seed = state_dict.get("seed")

    def _loader(
        self, dataset: Dataset[Any] | None, loader: type[DataLoader[Any]] = DataLoader, **kwargs: Any
    ) -> DataLoader[Any]:
        return loader(
            _after_setup(dataset),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            # Of its own: iterators draw the seed of their workers, which must not move the generator of the model.
            generator=torch.Generator().manual_seed(torch.initial_seed() % 2**63),
            **kwargs,
        )


def _after_setup(dataset: Dataset[Any] | None) -> Any:
    if dataset is None:
        raise ConfigurationError("the data module holds no data set yet: call prepare_data() and setup() first")
    return dataset
