"""The parser of the command line: what it accepts, and how it says no."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser

from lit_cond.callbacks import ConditionedTokens, ConditionNumberMonitor, SpectralConditioning, StrengthSchedule
from lit_cond.cli_errors import explain
from lit_cond.cli_report import Vocabulary

__all__ = ["CALLBACK_GROUPS", "LitCondParser", "exit_with", "wants_traceback"]

CALLBACK_GROUPS: dict[str, type[Callback]] = {
    "conditioning": SpectralConditioning,
    "tokens": ConditionedTokens,
    "schedule": StrengthSchedule,
    "monitor": ConditionNumberMonitor,
}
"""The flat groups, in the order in which the trainer gets them: before those of `trainer.callbacks`."""


class LitCondParser(LightningArgumentParser):
    """A parser that refuses abbreviated options and explains a mistake in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.family: list[LitCondParser] = [self]

    def vocabulary(self) -> Vocabulary:
        """Return the keys that the commands accept, those of the callback groups included."""
        known: dict[str, dict[str, Any]] = {}
        for parser in self.family:
            for key in dict(parser.get_defaults().items()):
                level = known
                for part in key.split("."):
                    level = level.setdefault(part, {})
        for key, callback in CALLBACK_GROUPS.items():
            if key in known:
                arguments = LightningArgumentParser(exit_on_error=False).add_class_arguments(callback)
                known[key] = {name: {} for name in arguments}
        return known

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit with code 2."""
        # A parser inside another one leaves the report to the outer one.
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        exit_with(explain(message, self.vocabulary(), self.args or sys.argv[1:]), ex)


def wants_traceback() -> bool:
    """Say whether the user asks for tracebacks with LIT_COND_TRACEBACK."""
    return bool(os.environ.get("LIT_COND_TRACEBACK"))


def exit_with(text: str, error: BaseException | None) -> NoReturn:
    """Print one line of error and exit with code 2."""
    print(f"lit_cond: error: {text}", file=sys.stderr)
    raise SystemExit(2) from error
