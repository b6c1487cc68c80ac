"""`FactorSchedule` against a look-up epoch by epoch."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_echo.measuring.control import Observation, Reason
from lightning_echo.measuring.schedule import FactorSchedule

schedules = st.dictionaries(st.integers(0, 30), st.floats(1, 16), min_size=1, max_size=6)


@given(schedules, st.integers(0, 40), st.floats(1, 8))
def test_each_entry_holds_from_its_epoch_until_the_next_one(factors, epochs, before):
    """An epoch's factor is decided at the end of the one before it; before the first entry it stays what it is."""
    schedule, factor, used = FactorSchedule(factors), factors.get(0, before), []
    assert schedule.initial_factor() == factors.get(0)
    for epoch in range(epochs):
        used.append(factor)
        decision = schedule.decide(Observation(epoch, factor))
        assert decision.reason is Reason.scheduled
        factor = decision.factor
    expected, current = [], before
    for epoch in range(epochs):
        current = factors.get(epoch, current)
        expected.append(current)
    assert used == expected


def test_the_order_of_the_entries_does_not_matter():
    factors = {8: 1.0, 0: 1.5, 2: 4.0}
    decided = [FactorSchedule(factors).decide(Observation(epoch, 1.0)).factor for epoch in range(9)]
    assert decided == [1.5, 4, 4, 4, 4, 4, 4, 1, 1]


def test_the_message_names_the_entry():
    schedule = FactorSchedule({2: 4.0, 5: 2.0})
    assert "from epoch 2 on" in schedule.decide(Observation(3, 4.0)).message
    early = schedule.decide(Observation(0, 1.7))
    assert (early.factor, early.message) == (1.7, "no entry up to epoch 1")


def test_a_resumed_run_needs_no_state():
    schedule = FactorSchedule({2: 4.0})
    assert schedule.state_dict() == {}
    assert schedule.decide(Observation(10, 1.0)).factor == 4


def test_the_users_mapping_may_change_afterwards():
    factors = {0: 2}
    schedule = FactorSchedule(factors)
    factors[0] = 7
    assert schedule.initial_factor() == 2.0
    assert type(schedule.initial_factor()) is float
    assert repr(schedule) == "FactorSchedule({0: 2.0})"


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        ([1.0, 2.0], TypeError, r"factors must map epochs to echo factors, e\.g\. \{0: 1\.0, 2: 4\.0\}, got \[1\.0, 2\.0\]"),
        (3.0, TypeError, r"factors must map epochs to echo factors.*got 3\.0"),
        ({}, ValueError, r"factors must have at least one entry, e\.g\. \{0: 1\.0, 2: 4\.0\}, got \{\}"),
        ({"2": 1.0}, TypeError, r"factors must have epochs \(integers\) as keys, got '2'"),
        ({True: 1.0}, TypeError, r"factors must have epochs \(integers\) as keys, got True"),
        ({1.5: 1.0}, TypeError, r"factors must have epochs \(integers\) as keys, got 1\.5"),
        ({-1: 2.0}, ValueError, r"factors must have epochs from 0 on as keys, got -1; 0 is the first epoch"),
        ({0: 1.0, 3: 0.5}, ValueError, r"factors\[3\] must be a finite number >= 1, got 0\.5; 1 switches echoing off"),
        ({0: math.inf}, ValueError, r"factors\[0\] must be a finite number >= 1, got inf"),
        ({0: math.nan}, ValueError, r"factors\[0\] must be a finite number >= 1, got nan"),
        ({4: "2"}, TypeError, r"factors\[4\] must be a number, got '2'"),
        ({4: True}, TypeError, r"factors\[4\] must be a number, got True"),
    ],
)
def test_an_impossible_schedule_is_refused_with_what_was_expected_and_the_way_out(factors, error, message):
    with pytest.raises(error, match=message):
        FactorSchedule(factors)
