import pytest
import torch
from torch import nn

from lit_cond.surgery.samples import Sample

timm = pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from scripts.model_zoo import detectron2_models, negatives, timm_models, torchvision_models  # noqa: E402
from scripts.model_zoo.timm_table import FAMILIES  # noqa: E402
from scripts.model_zoo.weights import calibrate_, randomize_  # noqa: E402

SURVEYED = "1.0.31"
surveyed = pytest.mark.skipif(timm.__version__ != SURVEYED, reason=f"the survey counted the models of timm {SURVEYED}")

ZOO = {
    (entry.source, entry.name): entry
    for entry in [
        *timm_models.timm_models(),
        *torchvision_models.torchvision_models(),
        *negatives.negatives(),
    ]
}
DOZEN = [
    ("timm", "beit_base_patch16_224"),
    ("timm", "eva02_base_patch14_224"),
    ("timm", "gcvit_xxtiny"),
    ("timm", "levit_conv_128s"),
    ("timm", "maxvit_tiny_tf_224"),
    ("timm", "naflexvit_base_patch16_gap:padded"),
    ("timm", "vit_dpwee_patch16_reg1_gap_256"),
    ("timm", "xcit_nano_12_p8_224"),
    ("timm", "coat_lite_tiny"),
    ("timm", "lambda_resnet26t"),
    ("torchvision", "swin3d_t"),
    ("torchvision", "vit_b_32"),
    ("transformers", "fnet"),
]


def run(entry):
    model = entry.build()
    with torch.no_grad():
        return model, [sample.run(model) for sample in entry.samples(model)]


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output
    return [value for value in values if isinstance(value, torch.Tensor)]


def timm_family(model):
    return timm.model_entrypoint(model).__module__.rpartition(".")[2]


def test_names_are_unique():
    count = len(timm_models.timm_models()) + len(torchvision_models.torchvision_models()) + len(negatives.negatives())
    assert len(ZOO) == count


@surveyed
def test_every_family_is_there():
    assert len(FAMILIES) == 51
    assert sum(map(len, FAMILIES.values())) >= 150
    for family, entries in FAMILIES.items():
        assert entries
        assert {timm_family(entry.model) for entry in entries} == {family}
    negative = {entry.model for entry in negatives.TIMM}
    assert set(timm.list_modules()) - set(FAMILIES) <= {timm_family(model) for model in negative}
    assert not negative & {entry.model for entries in FAMILIES.values() for entry in entries}


def test_counts_of_the_others():
    torchvision_names = [entry.name for entry in torchvision_models.torchvision_models() if ":" not in entry.name]
    assert len(torchvision_names) == 17
    assert len(negatives.TIMM) >= 61
    assert len(negatives.TRANSFORMERS) == 18


@pytest.mark.parametrize("key", DOZEN, ids="-".join)
def test_models_build_and_run(key):
    model, outputs = run(ZOO[key])
    assert not model.training
    found = [tensor for output in outputs for tensor in tensors(output)]
    assert found
    for tensor in found:
        assert torch.isfinite(tensor).all()
        assert tensor.std() > 1e-3


@pytest.mark.detectron2
@pytest.mark.skipif(not detectron2_models.available(), reason="detectron2 is not importable")
def test_detectron2_models_build_and_run():
    entries = detectron2_models.detectron2_models()
    assert {entry.note for entry in entries} == {"ViT", "SwinTransformer", "MViT"}
    for entry in entries:
        _, (output,) = run(entry)
        assert all(torch.isfinite(tensor).all() for tensor in tensors(output))


def test_same_weights_at_every_call_and_global_random_state_left_alone():
    entry = ZOO["timm", "test_maxvit"]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = entry.build()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = entry.build()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize("name", ["levit_128s", "tiny_vit_5m_224"])
def test_gradients_reach_every_weight_of_the_attention(name):
    entry = ZOO["timm", name]
    model = entry.build()
    entry.samples(model)[0].run(model).square().sum().backward()
    found = {key: parameter for key, parameter in model.named_parameters() if "attn" in key and parameter.ndim >= 2}
    assert found
    assert {key for key, parameter in found.items() if parameter.grad is None or not parameter.grad.any()} == set()


@pytest.mark.parametrize("name", ["cait_xxs24_224", "xcit_nano_12_p8_224", "swinv2_cr_tiny_224", "levit_128s"])
def test_no_parameter_is_negligible(name):
    model = ZOO["timm", name].build()
    for key, parameter in model.named_parameters():
        size = parameter.detach().abs()
        if parameter.numel() == max(parameter.shape):
            assert size.min() >= 0.05, key
            assert size.max() <= 1.5, key
        else:
            assert 0.01 < parameter.std() < 0.2, key


def test_scales_and_biases():
    model = randomize_(nn.Sequential(nn.Linear(300, 500), nn.LayerNorm(500), nn.Conv2d(4, 4, 1, groups=4)))
    linear, norm, _ = model.requires_grad_(False)
    assert linear.weight.std().item() == pytest.approx(300**-0.5, rel=0.05)
    assert 0.5 <= norm.weight.min() < norm.weight.max() <= 1.5
    assert 0.05 <= norm.bias.abs().min() < norm.bias.abs().max() <= 0.15
    assert norm.bias.min() < 0 < norm.bias.max()


def test_batch_normalizations_see_what_they_were_set_to():
    model = randomize_(nn.Sequential(*(m for _ in range(8) for m in (nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)))))
    images = 1e-3 * torch.randn(2, 16, 24, 24, generator=torch.Generator().manual_seed(0))
    calibrate_(model, [Sample((images,))])
    assert not any(module.training for module in model.modules())
    output = model(images)
    torch.testing.assert_close(output.std((0, 2, 3), correction=0), model[-1].weight, rtol=0.3, atol=0.0)
    assert not any(module._forward_pre_hooks for module in model.modules())
