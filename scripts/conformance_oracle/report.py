"""Tables of the sweep's results."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from typing import Any

__all__ = ["VERDICTS", "counts_table", "markdown", "to_look_at"]

VERDICTS = ("right", "partial", "refused", "wrong", "none", "no input", "error")
Records = Sequence[dict[str, Any]]


def _counts(records: Records) -> list[tuple[str, Counter[str]]]:
    sources = list(dict.fromkeys(record["source"] for record in records))
    rows = [(s, Counter(r["verdict"] for r in records if r["source"] == s)) for s in sources]
    return [*rows, ("all", Counter(r["verdict"] for r in records))] if len(rows) > 1 else rows


def counts_table(records: Records) -> str:
    """Return how many models got which verdict, by source, as lines for a terminal."""
    lines = [f"{'':14}" + "".join(f"{verdict:>10}" for verdict in VERDICTS) + f"{'models':>10}"]
    for source, counts in _counts(records):
        numbers = [counts[verdict] for verdict in VERDICTS]
        lines.append(f"{source:14}" + "".join(f"{number:>10}" for number in (*numbers, sum(numbers))))
    return "\n".join(lines)


def to_look_at(records: Records) -> str:
    """Return the models that are wrong, as lines for a terminal."""
    lines = []
    for record in records:
        if record["verdict"] == "wrong":
            found = record["findings"]["wrong"] or [record["reason"]]
            lines += ["", f"WRONG {record['source']} {record['name']}", *(f"  {text}" for text in found[:5])]
    return "\n".join(lines)


def markdown(records: Records) -> str:
    """Return the report: versions, counts, what was refused, and one row a model."""
    versions = {key: value for record in records for key, value in record["versions"].items()}
    finders = sorted({record["finder"] for record in records})
    judges = sorted({record["judge"] for record in records})
    lines = [
        "# Conformance of the attention finder",
        "",
        "Written by `python scripts/conformance.py --out RESULTS --report docs/conformance.md`; its docstring says "
        "what is checked and what the verdicts mean.",
        "",
        f"- Date: {datetime.datetime.now(datetime.timezone.utc).date().isoformat()}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- Hash of the finder's sources: {', '.join(finders)}; of the judge's: {', '.join(judges)}",
        f"- Time: {sum(record['seconds'] for record in records) / 60:.0f} minutes on one core; largest peak of a "
        f"process, libraries included: {max((r['peak_megabytes'] for r in records), default=0)} MB",
        "",
        "| source | " + " | ".join(VERDICTS) + " | models |",
        "| --- |" + " ---: |" * (len(VERDICTS) + 1),
    ]
    for source, counts in _counts(records):
        numbers = [counts[verdict] for verdict in VERDICTS]
        lines.append(f"| {source} | " + " | ".join(str(number) for number in (*numbers, sum(numbers))) + " |")
    for verdict, title in (
        ("wrong", "Wrong"),
        ("refused", "Refused, with the finder's text"),
        ("error", "Errors"),
        ("no input", "No input"),
        ("partial", "Partial: open points"),
    ):
        chosen = [record for record in records if record["verdict"] == verdict]
        if chosen:
            lines += ["", f"## {title}", "", *(line for record in chosen for line in _points(record))]
    lines += [
        "",
        "## Models",
        "",
        "Arrived: how the changes of the views that got all checks arrive at the operand: e as a rearrangement of "
        "X * delta times one factor, l linearly (rotated, pooled), n through a normalization.",
        "",
        "| source | model | class | note | sites | cores | arrived | verdict | seconds | MB |",
        "| --- | --- | --- | --- | ---: | ---: | --- | --- | ---: | ---: |",
    ]
    for r in records:
        arrived = " ".join(f"{count}{level[0]}" for level, count in sorted(r["evidence"].items()))
        cells = (r["source"], r["name"], r["class"], r["note"], r["sites"], r["cores"], arrived, r["verdict"])
        lines.append(f"| {' | '.join(_cell(c) for c in cells)} | {r['seconds']:.1f} | {r['peak_megabytes']} |")
    return "\n".join(lines) + "\n"


def _points(record: dict[str, Any]) -> list[str]:
    level = record["verdict"]
    points = record["findings"].get(level) or [record["reason"]]
    kept = [f"- {record['source']} `{record['name']}`: {_cell(text)}" for text in points[:4]]
    return kept + ([f"- ... and {len(points) - 4} more of `{record['name']}`"] if len(points) > 4 else [])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
