"""Rules for the arguments of transformers models that carry sound, time series, actions and other signals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_cond.surgery.samples.transformers_facts import Call
from lit_cond.surgery.samples.transformers_inputs import CONTEXT, RULES, argument, patches

__all__ = ["RULES"]

SAMPLES = 7680  # of a waveform, in front of a codec
MELS = (
    "num_chroma",
    "audio_embed_dim",
    "num_mel_bins",
    "input_feat_per_channel",
    "input_feat_size",
    "feature_projection_input_dim",
    "input_dim",
)


# ---- sound


def features_shape(call: Call) -> tuple[int, int, bool]:
    """Frames, features of each, and whether the features come first."""
    facts = call.facts
    bins = facts.size("audio", *MELS, "n_mel_bins", "feature_size", default=128)
    bins *= facts.size("audio", "num_stacked_frames", default=1)
    window = 2 * facts.size("audio", "n_window", default=16)
    frames = min(2 * facts.size("audio", "max_source_positions", default=64), 3000)
    frames = max(window, frames // window * window)
    if call.takes("input_values"):  # one frame for each step of the waveform
        frames = SAMPLES // facts.size("audio", "hop_length", default=320)
    within = r"audio|speech|encoder|subsampl|conv|feature|^[^.]+$"
    first = facts.first_layer(nn.Conv1d, nn.Conv2d, nn.Linear, within=within)
    if isinstance(first, nn.Linear) and facts.kind("granite_speech5_encoder", "granite_speech5_ctc"):
        bins = first.in_features  # frames are stacked before they enter
    channels_first = isinstance(first, nn.Conv1d) and first.in_channels == bins
    channels_first |= call.takes("feature_attention_mask") or facts.kind("qwen3_asr", "qwen3_asr_encoder")
    return frames, bins, channels_first and facts.get("audio", "input_feat_per_channel") is None


@argument(
    "input_features",
    "audio_mel",
    optional=lambda call: not (call.takes("input_values") or call.facts.kind("pop2piano")),
)
def input_features(call: Call) -> Tensor:
    """Mel spectrogram, channels before time where the first layer is a convolution over time."""
    facts = call.facts
    if facts.get("audio", "spec_size") is not None:  # swin over the spectrogram
        return facts.normal(
            facts.batch, 1, 4 * facts.config.audio_config.spec_size, facts.size("audio", *MELS, default=64)
        )
    frames, bins, channels_first = features_shape(call)
    return facts.normal(facts.batch, bins, frames) if channels_first else facts.normal(facts.batch, frames, bins)


@argument(
    "input_features_mask",
    "audio_mel_mask",
    "feature_attention_mask",
    optional=lambda call: call.takes("input_features") and "input_values" not in call.parameters,
)
def input_features_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, features_shape(call)[0]).bool()


@argument("input_values", optional=lambda call: not call.facts.kind("musicgen", "vibevoice"))  # codes or text instead
def input_values(call: Call) -> Tensor:
    """A waveform, (batch, samples) or with a channel axis for codecs; a spectrogram where the model is made for one."""
    facts = call.facts
    if facts.get("audio", "frequency_stride") is not None:
        return facts.normal(
            facts.batch, facts.size("audio", "max_length", default=64), facts.size("audio", *MELS, default=64)
        )
    if call.takes("decoder_input_values"):
        return facts.normal(facts.batch, facts.length, facts.size("text", "hidden_size", default=64))
    if call.takes("padding_mask", "n_quantizers", "audio_codes", "sample"):
        return facts.normal(facts.batch, facts.size("audio", "audio_channels", default=1), SAMPLES)
    return facts.normal(facts.batch, 3840)


@argument("decoder_input_values")
def decoder_input_values(call: Call) -> Tensor:
    facts = call.facts
    return facts.normal(facts.batch, 8, facts.size("text", "hidden_size", default=64))


@argument("padding_mask", optional=lambda call: call.takes("acoustic_loss_mask"))
def padding_mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, SAMPLES).bool()


@argument("audio_input_ids")
def audio_input_ids(call: Call) -> Tensor:
    """Discrete frames: (batch, frames, streams)."""
    facts = call.facts
    streams = facts.size("audio", "n_mel_bins", "num_codebooks", default=8)
    return facts.integers(
        facts.batch, 8, streams, high=facts.size("audio", "mel_vocab_size", "codebook_size", default=16)
    )


@argument("codes", optional=False)
def codes(call: Call) -> Tensor:
    """Codes of sound, (batch, quantizers, frames)."""
    facts = call.facts
    size = facts.size("audio", "codebook_size", default=16)
    return facts.integers(facts.batch, facts.size("audio", "num_quantizers", default=8), 8, high=size)


@argument("latents")
def latents(call: Call) -> Tensor:
    facts = call.facts
    return facts.normal(facts.batch, facts.size("audio", "hidden_size", default=64), 16)


@argument("hidden_states")
def hidden_states(call: Call) -> Tensor:
    if call.takes("grid_thw"):
        return patches(call)
    facts = call.facts
    if facts.kind("phi4_multimodal_audio"):
        return facts.normal(facts.batch, 64, facts.size("audio", "input_size", default=80))
    return facts.normal(facts.batch, facts.size("text", "hidden_size", default=64), 16)


@argument("mask", optional=False)
def mask(call: Call) -> Tensor:
    return call.facts.mask(call.facts.batch, 64).bool()


@argument("lang_ids", optional=lambda call: call.facts.get("text", "languages") is not None)
def lang_ids(call: Call) -> Tensor:
    return call.facts.integers(call.facts.batch, high=1)


# ---- time series


def history(call: Call) -> int:
    """Steps of the past that a series model reads, lags included."""
    facts = call.facts
    lags = facts.get("text", "lags_sequence") or [0]
    length = facts.get("text", "context_length") or facts.get("text", "prediction_length") or 32
    return int(length) + int(max(lags))


@argument("past_values")
def past_values(call: Call) -> Tensor:
    facts = call.facts
    if call.takes("past_values_padding"):
        return facts.normal(facts.batch, 2 * facts.size("text", "patch_length", default=32))
    channels = facts.get("text", "num_input_channels")
    return facts.normal(facts.batch, history(call), *([] if channels is None else [channels]))


@argument("past_values_padding")
def past_values_padding(call: Call) -> Tensor:
    return torch.zeros_like(past_values(call), dtype=torch.long)


@argument("freq")
def freq(call: Call) -> Tensor:
    return call.facts.integers(call.facts.batch, 1, high=3)


@argument("past_time_features")
def past_time_features(call: Call) -> Tensor:
    facts = call.facts
    return facts.normal(facts.batch, history(call), facts.size("text", "num_time_features", default=0))


@argument("past_observed_mask", "observed_mask", optional=False)
def past_observed_mask(call: Call) -> Tensor:
    return torch.ones_like(past_values(call))


@argument("future_values", optional=lambda call: call.takes("future_time_features"))
def future_values(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, call.facts.size("text", "prediction_length", default=8))


@argument("future_time_features", optional=lambda call: call.takes("past_time_features"))
def future_time_features(call: Call) -> Tensor:
    facts = call.facts
    length = facts.size("text", "prediction_length", default=8)
    return facts.normal(facts.batch, length, facts.size("text", "num_time_features", default=0))


# ---- others


@argument("states")
def states(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, 6, call.facts.size("text", "state_dim", default=4))


@argument("actions")
def actions(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, 6, call.facts.size("text", "act_dim", default=4))


@argument("rewards", "returns_to_go")
def rewards(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, 6, 1)


@argument("timesteps")
def timesteps(call: Call) -> Tensor:
    return torch.arange(6, device=call.facts.device).expand(call.facts.batch, -1)


@argument("action_embeds")
def action_embeds(call: Call) -> Tensor:
    facts = call.facts
    return facts.normal(facts.batch, 6, facts.config.dit_config.hidden_size)


@argument("inputs")
def inputs(call: Call) -> Any:
    """What a general encoder attends to; left out where it is another name for a known argument."""
    facts = call.facts
    width = facts.get("text", "d_model")
    return None if width is None or call.takes("input_values", "input_ids") else facts.normal(facts.batch, 16, width)


@argument("query_embeds")
def query_embeds(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, 4, call.facts.size("text", "hidden_size", default=64))


@argument("context_hidden_states", optional=False)
def context_hidden_states(call: Call) -> Tensor:
    """States of several layers of the model that is assisted, side by side."""
    facts = call.facts
    layers = facts.get("text", "target_layer_ids", default=[0])
    return facts.normal(facts.batch, CONTEXT, len(layers) * facts.size("text", "hidden_size", default=64))


@argument("visual_feats")
def visual_feats(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, 5, call.facts.size("vision", "visual_feat_dim", default=32))


@argument("visual_pos")
def visual_pos(call: Call) -> Tensor:
    return call.facts.uniform(call.facts.batch, 5, call.facts.size("vision", "visual_pos_dim", default=4))


@argument("visual_embeds")
def visual_embeds(call: Call) -> Tensor:
    return call.facts.normal(call.facts.batch, 5, call.facts.size("vision", "visual_embedding_dim", default=32))


@argument("thinker_reply_part")
def thinker_reply_part(call: Call) -> Tensor:
    """What the text model hands to the model that speaks."""
    facts = call.facts
    return facts.normal(facts.batch, facts.length, facts.size("text", "embedding_size", "hidden_size", default=64))


@argument("shared_kv_states", optional=lambda call: call.facts.kind("gemma4_assistant", "gemma4_unified_assistant"))
def shared_kv_states(call: Call) -> dict[str, tuple[Tensor, Tensor]]:
    """Keys and values of the model that is assisted, for each type of layer."""
    facts = call.facts
    text = facts.config.text_config
    result = {}
    for layer, kind in zip(text.per_layer_config, text.layer_types, strict=True):
        shape = (facts.batch, layer.num_key_value_heads, facts.length, layer.head_dim)
        result[kind] = (facts.normal(*shape), facts.normal(*shape))
    return result


@argument("marks")
def marks(call: Call) -> Tensor:
    """Positions that a decision is read from: (batch, questions)."""
    return call.facts.tensor([[4, 8]] * call.facts.batch)


@argument("num_options", "question_type_ids")
def num_options(call: Call) -> Tensor:
    return call.facts.tensor([[1, 1]] * call.facts.batch)


@argument("chunk_sample_lengths")
def chunk_sample_lengths(call: Call) -> Tensor:
    return call.facts.tensor([features_shape(call)[0]] * call.facts.batch)
