"""Models without dot-product attention: whatever is found in them is found by mistake."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModel

from lit_cond.surgery.samples.transformers import transformers_samples
from scripts.model_zoo import ZooModel, transformers_models
from scripts.model_zoo.timm_models import finish, zoo_model
from scripts.model_zoo.timm_table import TimmEntry

__all__ = ["TIMM", "TRANSFORMERS", "negatives"]

# One model of each family that has no attention, and what is called attention in others: factorised, additive, linear,
# of channels by a gate, of kernels, of splits.
TIMM: tuple[TimmEntry, ...] = tuple(
    TimmEntry(model, size, "", arguments)
    for model, size, arguments in (
        ("coat_tiny", 64, {"img_size": 64}),
        ("coat_lite_tiny", 64, {"img_size": 64}),
        ("coat_mini", 64, {"img_size": 64}),
        ("convmixer_768_32", 56, {}),
        ("test_convnext", 64, {}),
        ("convnextv2_atto", 64, {}),
        ("cs3darknet_focus_s", 64, {}),
        ("cspnext_tiny", 64, {}),
        ("densenet121", 64, {}),
        ("dla46x_c", 64, {}),
        ("dpn48b", 64, {}),
        ("test_efficientnet", 64, {}),
        ("tf_efficientnet_b0", 64, {}),
        ("efficientvim_m1", 64, {}),
        ("efficientvit_b0", 64, {}),
        ("efficientvit_l1", 64, {"depths": (1, 1, 1, 1, 2)}),
        ("fasternet_t0", 64, {}),
        ("focalnet_tiny_srf", 64, {}),
        ("ghostnet_050", 64, {}),
        ("hardcorenas_a", 64, {}),
        ("hgnetv2_b0", 64, {}),
        ("hrnet_w18_small", 64, {}),
        ("inception_next_atto", 64, {}),
        ("inception_resnet_v2", 96, {}),
        ("inception_v3", 96, {}),
        ("inception_v4", 96, {}),
        ("lcnetv2_small", 64, {}),
        ("test_mambaout", 64, {}),
        ("gmixer_12_224", 64, {"img_size": 64}),
        ("resmlp_12_224", 64, {"img_size": 64}),
        ("gmlp_ti16_224", 64, {"img_size": 64}),
        ("mixer_s32_224", 64, {"img_size": 64}),
        ("nasnetalarge", 96, {}),
        ("test_nfnet", 64, {}),
        ("pnasnet5large", 96, {}),
        ("rdnet_tiny", 64, {}),
        ("regnety_002", 64, {}),
        ("repghostnet_050", 64, {}),
        ("repvit_m0_9", 64, {}),
        ("res2net50_14w_8s", 64, {"layers": (1, 1, 1, 1)}),
        ("resnest14d", 64, {}),
        ("resnest26d", 64, {}),
        ("test_resnet", 64, {}),
        ("ecaresnet26t", 64, {}),
        ("resnetv2_18", 64, {}),
        ("rexnet_100", 64, {}),
        ("selecsls42", 64, {}),
        ("legacy_seresnet18", 64, {}),
        ("sequencer2d_s", 64, {"img_size": 64, "layers": (1, 1, 1, 1)}),
        ("skresnet18", 64, {}),
        ("skresnext50_32x4d", 64, {"layers": (1, 1, 1, 1)}),
        ("starnet_s050", 64, {}),
        ("swiftformer_xs", 64, {}),
        ("swiftformer_s", 64, {}),
        ("tresnet_m", 64, {"layers": (1, 1, 1, 1)}),
        ("vgg11", 64, {"mlp_ratio": 0.05}),
        ("ese_vovnet19b_slim_dw", 64, {}),
        ("legacy_xception", 96, {}),
        ("xception41p", 96, {}),
        ("mobilevitv2_050", 64, {}),
        ("bat_resnext26ts", 256, {}),
        ("gcresnet33ts", 64, {"width_factor": 0.25}),
        ("lambda_resnet26t", 256, {"width_factor": 0.25}),
        ("lambda_resnet26rpt_256", 256, {"width_factor": 0.25}),
        ("poolformer_s12", 64, {}),
        ("convformer_s18", 64, {}),
        ("mobilenetv4_conv_small", 64, {}),
        ("fastvit_t8", 64, {}),
        ("lowformer_e1", 64, {}),
        ("resnet50_clip_gap", 64, {"width_factor": 0.25}),
    )
)

# Convolutional, of poolings, Fourier transforms, state spaces and other recurrences, with additive or linear attention.
# Arguments of the configuration where making everything small by rule does not give a model that runs.
TRANSFORMERS: dict[str, dict[str, Any] | None] = {
    "bit": {"embedding_size": 64, "hidden_sizes": [128, 128, 128, 128], "depths": [1, 1, 1, 1]},
    "convnext": None,
    "convnextv2": None,
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.1, "hidden_dim": 640, "image_size": 64},
    "falcon_mamba": None,
    "fnet": None,
    "focalnet": None,
    "mamba": None,
    "mamba2": {
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 160,
    },
    "mobilenet_v1": None,
    "mobilenet_v2": None,
    "mobilevitv2": None,
    "poolformer": None,
    "regnet": None,
    "resnet": None,
    "rwkv": None,
    "swiftformer": None,
    "xlstm": {"hidden_size": 64, "num_heads": 4, "qk_dim_factor": 1.0, "num_blocks": 2, "vocab_size": 160},
}


def negatives() -> list[ZooModel]:
    """Return all of them."""
    found = [zoo_model(entry) for entry in TIMM]
    for name, arguments in TRANSFORMERS.items():
        make = partial(transformers_models.build, name) if arguments is None else partial(build, name, arguments)
        found.append(ZooModel(name, "transformers", make, transformers_samples))
    return found


def build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a transformers model.

    Args:
        name: Type of its configuration.
        arguments: Of its configuration.
    """
    return finish(lambda: AutoModel.from_config(AutoConfig.for_model(name, **arguments)), transformers_samples)
