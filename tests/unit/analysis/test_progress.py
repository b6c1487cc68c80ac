"""What is said of the time: with a clock of the test's own."""

from __future__ import annotations

from lightning_echo.analysis.analyzer import Progress


class Clock:
    """Shows the time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(durations: list[float], **of_last: int) -> list[str]:
    """Returns what is said of phases that take so long, of an analysis of 70 seconds and at most seven phases."""
    clock, lines = Clock(), list[str]()
    progress = Progress(70.0, 7, lines.append, clock)
    for duration in durations:
        progress.phase("reading")
        clock.now += duration
    progress.phase("the last", **of_last)
    return lines


def test_before_a_phase_has_ended_each_may_take_its_share() -> None:
    assert told([]) == ["the last (0 s, about 70 s left)"]


def test_the_first_phase_does_not_tell_how_long_the_others_take() -> None:
    assert told([500.0])[-1] == "the last (500 s, about 60 s left)"


def test_later_the_mean_of_the_phases_before_is_taken_for_those_to_come() -> None:
    assert told([8.0, 1.0, 3.0])[-1] == "the last (12 s, about 8 s left)"  # four more, this one included, of two seconds each


def test_if_the_number_of_phases_to_come_is_known_it_counts() -> None:
    assert told([8.0, 1.0, 3.0], to_come=2)[-1] == "the last (12 s, about 4 s left)"


def test_nothing_is_said_of_the_time_left_if_it_is_not_known() -> None:
    assert told([8.0, 1.0, 3.0], to_come=0)[-1] == "the last (12 s)"


def test_more_phases_than_expected_are_said_to_be_the_last() -> None:
    assert told([2.0] * 9)[-1] == "the last (18 s, about 2 s left)"
