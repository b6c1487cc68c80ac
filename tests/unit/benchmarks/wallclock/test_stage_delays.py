import pytest
from wallclock.stages import Basis, delay_per_read, points_to_run
from wallclock_rows import stage

BASIS = Basis(step_seconds=0.01, fresh_seconds=0.008, redone_seconds={"early": 0.009, "middle": 0.0085, "late": 0.001})


def test_the_delay_makes_up_what_reading_lacks_to_r_steps_per_batch() -> None:
    # two workers have 2 x 4 x 10 ms for a batch each, of which reading takes 8 ms anyway; 32 reads share the rest
    assert delay_per_read(4, BASIS, batch_size=32, workers=2) == pytest.approx(0.072 / 32)


def test_one_worker_has_half_the_time() -> None:
    assert delay_per_read(4, BASIS, batch_size=32, workers=1) == pytest.approx(0.032 / 32)


def test_a_source_that_is_slower_already_is_refused_with_the_way_out() -> None:
    slow = Basis(step_seconds=0.001, fresh_seconds=0.008, redone_seconds={})
    with pytest.raises(ValueError, match=r"R = 2 cannot be had with 2 workers: .* takes 8 ms for a batch, .* Choose a larger R"):
        delay_per_read(2, slow, batch_size=32, workers=2)


def test_the_best_point_for_learning_alone_where_it_feeds_the_device() -> None:
    assert points_to_run(["late", "early"], BASIS, workers=2, cores=2) == ["late"]
    # two workers on cores of their own have 20 ms in a step, of which four fifths may be redone
    assert points_to_run(["early", "late"], BASIS, workers=2, cores=4) == ["early"]


def test_else_the_next_best_that_feeds_it_too() -> None:
    assert points_to_run(["early", "middle", "late"], BASIS, workers=2, cores=2) == ["early", "late"]


def test_a_point_that_feeds_only_with_more_workers_on_one_core_than_fit_does_not_feed() -> None:
    assert points_to_run(["early", "late"], BASIS, workers=1, cores=8) == ["early", "late"]


def test_where_no_point_feeds_the_device_the_best_for_learning_alone() -> None:
    busy = Basis(step_seconds=0.0001, fresh_seconds=0.008, redone_seconds=BASIS.redone_seconds)
    assert points_to_run(["early", "late"], busy, workers=2, cores=2) == ["early"]


def test_r_as_measured_is_upstream_over_step() -> None:
    assert stage(upstream_seconds=0.033, step_seconds=0.011).measured_ratio == pytest.approx(3)
