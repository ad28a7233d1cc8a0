"""How a class of attention keeps its weights, as one line of text, and what that line means for one module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from torch import nn

from lit_cond.errors import ConfigurationError, UnknownAttentionError
from lit_cond.surgery.module_facts import COUNTS as _COUNTS
from lit_cond.surgery.module_facts import (
    Projection,
    class_path,
    first_int,
    is_causal,
    kind_by_name,
    projections_at,
    size,
    truth,
)
from lit_cond.surgery.sites import ROLES, AttentionSite, Kind, Role, RowSet, WeightView

__all__ = ["FusedLayout", "Weight", "apply_layout", "parse_rows", "unknown_attention"]

_ROLE_OF = {role[0]: role for role in ROLES}
_WEIGHT = re.compile(
    r"(?P<path>[\w.*]+)(?P<maybe>\?)?\s*:\s*(?:(?P<blocks>[\w*]+)\s*\*\s*\((?P<block>[^()]*)\)|(?P<plain>[^()]*))"
)
_PART = re.compile(r"(?P<names>[a-z_]+(?:,[a-z_]+)*)(?:=(?P<width>[\w*]+))?")


@dataclass(frozen=True)
class FusedLayout:
    """How the rows of the weights of one attention layer are divided.

    `rows` has one entry for each weight, joined by `;`. An entry is the path of the child that owns the weight, a
    colon, and what its rows are, from the first to the last: `q`, `k`, `v`, or any other word for rows of no role::

        qkv: q k v                                three equal parts
        q: q; kv: k v                             two weights
        qkv: heads * (q k v)                      the three parts once for each head
        qkv_proj: q k=kv_heads*head_dim v=kv_heads*head_dim     given numbers of rows; the others share the rest
        q_proj: heads * (q gate); k_proj?: k; v_proj?: v        a gate in between; weights that may be missing
        query_key: q,k; value: v                  rows that serve two roles

    A number is an integer, an attribute of the module or its configuration, one of `heads`, `kv_heads`, `head_dim`
    (under any usual spelling), or a product of these. `*` in a path stands for all elements of a list.

    Args:
        rows: The weights and their rows.
        kind: What the softmax runs over; None for what the module says ("self" or "cross").
        causal: Whether a position sees earlier ones only; what the module itself says counts as well.
        when: Attribute that must be true for this layout to hold (`name`) or false (`not name`); empty for always.
        heads: Number of query heads, in the words of `rows`; where it is not known, what rows and head width give.
        value_heads: Number of value heads where there are not as many as key heads.
        transposed: Whether a bare parameter is stored as (in, out).
        out_axes: How many axes of a bare parameter are output channels.
    """

    rows: str = "qkv: q k v"
    kind: Kind | None = None
    causal: bool = False
    when: str = ""
    heads: str = "heads"
    value_heads: str = ""
    transposed: bool = False
    out_axes: int = 1

    def __post_init__(self) -> None:
        parse_rows(self.rows)


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a weight: their roles, and how many they are where that is given."""

    roles: tuple[Role, ...]
    width: str | None


@dataclass(frozen=True)
class Weight:
    """One entry of `FusedLayout.rows`."""

    path: str
    optional: bool
    blocks: str
    parts: tuple[Part, ...]


@cache
def parse_rows(text: str) -> tuple[Weight, ...]:
    """Return the entries of a description of rows.

    Raises:
        ConfigurationError: If the text is none.
    """
    weights = []
    for entry in text.split(";"):
        match = _WEIGHT.fullmatch(entry.strip())
        words = ((match["block"] or match["plain"] or "") if match else "").split()
        parts = [_PART.fullmatch(word) for word in words]
        if match is None or not parts or not all(parts):
            raise ConfigurationError(
                f"can not read the rows {entry.strip()!r}; write 'path: q k v' or 'path: heads * (q k v)'"
            )
        read = tuple(
            Part(tuple(_ROLE_OF[name] for name in part["names"].split(",") if name in _ROLE_OF), part["width"])
            for part in parts
            if part
        )
        weights.append(Weight(match["path"], bool(match["maybe"]), match["blocks"] or "1", read))
    if not any(part.roles for weight in weights for part in weight.parts):
        raise ConfigurationError(f"the rows {text!r} name neither q, k nor v")
    return tuple(weights)


