"""Which class keeps its attention weights in which layout: timm, torchvision, detectron2.

Every line was checked by gradients of the forward pass of a model (scripts/model_zoo); a class that is not listed is
never guessed. Where a class has several layouts, the first that fits the module holds.
"""

from __future__ import annotations

from lit_cond.surgery.fused_layouts import FusedLayout

__all__ = ["VISION"]

_BLOCK = FusedLayout("qkv: q k v")
_CHANNEL = FusedLayout("qkv: q k v", kind="channel")
_PER_HEAD = FusedLayout("qkv: heads * (q k v)")
_SEPARATE = FusedLayout("q_proj: q; k_proj: k; v_proj: v")
_QUERY_PAIR = FusedLayout("q: q; kv: k v")
_PAIR_VALUE = FusedLayout("qk: q k; v: v")
_TO_QKV = FusedLayout("to_qkv: q k v")
_POINTWISE = FusedLayout("pwise: heads * (q k v)")
_NARROW_KEYS = "heads * (q=key_dim k=key_dim v=val_dim)"
_HEADS_FIRST = (
    FusedLayout("qkv: heads * (q k v)", when="head_first"),
    FusedLayout("qkv: q k v", when="not head_first"),
)

VISION: dict[str, tuple[FusedLayout, ...]] = {
    "timm.layers.attention.Attention": (_BLOCK,),
    "timm.layers.attention.AttentionRope": (_BLOCK, _SEPARATE),
    "timm.layers.attention2d.MultiQueryAttention2d": (FusedLayout("query.proj: q; key.proj: k; value.proj: v"),),
    "timm.layers.attention_pool.AttentionPoolLatent": (FusedLayout("q: q; kv: k v", kind="cross"),),
    "timm.layers.attention_pool2d.AttentionPool2d": (_BLOCK, FusedLayout("q: q; k: k; v: v")),
    "timm.layers.bottleneck_attn.BottleneckAttn": (FusedLayout("qkv: q=dim_out_qk k=dim_out_qk v=dim_out_v"),),
    # Two maps for each head of values.
    "timm.layers.diff_attention.DiffAttention": (FusedLayout("qkv: q k v", heads="2*heads", value_heads="heads"),),
    "timm.layers.halo_attn.HaloAttn": (FusedLayout("q: q; kv: heads * (k=dim_head_qk v=dim_head_v)"),),
    "timm.models.beit.Attention": (_BLOCK,),
    "timm.models.cait.ClassAttn": (FusedLayout("q: q; k: k; v: v"),),
    "timm.models.cait.TalkingHeadAttn": (_BLOCK,),
    "timm.models.convit.GPSA": (_PAIR_VALUE,),
    "timm.models.convit.MHSA": (_BLOCK,),
    "timm.models.cpubone.ConvAttention": (_POINTWISE,),
    "timm.models.crossvit.CrossAttention": (FusedLayout("wq: q; wk: k; wv: v", kind="self"),),
    "timm.models.csatv2.SpatialTransformerBlock": (FusedLayout("qkv: q k v", heads="1"),),
    # The names in davit's first channel attention lie: it computes softmax(k^T v) q.
    "timm.models.davit.ChannelAttention": (FusedLayout("qkv: v q k", kind="channel"),),
    "timm.models.davit.ChannelAttentionV2": (_CHANNEL,),
    "timm.models.davit.WindowAttention": (_BLOCK,),
    "timm.models.edgenext.CrossCovarianceAttn": (_CHANNEL,),
    "timm.models.efficientformer.Attention": (FusedLayout(f"qkv: {_NARROW_KEYS}"),),
    "timm.models.efficientformer_v2.Attention2d": (FusedLayout("q.conv: q; k.conv: k; v.conv: v"),),
    "timm.models.efficientformer_v2.Attention2dDownsample": (FusedLayout("q.proj.conv: q; k.conv: k; v.conv: v"),),
    # One attention after the other, each of one head with its own projection.
    "timm.models.efficientvit_msra.CascadedGroupAttention": (
        FusedLayout("qkvs.*.conv: q=key_dim k=key_dim v=val_dim", heads="1"),
    ),
    "timm.models.eva.EvaAttention": (_BLOCK, _SEPARATE),
    "timm.models.fastvit.Attention": (_BLOCK,),
    # In every other block `qkv` holds keys and values alone; the query is made once for the stage.
    "timm.models.gcvit.WindowAttentionGlobal": (
        FusedLayout("qkv: k=heads*head_dim v=heads*head_dim", when="use_global"),
        FusedLayout("qkv: q=heads*head_dim k=heads*head_dim v=heads*head_dim", when="not use_global"),
    ),
    "timm.models.gemma4_vit.Gemma4Attention": (
        FusedLayout("q_proj.linear: q; k_proj.linear: k; v_proj.linear: v"),
        _SEPARATE,
    ),
    "timm.models.hiera.MaskUnitAttention": (_BLOCK,),
    "timm.models.hieradet_sam2.MultiScaleAttention": (_BLOCK,),
    "timm.models.iformer.SHMA": (FusedLayout("q.c: q; k.c: k; v_gate.c: v gate", heads="1"),),
    "timm.models.levit.Attention": (FusedLayout(f"qkv.linear: {_NARROW_KEYS}"),),
    "timm.models.levit.AttentionDownsample": (FusedLayout("q.ln.linear: q; kv.linear: heads * (k=key_dim v=val_dim)"),),
    "timm.models.lowformer.ConvAttention": (_POINTWISE,),
    "timm.models.maxxvit.Attention2d": _HEADS_FIRST,
    "timm.models.maxxvit.AttentionCl": _HEADS_FIRST,
    "timm.models.metaformer.Attention": (_BLOCK,),
    "timm.models.mvitv2.MultiScaleAttention": (_BLOCK,),
    "timm.models.nest.Attention": (_BLOCK,),
    "timm.models.nextvit.EfficientAttention": (FusedLayout("q: q; k: k; v: v"),),
    "timm.models.pvt_v2.Attention": (_QUERY_PAIR,),
    "timm.models.shvit.SHSA": (FusedLayout("qkv.c: q=qk_dim k=qk_dim v=pdim", heads="1"),),
    "timm.models.swin_transformer.WindowAttention": (_BLOCK,),
    "timm.models.swin_transformer_v2.WindowAttention": (_BLOCK,),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": (_BLOCK,),
    "timm.models.tiny_vit.Attention": (FusedLayout(f"qkv: {_NARROW_KEYS}"),),
    "timm.models.tnt.Attention": (_PAIR_VALUE,),
    "timm.models.twins.GlobalSubSampleAttn": (_QUERY_PAIR,),
    "timm.models.twins.LocallyGroupedAttn": (_BLOCK,),
    "timm.models.visformer.Attention": (_BLOCK,),
    "timm.models.vision_transformer.DiffParallelScalingBlock": (
        FusedLayout(
            "in_proj: mlp q=2*heads*head_dim k=2*heads*head_dim v=2*heads*head_dim",
            heads="2*heads",
            value_heads="heads",
        ),
    ),
    "timm.models.vision_transformer.ParallelScalingBlock": (
        FusedLayout("in_proj: mlp q=heads*head_dim k=heads*head_dim v=heads*head_dim"),
    ),
    "timm.models.vision_transformer_relpos.RelPosAttention": (_BLOCK,),
    "timm.models.vision_transformer_sam.Attention": (_BLOCK,),
    "timm.models.volo.Attention": (_BLOCK,),
    "timm.models.volo.ClassAttention": (_QUERY_PAIR,),
    "timm.models.xcit.XCA": (_CHANNEL,),
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": (_TO_QKV,),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": (_BLOCK,),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": (_BLOCK,),
    "torchvision.models.video.mvit.MultiscaleAttention": (_BLOCK,),
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d": (_BLOCK,),
    "detectron2.modeling.backbone.mvit.MultiScaleAttention": (_BLOCK,),
    "detectron2.modeling.backbone.swin.WindowAttention": (_BLOCK,),
    "detectron2.modeling.backbone.vit.Attention": (_BLOCK,),
}
