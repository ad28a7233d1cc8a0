"""Samples made from the configuration of a transformers model run every tower, for one type of each kind of input."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.samples.transformers import transformers_samples

pytest.importorskip("timm")  # the image tower of gemma3n
pytest.importorskip("transformers")
zoo = pytest.importorskip("scripts.model_zoo.transformers_models")

# Type, and parts of the model that a sample must run.
TYPES = {
    "bert": ("encoder.layer.0",),
    "llama": ("layers.0",),
    "t5": ("encoder.block.0", "decoder.block.1"),
    "vit": ("layers.0",),
    "swin": ("encoder.layers.3",),
    "clip": ("text_model", "vision_model"),
    "whisper": ("encoder.layers.0", "decoder.layers.0"),
    "wav2vec2": ("encoder.layers.1",),
    "qwen2_vl": ("visual.blocks.0", "language_model.layers.0"),
    "llava_next": ("vision_tower", "language_model"),
    "gemma3n": ("vision_tower", "language_model", "audio_tower"),
    "blip-2": ("vision_model", "qformer", "language_model"),
    "layoutlmv3": ("encoder.layer.0",),
    "detr": ("encoder.layers.0", "decoder.layers.0"),
    "videomae": ("encoder.layer.0",),
    "mllama": ("vision_model", "language_model"),
    "informer": ("encoder.layers.0", "decoder.layers.0"),
    "decision_transformer": ("encoder.h.0",),
}


@pytest.mark.parametrize("name", TYPES)
def test_samples_run_every_tower(name):
    model = zoo.build(name)
    modules = dict(model.named_modules())
    ran = set()
    for part in TYPES[name]:
        modules[part].register_forward_pre_hook(lambda module, args, part=part: ran.add(part))
    with torch.no_grad():
        for sample in transformers_samples(model):
            sample.run(model)
    assert ran == set(TYPES[name])


def test_samples_repeat_and_leave_the_global_generator_alone():
    model = zoo.build("bert")
    state = torch.get_rng_state()
    first, second = transformers_samples(model), transformers_samples(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first[0].kwargs["input_ids"], second[0].kwargs["input_ids"])


def test_samples_have_the_dtype_of_the_parameters():
    sample = transformers_samples(zoo.build("vit").to(torch.bfloat16))[0]
    assert sample.kwargs["pixel_values"].dtype == torch.bfloat16


def test_ids_avoid_special_tokens_and_stay_within_the_vocabulary():
    model = zoo.build("qwen2_vl")
    ids = transformers_samples(model)[0].kwargs["input_ids"]
    config = model.config
    assert ids.max() < config.text_config.vocab_size
    assert not torch.isin(ids, torch.tensor([config.image_token_id, config.video_token_id])).any()


def test_placeholders_match_the_features_of_the_image():
    model = zoo.build("blip-2")
    ids = transformers_samples(model)[0].kwargs["input_ids"]
    assert ((ids == model.config.image_token_index).sum(1) == model.config.num_query_tokens).all()


def test_towers_under_a_head_are_run():
    transformers = pytest.importorskip("transformers")
    model = transformers.Gemma3nForConditionalGeneration(zoo.tiny_config("gemma3n")).eval()
    ran = set()
    for part in ("vision_tower", "audio_tower", "language_model"):
        model.model.get_submodule(part).register_forward_pre_hook(lambda module, args, part=part: ran.add(part))
    with torch.no_grad():
        for sample in transformers_samples(model):
            sample.run(model)
    assert ran == {"vision_tower", "audio_tower", "language_model"}


def test_zoo_builds_the_same_weights_twice_and_none_is_degenerate():
    first, second = zoo.build("llama"), zoo.build("llama")
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.std() > 0.01, name


def test_zoo_keeps_every_kind_of_layer():
    kinds = zoo.tiny_config("gemma3_text").layer_types
    assert set(kinds) == {"sliding_attention", "full_attention"}


class Strange(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, flavour):
        return flavour


def test_an_argument_without_a_rule_is_named():
    assert "flavour" in inspect.signature(Strange.forward).parameters
    with pytest.raises(ConfigurationError, match=r"'flavour' of Strange\.forward"):
        transformers_samples(Strange(SimpleNamespace(model_type="strange")))


def test_a_model_without_configuration_is_refused():
    with pytest.raises(ConfigurationError, match="Strange has no `config`"):
        transformers_samples(Strange(None))
