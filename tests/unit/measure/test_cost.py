"""The cost model against its formulas (docstring of the module), written down once more: one per kind of point."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_echo.measure.control import PipelineCosts

POINTS = ("before_augmentation", "after_augmentation", "after_batching", "after_transfer")
EXAMPLE_POINTS = POINTS[:2]

seconds = st.floats(0, 1).map(lambda value: round(value, 4))
some_seconds = st.floats(0.001, 1).map(lambda value: round(value, 4))
factors = st.floats(1, 20)
shares = st.floats(0, 0.9)
pipelines = st.builds(PipelineCosts, st.sampled_from(POINTS), some_seconds, seconds, seconds, some_seconds, st.integers(0, 8))


def host_of(costs, factor):
    """``h(e)``, host time per batch; with no workers the main process does the same work."""
    workers = costs.workers or 1
    if costs.insertion_point in POINTS[2:]:
        return (costs.source_seconds + costs.rest_seconds + costs.collate_seconds) / (workers * factor)
    return (costs.source_seconds / factor + costs.rest_seconds + costs.collate_seconds) / workers


def step_of(costs, factor):
    """``T(e)``, time per step."""
    if costs.workers == 0:
        return host_of(costs, factor) + costs.device_seconds
    return max(host_of(costs, factor), costs.device_seconds)


@given(pipelines, factors)
def test_host_time_step_time_idle_fraction_and_speedup_are_those_of_the_formulas(costs, factor):
    step = step_of(costs, factor)
    assert costs.host_seconds(factor) == pytest.approx(host_of(costs, factor))
    assert costs.step_seconds(factor) == pytest.approx(step)
    assert costs.idle_fraction(factor) == pytest.approx((step - costs.device_seconds) / step, abs=1e-9)
    assert costs.speedup(factor) == pytest.approx(step_of(costs, 1) / step)


@given(pipelines)
def test_the_papers_upstream_time_is_what_a_fresh_batch_takes_before_the_echo(costs):
    upstream = costs.source_seconds
    if costs.insertion_point in POINTS[2:]:
        upstream += costs.rest_seconds + costs.collate_seconds
    assert costs.upstream_seconds == pytest.approx(upstream / (costs.workers or 1))
    assert costs.upstream_seconds == pytest.approx(costs.reused_seconds / (costs.workers or 1))
    whole = costs.source_seconds + costs.rest_seconds + costs.collate_seconds
    assert costs.reused_seconds + costs.redone_seconds == pytest.approx(whole)


@given(pipelines, factors, factors)
def test_more_echoing_never_makes_a_step_longer(costs, one, other):
    less, more = sorted((one, other))
    assert costs.step_seconds(more) <= costs.step_seconds(less)
    assert costs.idle_fraction(more) <= costs.idle_fraction(less)
    assert 1 <= costs.speedup(less) <= costs.speedup(more) + 1e-12


@given(st.sampled_from(EXAMPLE_POINTS), some_seconds, seconds, seconds, some_seconds, st.integers(1, 8))
def test_the_feeding_factor_of_an_example_point_is_the_formula_for_it(point, source, rest, collate, device, workers):
    room = workers * device - rest - collate
    assume(abs(room) > 1e-6)
    factor = PipelineCosts(point, source, rest, collate, device, workers).feeding_factor()
    assert factor == (pytest.approx(max(1, source / room)) if room > 0 else math.inf)


@given(some_seconds, seconds, seconds, some_seconds, st.integers(1, 8))
def test_whole_batches_can_always_be_echoed_often_enough(source, rest, collate, device, workers):
    factor = PipelineCosts("after_batching", source, rest, collate, device, workers).feeding_factor()
    assert factor == pytest.approx(max(1, (source + rest + collate) / (workers * device)))


@given(pipelines, shares)
def test_the_feeding_factor_is_the_smallest_one_whose_idle_fraction_is_not_above_the_share(costs, share):
    factor = costs.feeding_factor(share)

    def idle(factor):
        step = step_of(costs, factor)
        return 1 - costs.device_seconds / step

    if math.isinf(factor):
        assert idle(1e9) > share - 1e-6
    else:
        assert factor >= 1
        assert idle(factor) <= share + 1e-9
        assert factor == 1 or idle(max(1, factor * 0.999)) > share


@given(pipelines, shares, shares)
def test_who_tolerates_more_idle_time_needs_no_larger_factor(costs, one, other):
    less, more = sorted((one, other))
    assert costs.feeding_factor(more) <= costs.feeding_factor(less)


def test_without_workers_the_device_waits_at_any_factor():
    costs = PipelineCosts("after_augmentation", 0.1, 0.0, 0.0, device_seconds=0.1, workers=0)
    assert costs.step_seconds(1) == pytest.approx(0.2)
    assert costs.idle_fraction(1000) > 0
    assert costs.feeding_factor() == math.inf
    assert costs.feeding_factor(0.2) == pytest.approx(0.1 / (0.1 / 0.8 - 0.1))  # a fifth may be waited: 25 ms beside 100
    redone = PipelineCosts("after_augmentation", 0.1, 0.0, 0.03, device_seconds=0.1, workers=0)
    assert redone.feeding_factor(0.2) == math.inf


def test_what_is_redone_may_starve_the_device_by_itself():
    assert PipelineCosts("before_augmentation", 0.1, 0.03, 0.01, 0.02, workers=2).feeding_factor() == math.inf  # just no room
    assert PipelineCosts("before_augmentation", 0.1, 0.03, 0.01, 0.03, workers=2).feeding_factor() == pytest.approx(5)


def test_where_nothing_is_read_nothing_has_to_be_echoed():
    assert PipelineCosts("after_augmentation", 0.0, 0.0, 0.01, 0.01, workers=1).feeding_factor() == 1
    assert PipelineCosts("after_augmentation", 0.0, 0.0, 0.02, 0.01, workers=1).feeding_factor() == math.inf
    nothing = PipelineCosts("after_augmentation", 0.0, 0.0, 0.0, 0.0, workers=1)
    assert (nothing.idle_fraction(1), nothing.speedup(2), nothing.feeding_factor()) == (0, 1, 1)


@given(pipelines, st.floats(0.1, 10), factors)
def test_a_slower_host_takes_so_many_times_as_long_and_the_device_does_not(costs, ratio, factor):
    slower = costs.slower(ratio)
    assert slower.host_seconds(factor) == pytest.approx(ratio * host_of(costs, factor))
    assert (slower.device_seconds, slower.workers) == (costs.device_seconds, costs.workers)
    assert slower.insertion_point == costs.insertion_point


@given(some_seconds, seconds, seconds, some_seconds, st.integers(0, 8), factors)
def test_each_later_point_reuses_more_of_the_same_work(source, rest, collate, device, workers, factor):
    first = PipelineCosts("before_augmentation", source, rest, collate, device, workers)
    examples, batches = first.at_later_points()
    assert (examples.insertion_point, batches.insertion_point) == ("after_augmentation", "after_batching")
    used = workers or 1
    assert examples.host_seconds(factor) == pytest.approx(((source + rest) / factor + collate) / used)
    assert batches.host_seconds(factor) == pytest.approx((source + rest + collate) / factor / used)
    assert first.host_seconds(1) == pytest.approx(examples.host_seconds(1))
    assert first.host_seconds(1) == pytest.approx(batches.host_seconds(1))
    assert examples.at_later_points() == [batches]
    assert batches.at_later_points() == []


@given(some_seconds, seconds, seconds, some_seconds, st.integers(0, 8), factors)
def test_after_read_only_reading_is_reused_and_the_points_of_which_the_cost_is_known_follow(
    source, rest, collate, device, workers, factor
):
    first = PipelineCosts("after_read", source, rest, collate, device, workers)
    assert first.host_seconds(factor) == pytest.approx((source / factor + rest + collate) / (workers or 1))
    # How much of the rest is decoding, which before_augmentation would reuse, nobody has measured.
    assert (
        first.at_later_points() == PipelineCosts("before_augmentation", source, rest, collate, device, workers).at_later_points()
    )


@given(some_seconds, st.floats(0.01, 0.99), factors)
def test_a_pipeline_known_only_by_its_waiting_is_one_that_reuses_whole_batches(step, idle, factor):
    """At the factor in force it must predict what was measured; twice as many uses then halve the host's time."""
    costs = PipelineCosts.of_waiting(step, idle, factor)
    assert costs.step_seconds(factor) == pytest.approx(step)
    assert costs.idle_fraction(factor) == pytest.approx(idle)
    assert costs.host_seconds(2 * factor) == pytest.approx(step / 2)
    assert costs.feeding_factor() == pytest.approx(factor / (1 - idle))


@given(some_seconds, st.floats(0.01, 0.99), factors)
def test_where_loading_and_training_take_turns_the_host_takes_what_is_waited(step, idle, factor):
    costs = PipelineCosts.of_waiting(step, idle, factor, workers=0)
    assert costs.step_seconds(factor) == pytest.approx(step)
    assert costs.idle_fraction(factor) == pytest.approx(idle)
    assert costs.step_seconds(2 * factor) == pytest.approx(step * (1 - idle / 2))
    assert PipelineCosts.of_waiting(step, idle, factor, workers=7) == PipelineCosts.of_waiting(step, idle, factor)
