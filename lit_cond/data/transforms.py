"""Transforms for training and evaluation, built of torchvision's second version."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from lit_cond.errors import ConfigurationError
from lit_cond.extras import optional_imports

_PURPOSE = "the transform of images"

__all__ = [
    "Augmentation",
    "Interpolation",
    "Transform",
    "evaluation_transform",
    "jitter_affine",
    "training_transform",
]

Interpolation = Literal["bilinear", "bicubic"]
Transform = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training image; the defaults are the recipe of DeiT, as timm carries it out.

    Mixup and cutmix work on whole batches and belong to the task.

    Attributes:
        crop_scale: Range of the share of the area that `RandomResizedCrop` keeps. None: no such crop; the
            image is resized to the wanted size on its shorter side, and its centre is cropped.
        crop_padding: Pixels of black border added before a crop of the original size at a random place, the
            usual augmentation of CIFAR; 0 is off. It takes the place of `crop_scale`.
        horizontal_flip: Chance of a mirror image.
        rand_augment_ops: Operations of RandAugment in a row; 0 is off.
        rand_augment_magnitude: Their strength, from 0 to 30 in torchvision's scale (timm's m9 is 27).
        rand_augment_prob: Chance of each operation; torchvision's and the paper's is 1, timm's 0.5.
        color_jitter: Range of the change of brightness, contrast and saturation; 0 is off. DeiT's 0.4 is not
            in force, since timm leaves it out beside RandAugment.
        random_erasing: Chance of filling a rectangle with noise.

    Raises:
        ConfigurationError: A value is out of range.
    """

    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    crop_padding: int = 0
    horizontal_flip: float = 0.5
    rand_augment_ops: int = 2
    rand_augment_magnitude: int = 27
    rand_augment_prob: float = 0.5
    color_jitter: float = 0.0
    random_erasing: float = 0.25

    def __post_init__(self) -> None:
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ConfigurationError(f"crop_scale is {self.crop_scale}: give two shares 0 < smallest <= largest <= 1")
        if self.crop_padding < 0:
            raise ConfigurationError(f"crop_padding is {self.crop_padding}: give 0 or more pixels")
        if self.crop_padding and self.crop_scale is not None:
            raise ConfigurationError(
                f"crop_padding is {self.crop_padding} and crop_scale {self.crop_scale}: set one of them to 0 or null"
            )
        for name in ("horizontal_flip", "rand_augment_prob", "random_erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: give a chance from 0 to 1")
        if self.rand_augment_ops < 0 or self.color_jitter < 0:
            raise ConfigurationError(
                f"rand_augment_ops is {self.rand_augment_ops} and color_jitter {self.color_jitter}: give 0 or more"
            )
        if not 0 <= self.rand_augment_magnitude <= 30:
            raise ConfigurationError(f"rand_augment_magnitude is {self.rand_augment_magnitude}: give 0 to 30")


def training_transform(
    image_size: int,
    augmentation: Augmentation,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    interpolation: Interpolation = "bicubic",
) -> Transform:
    """Build the transform of a training image.

    Args:
        image_size: Height and width of the result in pixels.
        augmentation: What to do to the image.
        mean: Subtracted from each channel of an image scaled to [0, 1].
        std: Divides each channel afterwards.
        interpolation: How to resize.

    Returns:
        A function from a PIL image to a float tensor of shape (channels, image_size, image_size).
    """
    with optional_imports(_PURPOSE):
        from torchvision.transforms import v2

    how = v2.InterpolationMode(interpolation)
    steps: list[Any] = []
    if augmentation.crop_scale is not None:
        steps.append(v2.RandomResizedCrop(image_size, scale=augmentation.crop_scale, interpolation=how))
    elif augmentation.crop_padding:
        steps.append(v2.Resize((image_size, image_size), interpolation=how))
        steps.append(v2.RandomCrop(image_size, padding=augmentation.crop_padding))
    else:
        steps.append(v2.Resize(image_size, interpolation=how))
        steps.append(v2.CenterCrop(image_size))
    if augmentation.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augmentation.horizontal_flip))
    for _ in range(augmentation.rand_augment_ops):
        operation = v2.RandAugment(1, augmentation.rand_augment_magnitude, interpolation=how)
        steps.append(v2.RandomApply([operation], augmentation.rand_augment_prob))
    if augmentation.color_jitter:
        steps.append(v2.ColorJitter(*[augmentation.color_jitter] * 3))
    steps += _to_normalised_tensor(mean, std)
    if augmentation.random_erasing:
        steps.append(v2.RandomErasing(augmentation.random_erasing, value="random"))
    return v2.Compose(steps)  # type: ignore[no-any-return]


def evaluation_transform(
    image_size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    crop_ratio: float = 0.875,
    interpolation: Interpolation = "bicubic",
) -> Transform:
    """Build the transform of an image that is evaluated: resize the shorter side, crop the centre, normalise.

    Args:
        image_size: Height and width of the result in pixels.
        mean: Subtracted from each channel of an image scaled to [0, 1].
        std: Divides each channel afterwards.
        crop_ratio: ``image_size`` divided by the length of the shorter side before the crop.
        interpolation: How to resize.

    Returns:
        A function from a PIL image to a float tensor of shape (channels, image_size, image_size).
    """
    if not 0 < crop_ratio <= 1:
        raise ConfigurationError(f"crop_ratio is {crop_ratio}: give a value above 0 and at most 1")
    with optional_imports(_PURPOSE):
        from torchvision.transforms import v2

    resize = v2.Resize(round(image_size / crop_ratio), interpolation=v2.InterpolationMode(interpolation))
    return v2.Compose([resize, v2.CenterCrop(image_size), *_to_normalised_tensor(mean, std)])  # type: ignore[no-any-return]


def _to_normalised_tensor(mean: tuple[float, ...], std: tuple[float, ...]) -> list[Any]:
    with optional_imports(_PURPOSE):
        from torchvision.transforms import v2

    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std), v2.ToPureTensor()]


def jitter_affine(images: torch.Tensor, degrees: float, shift: float) -> torch.Tensor:
    """Turn and shift each image of a batch by a random amount of its own.

    torchvision draws one set of parameters for a whole batch, and calling it for each of many tiny images
    costs more than training on them.

    Args:
        images: Shape (batch, channels, height, width).
        degrees: Largest angle in degrees, in either direction.
        shift: Largest shift in pixels along each axis, in either direction.

    Returns:
        Images of the same shape, sampled bilinearly; what comes from outside repeats the border.
    """
    count, _, height, width = images.shape
    draws = torch.rand(count, 3, dtype=images.dtype) * 2 - 1
    angle = draws[:, 0] * (degrees * torch.pi / 180)
    # affine_grid measures the axes from -1 to 1, so a pixel is 2 / size long.
    moves = draws[:, 1:] * torch.tensor([2 * shift / width, 2 * shift / height], dtype=images.dtype)
    cos, sin = angle.cos(), angle.sin()
    # A rotation in pixels is not one in units of the half axes unless the image is square.
    rows = (cos, -sin * (height / width), moves[:, 0], sin * (width / height), cos, moves[:, 1])
    matrices = torch.stack(rows, dim=1).view(count, 2, 3)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
