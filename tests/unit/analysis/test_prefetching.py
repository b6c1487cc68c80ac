"""The simulation of a loader's queue, against one that counts milliseconds; and the memory of a queue."""

import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ticking_loader import ticked

from lightning_echo.analysis.prefetch import (
    fits_memory,
    free_shared_bytes,
    is_uneven,
    period_of,
    times_as_long,
    without_chance,
)

RARE = [5] * 7 + [80] + [5] * 8 + [80] + [5] * 16  # two of 33


def times(series, workers, prefetch_factor, step):
    return times_as_long(tuple(series), workers, prefetch_factor, step)


@given(
    st.lists(st.integers(1, 60), min_size=17, max_size=40),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_it_is_what_a_clock_of_milliseconds_shows(series, workers, prefetch_factor, step):
    series = series[: len(series) - (len(series) - 1) % workers]
    longest, second = max(series), sorted(series)[-2]
    series = [second if each == longest else each for each in series]
    rounds = 4 * workers  # in each, a worker gets each batch once
    taken = ticked(series, workers, prefetch_factor, step, 60 * len(series))
    first = len(taken) - 1 - rounds * len(series)
    seconds = (taken[-1] - taken[first]) / (len(taken) - 1 - first)
    expected = seconds / max(statistics.fmean(series) / workers, step)
    assert times(series, workers, prefetch_factor, step) == pytest.approx(expected, rel=0.03)


@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 32), st.integers(1, 100))
def test_of_a_steady_source_prefetching_changes_nothing(milliseconds, workers, prefetch_factor, step):
    assert times([milliseconds] * 40, workers, prefetch_factor, step) == 1.0


@given(st.lists(st.integers(1, 80), min_size=16, max_size=60), st.integers(1, 4), st.integers(1, 80))
@settings(deadline=None)
def test_a_longer_queue_is_not_slower_but_for_what_the_ends_of_a_simulation_are_off(series, workers, step):
    found = [times(series, workers, prefetch_factor, step) for prefetch_factor in (1, 2, 4, 8, 16, 32)]
    for shorter, longer in pairwise(found):
        assert longer <= 1.03 * shorter


def test_rare_long_batches_are_waited_for_unless_the_queue_lasts_as_long():
    """Steps of 10 ms: four batches last 40 ms of 80, sixteen more than 80."""
    short, medium, long = (times(RARE, 2, prefetch_factor, 10) for prefetch_factor in (2, 4, 8))
    assert short > 1.2
    assert short > medium >= long == 1.0
    assert times(RARE, 8, 2, 10) == 1.0, "as many are queued"


def test_a_single_long_batch_may_be_chance_and_few_batches_show_nothing():
    assert without_chance([5, 80, 5, 6]) == [5, 6, 5, 6]
    assert times([5] * 30 + [80], 2, 2, 10) == 1.0
    assert times([5] * 13 + [80] * 2, 2, 2, 10) == 1.0
    assert times([5] * 13 + [80] * 3, 2, 2, 10) > 1.1
    assert times([0] * 20, 2, 2, 10) == 1.0


@pytest.mark.parametrize(
    ("milliseconds", "uneven"),
    [
        (RARE, True),  # (31 * 5 + 2 * 80) / 33 = 9.5
        ([5] * 30 + [80], False),
        ([5, 6] * 20, False),
        ([0.01] * 16 + [0.1] * 4, False),  # less than half a millisecond more
        ([5] * 10 + [80] * 3, False),  # too few to tell
    ],
)
def test_where_rare_batches_take_a_part_of_the_time_a_figure_is_the_mean_of_all(milliseconds, uneven):
    seconds = [each / 1000 for each in milliseconds]
    assert is_uneven(seconds) is uneven
    assert period_of(seconds, 90) == (45 if uneven else 1)
    assert period_of(seconds, 1) == 1


MIB = 2**20


@pytest.mark.parametrize(
    ("batch_bytes", "free", "shared", "fits"),
    [
        (MIB, 160 * MIB, 32 * MIB, True),  # 16 MiB: a tenth of the one, half of the other
        (MIB, 159 * MIB, 32 * MIB, False),
        (MIB, 160 * MIB, 31 * MIB, False),
        (MIB, None, None, True),
        (None, 160 * MIB, 32 * MIB, False),
    ],
)
def test_a_queue_takes_a_small_part_of_the_free_memory(batch_bytes, free, shared, fits):
    assert fits_memory(batch_bytes, 16, free, shared) is fits


def test_free_shared_memory_is_that_of_the_file_system(tmp_path):
    assert free_shared_bytes(str(tmp_path)) > 0
    assert free_shared_bytes(str(tmp_path / "none")) is None
