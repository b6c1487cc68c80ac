"""Observations and decisions: what holds for every controller."""

import math

import numpy as np
import pytest

from lightning_echo.measure.control import Controller, Decision, Observation, Reason, as_count, as_number

FACTOR = r"Decision\.factor must be a finite number >= 1, got .*; use 1 to switch echoing off"
STEPS = "every_n_steps must be a number of steps"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Decision(0.99, Reason.custom, ""), ValueError, FACTOR),
        (lambda: Decision(math.nan, Reason.custom, ""), ValueError, FACTOR),
        (lambda: Decision("2", Reason.custom, ""), TypeError, r"Decision\.factor must be a number, got '2'"),
        (lambda: Decision(2, "custom", ""), TypeError, r"Decision\.reason must be a Reason, e\.g\. Reason\.custom"),
        (lambda: as_number("shrink", True), TypeError, "shrink must be a number, got True"),
        (lambda: as_count("every_n_steps", 0), ValueError, STEPS),
        (lambda: as_count("every_n_steps", 2.0), TypeError, STEPS),
        (lambda: as_count("every_n_steps", True), TypeError, STEPS),
        (Controller, TypeError, "decide"),
    ],
)
def test_impossible_decisions_and_options_are_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_numbers_of_numpy_become_plain_since_checkpoints_hold_them():
    assert type(Decision(np.float64(1.5), Reason.custom, "").factor) is float
    assert type(as_number("shrink", 1)) is float
    assert (as_count("every_n_steps", None), type(as_count("every_n_steps", np.int64(50)))) == (None, int)


def test_a_controller_of_ones_own_needs_nothing_but_decide():
    class Always(Controller):
        def decide(self, observation):
            return Decision(2, Reason.custom, "always")

    controller = Always()
    assert (controller.initial_factor(), controller.largest_factor()) == (None, None)
    assert (controller.first_after_steps, controller.every_n_steps, controller.asked_after) == (None, None, ())
    assert controller.state_dict() == {}
    controller.load_state_dict({})
    assert controller.decide(Observation(0, 1.0)).factor == 2
