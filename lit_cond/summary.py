"""What a training run ends with: the test of its best checkpoint and a short summary."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.text import Text

from lit_cond.errors import LitCondError
from lit_cond.surgery.report import measure_weights

__all__ = ["ConditionNumbers", "RunSummary", "best_checkpoint", "condition_numbers", "finish_fit"]

_ROUND_FROM = 1000
QUANTITIES = ("query", "key", "value", "tokens")


@dataclass(frozen=True)
class ConditionNumbers:
    """Mean condition numbers over the layers, of one quantity.

    Attributes:
        corrected: With the correction, as the model computes.
        raw: Without it; None when that was not measured.
    """

    corrected: float
    raw: float | None = None


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a training run.

    Attributes:
        metrics: What the test has logged; empty without a test.
        untested: Why there was no test; None after one.
        numbers: The condition numbers by quantity.
        unmeasured: Why there are no condition numbers; None where there are some.
        checkpoint: Path of the best checkpoint, or of the last one where none is best.
        log_dir: Folder of the run's TensorBoard log.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    untested: str | None = None
    numbers: Mapping[str, ConditionNumbers] = field(default_factory=dict)
    unmeasured: str | None = None
    checkpoint: str | None = None
    log_dir: str | None = None


def finish_fit(
    trainer: Trainer, model: LightningModule, datamodule: LightningDataModule | None, test: bool
) -> RunSummary:
    """Test the best checkpoint of a finished fit and print a summary on the first process.

    Every process of a distributed run must call this: the test is a common effort.

    Args:
        trainer: The trainer after `fit`.
        model: The model it has trained.
        datamodule: The data it was trained on, or None when the model holds its own.
        test: Whether to test where that is possible.

    Returns:
        What was printed.
    """
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    checkpoint = best_checkpoint(trainer)
    untested = _reason_not_to_test(model, datamodule, checkpoint, test)
    metrics: dict[str, float] = {}
    if untested is None:
        for result in trainer.test(model, datamodule=datamodule, ckpt_path=checkpoint, verbose=False):
            metrics.update(result)
    log_dirs = [logger.log_dir for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    log_dir = log_dirs[0] if log_dirs else None
    if not trainer.is_global_zero:
        return RunSummary(metrics, untested, {}, None, checkpoint, log_dir)
    numbers, unmeasured = {}, None
    try:
        numbers = condition_numbers(logged, model)
    except LitCondError as error:  # a model without attention, or one with an unknown kind, can be trained
        unmeasured = str(error)
    summary = RunSummary(metrics, untested, numbers, unmeasured, checkpoint, log_dir)
    render(summary, Console())
    return summary


def best_checkpoint(trainer: Trainer) -> str | None:
    """Return the path of the best checkpoint, of the last one where none is best, or None."""
    # One that watches nothing calls its newest checkpoint the best.
    watching = sorted(trainer.checkpoint_callbacks, key=lambda callback: getattr(callback, "monitor", None) is None)
    for callback in watching:
        for name in ("best_model_path", "last_model_path"):
            path = getattr(callback, name, "")
            if path:
                return str(path)
    return None


def condition_numbers(logged: Mapping[str, float], model: LightningModule) -> dict[str, ConditionNumbers]:
    """Collect the mean condition numbers: those the monitor has logged, or the weights' measured now.

    Args:
        logged: The metrics of the trainer.
        model: The model to measure when the monitor was off.

    Returns:
        The numbers by quantity; the tokens are missing when the monitor was off, they need data.

    Raises:
        NoMatchingTargetError: The monitor was off, and the model holds no attention.
        UnknownAttentionError: The monitor was off, and the model holds attention of an unknown kind.
    """
    found = {
        quantity: ConditionNumbers(logged[f"cond/{quantity}/mean"], logged.get(f"cond_raw/{quantity}/mean"))
        for quantity in QUANTITIES
        if f"cond/{quantity}/mean" in logged
    }
    if found:
        return found
    reports = measure_weights(model)
    for role in dict.fromkeys(report.role for report in reports):
        effective = [report.effective for report in reports if report.role == role]
        raw = [report.raw for report in reports if report.role == role]
        found[role] = ConditionNumbers(fmean(effective), fmean(raw))
    return found


def _reason_not_to_test(
    model: LightningModule, datamodule: LightningDataModule | None, checkpoint: str | None, test: bool
) -> str | None:
    if not test:
        return "test_after_fit is false"
    if checkpoint is None:
        return "no checkpoint was written"
    holders = [(model, LightningModule)] if datamodule is None else [(datamodule, LightningDataModule)]
    if not is_overridden("test_step", model, LightningModule):
        return "the model has no test_step"
    if not any(is_overridden("test_dataloader", holder, base) for holder, base in holders):
        return "there is no test set"
    return None


def render(summary: RunSummary, console: Console) -> None:
    """Print a summary.

    Args:
        summary: What to print.
        console: Where to print it.
    """
    rows = [(name, f"{value:.4f}") for name, value in summary.metrics.items()]
    if summary.untested:
        rows.append(("test", f"not done: {summary.untested}"))
    rows += [(f"mean condition number, {name}", _pair(both)) for name, both in summary.numbers.items()]
    if summary.unmeasured:
        rows.append(("condition numbers", f"not measured: {summary.unmeasured}"))
    rows.append(("checkpoint", _short(summary.checkpoint) if summary.checkpoint else "none"))
    if summary.log_dir:
        rows.append(("to see the curves", f"tensorboard --logdir {shlex.quote(_short(summary.log_dir))}"))
    width = max(len(name) for name, _ in rows) + 2
    console.rule(style="dim")
    for name, value in rows:
        # Lines, not a table: paths and the command must survive a narrow terminal and a copy.
        console.print(Text.assemble((name.ljust(width), "bold"), value), soft_wrap=True)


def _pair(numbers: ConditionNumbers) -> str:
    corrected = _number(numbers.corrected)
    if numbers.raw is None:
        return corrected
    if numbers.raw == numbers.corrected:
        return f"{corrected} (no correction)"
    return f"{corrected} (without the correction {_number(numbers.raw)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _ROUND_FROM else f"{value:.4g}"


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
