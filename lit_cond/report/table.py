"""The metrics.csv of Lightning's CSVLogger into a `Run`."""

from __future__ import annotations

import csv
from pathlib import Path

from lit_cond.report.run import Run

__all__ = ["CSV_FILE", "read_table"]

CSV_FILE = "metrics.csv"
_NO_METRICS = ("step", "")


def read_table(run: Run, file: Path) -> None:
    """Read a table of metrics into a run: one row for each step, or several of which each holds some of the columns.

    Values that are known already, from event files of the same run, stay.

    Args:
        run: Gets the values; what can not be read is noted in it.
        file: The table.
    """
    found: dict[str, dict[int, float]] = {}
    bad = 0
    try:
        with file.open(newline="", errors="replace") as lines:
            # A table that is being written may end in the middle of a line, of which a NUL may be left after a crash.
            rows = csv.DictReader(line.replace("\0", "") for line in lines)
            if "step" not in (rows.fieldnames or ()):
                run.notes.append(f"{file.name} can not be read: it has no column 'step'")
                return
            for row in rows:
                try:
                    step = int(float(row["step"]))
                except (TypeError, ValueError, OverflowError):
                    bad += 1
                    continue
                for key, text in row.items():
                    if key is None or key in _NO_METRICS or not text:
                        continue
                    try:
                        found.setdefault(key, {})[step] = float(text)
                    except (TypeError, ValueError):
                        bad += 1
    except (OSError, csv.Error) as error:
        run.notes.append(f"{file.name} can not be read: {error}")
    if bad:
        run.notes.append(f"{file.name}: {bad} entries are no numbers and left out")
    for key, points in found.items():
        run.scalars.setdefault(key, points)
