import pytest
from wallclock.stages import Basis, delay_per_read
from wallclock_rows import stage

BASIS = Basis(step_seconds=0.01, fresh_seconds=0.008)


def test_the_delay_makes_up_what_reading_lacks_to_r_steps_per_batch() -> None:
    # two workers have 2 x 4 x 10 ms for a batch each, of which reading takes 8 ms anyway; 32 reads share the rest
    assert delay_per_read(4, BASIS, batch_size=32, workers=2) == pytest.approx(0.072 / 32)


def test_one_worker_has_half_the_time() -> None:
    assert delay_per_read(4, BASIS, batch_size=32, workers=1) == pytest.approx(0.032 / 32)


def test_a_source_that_is_slower_already_is_refused_with_the_way_out() -> None:
    slow = Basis(step_seconds=0.001, fresh_seconds=0.008)
    with pytest.raises(ValueError, match=r"R = 2 cannot be had with 2 workers: .* takes 8 ms for a batch, .* Choose a larger R"):
        delay_per_read(2, slow, batch_size=32, workers=2)


def test_r_as_measured_is_upstream_over_step() -> None:
    assert stage(4).measured_ratio == pytest.approx(4)
