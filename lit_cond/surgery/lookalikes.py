"""Modules whose names or children promise attention, and that compute no softmax of products of queries and keys."""

from __future__ import annotations

import re

from torch import nn

from lit_cond.surgery.module_facts import class_path

__all__ = ["CLASSES", "LOOKALIKES", "not_attention"]

# Pattern of the class name, searched for anywhere in it; what such a module is.
LOOKALIKES: tuple[tuple[str, str], ...] = (
    (r"Mamba\w*Mixer$|MambaLayer$|BambaMixer|FalconH1Mixer", "a state space layer: a scan, no softmax"),
    (r"DeltaNet$|DeltaAttention$", "a delta-rule layer: a recurrent state, no softmax"),
    (
        r"LightningAttention$|(?<!Kimi)Linear\w*Attention$|LinearAttn$|LiteMLA|LambdaLayer",
        "linear attention: no softmax of products",
    ),
    (r"DeformableAttention$|MSDeformAttn", "deformable attention: its weights are made of queries alone"),
    (r"FactorAtt", "factorised attention: its softmax is of keys alone"),
    (r"AdditiveAttention$|AttentionGRUCell$", "additive attention: no products of queries and keys"),
    (
        r"SplitAttn$|SelectiveKernelAttn$|CoordAttn$|^(Light)?(Channel|Spatial)Attn$",
        "a gate: no products of queries and keys",
    ),
    (r"BatNonLocalAttn|BilinearAttnTransform", "a bilinear transform of rows and columns: no values"),
    (r"OutlookAttention", "outlook attention: its weights are projected from the tokens, without keys"),
    (r"LSTMLayer$|Rglru$", "a recurrent layer: no softmax of products"),
    (r"ShortConv$", "a convolution: no products of queries and keys"),
    (r"Indexer$", "a choice of tokens for another attention: it averages no values"),
    (r"Attention\w*(MLP|Mlp|FeedForward)$", "the feed-forward part of an attention block"),
)

# Single classes, by path.
CLASSES: dict[str, str] = {
    "timm.models.byobnet.SelfAttnBlock": "a block around an attention or lambda layer",
    "timm.models.nextvit.ConvAttention": "a grouped convolution: no products of queries and keys",
    "transformers.models.aria.modeling_aria.AriaCrossAttention": (
        "projections in front of an attention that projects once more"
    ),
    "transformers.models.autoformer.modeling_autoformer.AutoformerAttention": (
        "autocorrelation by Fourier transforms: its softmax is over delays"
    ),
    "transformers.models.mra.modeling_mra.MraSelfAttention": (
        "a multi-resolution approximation: no softmax of products"
    ),
    "transformers.models.reformer.modeling_reformer.LSHSelfAttention": (
        "attention by hashes, without a softmax of its own: queries are keys"
    ),
    "transformers.models.reformer.modeling_reformer.LocalSelfAttention": (
        "attention in chunks that normalizes by a log-sum-exp: no forward pass shows its softmax"
    ),
    "transformers.models.yoso.modeling_yoso.YosoSelfAttention": "an approximation by hashes: no softmax of products",
    "transformers.models.rwkv.modeling_rwkv.RwkvSelfAttention": "a recurrent layer: no softmax of products",
}


def not_attention(module: nn.Module) -> str | None:
    """Return what a module is that looks like attention and is none, None for all others."""
    listed = CLASSES.get(class_path(module))
    if listed is not None:
        return listed
    name = type(module).__name__
    return next((reason for pattern, reason in LOOKALIKES if re.search(pattern, name)), None)
