import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from lit_cond.data import DigitsDataModule
from lit_cond.errors import ConfigurationError


def everything(dataset):
    return dataset.__getitems__(list(range(len(dataset))))


def opened(**arguments):
    data = DigitsDataModule(**arguments)
    data.setup("fit")
    return data


def test_three_disjoint_parts_of_the_whole_set():
    data = opened()
    parts = [everything(part) for part in (data.train_set, data.val_set, data.test_set)]
    assert [len(labels) for _, labels in parts] == [898, 200, 699]
    pixels, labels = load_digits(return_X_y=True)
    found = torch.cat([images for images, _ in parts]).flatten(1) * 0.3760 + 0.3053
    # Each row of the original occurs once: compare both sets in one order.
    key = lambda rows: sorted(tuple(row) for row in rows.mul(16).round().int().tolist())  # noqa: E731
    assert key(found) == key(torch.as_tensor(pixels) / 16)
    assert torch.cat([labels for _, labels in parts]).bincount().tolist() == torch.as_tensor(labels).bincount().tolist()


def test_each_part_has_the_classes_in_the_same_shares():
    data = opened()
    for part in (data.train_set, data.val_set, data.test_set):
        shares = everything(part)[1].bincount(minlength=10) / len(part)
        assert shares.min() > 0.09
        assert shares.max() < 0.11


def test_the_split_does_not_depend_on_the_seed_of_the_run():
    torch.manual_seed(1)
    first = everything(opened().val_set)
    torch.manual_seed(2)
    second = everything(opened().val_set)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], everything(opened(split_seed=1).val_set)[0])


def test_images_are_normalised_floats():
    images, labels = everything(opened().train_set)
    assert images.dtype == torch.float32
    assert images.shape == (898, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert images.mean().abs() < 0.05
    assert images.std().item() == pytest.approx(1, abs=0.05)


def test_one_sample_is_what_a_batch_holds():
    data = opened()
    image, label = data.train_set[5]
    images, labels = everything(data.train_set)
    assert torch.equal(image, images[5])
    assert label == labels[5]


def test_resizing_and_colour():
    data = opened(image_size=20, channels=3)
    image, _ = data.val_set[0]
    assert image.shape == (3, 20, 20)
    assert torch.equal(image[0], image[2])


def test_augmentation_changes_training_images_alone_and_anew():
    torch.manual_seed(0)
    data, plain = opened(augment=True), opened()
    first, second = data.train_set[3][0], data.train_set[3][0]
    assert not torch.equal(first, second)
    assert torch.equal(data.val_set[3][0], plain.val_set[3][0])
    assert torch.equal(data.test_set[3][0], plain.test_set[3][0])


def test_the_number_of_classes_is_known_before_setup():
    assert DigitsDataModule().num_classes == 10
    assert DigitsDataModule.num_classes == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 0}, "image_size is 0: give at least 1, or null for 8"),
        ({"channels": 2}, "channels is 2: give 1 or 3"),
        ({"max_rotation": -1.0}, "max_rotation is -1.0 and max_shift 1.0: give 0 or more"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        DigitsDataModule(**arguments)


def test_without_scikit_learn_the_command_is_named():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from lit_cond.data import DigitsDataModule\n"
        "DigitsDataModule().setup('fit')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("the digits data set needs 'sklearn', which is not installed: pip install \"lit_cond[tasks]\"")
    )
