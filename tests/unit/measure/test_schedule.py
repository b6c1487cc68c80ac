"""`FactorSchedule` against a look-up epoch by epoch, and as a replay of a run."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_echo.measure.control import Observation, Reason
from lightning_echo.measure.guard import FactorSchedule

schedules = st.dictionaries(st.integers(0, 30), st.floats(1, 16), min_size=1, max_size=6)


@settings(max_examples=30)
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


def test_the_message_names_the_entry_and_a_resumed_run_needs_no_state():
    factors = {5: 2, 2: 4.0}
    schedule = FactorSchedule(factors)
    factors[2] = 7.0  # the user's mapping may change afterwards
    assert "from epoch 2 on" in schedule.decide(Observation(3, 4.0)).message
    early = schedule.decide(Observation(0, 1.7))
    assert (early.factor, early.message) == (1.7, "no entry up to epoch 1")
    assert schedule.state_dict() == {}
    assert [schedule.decide(Observation(epoch, 1.0)).factor for epoch in (3, 4, 10)] == [4, 2, 2]


KEYS = r"factors must have epochs \(integers\) as keys, got"


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        ([1.0, 2.0], TypeError, r"factors must map epochs to echo factors, e\.g\. \{0: 1\.0, 2: 4\.0\}, got \[1\.0, 2\.0\]"),
        ({}, ValueError, r"factors must have at least one entry, e\.g\. \{0: 1\.0, 2: 4\.0\}, got \{\}"),
        ({"2": 1.0}, TypeError, f"{KEYS} '2'"),
        ({True: 1.0}, TypeError, f"{KEYS} True"),
        ({-1: 2.0}, ValueError, r"factors must have epochs from 0 on as keys, got -1; 0 is the first epoch"),
        ({0: 1.0, 3: 0.5}, ValueError, r"factors\[3\] must be a finite number >= 1, got 0\.5; 1 switches echoing off"),
        ({0: math.nan}, ValueError, r"factors\[0\] must be a finite number >= 1, got nan"),
        ({4: "2"}, TypeError, r"factors\[4\] must be a number, got '2'"),
    ],
)
def test_an_impossible_schedule_is_refused_with_what_was_expected_and_a_hint(factors, error, message):
    with pytest.raises(error, match=message):
        FactorSchedule(factors)


BEGIN = {"step": 0, "batch": 0, "factor": 1.0, "reason": "none", "message": ""}
NO_BEGIN = "does not tell with which factor the run began"


def broken(*decisions, **changes):
    found = {"version": 2, "reports": [], "decisions": list(decisions or [BEGIN]), "packages": {}, "verdict": None}
    found |= dict.fromkeys(("program", "name", "began"), "")
    return {**found, **changes}


def later(step, batch, factor=2.0):
    return BEGIN | {"step": step, "batch": batch, "factor": factor}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be replayed"),
        ("[]", "must be an object with version, reports and decisions"),
        (broken(version="1"), "must be an object with version"),
        (broken(version=3), "has version 3, this lightning_echo knows up to 2: upgrade"),
        (broken(version=1), "has version 1, of before the first release, and only 2 is known: train again"),
        (broken(decisions=3), "is damaged"),
        (broken(decisions=[]), NO_BEGIN),
        (broken({"step": 0}), "is damaged"),
        (broken(later(9, 9)), NO_BEGIN),
        (broken(BEGIN, later(None, 9)), "factor 2 from batch 9 on was not"),
        (broken(BEGIN, later("5", 9)), r"decisions\[1\]\.step must be an integer, got str '5'"),
        (broken(later(0, 0, 0.5)), "a factor must be a finite number >= 1, got 0.5"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_by_its_name(tmp_path, content, message):
    path = tmp_path / "some.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as raised:
        FactorSchedule.from_summary(path)
    assert str(raised.value).startswith(f"{path} cannot be replayed: ")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        FactorSchedule.from_summary(tmp_path / "nowhere.json")
