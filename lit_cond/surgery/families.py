"""The registry of attention layouts: how each family of modules stores its query, key and value weights.

A family is a function `(module) -> AttentionSite | None`. It answers None for a module that is not of its kind and
raises `UnknownAttentionError` for one that is, in a form it does not understand. Fused weights are never cut into
thirds on
suspicion: a class is listed in `FUSED` after its layout was checked, or declared by `register_fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lit_cond.errors import ConfigurationError, UnknownAttentionError
from lit_cond.surgery.sites import ROLES, AttentionSite, Kind, MatrixLayout, Role, RowSet, WeightView

__all__ = [
    "FAMILIES",
    "FUSED",
    "Family",
    "FusedLayout",
    "class_path",
    "describe",
    "register_family",
    "register_fused",
    "suspicion",
    "unknown_attention",
]

Family = Callable[[nn.Module], AttentionSite | None]

FAMILIES: dict[str, Family] = {}

SEPARATE_NAMES: tuple[tuple[str, str, str], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("Wq", "Wk", "Wv"),
    ("W_Q", "W_K", "W_V"),
    ("W_q", "W_k", "W_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
)

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "groups")
_KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "d_head", "dim_head")


@dataclass(frozen=True)
class FusedLayout:
    """How the rows of one fused weight are divided.

    Args:
        weight: Name of the child that owns the fused weight.
        order: Roles in the order of their rows.
        per_head: Whether rows are grouped by head first, (heads, roles, head width), and not (roles, heads, width).
        kind: What the softmax runs over.
        causal: Whether a position sees earlier ones only; what the module itself says counts as well.
    """

    weight: str = "qkv"
    order: tuple[Role, ...] = ROLES
    per_head: bool = False
    kind: Kind = "self"
    causal: bool = False


_BLOCK = FusedLayout()
_CHANNEL = FusedLayout(kind="channel")

# Checked by tests/surgery/test_layouts.py through gradients of the module's own forward.
FUSED: dict[str, FusedLayout] = {
    "timm.layers.attention.Attention": _BLOCK,
    "timm.layers.attention.AttentionRope": _BLOCK,
    "timm.models.beit.Attention": _BLOCK,
    "timm.models.cait.TalkingHeadAttn": _BLOCK,
    "timm.models.convit.MHSA": _BLOCK,
    "timm.models.davit.WindowAttention": _BLOCK,
    # The names in davit's first channel attention lie: it computes softmax(k^T v) q.
    "timm.models.davit.ChannelAttention": FusedLayout(order=("value", "query", "key"), kind="channel"),
    "timm.models.davit.ChannelAttentionV2": _CHANNEL,
    "timm.models.eva.EvaAttention": _BLOCK,
    "timm.models.hiera.MaskUnitAttention": _BLOCK,
    "timm.models.mvitv2.MultiScaleAttention": _BLOCK,
    "timm.models.swin_transformer.WindowAttention": _BLOCK,
    "timm.models.swin_transformer_v2.WindowAttention": _BLOCK,
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": _BLOCK,
    "timm.models.twins.LocallyGroupedAttn": _BLOCK,
    "timm.models.vision_transformer_relpos.RelPosAttention": _BLOCK,
    "timm.models.vision_transformer_sam.Attention": _BLOCK,
    "timm.models.xcit.XCA": _CHANNEL,
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": FusedLayout(weight="to_qkv"),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _BLOCK,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": _BLOCK,
    "torchvision.models.video.mvit.MultiscaleAttention": _BLOCK,
}

_FUSED_NAMES = (
    "qkv",
    "to_qkv",
    "Wqkv",
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "in_proj",
    "in_proj_qkv",
    "kv",
    "qk",
)


def class_path(module: nn.Module) -> str:
    """Return `package.module.Class` of a module's class."""
    cls = type(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def register_family(name: str) -> Callable[[Family], Family]:
    """Return a decorator that adds a family to the registry; the newest is asked first.

    Args:
        name: Unique name of the family.

    Raises:
        ConfigurationError: If the name is taken.
    """

    def add(family: Family) -> Family:
        if name in FAMILIES:
            raise ConfigurationError(f"the attention family '{name}' is registered already; choose another name")
        FAMILIES[name] = family
        return family

    return add


def register_fused(
    cls: type[nn.Module],
    weight: str = "qkv",
    order: Sequence[Role] = ROLES,
    *,
    per_head: bool = False,
    kind: Kind = "self",
    causal: bool = False,
) -> None:
    """Declare how a class of your own stores its fused query, key and value weight.

    Args:
        cls: The attention class.
        weight: Name of the child that owns the weight.
        order: Roles in the order of their rows.
        per_head: Whether the rows are grouped by head first; the module must then say how many heads it has.
        kind: What the softmax runs over.
        causal: Whether a position sees earlier ones only.

    Raises:
        ConfigurationError: If `order` is not a permutation of query, key and value.

    Example::

        register_fused(MyAttention, "qkv")  # rows: all queries, all keys, all values
    """
    if sorted(order) != sorted(ROLES):
        raise ConfigurationError(f"`order` must hold query, key and value once each, got {list(order)}")
    FUSED[f"{cls.__module__}.{cls.__qualname__}"] = FusedLayout(weight, tuple(order), per_head, kind, causal)


def _first_int(module: nn.Module, names: Sequence[str]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _is_causal(module: nn.Module) -> bool:
    """Whether a module shows that positions see earlier ones only: by a flag, its name or a triangular buffer."""
    if any(getattr(module, name, False) is True for name in ("is_causal", "causal")):
        return True
    if "causal" in type(module).__name__.lower():
        return True
    for _, buffer in module.named_buffers(recurse=False):
        square = buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1 and not buffer.is_meta
        if square and bool((buffer.triu(1) == 0).all()) and bool((buffer.tril() != 0).any()):
            return True
        if square and buffer.dtype == torch.bool and torch.equal(buffer, torch.ones_like(buffer).triu(1)):
            return True
    return False


def _view(owner: nn.Module, rows: RowSet, name: str = "weight", *, transposed: bool = False) -> WeightView:
    return WeightView(owner, name, MatrixLayout(rows, transposed))


def _single(views: Mapping[Role, WeightView]) -> dict[Role, tuple[WeightView, ...]]:
    return {role: (view,) for role, view in views.items()}


def _shape(owner: nn.Module) -> torch.Size:
    weight = owner.weight
    return weight.shape if isinstance(weight, torch.Tensor) else torch.Size()


def unknown_attention(module: nn.Module, why: str) -> UnknownAttentionError:
    """Return the error for a module that looks like attention and is not understood."""
    return UnknownAttentionError(
        f"{class_path(module)} looks like attention, but {why}; describe it with lit_cond.surgery.register_fused / "
        "register_family, or leave it out with `exclude`"
    )


@register_family("torch.nn.MultiheadAttention")
def _multihead_attention(module: nn.Module) -> AttentionSite | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    width = module.embed_dim
    if module.in_proj_weight is not None:
        views = {role: _view(module, RowSet.span(i * width, width), "in_proj_weight") for i, role in enumerate(ROLES)}
    else:
        views = {role: _view(module, RowSet.span(0, width), f"{role[0]}_proj_weight") for role in ROLES}
    heads, batch_first = module.num_heads, bool(module.batch_first)
    return AttentionSite("", module, _single(views), heads, heads, batch_first=batch_first)


@register_family("transformers Conv1D")
def _conv1d(module: nn.Module) -> AttentionSite | None:
    fused = getattr(module, "c_attn", None)
    if fused is None or class_path(fused) != "transformers.pytorch_utils.Conv1D":
        return None
    heads = _first_int(module, _HEAD_COUNTS)
    outputs = _shape(fused)[1]
    separate_query = getattr(module, "q_attn", None)
    roles: tuple[Role, ...] = ROLES if separate_query is None else ("key", "value")
    if outputs % len(roles):
        raise unknown_attention(module, f"c_attn has {outputs} outputs for {len(roles)} roles")
    width = outputs // len(roles)
    views = {role: _view(fused, RowSet.span(i * width, width), transposed=True) for i, role in enumerate(roles)}
    if separate_query is not None:
        views["query"] = _view(separate_query, RowSet.span(0, _shape(separate_query)[1]), transposed=True)
    kind: Kind = "self" if separate_query is None else "cross"
    return AttentionSite("", module, _single(views), heads, heads, kind, causal=kind == "self")


@register_family("fused")
def _fused(module: nn.Module) -> AttentionSite | None:
    layout = FUSED.get(class_path(module))
    owner = getattr(module, layout.weight, None) if layout else None
    if layout is None or not isinstance(owner, (nn.Linear, nn.Conv2d)):
        return None
    outputs, heads = owner.weight.shape[0], _first_int(module, _HEAD_COUNTS)
    if outputs % 3 or (layout.per_head and (heads is None or outputs % (3 * heads))):
        raise unknown_attention(
            module, f"its '{layout.weight}' has {outputs} rows, not three equal parts of {heads} heads"
        )
    width = outputs // 3
    views = {}
    for i, role in enumerate(layout.order):
        if layout.per_head and heads:
            rows = RowSet(i * width // heads, width // heads, outputs // heads, heads)
        else:
            rows = RowSet.span(i * width, width)
        views[role] = _view(owner, rows)
    return AttentionSite("", module, _single(views), heads, heads, layout.kind, layout.causal or _is_causal(module))


@register_family("separate")
def _separate(module: nn.Module) -> AttentionSite | None:
    children = dict(module.named_children())
    names = next((t for t in SEPARATE_NAMES if all(isinstance(children.get(n), nn.Linear) for n in t)), None)
    if names is None:
        return None
    q_rows, k_rows, v_rows = (_shape(children[n])[0] for n in names)
    heads, head_width = _first_int(module, _HEAD_COUNTS), _first_int(module, _HEAD_WIDTHS)
    if head_width is None and heads is not None and q_rows % heads == 0:
        head_width = q_rows // heads
    if heads is not None and head_width is not None and q_rows != heads * head_width:
        raise unknown_attention(
            module,
            f"'{names[0]}' has {q_rows} rows where {heads} heads of {head_width} need {heads * head_width}",
        )
    kv_heads = _first_int(module, _KV_HEAD_COUNTS)
    if kv_heads is None and head_width is not None and k_rows % head_width == 0:
        kv_heads = k_rows // head_width
    views = {
        role: _view(children[n], RowSet.span(0, rows))
        for role, n, rows in zip(ROLES, names, (q_rows, k_rows, v_rows), strict=True)
    }
    crossed = "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False) is True
    kind: Kind = "cross" if crossed else "self"
    return AttentionSite("", module, _single(views), heads, kv_heads, kind, _is_causal(module))


def describe(module: nn.Module) -> AttentionSite | None:
    """Return the site of one module, with an empty name, or None if it is no attention layer.

    Raises:
        UnknownAttentionError: If the module is attention in a form that no family understands.
    """
    for family in reversed(FAMILIES.values()):
        site = family(module)
        if site is not None:
            return site
    return None


def suspicion(module: nn.Module) -> str | None:
    """Return why a module that no family knows looks like attention all the same, or None."""
    weighty = [n for n, child in module.named_children() if any(p.ndim >= 2 for p in child.parameters())]
    fused = [name for name in weighty if name in _FUSED_NAMES]
    if fused:
        return f"the row layout of its fused '{fused[0]}' is not known"
    cls = type(module).__name__.lower()
    if ("attention" in cls or "attn" in cls) and len(weighty) >= 2:
        return f"the roles of its weights {weighty} are not known"
    return None