def unknown_attention(module: nn.Module, why: str) -> UnknownAttentionError:
    """Return the error for a module that looks like attention and is not understood."""
    return UnknownAttentionError(
        f"{class_path(module)} looks like attention, but {why}; describe it with lit_cond.surgery.register_fused / "
        "register_family, or leave it out with `exclude`"
    )


def apply_layout(module: nn.Module, layout: FusedLayout) -> AttentionSite | None:
    """Return the site of a module with a given layout, None if the layout is not for it.

    Raises:
        UnknownAttentionError: If the module has the weights of the layout, but not its numbers of rows.
    """
    if layout.when and not truth(module, layout.when):
        return None
    views: dict[Role, tuple[WeightView, ...]] = {}
    for weight in parse_rows(layout.rows):
        owners = projections_at(module, weight.path, transposed=layout.transposed, out_axes=layout.out_axes)
        if not owners and not weight.optional:
            return None
        for owner in owners:
            for roles, rows in _divide(module, weight, owner):
                for role in roles:
                    views[role] = (*views.get(role, ()), owner.view(rows))
    ordered = {role: views[role] for role in ROLES if role in views}
    heads = size(module, layout.heads) or _heads(module, ordered)
    kind = layout.kind or kind_by_name(module)
    return AttentionSite(
        "",
        module,
        ordered,
        heads,
        _kv_heads(module, ordered, heads),
        kind,
        layout.causal or is_causal(module),
        num_value_heads=size(module, layout.value_heads) if layout.value_heads else None,
    )


def _divide(module: nn.Module, weight: Weight, owner: Projection) -> list[tuple[tuple[Role, ...], RowSet]]:
    """Return the rows of each part of a weight."""
    blocks = size(module, weight.blocks)
    given = [None if part.width is None else size(module, part.width) for part in weight.parts]
    for expression, value in [(weight.blocks, blocks), *zip((p.width for p in weight.parts), given, strict=True)]:
        if expression is not None and value is None:
            raise unknown_attention(module, f"it says no '{expression}' by which to divide its '{weight.path}'")
    period, left_over = divmod(owner.rows, blocks or 1)
    free = given.count(None)
    rest = period - sum(width or 0 for width in given)
    if left_over or (rest != 0 if not free else rest <= 0 or rest % free):
        raise unknown_attention(
            module, f"its '{weight.path}' has {owner.rows} rows, which do not divide into {_spell(weight)}"
        )
    divided, start = [], 0
    for part, width in zip(weight.parts, given, strict=True):
        length = rest // free if width is None else width
        if part.roles:
            rows = RowSet.span(start, length) if blocks == 1 else RowSet(start, length, period, blocks or 1)
            divided.append((part.roles, rows))
        start += length
    return divided


def _spell(weight: Weight) -> str:
    parts = " ".join(
        (",".join(part.roles) or "other") + (f"={part.width}" if part.width else "") for part in weight.parts
    )
    return f"{weight.blocks} x ({parts})" if weight.blocks != "1" else parts


def _heads(module: nn.Module, views: dict[Role, tuple[WeightView, ...]]) -> int | None:
    """Return the number of heads that the rows of the query make, where the width of a head is known."""
    query, width = views.get("query", ()), size(module, "head_dim")
    if len(query) != 1 or width is None or len(query[0].layout.rows) % width:
        return None
    return len(query[0].layout.rows) // width


def _kv_heads(module: nn.Module, views: dict[Role, tuple[WeightView, ...]], heads: int | None) -> int | None:
    """Return the number of key heads: what the module says, else keys are as wide per head as queries."""
    said = first_int(module, _COUNTS["kv_heads"])
    query, key = views.get("query", ()), views.get("key", ())
    if said is not None or heads is None or len(query) != 1 or len(key) != 1:
        return said or heads
    head_width, rest = divmod(len(query[0].layout.rows), heads)
    key_heads, over = divmod(len(key[0].layout.rows), head_width or 1)
    return key_heads if not rest and not over and key_heads else heads
