import pytest
import torch
from PIL import Image

from lit_cond.data import ImageFolderDataModule
from lit_cond.errors import ConfigurationError, DataError

COLOURS = {"ant": (255, 0, 0), "bee": (0, 255, 0), "cat": (0, 0, 255)}


def write(path, name, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(options.pop("mode", "RGB"), (20, 16), options.pop("colour", COLOURS.get(name, 0))).save(path, **options)


@pytest.fixture
def tree(tmp_path):
    for split, count in (("train", 4), ("val", 2)):
        for name in COLOURS:
            for index in range(count):
                write(tmp_path / split / name / f"{index}.png", name)
    return tmp_path


def opened(root, **arguments):
    defaults = {"batch_size": 4, "image_size": 8, "augmentation": None, "num_workers": 0}
    data = ImageFolderDataModule(str(root), **(defaults | arguments))
    data.setup("fit")
    return data


def test_images_have_the_label_of_their_folder(tree):
    data = opened(tree, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert data.classes == ["ant", "bee", "cat"]
    assert (len(data.train_set), len(data.val_set), len(data.test_set)) == (12, 6, 6)
    for images, labels in [*data.train_dataloader(), *data.val_dataloader()]:
        assert images.shape[1:] == (3, 8, 8)
        # Class 0 is red, 1 green, 2 blue: the brightest channel is the label.
        assert torch.equal(images.mean(dim=(2, 3)).argmax(1), labels)


def test_a_class_missing_from_validation_does_not_move_the_labels_of_the_others(tree):
    for path in (tree / "val" / "ant").iterdir():
        path.unlink()
    (tree / "val" / "ant").rmdir()
    data = opened(tree, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    (batch,) = [batch for batch in data.val_dataloader() if len(batch[1]) == 4][:1]
    assert batch[1].tolist() == [1, 1, 2, 2]


def test_a_test_folder_is_used_where_there_is_one(tree):
    write(tree / "test" / "cat" / "deep" / "below.JPEG", "cat", format="JPEG")
    data = opened(tree)
    assert data.test_set.labels == [2]
    assert data.val_set is not data.test_set


def test_grey_palette_and_transparent_images_become_rgb(tree):
    write(tree / "val" / "ant" / "grey.png", "ant", mode="L", colour=9)
    write(tree / "val" / "ant" / "palette.png", "ant", mode="P", colour=9)
    write(tree / "val" / "ant" / "alpha.png", "ant", mode="RGBA", colour=(1, 2, 3, 4))
    data = opened(tree)
    assert {image.shape for image, _ in data.val_set} == {(3, 8, 8)}


def test_the_number_of_classes_is_known_before_setup(tree):
    assert ImageFolderDataModule(str(tree)).num_classes == 3


def test_augmentation_is_for_training_images_alone(tree):
    Image.linear_gradient("L").save(tree / "train" / "ant" / "0.png")
    Image.linear_gradient("L").save(tree / "val" / "ant" / "0.png")
    data = ImageFolderDataModule(str(tree), image_size=32, num_workers=0)
    data.setup("fit")
    torch.manual_seed(0)
    assert not torch.equal(data.train_set[0][0], data.train_set[0][0])
    assert torch.equal(data.val_set[0][0], data.val_set[0][0])


@pytest.mark.parametrize("split", ["train", "val"])
def test_e_missing_folder(tree, split):
    (tree / split).rename(tree / "elsewhere")
    with pytest.raises(DataError) as caught:
        opened(tree)
    assert str(caught.value) == (
        f"the folder {tree / split} does not exist: root must hold train/<class>/ and val/<class>/ with images"
    )


def test_e_missing_root_is_found_when_the_classes_are_counted(tmp_path):
    with pytest.raises(DataError, match=r"the folder .*none/train does not exist"):
        _ = ImageFolderDataModule(str(tmp_path / "none")).num_classes


def test_e_no_class_folders(tmp_path):
    write(tmp_path / "train" / "loose.png", "ant")
    with pytest.raises(DataError, match=r"train has no class folders: put the images of each class into a folder"):
        opened(tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_e_class_without_an_image(tree, split):
    for path in (tree / split / "bee").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(DataError, match=rf"{split} has classes without an image: bee: add images \(.jpg .* or remove"):
        opened(tree)


def test_e_foreign_class_in_validation(tree):
    write(tree / "val" / "dog" / "0.png", "dog")
    with pytest.raises(DataError, match=r"val has classes that .*train has not: dog: remove them or add them to train"):
        opened(tree)


def test_e_many_foreign_classes_are_counted(tree):
    for index in range(13):
        write(tree / "val" / f"x{index:02}" / "0.png", "dog")
    with pytest.raises(DataError, match=r"x00, x01, .*, x09 and 3 more: remove"):
        opened(tree)


def damage(path):
    """Cut off half of the pixels; the header stays intact."""
    noise = Image.effect_noise((64, 64), 80)
    noise.save(path, format="PNG")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_e_unreadable_image_is_named_when_it_is_loaded(tree, content):
    bad = tree / "train" / "cat" / "1.png"
    damage(bad) if content is None else bad.write_bytes(content)
    data = opened(tree)
    with pytest.raises(DataError, match=rf"the image {bad} can not be read: .*: replace or remove it"):
        list(data.train_dataloader())


def test_e_unreadable_image_in_a_worker_process(tree):
    bad = tree / "val" / "cat" / "1.png"
    bad.write_bytes(b"not an image")
    data = opened(tree, num_workers=1)
    with pytest.raises(DataError, match=rf"the image {bad} can not be read"):
        list(data.val_dataloader())


def test_e_unreadable_images_are_found_before_the_run(tree):
    bad = [tree / "train" / "ant" / "2.png", tree / "val" / "cat" / "0.png"]
    bad[0].write_bytes(b"not an image")
    damage(bad[1])
    with pytest.raises(DataError) as caught:
        opened(tree, verify_images=True)
    assert str(caught.value) == f"2 of 18 images below {tree} can not be read: {bad[0]}, {bad[1]}"


def test_e_good_images_pass_the_verification(tree):
    assert len(opened(tree, verify_images=True).train_set) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 0}, "image_size is 0: give at least 1"),
        ({"crop_ratio": 0.0}, "crop_ratio is 0.0: give a value above 0 and at most 1"),
        ({"std": (1.0, 0.0, 1.0)}, r"std is \(1.0, 0.0, 1.0\): give three values above 0"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ImageFolderDataModule("anywhere", **arguments)
