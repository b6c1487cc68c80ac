"""How early a batch on demand is due: as the slowest of the last makings takes, with the read that is under way, plus one."""

import pytest

from lightning_echo.pipeline import demand
from lightning_echo.pipeline.demand import Pace
from lightning_echo.pipeline.worker import Report

STEP = 0.010


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(demand, "perf_counter", lambda: now[0])
    return now


def leads(pace: Pace, clock: list[float], reports: list[Report]) -> list[int]:
    """The lead after each of these batches, with a step of 10 ms between them."""
    found = []
    for report in reports:
        pace.ask()
        found.append(pace.hand(report))
        clock[0] += STEP
    return found


def test_before_a_step_was_measured_one_batch_is_due_early(clock: list[float]) -> None:
    assert leads(Pace(4), clock, [Report(4, 0, 0, 0.1, 0.1)]) == [1]
    assert leads(Pace(0), clock, [Report(4, 0, 0, 0.1, 0.1)]) == [0]


def test_a_batch_is_due_as_early_as_making_it_takes_and_one_more(clock: list[float]) -> None:
    made = Report(4, 0, 0, 0.0, rest=0.012, collate=0.003)  # 15 ms: two steps, begun
    assert leads(Pace(9), clock, [made] * 3) == [1, 3, 3]


def test_the_read_that_a_worker_is_in_comes_first(clock: list[float]) -> None:
    made = Report(4, 0, 0, source=4 * 0.020, rest=0.005)  # 20 ms for each of four fresh examples
    assert leads(Pace(9), clock, [made] * 2) == [1, 4]
    assert leads(Pace(9, read_at_once=2), clock, [made] * 2) == [1, 6]


def test_one_slow_making_is_remembered_for_ten_batches(clock: list[float]) -> None:
    fast, slow = Report(4, 0, 0, 0.0, rest=0.005), Report(4, 0, 0, 0.0, rest=0.035)
    assert leads(Pace(9), clock, [fast, fast, slow, *[fast] * 10]) == [1, 2, *[5] * 10, 2]


def test_one_slow_read_is_not(clock: list[float]) -> None:
    """Behind a heavy tail some reads take a hundred steps. If each made all batches due, workers would have none to read for."""
    fast, slow = Report(1, 3, 0, 0.005, rest=0.001), Report(1, 3, 0, 1.0, rest=0.001)
    assert leads(Pace(9), clock, [fast, fast, slow, fast, fast]) == [1, 2, 2, 2, 2]


def test_it_is_due_no_earlier_than_it_is_requested(clock: list[float]) -> None:
    assert leads(Pace(4), clock, [Report(4, 0, 0, 0.0, rest=1.0)] * 2) == [1, 4]
