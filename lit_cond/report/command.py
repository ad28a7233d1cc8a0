"""The words of ``python -m lit_cond report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lit_cond.errors import LitCondError

__all__ = ["main"]

_DESCRIPTION = """\
Write one page about training runs: condition numbers over the steps, runs over each other, heat maps of all layers,
singular values, entropy of attention, final metrics. It is a file of its own, readable without a server; the pictures
stand beside it as PNG files too.

A run is a folder with the event files of TensorBoard or the metrics.csv of Lightning's CSVLogger, in it or below it
(then the newest is taken). Runs that are still going or were stopped can be read as well.
"""

_EPILOG = """\
examples:
  python -m lit_cond report runs/digits_vit
  python -m lit_cond report runs/digits_vit runs/plain --names conditioned plain --out comparison
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"report: {message}; see python -m lit_cond report --help")


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Args:
        arguments: The words after ``report``.

    Raises:
        SystemExit: With code 2 and one line on stderr for what the user can repair.
    """
    parser = _Parser(
        prog="python -m lit_cond report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folder of a run; several are compared")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: report in the first RUN_DIR)")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="how the runs are called, in their order")
    options = parser.parse_args(list(arguments))
    if options.names and len(options.names) != len(options.runs):
        parser.error(f"{len(options.runs)} runs and {len(options.names)} names: give one name for each run")
    if options.names and len(set(options.names)) != len(options.names):
        parser.error("two runs have the same name: give different ones")
    try:
        from lit_cond.report.reading import name_runs, read_run
        from lit_cond.report.write import write_report

        names = options.names or name_runs(options.runs)
        runs = [read_run(folder, name) for folder, name in zip(options.runs, names, strict=True)]
        first = Path(options.runs[0])
        path = write_report(runs, options.out or (first if first.is_dir() else first.parent) / "report")
    except LitCondError as error:
        _fail(str(error))
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}")
    print(f"wrote {path}")


def _fail(message: str) -> NoReturn:
    print(f"lit_cond: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)
