"""Put the report together and write it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lit_cond.errors import DataError
from lit_cond.extras import optional_imports
from lit_cond.plots import colour, describe
from lit_cond.report.page import Image, Section, bullets, details, page, paragraph, picture, table
from lit_cond.report.pictures import (
    PIXELS_AN_INCH,
    Picture,
    draw_attention,
    draw_metrics,
    draw_overview,
    draw_quantity,
    draw_ranks,
)
from lit_cond.report.run import Run, known_quantities
from lit_cond.report.settings import flatten, setting_differences
from lit_cond.report.tables import Row, final_metrics, worst_layers

__all__ = ["write_report"]

_DPI = 150
_PNG = b"\x89PNG\r\n\x1a\n"
_LONGEST = 300

_HOW_TO_READ = (
    "The condition number κ of a matrix is its largest over its smallest singular value: 1 for an orthogonal matrix, "
    "infinite for a singular one. It bounds how much a small change of the input can be blown up, and gradient descent "
    "is slow along the directions of small singular values.",
    "Query, key and value: the weights as the forward pass reads them, corrections included. Tokens: the matrix of "
    "embedded tokens of a sample that enters the first block. Attention matrix: the softmax of a head. Attention "
    "output: what a head puts out. Attention Jacobian: the derivative of a head's output by its three weights.",
    "A heat map has one row for each layer, the first on top; a column reaches to the next measurement.",
)


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write index.html, with all pictures inside, and the pictures as PNG files beside it.

    Args:
        runs: The runs, in the order of their colours.
        folder: Where to write; made where it does not exist.

    Returns:
        The path of the page.

    Raises:
        DataError: If nothing can be written there.
        MissingExtraError: If matplotlib is not installed.
    """
    with optional_imports("drawing the pictures of a report"):
        import matplotlib as mpl  # noqa: F401
    images = _Images(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = [*_conditioning(runs, images), *_others(runs, images)]
        title = "Conditioning of attention" + (f": {runs[0].name}" if len(runs) == 1 else f": {len(runs)} runs")
        text = page(title, _lead(runs), sections)
        path = folder / "index.html"
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"'{folder}' can not be written ({error.strerror or error}): give another folder with --out"
        ) from error
    return path


class _Images:
    """Writes pictures and returns their HTML."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used: set[str] = set()

    def html(self, pictures: Sequence[Picture | None]) -> list[str]:
        return [picture(self._image(one)) for one in pictures if one is not None]

    def _image(self, one: Picture) -> Image:
        if isinstance(one.figure, bytes):
            data, width = one.figure, round(int.from_bytes(one.figure[16:20], "big") * one.scale)
        else:
            data, width = _png(one.figure), round(one.figure.get_figwidth() * PIXELS_AN_INCH)
        name = base = re.sub(r"[^A-Za-z0-9_-]+", "_", one.name)[:80]
        while name in self.used:
            name = f"{base}_{len(self.used)}"
        self.used.add(name)
        (self.folder / f"{name}.png").write_bytes(data)
        return Image(data, width, one.alt, one.caption)


def _png(figure: Any) -> bytes:
    figure.savefig(file := io.BytesIO(), format="png", dpi=_DPI)
    return file.getvalue()


def _lead(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        newest = max((file.stat().st_mtime for file in run.files if file.exists()), default=0.0)
        written = datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")
        rows.append(Row(run.name, [f"{run.last_step:,}", written, str(run.folder)]))
    columns = ["run", "last step", "log last written", "log"]
    notes = [note if len(runs) == 1 else f"{run.name}: {note}" for run in runs for note in run.notes]
    return [table(columns, rows, numbers=False), *([bullets(notes)] if notes else [])]


def _conditioning(runs: Sequence[Run], images: _Images) -> list[Section]:
    heads, colours = [run.name for run in runs], [colour(index) for index in range(len(runs))]
    glance = images.html([draw_overview(runs)])
    silent = [run.name for run in runs if not run.quantities("cond")]
    if silent:
        who = "This run has" if len(runs) == 1 else f"{', '.join(silent)} {'has' if len(silent) == 1 else 'have'}"
        glance.append(
            paragraph(
                f"{who} logged no condition numbers: add the callback ConditionNumberMonitor to the trainer.", "warn"
            )
        )
    if rows := final_metrics(runs):
        glance += ["<h3>Last values</h3>", table(["", *heads], rows, colours)]
    if rows := worst_layers(runs):
        glance += ["<h3>Worst layer at the last measurement</h3>", table(["", *heads], rows, colours, numbers=False)]
    parts: list[str] = []
    for quantity in known_quantities(list(runs), "cond"):
        drawn = images.html(draw_quantity(runs, quantity))
        name = describe(quantity)
        parts += [f"<h3>{paragraph(name[0].upper() + name[1:])[3:-4]}</h3>", *drawn]
    return [
        Section("glance", "At a glance", glance),
        Section("training", "Training", images.html([draw_metrics(runs)])),
        Section("conditioning", "Condition numbers", parts),
    ]


def _others(runs: Sequence[Run], images: _Images) -> list[Section]:
    settings = [run.settings for run in runs]
    parts: list[str] = []
    if len(runs) > 1 and all(settings):
        differences = setting_differences(settings)
        rows = [Row(key, [_cut(text) for text in texts]) for key, texts in differences.items()]
        colours = [colour(index) for index in range(len(runs))]
        parts.append(
            table(["differs", *(run.name for run in runs)], rows, colours, numbers=False)
            if rows
            else paragraph("The runs have the same settings.")
        )
    elif len(runs) > 1:
        without = ", ".join(run.name for run in runs if not run.settings)
        text = f"Not compared, since there is no config.yaml or hparams.yaml beside the log of {without}."
        parts.append(paragraph(text, "soft"))
    for run in runs:
        if run.settings:
            lines = [f"{key}: {_cut(str(value))}" for key, value in flatten(run.settings)]
            parts.append(details(f"All settings of {run.name}", "\n".join(lines)))
    texts = [
        details(f"{run.name}: {key}", text.strip().removeprefix("```").removesuffix("```").strip("\n"))
        for run in runs
        for key, text in run.texts.items()
    ]
    return [
        Section("attention", "Entropy and saturation of attention", images.html(draw_attention(runs))),
        Section("ranks", "Ranks and singular values", images.html(draw_ranks(runs))),
        Section("pictures", "Logged pictures", _row(images.html(_logged(runs)))),
        Section("settings", "Settings", parts),
        Section("texts", "Logged texts", texts),
        Section("reading", "How to read", [paragraph(text) for text in _HOW_TO_READ]),
    ]


def _row(pieces: Sequence[str]) -> list[str]:
    return ['<div class="row">', *pieces, "</div>"] if pieces else []


def _logged(runs: Sequence[Run]) -> list[Picture]:
    """Return the last state of the other pictures in the logs; heat maps are drawn anew."""
    found = []
    for index, run in enumerate(runs):
        for key, (step, data) in run.images.items():
            if key.startswith(("heatmap/", "spectra/")) or not data.startswith(_PNG):
                continue
            caption = f"{run.name}: {key}, step {step:,}"
            found.append(Picture(f"logged_{key}_{index}", data, caption, caption))
    return found


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
