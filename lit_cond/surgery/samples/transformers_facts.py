"""What a transformers model says of itself: its configurations by modality, sizes, vocabulary, first layers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Call", "Facts"]

MODALITIES: dict[str, re.Pattern[str]] = {
    "vision": re.compile(r"vision|image|visual|backbone|vit\b|video"),
    "audio": re.compile(r"audio|speech|acoustic|semantic|codec|encoder"),
    "text": re.compile(r"text|llm|language|decoder|question_encoder"),
}
CROSS_KEY = re.compile(r"(encoder_attn|crossattention|cross_attn|EncDecAttention)\.(\w+\.)*(k_proj|key|k|c_attn)$")
TOKEN_ID = re.compile(r"(_token_ids?|_token_index|_token_idx|_patch_id|_start_id|_end_id)$")


class Facts:
    """Reads configuration and modules of a model; makes random tensors of its device and dtype.

    Args:
        model: The model; it has a `config`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.batch = 1 if self.kind("tvp") else 2  # its position tables are viewed as one image's
        self.length = 4 if self.kind("csm_depth_decoder_model") else 12  # one token for each codebook
        parameter = next((item for item in model.parameters() if item.is_floating_point()), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.dtype = torch.get_default_dtype() if parameter is None else parameter.dtype
        self.generator = torch.Generator().manual_seed(0)
        self.configs = list(_configurations(self.config, ""))

    def kind(self, *names: str) -> bool:
        """Whether the model is of one of the types, for the few rules that no argument name tells."""
        return getattr(self.config, "model_type", None) in names

    def get(self, modality: str, *names: str, default: Any = None) -> Any:
        """The first entry with one of the names that is not None: in the configurations of a modality, then in all."""
        pattern = MODALITIES[modality]
        ordered = sorted(self.configs, key=lambda item: not pattern.search(item[0]))
        if len(self.configs) > 1 and not any(pattern.search(path) for path, _ in self.configs):
            ordered = self.configs
        for _, config in ordered:
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def size(self, modality: str, *names: str, default: int) -> int:
        """Like `get`, as one number: the first of a list."""
        value = self.get(modality, *names, default=default)
        return int(value[0]) if isinstance(value, list | tuple) else int(value)

    def vocabulary(self) -> int:
        """The number of ids that every embedding table of tokens has."""
        sizes = [
            value
            for _, config in self.configs
            for name in ("vocab_size", "text_vocab_size", "tgt_vocab_size", "src_vocab_size", "encoder_vocab_size")
            if isinstance(value := getattr(config, name, None), int) and value > 0
        ]
        return min(sizes, default=30)

    def token_ids(self, *shape: int, high: int | None = None) -> Tensor:
        """Random ids that have no special meaning.

        Args:
            shape: Shape of the result.
            high: Exclusive upper bound; the vocabulary by default.
        """
        limit = min(self.vocabulary(), high or 1 << 30)
        special = {
            item
            for _, config in self.configs
            for name, value in vars(config).items()
            if TOKEN_ID.search(name)
            for item in (value if isinstance(value, list | tuple) else [value])
            if isinstance(item, int)
        }
        allowed = [index for index in range(min(limit, 4096)) if index not in special] or [0]
        picks = torch.randint(len(allowed), shape, generator=self.generator)
        return torch.tensor(allowed)[picks].to(self.device)

    def integers(self, *shape: int, high: int) -> Tensor:
        """Uniform integers in [0, high)."""
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator).to(self.device, self.dtype)

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Given numbers, on the device of the model."""
        return torch.tensor(values, device=self.device, dtype=dtype)

    def mask(self, *shape: int) -> Tensor:
        """All ones, as integers."""
        return torch.ones(shape, dtype=torch.long, device=self.device)

    def timm_size(self) -> tuple[int, int] | None:
        """Height and width that a timm model within insists on; small ones where it takes any, None without one."""
        for module in self.model.modules():
            if isinstance(getattr(module, "pretrained_cfg", None), Mapping):
                size = getattr(getattr(module, "patch_embed", None), "img_size", None)
                if size is not None:
                    return int(size[0]), int(size[1])
                return None if self.get("vision", "image_size") else (128, 128)
        return None

    def backbone(self) -> int:
        """Width of what a model that assists another takes from it; 0 for others."""
        layer = getattr(self.model, "pre_projection", None)
        return int(layer.in_features) if isinstance(layer, nn.Linear) else 0

    def cross_width(self) -> int | None:
        """Width of what the cross-attention of a decoder reads; None without any."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and CROSS_KEY.search(name):
                return module.in_features
        return None

    def first_layer(self, *kinds: type[nn.Module], within: str = "") -> nn.Module | None:
        """The first module of some kinds whose path matches a pattern."""
        for name, module in self.model.named_modules():
            if isinstance(module, kinds) and re.search(within, name):
                return module
        return None


@dataclass(frozen=True)
class Call:
    """One method that wants arguments.

    Args:
        facts: What the model says of itself.
        parameters: Parameters of the method by name.
        left_out: Those that are not passed.
        placeholders: How many tokens of each text stand for an image, and their id.
    """

    facts: Facts
    parameters: Mapping[str, inspect.Parameter]
    left_out: Set[str]
    placeholders: tuple[int, int] = (0, 0)

    def takes(self, *names: str) -> bool:
        """Whether one of the arguments is passed or could be."""
        return any(name in self.parameters and name not in self.left_out for name in names)

    def streams(self, name: str) -> int | None:
        """How many tokens stand at each place, for models of several streams of codes."""
        facts = self.facts
        if facts.kind("csm", "moshi_depth", "higgs_audio_v2_tokens"):
            return facts.size("text", "num_codebooks", default=4)
        if facts.kind("kyutai_speech_to_text"):
            return facts.size("text", "num_codebooks", default=4) + 1
        if facts.kind("dia") and name == "decoder_input_ids":
            return facts.size("text", "num_channels", default=9)
        return None


def _configurations(config: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """A configuration and those within it, with their paths."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return
    seen.add(id(config))
    yield path, config
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configurations(value, f"{path}.{name}", seen)
