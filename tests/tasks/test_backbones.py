import subprocess
import sys

import pytest
import torch
from torch import nn
from torchvision import models

from lit_cond.errors import ConfigurationError, MissingExtraError
from lit_cond.tasks import build_backbone
from lit_cond.tasks.backbones import logits_of

VIT = "timm/vit_tiny_patch16_224"
HF_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TORCHVISION_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "mlp_dim": 24,
}


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        (VIT, {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}, (1, 8, 8)),
        ("torchvision/VisionTransformer", TORCHVISION_VIT, (3, 8, 8)),
        ("torchvision/resnet18", {}, (3, 32, 32)),
        ("torchvision/googlenet", {"init_weights": False}, (3, 64, 64)),  # returns a tuple with .logits in training
        ("hf/vit", HF_VIT, (1, 8, 8)),
        (
            "hf/swin",
            {
                "image_size": 16,
                "patch_size": 2,
                "embed_dim": 8,
                "depths": [1, 1],
                "num_heads": [2, 2],
                "window_size": 4,
            },
            (3, 16, 16),
        ),
    ],
)
def test_each_library_gives_logits(name, arguments, shape):
    backbone = build_backbone(name, 7, **arguments)
    assert backbone.training
    assert logits_of(backbone(torch.randn(2, *shape)), 7).shape == (2, 7)


def test_sizes_reach_the_model():
    hf = build_backbone("hf/vit", 7, **HF_VIT)
    assert len(hf.vit.layers) == 2
    assert hf.config.hidden_size == 16
    tv = build_backbone("torchvision/VisionTransformer", 7, **TORCHVISION_VIT)
    assert len(tv.encoder.layers) == 2
    assert tv.conv_proj.weight.shape == (16, 3, 4, 4)
    swin = build_backbone("hf/swin", 7, image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2])
    assert swin.classifier.in_features == 16  # derived from embed_dim and the number of stages


def test_a_module_passes_through():
    module = nn.Linear(2, 2)
    assert build_backbone(module, 2) is module


@pytest.fixture
def hf_folder(tmp_path):
    torch.manual_seed(0)
    model = build_backbone("hf/vit", 4, **HF_VIT)
    model.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit", model


def test_a_local_folder_is_loaded_with_its_weights(hf_folder):
    folder, saved = hf_folder
    loaded = build_backbone(f"hf/{folder}", 4)
    assert loaded.training
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_local_folder_with_another_number_of_classes_has_a_new_head(hf_folder):
    folder, saved = hf_folder
    loaded = build_backbone(f"hf/{folder}", 9)
    assert loaded.classifier.weight.shape == (9, 16)
    assert torch.equal(loaded.vit.embeddings.cls_token, saved.vit.embeddings.cls_token)


def test_pretrained_false_takes_only_the_configuration_of_a_folder(hf_folder):
    folder, saved = hf_folder
    torch.manual_seed(1)
    fresh = build_backbone(f"hf/{folder}", 4, pretrained=False)
    assert fresh.config.hidden_size == 16
    assert not torch.equal(fresh.vit.layers[0].mlp.fc1.weight, saved.vit.layers[0].mlp.fc1.weight)


def test_pretrained_torchvision_keeps_all_but_the_head(monkeypatch):
    torch.manual_seed(0)
    trained = models.resnet18(num_classes=1000).state_dict()
    weights = models.ResNet18_Weights
    monkeypatch.setattr(weights, "get_state_dict", lambda self, *args, **kwargs: trained)
    full = build_backbone("torchvision/resnet18", 1000, pretrained=True).state_dict()
    assert all(torch.equal(full[name], value) for name, value in trained.items())
    small = build_backbone("torchvision/resnet18", 5, pretrained=True).state_dict()
    assert small["fc.weight"].shape == (5, 512)
    assert all(torch.equal(small[name], value) for name, value in trained.items() if not name.startswith("fc."))


def test_weights_that_can_not_be_fetched_are_an_error_of_one_line(monkeypatch):
    def fail(self, **kwargs):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", fail)
    with pytest.raises(ConfigurationError) as caught:
        build_backbone("torchvision/resnet18", 5, pretrained=True)
    assert str(caught.value) == "torchvision/resnet18 can not be loaded: no route to host"


