import pytest
import torch
from torch import nn

from lit_cond.surgery.samples.images import image_samples

# Classes that keep the size of their images nowhere.
FORGETFUL = ("gcvit_xxtiny", "hiera_tiny_224", "levit_128s")


class Declared(nn.Module):
    """Says its size as timm's models do."""

    def __init__(self, built=None, channels=3, size=(3, 24, 16), name="pretrained_cfg"):
        super().__init__()
        setattr(self, name, {"input_size": size})
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(channels, 8, 8, 8)
        self.patch_embed.img_size = built

    def forward(self, x):
        return self.patch_embed.proj(x)


def shape(model):
    (sample,) = image_samples(model)
    (images,) = sample.args
    assert not sample.kwargs
    return tuple(images.shape)


def test_declared_size():
    assert shape(Declared()) == (2, 3, 24, 16)
    assert shape(Declared(name="default_cfg")) == (2, 3, 24, 16)


@pytest.mark.parametrize(("built", "expected"), [((32, 40), (32, 40)), (48, (48, 48))])
def test_the_size_it_was_built_for_wins(built, expected):
    assert shape(Declared(built)) == (2, 3, *expected)


def test_channels_of_the_first_convolution_win():
    assert shape(Declared(channels=5)) == (2, 5, 24, 16)


def test_device_and_type_of_the_parameters():
    (sample,) = image_samples(Declared().to(torch.bfloat16))
    assert sample.args[0].dtype == torch.bfloat16
    (sample,) = image_samples(Declared().to("meta"))
    assert sample.args[0].is_meta


def test_global_random_state_is_left_alone_and_values_repeat():
    model = Declared()
    before = torch.get_rng_state()
    first, second = (image_samples(model)[0].args[0] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert first.std() > 0.5


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 4), nn.Sequential(nn.Conv2d(3, 4, 3)), Declared(size=None), Declared(size=(3,))]
)
def test_a_model_of_another_kind_has_none(model):
    assert image_samples(model) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_tiny_patch16_224", {"img_size": (32, 64), "depth": 1}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1, "in_chans": 1}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 3, "features_only": True}),
        ("test_vit", {}),
        ("gcvit_xxtiny", {"img_size": 64, "embed_dim": 16}),
        ("hiera_tiny_224", {"img_size": (64, 96), "embed_dim": 32, "stages": (1, 1, 1, 1)}),
        ("levit_128s", {"img_size": 64}),
        ("swin_tiny_patch4_window7_224", {"img_size": (56, 112), "depths": (1, 1), "num_heads": (2, 4)}),
        ("crossvit_tiny_240", {"img_size": 120, "depth": ((1, 1, 0),)}),
        ("naflexvit_base_patch16_gap", {"depth": 1, "embed_dim": 64, "num_heads": 4}),
        ("test_resnet", {}),
    ],
)
def test_timm_models_take_it(name, arguments):
    timm = pytest.importorskip("timm")
    if name in FORGETFUL and not hasattr(timm.models, "get_model_traits"):
        pytest.skip("this timm does not record the size")
    model = timm.create_model(name, pretrained=False, **arguments).eval()
    size = arguments.get("img_size", model.pretrained_cfg["input_size"][-2:])
    size = (size, size) if isinstance(size, int) else size
    batch = 1 if size[0] > 160 else 2
    assert shape(model) == (batch, arguments.get("in_chans", 3), *size)
    with torch.no_grad():
        image_samples(model)[0].run(model)


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t", "swin_v2_t", "swin3d_t", "maxvit_t", "mvit_v1_b", "mvit_v2_s"])
def test_torchvision_models_take_it(name):
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    from scripts.model_zoo.torchvision_models import torchvision_models

    (entry,) = (entry for entry in torchvision_models() if entry.name == name)
    model = entry.build()
    (sample,) = image_samples(model)
    assert sample.args[0].ndim == (5 if "3d" in name or "mvit" in name else 4)
    with torch.no_grad():
        assert sample.run(model).shape == (2, 3)


@pytest.mark.parametrize("name", ["resnet18", "fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_nothing_says_the_size_of_other_torchvision_models(name):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.get_model(name, weights=None, **({"weights_backbone": None} if "rcnn" in name else {}))
    assert image_samples(model) is None
