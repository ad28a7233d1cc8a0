"""Where embedded tokens enter, by hand: read from the sources of each library (versions of `docs/conformance.md`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from lit_cond.surgery.samples import Sample
from scripts.model_zoo import ZooModel
from scripts.token_site_check import Reference, Verdict

__all__ = ["Case", "cases"]

R = Reference


@dataclass(frozen=True)
class Case:
    """A model and the places chosen by hand.

    Args:
        name: Library and name of the model.
        load: Returns the entry of the zoo; None where the library is not installed.
        reference: The places, one for each tower.
    """

    name: str
    load: Callable[[], ZooModel | None]
    reference: Sequence[Reference]

    def check(self, checker: Callable[[nn.Module, Sequence[Sample], Sequence[Reference]], Verdict]) -> Verdict:
        """Build the model and check it."""
        entry = self.load()
        if entry is None:
            return Verdict(self.name, "absent", "the library or the model is not there")
        model = entry.build().eval()
        samples = entry.samples(model)
        try:
            with torch.no_grad():
                for sample in samples:
                    sample.run(model)
        except Exception as error:  # whatever a foreign forward raises
            return Verdict(self.name, "no input", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return checker(model, samples, self.reference)


def _output(name: str, **settings: Any) -> tuple[Reference, ...]:
    return (Reference(name, **settings),)


TRANSFORMERS: dict[str, tuple[Reference, ...]] = {
    "bert": _output("embeddings"),
    "roberta": _output("embeddings"),
    "albert": _output("encoder.embedding_hidden_mapping_in"),
    "deberta": _output("embeddings"),
    "deberta-v2": _output("embeddings"),
    "distilbert": _output("embeddings"),
    "modernbert": _output("embeddings"),
    "nystromformer": _output("embeddings"),
    "xlnet": (R("layer.0", 0, layout="nbc"),),  # what it keeps as `mems` are the tokens before
    "gpt2": _output("drop"),
    "gptj": _output("drop"),
    "gpt_neo": _output("drop"),
    "gpt_neox": _output("emb_dropout"),
    "falcon": _output("word_embeddings"),
    "mpt": _output("wte"),
    "bloom": _output("word_embeddings_layernorm"),
    "opt": (R("decoder.layers.0", 0),),
    "llama": _output("embed_tokens"),
    "mistral": _output("embed_tokens"),
    "mixtral": _output("embed_tokens"),
    "qwen3": _output("embed_tokens"),
    "deepseek_v3": _output("embed_tokens"),
    "deepseek_v4": (R("layers.0", 0, layout="bhwc"),),  # four copies of each token (hyper-connections)
    "t5": (R("encoder.dropout"), R("decoder.dropout")),
    "bart": (R("encoder.layernorm_embedding"), R("decoder.layernorm_embedding")),
    "whisper": (R("encoder.layers.0", 0), R("decoder.layers.0", 0)),
    "wav2vec2": _output("encoder.layer_norm"),
    "clip": (R("text_model.embeddings"), R("vision_model.pre_layrnorm", prefix=1)),
    "siglip": (R("text_model.embeddings"), R("vision_model.embeddings")),
    "vit": _output("embeddings", prefix=1),
    "deit": _output("embeddings", prefix=2),
    "beit": _output("embeddings", prefix=1),
    "dinov2": _output("embeddings", prefix=1),
    "dinov2_with_registers": _output("embeddings", prefix=5),
    "vit_mae": (R("embeddings", item=0, prefix=1),),
    "swin": _output("embeddings", item=0),
    "segformer": (R("stages.0.blocks.0", 0),),
    "detr": (R("encoder.layers.0", 0),),  # object queries are parameters
    "llava": (R("language_model.embed_tokens"), R("vision_tower.pre_layrnorm", prefix=1)),
    "qwen2_vl": (R("language_model.embed_tokens"), R("visual.patch_embed", layout="nc", sequences=2)),
    "jamba": (R("layers.0"),),
    "perceiver": (),  # latents are parameters
}

TIMM: dict[str, tuple[Reference, ...]] = {
    "vit_tiny_patch16_224": _output("norm_pre", prefix=1),
    "vit_small_patch14_reg4_dinov2": _output("norm_pre", prefix=5),
    "swin_tiny_patch4_window7_224": _output("patch_embed", layout="bhwc"),
    "swinv2_tiny_window8_256": _output("patch_embed", layout="bhwc"),
    "xcit_tiny_12_p16_224": _output("pos_drop"),
    "cait_xxs24_224": _output("pos_drop"),
    "davit_tiny": _output("stem", layout="bchw"),
    "mvitv2_tiny": (R("patch_embed", item=0),),
    "mvitv2_small_cls": (R("stages.0.blocks.0", 0, prefix=1),),
    "levit_128s": _output("stem", layout="bchw"),
    "mobilevit_xxs": (R("stages.2.1.transformer.0", 0),),
    "beit_base_patch16_224": (R("pos_drop", prefix=1),),
    "crossvit_9_240": (R("blocks.0.blocks.0.0", 0, prefix=1), R("blocks.0.blocks.1.0", 0, prefix=1)),
    "coatnet_0_224": (R("stages.2.blocks.0", 0, layout="bchw"),),  # its shortcut is a convolution: rule E2
    "hiera_base_abswin_256": (R("blocks.0", 0),),
    "samvit_base_patch16_224": (R("blocks.0", 0, layout="bhwc"),),
}

TORCHVISION: dict[str, tuple[Reference, ...]] = {
    "vit_b_16": _output("encoder.dropout", prefix=1),
    "swin_t": _output("features.0", layout="bhwc"),
    "swin3d_t": _output("pos_drop", layout="bthwc"),
    "maxvit_t": _output("blocks.0.layers.0.layers.MBconv", layout="bchw"),
    "mvit_v1_b": _output("pos_encoding", prefix=1),
    "mvit_v2_s": _output("pos_encoding", prefix=1),  # the shortcut of block 0 projects: rule E2
}

DETECTRON2: dict[str, tuple[Reference, ...]] = {
    "vit": (R("blocks.0", 0, layout="bhwc"),),
    "swin": _output("pos_drop"),
}


@cache
def _zoo(source: str) -> dict[str, ZooModel]:
    try:
        module = importlib.import_module(f"scripts.model_zoo.{source}_models")
        if not getattr(module, "available", lambda: True)():
            return {}
    except ModuleNotFoundError:
        return {}
    make = getattr(module, f"{source}_models", None) or module.models
    return {entry.name: entry for entry in make()}


def _entry(source: str, name: str) -> ZooModel | None:
    return _zoo(source).get(name)


def _given(entry: ZooModel) -> ZooModel:
    return entry


class Embedded(nn.Module):
    """`nn.TransformerEncoder` behind a linear embedding, batch first or not."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return encoded tokens."""
        encoded: torch.Tensor = self.encoder(self.embed(x))
        return encoded


