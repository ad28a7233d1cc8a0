"""CIFAR-10 and CIFAR-100 by torchvision."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Subset

from lit_cond.data.base import ImageDataModule
from lit_cond.data.transforms import Augmentation, evaluation_transform, training_transform
from lit_cond.errors import ConfigurationError, DataError
from lit_cond.extras import optional_imports

__all__ = ["CIFARDataModule"]

_MEAN = {10: (0.4914, 0.4822, 0.4465), 100: (0.5071, 0.4865, 0.4409)}
_STD = {10: (0.2470, 0.2435, 0.2616), 100: (0.2673, 0.2564, 0.2762)}
_FOLDERS = {10: "cifar-10-batches-py", 100: "cifar-100-python"}


class CIFARDataModule(ImageDataModule):
    """CIFAR-10 or CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels.

    The validation set is a fixed random part of the training images, the same whatever the seed of the run.

    Args:
        root: Folder that holds, or shall hold, the data as torchvision stores it.
        num_classes: 10 or 100.
        download: Whether to download what is missing. Nothing is fetched without it.
        batch_size: Samples per batch.
        image_size: Height and width after resizing.
        augmentation: Augmentation of the training images; None leaves them as they are.
        val_size: Number of training images that are kept for validation.
        split_seed: Seed of that choice.
        num_workers: Processes that load data.

    Raises:
        ConfigurationError: A value is out of range.
        DataError: The data set is not in `root`.
        MissingExtraError: torchvision is not installed.
    """

    def __init__(
        self,
        root: str = "data/cifar",
        num_classes: Literal[10, 100] = 10,
        download: bool = False,
        batch_size: int = 128,
        image_size: int = 32,
        augmentation: Augmentation | None = Augmentation(  # noqa: B008  # jsonargparse reads the default
            crop_scale=None, crop_padding=4
        ),
        val_size: int = 5000,
        split_seed: int = 0,
        num_workers: int = 2,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if num_classes not in _FOLDERS:
            raise ConfigurationError(f"num_classes is {num_classes}: CIFAR has 10 or 100")
        if image_size < 1:
            raise ConfigurationError(f"image_size is {image_size}: give at least 1")
        if not 0 < val_size < 50_000:
            raise ConfigurationError(f"val_size is {val_size}: give 1 to 49999 of the 50000 training images")
        self.root = Path(root)
        self.num_classes = num_classes
        self.download = download
        self.image_size = image_size
        self.augmentation = augmentation
        self.val_size = val_size
        self.split_seed = split_seed

    def prepare_data(self) -> None:
        """Download the data set if that was asked for and it is missing."""
        if self.download:
            for train in (True, False):
                self._data_set()(str(self.root), train=train, download=True)

    def setup(self, stage: str) -> None:
        """Open the data set and split it, once.

        Raises:
            DataError: The files are missing or damaged.
        """
        if self.train_set is not None:
            return
        mean, std = _MEAN[self.num_classes], _STD[self.num_classes]
        plain = evaluation_transform(self.image_size, mean, std, crop_ratio=1.0)
        augmented = plain
        if self.augmentation is not None:
            augmented = training_transform(self.image_size, self.augmentation, mean, std)
        train = self._open(train=True, transform=augmented)
        val = self._open(train=True, transform=plain)
        test = self._open(train=False, transform=plain)
        if self.val_size >= len(train):
            raise DataError(f"val_size is {self.val_size} and {self.root} holds {len(train)} training images")
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(len(train), generator=generator).tolist()
        self.train_set = Subset(train, order[self.val_size :])
        self.val_set = Subset(val, order[: self.val_size])
        self.test_set = test

    def _open(self, train: bool, transform: Any) -> Any:
        try:
            return self._data_set()(str(self.root), train=train, transform=transform, download=False)
        except RuntimeError as error:
            folder = self.root / _FOLDERS[self.num_classes]
            problem = "is damaged or incomplete" if folder.is_dir() else "does not exist"
            raise DataError(
                f"CIFAR-{self.num_classes}: {folder} {problem}: set download to true, or root to the folder "
                "above the extracted archive"
            ) from error

    def _data_set(self) -> Any:
        with optional_imports("the CIFAR data set"):
            from torchvision import datasets

        return datasets.CIFAR10 if self.num_classes == 10 else datasets.CIFAR100
