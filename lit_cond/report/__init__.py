"""``python -m lit_cond report``: one page of pictures and tables about training runs, read from their logs."""

from lit_cond.report.reading import read_run
from lit_cond.report.run import Run
from lit_cond.report.write import write_report

__all__ = ["Run", "read_run", "write_report"]
