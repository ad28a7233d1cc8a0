"""LightningDataModules, and the transforms they share."""

from lit_cond.data.base import ImageDataModule
from lit_cond.data.cifar import CIFARDataModule
from lit_cond.data.digits import DigitsDataModule
from lit_cond.data.image_folder import ImageFolderDataModule
from lit_cond.data.transforms import Augmentation

__all__ = ["DigitsDataModule", "CIFARDataModule", "ImageFolderDataModule", "ImageDataModule", "Augmentation"]
