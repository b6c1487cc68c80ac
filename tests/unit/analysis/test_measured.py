"""Times with their spread, and the stages of a training: worked out by hand, and refused where they are impossible."""

import math
from dataclasses import replace

import pytest
from measured_stages import MS, STAGES

from lightning_echo.analysis.predict import CachedExample, Spread


def test_a_spread_is_that_of_blocks():
    """Twenty measurements, ten blocks of two: their means are 0.5, 2.5, ... 18.5."""
    found = Spread.of(list(range(20)))
    assert (found.median, found.low, found.high) == (9.5, 2.5, 16.5)


def test_fewer_measurements_than_blocks_are_a_block_each():
    found = Spread.of([4.0, 1.0, 3.0])
    assert (found.median, found.low, found.high) == (3.0, 1.0, 4.0)
    assert Spread.of([3.0]) == Spread.exactly(3.0)


def test_a_block_has_a_whole_period_of_bursts():
    bursts = [3.0, 1.0] * 15  # of two workers that deliver together
    assert Spread.of(bursts, period=2) == Spread.exactly(2.0)
    assert Spread.of([9.0, *bursts], period=2) == Spread.exactly(2.0), "a rest at the beginning does not count"
    assert Spread.of([5.0], period=2) == Spread.exactly(5.0)


def test_a_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one measurement, got none"):
        Spread.of([])


def test_a_part_that_is_taken_out_leaves_no_time_below_zero():
    assert Spread(5.0, 4.0, 7.0).without(Spread(6.0, 5.0, 8.0)) == Spread(0.0, 0.0, 2.0)
    assert Spread(5.0, 4.0, 7.0).plus(Spread.exactly(1.0)) == Spread(6.0, 5.0, 8.0)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ((-1.0, 0.0, 0.0), "median must be a number >= 0, got -1.0"),
        ((0.0, math.nan, 0.0), "low must be a number >= 0, got nan"),
        ((0.0, 0.0, math.inf), "high must be a number >= 0, got inf"),
        (("1", 0.0, 0.0), "median must be a number >= 0, got '1'"),
    ],
)
def test_a_spread_that_is_no_time_is_refused(times, message):
    with pytest.raises(ValueError, match=message):
        Spread(*times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a number >= 1, got 0"),
        ({"workers": -1}, "workers must be a number >= 0, got -1"),
        ({"cores": 0}, "cores must be a number >= 1, got 0"),
        ({"contention": math.nan}, "contention must be a number >= 0, got nan"),
        ({"examples": -1}, "examples must be a number >= 0, got -1"),
        ({"free_bytes": math.nan}, "free_bytes must be a number >= 0, got nan"),
        ({"step": Spread.exactly(0.0)}, "step must take time"),
        ({"points": ("after_batching", "nowhere")}, "points must be insertion points, got 'nowhere'"),
    ],
)
def test_impossible_stages_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(STAGES, **change)


def test_stages_may_be_measured_without_workers():
    assert replace(STAGES, workers=0, step=Spread.exactly(1 * MS)).workers == 0


def test_an_example_in_a_cache_takes_some_bytes():
    with pytest.raises(ValueError, match="bytes must be a number >= 1, got 0"):
        CachedExample(0, Spread.exactly(0.0))
