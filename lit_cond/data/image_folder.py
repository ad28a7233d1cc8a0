"""Images in one folder per class, as ImageNet is laid out."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from lit_cond.data.base import ImageDataModule
from lit_cond.data.transforms import (
    Augmentation,
    Interpolation,
    Transform,
    evaluation_transform,
    training_transform,
)
from lit_cond.errors import ConfigurationError, DataError
from lit_cond.extras import optional_imports

__all__ = ["ImageFolderDataModule"]

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_MOST_LISTED = 10
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageFolderDataModule(ImageDataModule):
    """A tree ``root/train/<class>/…`` and ``root/val/<class>/…``, with an optional ``root/test/<class>/…``.

    The classes are the folders of ``train`` in alphabetical order, for every split. Without a ``test`` folder
    the validation images are the test set, as is usual for ImageNet.

    Args:
        root: The folder that holds ``train`` and ``val``.
        batch_size: Samples per batch, on each device.
        image_size: Height and width given to the model.
        augmentation: Augmentation of the training images; None treats them like the others.
        crop_ratio: In evaluation, ``image_size`` divided by the shorter side before the centre crop.
        interpolation: How to resize.
        mean: Subtracted from each channel of an image scaled to [0, 1].
        std: Divides each channel afterwards.
        verify_images: Whether to decode every image before the run starts, which takes as long as an epoch of
            loading. An unreadable image stops the run by name in any case, when it is met.
        num_workers: Processes that load data.

    Raises:
        ConfigurationError: A value is out of range.
        DataError: A folder is missing, a class has no images, a split has a class that ``train`` has not, or
            an image can not be read.
    """

    def __init__(
        self,
        root: str,
        batch_size: int = 128,
        image_size: int = 224,
        augmentation: Augmentation | None = Augmentation(),  # noqa: B008  # jsonargparse reads the default
        crop_ratio: float = 0.875,
        interpolation: Interpolation = "bicubic",
        mean: tuple[float, float, float] = _IMAGENET_MEAN,
        std: tuple[float, float, float] = _IMAGENET_STD,
        verify_images: bool = False,
        num_workers: int = 8,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if image_size < 1:
            raise ConfigurationError(f"image_size is {image_size}: give at least 1")
        if not 0 < crop_ratio <= 1:
            raise ConfigurationError(f"crop_ratio is {crop_ratio}: give a value above 0 and at most 1")
        if not all(value > 0 for value in std):
            raise ConfigurationError(f"std is {std}: give three values above 0")
        self.root = Path(root)
        self.image_size = image_size
        self.augmentation = augmentation
        self.crop_ratio = crop_ratio
        self.interpolation = interpolation
        self.mean = mean
        self.std = std
        self.verify_images = verify_images
        self._classes: list[str] = []

    @property
    def classes(self) -> list[str]:
        """Names of the class folders in ``train``, in the order of their labels."""
        if not self._classes:
            self._classes = _class_folders(self._split("train"))
        return self._classes

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of class folders in ``train``."""
        return len(self.classes)

    def setup(self, stage: str) -> None:
        """Check the folders and list their images, once."""
        if self.train_set is not None:
            return
        plain = evaluation_transform(self.image_size, self.mean, self.std, self.crop_ratio, self.interpolation)
        augmented = plain
        if self.augmentation is not None:
            augmented = training_transform(self.image_size, self.augmentation, self.mean, self.std, self.interpolation)
        train = self._open("train", augmented)
        val = self._open("val", plain)
        test = self._open("test", plain) if (self.root / "test").is_dir() else val
        if self.verify_images:
            _check_readable([*train.paths, *val.paths, *([] if test is val else test.paths)], self.root)
        self.train_set, self.val_set, self.test_set = train, val, test

    def _split(self, name: str) -> Path:
        folder = self.root / name
        if not folder.is_dir():
            raise DataError(
                f"the folder {folder} does not exist: root must hold train/<class>/ and val/<class>/ with images"
            )
        return folder

    def _open(self, name: str, transform: Transform) -> "_ClassFolders":
        folder = self._split(name)
        found = _class_folders(folder)
        foreign = sorted(set(found) - set(self.classes))
        if foreign:
            raise DataError(
                f"{folder} has classes that {self.root / 'train'} has not: {_first(foreign)}: remove them "
                "or add them to train"
            )
        images = {label: _images_below(folder / label) for label in found}
        empty = [label for label, paths in images.items() if not paths]
        if empty:
            raise DataError(
                f"{folder} has classes without an image: {_first(empty)}: add images "
                f"({' '.join(_EXTENSIONS)}) or remove the folders"
            )
        number = {label: index for index, label in enumerate(self.classes)}
        return _ClassFolders([(path, number[label]) for label, paths in images.items() for path in paths], transform)


class _ClassFolders(Dataset[Any]):
    """Images with labels that the data module has given; torchvision's would number each split by itself."""

    def __init__(self, samples: Sequence[tuple[str, int]], transform: Transform) -> None:
        self.paths = [path for path, _ in samples]
        self.labels = [label for _, label in samples]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(_read(self.paths[index])), self.labels[index]


def _class_folders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not names:
        raise DataError(f"{folder} has no class folders: put the images of each class into a folder of its own")
    return names


def _images_below(folder: Path) -> list[str]:
    return sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(_EXTENSIONS)
    )


def _read(path: str) -> Any:
    """Decode an image; whatever goes wrong with the file names the file."""
    with optional_imports("the reading of images"):
        from PIL import Image

    try:
        # Opened here: PIL may keep the file of a path open for long.
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # all raised by PIL
        raise DataError(f"the image {path} can not be read: {error}: replace or remove it") from error


def _problem(path: str) -> str | None:
    try:
        _read(path)
    except DataError:
        return path
    return None


def _check_readable(paths: Sequence[str], root: Path) -> None:
    with ThreadPoolExecutor() as pool:  # PIL decodes outside the interpreter lock
        bad = [path for path in pool.map(_problem, paths) if path]
    if bad:
        raise DataError(f"{len(bad)} of {len(paths)} images below {root} can not be read: {_first(bad)}")


def _first(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
