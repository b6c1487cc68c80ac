"""Observations and decisions: what holds for every controller."""

import math

import numpy as np
import pytest

from lightning_echo.measure.control import Controller, Decision, Moment, Observation, Reason, as_count, as_number


@pytest.mark.parametrize("factor", [0.99, 0, -2, math.nan, math.inf])
def test_a_decision_for_an_impossible_factor_is_refused_with_the_way_out(factor):
    with pytest.raises(ValueError, match=r"Decision\.factor must be a finite number >= 1, got .*; use 1 to switch echoing off"):
        Decision(factor, Reason.custom, "why not")


def test_a_decision_carries_factor_reason_and_message():
    decision = Decision(1, Reason.custom, "half of it")
    assert (decision.factor, decision.reason, decision.message) == (1, Reason.custom, "half of it")
    assert decision.since is None


def test_every_reason_has_its_name_as_value_so_that_it_can_be_logged():
    assert [reason.value for reason in Reason] == [reason.name for reason in Reason]


def test_an_observation_of_which_nothing_is_measured_says_so():
    seen = Observation(epoch=3, factor=2.0)
    assert (seen.steps, seen.idle_fraction, seen.step_seconds, seen.costs) == (0, None, None, None)
    assert (dict(seen.metrics), seen.logged, seen.validated) == ({}, frozenset(), True)
    assert (seen.moment, seen.batches, seen.idle_low) == (Moment.epoch_end, 0, None)


def test_a_controller_of_ones_own_needs_nothing_but_decide():
    class Always(Controller):
        def decide(self, observation):
            return Decision(2, Reason.custom, "always")

    controller = Always()
    assert controller.initial_factor() is None
    assert (controller.first_after_steps, controller.every_n_steps, controller.asked_after) == (None, None, ())
    assert controller.state_dict() == {}
    controller.load_state_dict({})
    assert controller.decide(Observation(0, 1.0)).factor == 2


def test_a_controller_without_decide_cannot_be_made():
    with pytest.raises(TypeError, match="decide"):
        Controller()


@pytest.mark.parametrize("value", ["2", None, True, 1j, [1]])
def test_an_option_that_is_no_number_is_refused_by_its_name(value):
    with pytest.raises(TypeError, match="shrink must be a number, got"):
        as_number("shrink", value)


def test_an_option_becomes_a_float():
    assert type(as_number("shrink", 1)) is float


def test_a_factor_that_numpy_has_computed_becomes_plain_since_checkpoints_hold_it():
    assert type(Decision(np.float64(1.5), Reason.custom, "").factor) is float


@pytest.mark.parametrize(
    ("factor", "reason", "message"), [("2", Reason.custom, "Decision.factor"), (2, "custom", "Reason.custom")]
)
def test_a_decision_of_wrong_types_is_refused_by_name(factor, reason, message):
    with pytest.raises(TypeError, match=message):
        Decision(factor, reason, "")


@pytest.mark.parametrize(("value", "expected"), [(None, None), (1, 1), (np.int64(50), 50)])
def test_a_number_of_steps_is_a_plain_integer_or_none(value, expected):
    found = as_count("every_n_steps", value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError), ("5", TypeError)]
)
def test_a_number_of_steps_that_is_none_is_refused_by_its_name(value, error):
    with pytest.raises(error, match="every_n_steps must be a number of steps"):
        as_count("every_n_steps", value)