def test_pretrained_torchvision_refuses_other_sizes(monkeypatch):
    trained = models.mobilenet_v3_small().state_dict()
    monkeypatch.setattr(models.MobileNet_V3_Small_Weights, "get_state_dict", lambda self, **kwargs: trained)
    with pytest.raises(ConfigurationError, match=r"do not fit the given backbone_args.*'classifier.0.bias'"):
        build_backbone("torchvision/mobilenet_v3_small", 5, pretrained=True, reduced_tail=True)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("vit_tiny_patch16_224", {}, ["'vit_tiny_patch16_224'", "timm/<name>"]),
        ("timm", {}, ["'timm'", "timm/<name>"]),
        ("tim/vit_tiny_patch16_224", {}, ["'tim/vit_tiny_patch16_224'", "nearest: timm"]),
        ("timm/vit_tny_patch16_224", {}, ["'vit_tny_patch16_224'", "vit_tiny_patch16_224"]),
        ("torchvision/vit_b16", {}, ["'vit_b16'", "vit_b_16"]),
        ("torchvision/fasterrcnn_resnet50_fpn", {}, ["no classifier 'fasterrcnn_resnet50_fpn'"]),
        ("hf/vitt", {}, ["hf/vitt", "nearest: vit"]),
        ("hf/bert", {}, ["hf/bert", "model type of transformers for image classification"]),
        ("hf//no/such/folder", {}, ["/no/such/folder", "neither a folder"]),
        (VIT, {"dephth": 2}, [VIT, "'dephth'"]),
        ("torchvision/vit_b_16", {"dephth": 2}, ["torchvision/vit_b_16", "'dephth'"]),
        ("torchvision/VisionTransformer", {"dephth": 2}, ["torchvision/VisionTransformer", "'dephth'"]),
        ("hf/vit", {"hiden_size": 16}, ["hf/vit has no option 'hiden_size'", "nearest: hidden_size"]),
        ("hf/vit", {"pretrained": True}, ["hf/vit is a model type without trained weights"]),
        ("torchvision/VisionTransformer", {"pretrained": True}, ["a class without trained weights"]),
        (VIT, {"num_labels": 4}, ["backbone_args sets num_labels to 4: set num_classes"]),
        (nn.Linear(1, 1), {"depth": 3}, ["a module already built: depth can not be applied"]),
        (nn.Linear(1, 1), {"pretrained": True}, ["a module already built: pretrained can not be applied"]),
    ],
)
def test_a_wrong_name_or_argument_is_explained_in_one_line(name, arguments, words):
    with pytest.raises(ConfigurationError) as caught:
        build_backbone(name, 10, **arguments)
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


def test_zero_classes_are_refused():
    with pytest.raises(ConfigurationError, match="num_classes is 0: give at least 1"):
        build_backbone(VIT, 0)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((torch.zeros(2, 3),), "the backbone returned tuple: return a tensor of logits"),
        (torch.zeros(2, 4), r"logits of shape \(2, 4\): expected \(batch, 3\)"),
        (torch.zeros(2, 5, 3), r"logits of shape \(2, 5, 3\): expected \(batch, 3\)"),
    ],
)
def test_an_output_without_the_right_logits_is_refused(output, message):
    with pytest.raises(ConfigurationError, match=message):
        logits_of(output, 3)


@pytest.mark.parametrize(
    ("library", "name"), [("timm", VIT), ("torchvision", "torchvision/resnet18"), ("transformers", "hf/vit")]
)
def test_a_missing_library_is_named_with_the_command(monkeypatch, library, name):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError) as caught:
        build_backbone(name, 10)
    assert str(caught.value) == (
        f"the backbone {name} needs '{library}', which is not installed: pip install \"lit_cond[tasks]\""
    )


def test_importing_the_package_loads_no_optional_library():
    # Lightning brings torchmetrics, which imports transformers and torchvision itself where they are installed.
    code = "import sys; sys.modules.update(timm=None, sklearn=None); import lit_cond.tasks, lit_cond.data"
    subprocess.run([sys.executable, "-c", code], check=True)
