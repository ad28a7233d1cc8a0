import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_cond.errors import ConfigurationError
from lit_cond.functional import (
    constant_schedule,
    cosine_schedule,
    linear_schedule,
    measured_strength,
    scheduled_strength,
    step_schedule,
    warmup_hold_schedule,
)

MOVING = [linear_schedule, cosine_schedule, step_schedule, warmup_hold_schedule]
NAMES = ["constant", "linear", "cosine", "step", "warmup_hold"]

strengths = st.floats(-1e6, 1e6)
lengths = st.integers(1, 10**7)
steps = st.integers(-10, 2 * 10**7)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (constant_schedule, [3, 3, 3, 3, 3, 3]),
        (linear_schedule, [1, 1.5, 2, 2.5, 3, 3]),
        (cosine_schedule, [1, 2 - math.sqrt(0.5), 2, 2 + math.sqrt(0.5), 3, 3]),
        (step_schedule, [1, 1 + 2 / 3, 1 + 4 / 3, 3, 3, 3]),
        (warmup_hold_schedule, [1, 3, 3, 3, 3, 3]),
    ],
)
def test_by_hand(schedule, expected):
    assert [schedule(step, 1.0, 3.0, 40) for step in (0, 10, 20, 30, 40, 99)] == pytest.approx(expected)


def test_step_by_hand():
    values = [step_schedule(step, 0.0, 1.0, 10, num_levels=2) for step in range(12)]
    assert values == [0.0] * 5 + [1.0] * 7
    values = [step_schedule(step, 0.0, 2.0, 9, num_levels=3) for step in range(10)]
    assert values == [0.0] * 3 + [1.0] * 3 + [2.0] * 4


def test_warmup_hold_by_hand():
    values = [warmup_hold_schedule(step, 0.0, 2.0, 8, warmup_fraction=0.5) for step in range(9)]
    assert values == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", MOVING)
@given(start=strengths, end=strengths, num_steps=lengths)
def test_end_points_are_exact(schedule, start, end, num_steps):
    assert schedule(0, start, end, num_steps) == start
    assert schedule(-1, start, end, num_steps) == start
    assert schedule(num_steps, start, end, num_steps) == end
    assert schedule(2 * num_steps, start, end, num_steps) == end


@pytest.mark.parametrize("schedule", MOVING)
@given(start=strengths, end=strengths, num_steps=lengths, step=steps)
def test_bounded_by_the_end_points(schedule, start, end, num_steps, step):
    assert min(start, end) <= schedule(step, start, end, num_steps) <= max(start, end)


def test_bounded_even_where_the_difference_overflows():
    assert linear_schedule(1, -1.7e308, 1.7e308, 4) <= 1.7e308


@pytest.mark.parametrize("schedule", MOVING)
@given(start=strengths, end=strengths, num_steps=lengths, pair=st.tuples(steps, steps))
def test_monotone(schedule, start, end, num_steps, pair):
    early, late = sorted(pair)
    change = schedule(late, start, end, num_steps) - schedule(early, start, end, num_steps)
    assert change * (1 if end >= start else -1) >= -1e-9


@given(start=strengths, end=strengths, num_steps=lengths, step=steps)
def test_constant_is_constant(start, end, num_steps, step):
    assert constant_schedule(step, start, end, num_steps) == end


@pytest.mark.parametrize("name", NAMES)
def test_by_name(name):
    function = {f.__name__: f for f in (*MOVING, constant_schedule)}[f"{name}_schedule"]
    for step in (0, 3, 7, 10):
        assert scheduled_strength(name, step, 0.5, 2.0, 10) == function(step, 0.5, 2.0, 10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: scheduled_strength("liner", 0, 0, 1, 10),
            "schedule='liner' is unknown; choose one of constant, linear",
        ),
        (lambda: linear_schedule(0, 0.0, 1.0, 0), "num_steps=0 is no length"),
        (lambda: constant_schedule(0, 0.0, 1.0, -5), "num_steps=-5"),
        (lambda: cosine_schedule(0, math.nan, 1.0, 10), "start=nan"),
        (lambda: cosine_schedule(0, 0.0, math.inf, 10), "end=inf"),
        (lambda: step_schedule(0, 0.0, 1.0, 10, num_levels=1), "num_levels=1 makes no staircase"),
        (lambda: step_schedule(0, 0.0, 1.0, 0), "num_steps=0"),
        (lambda: warmup_hold_schedule(0, 0.0, 1.0, 10, warmup_fraction=0.0), "warmup_fraction=0.0"),
        (lambda: warmup_hold_schedule(0, 0.0, 1.0, 10, warmup_fraction=1.5), "warmup_fraction=1.5"),
        (lambda: measured_strength(1.0, 2.0, 0.0), "target=0.0 can not be reached"),
        (lambda: measured_strength(1.0, 2.0, math.nan), "target=nan"),
        (lambda: measured_strength(1.0, 2.0, 1.0, gain=0.0), "gain=0.0 does not steer"),
        (lambda: measured_strength(1.0, 2.0, 1.0, gain=-0.1), "gain=-0.1"),
        (lambda: measured_strength(1.0, 2.0, 1.0, lower=2.0, upper=1.0), "lower=2.0 and upper=1.0"),
        (lambda: measured_strength(1.0, 2.0, 1.0, lower=math.nan), "lower=nan"),
        (lambda: measured_strength(math.nan, 2.0, 1.0), "strength=nan"),
        (lambda: measured_strength(1.0, 2.0, 1.0, direction="down"), "direction='down' is unknown"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_measured_by_hand():
    assert measured_strength(1.0, math.e, 1.0, gain=0.25) == pytest.approx(1.25)
    assert measured_strength(1.0, 1.0, math.e, gain=0.25) == pytest.approx(0.75)
    assert measured_strength(1.0, 5.0, 5.0) == 1.0
    assert measured_strength(1.0, math.e, 1.0, gain=0.25, direction="raises") == pytest.approx(0.75)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -3.0])
def test_a_useless_measurement_changes_nothing(value):
    assert measured_strength(0.7, value, 2.0) == 0.7


@given(
    strength=strengths,
    value=st.floats(allow_nan=True, allow_infinity=True),
    target=st.floats(1e-300, 1e300),
    gain=st.floats(1e-6, 1e6),
    bounds=st.tuples(st.floats(-100, 100), st.floats(-100, 100)),
    direction=st.sampled_from(["lowers", "raises"]),
)
def test_measured_is_bounded_whatever_is_measured(strength, value, target, gain, bounds, direction):
    lower, upper = sorted(bounds)
    assert lower <= measured_strength(strength, value, target, gain, lower, upper, direction) <= upper


@given(value=st.floats(1e-6, 1e12), target=st.floats(1e-6, 1e12), gain=st.floats(1e-3, 10))
def test_measured_moves_towards_the_target(value, target, gain):
    change = measured_strength(0.0, value, target, gain, -math.inf, math.inf)
    assert change * (value - target) >= 0


@pytest.mark.parametrize(("sigma_min", "target"), [(1e-3, 5.0), (0.2, 1.5)])
def test_the_controller_reaches_its_target(sigma_min, target):
    # kappa(W + strength * sigma_max * polar) of a matrix with sigma_max = 1.
    strength = 0.0
    for _ in range(300):
        strength = measured_strength(strength, (1 + strength) / (sigma_min + strength), target, gain=0.1)
    assert (1 + strength) / (sigma_min + strength) == pytest.approx(target, rel=1e-3)
