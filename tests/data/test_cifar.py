import hashlib
import pickle

import numpy as np
import pytest
import torch
from torchvision import datasets

from lit_cond.data import Augmentation, CIFARDataModule
from lit_cond.errors import ConfigurationError, DataError


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Files of the true layout with 30 training and 10 test images, and checksums that fit them."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.default_rng(0)

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def batch(count):
        return {
            "data": random.integers(0, 256, (count, 3072), dtype=np.uint8),
            "labels": [index % 10 for index in range(count)],
        }

    monkeypatch.setattr(datasets.CIFAR10, "train_list", [write("data_batch_1", batch(30))])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [write("test_batch", batch(10))])
    names = [f"class {index}" for index in range(10)]
    meta_name, checksum = write("batches.meta", {"label_names": names})
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": meta_name, "key": "label_names", "md5": checksum})
    return tmp_path


def test_the_training_images_are_split_and_the_split_is_fixed(small_cifar):
    def opened():
        data = CIFARDataModule(str(small_cifar), val_size=6, batch_size=4, augmentation=None, num_workers=0)
        data.prepare_data()
        data.setup("fit")
        return data

    data = opened()
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (24, 6, 10)
    assert sorted([*data.train_set.indices, *data.val_set.indices]) == list(range(30))
    torch.manual_seed(9)
    assert opened().val_set.indices == data.val_set.indices
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    assert labels.dtype == torch.int64


def test_augmentation_is_for_training_images_alone(small_cifar):
    torch.manual_seed(0)
    data = CIFARDataModule(
        str(small_cifar), val_size=6, augmentation=Augmentation(crop_scale=(0.1, 0.2)), num_workers=0
    )
    data.setup("fit")
    assert not torch.equal(data.train_set[0][0], data.train_set[0][0])
    assert torch.equal(data.val_set[0][0], data.val_set[0][0])


def test_images_may_be_resized(small_cifar):
    data = CIFARDataModule(str(small_cifar), val_size=6, image_size=48, num_workers=0)
    data.setup("fit")
    assert data.train_set[0][0].shape == data.test_set[0][0].shape == (3, 48, 48)


@pytest.mark.parametrize(("classes", "folder"), [(10, "cifar-10-batches-py"), (100, "cifar-100-python")])
def test_a_missing_folder_is_named_with_what_to_do(tmp_path, classes, folder):
    data = CIFARDataModule(str(tmp_path / "none"), num_classes=classes)
    data.prepare_data()
    assert not (tmp_path / "none").exists()  # nothing is downloaded unasked
    with pytest.raises(DataError) as caught:
        data.setup("fit")
    assert str(caught.value) == (
        f"CIFAR-{classes}: {tmp_path / 'none' / folder} does not exist: set download to true, or root to the folder "
        "above the extracted archive"
    )


def test_a_damaged_file_is_told_from_a_missing_folder(small_cifar):
    (small_cifar / "cifar-10-batches-py" / "test_batch").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"cifar-10-batches-py is damaged or incomplete: set download"):
        CIFARDataModule(str(small_cifar), val_size=6).setup("fit")


def test_a_validation_part_larger_than_the_data_is_refused(small_cifar):
    with pytest.raises(DataError, match=r"val_size is 5000 and .* holds 30 training images"):
        CIFARDataModule(str(small_cifar)).setup("fit")


def test_the_number_of_classes_is_known_before_setup():
    assert CIFARDataModule(num_classes=100).num_classes == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 20}, "num_classes is 20: CIFAR has 10 or 100"),
        ({"image_size": 0}, "image_size is 0: give at least 1"),
        ({"val_size": 50000}, "val_size is 50000: give 1 to 49999"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        CIFARDataModule(**arguments)
