"""The log of a run that goes on: how far it goes, and the rows that stay."""

from __future__ import annotations

import csv
import io
import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

__all__ = ["ROWS_KEY", "LogPlace", "keep_rows", "logged_step"]

ROWS_KEY = "lit_cond_rows"
_TABLE = "metrics.csv"
_KEPT_ROWS = "metrics.before.csv"


class LogPlace(Callback):
    """Notes in a checkpoint how many rows each CSVLogger has written, so that a run that goes on writes none twice."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the numbers, in the order of the loggers; None for loggers of other kinds."""
        rows: list[int | None] = []
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger) and trainer.is_global_zero:
                logger.save()
                rows.append(len(_lines(Path(logger.log_dir) / _TABLE)[1]))
            else:
                rows.append(None)
        if any(number is not None for number in rows):
            checkpoint[ROWS_KEY] = rows


def keep_rows(trainer: Trainer, rows: Sequence[int | None] | None, step: int) -> None:
    """Keep the rows in the metrics.csv of a run that goes on; Lightning's logger would delete them.

    Those that came after the checkpoint are cut, since they are written again, and so is one that a kill has cut off.

    Args:
        trainer: The trainer, before `fit`.
        rows: What `LogPlace` has stored in the checkpoint; None for a checkpoint without.
        step: The step of the checkpoint, from which rows are cut where their number is not known.
    """
    for index, logger in enumerate(trainer.loggers):
        if isinstance(logger, CSVLogger):
            _keep_rows(logger, rows[index] if rows is not None and index < len(rows) else None, step)


@rank_zero_only
def _keep_rows(logger: CSVLogger, number: int | None, step: int) -> None:
    path = Path(logger.log_dir) / _TABLE
    kept = path.with_name(_KEPT_ROWS)
    if not kept.exists():
        if not path.is_file():
            return
        os.replace(path, kept)  # a kill from here on loses nothing: the next resume finds this file
    header, lines = _lines(kept)
    if number is not None:
        lines = lines[:number]
    elif "step" in header:
        column = header.index("step")
        lines = [line for line in lines if _number(line, column) < step]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        experiment: Any = logger.experiment
    if header:
        part = path.with_name(path.name + ".part")
        part.write_text("\n".join([",".join(header), *lines]) + "\n")
        os.replace(part, path)
        experiment.metrics_keys = header
    kept.unlink()


def _lines(path: Path) -> tuple[list[str], list[str]]:
    """Return the columns of a table and its whole lines."""
    text = path.read_text().replace("\0", "") if path.is_file() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return (next(csv.reader(io.StringIO(lines[0]))), lines[1:]) if lines else ([], [])


def _number(line: str, column: int) -> float:
    cells = next(csv.reader([line]))
    try:
        return float(cells[column])
    except (IndexError, ValueError):
        return -1.0


def logged_step(folder: Path) -> int:
    """Return the highest step in a log.

    Args:
        folder: The folder of a metrics.csv or of event files of TensorBoard.

    Returns:
        The step; -1 where there is none.
    """
    header, lines = _lines(folder / _TABLE)
    steps = [int(_number(line, header.index("step"))) for line in lines] if "step" in header else []
    with suppress(OSError):
        for file in folder.glob("*tfevents*"):
            steps += _event_steps(file)
    return max(steps, default=-1)


def _event_steps(file: Path) -> Iterator[int]:
    """Yield the step of each record, without reading what was logged.

    A record is its length (8 bytes), a checksum (4), the event and a checksum (4). An event begins with its time
    (key 0x09, 8 bytes) and its step (key 0x10, an integer of 7 bits a byte).
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        while len(start := stream.read(12)) == 12:
            (length,) = struct.unpack("<Q", start[:8])
            end = stream.tell() + length + 4
            if end > size:  # cut off by a kill
                return
            event = stream.read(min(length, 20))
            if event[:1] == b"\x09" and event[9:10] == b"\x10":
                step = 0
                for place, byte in enumerate(event[10:]):
                    step |= (byte & 127) << (7 * place)
                    if byte < 128:
                        break
                yield step
            stream.seek(end)
