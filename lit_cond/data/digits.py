"""The handwritten digits that come with scikit-learn: real images without a download."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lit_cond.data.base import ImageDataModule
from lit_cond.data.transforms import jitter_affine
from lit_cond.errors import ConfigurationError
from lit_cond.extras import optional_imports

__all__ = ["DigitsDataModule"]

_MEAN, _STD = 0.3053, 0.3760  # of the whole set, pixels scaled from 0..16 to 0..1
_NUM_CLASSES = 10
_VAL_SIZE = 200


class DigitsDataModule(ImageDataModule):
    """1,797 digits of 8 x 8 pixels (Optical Recognition of Handwritten Digits, UCI), split by class.

    Half of them (898) are for training; of the other half 200 are for validation and 699 for the test. The
    split is the same for every run, whatever the seed of the run, unless `split_seed` is changed.

    Args:
        batch_size: Samples per batch.
        image_size: Height and width after bilinear resizing; None leaves 8.
        channels: 1, or 3 equal ones for models that expect colour.
        augment: Whether to turn and shift each training image a little, anew in each epoch.
        max_rotation: Largest angle of the augmentation in degrees.
        max_shift: Largest shift of the augmentation in pixels of the original 8.
        split_seed: Seed of the split.
        num_workers: Processes that load data; 0, loading in the main process, is fastest here.

    Raises:
        ConfigurationError: A value is out of range.
    """

    num_classes = _NUM_CLASSES

    def __init__(
        self,
        batch_size: int = 64,
        image_size: int | None = None,
        channels: Literal[1, 3] = 1,
        augment: bool = False,
        max_rotation: float = 10.0,
        max_shift: float = 1.0,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if image_size is not None and image_size < 1:
            raise ConfigurationError(f"image_size is {image_size}: give at least 1, or null for 8")
        if channels not in (1, 3):
            raise ConfigurationError(f"channels is {channels}: give 1 or 3")
        if max_rotation < 0 or max_shift < 0:
            raise ConfigurationError(f"max_rotation is {max_rotation} and max_shift {max_shift}: give 0 or more")
        self.image_size = image_size
        self.channels = channels
        self.augment = augment
        self.max_rotation = max_rotation
        self.max_shift = max_shift
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Read and split the digits, once."""
        if self.train_set is not None:
            return
        with optional_imports("the digits data set"):
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        images = (torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - _MEAN) / _STD
        size = self.image_size or images.shape[-1]
        if size != images.shape[-1]:
            images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
        images = images.expand(-1, self.channels, -1, -1)
        targets = torch.as_tensor(labels, dtype=torch.int64)

        everything = list(range(len(targets)))
        train, rest = train_test_split(everything, test_size=0.5, stratify=labels, random_state=self.split_seed)
        val, test = train_test_split(rest, train_size=_VAL_SIZE, stratify=labels[rest], random_state=self.split_seed)
        jitter = partial(jitter_affine, degrees=self.max_rotation, shift=self.max_shift * size / 8)
        self.train_set = _Batches(images[train], targets[train], jitter if self.augment else None)
        self.val_set = _Batches(images[val], targets[val])
        self.test_set = _Batches(images[test], targets[test])

    def _loader(
        self, dataset: Dataset[Any] | None, loader: type[DataLoader[Any]] = DataLoader, **kwargs: Any
    ) -> DataLoader[Any]:
        return super()._loader(dataset, loader, collate_fn=_as_it_is, **kwargs)


class _Batches(Dataset[Any]):
    """Tensors indexed a batch at a time, which spares most of the time that loading tiny images takes."""

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.images = images
        self.targets = targets
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.images[indices]
        return (images if self.transform is None else self.transform(images)), self.targets[indices]


def _as_it_is(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch
