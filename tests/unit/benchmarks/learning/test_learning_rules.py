"""The rules, on cases that were worked out by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
from learning.language_model import LANGUAGE_MODEL
from learning.rules import (
    Evaluation,
    Interval,
    best_rate,
    interval_of_median,
    ratios,
    reached_at,
    verdict,
)
from learning_cases import SMALL


def evaluations(*values: float) -> list[Evaluation]:
    return [Evaluation(100 * (i + 1), 10 * (i + 1), value) for i, value in enumerate(values)]


def test_the_target_is_reached_when_the_mean_of_the_window_is_there_not_at_a_first_crossing() -> None:
    assert reached_at(SMALL, evaluations(50, 95, 80, 88, 92, 99)) == Evaluation(500, 50, 92)


def test_a_task_whose_metric_falls_is_reached_from_above() -> None:
    assert reached_at(LANGUAGE_MODEL, evaluations(5.0, 3.5, 3.3, 3.3, 3.3)) == Evaluation(400, 40, 3.3)


def test_the_best_rate_reaches_the_target_on_most_seeds_then_soonest() -> None:
    by_rate = {0.1: [(300, 90), (math.inf, 80)], 0.2: [(500, 90), (600, 90)], 0.4: [(400, 90), (650, 90)]}
    assert best_rate(SMALL, by_rate) == (0.4, 0.8)


def test_rates_that_miss_on_all_seeds_are_told_apart_by_the_last_metric() -> None:
    by_rate = {0.1: [(math.inf, 70)], 0.2: [(math.inf, 80)], 0.4: [(math.inf, 60)]}
    assert best_rate(SMALL, by_rate) == (0.2, None)


def test_a_grid_is_not_extended_for_ever() -> None:
    by_rate = {rate: [(rate * 1000, 90)] for rate in (0.1 / 16, 0.1, 0.2, 0.4)}
    assert best_rate(SMALL, by_rate) == (0.1 / 16, None)
    by_rate = {rate: [(rate * 1000, 90)] for rate in (0.1 / 8, 0.1, 0.2, 0.4)}
    assert best_rate(SMALL, by_rate) == (0.1 / 8, 0.1 / 16)


def test_a_miss_is_infinite_and_two_misses_count_against_the_arm() -> None:
    assert ratios([50, math.inf, 50, math.inf], [100, 100, math.inf, math.inf]) == [0.5, math.inf, 0.0, math.inf]


def test_the_interval_of_the_median_is_that_of_all_resamples() -> None:
    """All 3^3 resamples of three values, by hand, against those that are drawn."""
    medians = sorted(sorted(chosen)[1] for chosen in product((1.0, 2.0, 4.0), repeat=3))
    share_of_lowest = medians.count(1.0) / len(medians)
    assert share_of_lowest > 0.025  # so the interval reaches the lowest value
    assert interval_of_median([4.0, 1.0, 2.0]) == Interval(1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.5, 0.94, "confirmed"),
        (0.5, 0.95, "open"),
        (0.97, 0.99, "open"),
        (1.0, 1.5, "open"),
        (1.01, 1.5, "contradicted"),
        (1.01, math.inf, "contradicted"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert verdict(Interval(low, low, high)) == expected
