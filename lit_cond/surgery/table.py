"""The survey of a model as rows, as plain text and as a dictionary for JSON. Reads names and shapes, never values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lit_cond.errors import LitCondError, LostTargetError
from lit_cond.surgery.folding import fold, joined_name, ranges
from lit_cond.surgery.sites import ROLES, AttentionSite, Role, WeightView
from lit_cond.surgery.survey import Survey

if TYPE_CHECKING:
    from lit_cond.surgery import TokenSite

__all__ = ["SurveyRow", "aligned", "format_remarks", "format_survey", "layer_groups", "survey_as_dict", "survey_rows"]

_HEADER = ("#", "layer", "kind", "heads", "matrix", "parameter", "rows", "shape", "found")


@dataclass(frozen=True)
class SurveyRow:
    """One matrix of one attention layer.

    Args:
        index: Position of the layer among those of the model, from 0.
        layer: Name of the layer.
        kind: What the softmax runs over, see `AttentionSite`.
        causal: Whether a position sees itself and earlier ones only.
        heads: Query heads, None where it is not known.
        kv_heads: Key and value heads, None where it is not known.
        role: Which matrix.
        owner: Name of the module that owns the parameter; None for a role without a matrix.
        tensor: Name of the parameter on its owner; None likewise.
        rows: The rows of the parameter, as text; None likewise.
        shape: (rows, in_features); None likewise, and where the weight is packed.
        found: Whether a forward pass has shown the rows or they come from the table of known layouts.
        note: Why there is no matrix or no shape.
    """

    index: int
    layer: str
    kind: str
    causal: bool
    heads: int | None
    kv_heads: int | None
    role: Role
    owner: str | None
    tensor: str | None
    rows: str | None
    shape: tuple[int, int] | None
    found: Literal["traced", "table"]
    note: str | None = None


def survey_rows(survey: Survey) -> list[SurveyRow]:
    """Return one row for each matrix, and one for each role without a matrix, in the order of the layers."""
    return [row for index, site in enumerate(survey.sites) for row in _rows(index, site)]


def _rows(index: int, site: AttentionSite) -> list[SurveyRow]:
    found: Literal["traced", "table"] = "traced" if site.traced else "table"
    common = (index, site.name, site.kind, site.causal, site.num_heads, site.num_kv_heads)
    rows = []
    for role in ROLES:
        for view in site.views.get(role, ()):
            shape, note = _shape(view)
            rows.append(
                SurveyRow(*common, role, view.owner_name, view.tensor_name, str(view.layout.rows), shape, found, note)
            )
        if not site.views.get(role):
            note = site.notes.get(role, "it is not among the weights of the layer")
            rows.append(SurveyRow(*common, role, None, None, None, None, found, note))
    return rows


def _shape(view: WeightView) -> tuple[tuple[int, int] | None, str | None]:
    try:
        return (len(view.layout.rows), view.in_features), None
    except LostTargetError as error:
        return None, str(error)


def survey_as_dict(survey: Survey, tokens: Sequence[TokenSite] | LitCondError = ()) -> dict[str, Any]:
    """Return a survey in plain values: every layer, whatever their number.

    Args:
        survey: The survey.
        tokens: Where embedded tokens enter, or why that is not known.

    Returns:
        The keys "layers", "token_sites", "token_sites_unknown" (a reason or None), "left_alone" and "not_understood"
        (reasons by module) and "notes".
    """
    unknown = str(tokens) if isinstance(tokens, LitCondError) else None
    return {
        "layers": [_layer_as_dict(index, site) for index, site in enumerate(survey.sites)],
        "token_sites": [] if isinstance(tokens, LitCondError) else [_token_site_as_dict(site) for site in tokens],
        "token_sites_unknown": unknown,
        "left_alone": dict(survey.left_alone),
        "not_understood": {name: str(error) for name, error in survey.unknown.items()},
        "notes": list(survey.notes),
    }


def _layer_as_dict(index: int, site: AttentionSite) -> dict[str, Any]:
    matrices = []
    for role, view in site:
        shape, note = _shape(view)
        rows = view.layout.rows
        matrices.append(
            {
                "role": role,
                "parameter": _parameter(view.owner_name, view.tensor_name),
                "rows": {"offset": rows.offset, "block": rows.block, "period": rows.period, "count": rows.count},
                "transposed": view.layout.transposed,
                "groups": view.layout.groups,
                "shape": None if shape is None else list(shape),
                "note": note,
            }
        )
    return {
        "index": index,
        "name": site.name,
        "class": _class_name(site.module),
        "kind": site.kind,
        "causal": site.causal,
        "heads": site.num_heads,
        "kv_heads": site.num_kv_heads,
        "batch_first": site.batch_first,
        "found": "traced" if site.traced else "table",
        "matrices": matrices,
        "without_matrix": {row.role: row.note for row in _rows(index, site) if row.owner is None},
    }


def _token_site_as_dict(site: TokenSite) -> dict[str, Any]:
    return {
        "name": site.name,
        "class": _class_name(site.module),
        "attention": site.attention.name,
        "argument": site.argument,
        "channels": site.channels,
        "channel_axis": site.channel_axis,
        "batch_first": site.batch_first,
        "prefix": site.prefix,
        "causal": site.causal,
        "called_again_in": site.scope_name if site.scope is not None else None,
    }


def _class_name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _parameter(owner: str, tensor: str) -> str:
    return f"{owner}.{tensor}" if owner else tensor


def format_survey(
    survey: Survey, tokens: Sequence[TokenSite] | LitCondError | None = None, *, full: bool = False
) -> str:
    """Return a survey as plain text: a table of the layers, then where tokens enter, then what was left alone and why.

    Layers that differ in one number of their name only are folded into one: `blocks.{0..11}.attn`. A parameter that
    begins with a dot belongs to the layer, or to a module inside it.

    Args:
        survey: The survey.
        tokens: Where embedded tokens enter, or why that is not known; None leaves them out.
        full: Whether each layer gets rows of its own.
    """
    rows = survey_rows(survey)
    layers = len(survey.sites)
    matrices = sum(row.owner is not None for row in rows)
    parts = [f"{_count(layers, 'attention layer')}, {_count(matrices, 'matrix', 'matrices')}"] if layers else []
    if layers:
        parts += ["", *aligned([list(_HEADER), *_cells(rows, full)])]
    if tokens is not None and (layers or isinstance(tokens, LitCondError)):
        parts += ["", "tokens enter at", *_token_lines(tokens)]
    remarks = format_remarks(survey, full=full)
    parts += ["", *remarks] if parts and remarks else remarks
    return "\n".join(parts)


def format_remarks(survey: Survey, *, full: bool = False, roles: bool = False) -> list[str]:
    """Return lines on what was left alone, what was not understood and what could not be traced, with reasons.

    Args:
        survey: The survey.
        full: Whether modules with the same reason get a line each.
        roles: Whether to list roles without a matrix as well, which the table of `format_survey` holds.
    """
    without = [(row.layer, f"no {row.role} matrix: {row.note}") for row in survey_rows(survey) if row.owner is None]
    unknown = [(name, str(error)) for name, error in survey.unknown.items()]
    lines: list[str] = []
    for title, reasons in (
        ("without a matrix", without if roles else []),
        ("left alone", list(survey.left_alone.items())),
        ("not understood", unknown),
    ):
        if reasons:
            groups = [[i] for i in range(len(reasons))] if full else fold([(why, name) for name, why in reasons])
            named = [joined_name([reasons[i][0] for i in group]) or "the model itself" for group in groups]
            lines += ["", title, *(f"  {name}: {reasons[g[0]][1]}" for name, g in zip(named, groups, strict=True))]
    if survey.notes:
        lines += ["", "notes", *(f"  {note}" for note in survey.notes)]
    return lines[1:]


def layer_groups(rows: Sequence[SurveyRow], full: bool = False) -> list[list[int]]:
    """Return the positions of the layers that stand in one row of the table, group by group.

    Args:
        rows: The rows of all layers.
        full: Whether each layer stands for itself.
    """
    layers = _by_layer(rows)
    if full:
        return [[i] for i in layers]
    return fold([(_signature(group), group[0].layer) for group in layers.values()])


def _by_layer(rows: Sequence[SurveyRow]) -> dict[int, list[SurveyRow]]:
    layers: dict[int, list[SurveyRow]] = {}
    for row in rows:
        layers.setdefault(row.index, []).append(row)
    return layers


def _cells(rows: Sequence[SurveyRow], full: bool) -> list[list[str]]:
    layers = _by_layer(rows)
    cells = []
    for group in layer_groups(rows, full):
        for place, row in enumerate(layers[group[0]]):
            same = [layers[i][place] for i in group]
            heads = "?" if row.heads is None else str(row.heads)
            heads += f"/{row.kv_heads}" if row.kv_heads not in (None, row.heads) else ""
            first = [
                ranges(group),
                joined_name([r.layer for r in same]) + (f"  x {len(group)}" if len(group) > 1 else ""),
                row.kind + (", causal" if row.causal else ""),
                heads,
            ]
            cells.append(
                [
                    *(first if place == 0 else [""] * len(first)),
                    row.role,
                    _short(same),
                    row.rows or "",
                    "" if row.shape is None else f"{row.shape[0]}x{row.shape[1]}",
                    row.found if place == 0 else "",
                ]
            )
    return cells


def _short(same: Sequence[SurveyRow]) -> str:
    """Return the parameter of rows that are folded into one, from the layer on where it lies inside."""
    row = same[0]
    if row.owner is None or row.tensor is None:
        return f"none: {row.note}"
    name = _parameter(row.owner, row.tensor)
    if row.layer and name.startswith(f"{row.layer}."):
        name = name[len(row.layer) :]
    else:
        name = joined_name([_parameter(r.owner or "", row.tensor) for r in same])
    return name if row.note is None else f"{name} ({row.note})"


def _signature(rows: Sequence[SurveyRow]) -> object:
    """Return what the rows of two layers have in common if they differ in their names only."""
    first = rows[0]
    matrices = tuple(
        (r.role, _relative(r.owner, r.layer.partition(":")[0]), r.tensor, r.rows, r.shape, r.note) for r in rows
    )
    return first.kind, first.causal, first.heads, first.kv_heads, first.found, matrices


def _relative(name: str | None, layer: str) -> tuple[int, str] | None:
    """Return how many levels above a layer the path to a module branches off, and the path from there."""
    if name is None:
        return None
    own, other = layer.split("."), name.split(".")
    shared = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    return len(own) - shared, ".".join(other[shared:])


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, every column as wide as its widest cell.

    Args:
        cells: The rows, equally long.
    """
    # A reason in place of a parameter must not widen the column.
    widths = [max(len(row[i]) for row in cells if not row[i].startswith("none: ")) for i in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _token_lines(tokens: Sequence[TokenSite] | LitCondError) -> list[str]:
    if isinstance(tokens, LitCondError):
        return [f"  not known: {tokens}"]
    lines = []
    for site in tokens:
        argument = "its first tensor argument" if site.argument is None else f"argument {site.argument!r}"
        axis = "found by their number" if site.channel_axis is None else f"on axis {site.channel_axis}"
        channels = "channels" if site.channels is None else f"{site.channels} channels"
        parts = [f"{site.name or 'the model itself'}: {argument}", f"{channels} {axis}"]
        if not site.batch_first:
            parts.append("tokens before the batch")
        if site.prefix:
            parts.append(f"{_count(site.prefix, 'learned token')} first")
        if site.scope is not None:
            parts.append(f"the first of its calls in {site.scope_name or 'the model'}")
        lines.append("  " + ", ".join(parts))
    return lines


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
