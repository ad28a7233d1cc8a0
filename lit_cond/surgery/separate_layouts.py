"""Attention with one projection for each role, known by the names of its children: whole matrices need no table."""

from __future__ import annotations

from torch import nn

from lit_cond.surgery.fused_layouts import FusedLayout, apply_layout, unknown_attention
from lit_cond.surgery.module_facts import COUNTS, first_int, kind_by_name, projection
from lit_cond.surgery.sites import ROLES, AttentionSite, MatrixLayout, RowSet, WeightView

__all__ = ["NAMES", "multihead_attention", "separate"]

NAMES: tuple[tuple[str, str, str], ...] = (
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
    ("linear_q", "linear_k", "linear_v"),
    ("q_head", "k_head", "v_head"),
    ("project_q", "project_k", "project_v"),
    ("projection_query", "projection_key", "projection_value"),
)


def separate(module: nn.Module) -> AttentionSite | None:
    """Return the site of a module with three projections under usual names.

    Raises:
        UnknownAttentionError: If the query has another number of rows than the heads of the module need: part of them
            is then something else.
    """
    children = dict(module.named_children())
    names = next((t for t in NAMES if all(projection(children.get(name)) for name in t)), None)
    if names is None:
        return None
    site = apply_layout(module, FusedLayout("; ".join(f"{n}: {role[0]}" for role, n in zip(ROLES, names, strict=True))))
    if site is None:
        return None
    rows = len(site.views["query"][0].layout.rows)
    heads, head_width = site.num_heads, first_int(module, COUNTS["head_dim"])
    if heads is not None and head_width is not None and rows != heads * head_width:
        raise unknown_attention(
            module, f"'{names[0]}' has {rows} rows where {heads} heads of {head_width} need {heads * head_width}"
        )
    return site


def multihead_attention(module: nn.Module) -> AttentionSite | None:
    """Return the site of PyTorch's own attention or a subclass of it."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    width = module.embed_dim
    if module.in_proj_weight is not None:
        places = [("in_proj_weight", RowSet.span(i * width, width)) for i in range(len(ROLES))]
    else:
        places = [(f"{role[0]}_proj_weight", RowSet.span(0, width)) for role in ROLES]
    views = {
        role: (WeightView(module, name, MatrixLayout(rows)),) for role, (name, rows) in zip(ROLES, places, strict=True)
    }
    heads = module.num_heads
    return AttentionSite("", module, views, heads, heads, kind_by_name(module), batch_first=bool(module.batch_first))
