"""The cost model against its formulas (docstring of the module), written down once more: one per kind of point."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_echo.measure.control import PipelineCosts

EXAMPLE_POINTS = ("after_read", "before_augmentation", "after_augmentation")
POINTS = (*EXAMPLE_POINTS, "after_batching", "after_transfer")

seconds = st.floats(0, 1).map(lambda value: round(value, 4))
some_seconds = st.floats(0.001, 1).map(lambda value: round(value, 4))
factors = st.floats(1, 20)
pipelines = st.builds(PipelineCosts, st.sampled_from(POINTS), some_seconds, seconds, seconds, some_seconds, st.integers(0, 8))


def host_of(costs, factor):
    """``h(e)``, host time per batch; with no workers the main process does the same work."""
    source, rest, collate = costs.source_seconds, costs.rest_seconds, costs.collate_seconds
    if costs.insertion_point not in EXAMPLE_POINTS:
        source, rest, collate = source + rest + collate, 0.0, 0.0
    return (source / factor + rest + collate) / (costs.workers or 1)


def step_of(costs, factor):
    """``T(e)``, time per step."""
    if costs.workers == 0:
        return host_of(costs, factor) + costs.device_seconds
    return max(host_of(costs, factor), costs.device_seconds)


@pytest.mark.parametrize(
    ("idle", "no_request", "keeps_up"),
    [
        (0.2, 0.6, True),  # 4 ms of 10 for a batch, a step of 8
        (0.2, 0.2, True),  # both 8
        (0.2, 0.15, False),  # 8.5 ms: what workers do is too slow, although they have nothing to do at times
        (0.5, 0.4, False),
        (0.04, 0.05, False),  # a glance or two may be chance
        (0.2, 0.0, False),
    ],
)
def test_workers_that_have_nothing_to_do_keep_up_if_the_rest_of_their_time_feeds_the_device(idle, no_request, keeps_up):
    costs = PipelineCosts.of_waiting(0.01, idle, 1.0, workers=2, no_request=no_request)
    assert costs.keeps_up is keeps_up
    assert (costs.host_seconds(1), costs.device_seconds) == pytest.approx((0.01 * (1 - no_request), 0.01 * (1 - idle)))
    assert costs.from_waiting


@given(pipelines, factors, st.floats(0.1, 10))
def test_host_time_step_time_idle_fraction_and_speedup_are_those_of_the_formulas(costs, factor, ratio):
    step = step_of(costs, factor)
    assert costs.host_seconds(factor) == pytest.approx(host_of(costs, factor))
    assert costs.step_seconds(factor) == pytest.approx(step)
    assert costs.idle_fraction(factor) == pytest.approx((step - costs.device_seconds) / step, abs=1e-9)
    assert costs.speedup(factor) == pytest.approx(step_of(costs, 1) / step)
    assert costs.upstream_seconds == pytest.approx(costs.reused_seconds / (costs.workers or 1))
    assert costs.reused_seconds == pytest.approx(host_of(costs, 1) * (costs.workers or 1) - costs.redone_seconds, abs=1e-9)
    slower = costs.slower(ratio)
    assert slower.host_seconds(factor) == pytest.approx(ratio * host_of(costs, factor))
    assert (slower.device_seconds, slower.workers) == (costs.device_seconds, costs.workers)


@given(pipelines, st.floats(0, 0.9))
def test_the_feeding_factor_is_the_smallest_one_whose_idle_fraction_is_not_above_the_share(costs, share):
    factor = costs.feeding_factor(share)

    def idle(factor):
        return 1 - costs.device_seconds / step_of(costs, factor)

    if math.isinf(factor):
        assert idle(1e9) > share - 1e-6
    else:
        assert factor >= 1
        assert idle(factor) <= share + 1e-9
        assert factor == 1 or idle(max(1, factor * 0.999)) > share


@pytest.mark.parametrize(
    ("costs", "share", "factor"),
    [
        (("after_augmentation", 0.1, 0.0, 0.0, 0.1, 0), 0.0, math.inf),  # without workers the device waits at any factor
        (("after_augmentation", 0.1, 0.0, 0.0, 0.1, 0), 0.2, 0.1 / (0.1 / 0.8 - 0.1)),  # 25 ms may be waited beside 100
        (("after_augmentation", 0.1, 0.0, 0.03, 0.1, 0), 0.2, math.inf),
        (("before_augmentation", 0.1, 0.03, 0.01, 0.02, 2), 0.0, math.inf),  # just no room
        (("before_augmentation", 0.1, 0.03, 0.01, 0.03, 2), 0.0, 5),
        (("after_augmentation", 0.0, 0.0, 0.01, 0.01, 1), 0.0, 1),
        (("after_augmentation", 0.0, 0.0, 0.02, 0.01, 1), 0.0, math.inf),
        (("after_augmentation", 0.0, 0.0, 0.0, 0.0, 1), 0.0, 1),
    ],
)
def test_feeding_factors_by_hand(costs, share, factor):
    assert PipelineCosts(*costs).feeding_factor(share) == pytest.approx(factor)


def test_each_later_point_reuses_more_of_the_same_work():
    first = PipelineCosts("before_augmentation", 0.1, 0.03, 0.01, 0.02, 2)
    examples, batches = later = first.at_later_points()
    assert [each.insertion_point for each in later] == ["after_augmentation", "after_batching"]
    assert examples.host_seconds(4) == pytest.approx(((0.1 + 0.03) / 4 + 0.01) / 2)
    assert batches.host_seconds(4) == pytest.approx((0.1 + 0.03 + 0.01) / 4 / 2)
    assert (examples.at_later_points(), batches.at_later_points()) == ([batches], [])
    # How much of the rest is decoding, which before_augmentation would reuse, nobody has measured.
    assert PipelineCosts("after_read", 0.1, 0.03, 0.01, 0.02, 2).at_later_points() == later


@settings(max_examples=20)
@given(some_seconds, st.floats(0.01, 0.99), factors)
def test_a_pipeline_known_only_by_its_waiting_is_one_that_reuses_whole_batches(step, idle, factor):
    """At the factor in force it must predict what was measured; twice as many uses then halve the host's time."""
    costs = PipelineCosts.of_waiting(step, idle, factor)
    in_turn = PipelineCosts.of_waiting(step, idle, factor, workers=0)
    for each in (costs, in_turn):
        assert each.step_seconds(factor) == pytest.approx(step)
        assert each.idle_fraction(factor) == pytest.approx(idle)
    assert costs.host_seconds(2 * factor) == pytest.approx(step / 2)
    assert costs.feeding_factor() == pytest.approx(factor / (1 - idle))
    assert in_turn.step_seconds(2 * factor) == pytest.approx(step * (1 - idle / 2))
    assert PipelineCosts.of_waiting(step, idle, factor, workers=7) == costs
