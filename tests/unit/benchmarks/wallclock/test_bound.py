import pytest
from wallclock.bound import best_factor, speedup_bound

# 3,200 fresh examples at 5 ms each are 16 s; a batch of 32 takes 160 ms to read, a step 40 ms: R = 4
COSTS = {"upstream_seconds": 0.005, "step_seconds": 0.04, "batch_size": 32}


def test_while_reading_is_slower_a_step_takes_as_long_as_its_share_of_fresh_examples() -> None:
    assert speedup_bound(3200, 125, 2, **COSTS) == pytest.approx(16 / (125 * 0.080))


def test_beyond_r_a_step_takes_its_own_time() -> None:
    assert speedup_bound(3200, 250, 8, **COSTS) == pytest.approx(16 / (250 * 0.040))


def test_at_r_both_are_equal() -> None:
    assert speedup_bound(3200, 200, 4, **COSTS) == pytest.approx(2.0)


def test_without_echoing_and_with_the_baselines_steps_it_is_1() -> None:
    assert speedup_bound(3200, 100, 1, **COSTS) == pytest.approx(1.0)


def test_learning_that_needs_no_fresh_examples_more_allows_r() -> None:
    assert speedup_bound(3200, 100, 4, **COSTS) == pytest.approx(4.0)


def test_a_factor_that_misses_the_target_allows_nothing() -> None:
    assert speedup_bound(3200, float("inf"), 4, **COSTS) == 0


def test_the_best_factor_is_that_of_the_median_seed_not_of_the_luckiest() -> None:
    assert best_factor({2: [1.5, 1.5, 1.5], 4: [9.0, 1.0, 1.0], 8: [1.4, 1.4, 1.4]}) == 2
