"""The rule that stops a training: its text, what it remembers, what it says."""

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_cond.callbacks.stop_rule import StopCondition, StopRule
from lit_cond.errors import ConfigurationError

KEY = "cond/tokens/max"


def steps_until_stop(rule, values):
    return next((step for step, value in values if rule.update(step, {KEY: value}) is not None), None)


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("cond/tokens/max > 1e6 for 100 steps", [(KEY, ">", 1e6, 100)]),
        ("cond/tokens/max>1e6", [(KEY, ">", 1e6, 0)]),
        ("  cond/tokens/max   >=\t2  for  1  step ", [(KEY, ">=", 2.0, 1)]),
        ("effective_rank/value/min < 3.5", [("effective_rank/value/min", "<", 3.5, 0)]),
        ("a/b/c <= -1", [("a/b/c", "<=", -1.0, 0)]),
        ("cond/key/nonfinite > 0", [("cond/key/nonfinite", ">", 0.0, 0)]),
        ("cond/tokens/max >= inf", [(KEY, ">=", math.inf, 0)]),
        ("a/b/c > 1 or d/e/f < 2 for 5 steps", [("a/b/c", ">", 1.0, 0), ("d/e/f", "<", 2.0, 5)]),
        ("cond/query/net.decoder.for.or.attn > 9", [("cond/query/net.decoder.for.or.attn", ">", 9.0, 0)]),
    ],
)
def test_rules_are_read(text, conditions):
    assert StopRule.parse(text).conditions == tuple(StopCondition(*c) for c in conditions)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        (None, "None"),
        (3, "3"),
        ("cond/tokens/max", "is no comparison"),
        ("cond/tokens/max = 3", "is no comparison"),
        ("cond/tokens/max == 3", "is no comparison"),
        ("cond/tokens/max > 3 for 100 epochs", "is no comparison"),
        ("cond/tokens/max > 3 for -1 steps", "is no comparison"),
        ("cond/tokens/max > 3 for 1.5 steps", "is no comparison"),
        ("cond/tokens/max > 3 and a/b/c > 2", "is no comparison"),
        ("> 3", "is no comparison"),
        ("cond/tokens/max > 1e6 or", "is no comparison"),
        ("cond/tokens/max > 1 or nothing", "'nothing' in the stop rule"),
        ("cond/tokens/max > many", "'many', which is no number"),
        ("cond/tokens/max > nan", "'nan', which is no number"),
        ("cond/tokens/max > 3 for 0 steps", "lasts for 0 steps"),
    ],
)
def test_what_can_not_be_read_is_one_line_with_the_grammar(text, part):
    with pytest.raises(ConfigurationError) as error:
        StopRule.parse(text)
    message = str(error.value)
    assert part in message
    assert "'cond/tokens/max > 1e6 for 100 steps'" in message
    assert "\n" not in message


def test_a_rule_needs_a_condition():
    with pytest.raises(ConfigurationError, match="without a condition"):
        StopRule([])


def test_stops_at_the_first_match_without_a_duration():
    rule = StopRule.parse("cond/tokens/max > 10")
    assert rule.update(0, {KEY: 10.0}) is None
    assert rule.update(50, {KEY: 11.0}) is not None


def test_a_duration_counts_steps_not_measurements_and_begins_anew_after_an_interruption():
    def rule():
        return StopRule.parse("cond/tokens/max > 10 for 100 steps")

    assert steps_until_stop(rule(), [(step, 11) for step in range(0, 500, 50)]) == 100
    assert steps_until_stop(rule(), [(step, 11) for step in range(30, 500, 70)]) == 170
    interrupted = [(0, 11), (50, 11), (90, 9), (100, 11), (150, 11), (199, 11), (200, 11)]
    assert steps_until_stop(rule(), interrupted) == 200


