"""Find the log of a run and read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lit_cond.errors import DataError
from lit_cond.report.events import EVENT_FILES, read_events
from lit_cond.report.run import Run
from lit_cond.report.settings import read_settings
from lit_cond.report.table import CSV_FILE, read_table

__all__ = ["name_runs", "read_run"]

_TOGETHER_S = 60
_SHOWN_OTHERS = 3


def read_run(path: str | Path, name: str | None = None) -> Run:
    """Read the log of a run: TensorBoard event files, or the metrics.csv of Lightning's CSVLogger.

    The log may lie in the folder or below it. Where there are several below, the newest counts, and a note names it and
    the others; of logs that were written within a minute of each other one of TensorBoard, then the one of the highest
    version. All event files of one folder belong together: those of a resumed run continue each other.

    Args:
        path: The folder of a run, or one file.
        name: How the run is called; the name of the folder when omitted.

    Returns:
        The run.

    Raises:
        DataError: If there is no log, or nothing in it can be read.
        MissingExtraError: If tensorboard is needed and not installed.
    """
    given = Path(path)
    if not given.exists():
        raise DataError(f"there is no folder '{given}': give the folder of a run")
    if given.is_file():
        folder, events, table = given.parent, [given], None
        if given.suffix == ".csv":
            events, table = [], given
        run = Run(name or folder.resolve().name, folder)
    else:
        folder, note = _find_log(given)
        events = sorted((f for f in folder.glob(EVENT_FILES) if f.is_file()), key=_age)
        table = folder / CSV_FILE if (folder / CSV_FILE).is_file() else None
        run = Run(name or given.resolve().name, folder, notes=[note] if note else [])
    if events:
        read_events(run, events)
    if table is not None:
        read_table(run, table)
    run.files = [*events, *([table] if table else [])]
    if not any(run.scalars.values()):
        why = "; ".join(run.notes) or "they hold no number"
        raise DataError(f"the logs in '{folder}' can not be used: {why}")
    run.settings = read_settings(folder, run.notes)
    return run


def name_runs(paths: Sequence[str | Path]) -> list[str]:
    """Return a short name for each run, all different: ends of their paths as long as needed."""
    parts = [Path(path).resolve().parts for path in paths]
    names = []
    for index, part in enumerate(parts):
        start = 2 if re.fullmatch(r"version_\d+", part[-1]) else 1
        others = [other for k, other in enumerate(parts) if k != index]
        length = next((n for n in range(start, len(part)) if all(o[-n:] != part[-n:] for o in others)), start)
        names.append("/".join(part[-length:]))
    return [
        name if names.count(name) == 1 else f"{name} ({names[: k + 1].count(name)})" for k, name in enumerate(names)
    ]


def _find_log(given: Path) -> tuple[Path, str]:
    """Return the folder with the log, and a note where it had to be chosen."""
    if any(f.is_file() for f in given.glob(EVENT_FILES)) or (given / CSV_FILE).is_file():
        return given, ""
    logs: dict[Path, list[Path]] = {}
    for pattern in (EVENT_FILES, CSV_FILE):
        for file in given.rglob(pattern):
            if file.is_file():
                logs.setdefault(file.parent, []).append(file)
    if not logs:
        raise DataError(
            f"'{given}' holds no log: neither in it nor below it is an event file of TensorBoard (*tfevents*) or a "
            f"{CSV_FILE}; give the folder of a run that has logged"
        )
    written = {folder: max(file.stat().st_mtime for file in files) for folder, files in logs.items()}
    newest = max(written.values())
    together = [folder for folder in logs if written[folder] >= newest - _TOGETHER_S]
    chosen = max(together, key=lambda folder: (_has_events(logs[folder]), _version(folder), written[folder]))
    if len(logs) == 1:
        return chosen, ""
    others = [str(folder.relative_to(given)) for folder in sorted(logs) if folder != chosen]
    more = f" and {len(others) - _SHOWN_OTHERS} more" if len(others) > _SHOWN_OTHERS else ""
    return chosen, (
        f"of {len(logs)} logs below '{given}' this is the newest, '{chosen.relative_to(given)}'; the others are "
        f"{', '.join(others[:_SHOWN_OTHERS])}{more}"
    )


def _has_events(files: list[Path]) -> bool:
    return any(file.name != CSV_FILE for file in files)


def _version(folder: Path) -> int:
    found = re.search(r"(\d+)$", folder.name)
    return int(found[1]) if found else -1


def _age(file: Path) -> tuple[int, str]:
    """Return a key that sorts event files by the time in their name, which copies keep."""
    found = re.search(r"tfevents\.(\d+)", file.name)
    return int(found[1]) if found else 0, file.name
