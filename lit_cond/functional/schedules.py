"""The strength of a correction as a stateless function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from lit_cond.errors import ConfigurationError

__all__ = [
    "ScheduleName",
    "constant_schedule",
    "cosine_schedule",
    "linear_schedule",
    "measured_strength",
    "scheduled_strength",
    "step_schedule",
    "warmup_hold_schedule",
]

ScheduleName = Literal["constant", "linear", "cosine", "step", "warmup_hold"]


def constant_schedule(step: int, start: float, end: float, num_steps: int) -> float:
    """Return ``end`` at every step.

    Args:
        step: Optimizer steps done so far.
        start: Ignored; here so that all schedules are called alike.
        end: The strength.
        num_steps: Ignored likewise, but checked.

    Returns:
        The strength.

    Raises:
        ConfigurationError: ``num_steps`` is below 1 or a number is not finite.
    """
    _progress(step, start, end, num_steps)
    return end


def linear_schedule(step: int, start: float, end: float, num_steps: int) -> float:
    """Return the point at ``step`` on the straight line from ``start`` to ``end``.

    Args:
        step: Optimizer steps done so far; before 0 the value is ``start``, from ``num_steps`` on it is
            ``end``.
        start: Strength at step 0.
        end: Strength at step ``num_steps``.
        num_steps: Length of the line.

    Returns:
        The strength.

    Raises:
        ConfigurationError: ``num_steps`` is below 1 or a number is not finite.
    """
    return _between(start, end, _progress(step, start, end, num_steps))


def cosine_schedule(step: int, start: float, end: float, num_steps: int) -> float:
    """Return the point at ``step`` on the half cosine wave from ``start`` to ``end``, flat at both ends.

    Args:
        step: Optimizer steps done so far; before 0 the value is ``start``, from ``num_steps`` on it is
            ``end``.
        start: Strength at step 0.
        end: Strength at step ``num_steps``.
        num_steps: Length of the wave.

    Returns:
        The strength.

    Raises:
        ConfigurationError: ``num_steps`` is below 1 or a number is not finite.
    """
    progress = _progress(step, start, end, num_steps)
    return _between(start, end, (1 - math.cos(math.pi * progress)) / 2)


def step_schedule(step: int, start: float, end: float, num_steps: int, num_levels: int = 4) -> float:
    """Return the level at ``step`` of a staircase from ``start`` to ``end``.

    The levels are equally far apart and equally long, the first is ``start`` and the last is ``end``.

    Args:
        step: Optimizer steps done so far; before 0 the value is ``start``, from ``num_steps`` on it is
            ``end``.
        start: The first level.
        end: The last level.
        num_steps: Length of the staircase.
        num_levels: Number of levels.

    Returns:
        The strength.

    Raises:
        ConfigurationError: ``num_steps`` is below 1, ``num_levels`` below 2, or a number is not finite.
    """
    if num_levels < 2:
        raise ConfigurationError(f"num_levels={num_levels} makes no staircase; give at least 2.")
    _progress(step, start, end, num_steps)
    # In whole numbers: a product of floats could fall just short of a level.
    level = min(max(step, 0) * num_levels // num_steps, num_levels - 1)
    return _between(start, end, level / (num_levels - 1))


def warmup_hold_schedule(step: int, start: float, end: float, num_steps: int, warmup_fraction: float = 0.1) -> float:
    """Return a straight line from ``start`` to ``end`` over the first part of the run, then ``end``.

    Args:
        step: Optimizer steps done so far.
        start: Strength at step 0.
        end: Strength after the warm-up.
        num_steps: Length of the whole run.
        warmup_fraction: Part of ``num_steps`` that the warm-up takes.

    Returns:
        The strength.

    Raises:
        ConfigurationError: ``num_steps`` is below 1, ``warmup_fraction`` not in (0, 1], or a number is not
            finite.
    """
    if not 0 < warmup_fraction <= 1:
        raise ConfigurationError(f"warmup_fraction={warmup_fraction} is no part of a run; give a number in (0, 1].")
    return _between(start, end, min(_progress(step, start, end, num_steps) / warmup_fraction, 1.0))


def scheduled_strength(schedule: ScheduleName, step: int, start: float, end: float, num_steps: int) -> float:
    """Return the strength at ``step`` of the schedule of this name, with its default shape.

    Args:
        schedule: Name of the schedule.
        step: Optimizer steps done so far.
        start: Strength at step 0.
        end: Strength at step ``num_steps``.
        num_steps: Length of the schedule.

    Returns:
        The strength.

    Raises:
        ConfigurationError: The name is unknown or a number can not be used.
    """
    if schedule not in _SCHEDULES:
        raise ConfigurationError(f"schedule={schedule!r} is unknown; choose one of {', '.join(_SCHEDULES)}.")
    return _SCHEDULES[schedule](step, start, end, num_steps)


def measured_strength(
    strength: float,
    value: float,
    target: float,
    gain: float = 0.1,
    lower: float = 0.0,
    upper: float = 10.0,
    direction: Literal["lowers", "raises"] = "lowers",
) -> float:
    """Return the next strength that holds a measured quantity at a target: one step of a controller.

    The strength moves by ``gain * log(value / target)``: in ratios, because condition numbers span decades.
    The bounds keep an unattainable target (a condition number below 1) from driving the strength away for
    ever.

    Args:
        strength: The current strength.
        value: The measured quantity; if it is not finite or not positive, the strength stays.
        target: What it shall be.
        gain: Change of strength per factor e of deviation.
        lower: Smallest strength.
        upper: Largest strength.
        direction: What more strength does to the quantity. It lowers a condition number, and with the
            identity correction the attention entropy too.

    Returns:
        The next strength, in [lower, upper].

    Raises:
        ConfigurationError: ``target`` or ``gain`` is not positive and finite, the bounds are empty,
            ``strength`` is not finite, or ``direction`` is unknown.
    """
    if not (target > 0 and math.isfinite(target)):
        raise ConfigurationError(f"target={target} can not be reached; give a positive finite number.")
    if not (gain > 0 and math.isfinite(gain)):
        raise ConfigurationError(f"gain={gain} does not steer; give a positive finite number, such as 0.1.")
    if not lower <= upper:
        raise ConfigurationError(f"lower={lower} and upper={upper} leave no strength; give lower <= upper.")
    if not math.isfinite(strength):
        raise ConfigurationError(f"strength={strength} is not finite; give a finite number.")
    if direction not in ("lowers", "raises"):
        raise ConfigurationError(f"direction={direction!r} is unknown; choose 'lowers' or 'raises'.")
    if math.isfinite(value) and value > 0:
        change = gain * (math.log(value) - math.log(target))
        strength += change if direction == "lowers" else -change
    return min(max(strength, lower), upper)


def _progress(step: int, start: float, end: float, num_steps: int) -> float:
    """Return the part of the schedule that is done, in [0, 1], after checking the arguments."""
    if num_steps < 1:
        raise ConfigurationError(f"num_steps={num_steps} is no length of a schedule; give at least 1.")
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ConfigurationError(f"start={start}, end={end}: a strength must be finite; give two finite numbers.")
    return min(max(step / num_steps, 0.0), 1.0)


def _between(start: float, end: float, fraction: float) -> float:
    """Return the exact end points and, in between, never a value outside of them."""
    if fraction <= 0:
        return start
    if fraction >= 1:
        return end
    value = start + (end - start) * fraction
    return min(max(value, min(start, end)), max(start, end))


_SCHEDULES: dict[str, Callable[[int, float, float, int], float]] = {
    "constant": constant_schedule,
    "linear": linear_schedule,
    "cosine": cosine_schedule,
    "step": step_schedule,
    "warmup_hold": warmup_hold_schedule,
}