def test_the_reason_names_key_value_threshold_and_first_step():
    rule = StopRule.parse("cond/tokens/max > 1e6 for 100 steps")
    assert rule.update(300, {KEY: 1.5e6}) is None
    reason = rule.update(400, {KEY: 2.5e6})
    assert reason == (
        "cond/tokens/max is 2.5e+06, which is > 1e+06 since step 300 (rule: cond/tokens/max > 1e+06 for 100 steps)"
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(("operator", "stops"), [(">", True), (">=", True), ("<", False), ("<=", False)])
def test_what_is_not_finite_is_larger_than_any_threshold(value, operator, stops):
    for threshold in ("1e300", "inf"):
        reason = StopRule.parse(f"cond/tokens/max {operator} {threshold}").update(7, {KEY: value})
        assert (reason is not None) == stops
        if stops:
            assert f"is {value}, which is not finite and counts as {operator} {threshold.replace('e', 'e+')}" in reason


def test_each_condition_counts_on_its_own_and_the_first_that_stops_is_named():
    rule = StopRule.parse("a/b/c > 1 for 10 steps or d/e/f < 0 for 5 steps")
    assert rule.update(0, {"a/b/c": 2.0, "d/e/f": 1.0}) is None
    assert rule.update(4, {"a/b/c": 2.0, "d/e/f": -1.0}) is None
    assert rule.update(9, {"a/b/c": 2.0, "d/e/f": -2.0}).startswith("d/e/f is -2, which is < 0 since step 4")


def test_a_step_that_did_not_measure_the_quantity_changes_nothing():
    rule = StopRule.parse("cond/tokens/max > 10 for 100 steps")
    rule.update(0, {KEY: 11.0})
    assert rule.update(50, {"cond/query/max": 1.0}) is None
    assert rule.update(60, {}) is None
    assert "since step 0" in rule.update(100, {KEY: 11.0})


def test_a_key_that_is_not_logged_is_an_error_that_names_near_ones():
    rule = StopRule.parse("cond/tokens/maximum > 10")
    rule.update(0, {"cond/query/max": 1.0})  # tokens have an interval of their own
    with pytest.raises(ConfigurationError) as error:
        rule.update(10, {"cond/query/max": 1.0, "cond/tokens/max": 1.0, "cond/tokens/mean": 1.0})
    assert "'cond/tokens/maximum', which is not logged; logged are cond/tokens/max" in str(error.value)
    assert "cond/query" not in str(error.value)


def test_a_key_that_was_there_before_may_be_missing():
    rule = StopRule.parse("cond/tokens/blocks.0 > 10 for 20 steps")
    rule.update(0, {"cond/tokens/blocks.0": 11.0, "cond/tokens/max": 11.0})
    assert rule.update(10, {"cond/tokens/max": 5.0}) is None
    assert "since step 0" in rule.update(20, {"cond/tokens/blocks.0": 11.0})


def test_a_count_that_is_logged_only_above_zero_is_zero_where_it_is_missing():
    rule = StopRule.parse("cond/key/nonfinite > 0")
    assert rule.update(0, {"cond/key/max": 3.0}) is None
    assert rule.update(1, {"cond/key/max": 3.0, "cond/key/nonfinite": 1.0}) is not None


def test_a_missing_count_ends_what_lasted():
    rule = StopRule.parse("cond/key/nonfinite > 0 for 10 steps")
    assert rule.update(0, {"cond/key/max": 3.0, "cond/key/nonfinite": 1.0}) is None
    assert rule.update(5, {"cond/key/max": 3.0}) is None
    assert rule.update(10, {"cond/key/max": 3.0, "cond/key/nonfinite": 1.0}) is None


def test_what_is_never_measured_is_refused():
    rule = StopRule.parse("cond/tokns/max > 10")
    with pytest.raises(ConfigurationError, match="nothing of 'cond/tokns' is measured; measured: cond/tokens"):
        rule.check({"cond/tokens", "entropy/scores"})
    StopRule.parse("cond/tokens/max > 10 or entropy/scores/min < 0.1").check(["cond/tokens", "entropy/scores"])


def test_another_training_begins_anew():
    rule = StopRule.parse("cond/tokens/max > 10 for 100 steps")
    rule.update(500, {KEY: 11.0})
    assert rule.update(0, {KEY: 11.0}) is None
    assert rule.update(99, {KEY: 11.0}) is None
    assert "since step 0" in rule.update(100, {KEY: 11.0})
    rule.reset()
    assert rule.update(100, {KEY: 11.0}) is None


@given(
    values=st.lists(st.sampled_from([1.0, 11.0, math.inf, math.nan]), min_size=1, max_size=30),
    cut=st.integers(0, 30),
    steps=st.integers(1, 10),
    interval=st.integers(1, 4),
)
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(values, cut, steps, interval):
    text = f"cond/tokens/max > 10 for {steps} steps"
    series = [(i * interval, value) for i, value in enumerate(values)]
    whole, first, second = (StopRule.parse(text) for _ in range(3))
    expected = [whole.update(step, {KEY: value}) for step, value in series]
    before = [first.update(step, {KEY: value}) for step, value in series[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [second.update(step, {KEY: value}) for step, value in series[cut:]] == expected


def test_the_state_of_another_rule_is_left():
    first, second = (
        StopRule.parse("cond/tokens/max > 10 for 5 steps"),
        StopRule.parse("cond/tokens/max > 3 for 5 steps"),
    )
    first.update(0, {KEY: 11.0})
    second.load_state_dict(first.state_dict())
    assert second.update(5, {KEY: 11.0}) is None


def test_rules_are_copied_with_their_state():
    rule = StopRule.parse("cond/tokens/max > 10 for 5 steps")
    rule.update(0, {KEY: 11.0})
    assert pickle.loads(pickle.dumps(rule)).update(5, {KEY: 11.0}) is not None


def test_a_rule_as_text_is_the_same_rule():
    for text in ("a/b/c > 1.23456789 for 3 steps or d/e/f <= inf", "cond/tokens/max > 1000000", "a/b/c < 1e-300"):
        assert StopRule.parse(str(StopRule.parse(text))).conditions == StopRule.parse(text).conditions
