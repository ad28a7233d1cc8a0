"""The page: plain HTML with its style and its pictures inside, no scripts."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lit_cond.report.tables import Row

__all__ = ["Image", "Section", "bullets", "details", "page", "paragraph", "picture", "table"]

_STYLE = """
:root { color-scheme: light dark; --text: #1d2228; --soft: #59636e; --line: #d9dee3; --back: #fff; --card: #f6f8fa;
  --warn: #8a4b00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --soft: #a3adb8; --line: #3a424b; --back: #16191d;
  --card: #20252b; --warn: #f0b35c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.25rem 4rem; color: var(--text); background: var(--back);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.3rem; margin: 2.5rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); } h3 { font-size: 1.08rem; margin: 1.75rem 0 .5rem; }
p { margin: .4rem 0 .8rem; max-width: 48rem; } .soft, figcaption { color: var(--soft); font-size: .92rem; }
.warn { color: var(--warn); } a { color: inherit; } nav a { margin-right: 1rem; white-space: nowrap; }
figure { margin: .75rem 0 1.5rem; } figcaption { margin-top: .35rem; max-width: 48rem; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; padding: 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .95rem; }
th, td { padding: .28rem .9rem .28rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } tbody th { font-weight: 400; } .numbers td, .numbers thead th + th { text-align: right;
  font-variant-numeric: tabular-nums; padding: .28rem .45rem .28rem 1.1rem; white-space: nowrap; }
td { overflow-wrap: break-word; max-width: 32rem; } thead th { white-space: nowrap; }
nav { margin-top: 1rem; } .row { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }
.chip { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .45em; }
details { margin: .5rem 0; } summary { cursor: pointer; } pre { overflow-x: auto; background: var(--card);
  padding: .75rem; border-radius: 6px; font-size: .82rem; line-height: 1.4; }
@media print { :root { color-scheme: light; --text: #000; --soft: #444; --line: #ccc; --back: #fff; --warn: #000; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  nav { display: none; } .wide { overflow: visible; } }
""".strip()


@dataclass(frozen=True)
class Image:
    """A PNG to embed.

    Attributes:
        data: The bytes of the file.
        width: Width on the page in pixels; narrower windows shrink it.
        alt: What it shows.
        caption: The text below.
    """

    data: bytes
    width: int
    alt: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        anchor: Its place in the address.
        title: Its heading.
        parts: Pieces of HTML.
    """

    anchor: str
    title: str
    parts: Sequence[str]


def page(title: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the whole page.

    Args:
        title: Plain text.
        lead: Pieces of HTML that stand before the sections.
        sections: The sections; empty ones are left out.
    """
    sections = [section for section in sections if section.parts]
    links = "\n".join(f'<a href="#{escape(section.anchor)}">{escape(section.title)}</a>' for section in sections)
    body = "\n".join(
        f'<section id="{escape(section.anchor)}">\n<h2>{escape(section.title)}</h2>\n'
        + "\n".join(section.parts)
        + "\n</section>"
        for section in sections
    )
    first = "\n".join(lead)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{first}
<nav>{links}</nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text; kind is a class of the style, such as `soft` or `warn`."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(texts: Iterable[str]) -> str:
    """Return a list of plain texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>"


def picture(image: Image) -> str:
    """Return a figure with its bytes inside."""
    source = base64.b64encode(image.data).decode("ascii")
    caption = f"<figcaption>{escape(image.caption)}</figcaption>" if image.caption else ""
    return (
        f'<figure><img src="data:image/png;base64,{source}" width="{image.width}" alt="{escape(image.alt)}">'
        f"{caption}</figure>"
    )


def table(columns: Sequence[str], rows: Sequence[Row], colours: Sequence[str] = (), numbers: bool = True) -> str:
    """Return a table whose first column is the title of each row.

    Args:
        columns: Heads of all columns, the first included.
        rows: The rows.
        colours: Colour of each column after the first, shown beside its head.
        numbers: Whether the cells are numbers, which stand on the right.
    """
    chips = ["", *(f'<span class="chip" style="background:{escape(colour)}"></span>' for colour in colours)]
    chips += [""] * (len(columns) - len(chips))
    head = "".join(f'<th scope="col">{chip}{escape(name)}</th>' for chip, name in zip(chips, columns, strict=True))
    body = []
    for row in rows:
        hints = [f' title="{escape(hint)}"' for hint in row.hints] or [""] * len(row.cells)
        cells = "".join(f"<td{hint}>{escape(cell)}</td>" for hint, cell in zip(hints, row.cells, strict=True))
        body.append(f'<tr><th scope="row">{escape(row.title)}</th>{cells}</tr>')
    kind = ' class="numbers"' if numbers else ""
    lines = "\n".join(body)
    return f'<div class="wide"><table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>'


def details(summary: str, text: str) -> str:
    """Return a text that unfolds, its columns kept."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
