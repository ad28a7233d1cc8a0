"""The registry of attention layouts: how each family of modules stores its query, key and value weights.

A family is a function `(module) -> AttentionSite | None`. It answers None for a module that is not of its kind and
raises `UnknownAttentionError` for one that is, in a form it does not understand. Fused weights are never cut into
thirds on suspicion: a class is listed in `FUSED` after its layout was checked, or declared by `register_fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lit_cond.errors import ConfigurationError
from lit_cond.surgery.fused_layouts import FusedLayout, apply_layout, unknown_attention
from lit_cond.surgery.fused_table import VISION
from lit_cond.surgery.fused_table_transformers import TRANSFORMERS
from lit_cond.surgery.lookalikes import not_attention
from lit_cond.surgery.module_facts import class_path
from lit_cond.surgery.separate_layouts import multihead_attention, separate
from lit_cond.surgery.sites import ROLES, AttentionSite, Kind, Role

__all__ = [
    "FAMILIES",
    "FUSED",
    "Family",
    "FusedLayout",
    "class_path",
    "describe",
    "not_attention",
    "register_family",
    "register_fused",
    "suspicion",
    "unknown_attention",
]

Family = Callable[[nn.Module], AttentionSite | None]

FAMILIES: dict[str, Family] = {}

# Layouts by class; where one has several, the first that fits a module holds.
FUSED: dict[str, tuple[FusedLayout, ...]] = {**VISION, **TRANSFORMERS}

_FUSED_NAMES = (
    "qkv",
    "to_qkv",
    "Wqkv",
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "in_proj_qkv",
    "to_kv",
    "kv",
    "qk",
)


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
    rows: str | None = None,
    per_head: bool = False,
    kind: Kind = "self",
    causal: bool = False,
) -> None:
    """Declare how a class of your own stores its query, key and value weights.

    Args:
        cls: The attention class.
        weight: Name of the child that owns the weight.
        order: Roles in the order of their rows.
        rows: Instead of `weight`, `order` and `per_head`: the rows of any number of weights, in the words of
            `FusedLayout`.
        per_head: Whether the rows are grouped by head first; the module must then say how many heads it has.
        kind: What the softmax runs over.
        causal: Whether a position sees earlier ones only.

    Raises:
        ConfigurationError: If `order` is not a permutation of query, key and value, or `rows` can not be read.

    Example::

        register_fused(MyAttention, "qkv")  # rows: all queries, all keys, all values
        register_fused(MyGroupedAttention, rows="qkv: q k=kv_heads*head_dim v=kv_heads*head_dim")
    """
    if sorted(order) != sorted(ROLES):
        raise ConfigurationError(f"`order` must hold query, key and value once each, got {list(order)}")
    if rows is None:
        parts = " ".join(role[0] for role in order)
        rows = f"{weight}: heads * ({parts})" if per_head else f"{weight}: {parts}"
    FUSED[f"{cls.__module__}.{cls.__qualname__}"] = (FusedLayout(rows, kind, causal),)


@register_family("separate")
def _separate(module: nn.Module) -> AttentionSite | None:
    return None if not_attention(module) is not None else separate(module)


register_family("torch.nn.MultiheadAttention")(multihead_attention)


@register_family("fused")
def _fused(module: nn.Module) -> AttentionSite | None:
    found = (apply_layout(module, layout) for layout in FUSED.get(class_path(module), ()))
    return next((site for site in found if site is not None), None)


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
    if any(not_attention(part) is not None for part in module.modules()):
        return None
    weighty = [n for n, child in module.named_children() if any(p.ndim >= 2 for p in child.parameters())]
    fused = [name for name in weighty if name in _FUSED_NAMES]
    if fused:
        return f"the row layout of its fused '{fused[0]}' is not known"
    cls = type(module).__name__.lower()
    if ("attention" in cls or "attn" in cls) and len(weighty) >= 2:
        return f"the roles of its weights {weighty} are not known"
    return None
