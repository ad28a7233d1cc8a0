import math

import numpy as np
import pytest
import torch
from PIL import Image

from lit_cond.data.transforms import Augmentation, evaluation_transform, jitter_affine, training_transform
from lit_cond.errors import ConfigurationError

ZERO, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
OFF = Augmentation(crop_scale=None, horizontal_flip=0.0, rand_augment_ops=0, color_jitter=0.0, random_erasing=0.0)


def gradient_image(width, height):
    columns = np.linspace(0, 255, width).astype(np.uint8)
    return Image.fromarray(np.stack([np.tile(columns, (height, 1))] * 3, axis=-1))


def test_evaluation_keeps_the_centre():
    # 200 x 100 pixels: the shorter side becomes 64 / 0.8 = 80, the crop takes columns 48..112 of 160.
    result = evaluation_transform(64, ZERO, ONE, crop_ratio=0.8)(gradient_image(200, 100))
    assert result.shape == (3, 64, 64)
    assert type(result) is torch.Tensor
    assert result[0, 0, 0].item() == pytest.approx(48.5 / 160, abs=0.02)
    assert result[0, 0, -1].item() == pytest.approx(111.5 / 160, abs=0.02)


def test_normalisation_by_hand():
    white = Image.new("RGB", (8, 8), (255, 51, 0))
    result = evaluation_transform(8, (0.5, 0.1, 0.25), (0.5, 0.2, 0.1), crop_ratio=1.0)(white)
    assert result[:, 3, 3].tolist() == pytest.approx([1.0, 0.5, -2.5], abs=1e-6)


def test_training_without_augmentation_is_evaluation_without_margin():
    image = gradient_image(60, 40)
    assert torch.equal(
        training_transform(32, OFF, ZERO, ONE)(image), evaluation_transform(32, ZERO, ONE, crop_ratio=1.0)(image)
    )


@pytest.mark.parametrize(
    "only",
    [
        {"crop_scale": (0.1, 0.5)},
        {"crop_padding": 4},
        {"horizontal_flip": 1.0},
        {"rand_augment_ops": 2, "rand_augment_prob": 1.0},
        {"color_jitter": 0.5},
        {"random_erasing": 1.0},
    ],
)
def test_each_item_alone_changes_the_image_and_keeps_its_size(only):
    torch.manual_seed(0)
    image = gradient_image(32, 32)
    plain = training_transform(32, OFF, ZERO, ONE)(image)
    transform = training_transform(32, Augmentation(**(vars(OFF) | only)), ZERO, ONE)
    results = [transform(image) for _ in range(8)]
    assert {result.shape for result in results} == {(3, 32, 32)}
    assert any(not torch.equal(result, plain) for result in results)


def test_each_operation_of_rand_augment_has_its_chance():
    torch.manual_seed(0)
    image = gradient_image(32, 32)
    plain = training_transform(32, OFF, ZERO, ONE)(image)

    def changed(probability):
        only = {"rand_augment_ops": 1, "rand_augment_prob": probability}
        transform = training_transform(32, Augmentation(**(vars(OFF) | only)), ZERO, ONE)
        return sum(not torch.equal(transform(image), plain) for _ in range(200))

    assert changed(0.0) == 0
    # Some operations, the identity among them, leave this image as it is.
    assert 0.35 * changed(1.0) < changed(0.5) < 0.65 * changed(1.0)


def test_flip_is_the_mirror_image():
    image = gradient_image(16, 16)
    flipped = training_transform(16, Augmentation(**(vars(OFF) | {"horizontal_flip": 1.0})), ZERO, ONE)(image)
    assert torch.equal(flipped, training_transform(16, OFF, ZERO, ONE)(image).flip(-1))


def test_augmentation_depends_on_the_seed_alone():
    image, transform = gradient_image(48, 32), training_transform(32, Augmentation(), ZERO, ONE)

    def draw(seed):
        torch.manual_seed(seed)
        return torch.stack([transform(image) for _ in range(4)])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop_scale": (0.5, 0.2)}, r"crop_scale is \(0.5, 0.2\): give two shares"),
        ({"crop_scale": (0.0, 1.0)}, r"crop_scale is \(0.0, 1.0\): give two shares"),
        ({"crop_scale": None, "crop_padding": -1}, "crop_padding is -1: give 0 or more pixels"),
        ({"crop_padding": 4}, r"crop_padding is 4 and crop_scale \(0.08, 1.0\): set one of them to 0 or null"),
        ({"horizontal_flip": 1.5}, "horizontal_flip is 1.5: give a chance from 0 to 1"),
        ({"random_erasing": -0.5}, "random_erasing is -0.5: give a chance from 0 to 1"),
        ({"rand_augment_ops": -1}, "rand_augment_ops is -1 and color_jitter 0.0: give 0 or more"),
        ({"color_jitter": -0.1}, "rand_augment_ops is 2 and color_jitter -0.1: give 0 or more"),
        ({"rand_augment_prob": 2.0}, "rand_augment_prob is 2.0: give a chance from 0 to 1"),
        ({"rand_augment_magnitude": 31}, "rand_augment_magnitude is 31: give 0 to 30"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Augmentation(**arguments)


def test_crop_ratio_out_of_range():
    with pytest.raises(ConfigurationError, match=r"crop_ratio is 1.5: give a value above 0 and at most 1"):
        evaluation_transform(8, ZERO, ONE, crop_ratio=1.5)


def test_jitter_of_nothing_changes_nothing():
    images = torch.rand(3, 1, 8, 6)
    torch.testing.assert_close(jitter_affine(images, 0.0, 0.0), images, atol=1e-5, rtol=0)


def test_jitter_shifts_by_at_most_the_given_pixels():
    torch.manual_seed(0)
    images = torch.zeros(500, 1, 9, 13)
    images[:, :, 4, 6] = 1.0
    moved = jitter_affine(images, 0.0, 2.0)[:, 0]
    total = moved.sum(dim=(1, 2))
    rows = (moved.sum(2) @ torch.arange(9.0)) / total - 4
    columns = (moved.sum(1) @ torch.arange(13.0)) / total - 6
    torch.testing.assert_close(total, torch.ones(500))
    for shifts in (rows, columns):
        assert shifts.abs().max() <= 2.0 + 1e-4
        assert shifts.abs().max() > 1.9
        assert shifts.mean().abs() < 0.15


def test_jitter_turns_by_at_most_the_given_angle_and_keeps_distances():
    torch.manual_seed(0)
    images = torch.zeros(500, 1, 21, 41)
    images[:, :, 10, 28] = 1.0  # 8 pixels right of the centre (10, 20)
    turned = jitter_affine(images, 30.0, 0.0)[:, 0]
    total = turned.sum(dim=(1, 2))
    rows = (turned.sum(2) @ torch.arange(21.0)) / total - 10
    columns = (turned.sum(1) @ torch.arange(41.0)) / total - 20
    torch.testing.assert_close(torch.hypot(rows, columns), torch.full((500,), 8.0), atol=0.15, rtol=0)
    angles = torch.atan2(rows, columns) * 180 / math.pi
    assert 28 < angles.abs().max() < 31
    assert angles.mean().abs() < 2.5
