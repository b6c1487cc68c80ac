"""What a cache could hold, by arithmetic: sizes have a twentieth to spare, and take three fourths of the free memory."""

from dataclasses import replace

import pytest
from measured_stages import CACHED, STAGES

from lightning_echo.analysis.predict import fits_point, fitting_fraction, possible_holds, size_for
from lightning_echo.cache.kept import CacheConfig


def test_without_a_measurement_the_points_say_which_forms_there_are():
    assert possible_holds(STAGES) == ("raw", "loaded")
    assert possible_holds(replace(STAGES, points=STAGES.points[1:])) == ("loaded",)
    assert possible_holds(replace(STAGES, points=("after_read", "after_augmentation"))) == ("raw",)
    assert possible_holds(replace(STAGES, points=("after_augmentation",))) == ()


def test_what_was_measured_says_it_better():
    """A data set with batches of its own may be cut, and is echoed in whole batches."""
    assert possible_holds(replace(CACHED, points=("after_batching",))) == ("raw", "loaded")
    assert possible_holds(replace(CACHED, in_cache={"loaded": CACHED.in_cache["loaded"]})) == ("loaded",)
    assert possible_holds(replace(CACHED, in_cache={})) == ()


@pytest.mark.parametrize("point", CACHED.points)
def test_only_after_reading_are_there_no_loaded_examples(point):
    assert fits_point("raw", point)
    assert fits_point("loaded", point) is (point != "after_read")


@pytest.mark.parametrize(
    ("free", "raw", "loaded"),  # 1.05 and 6.3 GB for all
    [(10**9, 0.71, 0.11), (1.4 * 10**9, 1.0, 0.16), (8.4 * 10**9, 1.0, 1.0), (10**7, 0.0, 0.0), (0, 0.0, 0.0)],
)
def test_what_fits_is_said_in_whole_percent(free, raw, loaded):
    stages = replace(CACHED, free_bytes=free)
    assert (fitting_fraction(stages, "raw"), fitting_fraction(stages, "loaded")) == (raw, loaded)


@pytest.mark.parametrize("unknown", [{"in_cache": None}, {"in_cache": {}}, {"examples": None}, {"free_bytes": None}])
def test_what_was_not_measured_is_not_known(unknown):
    assert fitting_fraction(replace(CACHED, **unknown), "raw") is None


@pytest.mark.parametrize(
    ("fraction", "size", "least"),
    [(1.0, "1002MiB", 1.05e9), (0.5, "501MiB", 0.525e9), (0.0001, "1MiB", 105_000)],
)
def test_a_size_is_one_that_a_cache_accepts_and_no_smaller_than_what_is_held(fraction, size, least):
    assert size_for(CACHED, "raw", fraction) == size
    assert 0 <= CacheConfig(size).bytes_of() - least < 2**20
    assert size_for(CACHED, "loaded", 1.0) == "5.9GiB"
    assert 0 <= CacheConfig("5.9GiB").bytes_of() - 6.3e9 < 0.1 * 2**30
    assert size_for(replace(CACHED, examples=None), "raw", fraction) is None
