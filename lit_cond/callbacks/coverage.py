"""What the monitor says: of what it has no numbers, and why it stops a training."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_cond.callbacks.charts import log_text
from lit_cond.errors import ConfigurationError, LitCondError, LitCondWarning
from lit_cond.measuring.coverage import coverage_lines, coverage_table
from lit_cond.surgery.sites import AttentionSite
from lit_cond.surgery.survey import survey_attention

__all__ = ["Coverage", "raise_first", "stop_training"]

Failures = Mapping[tuple[str, str], Exception]


def raise_first(failures: Failures) -> None:
    """Raise why the first quantity that was asked for can not be measured.

    Args:
        failures: Why, by quantity and layer.

    Raises:
        ConfigurationError: If there is any.
    """
    for (quantity, layer), error in failures.items():
        text = _reason(error)
        named = text if f"'{layer}'" in text else f"'{layer}': {text}"
        raise ConfigurationError(f"{quantity} can not be measured: {named}") from error


class Coverage:
    """Remembers what could not be measured, and says it once."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}

    def note(self, failures: Failures) -> bool:
        """Take the failures of a step and return whether any of them is new."""
        known = len(self._reasons)
        for pair, error in failures.items():
            self._reasons.setdefault(pair, _reason(error))
        return len(self._reasons) > known

    def tell(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        layers: Mapping[str, Sequence[str]],
        sites: Sequence[AttentionSite],
    ) -> None:
        """Print what has no numbers, and log a table of all modules.

        Args:
            trainer: Its loggers that take texts get the table.
            pl_module: The module.
            layers: The layers of each quantity.
            sites: The attention layers.
        """
        lines = coverage_lines(layers, self._reasons)
        for quantity, line in lines.items():
            reasons = [self._reasons.get((quantity, layer)) for layer in layers[quantity]]
            without = [reason for reason in reasons if reason is not None]
            if without and len(without) == len(reasons):
                warnings.warn(f"{quantity}: not measured: {without[0]}", LitCondWarning, stacklevel=2)
            elif without:
                rank_zero_info(f"condition numbers: {line}")
        if trainer.is_global_zero:
            table = coverage_table(pl_module, sites, survey_attention(pl_module).left_alone)
            log_text(trainer, "conditioning/measured", "\n".join((*lines.values(), "", table)))


def stop_training(trainer: Trainer, reason: str, step: int, values: Mapping[str, float]) -> None:
    """End a training after this step, say why, and write it down with all numbers.

    Args:
        trainer: The trainer. Call this in every process.
        reason: Why.
        step: The optimizer step.
        values: All numbers of the step.
    """
    trainer.should_stop = True
    # Every process asks for it: a logger may have to agree on it.
    path = Path(trainer.log_dir or trainer.default_root_dir) / "condition_stop.json"
    if trainer.is_global_zero:
        plain = {key: value if math.isfinite(value) else str(value) for key, value in sorted(values.items())}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"reason": reason, "step": step, "values": plain}, indent=2) + "\n")
        log_text(trainer, "conditioning/stopped", reason)
    rank_zero_info(f"training stops: {reason}; all numbers are in {path}")


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, LitCondError) else f"it is not understood ({type(error).__name__}: {error})"
    return text.partition("\n")[0]
