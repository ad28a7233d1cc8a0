"""What was measured of a model and what was not, with the reason: a row for each module that holds parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from lit_cond.surgery.sites import AttentionSite, clean_name

__all__ = ["coverage_lines", "coverage_table"]

_OTHER = "makes no query, key or value"


def coverage_lines(layers: Mapping[str, Sequence[str]], declined: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return one line for each quantity: of how many layers it was measured, and why not of the others.

    Args:
        layers: The layers of each quantity.
        declined: Why a quantity of a layer has no number.
    """
    lines = {}
    for quantity, names in layers.items():
        reasons: dict[str, list[str]] = {}
        for name in names:
            if (quantity, name) in declined:
                reason = declined[quantity, name].removeprefix(f"'{name}': ")
                reasons.setdefault(reason, []).append(name)
        done = len(names) - sum(map(len, reasons.values()))
        line = f"{quantity}: {done} of {len(names)} layers"
        for reason, without in reasons.items():
            shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
            line += f"; not {shown}: {reason}"
        lines[quantity] = line
    return lines


def coverage_table(model: nn.Module, sites: Iterable[AttentionSite], others: Mapping[str, str]) -> str:
    """Return a table of all modules that own parameters: which matrices of them are measured, or why none is.

    Args:
        model: The model.
        sites: The layers that are measured.
        others: Why modules that look like attention are not measured, by name.
    """
    roles: dict[nn.Module, list[str]] = {}
    for site in sites:
        for role, view in site:
            found = roles.setdefault(view.module, [])
            if role not in found:
                found.append(role)
    rows = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        name = clean_name(name)
        inside = next((r for other, r in others.items() if name == other or name.startswith(f"{other}.")), _OTHER)
        rows.append((name or "(root)", type(module).__name__, ", ".join(roles.get(module, ())) or f"no: {inside}"))
    header = ("module", "class", "measured")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
