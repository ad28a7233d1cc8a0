"""The callback that moves the strength of the corrections while training."""

import math
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_cond.errors import ConfigurationError
from lit_cond.functional.schedules import measured_strength, scheduled_strength
from lit_cond.surgery.apply import set_strength_, strengths

__all__ = ["StrengthSchedule"]

Schedule = Literal["constant", "linear", "cosine", "step", "warmup_hold", "measured"]
AppliesTo = Literal["all", "weights", "tokens"]


class StrengthSchedule(Callback):
    """Moves the strength of `SpectralConditioning` and `ConditionedTokens` by the optimizer step.

    Logs `cond/strength/<applies_to>` (dimensionless). All schedules but "measured" are functions of the step alone.

    Args:
        schedule: "constant" (`end` from the first step), "linear", "cosine" or "step" (four levels) from `start` to
            `end`, "warmup_hold" (linear over the first tenth, then `end`), or "measured": hold a logged quantity at
            `target`.
        start: Strength at step 0.
        end: Strength after `num_steps`; the upper limit of "measured".
        num_steps: Length in optimizer steps; the whole training when omitted.
        every_n_steps: How often "measured" moves the strength, in optimizer steps.
        monitor: For "measured": the logged quantity, such as "cond/key/mean". A higher strength must lower it. Of
            several processes, the first one's value counts.
        target: For "measured": the value to hold it at.
        gain: For "measured": change of the strength for each factor e between the quantity and its target.
        applies_to: Corrections of weights, of tokens, or both.

    Raises:
        ConfigurationError: If an argument can not be used.

    Example::

        Trainer(callbacks=[SpectralConditioning(), StrengthSchedule("linear", start=0.0, end=1.0)])
    """

    def __init__(
        self,
        schedule: Schedule = "linear",
        start: float = 0.0,
        end: float = 1.0,
        num_steps: int | None = None,
        every_n_steps: int = 50,
        monitor: str | None = None,
        target: float | None = None,
        gain: float = 0.1,
        applies_to: AppliesTo = "all",
    ) -> None:
        for name, value, choices in (
            ("schedule", schedule, get_args(Schedule)),
            ("applies_to", applies_to, get_args(AppliesTo)),
        ):
            if value not in choices:
                raise ConfigurationError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
        for name, number in (("start", start), ("end", end), ("gain", gain)):
            if not math.isfinite(number) or number < 0:
                raise ConfigurationError(f"`{name}` must be a finite number >= 0, got {number}")
        for name, count in (("num_steps", num_steps), ("every_n_steps", every_n_steps)):
            if count is not None and count < 1:
                raise ConfigurationError(f"`{name}` must be >= 1, got {count}")
        if schedule == "measured" and (monitor is None or target is None or not target > 0):
            raise ConfigurationError(
                f"schedule='measured' needs `monitor` and a `target` > 0, got monitor={monitor!r}, target={target!r}"
            )
        self.schedule = schedule
        self.start = start
        self.end = end
        self.num_steps = num_steps
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.target = target
        self.gain = gain
        self.applies_to = applies_to
        self._strength = start
        self._value: float | None = None
        self._moved_at = -1
        self._found = False

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(schedule=self.schedule, applies_to=self.applies_to, monitor=self.monitor)

    def strength_at(self, trainer: Trainer, step: int) -> float:
        """Return the strength at an optimizer step.

        Raises:
            ConfigurationError: If the training has no end and `num_steps` was omitted.
        """
        if self.schedule == "measured":
            return self._strength
        num_steps = trainer.estimated_stepping_batches if self.num_steps is None else self.num_steps
        if math.isinf(num_steps):
            raise ConfigurationError("the training has no last step; give StrengthSchedule `num_steps`")
        return scheduled_strength(self.schedule, step, self.start, self.end, int(num_steps))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin anew with a new training; a resume restores the state after this."""
        if stage == "fit" and trainer.global_step == 0:
            self._strength, self._value, self._moved_at = self.start, None, -1
        self._found = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is something to schedule.

        Raises:
            ConfigurationError: If the model has no correction of the kind.
        """
        if not strengths(pl_module, self.applies_to):
            raise ConfigurationError(
                f"StrengthSchedule(applies_to={self.applies_to!r}) finds no correction to move; add "
                "SpectralConditioning or ConditionedTokens to the callbacks"
            )

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        set_strength_(pl_module, self.strength_at(trainer, trainer.global_step), self.applies_to)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the strength of the step that begins."""
        step = trainer.global_step
        every = self.every_n_steps
        if self.schedule == "measured" and step // every != self._moved_at // every:
            self._moved_at = step
            if self._value is not None and self.target is not None:
                self._strength = measured_strength(
                    self._strength, self._value, self.target, self.gain, lower=0.0, upper=self.end
                )
            # A quantity may be logged in one process only, or with a value in each; the model is the same in all.
            self._strength = trainer.strategy.broadcast(self._strength)
        value = self.strength_at(trainer, step)
        set_strength_(pl_module, value, self.applies_to)
        pl_module.log(f"cond/strength/{self.applies_to}", value, batch_size=1)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remember the measured quantity, so that the order of the callbacks does not matter.

        Raises:
            ConfigurationError: If nothing logs the quantity.
        """
        self._remember(trainer)
        # `ConditionNumberMonitor` logs with the first batch, if after this callback.
        if self.monitor is not None and self.monitor.startswith("cond") and trainer.global_step > 1:
            self._require_value(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to go on without the measured quantity.

        Raises:
            ConfigurationError: If nothing has logged it for a whole epoch.
        """
        self._remember(trainer)
        if self.monitor is not None:
            self._require_value(trainer)

    def _remember(self, trainer: Trainer) -> None:
        if self.monitor in trainer.callback_metrics:
            self._value = float(trainer.callback_metrics[self.monitor])

    def _require_value(self, trainer: Trainer) -> None:
        if self._found:
            return
        # The first process decides, so that all go on or none does.
        self._found = trainer.strategy.broadcast(self._value is not None)
        if not self._found:
            raise ConfigurationError(
                f"StrengthSchedule(monitor={self.monitor!r}) finds no such metric; logged are "
                f"{', '.join(sorted(trainer.callback_metrics))}"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"strength": self._strength, "value": self._value, "moved_at": self._moved_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._strength = state_dict["strength"]
        self._value = state_dict["value"]
        self._moved_at = state_dict["moved_at"]