class EncoderDecoder(nn.Module):
    """`nn.Transformer` behind two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 16), nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return decoded tokens."""
        decoded: torch.Tensor = self.transformer(self.source(source), self.target(target))
        return decoded


class OwnQueries(nn.Module):
    """Blocks whose tokens are parameters and that read the input by cross attention only."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, 16))
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the queries have read."""
        read: torch.Tensor = self.decoder(self.queries.expand(len(x), -1, -1), x)
        return read


def _torch(make: Callable[[], nn.Module], samples: Callable[[], list[Sample]]) -> ZooModel:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().eval()

    return ZooModel("", "torch", build, lambda model: samples())


def _normal(*shape: int) -> list[Sample]:
    return [Sample((torch.randn(*shape, generator=torch.Generator().manual_seed(0)),))]


def _ids() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [Sample(tuple(torch.randint(0, 20, (2, length), generator=generator) for length in (7, 5)))]


def cases() -> list[Case]:
    """Return all models."""
    tables = {"transformers": TRANSFORMERS, "timm": TIMM, "torchvision": TORCHVISION, "detectron2": DETECTRON2}
    found = [
        Case(f"{source}/{name}", partial(_entry, source, name), reference)
        for source, table in tables.items()
        for name, reference in table.items()
    ]
    own = {
        "encoder": (_torch(partial(Embedded, True), partial(_normal, 3, 7, 6)), _output("embed")),
        "encoder:tokens_first": (
            _torch(partial(Embedded, False), partial(_normal, 7, 3, 6)),
            _output("embed", layout="nbc"),
        ),
        "encoder_decoder": (_torch(EncoderDecoder, _ids), (R("source"), R("target"))),
        "own_queries": (_torch(OwnQueries, partial(_normal, 3, 7, 16)), ()),
    }
    return [*found, *(Case(f"torch/{name}", partial(_given, entry), where) for name, (entry, where) in own.items())]
